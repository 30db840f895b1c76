package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/rig/image"
)

// images returns the store and the chroot, once. Where they cannot be had at all
// (no root, no mirror, not amd64) the test is skipped and says why; anything else
// fails it.
func images(t *testing.T) (*image.Store, *image.Tools) {
	t.Helper()
	s, err := image.Open(image.Options{Log: func(line string) { fmt.Fprintln(os.Stderr, "rig:", line) }})
	var tools *image.Tools
	if err == nil {
		tools, err = s.Tools(t.Context())
	}
	if image.Unavailable(err) {
		t.Skip("no guests here: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s, tools
}

// start starts a guest for a test, which fails with whatever the guest's kernel
// reported.
func start(t *testing.T, kernel image.Kernel, change func(*Options)) *Guest {
	t.Helper()
	s, tools := images(t)
	boot, err := s.Boot(t.Context(), kernel)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Name: "alpha", Tools: tools, Boot: boot, Dir: t.TempDir()}
	if change != nil {
		change(&o)
	}
	begun := time.Now()
	g, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: agent after %.1f s, of which the kernel took %.1f s", boot.Release, time.Since(begun).Seconds(), g.BootTime().Seconds())
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// within bounds a call that is to end soon, on a machine that may be busy.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// cable returns two network interfaces that are joined.
func cable(t *testing.T) []NIC {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return []NIC{
		{MAC: "52:54:00:00:00:01", Wire: os.NewFile(uintptr(fds[0]), "eth0")},
		{MAC: "52:54:00:00:00:02", Wire: os.NewFile(uintptr(fds[1]), "eth1")},
	}
}

func sh(t *testing.T, g *Guest, script string) string {
	t.Helper()
	out, err := g.Sh(within(t, 2*time.Minute), script)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

func TestBothKernelsBoot(t *testing.T) {
	for _, kernel := range []image.Kernel{image.Backport, image.Stable} {
		t.Run(string(kernel), func(t *testing.T) {
			g := start(t, kernel, nil)
			if got := sh(t, g, "uname -r; hostname; cat /proc/1/comm"); got != g.o.Boot.Release+"\nalpha\ninit" {
				t.Errorf("uname, host name and process 1 are %q", got)
			}
			// Everything that a guest is promised is there and runs.
			sh(t, g, `for m in thunderbolt thunderbolt_net rdma_rxe rdma_ucm nf_tables sch_netem veth; do modprobe $m; done
				ip -V; tc -V; rdma -V; ethtool --version; iperf3 -v; nft --version; tcpdump --version; lspci --version; ps; pgrep -x sh; unshare -n true
				ib_write_bw --version | grep Version
				ibv_devices; nft add table inet x; nft list ruleset`)
			if err := g.Verify(within(t, time.Minute)); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAGuestDoesWhatItIsAsked(t *testing.T) {
	g := start(t, image.Backport, func(o *Options) {
		o.Files = []image.File{{Path: "/etc/rig/laid-over", Mode: 0o600, Data: []byte("here")}}
		o.ClockOffset = -72 * time.Hour
		o.Modules = []string{"dummy"}
		o.CommandLine = []string{"rig.test=1"}
		o.NICs = cable(t)
	})

	t.Run("network interfaces", func(t *testing.T) {
		sh(t, g, `ip netns add far; ip link set eth1 netns far
			ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up; ip -n far addr add 10.0.0.2/24 dev eth1; ip -n far link set eth1 up
			ping -c 3 -W 5 -s 1400 10.0.0.2`)
	})

	t.Run("options", func(t *testing.T) {
		if got := sh(t, g, "cat /etc/rig/laid-over; stat -c %a /etc/rig/laid-over; grep -c '^dummy ' /proc/modules; grep -o rig.test=1 /proc/cmdline"); got != "here600\n1\nrig.test=1" {
			t.Errorf("%q", got)
		}
		seconds, err := strconv.ParseInt(sh(t, g, "date +%s"), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if off := time.Until(time.Unix(seconds, 0)) + 72*time.Hour; off.Abs() > 2*time.Minute {
			t.Errorf("the clock is %v from three days ago", off)
		}
	})

	t.Run("exit status", func(t *testing.T) {
		for script, want := range map[string]ExitError{
			"exit 0":                  {},
			"exit 7":                  {Code: 7},
			"echo no >&2; exit 255":   {Code: 255, Stderr: "no"},
			"kill -TERM $$; sleep 10": {Code: -1, Signal: int(syscall.SIGTERM)},
		} {
			_, err := g.Run(within(t, time.Minute), "sh", "-c", script)
			if want.Code == 0 {
				if err != nil {
					t.Errorf("%s: %v", script, err)
				}
				continue
			}
			var exit *ExitError
			if !errors.As(err, &exit) || exit.Code != want.Code || exit.Signal != want.Signal || exit.Stderr != want.Stderr {
				t.Errorf("%s: %v", script, err)
			}
		}
		if _, err := g.Run(within(t, time.Minute), "no-such-program"); !fault.Is(err, fault.LabFailed) || !strings.Contains(err.Error(), "no-such-program") {
			t.Errorf("a program that is not there: %v", err)
		}
	})

	t.Run("streams", func(t *testing.T) {
		var out, errs bytes.Buffer
		sent := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
		p, err := g.Start(within(t, time.Minute), Command{
			Args: []string{"sh", "-c", `pwd >&2; echo "$RIG" >&2; cat`}, Env: []string{"RIG=yes and no"}, Dir: "/tmp",
			Stdin: bytes.NewReader(sent), Stdout: &out, Stderr: &errs,
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(out.Bytes(), sent) || errs.String() != "/tmp\nyes and no\n" {
			t.Errorf("%d of %d bytes came back, and %q", out.Len(), len(sent), errs.String())
		}
	})

	t.Run("output comes while it runs, and a kill ends the whole group", func(t *testing.T) {
		r, w := io.Pipe()
		p, err := g.Start(within(t, time.Minute), Command{Args: []string{"sh", "-c", "sleep 1000 & echo $!; wait"}, Stdout: w})
		if err != nil {
			t.Fatal(err)
		}
		line := make([]byte, 32)
		n, err := r.Read(line)
		if err != nil {
			t.Fatal(err)
		}
		child := strings.TrimSpace(string(line[:n]))
		sh(t, g, "test -d /proc/"+child)
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, r) }()
		var exit *ExitError
		if err := p.Wait(); !errors.As(err, &exit) || exit.Signal != int(syscall.SIGKILL) {
			t.Errorf("%v", err)
		}
		// It is reaped by process 1, a moment later.
		sh(t, g, "for i in $(seq 100); do test -d /proc/"+child+" || exit 0; sleep 0.1; done; exit 1")
	})

	t.Run("the end of the context kills", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p, err := g.Start(ctx, Command{Args: []string{"sleep", "4242"}})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := p.Wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		sh(t, g, "for i in $(seq 100); do pgrep -x sleep || exit 0; sleep 0; done; exit 1")
	})

	t.Run("a background process holds up nobody", func(t *testing.T) {
		begun := time.Now()
		sh(t, g, "sleep 1000 & echo started")
		if d := time.Since(begun); d > 30*time.Second {
			t.Errorf("it took %v", d)
		}
		sh(t, g, "pkill sleep")
	})

	t.Run("many at once", func(t *testing.T) {
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				out, err := g.Run(t.Context(), "echo", strconv.Itoa(i))
				if err != nil || strings.TrimSpace(out) != strconv.Itoa(i) {
					t.Errorf("%d: %q %v", i, out, err)
				}
			})
		}
		all.Wait()
	})

	t.Run("a terminal", func(t *testing.T) {
		var out bytes.Buffer
		p, err := g.Start(within(t, time.Minute), Command{
			Args: []string{"sh", "-c", "stty size; tty; read x; echo got $x"}, Terminal: true, Columns: 101, Rows: 33,
			Stdin: strings.NewReader("word\n"), Stdout: &out,
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"33 101", "/dev/pts/", "got word"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("no %q in %q", want, out.String())
			}
		}
	})

	t.Run("files", func(t *testing.T) {
		content := make([]byte, 3<<20+17)
		for i := range content {
			content[i] = byte(i * 7 >> 3)
		}
		ctx := within(t, time.Minute)
		if err := g.Push(ctx, bytes.NewReader(content), "/root/deep/er/file", File{Mode: 0o751, Sync: true}); err != nil {
			t.Fatal(err)
		}
		if got, want := sh(t, g, "sha256sum </root/deep/er/file; stat -c %a /root/deep/er/file; ls -A /root/deep/er"), fmt.Sprintf("%x  -\n751\nfile", sha256.Sum256(content)); got != want {
			t.Errorf("there is %q, want %q", got, want)
		}
		var back bytes.Buffer
		if err := g.Pull(ctx, "/root/deep/er/file", &back); err != nil || !bytes.Equal(back.Bytes(), content) {
			t.Errorf("%d bytes came back: %v", back.Len(), err)
		}
		to := filepath.Join(t.TempDir(), "file")
		if err := g.PullFile(ctx, "/root/deep/er/file", to); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(to); err != nil || !bytes.Equal(b, content) {
			t.Errorf("%d bytes in the file: %v", len(b), err)
		}
		if err := g.PullFile(ctx, "/root/nothing", to); err == nil || !strings.Contains(err.Error(), "no such file") {
			t.Errorf("a file that is not there: %v", err)
		}
		if left, err := os.ReadDir(filepath.Dir(to)); err != nil || len(left) != 1 {
			t.Errorf("left behind: %v %v", left, err)
		}
		if err := g.Push(ctx, bytes.NewReader(content), "/proc/nothing", File{}); err == nil {
			t.Error("a file was written to /proc")
		}
	})

	t.Run("the kernel's log", func(t *testing.T) {
		sh(t, g, "echo '<5>rig test: a word' >/dev/kmsg")
		r, err := g.WaitLog(within(t, time.Minute), 0, regexp.MustCompile(`^rig test: a word$`))
		if err != nil || r.Level != 5 || r.Facility != 1 || r.Time <= 0 {
			t.Fatalf("%+v %v", r, err)
		}
		log := g.Dmesg()
		if len(log) < 100 || !strings.HasPrefix(log[0].Text, "Linux version "+g.o.Boot.Release) {
			t.Errorf("%d records, the first is %v", len(log), log[0])
		}
		for i, r := range log[1:] {
			if r.Sequence != log[i].Sequence+1 {
				t.Errorf("record %d comes after %d", r.Sequence, log[i].Sequence)
			}
		}
		if _, err := g.WaitLog(within(t, time.Second), r.Sequence+1, regexp.MustCompile(`^rig test: a word$`)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a record that will not come: %v", err)
		}
	})

	t.Run("a pause", func(t *testing.T) {
		ctx := within(t, time.Minute)
		if err := g.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		if out, err := g.Run(within(t, time.Second), "true"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a guest that stands still ran something: %q %v", out, err)
		}
		if err := g.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		sh(t, g, "true")
	})

	t.Run("a reboot", func(t *testing.T) {
		before := sh(t, g, "cat /proc/sys/kernel/random/boot_id; touch /root/in-memory")
		pid := g.machine.cmd.Process.Pid
		p, err := g.Start(t.Context(), Command{Args: []string{"sleep", "1000"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Reboot(within(t, 2*time.Minute)); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err == nil {
			t.Error("what ran before the reboot ended well")
		}
		if after := sh(t, g, "cat /proc/sys/kernel/random/boot_id; ls /root"); after == before || strings.Contains(after, "in-memory") {
			t.Errorf("before %q, after %q", before, after)
		}
		if g.machine.cmd.Process.Pid != pid {
			t.Error("QEMU was started anew")
		}
	})

	t.Run("the agent ends", func(t *testing.T) {
		// It is started again, and found again, in the same boot.
		_, err := g.Run(within(t, time.Minute), "pkill", "-9", "-f", "guestd agent")
		if err == nil {
			t.Error("an answer came of an agent that was killed")
		}
		err = g.wait(within(t, time.Minute), "wait for the agent of", func() (bool, error) { return g.session != nil, nil })
		if err != nil {
			t.Fatal(err)
		}
		sh(t, g, "true")
	})

	if err := g.Verify(within(t, time.Minute)); err != nil {
		t.Error(err)
	}
	t.Run("off", func(t *testing.T) {
		if err := g.PowerOff(within(t, time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := g.Run(t.Context(), "true"); err == nil {
			t.Error("a guest that is off ran something")
		}
		if err := g.Kill(); err != nil {
			t.Errorf("kill a guest that is off: %v", err)
		}
	})
}

// What was synced is there after a power cut, what was not is lost.
func TestAPowerCutLosesWhatWasNotSynced(t *testing.T) {
	_, tools := images(t)
	disk := filepath.Join(t.TempDir(), "disk")
	if err := tools.CreateDisk(t.Context(), disk, "", 64<<20); err != nil {
		t.Fatal(err)
	}
	g := start(t, image.Backport, func(o *Options) { o.Disks, o.IOMMU = []string{disk}, true })
	if got := sh(t, g, "ls /sys/class/iommu"); !strings.Contains(got, "dmar") {
		t.Errorf("the IOMMUs are %q", got)
	}
	const mount = "modprobe ext4; mount -t ext4 /dev/vda /mnt; "
	sh(t, g, "mke2fs -q -t ext4 /dev/vda; "+mount+"echo kept >/mnt/synced; sync; echo lost >/mnt/unsynced; grep -q lost /mnt/unsynced")
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := g.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, g, mount+"cat /mnt/synced; cat /mnt/unsynced 2>/dev/null || true"); got != "kept" {
		t.Errorf("after the power cut there is %q", got)
	}
	if err := g.Verify(within(t, time.Minute)); err != nil {
		t.Error(err)
	}
}

// What a kernel reports of itself fails the guest, with its text; what is
// allowed does not.
func TestReportsOfTheKernelAreNoticed(t *testing.T) {
	s, _ := images(t)
	modules, err := s.Modules(t.Context(), image.Backport)
	if err != nil {
		t.Fatal(err)
	}
	g := start(t, image.Backport, nil)
	ko := filepath.Join(modules, "rigfault.ko")
	provoke := func(t *testing.T, kind string) {
		t.Helper()
		if err := g.PushFile(within(t, time.Minute), ko, "/root/rigfault.ko"); err != nil {
			t.Fatal(err)
		}
		if _, err := g.Run(within(t, 20*time.Second), "insmod", "/root/rigfault.ko", "kind="+kind); err == nil {
			t.Fatal("the module stayed")
		}
	}
	if err := g.Verify(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	provoke(t, "warn")
	err = g.Verify(within(t, time.Minute))
	if err == nil {
		t.Fatal("a WARN passed")
	}
	list := g.Reports()
	if len(list) != 1 || list[0].Kind != Warning || !strings.Contains(list[0].Text, "rigfault_warn") || !strings.Contains(list[0].Text, "Call Trace") || !strings.Contains(list[0].Text, "end trace") {
		t.Errorf("%+v", list)
	}
	if !strings.Contains(err.Error(), "rigfault_init") {
		t.Errorf("the error does not say where: %v", err)
	}
	g.o.Allow = []Allowance{{Pattern: regexp.MustCompile(`rigfault_warn`), Reference: "rigfault.c"}}
	if err := g.Verify(within(t, time.Minute)); err != nil {
		t.Errorf("what is allowed fails: %v", err)
	}
	provoke(t, "oops")
	if err := g.Verify(within(t, time.Minute)); err == nil || !strings.Contains(err.Error(), "NULL pointer") {
		t.Errorf("an oops: %v", err)
	}

	// A panic ends the guest; what it said is kept, and a later boot does not
	// make it good.
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := g.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := g.Start(t.Context(), Command{Args: []string{"sh", "-c", "echo c >/proc/sysrq-trigger"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err == nil {
		t.Error("a command ended well in a kernel that crashed")
	}
	if err := g.Wait(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := g.Verify(within(t, time.Minute)); err == nil || !strings.Contains(err.Error(), "Kernel panic - not syncing: sysrq triggered crash") {
		t.Errorf("a panic: %v", err)
	}
}

func TestTheSystemdImage(t *testing.T) {
	s, tools := images(t)
	base, err := s.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(t.TempDir(), "disk")
	if err := tools.CreateDisk(t.Context(), disk, base, 0); err != nil {
		t.Fatal(err)
	}
	g := start(t, image.Backport, func(o *Options) {
		o.Name, o.Disks, o.System, o.ClockOffset = "beta", []string{disk}, true, 5*24*time.Hour
	})
	begun := time.Now()
	// On a busy machine systemd may be too slow for its own bus; it says
	// "unknown" then.
	state, err := "", error(nil)
	for ctx := within(t, 5*time.Minute); ctx.Err() == nil; {
		state, err = g.Run(ctx, "systemctl", "is-system-running", "--wait")
		if s := strings.TrimSpace(state); s != "" && s != "unknown" && s != "starting" && s != "initializing" {
			break
		}
	}
	if strings.TrimSpace(state) != "running" {
		failed, _ := g.Sh(within(t, time.Minute), "systemctl --failed --no-pager --plain; journalctl -b -p 3 --no-pager | tail -30")
		t.Fatalf("the system is %q (%v):\n%s", state, err, failed)
	}
	t.Logf("systemd was done %.0f s after its agent came", time.Since(begun).Seconds())
	if got := sh(t, g, "cat /proc/1/comm; hostname; stat -fc %T /sys/fs/cgroup; systemctl is-active NetworkManager systemd-resolved"); got != "systemd\nbeta\ncgroup2fs\nactive\nactive" {
		t.Errorf("%q", got)
	}
	// What it is for: netem, NetworkManager, packages, units, sudo, a clock that
	// is wrong.
	sh(t, g, `ip link add v0 type veth peer name v1; tc qdisc add dev v0 root netem delay 50ms loss 1%; tc qdisc show dev v0 | grep -q netem
		nmcli -t general status; dpkg -s systemd | grep -q '^Status: install ok installed'; apt-get --version >/dev/null; sudo -n true; nft list ruleset
		systemd-run --wait --quiet -p MemoryMax=50M true; systemctl enable --now systemd-networkd; modprobe thunderbolt_net`)
	seconds, err := strconv.ParseInt(sh(t, g, "date +%s"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if off := time.Until(time.Unix(seconds, 0)) - 5*24*time.Hour; off.Abs() > 3*time.Minute {
		t.Errorf("the clock is %v from five days ahead", off)
	}
	sh(t, g, "echo kept >/root/file")
	if err := g.Reboot(within(t, 3*time.Minute)); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, g, "cat /root/file"); got != "kept" {
		t.Errorf("after a reboot in good order the file has %q", got)
	}
	if err := g.PowerOff(within(t, 3*time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := g.Verify(t.Context()); err != nil {
		t.Error(err)
	}
}

// The debug kernel finds what the others do not. Building it takes minutes.
func TestTheDebugKernelFindsFaults(t *testing.T) {
	if os.Getenv("TBCLUSTER_LONG") == "" {
		t.Skip("the debug kernel is for `make test-long`")
	}
	s, _ := images(t)
	modules, err := s.Modules(t.Context(), image.Debug)
	if err != nil {
		t.Fatal(err)
	}
	g := start(t, image.Debug, nil)
	if err := g.Verify(within(t, time.Minute)); err != nil {
		t.Fatal(err) // not by itself
	}
	if err := g.PushFile(within(t, time.Minute), filepath.Join(modules, "rigfault.ko"), "/root/rigfault.ko"); err != nil {
		t.Fatal(err)
	}
	provoke := func(kind string) {
		t.Helper()
		if _, err := g.Run(within(t, time.Minute), "insmod", "/root/rigfault.ko", "kind="+kind); err == nil {
			t.Fatal("the module stayed")
		}
	}
	seen := func(kind Kind, word string) {
		t.Helper()
		if err := g.Verify(within(t, time.Minute)); err == nil {
			t.Fatalf("%s: nothing was noticed", word)
		}
		for _, r := range g.Reports() {
			if r.Kind == kind && strings.Contains(r.Text, word) {
				return
			}
		}
		t.Errorf("no report of kind %s with %q in it", kind, word)
	}
	// kmemleak looks twice, at what is five seconds old.
	provoke("leak")
	if _, err := g.Sh(within(t, 3*time.Minute), "until dmesg | grep -q 'new suspected memory leaks'; do echo scan >/sys/kernel/debug/kmemleak; sleep 2; done"); err != nil {
		t.Error(err)
	}
	seen(Leak, "suspected memory leak")
	provoke("sleep")
	seen(Lockdep, "sleeping function called from invalid context")
	// lockdep gives up after the first report of its own, and after one of
	// KASAN's: that comes last.
	provoke("lockdep")
	seen(Lockdep, "possible circular locking dependency")
	provoke("kasan")
	seen(KASAN, "rigfault_kasan")
}
