package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"

	"tbcluster/api/fault"
	"tbcluster/transfer/manifest"
)

const (
	// maxPending is how many small files may wait, open, for their final names.
	maxPending = 256
	// syncEach is up to how many files are made durable one by one; for more it
	// is cheaper to have the whole file system written.
	syncEach = 16
)

// lander gives files their final names once they are durable: large ones one
// by one, small ones in batches that grow while the disk is busy.
type lander struct {
	d     *destination
	slots chan struct{} // one for each pending small file

	mu      sync.Mutex
	cond    *sync.Cond
	larges  []*receiving
	dropped []*receiving
	smalls  []*receiving
	busy    int
	ended   bool
	wg      sync.WaitGroup
}

func newLander(d *destination) *lander {
	l := &lander{d: d, slots: make(chan struct{}, maxPending)}
	l.cond = sync.NewCond(&l.mu)
	l.wg.Add(2)
	go l.run(l.nextLarge)
	go l.run(l.nextSmall)
	return l
}

// run does what next takes off the queues until the end.
func (l *lander) run(next func() func()) {
	defer l.wg.Done()
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.ended {
		work := next()
		if work == nil {
			l.cond.Wait()
			continue
		}
		l.busy++
		l.mu.Unlock()
		work()
		l.mu.Lock()
		l.busy--
		l.cond.Broadcast()
	}
}

func (l *lander) nextLarge() func() {
	switch {
	case len(l.dropped) > 0:
		fs := l.dropped
		l.dropped = nil
		return func() {
			for _, f := range fs {
				f.giveUp()
			}
		}
	case len(l.larges) > 0:
		f := l.larges[0]
		l.larges = l.larges[1:]
		return func() {
			if err := f.land(); err != nil {
				l.d.failed(f, err)
			}
		}
	}
	return nil
}

func (l *lander) nextSmall() func() {
	if len(l.smalls) == 0 {
		return nil
	}
	batch := l.smalls
	l.smalls = nil
	return func() { l.landBatch(batch) }
}

func (l *lander) put(queue *[]*receiving, f *receiving) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*queue = append(*queue, f)
	l.cond.Broadcast()
}

func (l *lander) large(f *receiving) { l.put(&l.larges, f) }
func (l *lander) drop(f *receiving)  { l.put(&l.dropped, f) }

// empty lands a file without content.
func (l *lander) empty(f *receiving) {
	if err := l.small(f, nil); err != nil {
		l.d.failed(f, err)
	}
}

// drain waits until nothing is queued.
func (l *lander) drain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.ended && (l.busy > 0 || len(l.larges)+len(l.dropped)+len(l.smalls) > 0) {
		l.cond.Wait()
	}
}

// stop ends after what is being done now; small files that wait are removed.
func (l *lander) stop() {
	l.mu.Lock()
	l.ended = true
	l.cond.Broadcast()
	l.mu.Unlock()
	l.wg.Wait()
	for _, f := range l.smalls {
		f.giveUp()
		<-l.slots
	}
	l.smalls = nil
}

// small writes a whole small file under its temporary name and queues it.
func (l *lander) small(f *receiving, data []byte) error {
	l.slots <- struct{}{}
	queued := false
	defer func() {
		if !queued {
			<-l.slots
		}
	}()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state != waiting {
		return nil // it has come before, or was given up
	}
	err := l.d.tree.at(f.target, func(dir *dirHandle, _ string) error {
		file, err := dir.OpenFile(f.temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		// Its lock tells other runs that it is alive.
		ok, err := lockFile(dir, f.temp, file)
		if err == nil && !ok {
			err = errBusy
		}
		if err == nil {
			_, err = file.Write(data)
		}
		if err == nil {
			err = f.dress(dir, file)
		}
		if err != nil {
			_ = file.Close() // it is removed
			return errors.Join(err, removeName(dir, f.temp))
		}
		f.f = file
		return nil
	})
	if err != nil {
		return err
	}
	f.state = arrived
	l.d.verified.Add(uint64(len(data)))
	queued = true
	l.put(&l.smalls, f)
	return nil
}

// dress gives the unfinished file the mode and time of its source.
func (f *receiving) dress(dir *dirHandle, file *os.File) error {
	if err := file.Chmod(fs.FileMode(f.entry.Mode)); err != nil {
		return err
	}
	return setTime(dir, f.temp, f.entry.Mtime)
}

// land makes a large file durable and gives it its final name.
func (f *receiving) land() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.state == givenUp || f.state == landed:
		return nil
	case f.left > 0:
		return fault.Newf(fault.Protocol, "use the same version of tbcluster on both nodes", "%s was called complete with %d chunks missing", f.target, f.left).
			At(f.d.show(f.target))
	}
	f.state = arrived // nothing is written any more
	f.mu.Unlock()
	f.writing.Wait()
	f.mu.Lock()
	if f.state != arrived {
		return nil
	}
	err := f.d.tree.at(f.target, func(dir *dirHandle, name string) error {
		if err := f.dress(dir, f.f); err != nil {
			return err
		}
		if err := f.f.Sync(); err != nil {
			return err
		}
		if err := f.rename(dir, name); err != nil {
			return err
		}
		if err := dir.self.Sync(); err != nil && !ignorableSync(err) {
			return err
		}
		return removeName(dir, journalName(f.temp))
	})
	if err != nil {
		return err
	}
	f.closeFiles()
	f.state = landed
	f.d.finished.Add(1)
	return nil
}

// rename gives the open file its final name, if it still has its temporary one.
func (f *receiving) rename(dir *dirHandle, name string) error {
	named, err := dir.Lstat(f.temp)
	if err != nil {
		return err
	}
	opened, err := f.f.Stat()
	if err != nil {
		return err
	}
	if !os.SameFile(named, opened) {
		return &fs.PathError{Op: "rename", Path: f.temp, Err: errors.New("somebody has replaced the unfinished file")}
	}
	return dir.Rename(f.temp, name)
}

// landBatch makes small files durable together and gives them their names.
func (l *lander) landBatch(batch []*receiving) {
	defer func() {
		for range batch {
			<-l.slots
		}
	}()
	var alive []*receiving
	var files []*os.File
	for _, f := range batch {
		f.mu.Lock()
		if f.state == arrived {
			alive = append(alive, f)
			files = append(files, f.f)
		}
		f.mu.Unlock()
	}
	if err := makeDurable(files); err != nil {
		for _, f := range alive {
			l.d.failed(f, err)
		}
		return
	}
	dirs := map[string][]*receiving{}
	for _, f := range alive {
		f.mu.Lock()
		var err error
		if f.state == arrived {
			err = l.d.tree.at(f.target, f.rename)
		}
		f.mu.Unlock()
		if err != nil {
			l.d.failed(f, err)
			continue
		}
		dirs[path.Dir(f.target)] = append(dirs[path.Dir(f.target)], f)
	}
	for dir, fs := range dirs {
		err := l.d.tree.sync(dir)
		for _, f := range fs {
			if err != nil {
				l.d.failed(f, err)
				continue
			}
			f.mu.Lock()
			f.closeFiles()
			f.state = landed
			f.mu.Unlock()
			l.d.finished.Add(1)
		}
	}
}

func makeDurable(files []*os.File) error {
	if len(files) > syncEach {
		return syncAll(files)
	}
	for _, f := range files {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// complete makes links, gives directories their modes and times, and looks at
// every name once more.
func (w *worker) complete(ctx context.Context, _ json.RawMessage) (any, error) {
	d := w.destination()
	d.phase.Lock()
	defer d.phase.Unlock()
	if d.ended() || !d.decided || d.plan.DryRun {
		return nil, fault.Newf(fault.Protocol, "", "a transfer is completed after it was decided")
	}
	d.lander.drain()
	if d.dead() {
		d.mu.Lock()
		defer d.mu.Unlock()
		return nil, d.fatal
	}
	for _, f := range d.files {
		if f != nil && !f.settled() {
			d.failed(f, fault.Newf(fault.Protocol, "use the same version of tbcluster on both nodes", "%s never arrived", f.target).At(d.show(f.target)))
		}
	}
	changed := map[string]bool{} // directories with new names
	for i, e := range d.entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		t := d.plan.targets[i]
		switch d.plan.actions[i] {
		case link:
			if err := d.link(e, t); err != nil {
				d.w.problem(d.writeFault(t, err))
				continue
			}
			changed[path.Dir(t)] = true
		case create:
			changed[t] = true
			if t != "" {
				changed[path.Dir(t)] = true
			}
		}
	}
	for _, i := range d.plan.fix {
		if err := d.dress(d.entries[i], d.plan.targets[i]); err != nil {
			d.w.problem(d.writeFault(d.plan.targets[i], err))
		}
	}
	d.tree.forget() // names are looked up anew from here on
	d.verify()
	for i := len(d.entries) - 1; i >= 0; i-- {
		e, t := d.entries[i], d.plan.targets[i]
		a := d.plan.actions[i]
		// A base that was there keeps what it had: it is the user's own choice.
		if a != create && (a != adopt || t == "") {
			continue
		}
		if err := d.dress(e, t); err != nil {
			d.w.problem(d.writeFault(t, err))
		}
	}
	for dir := range changed {
		if err := d.syncDir(dir); err != nil {
			d.w.problem(d.writeFault(dir, err))
		}
	}
	if d.plan.missing {
		if err := syncPath(filepath.Dir(d.plan.base)); err != nil {
			d.w.problem(d.writeFault("", err))
		}
	}
	w.tellCount(&countNote{})
	return struct{}{}, nil
}

// syncDir is tree.sync, but for a directory that its new mode has closed to us;
// the sync of its parent and of its files has to do there.
func (d *destination) syncDir(dir string) error {
	err := d.tree.sync(dir)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}

func syncPath(dir string) error {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrPermission) {
		return nil // it may be written to and not read: nothing to hold on to
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // Sync has told what there is to tell
	if err := f.Sync(); err != nil && !ignorableSync(err) {
		return err
	}
	return nil
}

func (f *receiving) settled() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state == landed || f.state == givenUp
}

// link makes a symlink or another name of a file, in the place of what is there.
func (d *destination) link(e manifest.Entry, t string) error {
	temp := tempName(path.Base(t), sessionKey(d.w.me().Session))
	return d.tree.at(t, func(dir *dirHandle, name string) error {
		if e.Kind == manifest.Symlink {
			if err := dir.Symlink(string(e.Target), temp); err != nil {
				return err
			}
			return errors.Join(setTime(dir, temp, e.Mtime), dir.Rename(temp, name))
		}
		from := d.plan.targets[e.Link]
		if a := d.plan.actions[e.Link]; a != skip && (a != send || !d.landed(e.Link)) {
			return fmt.Errorf("%s, of which it is another name, was not copied", from)
		}
		return d.linkFile(dir, name, temp, from)
	})
}

// linkFile makes name another name of the file from. Both directories are
// reached without following symlinks, so the system's own call is used on their
// descriptors.
func (d *destination) linkFile(dir *dirHandle, name, temp, from string) error {
	return d.tree.at(from, func(first *dirHandle, firstName string) error {
		a, err := first.Lstat(firstName)
		if err != nil {
			return err
		}
		if b, err := dir.Lstat(name); err == nil && os.SameFile(a, b) {
			return nil
		}
		if err := linkAt(first.self, firstName, dir.self, temp); err != nil {
			return err
		}
		return dir.Rename(temp, name)
	})
}

func (d *destination) landed(i int) bool {
	f, err := d.file(i)
	if err != nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state == landed
}

// dress gives what is under its final name the mode and time of its source.
func (d *destination) dress(e manifest.Entry, t string) error {
	if t == "" {
		if err := d.tree.base.self.Chmod(fs.FileMode(e.Mode)); err != nil {
			return err
		}
		return setTime(d.tree.base, ".", e.Mtime)
	}
	return d.tree.at(t, func(dir *dirHandle, name string) error {
		if err := dir.Chmod(name, fs.FileMode(e.Mode)); err != nil {
			return err
		}
		return setTime(dir, name, e.Mtime)
	})
}

// verify looks once more at the name of everything that landed, from the base
// down: a directory that was moved or replaced meanwhile would have taken it
// elsewhere.
func (d *destination) verify() {
	for _, f := range d.files {
		if f == nil {
			continue
		}
		f.mu.Lock()
		ok := f.state == landed
		f.mu.Unlock()
		if !ok {
			continue
		}
		fi, err := d.tree.lstat(f.target)
		if err == nil && (!fi.Mode().IsRegular() || fi.Size() != f.entry.Size) {
			err = errors.New("it is not what was written: somebody has changed it")
		}
		if err != nil {
			d.finished.Add(^uint64(0))
			d.w.problem(d.writeFault(f.target, err))
		}
	}
}
