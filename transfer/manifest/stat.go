package manifest

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// stat is what a scan wants to know of a file.
type stat struct {
	mode         fs.FileMode
	size, alloc  int64
	mtime, ctime int64 // nanoseconds since 1970
	dev, inode   uint64
	links        uint64
}

func statPath(p string) (stat, error)  { return fromInfo(os.Stat(p)) }
func lstatPath(p string) (stat, error) { return fromInfo(os.Lstat(p)) }

func fromInfo(fi fs.FileInfo, err error) (stat, error) {
	if err != nil {
		return stat{}, err
	}
	sys, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return stat{}, fmt.Errorf("stat %s: this system tells no inode", fi.Name())
	}
	st := stat{mode: fi.Mode(), size: fi.Size(), mtime: fi.ModTime().UnixNano(), ctime: changeTime(sys),
		dev: uint64(sys.Dev), inode: sys.Ino, links: uint64(sys.Nlink)}
	st.alloc = sys.Blocks * 512
	return st, nil
}

// Unchanged reports whether the open or named file of fi is still what e was
// made from: the same size and modification time.
func (e Entry) Unchanged(fi fs.FileInfo) bool {
	return fi.Mode().IsRegular() && fi.Size() == e.Size && fi.ModTime().UnixNano() == e.Mtime
}
