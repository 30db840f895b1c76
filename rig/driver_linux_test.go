package rig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

func TestADriverThatCannotBeLoadedIsRefusedBeforeBooting(t *testing.T) {
	text := filepath.Join(t.TempDir(), "README.md")
	if err := os.WriteFile(text, []byte("# Read me\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"/nosuch.ko": "no such file", text: "it is no kernel module", program: "no kernel module that says", t.TempDir(): "is a directory",
	} {
		topology := Pair().Each(func(h *HostSpec) { h.Driver = []string{file} })
		_, err := Up(t.Context(), topology, Options{Dir: filepath.Join(t.TempDir(), "x", "y")})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func TestADirectoryForLogsIsMadeButNotWhatIsAboveIt(t *testing.T) {
	above := filepath.Join(t.TempDir(), "x")
	for dir, want := range map[string]string{filepath.Join(above, "y"): "the directory above it", filepath.Dir(above): "", above: ""} {
		r := &Rig{options: Options{Dir: dir}}
		err := r.makeDir()
		switch {
		case want == "" && (err != nil || !isDir(dir)):
			t.Errorf("%s: %v", dir, err)
		case want != "" && (fault.As(err) == nil || !strings.Contains(fault.As(err).Fix, want)):
			t.Errorf("%s: %v", dir, err)
		}
		if err := os.RemoveAll(above); err != nil {
			t.Fatal(err)
		}
	}
}
