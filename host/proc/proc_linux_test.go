package proc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// role is set for copies of the test binary that play a part in a test.
const role = "TBCLUSTER_TEST_ROLE"

func TestMain(m *testing.M) {
	play, ok := roles[os.Getenv(role)]
	if !ok {
		os.Exit(m.Run())
	}
	if err := play(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

var roles = map[string]func() error{
	// Its child leaves a child of its own behind, which then has us as parent.
	"subreaper": func() error {
		if err := SetSubreaper(); err != nil {
			return err
		}
		out, err := exec.Command("sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!").Output()
		if err != nil {
			return err
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
		if err != nil {
			return err
		}
		s, err := Stat(pid)
		if err != nil {
			return err
		}
		if s.Parent != os.Getpid() {
			return fmt.Errorf("the orphan's parent is %d, not %d", s.Parent, os.Getpid())
		}
		if err := Signal(s.ID, syscall.SIGKILL); err != nil {
			return err
		}
		_, err = syscall.Wait4(pid, nil, 0, nil)
		return err
	},
	"no new privileges": func() error {
		if err := SetNoNewPrivileges(); err != nil {
			return err
		}
		tasks, err := filepath.Glob("/proc/self/task/*/status")
		if err != nil {
			return err
		}
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			if err != nil {
				return err
			}
			if !strings.Contains(string(b), "NoNewPrivs:\t1") {
				return fmt.Errorf("%s: not set", task)
			}
		}
		out, err := exec.Command("grep", "NoNewPrivs", "/proc/self/status").Output()
		if err != nil || strings.TrimSpace(string(out)) != "NoNewPrivs:\t1" {
			return fmt.Errorf("a child has %q, %v", out, err)
		}
		return nil
	},
	"not dumpable": func() error {
		if err := SetNonDumpable(); err != nil {
			return err
		}
		v, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
		if err != nil || v != 0 {
			return fmt.Errorf("dumpable is %d, %v", v, err)
		}
		return nil
	},
	// Waits, with its memory, until it is killed.
	"busy": func() error {
		block := make([]byte, 64<<20)
		for i := range block {
			block[i] = byte(i)
		}
		// 50 ms of a processor, however long it takes to get them.
		var u unix.Rusage
		for n := 0; u.Utime.Nano() < int64(50*time.Millisecond); n++ {
			block[n%len(block)]++
			if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
				return err
			}
		}
		fmt.Println("ready")
		_, err := io.Copy(io.Discard, os.Stdin)
		return errors.Join(err, fmt.Errorf("%d", block[0]))
	},
}

// start starts a copy of the test binary in a role.
func start(t *testing.T, as string) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), role+"="+as)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // and been waited for
	})
	return cmd, bufio.NewReader(out)
}

// sleeper starts a process that does nothing.
func sleeper(t *testing.T, group bool) (*exec.Cmd, ID) {
	t.Helper()
	cmd := exec.Command("sleep", "300")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: group}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	id, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, id
}

func TestRoles(t *testing.T) {
	for name := range roles {
		if name == "busy" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), role+"="+name)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

func TestThisProcess(t *testing.T) {
	id, err := Self()
	if err != nil || id.PID != os.Getpid() || id.StartTime == 0 || len(id.BootID) != 36 || !Alive(id) {
		t.Fatalf("got %+v, %v", id, err)
	}
	s, err := Stat(id.PID)
	if err != nil || s.Parent != os.Getppid() || s.Group != unix.Getpgrp() || s.Zombie {
		t.Errorf("got %+v, %v", s, err)
	}
}

func TestALaterProcessWithTheSameNumberIsAnother(t *testing.T) {
	_, id := sleeper(t, true)
	for name, other := range map[string]ID{
		"an earlier start": {id.PID, id.StartTime - 1, id.BootID},
		"an earlier boot":  {id.PID, id.StartTime, "another"},
	} {
		if Alive(other) {
			t.Errorf("%s: taken for alive", name)
		}
		if _, err := Open(other); !errors.Is(err, ErrGone) {
			t.Errorf("%s: open: %v", name, err)
		}
		if err := Signal(other, syscall.SIGKILL); !errors.Is(err, ErrGone) {
			t.Errorf("%s: signal: %v", name, err)
		}
		if err := SignalGroup(other, syscall.SIGKILL); !errors.Is(err, ErrGone) {
			t.Errorf("%s: signal the group: %v", name, err)
		}
		if _, err := Use(other); !errors.Is(err, ErrGone) {
			t.Errorf("%s: use: %v", name, err)
		}
	}
	if !Alive(id) {
		t.Error("it was killed for another's sake")
	}
}

func TestAZombieIsGone(t *testing.T) {
	cmd, id := sleeper(t, false)
	h, err := Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Nobody has collected its exit status.
	if s, err := Stat(id.PID); err != nil || !s.Zombie {
		t.Errorf("got %+v, %v", s, err)
	}
	if Alive(id) {
		t.Error("taken for alive")
	}
	if _, err := Open(id); !errors.Is(err, ErrGone) {
		t.Errorf("open: %v", err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it ended well")
	}
	if _, err := Stat(id.PID); !errors.Is(err, ErrGone) {
		t.Errorf("after it was collected: %v", err)
	}
	if err := h.Signal(syscall.SIGTERM); !errors.Is(err, ErrGone) {
		t.Errorf("signal: %v", err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Errorf("wait again: %v", err)
	}
}

func TestWaitingIsEndedByItsContext(t *testing.T) {
	_, id := sleeper(t, false)
	h, err := Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := h.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	// The handle still works.
	if err := h.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if h.ID() != id {
		t.Errorf("ID %+v", h.ID())
	}
}

func TestAGroupOutlivesItsLeader(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 300 >/dev/null & echo; read x")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	leader, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	members, err := Group(leader.PID)
	if err != nil || len(members) != 2 {
		t.Fatalf("members %+v, %v", members, err)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // `read` fails at the end of its input
	if members, err = Group(leader.PID); err != nil || len(members) != 1 || members[0].ID == leader {
		t.Fatalf("without its leader: %+v, %v", members, err)
	}
	h, err := Open(members[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := SignalGroup(leader, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if members, err = Group(leader.PID); err != nil || len(members) != 0 {
		t.Errorf("after the signal: %+v, %v", members, err)
	}
}

func TestGroupsThatMustNotBeSignalled(t *testing.T) {
	boot, err := BootID()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{-5, 0, 1} {
		if err := SignalGroup(ID{PID: pid, BootID: boot}, 0); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("%d: %v", pid, err)
		}
	}
	cmd, id := sleeper(t, true)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if err := SignalGroup(id, syscall.SIGKILL); !errors.Is(err, ErrGone) {
		t.Errorf("a group that is gone: %v", err)
	}
}

func TestWhatAProcessUses(t *testing.T) {
	cmd, out := start(t, "busy")
	if line, err := out.ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	id, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	u, err := Use(id)
	if err != nil || u.RSS < 64<<20 || u.RSS > 1<<30 || u.CPU < 20*time.Millisecond || u.CPU > time.Minute {
		t.Errorf("got %+v, %v", u, err)
	}
}

func TestNamesWithEverythingInThem(t *testing.T) {
	const rest = " S 10 20 30 0 -1 4194304 1 2 3 4 150 50 7 8 20 0 1 0 987654 12345 3 18446744073709551615 0"
	for _, name := range []string{"a b", "x) R 1 (y", "((", "))", "new\nline", ""} {
		s, err := parseStat("42 ("+name+")"+rest, 4096)
		want := State{ID: ID{PID: 42, StartTime: 987654}, Parent: 10, Group: 20, Name: name,
			Usage: Usage{RSS: 3 * 4096, CPU: 2 * time.Second}}
		if err != nil || s != want {
			t.Errorf("%q: got %+v, %v", name, s, err)
		}
	}
	for _, bad := range []string{"", "42", "42 (x", "x (y)" + rest, "0 (x)" + rest, "42 (x) S 1 2", "42 )x(" + rest, "42 (x) S a" + rest} {
		if s, err := parseStat(bad, 4096); err == nil {
			t.Errorf("%q: got %+v", bad, s)
		}
	}
	// A real one.
	script := filepath.Join(t.TempDir(), ") R 1 (")
	if err := os.Symlink("/bin/sleep", script); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(script, "300")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	s, err := Stat(cmd.Process.Pid)
	if err != nil || s.Parent != os.Getpid() || s.PID != cmd.Process.Pid {
		t.Errorf("got %+v, %v", s, err)
	}
}

func FuzzStat(f *testing.F) {
	f.Add("42 (x) S 10 20 30 0 -1 4194304 1 2 3 4 150 50 7 8 20 0 1 0 987654 12345 3 18446744073709551615 0")
	f.Add("1 (a) b) c) Z 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseStat(text, 4096)
		if err == nil && (s.PID <= 0 || !strings.Contains(text, "("+s.Name+")")) {
			t.Errorf("impossible %+v", s)
		}
	})
}

func FuzzPS(f *testing.F) {
	for _, s := range []string{"  1024   0:01.50", "5 2-03:04:05", "1 01:02:03", "x y", "1 -1:0", "1 NaN:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		if u, err := parsePS(line); err == nil && u.CPU < 0 {
			t.Errorf("impossible %+v", u)
		}
	})
}

func TestTimesOfPS(t *testing.T) {
	for line, want := range map[string]time.Duration{
		" 12 0:01.50\n": 1500 * time.Millisecond,
		"12 1:02:03":    time.Hour + 2*time.Minute + 3*time.Second,
		"12 2-03:04:05": 51*time.Hour + 4*time.Minute + 5*time.Second,
		"12 0-00:00:05": 5 * time.Second,
	} {
		if u, err := parsePS(line); err != nil || u.CPU != want || u.RSS != 12<<10 {
			t.Errorf("%q: got %+v, %v", line, u, err)
		}
	}
}
