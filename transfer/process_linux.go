package transfer

import "golang.org/x/sys/unix"

// guardProcess keeps others of the same user from reading the transfer's key
// out of this process.
func guardProcess() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) }
