package guest

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/image"
)

func valid() Options {
	return Options{Name: "alpha", Tools: &image.Tools{}, Boot: image.Boot{Image: "/k", Base: "/b"}}
}

func TestOptionsThatCannotBeAreRefused(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no name":                func(o *Options) { o.Name = "" },
		"a name with a dot":      func(o *Options) { o.Name = "a.b" },
		"a name with a space":    func(o *Options) { o.Name = "a init=/bin/sh" },
		"no kernel":              func(o *Options) { o.Boot.Image = "" },
		"a system without disk":  func(o *Options) { o.System = true },
		"a module with a comma":  func(o *Options) { o.Modules = []string{"a,b"} },
		"a relative socket":      func(o *Options) { o.VFIOUser = []string{"x.sock"} },
		"a socket too long":      func(o *Options) { o.VFIOUser = []string{"/" + strings.Repeat("x", 107)} },
		"two words":              func(o *Options) { o.CommandLine = []string{"a b"} },
		"a NIC without a wire":   func(o *Options) { o.NICs = []NIC{{MAC: "52:54:00:00:00:01"}} },
		"a NIC without a MAC":    func(o *Options) { o.NICs = []NIC{{Wire: os.Stdin}} },
		"an unexplained allow":   func(o *Options) { o.Allow = []Allowance{{Pattern: regexp.MustCompile("x")}} },
		"less than no memory":    func(o *Options) { o.Memory = -1 },
		"no chroot":              func(o *Options) { o.Tools = nil },
		"an allow without words": func(o *Options) { o.Allow = []Allowance{{Reference: "x"}} },
	} {
		o := valid()
		if change(&o); !fault.Is(o.check(), fault.Usage) {
			t.Errorf("%s: %v", name, o.check())
		}
	}
	o := valid()
	if err := o.check(); err != nil || o.Memory != 512 || o.CPUs != 1 || o.BootTimeout == 0 {
		t.Errorf("%v %+v", err, o)
	}
}

func TestTheArgumentsOfQEMU(t *testing.T) {
	o := valid()
	o.IOMMU, o.System, o.ClockOffset = true, true, -24*time.Hour
	o.Disks = []string{"/tmp/a,b.qcow2"}
	o.VFIOUser = []string{"/run/x.sock"}
	o.NICs = []NIC{{MAC: "52:54:00:00:00:01", Wire: os.Stdin}}
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	args := o.arguments("/initrd", time.Date(2026, 3, 1, 12, 0, 0, 0, time.FixedZone("x", 3600)))
	all := strings.Join(args, "\n")
	for _, want := range []string{
		`base=2026-02-28T11:00:00`, `"filename":"/tmp/a,b.qcow2"`, `"path":"/run/x.sock"`, "mac=52:54:00:00:00:01", "local.str=6",
		"rig.root=/dev/vda", "rig.name=alpha", "intel_iommu=on", "share=on", "panic=-1", "la57=off",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no %s", want)
		}
	}
	iommu := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "intel-iommu") })
	vfio := slices.IndexFunc(args, func(a string) bool { return strings.Contains(a, "vfio-user-pci") })
	if iommu < 0 || vfio < iommu {
		t.Errorf("the IOMMU is argument %d, the device %d", iommu, vfio)
	}
}
