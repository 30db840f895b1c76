package transfer

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// allocate reserves room for a file and sets its size.
func allocate(f *os.File, size int64) error {
	store := unix.Fstore_t{Flags: unix.F_ALLOCATEALL, Posmode: unix.F_PEOFPOSMODE, Length: size}
	if err := unix.FcntlFstore(f.Fd(), unix.F_PREALLOCATE, &store); errors.Is(err, unix.ENOSPC) {
		return &os.PathError{Op: "allocate", Path: f.Name(), Err: err}
	}
	return f.Truncate(size)
}

// writeBack does nothing: macOS has no call that only starts writing.
func writeBack(*os.File, int64, int) {}

// syncAll makes many files durable. All but the last are handed to the drive,
// the last (File.Sync is F_FULLFSYNC) makes the drive write what it holds.
func syncAll(files []*os.File) error {
	for i, f := range files {
		var err error
		if i < len(files)-1 {
			err = unix.Fsync(int(f.Fd()))
		} else {
			err = f.Sync()
		}
		if err != nil {
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
	return st.Bavail * uint64(st.Bsize), nil
}
