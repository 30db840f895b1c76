package image

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"tbcluster/api/fault"
)

const (
	suite     = "trixie"
	backports = "trixie-backports"
)

// pin lets packages come from backports when there are newer ones: QEMU 10.1 is
// the first with vfio-user-pci, and the release has 10.0.
const pin = "Package: *\nPin: release n=" + backports + "\nPin-Priority: 600\n"

// toolPackages are what the chroot has besides the essential packages.
var toolPackages = []string{
	// The machine.
	"qemu-system-x86", "qemu-utils", "e2fsprogs",
	// Compilers for modules and kernels.
	"gcc", "make", "libelf1t64", "xz-utils", "zstd", "kmod",
	"libc6-dev", "flex", "bison", "bc", "libelf-dev", "libssl-dev", "libdw1t64", "pahole",
	// What guests run.
	"busybox-static", "iproute2", "iputils-ping", "ethtool", "iperf3", "nftables", "tcpdump",
	"rdma-core", "ibverbs-utils", "perftest", "pciutils", "procps",
}

// leftOut are files of packages that nobody reads here.
var leftOut = []string{"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*", "/usr/share/bug/*"}

// Tools is the chroot: Debian with QEMU, compilers, headers of the kernels and
// the programs that guests run.
type Tools struct {
	root string
	key  string
}

// Root returns the directory of the chroot.
func (t *Tools) Root() string { return t.root }

// Tools returns the chroot, which it builds when it is missing: about a minute
// and 800 MB.
func (s *Store) Tools(ctx context.Context) (*Tools, error) {
	p := part{
		name:   "tools",
		about:  "Debian 13 with QEMU, kernels and compilers; a minute or two, 0.9 GB",
		recipe: append(append([]string{"2", suite, backports, pin}, toolPackages...), append(leftOut, kernelRecipe()...)...),
		need:   2 << 30,
		build:  s.buildTools,
	}
	root, err := s.ensure(ctx, p)
	if err != nil {
		return nil, err
	}
	return &Tools{root: root, key: p.key()}, nil
}

func (s *Store) buildTools(ctx context.Context, root string) error {
	err := s.bootstrap(ctx, root, bootstrapOptions{
		packages: toolPackages, pin: pin,
		sources: []string{suite, backports},
	})
	if err != nil {
		return err
	}
	options, err := aptOptions(ctx)
	if err != nil {
		return err
	}
	apt := &apt{root: root, options: options}
	for _, k := range []Kernel{Backport, Stable} {
		s.log("tools: unpacking the kernel " + string(k))
		if err := apt.unpackKernel(ctx, k); err != nil {
			return err
		}
	}
	return apt.clean()
}

// bootstrapOptions are what differs between the chroots.
type bootstrapOptions struct {
	packages []string
	pin      string
	sources  []string // suites
	hooks    []string // shell commands that are run on the finished root, "$1"
}

// bootstrap makes a Debian in an empty directory.
func (s *Store) bootstrap(ctx context.Context, root string, o bootstrapOptions) error {
	if err := needs("make a Debian chroot", "mmdebstrap", "apt-get", "dpkg-deb"); err != nil {
		return err
	}
	mirror := s.mirror
	if mirror == "" {
		var err error
		if mirror, err = findMirror("/etc/apt"); err != nil {
			return err
		}
	}
	options, err := aptOptions(ctx)
	if err != nil {
		return err
	}
	args := []string{
		"--mode=root", "--variant=minbase", "--architectures=amd64",
		"--aptopt=APT::Install-Recommends \"false\"", "--aptopt=Acquire::Languages \"none\"", "--dpkgopt=force-unsafe-io",
		"--skip=cleanup/apt", "--include=" + strings.Join(o.packages, ","),
	}
	for _, line := range options {
		args = append(args, "--aptopt="+strings.TrimSuffix(line, ";"))
	}
	for _, glob := range leftOut {
		args = append(args, "--dpkgopt=path-exclude="+glob)
	}
	if o.pin != "" {
		args = append(args, `--setup-hook=mkdir -p "$1/etc/apt/preferences.d" && printf '%s' "$RIG_PIN" >"$1/etc/apt/preferences.d/rig"`)
	}
	for _, h := range o.hooks {
		args = append(args, "--customize-hook="+h)
	}
	args = append(args, suite, root)
	for _, name := range o.sources {
		args = append(args, "deb "+mirror+" "+name+" main")
	}
	cmd := func(flags uintptr) *exec.Cmd {
		c := exec.CommandContext(ctx, "mmdebstrap", args...)
		c.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "RIG_PIN="+o.pin)
		// What it mounts is then gone when it ends, however it ends.
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: flags}
		return c
	}
	_, err = run(ctx, cmd(syscall.CLONE_NEWNS))
	if os.IsPermission(err) { // a container that lets us chroot, but not unshare
		_, err = run(ctx, cmd(0))
	}
	if err == nil {
		return nil
	}
	for _, sign := range []string{"Temporary failure resolving", "Could not connect", "Failed to fetch", "Unable to connect", "Cannot initiate the connection"} {
		if strings.Contains(err.Error(), sign) {
			return fault.New(fault.Connection, "fetch Debian packages for the rig's guests", err, "the first build needs the Debian mirror that apt uses here (or TBCLUSTER_RIG_MIRROR): see that `apt-get update` works")
		}
	}
	return err
}

// Command runs a program of the chroot in place, by the chroot's own loader and
// libraries: it sees the files of the machine, needs no root and no mounts.
// program is absolute within the chroot.
func (t *Tools) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	lib := filepath.Join(t.root, "usr/lib/x86_64-linux-gnu")
	all := append([]string{"--library-path", lib, "--argv0", filepath.Base(program), filepath.Join(t.root, program)}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(t.root, "usr/lib64/ld-linux-x86-64.so.2"), all...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "QEMU_MODULE_DIR="+filepath.Join(lib, "qemu"))
	return cmd
}

// QEMU runs QEMU for the rig's guests.
func (t *Tools) QEMU(ctx context.Context, args ...string) *exec.Cmd {
	share := filepath.Join(t.root, "usr/share")
	return t.Command(ctx, "/usr/bin/qemu-system-x86_64", append([]string{"-L", filepath.Join(share, "qemu"), "-L", filepath.Join(share, "seabios")}, args...)...)
}

// Chroot runs a program inside the chroot, in the directory dir of it. Only
// root may.
func (t *Tools) Chroot(ctx context.Context, dir, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Path, cmd.Err = program, nil // within the chroot, not here
	cmd.Dir = dir
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "HOME=/root"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: t.root}
	return cmd
}
