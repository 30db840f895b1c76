package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

const source = `#include <linux/module.h>
static int __init mine_init(void) { return WORTH; }
module_init(mine_init);
MODULE_LICENSE("GPL");
`

// A directory that is not ours becomes a module for the guests' kernel, and a
// mistake in it is named by the file of that directory.
func TestADirectoryIsBuiltForTheGuestsKernel(t *testing.T) {
	if testing.Short() {
		t.Skip("needs the images")
	}
	s, err := Open(Options{Log: func(line string) { t.Log(line) }})
	if err == nil {
		_, err = s.Tools(t.Context())
	}
	if Unavailable(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("mine.c", source)
	write("mine.o", "of another kernel, an age ago")
	write("Kbuild", "obj-m += mine.o\n")
	_, _, err = s.BuildModules(t.Context(), Backport, dir)
	if f := fault.As(err); f == nil || f.Where != dir || !strings.HasPrefix(f.Why, "mine.c:") || !strings.Contains(f.Why, "mine.c:2:") {
		t.Errorf("the mistake is said so: %v", err)
	}
	write("include/worth.h", "#define WORTH 0\n")
	write("mine.c", "#include \"include/worth.h\"\n"+source)
	built, release, err := s.BuildModules(t.Context(), Backport, dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(built) != 1 || built[0] != filepath.Join(dir, "mine.ko") {
		t.Fatalf("it built %q", built)
	}
	b, err := os.ReadFile(built[0])
	if err != nil || !strings.HasPrefix(string(b), "\x7fELF") || !strings.Contains(string(b), "vermagic="+release+" ") {
		t.Errorf("the module is not for %s: %v", release, err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 5 { // mine.c, mine.o, mine.ko, Kbuild, include
		t.Errorf("there are %v: %v", left, err)
	}
}

func TestADirectoryThatBuildsNoModule(t *testing.T) {
	s := openStore(t)
	for dir, want := range map[string]string{filepath.Join(t.TempDir(), "x"): "no such file", t.TempDir(): "no Kbuild"} {
		if _, _, err := s.BuildModules(t.Context(), Backport, dir); !fault.Is(err, fault.FileMissing) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
