package darwin

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"

	"tbcluster/host"
)

// keysOf parses lines of "key: value", as sysctl and sw_vers print them.
func keysOf(text string) map[string]string {
	v := map[string]string{}
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok {
			v[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return v
}

// parseVMStat returns the memory that is free or can be had at once: pages
// free, speculative and inactive.
func parseVMStat(text string) (uint64, error) {
	head, rest, _ := strings.Cut(text, "\n")
	_, size, ok := strings.Cut(head, "page size of ")
	size, _, ok2 := strings.Cut(size, " ")
	page, err := strconv.ParseUint(size, 10, 24)
	if !ok || !ok2 || err != nil || page == 0 {
		return 0, fmt.Errorf("vm_stat: no page size in %q", head)
	}
	v := keysOf(rest)
	var pages uint64
	for _, key := range []string{"Pages free", "Pages speculative", "Pages inactive"} {
		n, err := strconv.ParseUint(strings.TrimSuffix(v[key], "."), 10, 38)
		if err != nil {
			return 0, fmt.Errorf("vm_stat: %s: %w", key, err)
		}
		pages += n
	}
	return pages * page, nil
}

// parsePlatformUUID returns IOPlatformUUID in the output of ioreg, "" if it is
// not there.
func parsePlatformUUID(text string) string {
	_, rest, ok := strings.Cut(text, `"IOPlatformUUID" = "`)
	uuid, _, ok2 := strings.Cut(rest, `"`)
	if !ok || !ok2 || len(uuid) > 64 || strings.ContainsAny(uuid, "\n") {
		return ""
	}
	return strings.ToLower(uuid)
}

// machineOf puts together what sysctl, sw_vers, vm_stat and ioreg print.
func machineOf(sysctl, swVers, vmStat, ioreg string) (host.Machine, error) {
	s, v := keysOf(sysctl), keysOf(swVers)
	total, err := strconv.ParseUint(s["hw.memsize"], 10, 64)
	if err != nil || total == 0 || total > math.MaxInt64 {
		return host.Machine{}, fmt.Errorf("sysctl: hw.memsize %q", s["hw.memsize"])
	}
	cpus, err := strconv.ParseUint(s["hw.logicalcpu"], 10, 16)
	if err != nil || cpus == 0 {
		return host.Machine{}, fmt.Errorf("sysctl: hw.logicalcpu %q", s["hw.logicalcpu"])
	}
	available, err := parseVMStat(vmStat)
	if err != nil {
		return host.Machine{}, err
	}
	if v["ProductVersion"] == "" {
		return host.Machine{}, errors.New("sw_vers: no ProductVersion")
	}
	name, _, _ := strings.Cut(s["kern.hostname"], ".")
	arch := s["hw.machine"]
	if arch == "x86_64" {
		arch = "amd64"
	}
	return host.Machine{
		Hostname: name, OS: "darwin", Arch: firstOf(arch, runtime.GOARCH), CPUs: int(cpus),
		OSVersion: fmt.Sprintf("%s %s (%s)", v["ProductName"], v["ProductVersion"], v["BuildVersion"]),
		Kernel:    s["kern.osrelease"],
		MachineID: parsePlatformUUID(ioreg), BootID: strings.ToLower(s["kern.bootsessionuuid"]),
		Memory: host.Memory{Total: total, Available: min(available, total)},
	}, nil
}

// Machine implements host.Host.
func (m *mac) Machine(ctx context.Context) (host.Machine, error) {
	var out [4]string
	for i, c := range [][]string{
		{"sysctl", "hw.memsize", "hw.logicalcpu", "hw.machine", "kern.hostname", "kern.osrelease", "kern.bootsessionuuid"},
		{"sw_vers"},
		{"vm_stat"},
		{"ioreg", "-rd1", "-c", "IOPlatformExpertDevice"},
	} {
		b, err := m.run.Run(ctx, c[0], c[1:]...)
		if err != nil {
			return host.Machine{}, err
		}
		out[i] = string(b)
	}
	return machineOf(out[0], out[1], out[2], out[3])
}
