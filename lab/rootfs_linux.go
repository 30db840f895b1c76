package lab

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// sharedDirs are the directories of the host's root that nodes see, read-only:
// the system's programs and libraries.
var sharedDirs = []string{"bin", "gnu", "lib", "lib32", "lib64", "libx32", "nix", "sbin", "usr"}

// devices are the host's device files that nodes see, where they exist.
var devices = []string{"null", "zero", "full", "random", "urandom", "tty", "fuse", "kvm", "net/tun", "dri", "kfd"}

// hostEtc is where a node sees the host's /etc. As deep as /etc itself, so that
// the relative links within it lead where they should.
const hostEtc = "/.etc"

// root builds a root directory; after an error it does nothing more.
type root struct {
	dir string
	s   *setup
	err error
}

func (r *root) at(p string) string { return filepath.Join(r.dir, p) }

func (r *root) do(what string, f func() error) {
	if r.err != nil {
		return
	}
	if err := f(); err != nil {
		r.err = fmt.Errorf("%s: %w", what, err)
	}
}

func (r *root) mkdir(p string, mode os.FileMode) {
	r.do("make "+p, func() error {
		if err := os.MkdirAll(r.at(p), mode&^os.ModeSticky); err != nil {
			return err
		}
		return os.Chmod(r.at(p), mode)
	})
}

func (r *root) symlink(target, p string) {
	r.do("link "+p, func() error { return os.Symlink(target, r.at(p)) })
}

func (r *root) write(p, content string, mode os.FileMode) {
	r.do("write "+p, func() error { return os.WriteFile(r.at(p), []byte(content), mode) })
}

func (r *root) mount(fstype, p string, flags uintptr, data string) {
	r.do("mount "+p, func() error { return unix.Mount("tbcluster-lab", r.at(p), fstype, flags, data) })
}

// bind shows something of the host at p, with all that is mounted below it.
func (r *root) bind(source, p string, readOnly bool) {
	r.do(fmt.Sprintf("show %s at %s", source, p), func() error {
		st, err := os.Stat(source)
		if err != nil {
			return err
		}
		target := r.at(p)
		if st.IsDir() {
			err = os.MkdirAll(target, 0o755)
		} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
			var f *os.File
			if f, err = os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644); err == nil {
				err = f.Close()
			}
		}
		if err != nil {
			return err
		}
		if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil || !readOnly {
			return err
		}
		return makeReadOnly(target)
	})
}

func makeReadOnly(target string) error {
	err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// Kernels before 5.12: the mount itself, with the flags that it must keep.
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil {
		return err
	}
	keep := uintptr(st.Flags) & (unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_NODIRATIME | unix.MS_RELATIME)
	return unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|keep, "")
}

// buildRoot makes the node's root directory and enters it.
func buildRoot(s *setup) error {
	r := &root{dir: filepath.Join(s.Dir, "root"), s: s}
	r.do("make the root private", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") })
	r.mount("tmpfs", "/", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=256m")
	r.system()
	r.kernel()
	r.volatile()
	r.disk()
	r.etc()
	r.own()
	if r.err != nil {
		return r.err
	}
	return enterRoot(r.dir)
}

// system shows the host's programs.
func (r *root) system() {
	for _, name := range sharedDirs {
		p := "/" + name
		st, err := os.Lstat(p)
		switch {
		case err != nil:
		case st.Mode()&os.ModeSymlink != 0:
			r.copyLink(p, p)
		case st.IsDir():
			r.bind(p, p, true)
		}
	}
	r.mkdir("/opt", 0o755)
	entries, err := os.ReadDir("/opt")
	if err != nil {
		return // a host without /opt
	}
	for _, e := range entries {
		p := "/opt/" + e.Name()
		switch {
		case e.Name() == "tbcluster":
		case e.Type()&os.ModeSymlink != 0:
			r.copyLink(p, p)
		case e.IsDir() || e.Type().IsRegular():
			r.bind(p, p, true)
		}
	}
}

func (r *root) copyLink(from, to string) {
	r.do("link "+to, func() error {
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, r.at(to))
	})
}

// kernel mounts /proc, /sys and /dev.
func (r *root) kernel() {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	r.mkdir("/proc", 0o555)
	r.mount("proc", "/proc", quiet, "")
	r.mkdir("/sys", 0o555)
	r.mount("sysfs", "/sys", quiet|unix.MS_RDONLY, "")
	r.mkdir("/dev", 0o755)
	r.mount("tmpfs", "/dev", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=1m")
	list := slices.Clone(devices)
	if nvidia, err := filepath.Glob("/dev/nvidia*"); err == nil {
		for _, d := range nvidia {
			list = append(list, strings.TrimPrefix(d, "/dev/"))
		}
	}
	for _, d := range list {
		if _, err := os.Stat("/dev/" + d); err == nil {
			r.bind("/dev/"+d, "/dev/"+d, false)
		}
	}
	r.mkdir("/dev/pts", 0o755)
	options := "newinstance,ptmxmode=0666,mode=0620"
	if !r.s.Rootless {
		options += ",gid=5" // tty, the same on every Linux system
	}
	r.mount("devpts", "/dev/pts", unix.MS_NOSUID|unix.MS_NOEXEC, options)
	r.mkdir("/dev/shm", 0o1777|os.ModeSticky)
	r.mount("tmpfs", "/dev/shm", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	for link, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd",
		"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		r.symlink(target, "/dev/"+link)
	}
}

// volatile makes what a power cut empties.
func (r *root) volatile() {
	r.mkdir("/tmp", 0o755)
	r.mount("tmpfs", "/tmp", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	r.bind(filepath.Join(r.s.Dir, "run"), "/run", false)
	r.mkdir("/run/lock", 0o1777|os.ModeSticky)
	for _, d := range []string{"/mnt", "/media", "/srv", "/var/lib", "/var/log", "/var/cache", "/var/spool"} {
		r.mkdir(d, 0o755)
	}
	r.symlink("/run", "/var/run")
	r.symlink("/run/lock", "/var/lock")
}

// disk shows the data disk, and makes what a new one lacks.
func (r *root) disk() {
	disk := filepath.Join(r.s.Dir, "disk")
	for _, d := range []struct {
		name, at string
		mode     os.FileMode
	}{
		{"lib-tbcluster", "/var/lib/tbcluster", 0o755},
		{"home", "/home", 0o755},
		{"root", "/root", 0o700},
		{"var-tmp", "/var/tmp", 0o777 | os.ModeSticky},
	} {
		from := filepath.Join(disk, d.name)
		r.do("make "+d.at, func() error {
			if err := os.Mkdir(from, 0o700); err != nil {
				if errors.Is(err, fs.ErrExist) {
					return nil // a later boot: rights are as they were left
				}
				return err
			}
			return os.Chmod(from, d.mode)
		})
		r.bind(from, d.at, false)
	}
	if r.s.Rootless {
		return
	}
	users, err := readUsers("/etc/passwd")
	if err != nil {
		return // a system without users but root
	}
	for _, u := range users {
		r.home(u)
	}
}

// home makes the home of an ordinary user.
func (r *root) home(u account) {
	const firstUser, nobody = 1000, 65534
	if u.uid < firstUser || u.uid >= nobody || filepath.Dir(u.home) != "/home" {
		return
	}
	r.do("make the home of "+u.name, func() error {
		err := os.Mkdir(r.at(u.home), 0o700)
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return os.Chown(r.at(u.home), int(u.uid), int(u.gid))
	})
}

// etc makes /etc: files are copies, so that a node can change its users;
// directories are links into the host's.
func (r *root) etc() {
	const most = 1 << 20 // bytes of a file that is copied
	r.bind("/etc", hostEtc, true)
	r.mkdir("/etc", 0o755)
	if r.err != nil {
		return
	}
	entries, err := os.ReadDir("/etc")
	if err != nil {
		r.err = err
		return
	}
	own := []string{"hosts", "hostname", "machine-id", "resolv.conf", "mtab", "tbcluster", "fstab"}
	for _, e := range entries {
		p := "/etc/" + e.Name()
		if slices.Contains(own, e.Name()) {
			continue
		}
		info, err := e.Info()
		switch {
		case err != nil: // gone meanwhile
		case e.Type()&os.ModeSymlink != 0:
			r.copyLink(p, p)
		case e.IsDir():
			r.symlink(hostEtc+"/"+e.Name(), p)
		case e.Type().IsRegular() && info.Size() <= most:
			r.copyFile(p)
		case e.Type().IsRegular():
			r.symlink(hostEtc+"/"+e.Name(), p)
		}
	}
	r.symlink("/proc/self/mounts", "/etc/mtab")
	r.write("/etc/hosts", r.s.Hosts, 0o644)
	r.write("/etc/hostname", r.s.Name+"\n", 0o644)
	r.write("/etc/machine-id", r.s.MachineID+"\n", 0o444)
	r.write("/etc/resolv.conf", "# no name server: nothing leads out of a lab\n", 0o644)
	r.mkdir("/etc/tbcluster", 0o755)
	if r.s.Config != nil {
		r.write("/etc/tbcluster/config.toml", string(r.s.Config), 0o644)
	}
}

// copyFile copies a file with its owner and rights. One that may not be read
// is left out: without root that is so for the host's secrets.
func (r *root) copyFile(p string) {
	r.do("copy "+p, func() error {
		from, err := os.Open(p)
		if err != nil {
			if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		defer from.Close()
		var st unix.Stat_t
		if err := unix.Fstat(int(from.Fd()), &st); err != nil {
			return err
		}
		to, err := os.OpenFile(r.at(p), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(to, from)
		if !r.s.Rootless {
			err = errors.Join(err, to.Chown(int(st.Uid), int(st.Gid)))
		}
		return errors.Join(err, to.Chmod(os.FileMode(st.Mode&0o777)), to.Close())
	})
}

// own makes what only nodes of a lab have.
func (r *root) own() {
	r.mkdir("/lab", 0o755)
	r.bind(r.s.Program, "/lab/bin/tbcluster", true)
	r.bind(filepath.Join(r.s.Dir, "sys"), sysInside, true)
	r.bind(filepath.Join(r.s.Dir, "console.log"), "/lab/console.log", true)
	if r.s.Engines != "" {
		r.bind(r.s.Engines, enginesInside, true)
	}
	for _, b := range r.s.Binds {
		r.bind(b.Source, b.Target, true)
	}
	r.write("/lab/boot_id", r.s.BootID+"\n", 0o444)
	r.do("bind the boot ID", func() error {
		target := r.at("/proc/sys/kernel/random/boot_id")
		if err := unix.Mount(r.at("/lab/boot_id"), target, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return makeReadOnly(target)
	})
}

// enterRoot makes dir the root of this process and its mount namespace.
func enterRoot(dir string) error {
	if err := os.Mkdir(filepath.Join(dir, ".old"), 0o700); err != nil {
		return err
	}
	if err := unix.Chdir(dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", ".old"); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/.old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the old root: %w", err)
	}
	return os.Remove("/.old")
}

// account is a line of /etc/passwd.
type account struct {
	name, home, shell string
	uid, gid          uint32
}

// parseAccounts parses /etc/passwd; lines that are no accounts are left out.
func parseAccounts(s string) []account {
	var list []account
	for line := range strings.Lines(s) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) != 7 || f[0] == "" || strings.HasPrefix(f[0], "#") {
			continue
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil {
			continue
		}
		list = append(list, account{name: f[0], uid: uint32(uid), gid: uint32(gid), home: f[5], shell: f[6]})
	}
	return list
}

func readUsers(path string) ([]account, error) {
	b, err := os.ReadFile(path)
	return parseAccounts(string(b)), err
}

// parseGroups returns the groups that list a user as a member.
func parseGroups(s, user string) []uint32 {
	var list []uint32
	for line := range strings.Lines(s) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) != 4 || !slices.Contains(strings.Split(f[3], ","), user) {
			continue
		}
		if gid, err := strconv.ParseUint(f[2], 10, 32); err == nil {
			list = append(list, uint32(gid))
		}
	}
	return list
}
