package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"tbcluster/api/fault"
)

// Kernel names one of the kernels that guests boot.
type Kernel string

// The kernels.
const (
	// Backport is the newest kernel of Debian's backports, unmodified.
	Backport Kernel = "backport"
	// Stable is the kernel of Debian stable, unmodified.
	Stable Kernel = "stable"
	// Debug is the source of Backport with KASAN, lockdep, kmemleak and the
	// DMA API's checks. Building it takes minutes; it runs at a third of the
	// speed.
	Debug Kernel = "debug"
)

// suiteOf says which suite has the kernel package.
var suiteOf = map[Kernel]string{Backport: backports, Stable: suite}

// uninteresting are directories of modules that no guest can use.
var uninteresting = []string{
	"kernel/drivers/gpu", "kernel/drivers/media", "kernel/drivers/net/wireless", "kernel/drivers/net/ethernet", "kernel/sound",
	"kernel/drivers/scsi", "kernel/drivers/iio", "kernel/drivers/hwmon", "kernel/drivers/staging", "kernel/drivers/input",
	"kernel/drivers/usb", "kernel/drivers/mtd", "kernel/drivers/hid", "kernel/drivers/platform", "kernel/drivers/bluetooth",
	"kernel/drivers/video", "kernel/drivers/isdn", "kernel/drivers/accel", "kernel/fs/xfs", "kernel/fs/btrfs", "kernel/fs/ocfs2",
}

func kernelRecipe() []string { return append([]string{"kernels 1"}, uninteresting...) }

// apt is the apt of the machine, working on the lists of a chroot.
type apt struct {
	root    string
	options []string
}

func (a *apt) command(ctx context.Context, dir, program string, args ...string) (string, error) {
	text := fmt.Sprintf("Dir \"%s\";\nDir::State::status \"%s/var/lib/dpkg/status\";\nAPT::Architecture \"amd64\";\nAPT::Architectures { \"amd64\"; };\n"+
		"APT::Sandbox::User \"root\";\nDir::Etc::Trusted \"/etc/apt/trusted.gpg\";\nDir::Etc::TrustedParts \"/etc/apt/trusted.gpg.d/\";\n%s\n",
		a.root, a.root, strings.Join(a.options, "\n"))
	conf, err := os.CreateTemp("", "rig-apt-")
	if err != nil {
		return "", err
	}
	defer os.Remove(conf.Name())
	if _, err := conf.WriteString(text); err != nil {
		return "", errors.Join(err, conf.Close())
	}
	if err := conf.Close(); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "APT_CONFIG="+conf.Name())
	return run(ctx, cmd)
}

// download fetches packages into a directory.
func (a *apt) download(ctx context.Context, dir string, packages ...string) error {
	_, err := a.command(ctx, dir, "apt-get", append([]string{"-q", "download"}, packages...)...)
	if err == nil {
		return nil
	}
	return fault.New(fault.Connection, "fetch "+strings.Join(packages, ", "), err, "see that `apt-get update` works here, then try again")
}

// release returns the release of a kernel, as uname -r will print it.
func (a *apt) release(ctx context.Context, k Kernel) (string, error) {
	out, err := a.command(ctx, "", "apt-cache", "show", "linux-image-amd64/"+suiteOf[k])
	if err != nil {
		return "", err
	}
	for _, name := range dependencies(out) {
		if release, ok := strings.CutPrefix(name, "linux-image-"); ok {
			return release, nil
		}
	}
	return "", fault.Newf(fault.Unsupported, "look at linux-image-amd64 of "+suiteOf[k], "the mirror's kernel package names no kernel")
}

// unpackKernel puts a kernel, its modules and its headers into the chroot. They
// are unpacked, not installed: nothing there boots, so no initramfs need be
// made.
func (a *apt) unpackKernel(ctx context.Context, k Kernel) error {
	release, err := a.release(ctx, k)
	if err != nil {
		return err
	}
	dir := filepath.Join(a.root, "tmp", "rig-debs")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	packages, err := a.packagesOf(ctx, release)
	if err != nil {
		return err
	}
	if err := a.download(ctx, dir, packages...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) != len(packages) {
		return fmt.Errorf("%d packages came of %v", len(debs), packages)
	}
	var exclude strings.Builder
	for _, d := range uninteresting {
		exclude.WriteString(" --exclude=*/" + d)
	}
	for _, deb := range debs {
		cmd := exec.CommandContext(ctx, "bash", "-c", `set -o pipefail; dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --keep-directory-symlink --wildcards`+exclude.String(), "-", deb, a.root)
		if _, err := run(ctx, cmd); err != nil {
			return err
		}
	}
	if _, err := run(ctx, exec.CommandContext(ctx, filepath.Join(a.root, "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", filepath.Join(a.root, "usr/lib/x86_64-linux-gnu"),
		"--argv0", "depmod", filepath.Join(a.root, "usr/bin/kmod"), "-b", a.root, release)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(a.root, "boot", "rig-"+string(k)), []byte(release+"\n"), 0o644)
}

// packagesOf returns the packages of a kernel: its image and headers, and those
// of the same build that they depend on. How many there are has changed over
// the years.
func (a *apt) packagesOf(ctx context.Context, release string) ([]string, error) {
	version, _, ok := strings.Cut(release, "-") // 7.3.4+deb13-amd64
	if !ok {
		return nil, fmt.Errorf("the kernel release %q has no flavour", release)
	}
	packages := []string{"linux-image-" + release, "linux-headers-" + release}
	for i := 0; i < len(packages); i++ {
		out, err := a.command(ctx, "", "apt-cache", "show", "--no-all-versions", packages[i])
		if err != nil {
			return nil, err
		}
		for _, name := range dependencies(out) {
			if strings.Contains(name, version) && !slices.Contains(packages, name) {
				packages = append(packages, name)
			}
		}
	}
	return packages, nil
}

// dependencies returns the names of the packages that a record of apt-cache
// depends on, the first of each choice.
func dependencies(record string) []string {
	var names []string
	for line := range strings.Lines(record) {
		list, ok := strings.CutPrefix(line, "Depends: ")
		if !ok {
			continue
		}
		for dep := range strings.SplitSeq(list, ",") {
			if f := strings.Fields(dep); len(f) > 0 {
				names = append(names, f[0])
			}
		}
	}
	return names
}

// clean removes what apt has downloaded; the lists stay, for the sources of
// kernels.
func (a *apt) clean() error {
	debs, err := filepath.Glob(filepath.Join(a.root, "var/cache/apt/archives/*.deb"))
	if err != nil {
		return err
	}
	for _, d := range debs {
		if err := os.Remove(d); err != nil {
			return err
		}
	}
	return nil
}
