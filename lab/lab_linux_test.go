package lab

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// asUser is set in the environment of the run of the tests as an ordinary user.
const asUser = "TBCLUSTER_LAB_TEST_USER"

func rootless() bool { return os.Geteuid() != 0 }

func randomName(t *testing.T) string {
	t.Helper()
	b := make([]byte, 5)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return "t-" + hex.EncodeToString(b)
}

// upLab makes a lab with a random name and takes it down at the end.
func upLab(t *testing.T, o Options) *Lab {
	t.Helper()
	if o.Name == "" {
		o.Name = randomName(t)
	}
	if o.Boot == nil {
		o.Boot = []string{"tbcluster", "agent"}
	}
	if o.Disk == 0 {
		o.Disk = 16 << 20
	}
	l, err := Up(t.Context(), o)
	if err != nil {
		if rootless() && os.Getenv(asUser) == "" {
			t.Skipf("this machine gives no namespaces to ordinary users: %v", err)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, f := range []string{"keeper.log", "alpha/console.log", "beta/console.log"} {
				b, err := os.ReadFile(filepath.Join(l.Dir(), f))
				t.Logf("%s (%v):\n%s", f, err, b)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := l.Down(ctx); err != nil {
			t.Errorf("down: %v", err)
		}
	})
	return l
}

// probe runs one of the probes in a node and returns its output.
func probe(t *testing.T, l *Lab, node string, args ...string) string {
	t.Helper()
	return run(t, l, node, append([]string{"tbcluster", "inside"}, args...)...)
}

// run runs a command in a node, which must succeed, and returns its output.
func run(t *testing.T, l *Lab, node string, argv ...string) string {
	t.Helper()
	var out bytes.Buffer
	code, err := l.Exec(t.Context(), node, ExecOptions{Argv: argv, Stdout: &out, Stderr: &out})
	if err != nil || code != 0 {
		t.Fatalf("%s: %v: exit %d, %v: %s", node, argv, code, err, out.String())
	}
	return strings.TrimSpace(out.String())
}

// background runs a probe until the end of the test and returns its output
// after the line "ready".
func background(t *testing.T, l *Lab, node string, args ...string) io.Reader {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := l.Exec(ctx, node, ExecOptions{Argv: append([]string{"tbcluster", "inside"}, args...), Stdout: w, Stderr: os.Stderr})
		w.Close()
		done <- err
	}()
	t.Cleanup(func() { cancel(); <-done; r.Close() })
	line := make([]byte, 6)
	if _, err := io.ReadFull(r, line); err != nil || string(line) != "ready\n" {
		t.Fatalf("%s: %v does not start: %q, %v", node, args, line, err)
	}
	return r
}

func status(t *testing.T, l *Lab) Status {
	t.Helper()
	s, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// eventually waits for a condition that has no event of its own.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// wire gives the ends of the first cable of two nodes addresses and waits for
// the carrier.
func wire(t *testing.T, l *Lab, a, aIf, b, bIf string) {
	t.Helper()
	probe(t, l, a, "address", aIf, "10.77.0.1/30")
	probe(t, l, b, "address", bIf, "10.77.0.2/30")
	probe(t, l, a, "wait-link", aIf, "up")
	probe(t, l, b, "wait-link", bIf, "up")
}

func needReason(t *testing.T, err error, r fault.Reason) {
	t.Helper()
	f := fault.As(err)
	if f == nil || f.Reason != r {
		t.Fatalf("want a fault with reason %s, got %v", r, err)
	}
	if f.What == "" || f.Fix == "" {
		t.Errorf("%v does not say what failed, or what to do: %+v", err, f)
	}
}

func TestNodesAreMachinesOfTheirOwn(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair, Memory: 3 << 30, Config: map[string]any{"log_level": "debug"}})
	s := status(t, l)
	if s.State != Running || len(s.Nodes) != 2 || s.Rootless != rootless() {
		t.Fatalf("status: %+v", s)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || bytes.Contains(mounts, []byte(l.Name())) {
		t.Errorf("the host sees mounts of the lab (%v): %s", err, mounts)
	}
	seen := map[string]string{}
	unlike := func(what, value string) {
		t.Helper()
		if value == "" || seen[what] == value {
			t.Errorf("%s is %q on both nodes", what, value)
		}
		seen[what] = value
	}
	hostBoot, err := hostBootID()
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range s.Nodes {
		unlike("boot ID", run(t, l, n.Name, "cat", "/proc/sys/kernel/random/boot_id"))
		if seen["boot ID"] != n.BootID || n.BootID == hostBoot {
			t.Errorf("boot ID inside %q, status %q, host %q", seen["boot ID"], n.BootID, hostBoot)
		}
		unlike("machine ID", run(t, l, n.Name, "cat", "/etc/machine-id"))
		if seen["machine ID"] != n.MachineID || len(n.MachineID) != 32 {
			t.Errorf("machine ID inside %q, status %q", seen["machine ID"], n.MachineID)
		}
		for _, ns := range []string{"net", "pid", "mnt", "uts", "ipc"} {
			unlike("namespace "+ns, run(t, l, n.Name, "readlink", "/proc/self/ns/"+ns))
			if outside, err := os.Readlink("/proc/self/ns/" + ns); err != nil || outside == seen["namespace "+ns] {
				t.Errorf("%s shares the %s namespace of the host (%v)", n.Name, ns, err)
			}
		}
		if got := run(t, l, n.Name, "cat", "/proc/sys/kernel/hostname", "/etc/hostname"); got != n.Name+"\n"+n.Name {
			t.Errorf("host name: %q", got)
		}
		if got := run(t, l, n.Name, "cat", "/etc/hosts"); !strings.Contains(got, "172.31.77.11\tbeta") {
			t.Errorf("/etc/hosts: %q", got)
		}
		config := run(t, l, n.Name, "cat", "/etc/tbcluster/config.toml")
		for _, want := range []string{"sysfs_root = '/lab/sys'", "memory_bytes = 3221225472", "engine_dirs = ['/opt/tbcluster/engines']", "log_level = 'debug'"} {
			if !strings.Contains(config, want) {
				t.Errorf("config.toml lacks %s:\n%s", want, config)
			}
		}
		for _, dir := range []string{"/run", "/tmp", "/dev/shm", "/var/tmp", "/root"} {
			file := filepath.Join(dir, "of-"+l.Name()+strconv.Itoa(i))
			run(t, l, n.Name, "touch", file)
			if _, err := os.Stat(file); err == nil {
				t.Errorf("%s of %s is the host's", dir, n.Name)
			}
		}
		if got := run(t, l, n.Name, "sh", "-c", "command -v tbcluster"); got != "/lab/bin/tbcluster" {
			t.Errorf("tbcluster is %q on the PATH", got)
		}
		code, err := l.Exec(t.Context(), n.Name, ExecOptions{Argv: []string{"touch", "/usr/mark"}})
		if err != nil || code == 0 {
			t.Errorf("/usr of the host can be written to: exit %d, %v", code, err)
		}
	}
	if got := run(t, l, "alpha", "sh", "-c", "echo /proc/[0-9]*"); strings.Contains(got, fmt.Sprintf("/proc/%d ", os.Getpid())) {
		t.Errorf("processes of the host are seen inside: %s", got)
	}
	if got := run(t, l, "alpha", "cat", "/dev/null"); got != "" {
		t.Errorf("/dev/null gives %q", got)
	}
}

func TestTheAgentsSocketIsReachedFromTheHost(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	path := l.SocketPath("alpha")
	if len(path) >= 104 {
		t.Errorf("the path has %d bytes: %s", len(path), path)
	}
	if s := status(t, l); s.Nodes[0].Socket != path {
		t.Errorf("status says %q, SocketPath %q", s.Nodes[0].Socket, path)
	}
	var c net.Conn
	eventually(t, "the socket answers", func() (ok bool) {
		var err error
		c, err = net.Dial("unix", path)
		return err == nil
	})
	defer c.Close()
	if got, err := io.ReadAll(c); err != nil || len(bytes.Fields(got)) != 2 {
		t.Fatalf("got %q, %v", got, err)
	}
}

func TestTrafficGoesOverCableAndLAN(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair})
	wire(t, l, "alpha", "thunderbolt0", "beta", "thunderbolt0")
	background(t, l, "beta", "serve", ":7000")
	if got := probe(t, l, "alpha", "dial", "10.77.0.2:7000", "thunderbolt0", "30s"); got != "answer" {
		t.Errorf("over the cable: %s", got)
	}
	if got := probe(t, l, "alpha", "dial", "172.31.77.11:7000", "eth0", "30s"); got != "answer" {
		t.Errorf("over the LAN: %s", got)
	}
	if got := probe(t, l, "alpha", "dial", "[fe80::4c:41ff:fe4e:1%eth0]:7000", "eth0", "30s"); got != "answer" {
		t.Errorf("over the LAN by its link-local address: %s", got)
	}
	// Prefix, scope and flags: permanent and without duplicate detection, so not
	// tentative, and the only one.
	if got := run(t, l, "beta", "sh", "-c", "grep eth0 /proc/net/if_inet6"); !strings.Contains(got, " 40 20 82 ") || strings.Contains(got, "\n") {
		t.Errorf("link-local address of the LAN: %q", got)
	}
	if got := probe(t, l, LANHost, "dial", "172.31.77.11:7000", "eth0", "30s"); got != "answer" {
		t.Errorf("from the LAN's host: %s", got)
	}
	// Nothing leads outside: not even a route.
	var out bytes.Buffer
	code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"tbcluster", "inside", "dial", "192.0.2.1:9", "eth0", "1s"}, Stdout: &out, Stderr: &out})
	if err != nil || code == 0 && !strings.Contains(out.String(), "no answer") {
		t.Errorf("the world answers: exit %d, %v: %s", code, err, out.String())
	}
}

func TestMulticastReachesTheLAN(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair})
	in := background(t, l, "beta", "multicast-in")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := l.Exec(ctx, "alpha", ExecOptions{Argv: []string{"tbcluster", "inside", "multicast-out", "hello"}})
		done <- err
	}()
	if got, _ := firstLine(in); got != "hello from 172.31.77.10" {
		t.Errorf("got %q", got)
	}
	cancel()
	needReason(t, <-done, fault.Interrupted)
}

func TestACableIsCutMendedAndRenamed(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 3})
	ctx := t.Context()
	links := func(node string) string { return run(t, l, node, "ls", "/sys/class/net") }
	for _, n := range []string{"alpha", "beta", "gamma"} {
		if got := links(n); got != "eth0\nlo\nthunderbolt0\nthunderbolt1" {
			t.Fatalf("%s has %q", n, got)
		}
	}
	events := background(t, l, "beta", "uevents")
	mac := run(t, l, "beta", "cat", "/sys/class/net/thunderbolt0/address")
	if err := l.Cut(ctx, "beta", "alpha", CutOptions{}); err != nil {
		t.Fatal(err)
	}
	for node, want := range map[string]string{
		"alpha": "eth0\nlo\nthunderbolt1", "beta": "eth0\nlo\nthunderbolt1", "gamma": "eth0\nlo\nthunderbolt0\nthunderbolt1",
	} {
		if got := links(node); got != want {
			t.Errorf("after the cut %s has %q", node, got)
		}
	}
	if got := run(t, l, "beta", "ls", "/lab/sys/bus/thunderbolt/devices", "/lab/sys/class/net"); strings.Contains(got, "0-1") || strings.Contains(got, "thunderbolt0") {
		t.Errorf("beta's sysfs after the cut: %s", got)
	}
	// Kernel order: interface, service, XDomain; each event as the kernel's own.
	got, scanner := firstLine(events)
	lines := []string{got}
	for !strings.HasPrefix(lines[len(lines)-1], "remove 0-1 ") && scanner.Scan() {
		lines = append(lines, scanner.Text())
	}
	var order []string
	for _, line := range lines {
		if f := strings.Fields(line); f[0] == "remove" && (f[1] == "thunderbolt0" || strings.HasPrefix(f[1], "0-1")) {
			order = append(order, f[1])
			if f[2] != "true" || f[3] != "true" {
				t.Errorf("no event of the kernel: %s", line)
			}
		}
	}
	if want := []string{"thunderbolt0", "0-1.0", "0-1"}; !slices.Equal(order, want) {
		t.Errorf("events in the order %v, want %v (%q)", order, want, lines)
	}
	if s := status(t, l); s.Cables[0].State != Cut || s.Cables[0].A.Interface != "" || s.Cables[1].State != Plugged {
		t.Errorf("cables: %+v", s.Cables)
	}
	if err := l.Mend(ctx, "alpha", "beta", MendOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := run(t, l, "beta", "cat", "/sys/class/net/thunderbolt0/address"); got != mac {
		t.Errorf("the MAC was %s and is %s: it follows from UUID and port", mac, got)
	}
	wire(t, l, "alpha", "thunderbolt0", "beta", "thunderbolt0")
	background(t, l, "beta", "serve", ":7000")
	if got := probe(t, l, "alpha", "dial", "10.77.0.2:7000", "thunderbolt0", "30s"); got != "answer" {
		t.Errorf("the mended cable: %s", got)
	}
	if err := l.Mend(ctx, "alpha", "beta", MendOptions{Rename: true}); err != nil {
		t.Fatal(err)
	}
	if got := links("alpha"); got != "eth0\nlo\nthunderbolt1\nthunderbolt2" {
		t.Errorf("renamed: alpha has %q", got)
	}
	if got := run(t, l, "alpha", "readlink", "/lab/sys/class/net/thunderbolt2/device"); got != "../../../0-1.0" {
		t.Errorf("renamed: the device is %q", got)
	}
	needReason(t, l.Cut(ctx, "alpha", "omega", CutOptions{}), fault.NodeUnknown)
	needReason(t, l.Cut(ctx, "alpha", "beta", CutOptions{Cable: 2}), fault.Usage)
	needReason(t, l.Cut(ctx, "alpha", "alpha", CutOptions{}), fault.Usage)
}

func TestASilentCableKeepsItsCarrier(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair, Cables: 2})
	ctx := t.Context()
	wire(t, l, "alpha", "thunderbolt0", "beta", "thunderbolt0")
	probe(t, l, "alpha", "address", "thunderbolt1", "10.77.0.5/30")
	probe(t, l, "beta", "address", "thunderbolt1", "10.77.0.6/30")
	background(t, l, "alpha", "serve", ":7000")
	background(t, l, "beta", "serve", ":7000")
	if err := l.Cut(ctx, "alpha", "beta", CutOptions{Silent: true, Cable: 1}); err != nil {
		t.Fatal(err)
	}
	for node, to := range map[string]string{"alpha": "10.77.0.2:7000", "beta": "10.77.0.1:7000"} {
		if got := probe(t, l, node, "dial", to, "thunderbolt0", "300ms"); got != "no answer" {
			t.Errorf("over the silent cable from %s: %s", node, got)
		}
		if got := run(t, l, node, "cat", "/lab/sys/class/net/thunderbolt0/carrier", "/lab/sys/bus/thunderbolt/devices/0-1/rx_speed"); got != "1\n20.0 Gb/s" {
			t.Errorf("carrier and speed of the silent cable at %s: %q", node, got)
		}
	}
	if got := probe(t, l, "alpha", "dial", "10.77.0.6:7000", "thunderbolt1", "30s"); got != "answer" {
		t.Errorf("over the other cable: %s", got)
	}
	if s := status(t, l); s.Cables[0].State != Silent || s.Cables[1].State != Plugged || s.Cables[1].Index != 2 {
		t.Errorf("cables: %+v", s.Cables)
	}
	if err := l.Mend(ctx, "alpha", "beta", MendOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := probe(t, l, "alpha", "dial", "10.77.0.2:7000", "thunderbolt0", "30s"); got != "answer" {
		t.Errorf("over the mended cable: %s", got)
	}
	// A cable that was silent when it was pulled takes its silence along.
	for _, o := range []CutOptions{{Silent: true, Cable: 1}, {Cable: 1}, {Cable: 2}} {
		if err := l.Cut(ctx, "alpha", "beta", o); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Mend(ctx, "alpha", "beta", MendOptions{Cable: 2}); err != nil {
		t.Fatal(err)
	}
	wire(t, l, "alpha", "thunderbolt0", "beta", "thunderbolt0")
	if got := probe(t, l, "alpha", "dial", "10.77.0.2:7000", "thunderbolt0", "30s"); got != "answer" {
		t.Errorf("over another cable that got the name: %s", got)
	}
}

func TestTheRateOfACableHolds(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair, Rate: "200mbit"})
	wire(t, l, "alpha", "thunderbolt0", "beta", "thunderbolt0")
	for _, dir := range []struct{ from, to, addr string }{{"alpha", "beta", "10.77.0.2:7001"}, {"beta", "alpha", "10.77.0.1:7001"}} {
		for try := 1; ; try++ {
			out := background(t, l, dir.to, "receive", dir.addr)
			probe(t, l, dir.from, "pull", dir.addr, strconv.Itoa(12<<20))
			line, _ := firstLine(out)
			bits, err := strconv.ParseFloat(line, 64)
			if err != nil || bits > 215e6 {
				t.Fatalf("%s to %s: %s bit/s, %v", dir.from, dir.to, line, err)
			}
			if bits >= 120e6 {
				break
			}
			// Slower than the cable: the machine is busy, unless it stays so.
			if try == 10 {
				t.Fatalf("%s to %s: %s bit/s", dir.from, dir.to, line)
			}
		}
	}
}

func TestAPowerCutLeavesTheDisk(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 3})
	ctx := t.Context()
	before := status(t, l)
	run(t, l, "alpha", "sh", "-c", "for d in /root /home /var/lib/tbcluster /var/tmp /run /tmp /dev/shm; do echo data >$d/file; done")
	eventually(t, "the agent listens", func() bool { _, err := os.Stat(l.SocketPath("alpha")); return err == nil })
	if err := l.Kill(ctx, "alpha", false); err != nil {
		t.Fatal(err)
	}
	s := status(t, l)
	if s.Nodes[0].State != Off || s.Nodes[0].Agent != Stopped || s.Nodes[0].BootID != "" || s.Nodes[1].State != Running {
		t.Errorf("after the power cut: %+v", s.Nodes)
	}
	// A cable whose other end has no power is unplugged; the others stay.
	if got := run(t, l, "beta", "ls", "/sys/class/net", "/lab/sys/bus/thunderbolt/devices"); strings.Contains(got, "thunderbolt0") || strings.Contains(got, "0-1") || !strings.Contains(got, "thunderbolt1") {
		t.Errorf("beta sees: %s", got)
	}
	if _, err := os.Stat(l.SocketPath("alpha")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("/run outlived the power cut: %v", err)
	}
	_, err := l.Exec(ctx, "alpha", ExecOptions{Argv: []string{"true"}})
	needReason(t, err, fault.NodeDown)
	needReason(t, l.Kill(ctx, "alpha", false), fault.NodeDown)
	needReason(t, l.Start(ctx, "alpha", true), fault.NodeDown)
	if err := l.Start(ctx, "alpha", false); err != nil {
		t.Fatal(err)
	}
	if got := run(t, l, "alpha", "sh", "-c", "cd /; ls root/file home/file var/lib/tbcluster/file var/tmp/file run/file tmp/file dev/shm/file 2>/dev/null || true"); got != "home/file\nroot/file\nvar/lib/tbcluster/file\nvar/tmp/file" {
		t.Errorf("after the power cut there are: %q", got)
	}
	after := status(t, l)
	a, b := before.Nodes[0], after.Nodes[0]
	if b.State != Running || b.Agent != Running || b.BootID == a.BootID || b.MachineID != a.MachineID {
		t.Errorf("before %+v, after %+v", a, b)
	}
	if got := run(t, l, "beta", "cat", "/lab/sys/bus/thunderbolt/devices/0-1/device_name"); got != "alpha" {
		t.Errorf("beta's peer is %q", got)
	}
	needReason(t, l.Start(ctx, "alpha", false), fault.NodeInUse)
	needReason(t, l.Kill(ctx, LANHost, false), fault.Usage)
	needReason(t, l.Kill(ctx, "omega", false), fault.NodeUnknown)
}

// agentPIDs asks the stand-in for the agent.
func agentPIDs(l *Lab, node string) (string, error) {
	c, err := net.Dial("unix", l.SocketPath(node))
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	if err == nil && len(b) == 0 {
		err = io.ErrUnexpectedEOF // it was killed before it said anything
	}
	return string(b), err
}

func TestTheAgentAloneIsKilledAndStarted(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	ctx := t.Context()
	eventually(t, "the agent answers", func() bool { _, err := agentPIDs(l, "alpha"); return err == nil })
	out := background(t, l, "alpha", "serve", ":7000")
	bootID := status(t, l).Nodes[0].BootID
	if err := l.Kill(ctx, "alpha", true); err != nil {
		t.Fatal(err)
	}
	if _, err := agentPIDs(l, "alpha"); err == nil {
		t.Error("the agent answers after its death")
	}
	// Init does not start it again, reaps both halves, and the rest lives.
	eventually(t, "both halves are gone", func() bool {
		return !strings.Contains(run(t, l, "alpha", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), "tbcluster agent")
	})
	eventually(t, "the status says how it ended", func() bool {
		n := status(t, l).Nodes[0]
		return n.Agent == Stopped && n.AgentExit == "killed by SIGKILL" && n.State == Running
	})
	needReason(t, l.Kill(ctx, "alpha", true), fault.NoAgent)
	needReason(t, l.Pause(ctx, "alpha", true), fault.NoAgent)
	if got := probe(t, l, "alpha", "dial", "127.0.0.1:7000", "lo", "30s"); got != "answer" {
		t.Errorf("what runs beside the agent: %s", got)
	}
	if err := l.Start(ctx, "alpha", true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent answers again", func() bool { _, err := agentPIDs(l, "alpha"); return err == nil })
	if s := status(t, l).Nodes[0]; s.BootID != bootID || s.Agent != Running || s.AgentExit != "" {
		t.Errorf("status: %+v", s)
	}
	needReason(t, l.Start(ctx, "alpha", true), fault.NodeInUse)
	_ = out
}

func TestPauseStopsTheNodeOrItsAgent(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair})
	ctx := t.Context()
	eventually(t, "the agent answers", func() bool { _, err := agentPIDs(l, "alpha"); return err == nil })
	background(t, l, "alpha", "serve", ":7000")
	reach := func(patience string) string {
		return probe(t, l, "beta", "dial", "172.31.77.10:7000", "eth0", patience)
	}

	if err := l.Pause(ctx, "alpha", true); err != nil {
		t.Fatal(err)
	}
	if _, err := agentPIDs(l, "alpha"); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a paused agent answers: %v", err)
	}
	if got := reach("30s"); got != "answer" {
		t.Errorf("what runs beside a paused agent: %s", got)
	}
	if n := status(t, l).Nodes[0]; n.State != Running || n.Agent != Paused {
		t.Errorf("status: %+v", n)
	}
	if err := l.Start(ctx, "alpha", true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the resumed agent answers", func() bool { _, err := agentPIDs(l, "alpha"); return err == nil })

	if err := l.Pause(ctx, "alpha", false); err != nil {
		t.Fatal(err)
	}
	if got := reach("300ms"); got != "no answer" {
		t.Errorf("a paused node: %s", got)
	}
	if n := status(t, l).Nodes[0]; n.State != Paused || n.Agent != Paused {
		t.Errorf("status: %+v", n)
	}
	_, err := l.Exec(ctx, "alpha", ExecOptions{Argv: []string{"true"}})
	needReason(t, err, fault.NodeDown)
	if err := l.Resume(ctx, "alpha", false); err != nil {
		t.Fatal(err)
	}
	if got := reach("30s"); got != "answer" {
		t.Errorf("a resumed node: %s", got)
	}
	if got := run(t, l, "alpha", "echo", "back"); got != "back" {
		t.Errorf("exec after the pause: %q", got)
	}
	// A power cut ends a paused node too.
	if err := errors.Join(l.Pause(ctx, "alpha", false), l.Kill(ctx, "alpha", false)); err != nil {
		t.Fatal(err)
	}
	if n := status(t, l).Nodes[0]; n.State != Off {
		t.Errorf("status: %+v", n)
	}
}

func TestTheLANPlugIsPulled(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair})
	ctx := t.Context()
	background(t, l, "alpha", "serve", ":7000")
	if err := l.CutLAN(ctx, "alpha"); err != nil {
		t.Fatal(err)
	}
	probe(t, l, "alpha", "wait-link", "eth0", "down")
	if got := probe(t, l, "beta", "dial", "172.31.77.10:7000", "eth0", "300ms"); got != "no answer" {
		t.Errorf("over a cut LAN: %s", got)
	}
	if !status(t, l).Nodes[0].LANCut {
		t.Error("the status does not tell")
	}
	if err := l.MendLAN(ctx, "alpha"); err != nil {
		t.Fatal(err)
	}
	if got := probe(t, l, "beta", "dial", "172.31.77.10:7000", "eth0", "30s"); got != "answer" {
		t.Errorf("over the mended LAN: %s", got)
	}
}

func TestTheLANFallsIntoParts(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 3, Topology: Chain})
	ctx := t.Context()
	background(t, l, "alpha", "serve", ":7000")
	reach := func(node, want, patience string) {
		t.Helper()
		if got := probe(t, l, node, "dial", "172.31.77.10:7000", "eth0", patience); got != want {
			t.Errorf("from %s: %s, want %s", node, got, want)
		}
	}
	reach("beta", "answer", "30s")
	if err := l.Part(ctx, []string{"alpha", "gamma"}, []string{"beta"}); err != nil {
		t.Fatal(err)
	}
	reach("beta", "no answer", "300ms")
	reach("gamma", "answer", "30s")
	if s := status(t, l); s.Nodes[0].LANSide != 1 || s.Nodes[1].LANSide != 2 || s.Nodes[2].LANSide != 1 {
		t.Errorf("the status does not tell: %+v", s.Nodes)
	}
	for _, wrong := range [][]string{{"alpha", "alpha"}, {"omega"}} {
		if err := l.Part(ctx, wrong); err == nil {
			t.Errorf("parts of %v", wrong)
		}
	}
	if err := l.Part(ctx); err != nil {
		t.Fatal(err)
	}
	reach("beta", "answer", "30s")
}

func TestTheDiskIsAsLargeAsAskedFor(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1, Disk: 8 << 20})
	run(t, l, "alpha", "dd", "if=/dev/zero", "of=/root/a", "bs=1M", "count=6", "status=none")
	if used := status(t, l).Nodes[0].DiskUsed; used < 6<<20 || used > 8<<20 {
		t.Errorf("%d bytes are used", used)
	}
	var out bytes.Buffer
	code, err := l.Exec(t.Context(), "alpha", ExecOptions{
		Argv: []string{"dd", "if=/dev/zero", "of=/var/lib/tbcluster/b", "bs=1M", "count=6", "status=none"}, Stderr: &out,
	})
	if err != nil || code == 0 || !strings.Contains(out.String(), "No space left on device") {
		t.Errorf("exit %d, %v: %s", code, err, out.String())
	}
}

func TestMemoryIsLimitedWhereCgroupsAllow(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1, Memory: 256 << 20, Disk: 16 << 20})
	if rec := status(t, l); rec.Memory == reportedOnly {
		if !rootless() {
			if version, _ := cgroupPaths("x", []string{"alpha"}); version != reportedOnly {
				t.Errorf("%s is there and not used", version)
			}
		}
		return // the other half of the promise holds: nothing failed
	}
	if got := probe(t, l, "alpha", "eat", strconv.Itoa(16<<20)); got != "ate" {
		t.Errorf("within the limit: %s", got)
	}
	code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"tbcluster", "inside", "eat", strconv.Itoa(320 << 20)}})
	if err != nil || code != 128+int(unix.SIGKILL) {
		t.Errorf("above the limit: exit %d, %v", code, err)
	}
	if n := status(t, l).Nodes[0]; n.State != Running {
		t.Errorf("the node did not outlive it: %+v", n)
	}
}

func TestInitReapsOrphans(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	pid := probe(t, l, "alpha", "orphan", "0.1")
	eventually(t, "the orphan is gone", func() bool {
		return run(t, l, "alpha", "sh", "-c", "test -e /proc/"+pid+" && echo there || echo gone") == "gone"
	})
}

func TestLabsStandSideBySide(t *testing.T) {
	t.Parallel()
	a := upLab(t, Options{Nodes: 2, Topology: Pair})
	b := upLab(t, Options{Nodes: 2, Topology: Pair})
	names, err := List()
	if err != nil || !slices.Contains(names, a.Name()) || !slices.Contains(names, b.Name()) {
		t.Fatalf("labs: %v, %v", names, err)
	}
	// The same addresses in both, and neither sees the other.
	background(t, a, "beta", "serve", ":7000")
	if got := probe(t, a, "alpha", "dial", "172.31.77.11:7000", "eth0", "30s"); got != "answer" {
		t.Errorf("within a lab: %s", got)
	}
	if got := probe(t, b, "alpha", "dial", "172.31.77.11:7000", "eth0", "200ms"); got != "no answer" {
		t.Errorf("between labs: %s", got)
	}
	if err := a.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := run(t, b, "beta", "echo", "alive"); got != "alive" {
		t.Errorf("the other lab: %q", got)
	}
	_, err = Open(a.Name())
	needReason(t, err, fault.LabFailed)
	again, err := Open(b.Name())
	if err != nil || status(t, again).State != Running {
		t.Errorf("open: %v", err)
	}
}

func TestANameIsUsedOnce(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	_, err := Up(t.Context(), Options{Name: l.Name(), Nodes: 1, NoBoot: true})
	needReason(t, err, fault.LabFailed)
	if s := status(t, l); s.State != Running {
		t.Errorf("the first lab: %+v", s)
	}
}

func TestMulticastIsLostOrRefused(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, NoBoot: true})
	// A message to the group of mDNS, and whether it arrives within a moment.
	send := func(node string) string {
		return run(t, l, node, "python3", "-c", `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("`+map[string]string{"alpha": "172.31.77.10", "beta": "172.31.77.11"}[node]+`"))
try:
    s.sendto(b"x", ("224.0.0.251", 5353))
    print("sent")
except PermissionError:
    print("refused")
`)
	}
	filters := func(node string) string { return run(t, l, node, "nft", "list", "ruleset") }
	if got := send("alpha"); got != "sent" || filters("alpha") != "" {
		t.Fatalf("before: %s, %s", got, filters("alpha"))
	}
	for how, want := range map[Multicast]string{MulticastLost: "sent", MulticastRefused: "refused", "": "sent"} {
		if err := l.SetMulticast(t.Context(), "alpha", how); err != nil {
			t.Fatal(err)
		}
		if got := send("alpha"); got != want {
			t.Errorf("%q: %s", how, got)
		}
		if got := send("beta"); got != "sent" {
			t.Errorf("beta, which nobody spoke of: %s", got)
		}
		if s := status(t, l).Nodes[0]; s.Multicast != how {
			t.Errorf("the status says %q, want %q", s.Multicast, how)
		}
	}
	if err := l.SetMulticast(t.Context(), "alpha", MulticastRefused); err != nil {
		t.Fatal(err)
	}
	// It is a matter of the desk, not of the machine: a boot does not change it.
	for _, do := range []func() error{
		func() error { return l.Kill(t.Context(), "alpha", false) }, func() error { return l.Start(t.Context(), "alpha", false) },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	if got := send("alpha"); got != "refused" {
		t.Errorf("after a boot: %s", got)
	}
	if err := l.SetMulticast(t.Context(), "alpha", ""); err != nil {
		t.Fatal(err)
	}
	if got := filters("alpha"); got != "" {
		t.Errorf("left behind: %s", got)
	}
	if err := l.SetMulticast(t.Context(), "alpha", "loud"); !fault.Is(err, fault.Usage) {
		t.Errorf("a way that is none: %v", err)
	}
}

func TestACableIsSeenByOneEndOnlyAndMoves(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, NoBoot: true})
	ctx := t.Context()
	sees := func(node, port string) bool {
		return strings.Contains(run(t, l, node, "ls", "/lab/sys/bus/thunderbolt/devices"), port+".0")
	}
	if err := l.Cut(ctx, "beta", "alpha", CutOptions{Half: true}); err != nil {
		t.Fatal(err)
	}
	if sees("alpha", "0-1") || !sees("beta", "0-1") {
		t.Error("not as asked: beta sees it, alpha does not")
	}
	if s := status(t, l).Cables[0]; s.State != Half {
		t.Errorf("the status says %q", s.State)
	}
	for _, o := range []CutOptions{{Silent: true}, {Half: true}} {
		if err := l.Cut(ctx, "alpha", "beta", o); !fault.Is(err, fault.Usage) {
			t.Errorf("%+v of one that is seen by half: %v", o, err)
		}
	}
	// It is so after a boot too.
	for _, do := range []func() error{
		func() error { return l.Kill(ctx, "alpha", false) }, func() error { return l.Start(ctx, "alpha", false) },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	if sees("alpha", "0-1") || !sees("beta", "0-1") {
		t.Error("a boot has shown it")
	}
	if err := l.Mend(ctx, "alpha", "beta", MendOptions{}); err != nil {
		t.Fatal(err)
	}
	if !sees("alpha", "0-1") || !sees("beta", "0-1") {
		t.Error("not seen after it was mended")
	}
	for _, want := range []string{"0-3", "0-1"} {
		if err := l.Mend(ctx, "alpha", "beta", MendOptions{Move: true}); err != nil {
			t.Fatal(err)
		}
		if !sees("alpha", want) || !sees("beta", want) || sees("alpha", map[string]string{"0-1": "0-3", "0-3": "0-1"}[want]) {
			t.Errorf("it is not in %s alone", want)
		}
	}
}
