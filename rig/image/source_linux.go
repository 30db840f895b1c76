package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// source fetches the sources of a Debian kernel, of the very build that guests
// boot, and unpacks what matches patterns (all of it without any) into dir. It
// returns the directory of the sources.
func (s *Store) source(ctx context.Context, t *Tools, release, dir string, patterns ...string) (string, error) {
	options, err := aptOptions(ctx)
	if err != nil {
		return "", err
	}
	a := &apt{root: t.root, options: options}
	name, err := sourcePackage(release)
	if err != nil {
		return "", err
	}
	record, err := a.command(ctx, "", "apt-cache", "show", "--no-all-versions", "linux-headers-"+release)
	if err != nil {
		return "", err
	}
	version := field(record, "Version")
	if version == "" {
		return "", fault.Newf(fault.FileIO, "remove "+t.root+": it is built anew", "the chroot's lists do not know the version of %s", release)
	}
	if err := a.download(ctx, dir, name+"="+version); err != nil {
		return "", err
	}
	// The package is an ar of a tar of a compressed tar.
	unpack := exec.CommandContext(ctx, "bash", append([]string{"-euo", "pipefail", "-c",
		`cd "$1"; shift; dpkg-deb --fsys-tarfile ./*.deb | tar -x --wildcards './usr/src/linux-source-*.tar.xz'; rm ./*.deb
		tar -xJf usr/src/linux-source-*.tar.xz --wildcards "$@"; rm -r usr`, "-", dir}, patterns...)...)
	if _, err := run(ctx, unpack); err != nil {
		return "", err
	}
	return filepath.Join(dir, name), nil
}

// sourcePackage names the package with the sources of a kernel: linux-source-7.3
// for 7.3.4+deb13-amd64.
func sourcePackage(release string) (string, error) {
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 3 {
		return "", fmt.Errorf("the kernel release %q has no third number", release)
	}
	return "linux-source-" + parts[0] + "." + parts[1], nil
}

// field returns a field of a record of apt-cache.
func field(record, name string) string {
	for line := range strings.Lines(record) {
		if value, ok := strings.CutPrefix(line, name+": "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// inWorkspace runs f with a directory inside the chroot, which it removes. It
// also removes those of builders that died.
func (t *Tools) inWorkspace(f func(inside, outside string) error) (err error) {
	if err := t.fakeProc(); err != nil {
		return err
	}
	outside, unlock, err := t.newWorkspace()
	if err != nil {
		return fault.New(fault.FileIO, "make a directory to build in", err, "").At(t.root)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(outside), unlock()) }()
	return f(strings.TrimPrefix(outside, t.root), outside)
}

// newWorkspace makes a directory that is locked as long as its builder lives.
func (t *Tools) newWorkspace() (dir string, unlock func() error, err error) {
	tmp := filepath.Join(t.root, "tmp")
	// While this is held, nobody takes a new directory for a dead builder's.
	all, err := os.OpenFile(filepath.Join(tmp, "rig.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", nil, err
	}
	defer all.Close()
	if err := unix.Flock(int(all.Fd()), unix.LOCK_EX); err != nil {
		return "", nil, err
	}
	old, err := filepath.Glob(filepath.Join(tmp, "rig-*"))
	if err != nil {
		return "", nil, err
	}
	for _, dir := range old {
		f, err := os.Open(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue // just finished
		}
		if err != nil {
			return "", nil, err
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = os.RemoveAll(dir)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return "", nil, err
		}
	}
	dir, err = os.MkdirTemp(tmp, "rig-")
	if err != nil {
		return "", nil, err
	}
	f, err := os.Open(dir)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		return "", nil, errors.Join(err, f.Close(), os.RemoveAll(dir))
	}
	return dir, f.Close, nil
}

// fakeProc gives the chroot the one file of /proc that a build asks for, so that
// nothing has to be mounted: objtool looks in it for where its stack begins, and
// uses that only to say, when it has crashed, whether the stack was full.
func (t *Tools) fakeProc() error {
	dir := filepath.Join(t.root, "proc/self")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "maps"), []byte("7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0 [stack]\n"), 0o644)
}
