package image

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(Options{Dir: t.TempDir(), Mirror: "none"})
	if err != nil {
		t.Skip(err)
	}
	return s
}

func TestManyBuildersBuildOnce(t *testing.T) {
	s := openStore(t)
	var built atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			dir, err := s.ensure(t.Context(), part{name: "x", recipe: []string{"a"}, build: func(_ context.Context, dir string) error {
				built.Add(1)
				return os.WriteFile(filepath.Join(dir, "file"), []byte("whole"), 0o644)
			}})
			if err != nil {
				t.Error(err)
				return
			}
			if b, err := os.ReadFile(filepath.Join(dir, "file")); string(b) != "whole" {
				t.Errorf("%q %v", b, err)
			}
		})
	}
	all.Wait()
	if built.Load() != 1 {
		t.Errorf("built %d times", built.Load())
	}
	if _, err := s.ensure(t.Context(), part{name: "x", recipe: []string{"b"}, build: func(context.Context, string) error { built.Add(1); return nil }}); err != nil || built.Load() != 2 {
		t.Errorf("another recipe: %v, built %d times", err, built.Load())
	}
}

func TestABuildThatFailsLeavesNothing(t *testing.T) {
	s := openStore(t)
	broken := errors.New("the oven is cold")
	p := part{name: "x", build: func(_ context.Context, dir string) error {
		return errors.Join(broken, os.WriteFile(filepath.Join(dir, "half"), nil, 0o644))
	}}
	if _, err := s.ensure(t.Context(), p); !errors.Is(err, broken) || fault.As(err) == nil {
		t.Errorf("%v", err)
	}
	left, err := filepath.Glob(filepath.Join(s.dir, "x-*", "*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	p.build = func(context.Context, string) error { return nil }
	if _, err := s.ensure(t.Context(), p); err != nil {
		t.Errorf("the next attempt: %v", err)
	}
}

// builderEnv makes this test binary a builder that never ends.
const builderEnv = "TBCLUSTER_TEST_BUILDER"

func TestABuilderThatWasKilledIsNoHindrance(t *testing.T) {
	slow := part{name: "x", build: func(ctx context.Context, dir string) error {
		if err := os.WriteFile(filepath.Join(dir, "half"), nil, 0o644); err != nil {
			return err
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}}
	if dir := os.Getenv(builderEnv); dir != "" {
		s, err := Open(Options{Dir: dir, Mirror: "none"})
		if err == nil {
			_, err = s.ensure(context.Background(), slow)
		}
		t.Fatal(err)
	}
	s := openStore(t)
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), builderEnv+"="+s.dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	half := filepath.Join(s.dir, slow.key()+".new-*", "half")
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if found, err := filepath.Glob(half); err == nil && len(found) == 1 {
			break
		}
		if time.Since(begun) > time.Minute {
			t.Fatal("the other builder never began")
		}
	}
	// While it lives, others wait for it, and may give up.
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := s.ensure(ctx, slow); !fault.Is(err, fault.Interrupted) {
		t.Errorf("beside a builder that lives: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	slow.build = func(context.Context, string) error { return nil }
	if _, err := s.ensure(t.Context(), slow); err != nil {
		t.Fatal(err)
	}
	if found, err := filepath.Glob(half); err != nil || len(found) != 0 {
		t.Errorf("left behind: %v %v", found, err)
	}
}

func TestTheWorkspacesOfDeadBuildersAreRemoved(t *testing.T) {
	tools := &Tools{root: t.TempDir()}
	dead := filepath.Join(tools.root, "tmp", "rig-dead", "source")
	if err := os.MkdirAll(dead, 0o755); err != nil {
		t.Fatal(err)
	}
	err := tools.inWorkspace(func(_, first string) error {
		if isDir(dead) {
			t.Error("the dead one's is there")
		}
		return tools.inWorkspace(func(inside, second string) error {
			if !isDir(first) || first == second || filepath.Join(tools.root, inside) != second {
				t.Errorf("beside %s there is %s", second, first)
			}
			return nil
		})
	})
	if err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(tools.root, "tmp", "rig-*")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestABuildThatDoesNotFitIsNotBegun(t *testing.T) {
	s := openStore(t)
	_, err := s.ensure(t.Context(), part{name: "x", need: 1 << 60, build: func(context.Context, string) error { t.Error("begun"); return nil }})
	if f := fault.As(err); f == nil || f.Reason != fault.DiskFull || f.Fix == "" {
		t.Errorf("%v", err)
	}
	if err := s.explain(t.Context(), part{}, unix.ENOSPC); !fault.Is(err, fault.DiskFull) {
		t.Errorf("%v", err)
	}
	if err := s.explain(t.Context(), part{}, &commandError{args: []string{"tar"}, err: errors.New("exit status 2"), said: "tar: x: Cannot write: No space left on device"}); !fault.Is(err, fault.DiskFull) {
		t.Errorf("%v", err)
	}
}

func TestOldPartsAreRemoved(t *testing.T) {
	s := openStore(t)
	make := func(name, recipe string) string {
		dir, err := s.ensure(t.Context(), part{name: name, recipe: []string{recipe}, build: func(context.Context, string) error { return nil }})
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	// Of another recipe, by a builder that was killed, and by one that lives.
	half := filepath.Join(s.dir, part{name: "x", recipe: []string{"half"}}.key()+".new-1")
	live := filepath.Join(s.dir, part{name: "x", recipe: []string{"live"}}.key()+".new-1")
	for _, dir := range []string{half, live} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	unlock, err := s.lock(t.Context(), part{name: "x", recipe: []string{"live"}})
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	free, err := s.lock(t.Context(), part{name: "x", recipe: []string{"half"}})
	if err != nil {
		t.Fatal(err)
	}
	free()
	old, fresh, other := make("x", "old"), make("x", "fresh"), make("x-y", "old")
	long := time.Now().Add(-2 * unusedFor)
	for _, dir := range []string{old, other} {
		if err := os.Chtimes(dir, long, long); err != nil {
			t.Fatal(err)
		}
	}
	kept := make("x", "new")
	for dir, want := range map[string]bool{half: false, live: true, old: false, fresh: true, other: true, kept: true} {
		if isDir(dir) != want {
			t.Errorf("%s is there: %v", filepath.Base(dir), !want)
		}
	}
}

func TestWhatCannotBeHadSaysSo(t *testing.T) {
	err := needs("bake", "no-such-program-anywhere")
	if os.Geteuid() != 0 {
		if !fault.Is(err, fault.NoPermission) {
			t.Errorf("%v", err)
		}
		return
	}
	if f := fault.As(err); f == nil || f.Reason != fault.Unsupported || !strings.Contains(f.What, "no-such-program-anywhere") || f.Fix == "" {
		t.Errorf("%v", err)
	}
}
