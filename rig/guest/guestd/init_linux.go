package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/rig/guest/wire"
)

// mount is one file system that every Linux has.
type mount struct {
	kind, at string
	flags    uintptr
	data     string
	may      bool // be missing from the kernel
}

var mounts = []mount{
	{kind: "proc", at: "/proc", flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{kind: "sysfs", at: "/sys", flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{kind: "devtmpfs", at: "/dev", flags: unix.MS_NOSUID, data: "mode=0755"},
	{kind: "tmpfs", at: "/run", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=0755"},
}

// moreMounts are those that systemd makes itself.
var moreMounts = []mount{
	{kind: "devpts", at: "/dev/pts", flags: unix.MS_NOSUID | unix.MS_NOEXEC, data: "mode=0620,ptmxmode=0666"},
	{kind: "tmpfs", at: "/dev/shm", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777"},
	{kind: "tmpfs", at: "/tmp", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777"},
	{kind: "cgroup2", at: "/sys/fs/cgroup", flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, may: true},
	{kind: "debugfs", at: "/sys/kernel/debug", may: true},
	{kind: "tracefs", at: "/sys/kernel/tracing", may: true},
	{kind: "configfs", at: "/sys/kernel/config", may: true},
}

// machineModules are the drivers of QEMU's virtio devices.
var machineModules = []string{"virtio_pci", "virtio_console", "virtio_blk", "virtio_net", "virtio_rng"}

const search = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// runInit is process 1. It returns only when it cannot go on, and the kernel
// panics then, which is seen.
func runInit() error {
	if err := mountAll(mounts); err != nil {
		return err
	}
	settings, err := readSettings("/proc/cmdline")
	if err != nil {
		return err
	}
	modules := append([]string{}, machineModules...)
	if list := settings["modules"]; list != "" {
		modules = append(modules, strings.Split(list, ",")...)
	}
	if settings["root"] != "" {
		modules = append(modules, "ext4")
	}
	cmd := exec.Command("/usr/bin/modprobe", append([]string{"-a", "-q"}, modules...)...)
	cmd.Env = []string{search}
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		// A kernel without one of them is no reason to give up.
		fmt.Fprintln(os.Stderr, "guestd: modprobe:", err)
	}
	if name := settings["name"]; name != "" {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return fmt.Errorf("set the host name: %w", err)
		}
	}
	if root := settings["root"]; root != "" {
		return handOver(root)
	}
	if err := mountAll(moreMounts); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	return superviseAgent()
}

func mountAll(list []mount) error {
	for _, m := range list {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			if m.may {
				continue
			}
			return err
		}
		err := unix.Mount(m.kind, m.at, m.kind, m.flags, m.data)
		// The kernel may have mounted /dev itself.
		if err != nil && !errors.Is(err, unix.EBUSY) && !m.may {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	return nil
}

// readSettings returns what the kernel's command line says for us, without the
// "rig.".
func readSettings(file string) (map[string]string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	settings := map[string]string{}
	for word := range strings.FieldsSeq(string(b)) {
		if name, ok := strings.CutPrefix(word, "rig."); ok {
			name, value, _ := strings.Cut(name, "=")
			settings[name] = value
		}
	}
	return settings, nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	return nil
}

// superviseAgent keeps the agent running and reaps whatever ends up as a child
// of process 1. The agent is a process of its own, so that the children that it
// waits for are not taken from it here.
func superviseAgent() error {
	for {
		agent, err := startAgent()
		if err != nil {
			return err
		}
		for {
			var status unix.WaitStatus
			pid, err := unix.Wait4(-1, &status, 0, nil)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return fmt.Errorf("wait: %w", err)
			}
			if pid == agent {
				fmt.Fprintf(os.Stderr, "guestd: the agent ended (%#x); starting it again\n", uint32(status))
				break
			}
		}
		time.Sleep(200 * time.Millisecond) // nothing to wait for: it must not spin
	}
}

func startAgent() (pid int, err error) {
	p, err := os.StartProcess("/init", []string{"guestd", "agent"}, &os.ProcAttr{
		Env: []string{search, "HOME=/root", "LANG=C.UTF-8"}, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, fmt.Errorf("start the agent: %w", err)
	}
	pid = p.Pid
	return pid, p.Release() // Wait4 above waits for it
}

// unit makes the agent a service of systemd. It lies in /run, so that the disk
// needs to know nothing of it.
const unit = `[Unit]
Description=Agent of the tbcluster rig
DefaultDependencies=no
Before=shutdown.target
Conflicts=shutdown.target

[Service]
Type=exec
ExecStart=/run/tbcluster-rig/guestd agent
Environment=HOME=/root LANG=C.UTF-8
Restart=always
RestartSec=200ms
# A command that the agent runs is no part of the agent: it may go on.
KillMode=process
OOMScoreAdjust=-900
TasksMax=infinity

[Install]
WantedBy=sysinit.target
`

// handOver makes a disk the root and its systemd process 1.
func handOver(device string) error {
	const root = "/newroot"
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := waitFor(device); err != nil {
		return err
	}
	if err := unix.Mount(device, root, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	self, err := os.ReadFile("/init")
	if err != nil {
		return err
	}
	const run = "/run/systemd/system"
	if err := os.MkdirAll(run+"/sysinit.target.wants", 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll("/run/tbcluster-rig", 0o755); err != nil {
		return err
	}
	const name = "tbcluster-rig.service"
	if err := errors.Join(
		os.WriteFile("/run/tbcluster-rig/guestd", self, 0o755),
		os.WriteFile(filepath.Join(run, name), []byte(unit), 0o644),
		os.Symlink("../"+name, filepath.Join(run, "sysinit.target.wants", name)),
	); err != nil {
		return err
	}
	if err := layOver("/"+wire.Overlay, root); err != nil {
		return fmt.Errorf("lay files over the disk: %w", err)
	}
	// The modules are those of the kernel that was booted, whatever the disk is.
	if err := os.MkdirAll(root+"/usr/lib/modules", 0o755); err != nil {
		return err
	}
	if err := unix.Mount("/usr/lib/modules", root+"/usr/lib/modules", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the modules: %w", err)
	}
	for _, m := range mounts {
		if err := unix.Mount(m.at, root+m.at, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", m.at, err)
		}
	}
	// Memory: nothing but the modules is used any more.
	for _, dir := range []string{"/" + wire.Overlay, "/usr/bin", "/usr/lib/x86_64-linux-gnu"} {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("make the disk the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	err = unix.Exec("/sbin/init", []string{"/sbin/init"}, []string{search, "LANG=C.UTF-8"})
	return fmt.Errorf("start the disk's /sbin/init: %w", err)
}

// layOver copies files and links from a tree into another. Directories that are
// there stay as they are.
func layOver(from, to string) error {
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil // there is nothing to lay over
	}
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := to + strings.TrimPrefix(path, from)
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			if err := os.Mkdir(target, info.Mode().Perm()); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			return nil
		case info.Mode()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			return os.Symlink(link, target)
		case info.Mode().IsRegular():
			return copyFile(path, target, info.Mode().Perm())
		}
		return fmt.Errorf("%s is neither file nor link", path)
	})
}

func copyFile(from, to string, mode fs.FileMode) error {
	if err := os.Remove(to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Chmod(mode), out.Close())
}

// waitFor waits for a device: drivers find their devices in their own time.
func waitFor(device string) error {
	for range 500 {
		if _, err := os.Stat(device); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("there is no %s", device)
}
