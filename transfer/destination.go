package transfer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/transport"
)

// destination is the writing side of a worker.
type destination struct {
	w        *worker
	verified atomic.Uint64 // bytes that arrived, matched and were written
	finished atomic.Uint64 // files under their final names

	// phase is held while the transfer is prepared or decided; what these set
	// they publish under mu, before anything is asked of the source.
	phase    sync.Mutex
	prepared bool
	decided  bool
	plan     planned

	mu      sync.Mutex
	entries []manifest.Entry
	files   []*receiving // by entry index; nil for what is no file to send
	tree    *tree
	inbound map[int]inbound
	closed  bool
	fatal   *fault.Fault // set when the disk is full: nothing more is taken
	conns   sync.WaitGroup
	lander  *lander
}

type inbound struct {
	l      transport.Listener
	cancel context.CancelFunc
}

// planned is where things go.
type planned struct {
	prepareIn
	base    string // the directory that everything goes into
	missing bool   // base has to be made
	rename  string // final name of a single file; "" to keep its own
	// action by entry index.
	actions []action
	targets []string // below base, by entry index
	fix     []int    // files that are there, but for mode or time
}

// action is what is done about an entry.
type action uint8

const (
	leave   action = iota // not copied: a fault says why
	skip                  // it is there already
	create                // a directory to be made
	adopt                 // a directory that is there
	send                  // a file to be sent
	link                  // a symlink or another name to be made
	compare               // a file to be compared by digest first
)

func newDestination(w *worker) *destination {
	d := &destination{w: w, inbound: map[int]inbound{}}
	d.lander = newLander(d)
	return d
}

// add takes a page of the manifest.
func (d *destination) add(entries []manifest.Entry) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.entries = append(d.entries, entries...)
	return nil
}

// entry returns the File entry i.
func (d *destination) file(i int) (*receiving, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i < 0 || i >= len(d.files) || d.files[i] == nil {
		return nil, fault.Newf(fault.Protocol, "use the same version of tbcluster on both nodes", "nobody wanted file %d", i)
	}
	return d.files[i], nil
}

// show returns an entry's place for messages.
func (d *destination) show(rel string) string { return d.w.where(filepath.Join(d.plan.base, rel)) }

// writeFault makes a Fault of what went wrong with rel.
func (d *destination) writeFault(rel string, err error) *fault.Fault {
	if f := fault.As(err); f != nil {
		return f
	}
	node := d.w.me().NodeName
	abs := filepath.Join(d.plan.base, rel)
	var pe *fs.PathError
	var le *os.LinkError
	var why error = err
	if errors.As(err, &pe) {
		why = pe.Err
	} else if errors.As(err, &le) {
		why = le.Err
	}
	reason, fix := fault.FileIO, "look at the disk of "+node+"; the same command goes on where this one ended"
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		reason, fix = fault.DiskFull, "free space on "+node+", then run the same command again"
	case errors.Is(err, errIsSymlink):
		reason, fix = fault.FileEscapes, "name the directory that it points to as the destination, or remove it"
	case errors.Is(err, errIsSpecial):
		reason, fix = fault.FileUnsupported, "choose another name on "+node
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR):
		fix = "remove what is in the way on " + node
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		reason, fix = fault.FileDenied, "choose a directory that the user may write to on "+node
	}
	return fault.New(reason, "write "+abs, why, fix).At(d.w.where(abs)).With("path", abs)
}

// digestFile returns the digest of what is already there of entry i.
func (d *destination) digestFile(ctx context.Context, i int) (sum []byte, err error) {
	d.mu.Lock()
	if i < 0 || i >= len(d.plan.targets) || d.tree == nil {
		d.mu.Unlock()
		return nil, fault.Newf(fault.Protocol, "", "this transfer has no file %d", i)
	}
	rel, t := d.plan.targets[i], d.tree
	d.mu.Unlock()
	err = t.at(rel, func(dir *dirHandle, name string) error {
		f, err := openPlain(dir, name, os.O_RDONLY)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }() // it was only read
		sum, err = digestOf(ctx, f)
		return err
	})
	return sum, err
}

// openPlain opens a regular file that is no symlink.
func openPlain(dir *dirHandle, name string, flags int) (*os.File, error) {
	named, err := dir.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !named.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")}
	}
	f, err := dir.OpenFile(name, flags|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	opened, err := f.Stat()
	if err == nil && !os.SameFile(named, opened) {
		err = &fs.PathError{Op: "open", Path: name, Err: errIsSymlink}
	}
	if err != nil {
		_ = f.Close() // the error above is the one to tell
		return nil, err
	}
	return f, nil
}

// tempName is the hidden name of an unfinished file: the final name, cut where
// it would be too long, and sixteen hex digits of a key.
func tempName(final string, key []byte) string {
	const room = 255 - len("..tbcluster-0123456789abcdef.journal")
	sum := sha256.Sum256(append([]byte(final+"\x00"), key...))
	if len(final) > room {
		cut := room
		for cut > room-utf8.UTFMax && !utf8.RuneStart(final[cut]) {
			cut-- // some volumes take whole characters only
		}
		final = final[:cut]
	}
	return "." + final + ".tbcluster-" + hex.EncodeToString(sum[:8])
}

// journalName is the journal of a temporary name.
func journalName(temp string) string { return temp + ".journal" }

// close ends everything; what arrived of large files stays for the next run,
// unless the disk is full.
func (d *destination) close() {
	d.phase.Lock()
	defer d.phase.Unlock()
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return
	}
	d.closed = true
	var all []inbound
	for id, in := range d.inbound {
		all = append(all, in)
		delete(d.inbound, id)
	}
	d.mu.Unlock()
	for _, in := range all {
		in.cancel()
		_ = in.l.Close() // it only listened
	}
	d.conns.Wait()
	d.lander.stop()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.files {
		if f != nil {
			f.park(d.fatal != nil)
		}
	}
	if d.tree != nil {
		d.tree.close()
	}
}

// die stops taking anything: the disk is full. What is unfinished is removed,
// for a full disk helps nobody.
func (d *destination) die(f *fault.Fault) {
	d.mu.Lock()
	first := d.fatal == nil
	if first {
		d.fatal = f
	}
	d.mu.Unlock()
	if first {
		_ = d.w.ctl.tell(kFatal, problemNote{toFailure(f)}) // where it cannot be told the transfer has ended
	}
}

// ended reports whether close was called.
func (d *destination) ended() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

func (d *destination) dead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fatal != nil
}

// target joins a root's place and a path below it.
func (p *planned) target(e manifest.Entry) string {
	if p.rename != "" {
		return p.rename
	}
	r := p.Roots[e.Root]
	if r.Contents {
		return string(e.Path)
	}
	return path.Join(string(r.Name), string(e.Path))
}
