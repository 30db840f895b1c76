package guest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/image"
)

// Options say what a guest is. Name, Tools and Boot are required.
type Options struct {
	// Name is the host name, and the name in messages: lower-case letters,
	// digits and dashes.
	Name  string
	Tools *image.Tools
	Boot  image.Boot

	// Agent is the file of a guestd built for Linux on amd64, CGO_ENABLED=0;
	// "" is what BuildAgent gives.
	Agent string
	// Files are laid over the initramfs, or over the root of the system's disk.
	Files []image.File
	// Modules are loaded at boot, besides those of the virtual machine.
	Modules []string

	Memory int // MiB; 0 is 512
	CPUs   int // 0 is 1

	// VFIOUser are the sockets of vfio-user servers, each a PCI device. They
	// have to listen before the power is switched on.
	VFIOUser []string
	// IOMMU gives the machine an Intel IOMMU that translates.
	IOMMU bool
	// Disks are qcow2 files (image.Tools.CreateDisk): /dev/vda, /dev/vdb, …
	Disks []string
	// System boots the systemd of the first disk (image.Store.System).
	System bool
	// NICs are the network interfaces, virtio.
	NICs []NIC
	// ClockOffset is how wrong the guest's clock is.
	ClockOffset time.Duration

	// CommandLine is added to the kernel's.
	CommandLine []string
	// Devices are further -device arguments of QEMU.
	Devices []string

	// Allow are reports of the kernel that are no failure, each with its
	// reason.
	Allow []Allowance

	// Dir is where console.log and the like are kept; "" is a temporary
	// directory that Close removes.
	Dir string
	// BootTimeout is how long a boot may take; 0 is five minutes.
	BootTimeout time.Duration
}

// NIC is a network interface of a guest.
type NIC struct {
	MAC string
	// Wire is one end of a pair of datagram sockets, a frame a datagram. The
	// guest takes it over: Close closes it.
	Wire *os.File
}

// Allowance is a report of the kernel that does not fail a guest.
type Allowance struct {
	// Pattern has to match the report's text.
	Pattern *regexp.Regexp
	// Reference is a URL or a commit of the upstream kernel that says why it
	// may be.
	Reference string
}

var (
	validName   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
	validModule = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
)

// maxSocketPath is sun_path of unix(7), less its zero.
const maxSocketPath = 107

// check refuses what cannot be and fills in what is left out.
func (o *Options) check() error {
	wrong := func(format string, args ...any) error {
		return fault.Newf(fault.Usage, "", "guest "+o.Name+" is not set up right: "+format, args...)
	}
	switch {
	case !validName.MatchString(o.Name):
		return wrong("a name has lower-case letters, digits and dashes, at most 32")
	case o.Tools == nil || o.Boot.Image == "" || o.Boot.Base == "":
		return wrong("no kernel is given")
	case o.System && len(o.Disks) == 0:
		return wrong("a system needs a disk")
	}
	for _, m := range o.Modules {
		if !validModule.MatchString(m) {
			return wrong("%q is no module", m)
		}
	}
	for _, s := range o.VFIOUser {
		if len(s) > maxSocketPath || !filepath.IsAbs(s) {
			return wrong("the socket %q has to be an absolute path of at most %d bytes", s, maxSocketPath)
		}
	}
	for _, w := range o.CommandLine {
		if strings.ContainsAny(w, " \t\n\x00") {
			return wrong("%q is more than one word of a command line", w)
		}
	}
	for _, n := range o.NICs {
		if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 || n.Wire == nil {
			return wrong("a network interface needs a MAC address and a wire")
		}
	}
	for _, a := range o.Allow {
		if a.Pattern == nil || a.Reference == "" {
			return wrong("an allowance needs a pattern and the reference that explains it")
		}
	}
	for v, def := range map[*int]int{&o.Memory: 512, &o.CPUs: 1} {
		if *v == 0 {
			*v = def
		}
		if *v < 0 {
			return wrong("a negative size")
		}
	}
	if o.BootTimeout == 0 {
		o.BootTimeout = 5 * time.Minute
	}
	return nil
}

// The descriptors that QEMU inherits.
const (
	agentFD = 3 + iota
	consoleFD
	monitorFD
	firstWireFD
)

// arguments returns those of QEMU. The machine's clock is now.
func (o *Options) arguments(initrd string, now time.Time) []string {
	line := []string{
		"console=ttyS0", "printk.time=1", "loglevel=7", "panic=-1", "mitigations=off",
		// The emulator may stand still for a while on a busy machine; that is no
		// lockup of the guest.
		"watchdog_thresh=60", "rcupdate.rcu_cpu_stall_timeout=300", "workqueue.watchdog_thresh=300",
		// Not measured by the guest: see counterKHz.
		fmt.Sprintf("tsc_early_khz=%d", counterKHz()),
		"rig.name=" + o.Name,
	}
	if len(o.Modules) > 0 {
		line = append(line, "rig.modules="+strings.Join(o.Modules, ","))
	}
	if o.System {
		line = append(line, "rig.root=/dev/vda", "systemd.hostname="+o.Name, "systemd.getty_auto=no")
	}
	args := []string{
		// Without five levels of page tables: while the kernel asks the processor
		// what it can, it forgets that it has five, and an interrupt then is wild
		// memory to KASAN, for ever with kasan_multi_shot. ("kasan: Fix
		// false-positive wild-memory-access on x86 under 5-level paging",
		// linux-kernel, June 2026.)
		"-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-machine", "q35,memory-backend=mem",
		// Shared, for the vfio-user devices that reach into it.
		"-object", fmt.Sprintf("memory-backend-memfd,id=mem,size=%dM,share=on", o.Memory),
		"-m", fmt.Sprint(o.Memory), "-smp", fmt.Sprint(o.CPUs),
		"-display", "none", "-nodefaults", "-no-user-config", "-no-reboot",
		// The offset is the guest's time zone of sorts: its clock runs with ours.
		"-rtc", "base=" + now.Add(o.ClockOffset).UTC().Format("2006-01-02T15:04:05"),
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d", consoleFD), "-serial", "chardev:console",
		"-chardev", fmt.Sprintf("socket,id=monitor,fd=%d", monitorFD), "-object", "monitor-qmp,id=qmp,chardev=monitor",
		"-device", "virtio-serial-pci",
		"-chardev", fmt.Sprintf("socket,id=agent,fd=%d", agentFD), "-device", "virtserialport,chardev=agent,name=" + portName,
		"-device", "virtio-rng-pci",
	}
	if o.IOMMU {
		// Before the devices that it translates for.
		args = append(args, "-device", "intel-iommu,intremap=off,caching-mode=on")
		line = append(line, "intel_iommu=on", "iommu=nopt")
	}
	for i, d := range o.Disks {
		args = append(args,
			"-blockdev", quoteJSON(map[string]any{"driver": "qcow2", "node-name": fmt.Sprintf("disk%d", i), "file": map[string]any{"driver": "file", "filename": d}}),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=disk%d,serial=disk%d", i, i))
	}
	for i, n := range o.NICs {
		args = append(args,
			"-netdev", fmt.Sprintf("dgram,id=net%d,local.type=fd,local.str=%d", i, firstWireFD+i),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=net%d,mac=%s", i, n.MAC))
	}
	for i, s := range o.VFIOUser {
		args = append(args, "-device", quoteJSON(map[string]any{"driver": "vfio-user-pci", "id": fmt.Sprintf("vfio%d", i), "socket": map[string]any{"type": "unix", "path": s}}))
	}
	for _, d := range o.Devices {
		args = append(args, "-device", d)
	}
	return append(args, "-kernel", o.Boot.Image, "-initrd", initrd, "-append", strings.Join(append(line, o.CommandLine...), " "))
}
