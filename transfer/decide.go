package transfer

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/transfer/manifest"
)

// wantPage is how many files one message asks for.
const wantPage = 1000

// decide settles what is sent, makes sure that there is room, makes the
// directories, and asks for the files.
func (w *worker) decide(ctx context.Context, body json.RawMessage) (any, error) {
	in, err := decode[filesNote](body)
	if err != nil {
		return nil, err
	}
	d := w.destination()
	d.phase.Lock()
	defer d.phase.Unlock()
	if d.ended() || !d.prepared || d.decided {
		return nil, fault.Newf(fault.Protocol, "", "a transfer is decided once, after it was prepared")
	}
	d.decided = true
	p := &d.plan
	same := map[int]bool{}
	for _, i := range in.Files {
		same[i] = true
	}
	for i, a := range p.actions {
		if a == compare {
			p.actions[i] = send
			if same[i] {
				p.actions[i] = skip
				p.fix = append(p.fix, i)
			}
		}
	}
	out := decideOut{}
	files := make([]*receiving, len(d.entries))
	defer func() {
		d.mu.Lock() // for close, where what follows fails
		d.files = files
		d.mu.Unlock()
	}()
	var lines [][]byte
	for i, e := range d.entries {
		if p.DryRun {
			lines = append(lines, line(p.actions[i], e, d.entries, p.targets)...)
		}
		if e.Kind != manifest.File {
			continue
		}
		switch p.actions[i] {
		case skip:
			out.SkippedFiles++
			out.SkippedBytes += uint64(e.Size)
		case send:
			out.TotalFiles++
			out.TotalBytes += uint64(e.Size)
			files[i] = newReceiving(d, e, p.targets[i])
		}
	}
	out.Lines = lines
	if p.DryRun {
		return out, d.checkRoom(files)
	}
	d.clean(files)
	for _, f := range files {
		if f == nil || !f.large() {
			continue
		}
		have, err := f.resume(ctx)
		if err != nil {
			return nil, err
		}
		out.TotalBytes -= uint64(have)
		out.SkippedBytes += uint64(have)
	}
	if err := d.checkRoom(files); err != nil {
		return nil, err
	}
	if err := d.makeDirs(); err != nil {
		return nil, err
	}
	d.mu.Lock() // chunks may come from here on
	d.files = files
	d.mu.Unlock()
	if err := d.ask(files); err != nil {
		return nil, err
	}
	return out, nil
}

// line says what would be done about an entry.
func line(a action, e manifest.Entry, all []manifest.Entry, targets []string) [][]byte {
	t := targets[e.Index]
	if t == "" {
		return nil
	}
	switch {
	case a == skip && e.Kind == manifest.File:
		return [][]byte{fmt.Appendf(nil, "have %d bytes %s", e.Size, t)}
	case a == send:
		return [][]byte{fmt.Appendf(nil, "copy %d bytes %s", e.Size, t)}
	case a == create:
		return [][]byte{fmt.Appendf(nil, "make %s/", t)}
	case a == link && e.Kind == manifest.Symlink:
		return [][]byte{fmt.Appendf(nil, "link %s -> %s", t, e.Target)}
	case a == link:
		return [][]byte{fmt.Appendf(nil, "link %s = %s", t, targets[all[e.Link].Index])}
	}
	return nil
}

// checkRoom compares what is to come with the space that there is.
func (d *destination) checkRoom(files []*receiving) error {
	var need uint64
	var biggest *receiving
	for _, f := range files {
		if f == nil {
			continue
		}
		n := f.room()
		need += n
		if biggest == nil || n > biggest.room() {
			biggest = f
		}
	}
	if need == 0 {
		return nil
	}
	dir := d.existing()
	free, err := freeSpace(dir)
	if err != nil {
		return d.writeFault("", err)
	}
	if need <= free {
		return nil
	}
	return d.full(dir, biggest.target, need, free)
}

// full is the fault of a disk without room.
func (d *destination) full(dir, rel string, need, free uint64) *fault.Fault {
	node := d.w.me().NodeName
	abs := filepath.Join(d.plan.base, rel)
	f := fault.Newf(fault.DiskFull, fmt.Sprintf("free %s on %s, or choose another directory", size(need-free), node), "copy to %s", abs)
	f.Why = fmt.Sprintf("%s needed and %s free there", size(need), size(free))
	return f.At(d.w.where(dir)).With("path", abs).With("node", node).With("missing_bytes", fmt.Sprint(need-free))
}

// size writes bytes for people.
func size(n uint64) string {
	units := []string{"bytes", "kB", "MB", "GB", "TB", "PB"}
	x, u := float64(n), 0
	for x >= 1000 && u < len(units)-1 {
		x /= 1000
		u++
	}
	if u == 0 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f %s", x, units[u])
}

// makeDirs makes the base and the directories in it, open to us while we write.
func (d *destination) makeDirs() error {
	p := &d.plan
	if p.missing {
		mk := os.Mkdir
		if p.MakePath {
			mk = os.MkdirAll
		}
		if err := mk(p.base, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
			return d.writeFault("", err)
		}
		t, err := openTree(p.base)
		if err != nil {
			return d.writeFault("", err)
		}
		d.mu.Lock()
		d.tree = t
		d.mu.Unlock()
	}
	for i := range d.entries {
		if p.actions[i] != create || p.targets[i] == "" {
			continue
		}
		err := d.tree.at(p.targets[i], func(dir *dirHandle, name string) error {
			// Closed to others until it has its own mode.
			return dir.Mkdir(name, 0o700)
		})
		if errors.Is(err, fs.ErrExist) {
			// From another source, or somebody was faster; what it is shows below.
			if fi, lerr := d.tree.lstat(p.targets[i]); lerr == nil && fi.IsDir() {
				err = nil
			}
		}
		if err != nil {
			return d.writeFault(p.targets[i], err)
		}
	}
	return nil
}

// clean removes what runs that were killed have left of the files of this
// transfer, unless somebody is still writing it.
func (d *destination) clean(files []*receiving) {
	if d.tree == nil {
		return
	}
	wanted := map[string]map[string]string{} // directory → beginning of temporary names → the one to keep
	for i, e := range d.entries {
		if a := d.plan.actions[i]; e.Kind != manifest.File || a != send && a != skip {
			continue
		}
		temp, keep := "", ""
		if f := files[i]; f != nil {
			temp, keep = f.temp, f.temp
		} else {
			temp = tempName(path.Base(d.plan.targets[i]), nil)
		}
		dir := path.Dir(d.plan.targets[i])
		if wanted[dir] == nil {
			wanted[dir] = map[string]string{}
		}
		wanted[dir][strings.TrimRight(temp, "0123456789abcdef")] = keep
	}
	for dir, temps := range wanted {
		names, err := d.tree.names(dir)
		if err != nil {
			continue // it is not there yet, or writing to it will tell
		}
		for _, name := range names {
			if !manifest.Temporary.MatchString(name) {
				continue
			}
			data := strings.TrimSuffix(name, ".journal")
			keep, ok := temps[strings.TrimRight(data, "0123456789abcdef")]
			if !ok || data == keep {
				continue
			}
			removeStale(d.tree, dir, data)
		}
	}
}

// ask tells the source which files and chunks are wanted. Empty files need
// none.
func (d *destination) ask(files []*receiving) error {
	page := make([]want, 0, wantPage)
	flush := func() error {
		if len(page) == 0 {
			return nil
		}
		err := d.w.ctl.tell(kWant, wantNote{page})
		page = page[:0]
		return err
	}
	for i, f := range files {
		if f == nil {
			continue
		}
		if f.entry.Size == 0 {
			d.lander.empty(f)
			continue
		}
		w := want{File: i}
		if f.have != nil && countBits(f.have) > 0 {
			w.Have = f.have
		}
		if page = append(page, w); len(page) == wantPage {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

// sessionKey makes the temporary names of small files those of this run alone.
func sessionKey(session uint64) []byte { return binary.BigEndian.AppendUint64(nil, session) }
