package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// Options says where a Store is and who hears of its progress.
type Options struct {
	// Dir is where everything is kept; "" is
	// ${XDG_CACHE_HOME:-~/.cache}/tbcluster/rig.
	Dir string
	// Log is called with one line of progress now and then; nil is silence.
	Log func(line string)
	// Mirror is the URI of a Debian mirror; "" is the one this machine uses
	// (or that of the environment variable TBCLUSTER_RIG_MIRROR).
	Mirror string
}

// Store is the cache of built parts. Its methods build what is missing and may
// be called by several goroutines and processes at once.
type Store struct {
	dir    string
	mirror string
	log    func(string)
}

// Open returns the store of a directory, which it makes. It builds nothing.
func Open(o Options) (*Store, error) {
	if runtime.GOARCH != "amd64" {
		return nil, fault.Newf(fault.Unsupported, "run it on a Linux machine with an amd64 processor", "the rig's guests do not run on %s", runtime.GOARCH)
	}
	s := &Store{dir: o.Dir, mirror: o.Mirror, log: o.Log}
	if s.log == nil {
		s.log = func(string) {}
	}
	if s.mirror == "" {
		s.mirror = os.Getenv("TBCLUSTER_RIG_MIRROR")
	}
	if s.dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, fault.New(fault.FileIO, "find the cache directory", err, "set XDG_CACHE_HOME or HOME")
		}
		s.dir = filepath.Join(cache, "tbcluster", "rig")
	}
	if !filepath.IsAbs(s.dir) {
		return nil, fault.Newf(fault.Usage, "give an absolute path", "the cache directory %s is no absolute path", s.dir)
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return nil, fault.New(fault.FileIO, "make the cache directory", err, "choose another one with XDG_CACHE_HOME").At(s.dir)
	}
	return s, nil
}

// Unavailable reports whether an error of a Store means that this machine cannot
// have guests at all: it is of another kind, there is no root to build with, or
// no Debian mirror.
func Unavailable(err error) bool {
	return fault.Is(err, fault.NoPermission) || fault.Is(err, fault.Connection) || fault.Is(err, fault.Unsupported)
}

// Dir returns the directory of the store.
func (s *Store) Dir() string { return s.dir }

// part is one directory of the store.
type part struct {
	name   string   // "tools"
	about  string   // for the line of progress: "Debian 13 with QEMU"
	recipe []string // whatever changes what comes out
	need   uint64   // bytes of disk that building it takes
	// build fills dir, which exists and is empty. What it leaves there is the
	// part.
	build func(ctx context.Context, dir string) error
}

// key names the part: its recipe's hash.
func (p part) key() string {
	h := sha256.New()
	for _, line := range p.recipe {
		fmt.Fprintf(h, "%d:%s\n", len(line), line)
	}
	return p.name + "-" + hex.EncodeToString(h.Sum(nil))[:16]
}

// unusedFor is after how long a part that nobody used is removed when another
// of the same name is made.
const unusedFor = 14 * 24 * time.Hour

// ensure returns the directory of a part, which it builds when it is missing.
func (s *Store) ensure(ctx context.Context, p part) (string, error) {
	dir := filepath.Join(s.dir, p.key())
	if used(dir) {
		return dir, nil
	}
	unlock, err := s.lock(ctx, p)
	if err != nil {
		return "", err
	}
	defer unlock()
	if used(dir) { // another builder was faster
		return dir, nil
	}
	// Whoever built here before and does not hold the lock any more is dead.
	if err := s.removeAll(dir + ".new-*"); err != nil {
		return "", err
	}
	if err := s.room(p); err != nil {
		return "", err
	}
	s.log(fmt.Sprintf("%s: building (%s)", p.name, p.about))
	begun := time.Now()
	aside, err := os.MkdirTemp(s.dir, p.key()+".new-")
	if err != nil {
		return "", fault.New(fault.FileIO, "make a directory", err, "").At(s.dir)
	}
	err = s.chatter(p.name, func() error { return p.build(ctx, aside) })
	if err == nil {
		err = os.Chmod(aside, 0o755)
	}
	if err == nil {
		err = os.Rename(aside, dir)
	}
	if err != nil {
		return "", errors.Join(s.explain(ctx, p, err), s.removeAll(aside))
	}
	s.log(fmt.Sprintf("%s: ready after %.0f s", p.name, time.Since(begun).Seconds()))
	return dir, s.prune(p)
}

// used reports whether a finished part is there, and notes that it is in use.
func used(dir string) bool {
	now := time.Now()
	return os.Chtimes(dir, now, now) == nil || isDir(dir)
}

func isDir(dir string) bool {
	st, err := os.Stat(dir)
	return err == nil && st.IsDir()
}

func isFile(name string) bool {
	st, err := os.Stat(name)
	return err == nil && st.Mode().IsRegular()
}

// lock takes the lock of a part. It is the kernel's: it ends with the process
// that holds it, however that ends.
func (s *Store) lock(ctx context.Context, p part) (unlock func(), err error) {
	name := filepath.Join(s.dir, p.key()+".lock")
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, fault.New(fault.FileIO, "open a lock", err, "run it as the user who made the directory, or choose another one with XDG_CACHE_HOME").At(name)
	}
	said := false
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fault.New(fault.FileIO, "lock", err, "the directory has to be on a file system with flock").At(name)
		}
		if !said {
			s.log(p.name + ": waiting for another process that builds it")
			said = true
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fault.New(fault.Interrupted, "wait for another process that builds "+p.name, context.Cause(ctx), "")
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// room refuses to begin what the disk cannot hold.
func (s *Store) room(p part) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return fault.New(fault.FileIO, "look at the disk", err, "").At(s.dir)
	}
	free := st.Bavail * uint64(st.Bsize)
	if free >= p.need {
		return nil
	}
	return &fault.Fault{
		Reason: fault.DiskFull, What: "build " + p.name + " for the rig's guests", Where: s.dir,
		Why: fmt.Sprintf("%d MB are free, %d MB are needed", free>>20, p.need>>20),
		Fix: "free some, or choose another directory with XDG_CACHE_HOME",
	}
}

// chatter says that it is still going on while f runs.
func (s *Store) chatter(name string, f func() error) error {
	done := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		begun := time.Now()
		t := time.NewTicker(15 * time.Second)
		defer t.Stop()
		for {
			select {
			case <-done:
				return
			case <-t.C:
				s.log(fmt.Sprintf("%s: still at it after %.0f s", name, time.Since(begun).Seconds()))
			}
		}
	}()
	err := f()
	close(done)
	<-finished
	return err
}

// explain makes a Fault of whatever went wrong while a part was built.
func (s *Store) explain(ctx context.Context, p part, err error) error {
	what := "build " + p.name + " for the rig's guests"
	if ctx.Err() != nil {
		return fault.New(fault.Interrupted, what, context.Cause(ctx), "").At(s.dir)
	}
	if errors.Is(err, unix.ENOSPC) || strings.Contains(err.Error(), "No space left on device") {
		return fault.New(fault.DiskFull, what, err, "free some space, or choose another directory with XDG_CACHE_HOME").At(s.dir)
	}
	if f := fault.As(err); f != nil {
		return err
	}
	return fault.New(fault.FileIO, what, err, "").At(s.dir)
}

// prune removes parts of the same name that nobody used for long, and what dead
// builders of such parts have left.
func (s *Store) prune(p part) error {
	halves, err := filepath.Glob(filepath.Join(s.dir, p.name+"-*.new-*"))
	if err != nil {
		return err
	}
	for _, half := range halves {
		whole, _, _ := strings.Cut(half, ".new-")
		lock, err := os.OpenFile(whole+".lock", os.O_RDWR, 0)
		if err != nil {
			continue // without its lock nobody can say whether it is dead
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = s.removeAll(half)
		}
		if err = errors.Join(err, lock.Close()); err != nil {
			return err
		}
	}
	others, err := filepath.Glob(filepath.Join(s.dir, p.name+"-*"))
	if err != nil {
		return err
	}
	for _, dir := range others {
		st, err := os.Stat(dir)
		base := filepath.Base(dir)
		if err != nil || !st.IsDir() || base == p.key() || len(base) != len(p.key()) || time.Since(st.ModTime()) < unusedFor {
			continue
		}
		if err := s.removeAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// removeAll removes what a pattern names, unless something is mounted in there.
func (s *Store) removeAll(pattern string) error {
	names, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	for _, name := range names {
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fault.New(fault.FileIO, "list what is mounted", err, "")
		}
		for line := range strings.Lines(string(mounts)) {
			if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], name+"/") {
				return fault.Newf(fault.FileIO, "umount "+f[4]+", then try again", "remove %s: something is mounted in it", name)
			}
		}
		if err := os.RemoveAll(name); err != nil {
			return fault.New(fault.FileIO, "remove what an earlier run left", err, "remove it by hand, as root").At(name)
		}
	}
	return nil
}
