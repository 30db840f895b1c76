package manifest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"path"
	"strings"
)

// Kind of an entry.
type Kind string

// The kinds.
const (
	File     Kind = "file"
	Dir      Kind = "dir"
	Symlink  Kind = "symlink"
	Hardlink Kind = "hardlink" // another name of the file Entry.Link
)

// Entry is one thing to copy. It travels as JSON; names are bytes, for they
// need not be UTF-8.
type Entry struct {
	// Index numbers the entries of a transfer from 0.
	Index int `json:"i"`
	// Root is the number of the source that it was found under.
	Root int `json:"r"`
	// Path below its root with slashes; empty for the root itself.
	Path []byte `json:"p,omitempty"`
	Kind Kind   `json:"k"`
	// Size in bytes of a File.
	Size int64 `json:"s,omitempty"`
	// Alloc is how many bytes a File takes on disk.
	Alloc int64 `json:"a,omitempty"`
	// Mode holds the nine permission bits.
	Mode uint32 `json:"m,omitempty"`
	// Mtime in nanoseconds since 1970.
	Mtime int64 `json:"t,omitempty"`
	// Target of a Symlink.
	Target []byte `json:"l,omitempty"`
	// Link is the Index of the File that a Hardlink is another name of.
	Link int `json:"h,omitempty"`
	// Sparse is set for a File with holes.
	Sparse bool `json:"sp,omitempty"`
	// Identity of a File's content as far as it can be known without reading:
	// node, path, inode, size and times. What has arrived of one identity is
	// never mixed with another.
	Identity []byte `json:"id,omitempty"`
}

// Root is a source as it was found.
type Root struct {
	// Abs is its absolute path on its node.
	Abs []byte `json:"abs"`
	// Name is its last component.
	Name []byte `json:"name"`
	Dir  bool   `json:"dir,omitempty"`
	// Contents is set for a directory written with a slash at its end: what is
	// in it is copied, not itself.
	Contents bool `json:"contents,omitempty"`
	// Device and Inode tell it from others on its node.
	Device uint64 `json:"dev"`
	Inode  uint64 `json:"ino"`
}

// Escapes reports whether a symlink at the slash path at, with that target,
// leads out of the tree that at is relative to, by its words alone.
func Escapes(at, target string) bool {
	if path.IsAbs(target) {
		return true
	}
	p := path.Join(path.Dir(at), target)
	return p == ".." || strings.HasPrefix(p, "../")
}

// identity is the value of Entry.Identity.
func identity(node, abs string, st stat) []byte {
	h := sha256.New()
	for _, s := range []string{node, abs} {
		_ = binary.Write(h, binary.BigEndian, uint64(len(s))) // a hash never fails
		h.Write([]byte(s))
	}
	for _, n := range []uint64{uint64(st.size), uint64(st.mtime), uint64(st.ctime), st.inode} {
		_ = binary.Write(h, binary.BigEndian, n)
	}
	return h.Sum(nil)
}

// maxSize of a file in bytes, 64 TiB: what is kept per chunk stays small.
const maxSize = 1 << 46

// Check reports what is wrong with an entry that came from another node, given
// the number of roots and that it is to be entry number index: a path that
// could lead out of the destination, a symlink that would, a number out of
// range.
func (e Entry) Check(index, roots int) error {
	switch {
	case e.Index != index:
		return fmt.Errorf("entry %d where %d was due", e.Index, index)
	case e.Root < 0 || e.Root >= roots:
		return fmt.Errorf("entry %d of source %d of %d", e.Index, e.Root, roots)
	case len(e.Path) > 0 && !localPath(string(e.Path)):
		return fmt.Errorf("path %q", e.Path)
	case e.Mode&^0o777 != 0:
		return fmt.Errorf("mode %o of %q", e.Mode, e.Path)
	}
	switch e.Kind {
	case File:
		if e.Size < 0 || e.Size > maxSize || e.Alloc < 0 || len(e.Identity) != sha256.Size {
			return fmt.Errorf("size or identity of %q", e.Path)
		}
	case Dir:
	case Symlink:
		if len(e.Target) == 0 || bytes.IndexByte(e.Target, 0) >= 0 || Escapes(string(e.Path), string(e.Target)) {
			return fmt.Errorf("symlink %q to %q", e.Path, e.Target)
		}
	case Hardlink:
		if e.Link < 0 || e.Link >= index {
			return fmt.Errorf("%q is a name of entry %d", e.Path, e.Link)
		}
	default:
		return fmt.Errorf("kind %q of %q", e.Kind, e.Path)
	}
	return nil
}

// CheckName reports whether a root's name can be a name in a directory.
func CheckName(name []byte) error {
	if s := string(name); s == "" || s == "." || s == ".." || strings.ContainsAny(s, "/\x00") {
		return fmt.Errorf("name %q", name)
	}
	return nil
}

// localPath reports whether p is relative, clean, and free of NUL and "..".
func localPath(p string) bool {
	return !strings.ContainsRune(p, 0) && path.Clean(p) == p && p != "." && p != ".." && !path.IsAbs(p) && !strings.HasPrefix(p, "../")
}
