package rank

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// becomeSubreaper does nothing: macOS has none. Orphans go to launchd, and the
// process group is what is ended.
func becomeSubreaper() error { return nil }

func engineAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// Effort returns a number that grows while a process gets on with anything. On
// macOS another user's process does not tell: the time of day stands for it, so
// that a rank is never taken for stalled.
func (i Ident) Effort() uint64 { return uint64(time.Now().UnixNano()) }

func signalIdent(i Ident, uid int, sig syscall.Signal) error {
	if !i.Alive() {
		return nil
	}
	k, err := unix.SysctlKinfoProc("kern.proc.pid", i.PID)
	if err != nil {
		return nil
	}
	if int(k.Eproc.Ucred.Uid) != uid {
		return fmt.Errorf("process %d does not belong to user %d", i.PID, uid)
	}
	if err := syscall.Kill(i.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", i.PID, err)
	}
	return nil
}

// killGroupOf kills the process group that the engine leads, if it still is
// that engine.
func killGroupOf(i Ident, uid int) error {
	if !i.Alive() {
		return nil
	}
	k, err := unix.SysctlKinfoProc("kern.proc.pid", i.PID)
	if err != nil {
		return nil
	}
	if int(k.Eproc.Ucred.Uid) != uid {
		return fmt.Errorf("process %d does not belong to user %d", i.PID, uid)
	}
	return signalGroup(i.PID, syscall.SIGKILL)
}

// killMarked does nothing: macOS does not show the environment of processes;
// killGroupOf ends them.
func killMarked(string, int) error { return nil }

func termSubtree(pid int) error { return signalGroup(pid, syscall.SIGTERM) }
func killSubtree(pid int) error { return signalGroup(pid, syscall.SIGKILL) }

func signalGroup(pid int, sig syscall.Signal) error {
	if err := syscall.Kill(-pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("signal process group %d: %w", pid, err)
	}
	return nil
}
