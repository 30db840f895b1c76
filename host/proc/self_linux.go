package proc

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SetSubreaper makes this process the parent of its descendants whose own
// parent ends.
func SetSubreaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become a subreaper: %w", err)
	}
	return nil
}

// SetNonDumpable keeps other processes of the same user from reading this
// process's memory, and the kernel from writing core dumps of it.
func SetNonDumpable() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("become non-dumpable: %w", err)
	}
	return nil
}

// SetNoNewPrivileges keeps this process, all its threads, and everything that
// it starts from gaining privileges by set-user-ID programs. It cannot be
// undone.
func SetNoNewPrivileges() error {
	_, _, errno := syscall.AllThreadsSyscall6(syscall.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0)
	if errno == 0 {
		return nil
	}
	if !errors.Is(errno, syscall.ENOTSUP) {
		return fmt.Errorf("give up new privileges: %w", errno)
	}
	if err := noNewPrivilegesWithC(); err != nil {
		return fmt.Errorf("give up new privileges: %w", err)
	}
	return nil
}

// noNewPrivilegesWithC is for binaries that hold C (the race detector's do),
// where Go cannot make a system call on all threads: a seccomp filter that
// allows everything takes the attribute to all threads when it is synchronised
// (seccomp(2), SECCOMP_FILTER_FLAG_TSYNC).
func noNewPrivilegesWithC() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	allow := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}
	program := unix.SockFprog{Len: 1, Filter: &allow}
	thread, _, errno := syscall.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	if thread != 0 {
		return fmt.Errorf("thread %d has a filter of its own", thread)
	}
	return nil
}
