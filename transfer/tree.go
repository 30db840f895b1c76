package transfer

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// errIsSpecial is returned where something is in the place of a file that is
// none.
var errIsSpecial = errors.New("a device, pipe or socket is there")

// errIsSymlink is returned where a directory of the destination is a symlink.
var errIsSymlink = errors.New("a symlink is in the way, and symlinks are not followed there")

// maxDirs is how many directories a tree keeps open.
const maxDirs = 64

// tree is a destination directory. Everything in it is reached from its own
// descriptor, one name after the other, and no symlink is followed: one that
// appears while we write leads nowhere.
type tree struct {
	mu   sync.Mutex
	base *dirHandle
	open map[string]*dirHandle
}

// dirHandle is an open directory. Users are counted under the tree's lock.
type dirHandle struct {
	*os.Root
	self  *os.File // the same directory, for what os.Root has no call for
	users int
	gone  bool // no longer in the tree's table: close when unused
}

func newDirHandle(r *os.Root) (*dirHandle, error) {
	f, err := r.Open(".")
	if err != nil {
		_ = r.Close() // the error above is the one to tell
		return nil, err
	}
	return &dirHandle{Root: r, self: f}, nil
}

func (h *dirHandle) close() {
	// Nothing was written through either.
	_ = h.self.Close()
	_ = h.Root.Close()
}

func openTree(dir string) (*tree, error) {
	r, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	h, err := newDirHandle(r)
	if err != nil {
		return nil, err
	}
	return &tree{base: h, open: map[string]*dirHandle{}}, nil
}

// close closes all; nobody may be using it.
func (t *tree) close() {
	t.forget()
	t.base.close()
}

// forget closes what is kept open, so that names are looked up anew.
func (t *tree) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range t.open {
		t.evict(name)
	}
}

// evict takes a directory out of the table; call it with mu held.
func (t *tree) evict(name string) {
	h := t.open[name]
	delete(t.open, name)
	h.gone = true
	if h.users == 0 {
		h.close()
	}
}

func (t *tree) release(h *dirHandle) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h.users--
	if h.gone && h.users == 0 {
		h.close()
	}
}

// dir opens a directory below the base; "" is the base. Release it.
func (t *tree) dir(rel string) (*dirHandle, error) {
	if rel == "" || rel == "." {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.base.users++
		return t.base, nil
	}
	t.mu.Lock()
	if h := t.open[rel]; h != nil {
		h.users++
		t.mu.Unlock()
		return h, nil
	}
	t.mu.Unlock()
	parent, err := t.dir(path.Dir(rel))
	if err != nil {
		return nil, err
	}
	defer t.release(parent)
	r, err := openNoFollow(parent.Root, path.Base(rel))
	if err != nil {
		return nil, err
	}
	mine, err := newDirHandle(r)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.open[rel]; h != nil { // somebody was faster
		mine.close()
		h.users++
		return h, nil
	}
	for name, h := range t.open {
		if len(t.open) < maxDirs {
			break
		}
		if h.users == 0 {
			t.evict(name)
		}
	}
	mine.users = 1
	t.open[rel] = mine
	return mine, nil
}

// openNoFollow opens the directory name in d. os.Root would follow a symlink
// that stays within it; that the one opened is the one that was looked at tells
// that none was followed.
func openNoFollow(d *os.Root, name string) (*os.Root, error) {
	named, err := d.Lstat(name)
	if err != nil {
		return nil, err
	}
	if named.Mode()&fs.ModeSymlink != 0 {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errIsSymlink}
	}
	if !named.IsDir() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: unix.ENOTDIR}
	}
	r, err := d.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	opened, err := r.Stat(".")
	if err == nil && !os.SameFile(named, opened) {
		err = &fs.PathError{Op: "open", Path: name, Err: errIsSymlink}
	}
	if err != nil {
		_ = r.Close() // the error above is the one to tell
		return nil, err
	}
	return r, nil
}

// at calls fn with the directory that holds rel and rel's name there. rel must
// not be the base.
func (t *tree) at(rel string, fn func(d *dirHandle, name string) error) error {
	h, err := t.dir(path.Dir(rel))
	if err != nil {
		return err
	}
	defer t.release(h)
	return fn(h, path.Base(rel))
}

// lstat looks at rel without following anything.
func (t *tree) lstat(rel string) (fi fs.FileInfo, err error) {
	if rel == "" {
		return t.base.Stat(".")
	}
	err = t.at(rel, func(d *dirHandle, name string) error {
		fi, err = d.Lstat(name)
		return err
	})
	return fi, err
}

// names lists the directory rel.
func (t *tree) names(rel string) ([]string, error) {
	h, err := t.dir(rel)
	if err != nil {
		return nil, err
	}
	defer t.release(h)
	f, err := h.Open(".")
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	return f.Readdirnames(-1)
}

// sync makes the names in directory rel durable.
func (t *tree) sync(rel string) error {
	h, err := t.dir(rel)
	if err != nil {
		return err
	}
	defer t.release(h)
	if err := h.self.Sync(); err != nil && !ignorableSync(err) {
		return err
	}
	return nil
}

// setTime sets a modification time in nanoseconds since 1970 on the name
// itself, never on what a symlink points to.
func setTime(d *dirHandle, name string, mtime int64) error {
	ts := unix.NsecToTimespec(mtime)
	if err := unix.UtimesNanoAt(int(d.self.Fd()), name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "set time of", Path: name, Err: err}
	}
	return nil
}

// sameTime reports whether a file's time is what it was to be set to. File
// systems that keep whole seconds only give those back.
func sameTime(have time.Time, mtime int64) bool {
	h := have.UnixNano()
	return h == mtime || have.Nanosecond() == 0 && h == mtime-mod(mtime, int64(time.Second))
}

// mod is the remainder that is never negative.
func mod(a, b int64) int64 { return ((a % b) + b) % b }

// ignorableSync reports whether a directory cannot be synced because its file
// system does not know how: then there is nothing to be done.
func ignorableSync(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP)
}

// linkAt makes a second name for a file, following nothing.
func linkAt(oldDir *os.File, oldName string, newDir *os.File, newName string) error {
	if err := unix.Linkat(int(oldDir.Fd()), oldName, int(newDir.Fd()), newName, 0); err != nil {
		return &os.LinkError{Op: "link", Old: oldName, New: newName, Err: err}
	}
	return nil
}
