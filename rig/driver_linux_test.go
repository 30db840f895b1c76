package rig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
