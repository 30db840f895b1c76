package image

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
)

// File is one entry of an archive that a guest unpacks into its root.
type File struct {
	// Path is where it lies in the guest, absolute.
	Path string
	// Mode has the type (directory, symlink, device, else a regular file) and
	// the permissions.
	Mode fs.FileMode
	// Data is the content of a file, or where a symlink points to.
	Data []byte
	// Source is a file of the machine with the content, instead of Data.
	Source string
	// Major and Minor are those of a device.
	Major, Minor uint32
}

// WriteArchive writes files as a cpio archive of the kind that Linux unpacks at
// boot ("newc", Documentation/driver-api/early-userspace/buffer-format.rst).
// Archives may follow one another: what comes later is laid over. Directories
// that are not named are made, and the same files always make the same bytes.
func WriteArchive(w io.Writer, files []File) error {
	all, err := withDirectories(files)
	if err != nil {
		return err
	}
	c := cpioWriter{w: w}
	for i, f := range all {
		if err := c.entry(uint32(i+1), f); err != nil {
			return fmt.Errorf("archive %s: %w", f.Path, err)
		}
	}
	return c.end()
}

// withDirectories sorts the files, adds the directories above them, and refuses
// names that the kernel would take for something else.
func withDirectories(files []File) ([]File, error) {
	byPath := map[string]File{}
	for _, f := range files {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || strings.ContainsRune(f.Path, 0) {
			return nil, fmt.Errorf("%q is no clean absolute path", f.Path)
		}
		if f.Path == "/" {
			continue
		}
		if _, twice := byPath[f.Path]; twice {
			return nil, fmt.Errorf("%s is in the archive twice", f.Path)
		}
		byPath[f.Path] = f
	}
	for _, f := range files {
		for dir := path.Dir(f.Path); dir != "/"; dir = path.Dir(dir) {
			above, ok := byPath[dir]
			if ok && !above.Mode.IsDir() {
				return nil, fmt.Errorf("%s lies under %s, which is no directory", f.Path, dir)
			}
			if !ok {
				byPath[dir] = File{Path: dir, Mode: fs.ModeDir | 0o755}
			}
		}
	}
	all := make([]File, 0, len(byPath))
	for _, f := range byPath {
		all = append(all, f)
	}
	// A directory comes before what is in it: "/a" sorts before "/a/b".
	sort.Slice(all, func(i, j int) bool { return all[i].Path < all[j].Path })
	return all, nil
}

// The types of files, cpio(5).
const (
	typeFIFO    = 0o010000
	typeChar    = 0o020000
	typeDir     = 0o040000
	typeBlock   = 0o060000
	typeRegular = 0o100000
	typeLink    = 0o120000
)

// cpioMode returns the mode word of an archive.
func cpioMode(m fs.FileMode) (uint32, error) {
	mode := uint32(m.Perm())
	for bit, flag := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if m&bit != 0 {
			mode |= flag
		}
	}
	switch m.Type() {
	case 0:
		return mode | typeRegular, nil
	case fs.ModeDir:
		return mode | typeDir, nil
	case fs.ModeSymlink:
		return 0o777 | typeLink, nil
	case fs.ModeDevice | fs.ModeCharDevice:
		return mode | typeChar, nil
	case fs.ModeDevice:
		return mode | typeBlock, nil
	case fs.ModeNamedPipe:
		return mode | typeFIFO, nil
	}
	return 0, fmt.Errorf("files of type %v are not archived", m.Type())
}

// cpioWriter writes entries and counts bytes, because everything is padded.
type cpioWriter struct {
	w io.Writer
	n int64
}

func (c *cpioWriter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

var padding [512]byte

func (c *cpioWriter) pad(to int64) error {
	if rest := c.n % to; rest != 0 {
		_, err := c.Write(padding[:to-rest])
		return err
	}
	return nil
}

func (c *cpioWriter) entry(inode uint32, f File) error {
	mode, err := cpioMode(f.Mode)
	if err != nil {
		return err
	}
	content, size := io.Reader(bytes.NewReader(f.Data)), int64(len(f.Data))
	if f.Source != "" {
		file, err := os.Open(f.Source)
		if err != nil {
			return err
		}
		defer file.Close()
		st, err := file.Stat()
		if err != nil {
			return err
		}
		content, size = file, st.Size()
	}
	if size >= 1<<32 {
		return fmt.Errorf("%d bytes are more than the format can say", size)
	}
	if err := c.header(inode, mode, size, f.Major, f.Minor, f.Path[1:]); err != nil {
		return err
	}
	n, err := io.CopyN(c, content, size)
	if err != nil {
		return fmt.Errorf("%d of %d bytes: %w", n, size, err)
	}
	return c.pad(4)
}

func (c *cpioWriter) header(inode, mode uint32, size int64, major, minor uint32, name string) error {
	// magic, inode, mode, uid, gid, links, mtime, size, device of the file
	// system (two), of the node (two), length of the name, checksum.
	_, err := fmt.Fprintf(c, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, len(name)+1, 0, name)
	if err != nil {
		return err
	}
	return c.pad(4)
}

func (c *cpioWriter) end() error {
	if err := c.header(0, 0, 0, 0, 0, "TRAILER!!!"); err != nil {
		return err
	}
	return c.pad(512)
}

// treeFiles lists a directory of the machine as files of a guest under prefix.
func treeFiles(dir, prefix string) ([]File, error) {
	var files []File
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		f := File{Path: path.Join("/", prefix, filepath.ToSlash(rel)), Mode: st.Mode()}
		switch {
		case st.Mode().IsRegular():
			f.Source = name
		case st.Mode().Type() == fs.ModeSymlink:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			f.Data = []byte(target)
		}
		files = append(files, f)
		return nil
	})
	return files, err
}
