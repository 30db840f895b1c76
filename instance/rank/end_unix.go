//go:build unix

package rank

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// End asks the rank in dir to end, and does not wait for it: SIGTERM to its
// engine, and after its grace SIGKILL to whatever is left; with kill at once.
// It signals nothing that does not belong to the owner of dir, so that root may
// call it on a directory that a person can write to. A rank that is gone is no
// error; what a killed shim left is ended.
func End(dir string, kill bool) error {
	uid, err := ownerOf(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	s, err := ReadStatus(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(err, Clean(dir))
	}
	if err != nil || !s.Shim.Alive() {
		return Clean(dir)
	}
	sig := syscall.SIGTERM
	if kill {
		sig = syscall.SIGQUIT
	}
	return signalIdent(s.Shim, uid, sig)
}

// Clean ends what a shim that was killed left of the rank in dir: processes of
// the directory's owner that carry its mark. It fails while a shim is at work
// there.
func Clean(dir string) error {
	uid, err := ownerOf(dir)
	if err != nil {
		return err
	}
	p, err := ReadProcess(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil // nothing was ever started
	}
	if err != nil {
		return err
	}
	f, err := os.OpenFile(dir+"/lock", os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == nil {
		defer f.Close()
		if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
			return fmt.Errorf("%s: %w", dir, errHeld)
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if s, err := ReadStatus(dir); err == nil {
		if err := killGroupOf(s.Engine, uid); err != nil {
			return err
		}
	}
	return killMarked(p.mark(), uid)
}

func ownerOf(dir string) (int, error) {
	st, err := os.Lstat(dir)
	if err != nil {
		return 0, err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.IsDir() {
		return 0, fmt.Errorf("%s is no directory", dir)
	}
	return int(sys.Uid), nil
}
