package image

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"tbcluster/api/fault"
)

// systemPackages are what the disk with systemd has besides the essential
// packages, which include apt and dpkg.
var systemPackages = []string{
	"systemd-sysv", "systemd-resolved", "dbus", "udev", "network-manager", "polkitd",
	"nftables", "iproute2", "iputils-ping", "ethtool", "kmod", "procps", "sudo", "ca-certificates", "rdma-core", "ibverbs-utils",
	// What llama.cpp links.
	"libgomp1",
}

// systemHooks finish the disk's root, "$1". An empty machine-id makes each
// machine choose its own without taking it for a first boot, which asks
// questions.
var systemHooks = []string{
	`: >"$1/etc/machine-id"`,
	`rm -f "$1/etc/hostname" "$1/etc/resolv.conf" && ln -s ../run/systemd/resolve/stub-resolv.conf "$1/etc/resolv.conf"`,
	`printf '127.0.0.1 localhost\n::1 localhost\n' >"$1/etc/hosts"`,
	`mkdir -p "$1/usr/lib/modules"`,
	// It waits for a network that most guests do not have.
	`chroot "$1" systemctl -q disable NetworkManager-wait-online.service systemd-networkd-wait-online.service`,
	// Neither packages nor file systems are looked after by timers in a guest
	// that lives for minutes.
	`chroot "$1" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer`,
	// Nothing has to be brought up to date at the first boot; later than /usr.
	`touch "$1/etc/.updated" "$1/var/.updated"`,
}

// systemSize is the size of the disk, of which about a fifth is used. It is
// sparse.
const systemSize = 2 << 30

// System returns the file of a disk with Debian 13: systemd, NetworkManager,
// systemd-networkd, nftables, apt and sudo, but no kernel. It is raw ext4 and to
// be used as a base of CreateDisk; guests get their kernel and modules, and the
// agent, from the initramfs.
func (s *Store) System(ctx context.Context) (string, error) {
	t, err := s.Tools(ctx)
	if err != nil {
		return "", err
	}
	recipe := append([]string{"4", suite, fmt.Sprint(systemSize)}, systemPackages...)
	dir, err := s.ensure(ctx, part{
		name: "system", about: "a disk with systemd; a minute, 0.4 GB", need: 1500 << 20,
		recipe: append(append(recipe, systemHooks...), leftOut...),
		build:  func(ctx context.Context, dir string) error { return s.buildSystem(ctx, t, dir) },
	})
	return filepath.Join(dir, "disk.raw"), err
}

func (s *Store) buildSystem(ctx context.Context, t *Tools, dir string) error {
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	err := s.bootstrap(ctx, root, bootstrapOptions{packages: systemPackages, sources: []string{suite}, hooks: systemHooks})
	if err != nil {
		return err
	}
	if err := t.format(ctx, filepath.Join(dir, "disk.raw"), "rig", root, systemSize); err != nil {
		return err
	}
	return s.removeAll(root)
}

// format makes a file with an ext4 file system of that size, which has a copy of
// a directory.
func (t *Tools) format(ctx context.Context, file, label, dir string, size int64) error {
	mke2fs := t.Command(ctx, "/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-L", label, "-m", "0", "-d", dir, file, fmt.Sprintf("%dk", size>>10))
	mke2fs.Env = append(mke2fs.Env, "MKE2FS_CONFIG="+filepath.Join(t.root, "etc/mke2fs.conf"))
	_, err := run(ctx, mke2fs)
	return err
}

// FileSystem makes a raw file with an ext4 file system, just large enough for a
// copy of a directory: owners, modes and links as they are there. It is a base
// for CreateDisk.
func (t *Tools) FileSystem(ctx context.Context, file, label, dir string) error {
	const entry, spare = 8 << 10, 32 << 20 // of a file besides its content; of the file system
	size := int64(spare)
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		size += entry
		if i.Mode().IsRegular() {
			size += i.Size() + i.Size()/64
		}
		return nil
	})
	if err == nil {
		err = t.format(ctx, file, label, dir, size)
	}
	if err != nil {
		return fault.New(fault.FileIO, "make a file system of "+dir, err, "").At(file)
	}
	return nil
}

// CreateDisk makes a qcow2 disk for a guest. With a base (a raw disk) it begins
// as that, which stays as it is, and size may be 0; else it is empty.
func (t *Tools) CreateDisk(ctx context.Context, file, base string, size int64) error {
	args := []string{"create", "-q", "-f", "qcow2"}
	if base != "" {
		args = append(args, "-b", base, "-F", "raw")
	}
	args = append(args, file)
	if size > 0 {
		args = append(args, fmt.Sprint(size))
	}
	if _, err := run(ctx, t.Command(ctx, "/usr/bin/qemu-img", args...)); err != nil {
		return fault.New(fault.FileIO, "make a disk for a guest", err, "").At(file)
	}
	return nil
}
