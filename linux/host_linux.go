package linux

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"tbcluster/host"
)

// machine is host.Host on the running kernel.
type machine struct {
	facts
	seeker *seeker
	// changing is held while something is changed: a change looks first.
	changing sync.Mutex
	seen     seenFilter
}

func newHost(o Options) host.Host {
	f := facts{
		sysfs: cmp.Or(o.SysfsRoot, "/sys"), sys: "/sys",
		proc: cmp.Or(o.ProcRoot, "/proc"), etc: cmp.Or(o.EtcRoot, "/etc"), run: cmp.Or(o.RunRoot, "/run"),
		memoryBytes: o.MemoryBytes,
	}
	clock := o.Clock
	if clock == nil {
		clock = host.SystemClock{}
	}
	return &machine{facts: f, seeker: &seeker{proc: f.proc, run: f.run, clock: clock}}
}

// Machine implements host.Host.
func (m *machine) Machine(context.Context) (host.Machine, error) {
	name, err := os.Hostname()
	if err != nil {
		return host.Machine{}, fmt.Errorf("host name: %w", err)
	}
	name, _, _ = strings.Cut(name, ".")
	out := host.Machine{
		Hostname: name, OS: "linux", Arch: runtime.GOARCH, CPUs: runtime.NumCPU(),
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return host.Machine{}, fmt.Errorf("kernel release: %w", err)
	}
	out.Kernel = unix.ByteSliceToString(uts.Release[:])
	release, err := firstText(m.etc+"/os-release", "/usr/lib/os-release")
	if err != nil {
		return host.Machine{}, fmt.Errorf("system version: %w", err)
	}
	out.OSVersion = parseOSRelease(release)
	if out.MachineID, err = firstText(m.etc+"/machine-id", "/var/lib/dbus/machine-id"); err != nil {
		return host.Machine{}, fmt.Errorf("machine ID: %w", err)
	}
	if out.BootID, err = readText(m.proc, "sys/kernel/random/boot_id"); err != nil {
		return host.Machine{}, fmt.Errorf("boot ID: %w", err)
	}
	if out.Memory, err = m.memory(); err != nil {
		return host.Machine{}, fmt.Errorf("memory: %w", err)
	}
	return out, nil
}

// firstText returns the content of the first file that is there and not empty.
func firstText(files ...string) (string, error) {
	for _, f := range files {
		text, err := readText(f)
		if text != "" || err != nil {
			return text, err
		}
	}
	return "", nil
}

// Thunderbolt implements host.Host.
func (m *machine) Thunderbolt(context.Context) (host.Thunderbolt, error) {
	return tree{m.sysfs}.read()
}

// Commands implements host.Host.
func (m *machine) Commands(c host.Change) []string { return commands(c) }
