package linux

import (
	"errors"
	"io"
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

// maxText is how much of a file is read: an attribute of sysfs is a page at
// most, and what /proc has for us is not much more.
const maxText = 64 << 10

// readText returns the trimmed content of a small file, "" if it is not there.
// It is text whatever was in the file: the names of a machine at the other end of
// a cable are what that machine says.
func readText(path ...string) (string, error) {
	b, err := readSome(filepath.Join(path...))
	if err != nil {
		if vanished(err) {
			return "", nil
		}
		return "", err
	}
	return strings.TrimSpace(strings.ToValidUTF8(string(b), "\uFFFD")), nil
}

func readSome(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxText))
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
