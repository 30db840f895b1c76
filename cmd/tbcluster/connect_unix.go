//go:build unix

package main

import (
	"fmt"
	"os"
	"syscall"
)

// ownDirectory reports why dir may be somebody else's trap: without this,
// whoever makes /tmp/tbcluster-UID first could play the agent.
func ownDirectory(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() {
		return fmt.Errorf("%s is not a directory: left alone", dir)
	}
	if int(st.Uid) != os.Getuid() {
		return fmt.Errorf("%s belongs to user %d, not to you: left alone", dir, st.Uid)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s can be written by others: left alone", dir)
	}
	return nil
}
