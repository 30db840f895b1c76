package rig

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/guest"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// Limits of a Topology. A guest takes half a processor when it idles badly.
const (
	MaxHosts = 16
	MaxPorts = 15 // what usb4 gives a host

	MinMemory = 256      // MiB: the initramfs is unpacked into it
	MaxMemory = 64 << 10 // MiB
	MaxCPUs   = 64       // more than a machine that emulates them has use for
	MaxDisk   = 1 << 20  // MiB
)

// Topology says what a rig is made of.
type Topology struct {
	Hosts  []HostSpec
	Hubs   []HubSpec
	Cables []CableSpec
	// Kernel is that of hosts that do not name one; "" is image.Backport.
	Kernel image.Kernel
	// LAN gives every host a network interface on one Ethernet besides, which
	// leads nowhere else, eth0: the host of number i (from 0) has
	// 192.168.77.i+1/24, but for one with System, which gives itself what it has.
	LAN bool
	// Seed decides what is lost and corrupted by probability.
	Seed uint64
}

// DataLabel is the label of the file system with a host's Data.
const DataLabel = "rigdata"

// HostSpec is one host. Zero values stand for what is said with each.
type HostSpec struct {
	// Name is the host name; "" is a, b, c, … by place.
	Name string
	// Ports, Lanes, Version and Speed are those of its host router: as many
	// ports as its cables need, 2 lanes, USB4 version 1, 20 Gb/s a lane.
	Ports, Lanes, Version int
	Speed                 usb4.Generation

	Kernel image.Kernel // "" is that of the topology
	Memory int          // MiB; 0 is 512, or 1024 for the debug kernel or with System
	CPUs   int          // 0 is 1
	// Disk is the size of an empty disk in MiB, /dev/vda; 0 is no disk.
	Disk int
	// System boots Debian with systemd, NetworkManager and dpkg from a disk of its
	// own, which is /dev/vda then, instead of the initramfs. Interfaces of the LAN
	// are left to what runs there.
	System bool
	// Data is a directory of the machine that the host has a copy of, in a file
	// system on its last disk: it is mounted by its label, DataLabel.
	Data string
	// IOMMU gives it an IOMMU that translates what the host router asks for.
	IOMMU bool
	// ClockOffset is how wrong its clock is.
	ClockOffset time.Duration
	// Bare leaves the thunderbolt driver alone at boot: LoadDriver loads it.
	Bare bool
	// Driver are files of the machine, kernel modules (.ko), that LoadDriver loads
	// in this order instead of the kernel's own thunderbolt and thunderbolt_net.
	Driver []string
	// Files are laid over its root, besides Options.Files.
	Files []image.File
	// CommandLine is added to its kernel's.
	CommandLine []string
	// Allow are reports of its kernel that are no failure.
	Allow []guest.Allowance
}

// CableSpec is one cable between two ports, "a.0" and "b.1", or "hub.1".
type CableSpec struct {
	A, B    string
	Options usb4.CableOptions
}

// Pair is two hosts with n cables between them (default 1).
func Pair(n ...int) Topology { return Chain(2, n...) }

// Chain is hosts in a row, each joined with the next by cables cables (default
// 1).
func Chain(hosts int, cables ...int) Topology {
	b := builder{per: per(cables)}
	for i := range hosts - 1 {
		b.join(i, i+1)
	}
	return b.topology(hosts)
}

// Ring is a Chain whose last host is joined with the first. Of fewer than three
// hosts it is a Chain.
func Ring(hosts int, cables ...int) Topology {
	b := builder{per: per(cables)}
	for i := range hosts - 1 {
		b.join(i, i+1)
	}
	if hosts > 2 {
		b.join(hosts-1, 0)
	}
	return b.topology(hosts)
}

// Mesh is hosts that are each joined with every other.
func Mesh(hosts int, cables ...int) Topology {
	b := builder{per: per(cables)}
	for i := range hosts {
		for j := i + 1; j < hosts; j++ {
			b.join(i, j)
		}
	}
	return b.topology(hosts)
}

func per(cables []int) int {
	if len(cables) > 0 {
		return cables[0]
	}
	return 1
}

// builder hands out ports, from 0 on.
type builder struct {
	per    int // cables between two hosts
	used   map[int]int
	cables []CableSpec
}

func (b *builder) join(i, j int) {
	if b.used == nil {
		b.used = map[int]int{}
	}
	port := func(host int) string {
		p := b.used[host]
		b.used[host]++
		return fmt.Sprintf("%s.%d", hostName(host), p)
	}
	for range b.per {
		b.cables = append(b.cables, CableSpec{A: port(i), B: port(j)})
	}
}

func (b *builder) topology(hosts int) Topology {
	return Topology{Hosts: make([]HostSpec, max(hosts, 0)), Cables: b.cables}
}

// hostName is the name of the i-th host that has no other: a to z, then h27.
func hostName(i int) string {
	if i < 26 {
		return string(rune('a' + i))
	}
	return "h" + strconv.Itoa(i+1)
}

// Names returns the names of the hosts.
func (t Topology) Names() []string {
	names := make([]string, len(t.Hosts))
	for i, h := range t.Hosts {
		if names[i] = h.Name; h.Name == "" {
			names[i] = hostName(i)
		}
	}
	return names
}

// Each returns a copy in which every host has been changed by f.
func (t Topology) Each(f func(*HostSpec)) Topology {
	t.Hosts = slices.Clone(t.Hosts)
	for i := range t.Hosts {
		f(&t.Hosts[i])
	}
	return t
}

// parsePort takes "a.0" apart.
func parsePort(s string) (host string, port int, err error) {
	wrong := fault.Newf(fault.Usage, `write HOST.PORT, with ports from 0 on: "a.0"`, "%q is no port", s)
	i := strings.LastIndexByte(s, '.')
	if i <= 0 {
		return "", 0, wrong
	}
	// Atoi would take "+1" and "01".
	port, err = strconv.Atoi(s[i+1:])
	if err != nil || strconv.Itoa(port) != s[i+1:] || port < 0 {
		return "", 0, wrong
	}
	return s[:i], port, nil
}

// check refuses what no host can have.
func (h HostSpec) check() error {
	for _, v := range []struct {
		name            string
		value, min, max int // 0 stands for something else
		unit            string
	}{
		{"memory", h.Memory, MinMemory, MaxMemory, " MiB"}, {"number of processors", h.CPUs, 1, MaxCPUs, ""},
		{"disk", h.Disk, 1, MaxDisk, " MiB"}, {"number of ports", h.Ports, 1, MaxPorts, ""},
		{"number of lanes", h.Lanes, 1, 2, ""}, {"version of USB4", h.Version, 1, 2, ""}, {"generation", int(h.Speed), 2, 4, ""},
	} {
		if v.value != 0 && (v.value < v.min || v.value > v.max) {
			return fault.Newf(fault.Usage, fmt.Sprintf("choose %d to %d%s", v.min, v.max, v.unit), "host %s: the %s cannot be %d%s", h.Name, v.name, v.value, v.unit)
		}
	}
	if h.Speed == usb4.Gen4 && (h.Version != 2 || h.Lanes == 1) {
		return fault.Newf(fault.Usage, "choose version 2 of USB4, and two lanes", "host %s: generation 4 needs version 2 of USB4 and two lanes", h.Name)
	}
	return nil
}

// complete returns the topology with all defaults filled in, or what is wrong
// with it.
func (t Topology) complete() (Topology, error) {
	if len(t.Hosts) == 0 || len(t.Hosts) > MaxHosts {
		return t, fault.Newf(fault.Usage, fmt.Sprintf("choose 1 to %d", MaxHosts), "a rig cannot have %d hosts", len(t.Hosts))
	}
	if t.Kernel == "" {
		t.Kernel = image.Backport
	}
	hosts, cables := slices.Clone(t.Hosts), slices.Clone(t.Cables)
	byName := map[string]*HostSpec{}
	for i := range hosts {
		h := &hosts[i]
		if h.Name == "" {
			h.Name = hostName(i)
		}
		if byName[h.Name] != nil {
			return t, fault.Newf(fault.Usage, "give each its own name", "two hosts of the rig are called %s", h.Name)
		}
		byName[h.Name] = h
		if h.Kernel == "" {
			h.Kernel = t.Kernel
		}
		if h.Memory == 0 {
			h.Memory = 512
			if h.Kernel == image.Debug || h.System {
				h.Memory = 1024
			}
		}
		if err := h.check(); err != nil {
			return t, err
		}
	}
	hubs := slices.Clone(t.Hubs)
	ports := map[string]*int{} // by host or hub
	given := map[string]int{}
	for i := range hosts {
		ports[hosts[i].Name], given[hosts[i].Name] = &hosts[i].Ports, hosts[i].Ports
	}
	for i := range hubs {
		h := &hubs[i]
		if h.Name == "" {
			h.Name = hubName(i)
		}
		if ports[h.Name] != nil {
			return t, fault.Newf(fault.Usage, "give each its own name", "two hosts or hubs of the rig are called %s", h.Name)
		}
		if h.Ports < 0 {
			return t, fault.Newf(fault.Usage, "", "hub %s: a size is less than nothing", h.Name)
		}
		ports[h.Name], given[h.Name] = &h.Ports, h.Ports
	}
	taken := map[string]bool{}
	for i := range cables {
		c := &cables[i]
		ends := [2]string{}
		for j, end := range []string{c.A, c.B} {
			name, port, err := parsePort(end)
			if err != nil {
				return t, err
			}
			n := ports[name]
			switch {
			case n == nil:
				return t, fault.Newf(fault.Usage, "the hosts are "+strings.Join(slices.Sorted(maps.Keys(ports)), ", "), "cable %s - %s: there is no host %s", c.A, c.B, name)
			case taken[end]:
				return t, fault.Newf(fault.Usage, "each port has one cable", "two cables end in port %s", end)
			case port >= MaxPorts || given[name] > 0 && port >= given[name]:
				return t, fault.Newf(fault.Usage, "ports count from 0", "cable %s - %s: host %s has no port %d", c.A, c.B, name, port)
			}
			taken[end] = true
			*n = max(*n, port+1)
			ends[j] = name
		}
		if ends[0] == ends[1] {
			return t, fault.Newf(fault.Usage, "join two hosts", "the cable %s - %s leads back to its host", c.A, c.B)
		}
	}
	for i := range hosts {
		hosts[i].Ports = max(hosts[i].Ports, 1)
	}
	for i := range hubs {
		hubs[i].Ports = max(hubs[i].Ports, 2)
	}
	t.Hosts, t.Hubs, t.Cables = hosts, hubs, cables
	return t, nil
}
