package manifest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"tbcluster/api/fault"
)

// Options of a scan.
type Options struct {
	Filter    Filter
	CopyLinks bool
	// Node goes into identities; NodeName into messages.
	Node, NodeName string
	// First is the Index of the first entry, FirstRoot the number of the first root.
	First, FirstRoot int
}

// Temporary is what the hidden names of unfinished files look like; they are
// never copied.
var Temporary = regexp.MustCompile(`^\..*\.tbcluster-[0-9a-f]{16}(\.journal)?$`)

// Scan walks the absolute paths of sources, in order, and gives emit what is to
// be copied, directories before what is in them, and problem what is not and
// why. A source that does not exist is an error, before anything is emitted.
//
// A source that is itself a symlink is followed: alone it would be of no use
// where it arrives.
func Scan(ctx context.Context, sources []string, o Options, emit func(Entry) error, problem func(*fault.Fault)) ([]Root, error) {
	s := &scanner{Options: o, ctx: ctx, emit: emit, problem: problem, next: o.First, seen: map[[2]uint64]int{}}
	roots := make([]Root, len(sources))
	stats := make([]stat, len(sources))
	for i, src := range sources {
		abs := filepath.Clean(src)
		st, err := statPath(abs)
		if err != nil {
			return nil, s.fault(src, err)
		}
		slash := strings.HasSuffix(src, "/") || strings.HasSuffix(src, "/.")
		if slash && !st.mode.IsDir() {
			return nil, fault.Newf(fault.Usage, "leave out the slash at the end", "%s is not a directory", src).At(o.NodeName + ":" + src)
		}
		name := filepath.Base(abs)
		roots[i] = Root{Abs: []byte(abs), Name: []byte(name), Dir: st.mode.IsDir(),
			Contents: slash || name == "/", Device: st.dev, Inode: st.inode}
		stats[i] = st
	}
	for i, r := range roots {
		s.root = o.FirstRoot + i
		top := string(r.Name)
		if r.Contents {
			top = ""
		}
		if err := s.visit(string(r.Abs), "", top, stats[i], nil); err != nil {
			return nil, err
		}
	}
	return roots, nil
}

type scanner struct {
	Options
	ctx     context.Context
	emit    func(Entry) error
	problem func(*fault.Fault)
	root    int
	next    int
	seen    map[[2]uint64]int // (device, inode) → index, for files with several names
}

// visit takes one thing: abs to reach it, rel below its root, top as filters
// see it, and the directories above it.
func (s *scanner) visit(abs, rel, top string, st stat, above [][2]uint64) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	if rel != "" && Temporary.MatchString(path.Base(rel)) {
		return nil
	}
	if top != "" && !s.Filter.Copies(top, st.mode.IsDir()) {
		return nil
	}
	e := Entry{Root: s.root, Path: []byte(rel), Mode: uint32(st.mode.Perm()), Mtime: st.mtime}
	switch {
	case st.mode.IsDir():
		return s.dir(abs, rel, top, st, e, above)
	case st.mode.IsRegular():
		e.Kind, e.Size, e.Alloc = File, st.size, st.alloc
		e.Sparse = st.alloc < st.size && st.size >= 64<<10
		e.Identity = identity(s.Node, abs, st)
		key := [2]uint64{st.dev, st.inode}
		if first, ok := s.seen[key]; ok {
			e = Entry{Root: e.Root, Path: e.Path, Kind: Hardlink, Link: first}
		} else if st.links > 1 {
			s.seen[key] = s.next
		}
		return s.send(e)
	case st.mode&fs.ModeSymlink != 0:
		return s.symlink(abs, rel, top, e, above)
	}
	s.problem(fault.Newf(fault.FileUnsupported, "leave it out with --exclude", "%s is %s, which is not copied", abs, kindName(st.mode)).
		At(s.NodeName+":"+abs).With("path", abs))
	return nil
}

func (s *scanner) send(e Entry) error {
	e.Index = s.next
	s.next++
	return s.emit(e)
}

func (s *scanner) dir(abs, rel, top string, st stat, e Entry, above [][2]uint64) error {
	key := [2]uint64{st.dev, st.inode}
	for _, a := range above {
		if a == key {
			s.problem(fault.Newf(fault.FileEscapes, "leave it out with --exclude, or copy links as links",
				"%s leads back into itself", abs).At(s.NodeName + ":" + abs))
			return nil
		}
	}
	e.Kind = Dir
	if err := s.send(e); err != nil {
		return err
	}
	names, err := readNames(abs)
	if err != nil {
		s.problem(s.fault(abs, err))
		return nil
	}
	for _, name := range names {
		child := filepath.Join(abs, name)
		cst, err := lstatPath(child)
		if err != nil {
			s.problem(s.fault(child, err))
			continue
		}
		if err := s.visit(child, path.Join(rel, name), path.Join(top, name), cst, append(above[:len(above):len(above)], key)); err != nil {
			return err
		}
	}
	return nil
}

func (s *scanner) symlink(abs, rel, top string, e Entry, above [][2]uint64) error {
	if s.CopyLinks {
		st, err := statPath(abs)
		if err != nil {
			s.problem(s.fault(abs, err))
			return nil
		}
		return s.visit(abs, rel, top, st, above)
	}
	target, err := os.Readlink(abs)
	if err != nil {
		s.problem(s.fault(abs, err))
		return nil
	}
	if Escapes(rel, target) {
		s.problem(fault.Newf(fault.FileEscapes, "--copy-links copies what it points to; --exclude leaves it out",
			"symlink %s leads out of what is copied, to %s", abs, target).At(s.NodeName + ":" + abs))
		return nil
	}
	e.Kind, e.Mode, e.Target = Symlink, 0, []byte(target)
	return s.send(e)
}

func (s *scanner) fault(abs string, err error) *fault.Fault {
	reason, fix := fault.FileIO, "look at the disk of "+s.NodeName
	switch {
	case errors.Is(err, fs.ErrNotExist):
		reason, fix = fault.FileMissing, "check the name; relative paths start where the command ran, or at home on another node"
	case errors.Is(err, fs.ErrPermission):
		reason, fix = fault.FileDenied, "let the user read it, or leave it out with --exclude"
	}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return fault.New(reason, "read "+abs, err, fix).At(s.NodeName+":"+abs).With("path", abs)
}

func readNames(dir string) ([]string, error) {
	list, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return nil, err
	}
	names := make([]string, len(list))
	for i, e := range list {
		names[i] = e.Name()
	}
	return names, nil
}

func kindName(m fs.FileMode) string {
	switch {
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "no regular file"
}
