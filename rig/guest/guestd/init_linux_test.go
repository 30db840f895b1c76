package main

import (
	"os"
	"path/filepath"
	"testing"
)

// Files are laid over a root without changing what is around them.
func TestLayOver(t *testing.T) {
	from, to := filepath.Join(t.TempDir(), "overlay"), t.TempDir()
	if err := layOver(from, to); err != nil {
		t.Fatalf("nothing to lay over: %v", err)
	}
	write := func(path, text string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(from, "root/secret"), "new", 0o600)
	write(filepath.Join(from, "etc/a/b"), "b", 0o644)
	write(filepath.Join(to, "root/secret"), "old and longer", 0o444)
	write(filepath.Join(to, "root/other"), "other", 0o644)
	if err := os.Chmod(filepath.Join(to, "root"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("b", filepath.Join(from, "etc/a/link")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // as at a second boot
		if err := layOver(from, to); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{"root/secret": "new", "root/other": "other", "etc/a/b": "b", "etc/a/link": "b"} {
		if got, err := os.ReadFile(filepath.Join(to, path)); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", path, got, err)
		}
	}
	for path, want := range map[string]os.FileMode{"root": 0o700, "root/secret": 0o600, "etc/a": 0o755} {
		if i, err := os.Stat(filepath.Join(to, path)); err != nil || i.Mode().Perm() != want {
			t.Errorf("%s has mode %v, %v", path, i.Mode(), err)
		}
	}
	if to, err := os.Readlink(filepath.Join(to, "etc/a/link")); err != nil || to != "b" {
		t.Errorf("the link leads to %q, %v", to, err)
	}
}
