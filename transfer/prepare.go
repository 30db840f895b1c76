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
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/transfer/manifest"
)

// prepare finds out where everything goes and what is there already. It
// changes nothing.
func (w *worker) prepare(ctx context.Context, body json.RawMessage) (any, error) {
	in, err := decode[prepareIn](body)
	if err != nil {
		return nil, err
	}
	d := w.destination()
	d.phase.Lock()
	defer d.phase.Unlock()
	if d.ended() || d.prepared || len(in.Roots) == 0 || len(in.Here) != len(in.Roots) {
		return nil, fault.Newf(fault.Protocol, "", "a transfer is prepared once, with its sources")
	}
	d.prepared = true
	d.plan.prepareIn = in
	for i, e := range d.entries {
		if err := e.Check(i, len(in.Roots)); err != nil {
			return nil, fault.New(fault.Protocol, "the list of files is malformed", err, "use the same version of tbcluster on both nodes")
		}
	}
	for _, r := range in.Roots {
		if err := manifest.CheckName(r.Name); err != nil && !r.Contents {
			return nil, fault.New(fault.Protocol, "the list of files is malformed", err, "use the same version of tbcluster on both nodes")
		}
	}
	if err := d.resolve(); err != nil {
		return nil, err
	}
	if err := d.checkOverlap(); err != nil {
		return nil, err
	}
	if err := d.place(); err != nil {
		return nil, err
	}
	if !d.plan.missing {
		t, err := openTree(d.plan.base)
		if err != nil {
			return nil, d.writeFault("", err)
		}
		d.mu.Lock()
		d.tree = t
		d.mu.Unlock()
	}
	out := prepareOut{Resolved: []byte(d.resolved())}
	if err := d.look(ctx, &out); err != nil {
		return nil, err
	}
	return out, nil
}

// resolve decides base and rename as rsync does: into a directory that exists
// or is written with a slash at its end, or that several files or a directory
// go to; else under the name itself.
func (d *destination) resolve() error {
	p := &d.plan
	abs, err := d.w.expand(p.Place)
	if err != nil {
		return err
	}
	slash := strings.HasSuffix(abs, "/") || strings.HasSuffix(abs, "/.")
	abs = filepath.Clean(abs)
	single := len(p.Roots) == 1 && !p.Roots[0].Dir
	info, err := os.Stat(abs)
	switch {
	case err == nil && info.IsDir():
		p.base = abs
		return nil
	case err == nil && single && !slash:
		p.base, p.rename = filepath.Dir(abs), filepath.Base(abs)
		return nil
	case err == nil:
		return fault.Newf(fault.Usage, "name a directory", "%s is not a directory", abs).At(d.w.where(abs))
	case !errors.Is(err, fs.ErrNotExist):
		p.base = abs
		return d.writeFault("", err)
	}
	if _, err := os.Lstat(abs); err == nil {
		return fault.Newf(fault.FileMissing, "remove the symlink or make what it points to", "%s is a symlink to nothing", abs).At(d.w.where(abs))
	}
	parent := filepath.Dir(abs)
	if single && !slash {
		p.base, p.rename = parent, filepath.Base(abs)
		abs, parent = parent, filepath.Dir(parent)
		info, err := os.Stat(abs)
		if err == nil && info.IsDir() {
			return nil
		}
		if !p.MakePath {
			return d.noParent(abs, err)
		}
	}
	p.base, p.missing = abs, true
	if info, err := os.Stat(parent); (err != nil || !info.IsDir()) && !p.MakePath {
		return d.noParent(parent, err)
	}
	return nil
}

func (d *destination) noParent(dir string, err error) error {
	why := "no such directory"
	reason := fault.FileMissing
	if err == nil {
		why, reason = "not a directory", fault.Usage
	} else if !errors.Is(err, fs.ErrNotExist) {
		return d.writeFault("", err)
	}
	f := fault.Newf(reason, fmt.Sprintf("make it first: mkdir -p %s on %s", dir, d.w.me().NodeName), "write into %s", dir).At(d.w.where(dir))
	f.Why = why
	return f
}

// resolved is the destination for people.
func (d *destination) resolved() string {
	p := &d.plan
	if len(p.Roots) == 1 && !p.Roots[0].Contents {
		name := string(p.Roots[0].Name)
		if p.rename != "" {
			name = p.rename
		}
		return filepath.Join(p.base, name)
	}
	return p.base
}

// existing returns base, or the nearest directory above it that exists.
func (d *destination) existing() string {
	dir := d.plan.base
	for dir != "/" {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			break
		}
		dir = filepath.Dir(dir)
	}
	return dir
}

// checkOverlap refuses a destination inside a source, and one that is the
// source, where both are on this node.
func (d *destination) checkOverlap() error {
	p := &d.plan
	is := func(path string, r manifest.Root) bool {
		info, err := os.Stat(path)
		if err != nil {
			return false
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		return ok && uint64(st.Dev) == r.Device && st.Ino == r.Inode
	}
	base, err := filepath.EvalSymlinks(d.existing())
	if err != nil {
		return d.writeFault("", err)
	}
	for i, r := range p.Roots {
		if !p.Here[i] {
			continue
		}
		name := string(r.Name)
		if p.rename != "" {
			name = p.rename
		}
		if !r.Contents && is(filepath.Join(p.base, name), r) {
			return fault.Newf(fault.Usage, "name another destination", "source and destination are the same: %s", r.Abs).At(d.w.where(string(r.Abs)))
		}
		for dir := base; r.Dir; dir = filepath.Dir(dir) {
			if is(dir, r) {
				return fault.Newf(fault.Usage, "name a destination outside of the source", "destination %s is inside the source %s", p.base, r.Abs).
					At(d.w.where(p.base))
			}
			if dir == "/" {
				break
			}
		}
	}
	return nil
}

// place gives every entry its target and refuses two with the same.
func (d *destination) place() error {
	p := &d.plan
	p.targets = make([]string, len(d.entries))
	seen := make(map[string]int, len(d.entries))
	folded := make(map[string]int, len(d.entries))
	var clash [2]int
	for i, e := range d.entries {
		t := p.target(e)
		if t == "" && e.Kind != manifest.Dir {
			return fault.Newf(fault.Protocol, "use the same version of tbcluster on both nodes", "the list of files has one without a name")
		}
		p.targets[i] = t
		if first, ok := seen[t]; ok {
			if a := d.entries[first]; a.Kind == manifest.Dir && e.Kind == manifest.Dir {
				continue
			}
			return fault.Newf(fault.Usage, "copy them one after the other, to different names",
				"two sources would both become %s", filepath.Join(p.base, t)).At(d.show(t))
		}
		seen[t] = i
		low := strings.ToLower(t)
		if first, ok := folded[low]; ok && clash == [2]int{} {
			clash = [2]int{first, i}
		}
		folded[low] = i
	}
	if clash != [2]int{} && foldsCase(d.existing()) {
		a, b := p.targets[clash[0]], p.targets[clash[1]]
		return fault.Newf(fault.Usage, "rename one of them, or copy to a volume that tells capitals from small letters",
			"%s and %s are one name on that volume", a, b).At(d.show(""))
	}
	return nil
}

// foldsCase reports whether the volume of dir takes capitals for small
// letters: it looks for some existing name in the other case.
func foldsCase(dir string) bool {
	for ; dir != "/"; dir = filepath.Dir(dir) {
		name := filepath.Base(dir)
		other := strings.ToUpper(name)
		if other == name {
			other = strings.ToLower(name)
		}
		if other == name {
			continue
		}
		a, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		b, err := os.Lstat(filepath.Join(filepath.Dir(dir), other))
		return err == nil && os.SameFile(a, b)
	}
	return false
}

// look decides what is to be done about each entry.
func (d *destination) look(ctx context.Context, out *prepareOut) error {
	p := &d.plan
	p.actions = make([]action, len(d.entries))
	blocked := map[string]bool{} // directories that cannot be
	for i, e := range d.entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		t := p.targets[i]
		if dir := path.Dir(t); t != "" && blocked[dir] {
			// The fault of the directory says it for all in it.
			blocked[t] = e.Kind == manifest.Dir
			continue
		}
		a, err := d.lookAt(i, e, t)
		if err != nil {
			if e.Kind == manifest.Dir {
				blocked[t] = true
			}
			d.w.problem(d.writeFault(t, err))
		}
		p.actions[i] = a
		if a == compare {
			out.Compare = append(out.Compare, i)
		}
	}
	return d.checkWritable()
}

func (d *destination) lookAt(i int, e manifest.Entry, t string) (action, error) {
	fresh := map[manifest.Kind]action{manifest.File: send, manifest.Dir: create, manifest.Symlink: link, manifest.Hardlink: link}[e.Kind]
	if d.tree == nil {
		return fresh, nil
	}
	fi, err := d.tree.lstat(t)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fresh, nil
	case err != nil:
		return leave, err
	case e.Kind == manifest.Dir && fi.IsDir():
		return adopt, nil
	case e.Kind == manifest.Dir && fi.Mode()&fs.ModeSymlink != 0:
		return leave, errIsSymlink
	case e.Kind == manifest.Dir:
		return leave, syscall.ENOTDIR
	case fi.IsDir():
		return leave, syscall.EISDIR
	case fi.Mode()&(fs.ModeDevice|fs.ModeNamedPipe|fs.ModeSocket) != 0:
		// Others have it open, or the system needs it: /dev/null is not made a file.
		return leave, errIsSpecial
	}
	switch e.Kind {
	case manifest.Symlink:
		if fi.Mode()&fs.ModeSymlink != 0 {
			var have string
			err := d.tree.at(t, func(dir *dirHandle, name string) (err error) {
				have, err = dir.Readlink(name)
				return err
			})
			if err == nil && have == string(e.Target) {
				return skip, nil
			}
		}
	case manifest.Hardlink:
		first, err := d.tree.lstat(d.plan.targets[e.Link])
		if err == nil && os.SameFile(first, fi) && d.plan.actions[e.Link] == skip {
			return skip, nil
		}
	case manifest.File:
		if !fi.Mode().IsRegular() || fi.Size() != e.Size {
			return send, nil
		}
		if d.plan.Checksum {
			return compare, nil
		}
		if sameTime(fi.ModTime(), e.Mtime) {
			if uint32(fi.Mode().Perm()) != e.Mode {
				d.plan.fix = append(d.plan.fix, i)
			}
			return skip, nil
		}
	}
	return fresh, nil
}

// checkWritable makes sure that the user may write wherever something is to be
// made.
func (d *destination) checkWritable() error {
	p := &d.plan
	checked := map[string]bool{}
	check := func(dir string) error {
		if checked[dir] {
			return nil
		}
		checked[dir] = true
		if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
			f := d.writeFault("", &fs.PathError{Op: "write", Path: dir, Err: err})
			f.What, f.Where = "write into "+dir, d.w.where(dir)
			return f
		}
		return nil
	}
	made := map[string]bool{}
	for i, a := range p.actions {
		t := p.targets[i]
		if a != create && a != send && a != link && a != compare {
			continue
		}
		if a == create {
			made[t] = true
		}
		if t == "" || made[path.Dir(t)] {
			continue
		}
		dir := filepath.Join(p.base, path.Dir(t))
		if p.missing {
			dir = d.existing()
		}
		if err := check(dir); err != nil {
			return err
		}
	}
	return nil
}
