package transfer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/transfer/journal"
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/wire"
)

// receiving is a file on its way.
type receiving struct {
	d      *destination
	entry  manifest.Entry
	target string // below the base
	temp   string // hidden name beside it

	mu      sync.Mutex
	state   receivingState
	f       *os.File // the unfinished file
	journal *os.File
	have    []byte // bitmap of chunks that are written
	left    int    // chunks that are not
	writing sync.WaitGroup
}

type receivingState uint8

const (
	waiting receivingState = iota // nothing has been opened
	open                          // chunks are coming
	arrived                       // all is there; on its way to its final name
	landed                        // under its final name
	givenUp                       // not copied; a fault says why
)

func newReceiving(d *destination, e manifest.Entry, target string) *receiving {
	f := &receiving{d: d, entry: e, target: target}
	key := sessionKey(d.w.me().Session)
	if f.large() {
		key = e.Identity
		f.left = chunksOf(e.Size)
		f.have = make([]byte, (f.left+7)/8)
	}
	f.temp = tempName(path.Base(target), key)
	return f
}

// large reports whether the file comes in chunks and has a journal.
func (f *receiving) large() bool { return f.entry.Size >= smallFile || f.entry.Sparse }

func (f *receiving) header() journal.Header {
	return journal.Header{Identity: [journal.IdentitySize]byte(f.entry.Identity), Size: f.entry.Size, ChunkSize: wire.ChunkSize}
}

// room returns the bytes of disk that the file still needs.
func (f *receiving) room() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	need := f.entry.Size
	if f.entry.Sparse {
		need = f.entry.Alloc
	}
	if f.f != nil {
		if fi, err := f.f.Stat(); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				need -= st.Blocks * 512
			}
		}
	}
	return uint64(max(need, 0))
}

// errBusy is returned for a file that another transfer is writing.
var errBusy = errors.New("another transfer is writing it")

// lockFile takes the lock of an open file whose name is name in dir; false when
// somebody else has it or the name means another file by now.
func lockFile(dir *dirHandle, name string, f *os.File) (bool, error) {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}
		return false, &fs.PathError{Op: "lock", Path: name, Err: err}
	}
	named, err := dir.Lstat(name)
	if err != nil {
		return false, nil
	}
	opened, err := f.Stat()
	return err == nil && os.SameFile(named, opened), err
}

// resume takes up what an earlier run has left: it returns how many bytes are
// there, each chunk read again and compared with the journal's digest. What is
// of no use is removed.
func (f *receiving) resume(ctx context.Context) (have int64, err error) {
	if f.d.tree == nil {
		return 0, nil
	}
	err = f.d.tree.at(f.target, func(dir *dirHandle, name string) error {
		j, err := openPlain(dir, journalName(f.temp), os.O_RDWR|os.O_APPEND)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // nothing, or data alone, which is removed when it is begun anew
		}
		if err != nil {
			return err
		}
		ok, err := lockFile(dir, journalName(f.temp), j)
		if err == nil && !ok {
			err = errBusy
		}
		if err != nil {
			_ = j.Close() // nothing was written to it
			return err
		}
		data, derr := openPlain(dir, f.temp, os.O_RDWR)
		if derr == nil {
			have, derr = f.take(ctx, j, data)
		}
		if derr == nil && have > 0 {
			f.f, f.journal, f.state = data, j, open
			return nil
		}
		have = 0
		f.forget()
		if data != nil {
			_ = data.Close() // nothing was written to it
		}
		if ctx.Err() != nil { // interrupted: the next run looks at it
			_ = j.Close()
			return ctx.Err()
		}
		err = errors.Join(removeName(dir, f.temp), removeName(dir, journalName(f.temp)))
		_ = j.Close() // it has been removed; this lets go of the lock
		return err
	})
	switch {
	case errors.Is(err, fs.ErrNotExist): // the directory is not there yet
		return 0, nil
	case errors.Is(err, errBusy):
		return 0, fault.New(fault.StillRunning, "write "+f.target, err, "wait for it, or cancel it").At(f.d.show(f.target))
	case err != nil:
		return 0, f.d.writeFault(f.target, err)
	}
	return have, nil
}

// forget clears the bitmap.
func (f *receiving) forget() {
	clear(f.have)
	f.left = chunksOf(f.entry.Size)
}

// take reads a journal and checks the data against it.
func (f *receiving) take(ctx context.Context, j, data *os.File) (int64, error) {
	h, records, good, err := journal.Read(j)
	if err != nil {
		return 0, err
	}
	fi, err := data.Stat()
	if err != nil {
		return 0, err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if h != f.header() || fi.Size() != f.entry.Size || !ok || int(st.Uid) != os.Geteuid() || st.Nlink != 1 {
		return 0, errors.New("what is there is of something else")
	}
	if err := j.Truncate(good); err != nil {
		return 0, err
	}
	var have int64
	buf := make([]byte, wire.ChunkSize)
	for chunk, digest := range records {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		offset := int64(chunk) * wire.ChunkSize
		b := buf[:min(wire.ChunkSize, f.entry.Size-offset)]
		if _, err := data.ReadAt(b, offset); err != nil {
			return 0, err
		}
		if wire.Sum(b) == digest {
			setBit(f.have, int(chunk))
			f.left--
			have += int64(len(b))
		}
	}
	return have, nil
}

// begin makes the unfinished file and its journal; call it with mu held.
func (f *receiving) begin() error {
	if f.state != waiting {
		return nil
	}
	err := f.d.tree.at(f.target, func(dir *dirHandle, name string) error {
		j, err := dir.OpenFile(journalName(f.temp), os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
		if errors.Is(err, fs.ErrExist) {
			return errBusy // it appeared after resume had looked
		}
		if err != nil {
			return err
		}
		ok, err := lockFile(dir, journalName(f.temp), j)
		if err == nil && !ok {
			err = errBusy
		}
		if err == nil {
			err = journal.Create(j, f.header())
		}
		var data *os.File
		if err == nil {
			// Data without a journal is of no use to anybody.
			err = removeName(dir, f.temp)
		}
		if err == nil {
			data, err = dir.OpenFile(f.temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		}
		if err == nil {
			if f.entry.Sparse {
				err = data.Truncate(f.entry.Size)
			} else {
				err = allocate(data, f.entry.Size)
			}
		}
		if err != nil {
			if data != nil {
				_ = data.Close() // it is removed
				_ = removeName(dir, f.temp)
			}
			if !errors.Is(err, errBusy) {
				_ = removeName(dir, journalName(f.temp)) // the error above is the one to tell
			}
			_ = j.Close()
			return err
		}
		f.f, f.journal, f.state = data, j, open
		return nil
	})
	return err
}

// write takes a chunk that has matched its digest. The bytes of a sparse one
// are its extents alone.
func (f *receiving) write(h wire.Header, chunk []byte, extents []wire.Extent) error {
	n := int(h.Offset / wire.ChunkSize)
	f.mu.Lock()
	switch {
	case f.state == givenUp:
		f.mu.Unlock()
		return errGivenUp
	case f.state > open || hasBit(f.have, n):
		f.mu.Unlock()
		return nil // it has come before, over a connection that died since
	}
	if err := f.begin(); err != nil {
		f.mu.Unlock()
		return err
	}
	f.writing.Add(1) // land waits for it
	file, j := f.f, f.journal
	f.mu.Unlock()
	defer f.writing.Done()
	if extents == nil {
		extents = []wire.Extent{{Offset: 0, Length: uint32(len(chunk))}}
	}
	for _, e := range extents {
		if _, err := file.WriteAt(chunk[e.Offset:e.Offset+e.Length], int64(h.Offset)+int64(e.Offset)); err != nil {
			return err
		}
	}
	writeBack(file, int64(h.Offset), len(chunk))
	if err := journal.Append(j, journal.Record{Chunk: uint32(n), Digest: h.Digest}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !hasBit(f.have, n) {
		setBit(f.have, n)
		f.left--
		f.d.verified.Add(uint64(len(chunk)))
	}
	return nil
}

// errGivenUp is returned for a file that will not be copied.
var errGivenUp = errors.New("the file was given up")

// giveUp ends a file that is not copied and removes what there is of it. It
// returns whether this was the first to do so.
func (f *receiving) giveUp() bool {
	f.mu.Lock()
	first := f.state != givenUp && f.state != landed
	if first {
		f.state = givenUp
	}
	f.mu.Unlock()
	if first {
		f.writing.Wait()
		f.mu.Lock()
		f.remove()
		f.mu.Unlock()
	}
	return first
}

// remove closes and removes the unfinished file; call it with mu held.
func (f *receiving) remove() {
	if f.f == nil {
		return
	}
	// What cannot be removed is found and removed by the next run.
	_ = f.d.tree.at(f.target, func(dir *dirHandle, name string) error {
		return errors.Join(removeName(dir, f.temp), removeName(dir, journalName(f.temp)))
	})
	f.closeFiles()
}

func (f *receiving) closeFiles() {
	if f.f != nil {
		_ = f.f.Close() // what had to be durable was synced
		f.f = nil
	}
	if f.journal != nil {
		_ = f.journal.Close() // each record is checked when it is read
		f.journal = nil
	}
}

// park leaves the file for the next run, or removes it where that would find
// nothing in it or the disk is full.
func (f *receiving) park(full bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == open && (full || countBits(f.have) == 0) {
		f.remove()
	}
	f.closeFiles()
}

// removeName removes a name; one that is not there is no error.
func removeName(dir *dirHandle, name string) error {
	if err := dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeStale removes an unfinished file that nobody is writing.
func removeStale(t *tree, rel, temp string) {
	// What cannot be removed stays; it is hidden and harmless.
	_ = t.at(path.Join(rel, temp), func(dir *dirHandle, name string) error {
		// Large files are locked by their journal, small ones by themselves.
		for _, n := range []string{journalName(name), name} {
			f, err := openPlain(dir, n, os.O_RDONLY)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			ok, err := lockFile(dir, n, f)
			if ok {
				err = errors.Join(removeName(dir, name), removeName(dir, journalName(name)))
			}
			_ = f.Close() // it was only locked
			return err
		}
		return nil
	})
}

// check makes sure that a chunk lies where a chunk of this file lies.
func (f *receiving) check(h wire.Header) error {
	if !f.large() || h.Offset%wire.ChunkSize != 0 || int64(h.Offset) >= f.entry.Size ||
		int64(h.Size) != min(wire.ChunkSize, f.entry.Size-int64(h.Offset)) {
		return fmt.Errorf("%w: %d bytes at %d of a file of %d", wire.ErrMalformed, h.Size, h.Offset, f.entry.Size)
	}
	return nil
}
