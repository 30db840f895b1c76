package proc

import (
	"fmt"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

func unsupported(what string) error {
	return fault.New(fault.Unsupported, what, fmt.Errorf("macOS has no such thing"), "")
}

// SetSubreaper makes this process the parent of its descendants whose own
// parent ends; macOS cannot, and it returns a Fault.
func SetSubreaper() error { return unsupported("become a subreaper") }

// SetNonDumpable keeps other processes of the same user from reading this
// process's memory, and the system from writing core dumps of it.
func SetNonDumpable() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("become non-dumpable: %w", err)
	}
	if err := unix.PtraceDenyAttach(); err != nil {
		return fmt.Errorf("become non-dumpable: %w", err)
	}
	return nil
}

// SetNoNewPrivileges keeps this process and everything that it starts from
// gaining privileges by set-user-ID programs; macOS cannot, and it returns a
// Fault.
func SetNoNewPrivileges() error { return unsupported("give up new privileges") }
