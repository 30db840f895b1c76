package sock

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// rights makes the control data that carries files, and a function to call
// after sending, until which the descriptors are kept open.
func rights(files []*os.File) (oob []byte, keep func(), err error) {
	if len(files) == 0 {
		return nil, func() {}, nil
	}
	fds := make([]int, len(files))
	for i, f := range files {
		raw, err := f.SyscallConn()
		if err != nil {
			return nil, nil, fmt.Errorf("send descriptor %s: %w", f.Name(), err)
		}
		// Not f.Fd, which would make the file blocking.
		if err := raw.Control(func(fd uintptr) { fds[i] = int(fd) }); err != nil {
			return nil, nil, fmt.Errorf("send descriptor %s: %w", f.Name(), err)
		}
	}
	return unix.UnixRights(fds...), func() { runtime.KeepAlive(files) }, nil
}

// parseRights returns the descriptors in control data. Those that it found
// before an error are returned with it, so that they can be closed.
func parseRights(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	var errs []error
	for _, m := range messages {
		if len(m.Data)%4 != 0 {
			// The kernel sends none; x/sys would panic.
			errs = append(errs, fmt.Errorf("%d bytes of descriptors", len(m.Data)))
			continue
		}
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received descriptor"))
		}
	}
	return files, errors.Join(errs...)
}

// closeAfter closes c because of err, and returns err with what went wrong.
func closeAfter(c io.Closer, err error) error {
	return errors.Join(err, c.Close())
}
