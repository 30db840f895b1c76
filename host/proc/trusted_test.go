package proc

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestOnlyWhatNobodyElseCouldHavePutThereIsTrusted(t *testing.T) {
	if os.Geteuid() != 0 || !ManyUsers() {
		t.Skip("giving files to others needs root")
	}
	const ada, bob = 4001, 4002
	// dir makes a directory tree from the owner and mode of each step.
	type step struct {
		name     string
		uid, gid int
		mode     fs.FileMode
	}
	put := func(t *testing.T, steps ...step) string {
		p := t.TempDir()
		for i, s := range steps {
			p = filepath.Join(p, s.name)
			if i == len(steps)-1 {
				if err := os.WriteFile(p, []byte("#!/bin/sh\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			} else if err := os.Mkdir(p, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Chown(p, s.uid, s.gid), os.Chmod(p, s.mode)); err != nil {
				t.Fatal(err)
			}
		}
		return p
	}
	for _, c := range []struct {
		what  string
		steps []step
		ok    bool
	}{
		{"root's", []step{{"d", 0, 0, 0o755}, {"e", 0, 0, 0o755}}, true},
		{"her own", []step{{"d", ada, ada, 0o755}, {"e", ada, ada, 0o755}}, true},
		{"her own, with a group that is she", []step{{"d", ada, ada, 0o775}, {"e", ada, ada, 0o775}}, true},
		{"in a directory where each keeps his own", []step{{"d", 0, 0, fs.ModeSticky | 0o777}, {"e", ada, ada, 0o755}}, true},
		{"of another user", []step{{"d", 0, 0, 0o755}, {"e", bob, bob, 0o755}}, false},
		{"in another user's directory", []step{{"d", bob, bob, 0o755}, {"e", ada, ada, 0o755}}, false},
		{"below another user's directory", []step{{"d", bob, bob, 0o755}, {"d", 0, 0, 0o755}, {"e", 0, 0, 0o755}}, false},
		{"that everybody can write", []step{{"d", 0, 0, 0o755}, {"e", ada, ada, 0o777}}, false},
		{"in a directory that everybody can write", []step{{"d", 0, 0, 0o777}, {"e", ada, ada, 0o755}}, false},
		{"that another group can write", []step{{"d", 0, 0, 0o755}, {"e", ada, bob, 0o775}}, false},
		{"in a directory that another group can write", []step{{"d", 0, bob, 0o775}, {"e", 0, 0, 0o755}}, false},
	} {
		p := put(t, c.steps...)
		real, err := TrustedProgram(p, ada, ada)
		if (err == nil) != c.ok || c.ok && filepath.Base(real) != "e" {
			t.Errorf("%s: %q, %v", c.what, real, err)
		}
		// By a link, of whoever has it, in a place where others cannot change it.
		link := filepath.Join(t.TempDir(), "link")
		if err := os.Symlink(p, link); err != nil {
			t.Fatal(err)
		}
		if real, err = TrustedProgram(link, ada, ada); (err == nil) != c.ok || c.ok && real != p {
			t.Errorf("%s, by a link: %q, %v", c.what, real, err)
		}
	}
	good := put(t, step{"e", 0, 0, 0o755})
	link := filepath.Join(filepath.Dir(put(t, step{"d", bob, bob, 0o755}, step{"x", bob, bob, 0o755})), "link")
	if err := os.Symlink(good, link); err != nil {
		t.Fatal(err)
	}
	if real, err := TrustedProgram(link, ada, ada); err == nil {
		t.Errorf("a link that bob can point elsewhere leads to %s", real)
	}
	if _, err := TrustedProgram(filepath.Dir(good), ada, ada); err == nil {
		t.Error("a directory is a program")
	}
	if _, err := TrustedProgram("e", ada, ada); err == nil {
		t.Error("a relative path is one of somewhere")
	}
	if _, err := TrustedProgram(good+"x", ada, ada); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
