package guest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// tempPrefix begins the names of all directories of TempDir.
const tempPrefix = "rig-"

// tempLock is in each of them, locked for as long as the process lives that has
// made it, however that ends.
const tempLock = ".lock"

// TempDir makes a directory of a short name, for sockets, logs and the like. It
// lasts until remove is called, which may be more than once. First it removes what processes have left of this
// kind that were killed.
func TempDir(name string) (dir string, remove func() error, err error) {
	parent := os.TempDir()
	if err := removeAbandoned(parent); err != nil {
		return "", nil, fault.New(fault.FileIO, "remove what a rig has left that was killed", err, "remove it by hand").At(parent)
	}
	if name != "" {
		name += "-"
	}
	if dir, err = os.MkdirTemp(parent, tempPrefix+name); err != nil {
		return "", nil, fault.New(fault.FileIO, "make a directory for the rig", err, "").At(parent)
	}
	lock, err := lockTemp(dir)
	if err != nil {
		return "", nil, errors.Join(fault.New(fault.FileIO, "lock a directory for the rig", err, "").At(dir), os.RemoveAll(dir))
	}
	return dir, func() error {
		err := os.RemoveAll(dir)
		if e := lock.Close(); !errors.Is(e, fs.ErrClosed) { // it was removed before
			err = errors.Join(err, e)
		}
		return err
	}, nil
}

// lockTemp makes the lock of a directory. It is locked when it gets its name, so
// that nobody finds it otherwise.
func lockTemp(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, tempLock+".new"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = os.Rename(lock.Name(), filepath.Join(dir, tempLock))
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// removeAbandoned removes directories of ours whose lock nobody holds.
func removeAbandoned(parent string) error {
	dirs, err := filepath.Glob(filepath.Join(parent, tempPrefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		st, err := os.Lstat(dir)
		if err != nil || !st.IsDir() {
			continue // it has just gone, or is somebody's link
		}
		if owner, ok := st.Sys().(*syscall.Stat_t); !ok || int(owner.Uid) != os.Geteuid() {
			continue
		}
		lock, err := os.OpenFile(filepath.Join(dir, tempLock), os.O_RDWR|unix.O_NOFOLLOW, 0)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) { // one that is being made has none yet
				errs = append(errs, err)
			}
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			errs = append(errs, os.RemoveAll(dir))
		}
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}
