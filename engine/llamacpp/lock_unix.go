//go:build unix

package llamacpp

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lock makes the directory that dir will be in and holds a lock there, until
// unlock is called.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, fileFault("make "+parent, err)
	}
	f, err := os.OpenFile(filepath.Join(parent, "."+filepath.Base(dir)+".lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fileFault("lock "+dir, err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil // closing unlocks
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fileFault("lock "+dir, err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(100 * time.Millisecond): // somebody else installs: it takes seconds
		}
	}
}
