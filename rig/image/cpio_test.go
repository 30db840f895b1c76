package image

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// entry is what a reader of "newc" archives sees.
type entry struct {
	name, data          string
	mode                uint32
	major, minor, inode int64
}

// readArchive reads an archive by the kernel's description of it.
func readArchive(t *testing.T, b []byte) []entry {
	t.Helper()
	var list []entry
	for at := 0; ; {
		if !bytes.HasPrefix(b[at:], []byte("070701")) {
			t.Fatalf("no entry at %d", at)
		}
		var n [13]int64
		for i := range n {
			v, err := strconv.ParseInt(string(b[at+6+8*i:at+14+8*i]), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			n[i] = v
		}
		size, nameSize := int(n[6]), int(n[11])
		name := string(b[at+110 : at+110+nameSize-1])
		at = (at + 110 + nameSize + 3) &^ 3
		if name == "TRAILER!!!" {
			if rest := bytes.Trim(b[at:], "\x00"); len(rest) > 0 || len(b)%512 != 0 {
				t.Errorf("%d bytes follow, %d in all", len(rest), len(b))
			}
			return list
		}
		list = append(list, entry{name: name, data: string(b[at : at+size]), mode: uint32(n[1]), major: n[9], minor: n[10], inode: n[0]})
		at = (at + size + 3) &^ 3
	}
}

func TestAnArchiveHasWhatWasPutIn(t *testing.T) {
	source := filepath.Join(t.TempDir(), "big")
	if err := os.WriteFile(source, bytes.Repeat([]byte("x"), 100_001), 0o600); err != nil {
		t.Fatal(err)
	}
	files := []File{
		{Path: "/usr/bin/tool", Mode: 0o755, Source: source},
		{Path: "/bin", Mode: fs.ModeSymlink, Data: []byte("usr/bin")},
		{Path: "/dev/console", Mode: fs.ModeDevice | fs.ModeCharDevice | 0o600, Major: 5, Minor: 1},
		{Path: "/tmp", Mode: fs.ModeDir | fs.ModeSticky | 0o777},
		{Path: "/etc/a", Mode: 0o644, Data: []byte("abc")},
	}
	var out, again bytes.Buffer
	if err := WriteArchive(&out, files); err != nil {
		t.Fatal(err)
	}
	files[0], files[4] = files[4], files[0]
	if err := WriteArchive(&again, files); err != nil || !bytes.Equal(out.Bytes(), again.Bytes()) {
		t.Errorf("the same files in another order make another archive (%v)", err)
	}
	want := []entry{
		{name: "bin", mode: 0o120777, data: "usr/bin"},
		{name: "dev", mode: 0o040755}, {name: "dev/console", mode: 0o020600, major: 5, minor: 1},
		{name: "etc", mode: 0o040755}, {name: "etc/a", mode: 0o100644, data: "abc"},
		{name: "tmp", mode: 0o041777},
		{name: "usr", mode: 0o040755}, {name: "usr/bin", mode: 0o040755}, {name: "usr/bin/tool", mode: 0o100755, data: strings.Repeat("x", 100_001)},
	}
	got := readArchive(t, out.Bytes())
	if len(got) != len(want) {
		t.Fatalf("%d entries, want %d", len(got), len(want))
	}
	inodes := map[int64]bool{}
	for i, g := range got {
		inodes[g.inode] = true
		g.inode = 0
		if g != want[i] {
			t.Errorf("entry %d is %q %o, want %q %o", i, g.name, g.mode, want[i].name, want[i].mode)
		}
	}
	if len(inodes) != len(want) {
		t.Error("two files have one inode: the kernel would take them for links")
	}
}

func TestAnArchiveRefusesNamesThatMeanSomethingElse(t *testing.T) {
	for _, files := range [][]File{
		{{Path: "relative"}}, {{Path: "/a/../b"}}, {{Path: "/a/"}}, {{Path: "/a\x00b"}}, {{Path: "/a"}, {Path: "/a"}},
		{{Path: "/a"}, {Path: "/a/b"}}, {{Path: "/s", Mode: fs.ModeSocket}}, {{Path: "/x", Source: "/no/such/file"}},
	} {
		if err := WriteArchive(&bytes.Buffer{}, files); err == nil {
			t.Errorf("%q became an archive", files[0].Path)
		}
	}
}
