package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

var namespaceKinds = []string{"net", "pid", "mnt", "ipc", "uts", "user"}

// trail is what a lab has on the host while it runs.
type trail struct {
	dir        string
	pids       map[int]stat
	namespaces map[string]bool
	cgroups    []string
	at         uint64 // when, in ticks since boot
}

// ticks is the time since boot as /proc/PID/stat counts.
func ticks(t *testing.T) uint64 {
	t.Helper()
	const perSecond = 100 // USER_HZ, on every architecture that we build for
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		t.Fatal(err)
	}
	return uint64(now.Nano() * perSecond / int64(time.Second))
}

// track records what a lab has now.
func track(t *testing.T, l *Lab) trail {
	t.Helper()
	rec, err := readRecord(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	tr := trail{dir: l.Dir(), namespaces: map[string]bool{}, cgroups: rec.Cgroups}
	if tr.pids, err = descendants(rec.Keeper.PID); err != nil || len(tr.pids) < 2 {
		t.Fatalf("the keeper has %d processes below it: %v", len(tr.pids), err)
	}
	if tr.pids[rec.Keeper.PID], err = readStat(rec.Keeper.PID); err != nil {
		t.Fatal(err)
	}
	for pid := range tr.pids {
		for _, kind := range namespaceKinds {
			theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
			if err != nil {
				continue // ended meanwhile, or "pid" of one that is ending
			}
			ours, err := os.Readlink("/proc/self/ns/" + kind)
			if err != nil {
				t.Fatal(err)
			}
			if ours != theirs {
				tr.namespaces[theirs] = true
			}
		}
	}
	if len(tr.namespaces) < 2*4 {
		t.Fatalf("the lab has only these namespaces: %v", tr.namespaces)
	}
	tr.at = ticks(t)
	return tr
}

// nothingLeft checks that all of it is gone.
func (tr trail) nothingLeft(t *testing.T) {
	t.Helper()
	for _, p := range append([]string{tr.dir, tr.dir + ".lock"}, tr.cgroups...) {
		if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left (%v)", p, err)
		}
	}
	for pid, st := range tr.pids {
		if now, err := readStat(pid); err == nil && now.start == st.start && now.state != 'Z' {
			t.Errorf("process %d is left", pid)
		}
	}
	links, err := filepath.Glob("/proc/[0-9]*/ns/*")
	if err != nil || len(links) == 0 {
		t.Fatalf("no namespaces at all: %v", err)
	}
	for _, link := range links {
		ns, err := os.Readlink(link)
		if err != nil || !tr.namespaces[ns] {
			continue
		}
		// The numbers of namespaces are used again: what is younger is not ours. A
		// process that has ended keeps its PID namespace until its end is noticed.
		pid, err := strconv.Atoi(strings.Split(link, "/")[2])
		if err != nil {
			t.Fatal(err)
		}
		if st, err := readStat(pid); err == nil && st.start < tr.at && st.state != 'Z' {
			t.Errorf("%s is left, seen at %s", ns, link)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), tr.dir) {
		t.Errorf("mounts are left (%v):\n%s", err, mounts)
	}
}

func TestDownLeavesNothing(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 3, Cables: 2})
	tr := track(t, l)
	if err := l.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	tr.nothingLeft(t)
	if err := l.Down(t.Context()); err != nil {
		t.Errorf("down again: %v", err)
	}
}

func TestDownLeavesNothingAfterEverythingWasKilled(t *testing.T) {
	t.Parallel()
	for name, choose := range map[string]func(l *Lab, tr trail, keeper int) []int{
		"keeper alone": func(_ *Lab, _ trail, keeper int) []int { return []int{keeper} },
		"keeper last": func(_ *Lab, tr trail, keeper int) (pids []int) {
			for pid := range tr.pids {
				if pid != keeper {
					pids = append(pids, pid)
				}
			}
			return append(pids, keeper)
		},
		"all but the keeper": func(_ *Lab, tr trail, keeper int) (pids []int) {
			for pid := range tr.pids {
				if pid != keeper {
					pids = append(pids, pid)
				}
			}
			return pids
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := upLab(t, Options{Nodes: 2, Topology: Pair})
			if err := l.Pause(t.Context(), "alpha", false); err != nil {
				t.Fatal(err)
			}
			tr := track(t, l)
			rec, err := readRecord(l.Dir())
			if err != nil {
				t.Fatal(err)
			}
			for _, pid := range choose(l, tr, rec.Keeper.PID) {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
					t.Fatal(err)
				}
			}
			if name != "all but the keeper" {
				eventually(t, "the lab is dead", func() bool { return !rec.Keeper.alive() })
				if s := status(t, l); s.State != Dead || s.Nodes[0].State != Off {
					t.Errorf("status of a dead lab: %+v", s)
				}
				needReason(t, l.Cut(t.Context(), "alpha", "beta", CutOptions{}), fault.LabFailed)
				_, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"true"}})
				needReason(t, err, fault.LabFailed)
			} else {
				eventually(t, "both nodes are off", func() bool {
					s := status(t, l)
					return s.State == Running && s.Nodes[0].State == Off && s.Nodes[1].State == Off
				})
			}
			opened, err := Open(l.Name())
			if err != nil {
				t.Fatal(err)
			}
			if err := opened.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
			tr.nothingLeft(t)
		})
	}
}

func TestUpReplacesADeadLab(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair})
	tr := track(t, l)
	rec, err := readRecord(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	run(t, l, "alpha", "touch", "/root/old")
	if err := unix.Kill(rec.Keeper.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the keeper is dead", func() bool { return !rec.Keeper.alive() })
	again := upLab(t, Options{Name: l.Name(), Nodes: 1})
	if s := status(t, again); len(s.Nodes) != 1 || s.State != Running {
		t.Errorf("the new lab: %+v", s)
	}
	if got := run(t, again, "alpha", "sh", "-c", "ls /root"); got != "" {
		t.Errorf("the new lab has the old disk: %q", got)
	}
	if err := again.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	tr.nothingLeft(t)
}

func TestUpCancelledAtAnyMomentLeavesNothing(t *testing.T) {
	t.Parallel()
	for ms := range 12 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(ms*ms)*time.Millisecond)
		name := randomName(t)
		l, err := Up(ctx, Options{Name: name, Nodes: 3, NoBoot: true})
		cancel()
		if err == nil {
			if err := l.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
			continue
		}
		needReason(t, err, fault.Interrupted)
		for _, p := range []string{filepath.Join(baseDir(), name), filepath.Join(baseDir(), name+".lock")} {
			if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after %d ms %s is left (%v)", ms*ms, p, err)
			}
		}
	}
}

func TestUpKilledAtAnyMomentLeavesWhatDownRemoves(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for ms := range 12 {
		name := randomName(t)
		cmd := exec.Command(exe, "inside", "up", name)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		select {
		case <-done:
		case <-time.After(time.Duration(ms*ms) * time.Millisecond):
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			<-done
		}
		l, err := Open(name)
		if err != nil {
			needReason(t, err, fault.LabFailed) // killed before there was anything
			l = named(name)
		}
		rec, recErr := readRecord(l.Dir())
		if err := l.Down(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, p := range append([]string{l.Dir(), l.Dir() + ".lock"}, rec.Cgroups...) {
			if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("killed after %d ms: %s is left (%v)", ms*ms, p, err)
			}
		}
		if recErr == nil && rec.Keeper.PID != 0 && rec.Keeper.alive() {
			t.Errorf("killed after %d ms: the keeper is left", ms*ms)
		}
		// A keeper that was not recorded ends by itself; none may be there.
		eventually(t, "no process of the lab is left", func() bool { return !mentioned(name) })
	}
}

// mentioned reports whether a process has the name of a lab on its command line.
func mentioned(name string) bool {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return true
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), "/"+name) {
			return true
		}
	}
	return false
}

// again runs tests of this package once more in other circumstances.
func again(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if strings.Contains(string(out), "--- SKIP") || !strings.Contains(string(out), "PASS") {
		t.Errorf("nothing was shown:\n%s", out)
	}
}

// testsIn copies the test binary to where others may run it.
func testsIn(t *testing.T, dir string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "tests"), b, 0o755), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
}

func TestAnOrdinaryUserHasLabsToo(t *testing.T) {
	if rootless() {
		t.Skip("this is the run as an ordinary user already")
	}
	t.Parallel()
	dir, err := os.MkdirTemp("/tmp", "lab-user-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	testsIn(t, dir)
	const uid = 12345
	home := filepath.Join(dir, "home")
	if err := errors.Join(os.Mkdir(home, 0o700), os.Chown(home, uid, uid)); err != nil {
		t.Fatal(err)
	}
	tests := []string{
		"TestNodesAreMachinesOfTheirOwn", "TestTrafficGoesOverCableAndLAN", "TestACableIsCutMendedAndRenamed",
		"TestASilentCableKeepsItsCarrier", "TestAPowerCutLeavesTheDisk", "TestTheAgentAloneIsKilledAndStarted",
		"TestPauseStopsTheNodeOrItsAgent", "TestTheDiskIsAsLargeAsAskedFor", "TestMemoryIsLimitedWhereCgroupsAllow",
		"TestExecRunsAsTheUserAskedFor", "TestExecGivesATerminal", "TestDownLeavesNothing",
		"TestDownLeavesNothingAfterEverythingWasKilled", "TestUpKilledAtAnyMomentLeavesWhatDownRemoves",
	}
	cmd := exec.Command(filepath.Join(dir, "tests"), "-test.v", "-test.run=^("+strings.Join(tests, "|")+")$")
	cmd.Dir = home
	cmd.Env = []string{"HOME=" + home, "TMPDIR=" + home, "PATH=/usr/bin:/bin", asUser + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for _, must := range tests {
		if !strings.Contains(string(out), "--- PASS: "+must+" ") {
			t.Errorf("%s did not pass as an ordinary user", must)
		}
	}
	if _, err := os.Stat(fmt.Sprintf("/tmp/tbcluster-lab-%d", uid)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the user's labs is left (%v)", err)
	}
}

func TestLabsWorkInAChroot(t *testing.T) {
	if rootless() {
		t.Skip("only root can change its root; user namespaces cannot be made there")
	}
	if os.Getenv(asUser) == "chroot" {
		t.Skip("this is the run in the chroot already")
	}
	t.Parallel()
	dir, err := os.MkdirTemp("/tmp", "lab-chroot-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	testsIn(t, dir)
	for _, name := range []string{"bin", "lib", "lib64", "sbin"} {
		if err := os.Symlink("usr/"+name, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(filepath.Join(dir, "tests"), "inside", "chroot", dir, "-test.v",
		"-test.run=^(TestNodesAreMachinesOfTheirOwn|TestTrafficGoesOverCableAndLAN|TestAPowerCutLeavesTheDisk|TestDownLeavesNothing)$")
	cmd.Env = []string{"HOME=/root", "PATH=/usr/bin:/bin", asUser + "=chroot"}
	// The PID namespace ends what a failed test leaves.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	again(t, cmd)
}
