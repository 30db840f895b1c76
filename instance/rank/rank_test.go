package rank

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
)

// The test binary is the shim too.
func TestMain(m *testing.M) {
	if dir := os.Getenv("TBCLUSTER_TEST_SHIM"); dir != "" {
		os.Exit(Main(dir))
	}
	os.Exit(m.Run())
}

func shell(t *testing.T, script string) Process {
	t.Helper()
	return Process{InstanceID: "test-" + strings.ReplaceAll(t.Name(), "/", "-"), Program: "/bin/sh", Args: []string{"-c", script}, Grace: 10 * time.Second}
}

// launch runs the shim on p and returns its directory and process.
func launch(t *testing.T, p Process) (string, *exec.Cmd) {
	t.Helper()
	dir := t.TempDir()
	if err := WriteProcess(dir, p); err != nil {
		t.Fatal(err)
	}
	return dir, relaunch(t, dir)
}

func relaunch(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TBCLUSTER_TEST_SHIM="+dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if err := Clean(dir); err != nil {
			t.Errorf("clean: %v", err)
		}
	})
	return cmd
}

// until polls a condition with a generous limit.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for: %s", what)
		}
	}
}

func phase(t *testing.T, dir string, want Phase) Status {
	t.Helper()
	var s Status
	until(t, "phase "+string(want), func() bool {
		var err error
		s, err = Observe(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return s.Phase == want
	})
	return s
}

func logged(dir, text string) func() bool {
	return func() bool {
		lines, err := LastOf(dir, 1000)
		if err != nil {
			return false
		}
		for _, l := range lines {
			if strings.Contains(l.Text, text) {
				return true
			}
		}
		return false
	}
}

func gone(pid int) func() bool {
	return func() bool { return !identOf(pid).Alive() }
}

func TestExitStatusAndLastLinesAreOnDisk(t *testing.T) {
	dir, cmd := launch(t, shell(t, `echo out; echo err >&2; printf 'no newline'; exit 3`))
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the shim: %v", err)
	}
	s := phase(t, dir, Ended)
	if s.ExitCode != 3 || s.Signal != 0 || s.Exit() != "exit 3" {
		t.Errorf("status %+v", s)
	}
	if got := strings.Join(s.LastLines, "|"); got != "out|err|no newline" {
		t.Errorf("last lines %q", got)
	}
	if s.Ended.Before(s.Started) || s.Engine.PID == 0 {
		t.Errorf("times or pid: %+v", s)
	}
	if _, err := os.Stat(filepath.Join(dir, "tmp")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the temporary directory is still there: %v", err)
	}
}

func TestAProgramThatIsNotThereIsSaidSo(t *testing.T) {
	p := shell(t, "")
	p.Program = "/nonexistent/engine"
	dir, cmd := launch(t, p)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the shim: %v", err)
	}
	s := phase(t, dir, Ended)
	if !strings.Contains(s.Exit(), "no such file") {
		t.Errorf("exit %q", s.Exit())
	}
}

func TestEnvironmentIsExplicit(t *testing.T) {
	t.Setenv("SECRET_OF_THE_SHIM", "x")
	p := shell(t, `env; echo "cwd $(pwd)"; touch "$TMPDIR/made"`)
	p.Env = map[string]string{"GIVEN": "1"}
	dir, cmd := launch(t, p)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	all := strings.Join(phase(t, dir, Ended).LastLines, "\n")
	if strings.Contains(all, "SECRET_OF_THE_SHIM") || strings.Contains(all, "TBCLUSTER_TEST_SHIM") {
		t.Errorf("inherited too much:\n%s", all)
	}
	for _, want := range []string{"GIVEN=1", "TMPDIR=" + dir + "/tmp", "cwd " + dir + "/tmp", "HOME="} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
}

func TestStopLeavesNoDescendant(t *testing.T) {
	// One child ignores SIGTERM and has left the group and the session.
	dir, cmd := launch(t, shell(t, `setsid sh -c 'trap "" TERM; echo stray $$; while :; do sleep 1; done' & sleep 1000 & echo up; wait`))
	until(t, "the stray", logged(dir, "stray "))
	until(t, "up", logged(dir, "up"))
	var stray int
	lines, err := LastOf(dir, 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if n, ok := strings.CutPrefix(l.Text, "stray "); ok {
			stray, err = strconv.Atoi(n)
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := End(dir, false); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the shim: %v", err)
	}
	s := phase(t, dir, Ended)
	if s.Signal != int(syscall.SIGTERM) || s.Killed {
		t.Errorf("status %+v", s)
	}
	if !gone(stray)() || !gone(s.Engine.PID)() {
		t.Error("a process is left")
	}
}

func TestAnEngineThatIgnoresTermIsKilledAfterItsGrace(t *testing.T) {
	p := shell(t, `trap "" TERM; echo up; while :; do sleep 1; done`)
	p.Grace = 200 * time.Millisecond
	dir, cmd := launch(t, p)
	until(t, "up", logged(dir, "up"))
	if err := End(dir, false); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if s := phase(t, dir, Ended); s.Signal != int(syscall.SIGKILL) || !s.Killed {
		t.Errorf("status %+v", s)
	}
}

func TestKillDoesNotWaitForTheGrace(t *testing.T) {
	p := shell(t, `trap "" TERM; echo up; while :; do sleep 1; done`)
	p.Grace = time.Hour
	dir, cmd := launch(t, p)
	until(t, "up", logged(dir, "up"))
	if err := End(dir, true); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if s := phase(t, dir, Ended); !s.Killed {
		t.Errorf("status %+v", s)
	}
}

func TestAKilledShimTakesTheEngineWithIt(t *testing.T) {
	// The child of the engine lives on: Clean finds it by its mark.
	dir, cmd := launch(t, shell(t, `(trap "" TERM HUP; while :; do sleep 1; done) & echo child $!; while :; do sleep 1; done`))
	until(t, "the child", logged(dir, "child "))
	s := phase(t, dir, Running)
	lines, err := LastOf(dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimPrefix(lines[0].Text, "child "))
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	until(t, "the engine to die", gone(s.Engine.PID))
	got := phase(t, dir, Ended)
	if !strings.Contains(got.Exit(), "shim was killed") || len(got.LastLines) == 0 {
		t.Errorf("status %+v", got)
	}
	if err := End(dir, false); err != nil {
		t.Fatal(err)
	}
	if !gone(child)() {
		t.Error("the child of the engine is left")
	}
}

func TestOneShimPerDirectory(t *testing.T) {
	dir, _ := launch(t, shell(t, `echo up; sleep 1000`))
	until(t, "up", logged(dir, "up"))
	if err := run(dir); !errors.Is(err, errHeld) {
		t.Errorf("a second shim: %v", err)
	}
	if err := Clean(dir); !errors.Is(err, errHeld) {
		t.Errorf("clean under a living shim: %v", err)
	}
}

func TestWaitSeesTheEndOfAProcessThatIsNoChild(t *testing.T) {
	dir, cmd := launch(t, shell(t, `echo up; sleep 1000`))
	until(t, "up", logged(dir, "up"))
	s := phase(t, dir, Running)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := s.Engine.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("while it runs: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Engine.Wait(context.Background()) }()
	if err := syscall.Kill(s.Engine.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if s := phase(t, dir, Ended); s.Exit() != "signal 9 (killed)" {
		t.Errorf("exit %q", s.Exit())
	}
}

func TestIdentKnowsAnOtherProcessOfTheSameNumber(t *testing.T) {
	me := Self()
	if !me.Alive() {
		t.Fatal("we are alive")
	}
	other := me
	other.StartTime++
	if other.Alive() {
		t.Error("another start is another process")
	}
	other = me
	other.BootID = "another"
	if other.Alive() {
		t.Error("another boot is another process")
	}
}

func TestLogIsRotatedAndFollowedAcross(t *testing.T) {
	const n = 3000
	p := shell(t, fmt.Sprintf(`i=0; while [ $i -lt %d ]; do echo "line $i"; i=$((i+1)); done`, n))
	p.LogBytes, p.LogFiles = 64<<10, 3
	p.Skip = []string{"line 7"}
	dir, _ := launch(t, p)
	until(t, "a status", func() bool { _, err := ReadStatus(dir); return err == nil })
	want, got := 0, 0
	err := TailLog(context.Background(), dir, time.Unix(1, 0), true, func(l Line) error {
		for strings.HasPrefix(fmt.Sprint("line ", want), "line 7") {
			want++
		}
		if l.Text != fmt.Sprint("line ", want) {
			return fmt.Errorf("got %q, want line %d", l.Text, want)
		}
		want++
		got++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got < n-200 {
		t.Errorf("%d lines", got)
	}
	if st, err := os.Stat(filepath.Join(dir, "log.1")); err != nil || st.Size() > 64<<10 {
		t.Errorf("log.1: %v %v", st, err)
	}
	lines, err := LastOf(dir, 5)
	if err != nil || len(lines) != 5 || lines[4].Text != fmt.Sprint("line ", n-1) {
		t.Errorf("last %v, %v", lines, err)
	}
}

func TestSinceLeavesOutWhatIsOlder(t *testing.T) {
	dir := t.TempDir()
	log := "2026-01-01T00:00:00.000000Z old\n2026-01-02T00:00:00.000000Z new\nof the same time\n"
	if err := os.WriteFile(filepath.Join(dir, LogFile), []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := TailLog(context.Background(), dir, time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC), false, func(l Line) error {
		got = append(got, l.Text)
		return nil
	})
	if err != nil || strings.Join(got, "|") != "new|of the same time" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestLogCannotSteerATerminal(t *testing.T) {
	var got []string
	err := copyLines(strings.NewReader("a\x1b[31mb\n\xff\rprogress 1\rprogress 2\n"+strings.Repeat("x", maxLine+5)), func(s string) { got = append(got, s) })
	if err != nil || len(got) != 6 || got[0] != "a[31mb" || got[1] != "\uFFFD" || got[3] != "progress 2" || len(got[5]) != 5 {
		t.Errorf("%d %.40q, %v", len(got), got, err)
	}
}

func TestAPipeInPlaceOfAFileDoesNotHoldUs(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, StatusFile), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadStatus(dir); err == nil {
		t.Error("a pipe was read")
	}
}
