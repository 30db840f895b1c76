package guest

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMain is, for one test, a process that makes a directory and waits to be
// killed.
func TestMain(m *testing.M) {
	if os.Getenv("RIG_TEMPDIR_CHILD") == "" {
		os.Exit(m.Run())
	}
	dir, _, err := TempDir("child")
	if err != nil {
		dir = err.Error()
	}
	_, _ = os.Stdout.WriteString(dir + "\n")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

func exists(t *testing.T, name string) bool {
	t.Helper()
	_, err := os.Stat(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestDirectoriesOfTheDeadAreRemoved(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	mine, remove, err := TempDir("")
	if err != nil {
		t.Fatal(err)
	}
	// Not ours to remove: one without a lock may be one that is being made.
	unlocked := filepath.Join(os.TempDir(), "rig-unlocked")
	if err := os.Mkdir(unlocked, 0o700); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(self)
	child.Env = append(os.Environ(), "RIG_TEMPDIR_CHILD=1")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	theirs := strings.TrimSpace(line)
	if err := os.WriteFile(filepath.Join(theirs, "console.log"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	second, removeSecond, err := TempDir("second")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{mine, theirs, second} {
		if !exists(t, dir) {
			t.Errorf("%s is gone, and its process lives", dir)
		}
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	if !exists(t, theirs) {
		t.Error("who is killed removes nothing")
	}
	_, removeThird, err := TempDir("")
	if err != nil {
		t.Fatal(err)
	}
	if exists(t, theirs) || !exists(t, mine) || !exists(t, second) || !exists(t, unlocked) {
		t.Errorf("after the next: of the dead %v, of the living %v %v, without a lock %v", exists(t, theirs), exists(t, mine), exists(t, second), exists(t, unlocked))
	}
	for _, f := range []func() error{remove, removeSecond, removeThird} {
		if err := f(); err != nil {
			t.Error(err)
		}
	}
	if exists(t, mine) {
		t.Error("it was removed and is there")
	}
}
