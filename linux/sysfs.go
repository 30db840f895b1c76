package linux

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// vanished reports whether err says that something is not there, or went away
// while it was read: sysfs and procfs answer so in several ways.
func vanished(err error) bool {
	for _, gone := range []error{
		fs.ErrNotExist, syscall.ENODEV, syscall.ENXIO, syscall.EIO, syscall.ENOTDIR, syscall.ESHUTDOWN, syscall.ESRCH,
	} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}

// readText returns the trimmed content of a small file, "" if it is not there.
func readText(path ...string) (string, error) {
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		if vanished(err) {
			return "", nil
		}
		return "", err
	}
	return strings.TrimSpace(string(b)), nil
}

// names returns the sorted names in a directory, none if it is not there.
func names(path ...string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(path...))
	if err != nil && !vanished(err) {
		return nil, err
	}
	list := make([]string, 0, len(entries))
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list, nil
}
