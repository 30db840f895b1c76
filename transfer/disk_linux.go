package transfer

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// allocate reserves room for a file and sets its size.
func allocate(f *os.File, size int64) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return f.Truncate(size)
	}
	if err != nil {
		return &os.PathError{Op: "allocate", Path: f.Name(), Err: err}
	}
	return nil
}

// writeBack starts writing to disk without waiting, so that the sync at the end
// has little left to do.
func writeBack(f *os.File, offset int64, length int) {
	// Where that cannot be done the sync does it all.
	_ = unix.SyncFileRange(int(f.Fd()), offset, int64(length), unix.SYNC_FILE_RANGE_WRITE)
}

// syncAll makes many files durable at once: everything on the file systems
// that they are on.
func syncAll(files []*os.File) error {
	seen := map[uint64]bool{}
	for _, f := range files {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return &os.PathError{Op: "stat", Path: f.Name(), Err: err}
		}
		if seen[st.Dev] {
			continue
		}
		seen[st.Dev] = true
		if err := unix.Syncfs(int(f.Fd())); err != nil {
			return &os.PathError{Op: "sync", Path: f.Name(), Err: err}
		}
	}
	return nil
}

// freeSpace returns the bytes that this user may still write below dir.
func freeSpace(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = st.Bfree
	}
	return blocks * uint64(st.Frsize), nil
}
