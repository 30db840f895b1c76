package rank

import (
	"context"
	"errors"
	"io"
	"os"
	"time"
)

// DefaultTail is how many lines TailLog begins with when no time is given.
const DefaultTail = 200

// followEvery is how often a followed log is looked at: nobody reads faster.
const followEvery = 100 * time.Millisecond

// Tail reads a rank's log as it grows, over rotations.
type Tail struct {
	dir  string
	f    *os.File
	rest []byte
	at   time.Time
}

// NewTail begins at the oldest line there is.
func NewTail(dir string) *Tail { return &Tail{dir: dir} }

// Read hands on what has appeared since the last call; it does not wait. A log
// that is not there yet has no lines.
func (t *Tail) Read(emit func(Line)) error {
	for {
		if t.f == nil {
			ok, err := t.next(nil)
			if err != nil || !ok {
				return err
			}
		}
		if err := t.drain(emit); err != nil {
			return err
		}
		cur, err := t.f.Stat()
		if err != nil {
			return err
		}
		newest, err := os.Stat(logName(t.dir, 0))
		switch {
		case errors.Is(err, os.ErrNotExist):
			return nil // between two renames, or removed
		case err != nil:
			return err
		case os.SameFile(cur, newest):
			return nil
		}
		// Rotated: it may have grown before that.
		if err := t.drain(emit); err != nil {
			return err
		}
		if ok, err := t.next(cur); err != nil || !ok {
			return err
		}
	}
}

func (t *Tail) drain(emit func(Line)) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := t.f.Read(buf)
		t.rest, t.at = splitLines(append(t.rest, buf[:n]...), t.at, emit)
		if len(t.rest) > 4*maxLine { // not of our making
			t.rest = nil
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// next opens the file after cur, the oldest when cur is nil or gone.
func (t *Tail) next(cur os.FileInfo) (bool, error) {
	var names []string // newest first
	for i := 0; ; i++ {
		st, err := os.Stat(logName(t.dir, i))
		if errors.Is(err, os.ErrNotExist) {
			if i == 0 {
				continue // a new one may not have been opened yet
			}
			break
		}
		if err != nil {
			return false, err
		}
		if cur != nil && os.SameFile(cur, st) {
			break
		}
		names = append(names, logName(t.dir, i))
	}
	if len(names) == 0 {
		return false, nil
	}
	f, err := openRegular(names[len(names)-1])
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // renamed meanwhile; the next call finds it
	}
	if err != nil {
		return false, err
	}
	err = t.Close()
	t.f, t.rest = f, nil
	return true, err
}

// Close gives back the file.
func (t *Tail) Close() error {
	if t.f == nil {
		return nil
	}
	f := t.f
	t.f = nil
	return f.Close()
}

// LastOf returns the last n lines of a rank's log.
func LastOf(dir string, n int) ([]Line, error) {
	t := NewTail(dir)
	defer t.Close()
	return lastOf(t, n)
}

func lastOf(t *Tail, n int) ([]Line, error) {
	var ring []Line
	err := t.Read(func(l Line) {
		if ring = append(ring, l); len(ring) >= 2*n {
			ring = append(ring[:0], ring[len(ring)-n:]...)
		}
	})
	return ring[max(0, len(ring)-n):], err
}

// TailLog hands on the lines of a rank's log since a time, or the last
// DefaultTail when since is zero. With follow it goes on until the rank has
// ended, ctx ends, or emit returns an error, which it returns.
func TailLog(ctx context.Context, dir string, since time.Time, follow bool, emit func(Line) error) error {
	t := NewTail(dir)
	defer t.Close()
	var failed error
	send := func(l Line) {
		if failed == nil && !l.Time.Before(since) {
			failed = emit(l)
		}
	}
	if since.IsZero() {
		lines, err := lastOf(t, DefaultTail)
		if err != nil {
			return err
		}
		for _, l := range lines {
			send(l)
		}
	} else if err := t.Read(send); err != nil {
		return err
	}
	for follow && failed == nil {
		// Whether it has ended is asked before the last look, so that no line
		// between the two is missed.
		s, err := Observe(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := t.Read(send); err != nil {
			return err
		}
		if err == nil && s.Phase == Ended {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(followEvery):
		}
	}
	return failed
}
