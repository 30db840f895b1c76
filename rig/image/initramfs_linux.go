package image

import (
	"bufio"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"tbcluster/api/fault"
)

// guestModules are the modules of the kernel that guests may load; what they
// depend on comes along. A kernel that has one built in, or lacks it, is fine.
var guestModules = []string{
	// The machine: QEMU's virtio devices.
	"virtio_pci", "virtio_console", "virtio_net", "virtio_blk", "virtio_rng",
	// What the rig is for.
	"thunderbolt", "thunderbolt_net",
	// RDMA.
	"crc32_generic", // which rdma_rxe asks for by name
	"rdma_rxe", "ib_uverbs", "rdma_ucm", "rdma_cm", "ib_umad", "ib_ipoib",
	// Disks; the checksums are a soft dependency, of nf_tables in 6.12 too.
	"ext4", "crc32c_generic", "crc32c-intel", "overlay", "loop", "fuse", "dm-mod", "dm-flakey", "dm-log-writes",
	// Networks of a whole system.
	"nf_tables", "nft_ct", "nft_nat", "nft_masq", "nft_reject_inet", "nft_limit", "nft_numgen", "nft_log", "nf_conntrack", "nft_chain_nat", "nft_fib_inet",
	"sch_netem", "sch_tbf", "sch_htb", "sch_ingress", "sch_fq", "sch_fq_codel", "cls_u32", "cls_matchall", "act_mirred",
	"veth", "dummy", "bridge", "tun", "macvlan", "8021q", "vrf", "ifb", "af_packet", "inet_diag", "tcp_diag", "udp_diag",
	"autofs4", "configfs", "efivarfs", "rtc-cmos",
}

// guestPrograms are the programs of the chroot that guests have besides busybox
// and dash, absolute. The shell is not that of busybox, which runs the applets
// of busybox whatever else there is.
var guestPrograms = []string{
	"/usr/bin/kmod", "/usr/bin/ip", "/usr/sbin/tc", "/usr/bin/ss", "/usr/bin/rdma", "/usr/sbin/bridge", "/usr/sbin/ethtool", "/usr/bin/ping", "/usr/bin/iperf3", "/usr/sbin/nft", "/usr/bin/lspci",
	"/usr/bin/tcpdump",
	"/usr/bin/ibv_devices", "/usr/bin/ibv_devinfo", "/usr/bin/ibv_rc_pingpong",
	"/usr/bin/ib_write_bw", "/usr/bin/ib_write_lat", "/usr/bin/ib_read_bw", "/usr/bin/ib_read_lat", "/usr/bin/ib_send_bw", "/usr/bin/ib_send_lat",
	"/usr/sbin/mke2fs", "/usr/sbin/e2fsck", "/usr/bin/unshare", "/usr/bin/nsenter", "/usr/bin/ps", "/usr/bin/pgrep", "/usr/bin/pkill", "/usr/bin/bash",
}

// dlopened are libraries that no program names: they are opened by name. A
// pattern that finds nothing is an error, lest something goes missing quietly.
var dlopened = []string{
	"/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so",
	"/usr/lib/x86_64-linux-gnu/libibverbs.so.1", "/usr/lib/x86_64-linux-gnu/librdmacm.so.1", // for purego and the like
	"/usr/lib/x86_64-linux-gnu/libnss_files.so.2", "/usr/lib/x86_64-linux-gnu/libgcc_s.so.1", "/usr/lib/x86_64-linux-gnu/libpthread.so.0", "/usr/lib/x86_64-linux-gnu/libdl.so.2",
}

// guestFiles are small files that guests need.
var guestFiles = []File{
	{Path: "/etc/passwd", Mode: 0o644, Data: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")},
	{Path: "/etc/group", Mode: 0o644, Data: []byte("root:x:0:\nnogroup:x:65534:\n")},
	{Path: "/etc/hosts", Mode: 0o644, Data: []byte("127.0.0.1 localhost\n::1 localhost\n")},
	{Path: "/etc/nsswitch.conf", Mode: 0o644, Data: []byte("passwd: files\ngroup: files\nhosts: files dns\n")},
	{Path: "/etc/os-release", Mode: 0o644, Data: []byte("PRETTY_NAME=\"tbcluster rig\"\nID=tbcluster-rig\n")},
	{Path: "/etc/libibverbs.d/rxe.driver", Mode: 0o644, Data: []byte("driver rxe\n")},
	{Path: "/bin", Mode: fs.ModeSymlink, Data: []byte("usr/bin")},
	{Path: "/sbin", Mode: fs.ModeSymlink, Data: []byte("usr/bin")},
	{Path: "/usr/sbin", Mode: fs.ModeSymlink, Data: []byte("bin")},
	{Path: "/lib", Mode: fs.ModeSymlink, Data: []byte("usr/lib")},
	{Path: "/lib64", Mode: fs.ModeSymlink, Data: []byte("usr/lib64")},
	{Path: "/dev/console", Mode: fs.ModeDevice | fs.ModeCharDevice | 0o600, Major: 5, Minor: 1},
	{Path: "/dev/null", Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666, Major: 1, Minor: 3},
	{Path: "/dev/kmsg", Mode: fs.ModeDevice | fs.ModeCharDevice | 0o600, Major: 1, Minor: 11},
	{Path: "/proc", Mode: fs.ModeDir | 0o555}, {Path: "/sys", Mode: fs.ModeDir | 0o555}, {Path: "/run", Mode: fs.ModeDir | 0o755},
	{Path: "/tmp", Mode: fs.ModeDir | fs.ModeSticky | 0o777}, {Path: "/root", Mode: fs.ModeDir | 0o700}, {Path: "/mnt", Mode: fs.ModeDir | 0o755},
	{Path: "/var/tmp", Mode: fs.ModeDir | fs.ModeSticky | 0o777},
}

// Boot is a kernel and the base of its initramfs. Something to be /init has to
// be laid over it (WriteArchive): the base has none.
type Boot struct {
	Kernel  Kernel
	Release string // as uname -r prints it
	Image   string // the file of the kernel
	Base    string // the file of the initramfs, to which archives may be appended
}

// Boot returns a kernel with its initramfs and builds what is missing. Debug
// takes minutes the first time.
func (s *Store) Boot(ctx context.Context, k Kernel) (Boot, error) {
	t, err := s.Tools(ctx)
	if err != nil {
		return Boot{}, err
	}
	tree, err := s.kernelTree(ctx, t, k)
	if err != nil {
		return Boot{}, err
	}
	recipe := append([]string{"6", t.key, tree.key, tree.release}, guestModules...)
	recipe = append(append(append(recipe, guestPrograms...), dlopened...), fmt.Sprint(guestFiles))
	dir, err := s.ensure(ctx, part{
		name: "boot-" + string(k), about: "initramfs of " + tree.release + ", seconds", recipe: recipe, need: 300 << 20,
		build: func(ctx context.Context, dir string) error { return buildBoot(ctx, t, tree, dir) },
	})
	if err != nil {
		return Boot{}, err
	}
	return Boot{Kernel: k, Release: tree.release, Image: filepath.Join(dir, "vmlinuz"), Base: filepath.Join(dir, "base.cpio")}, nil
}

// kernelTree is where a kernel lies before a guest can boot it.
type kernelTree struct {
	key     string // of what it was built from
	release string
	image   string // the kernel itself
	modules string // the directory above lib/modules
	headers string // for building modules, as seen in the chroot; "" for Debug
	build   string // likewise, a directory of the machine, for Debug
}

func (s *Store) kernelTree(ctx context.Context, t *Tools, k Kernel) (kernelTree, error) {
	if k == Debug {
		return s.debugKernel(ctx, t)
	}
	if _, ok := suiteOf[k]; !ok {
		return kernelTree{}, fault.Newf(fault.Usage, "the kernels are backport, stable and debug", "there is no kernel %q", k)
	}
	b, err := os.ReadFile(filepath.Join(t.root, "boot", "rig-"+string(k)))
	if err != nil {
		return kernelTree{}, fault.New(fault.FileIO, "find the kernel "+string(k), err, "remove that directory: it is built anew").At(t.root)
	}
	release := strings.TrimSpace(string(b))
	// Kernels of newer packages come with their modules.
	image := filepath.Join(t.root, "usr/lib/modules", release, "vmlinuz")
	if old := filepath.Join(t.root, "boot", "vmlinuz-"+release); !isFile(image) && isFile(old) {
		image = old
	}
	return kernelTree{
		release: release, image: image, modules: filepath.Join(t.root, "usr"),
		headers: "/usr/src/linux-headers-" + release,
	}, nil
}

func buildBoot(ctx context.Context, t *Tools, tree kernelTree, dir string) error {
	if err := copyFile(filepath.Join(dir, "vmlinuz"), tree.image); err != nil {
		return err
	}
	files := map[string]File{}
	for _, f := range guestFiles {
		files[f.Path] = f
	}
	if err := addPrograms(ctx, t.root, files); err != nil {
		return err
	}
	staging := filepath.Join(dir, "staging")
	if err := stageModules(ctx, t, tree, staging); err != nil {
		return err
	}
	modules, err := treeFiles(filepath.Join(staging, "lib/modules"), "/usr/lib/modules")
	if err != nil {
		return err
	}
	for _, f := range modules {
		files[f.Path] = f
	}
	out, err := os.Create(filepath.Join(dir, "base.cpio"))
	if err != nil {
		return err
	}
	defer out.Close()
	w := bufio.NewWriterSize(out, 1<<20)
	sorted := make([]File, 0, len(files))
	for _, name := range slices.Sorted(maps.Keys(files)) {
		sorted = append(sorted, files[name])
	}
	if err := errors.Join(WriteArchive(w, sorted), w.Flush(), out.Close()); err != nil {
		return err
	}
	return os.RemoveAll(staging)
}

// addPrograms adds busybox, the programs and every library that they need.
func addPrograms(ctx context.Context, root string, files map[string]File) error {
	l := libraries{root: root, files: files}
	for _, p := range guestPrograms {
		if err := l.add(p, path.Join("/usr/bin", path.Base(p))); err != nil {
			return err
		}
	}
	if err := l.add("/usr/bin/dash", "/usr/bin/sh"); err != nil {
		return err
	}
	for _, pattern := range dlopened {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("the chroot has no %s", pattern)
		}
		for _, f := range found {
			name := strings.TrimPrefix(f, root)
			if err := l.add(name, name); err != nil {
				return err
			}
		}
	}
	link := func(name, to string) {
		if _, ok := files["/usr/bin/"+name]; !ok {
			files["/usr/bin/"+name] = File{Path: "/usr/bin/" + name, Mode: fs.ModeSymlink, Data: []byte(to)}
		}
	}
	for _, name := range []string{"modprobe", "insmod", "rmmod", "lsmod", "depmod", "modinfo"} {
		link(name, "kmod")
	}
	for _, name := range []string{"mkfs.ext4", "mkfs.ext2"} {
		link(name, "mke2fs")
	}
	link("fsck.ext4", "e2fsck")
	busybox := filepath.Join(root, "usr/bin/busybox")
	files["/usr/bin/busybox"] = File{Path: "/usr/bin/busybox", Mode: 0o755, Source: busybox}
	applets, err := run(ctx, exec.CommandContext(ctx, busybox, "--list")) // it is static
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(applets) {
		link(name, "busybox")
	}
	return nil
}

// libraries adds files of the chroot with the libraries that they name.
type libraries struct {
	root  string
	files map[string]File
}

// add puts the file name of the chroot to the path at.
func (l libraries) add(name, at string) error {
	if _, ok := l.files[at]; ok {
		return nil
	}
	source, err := filepath.EvalSymlinks(filepath.Join(l.root, name))
	if err != nil {
		return err
	}
	if !strings.HasPrefix(source, l.root+"/") {
		return fmt.Errorf("%s leads out of the chroot, to %s", name, source)
	}
	l.files[at] = File{Path: at, Mode: 0o755, Source: source}
	f, err := elf.Open(source)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, lib := range needed {
		if err := l.add("/usr/lib/x86_64-linux-gnu/"+lib, "/usr/lib/x86_64-linux-gnu/"+lib); err != nil {
			return fmt.Errorf("%s needs %s: %w", name, lib, err)
		}
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		b := make([]byte, p.Filesz)
		if _, err := p.ReadAt(b, 0); err != nil {
			return err
		}
		interpreter := "/usr" + strings.TrimRight(string(b), "\x00") // /lib64 is a link
		if err := l.add(interpreter, interpreter); err != nil {
			return err
		}
	}
	return nil
}

// stageModules puts the modules that guests may load under dir/lib/modules,
// uncompressed, with the indices that modprobe reads.
func stageModules(ctx context.Context, t *Tools, tree kernelTree, dir string) error {
	from := filepath.Join(tree.modules, "lib/modules", tree.release)
	index, err := readModuleIndex(from)
	if err != nil {
		return err
	}
	to := filepath.Join(dir, "lib/modules", tree.release)
	var compressed []string
	for _, rel := range index.closure(guestModules) {
		target := filepath.Join(to, rel)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		if err := copyFile(target, filepath.Join(from, rel)); err != nil {
			return err
		}
		if strings.HasSuffix(rel, ".xz") {
			compressed = append(compressed, target)
		}
	}
	for _, name := range []string{"modules.order", "modules.builtin", "modules.builtin.modinfo"} {
		if err := copyFile(filepath.Join(to, name), filepath.Join(from, name)); err != nil {
			return err
		}
	}
	if len(compressed) > 0 {
		if _, err := run(ctx, t.Command(ctx, "/usr/bin/xz", append([]string{"-d", "--"}, compressed...)...)); err != nil {
			return err
		}
	}
	depmod := t.Command(ctx, "/usr/bin/kmod", "-b", dir, tree.release)
	depmod.Args[slices.Index(depmod.Args, "--argv0")+1] = "depmod"
	_, err = run(ctx, depmod)
	return err
}

// moduleIndex is a modules.dep: files by the names of modules, and what each
// file needs.
type moduleIndex struct {
	file  map[string]string
	needs map[string][]string
}

func readModuleIndex(dir string) (moduleIndex, error) {
	b, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return moduleIndex{}, err
	}
	m := moduleIndex{file: map[string]string{}, needs: map[string][]string{}}
	for line := range strings.Lines(string(b)) {
		file, needs, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(path.Base(file), ".ko")
		m.file[strings.ReplaceAll(name, "-", "_")] = file
		m.needs[file] = strings.Fields(needs)
	}
	return m, nil
}

// closure returns the files of the modules and of all that they need, sorted.
// modules.dep is transitive already.
func (m moduleIndex) closure(names []string) []string {
	set := map[string]bool{}
	for _, name := range names {
		file, ok := m.file[strings.ReplaceAll(name, "-", "_")]
		if !ok {
			continue // built in, or not in this kernel
		}
		set[file] = true
		for _, n := range m.needs[file] {
			set[n] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

func copyFile(to, from string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}
