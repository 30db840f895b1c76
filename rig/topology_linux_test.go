package rig

import (
	"strings"
	"testing"

	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

func TestShapesJoinTheHostsThatTheyName(t *testing.T) {
	for name, c := range map[string]struct {
		topology Topology
		cables   string
		ports    string
	}{
		"pair":             {Pair(), "a.0-b.0", "a1 b1"},
		"pair, two cables": {Pair(2), "a.0-b.0 a.1-b.1", "a2 b2"},
		"chain":            {Chain(3), "a.0-b.0 b.1-c.0", "a1 b2 c1"},
		"ring":             {Ring(3), "a.0-b.0 b.1-c.0 c.1-a.1", "a2 b2 c2"},
		"ring of two":      {Ring(2), "a.0-b.0", "a1 b1"},
		"mesh":             {Mesh(4), "a.0-b.0 a.1-c.0 a.2-d.0 b.1-c.1 b.2-d.1 c.2-d.2", "a3 b3 c3 d3"},
		"one host":         {Chain(1), "", "a1"},
	} {
		done, err := c.topology.complete()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var cables, ports []string
		for _, x := range done.Cables {
			cables = append(cables, x.A+"-"+x.B)
		}
		for _, h := range done.Hosts {
			ports = append(ports, h.Name+string(rune('0'+h.Ports)))
		}
		if got := strings.Join(cables, " "); got != c.cables {
			t.Errorf("%s has the cables %s, not %s", name, got, c.cables)
		}
		if got := strings.Join(ports, " "); got != c.ports {
			t.Errorf("%s has the ports %s, not %s", name, got, c.ports)
		}
	}
}

func TestTopologyFillsInWhatIsLeftOut(t *testing.T) {
	topology := Pair()
	topology.Hosts = []HostSpec{{Name: "x", Kernel: image.Debug}, {Memory: 256}}
	topology.Cables = []CableSpec{{A: "x.3", B: "b.0"}}
	done, err := topology.complete()
	if err != nil {
		t.Fatal(err)
	}
	if h := done.Hosts[0]; h.Ports != 4 || h.Memory != 1024 || h.Kernel != image.Debug {
		t.Errorf("host x is %+v", h)
	}
	if h := done.Hosts[1]; h.Name != "b" || h.Memory != 256 || h.Kernel != image.Backport {
		t.Errorf("host b is %+v", h)
	}
	if topology.Hosts[1].Name != "" {
		t.Error("the topology that was given has changed")
	}
}

func TestTopologyRefuses(t *testing.T) {
	for _, c := range []struct {
		change func(*Topology)
		why    string
	}{
		{func(t *Topology) { t.Hosts = nil }, "0 hosts"},
		{func(t *Topology) { t.Hosts = make([]HostSpec, MaxHosts+1) }, "17 hosts"},
		{func(t *Topology) { t.Hosts[1].Name = "a" }, "two hosts"},
		{func(t *Topology) { t.Hosts[0].Disk = -1 }, "the disk cannot be -1 MiB"},
		{func(t *Topology) { t.Hosts[1].Memory = 1 }, "host b: the memory cannot be 1 MiB"},
		{func(t *Topology) { t.Hosts[1].CPUs = 65 }, "processors cannot be 65"},
		{func(t *Topology) { t.Hosts[1].Speed = usb4.Gen4 }, "generation 4 needs version 2"},
		{func(t *Topology) { t.Cables[0].B = "c.0" }, "there is no host c"},
		{func(t *Topology) { t.Cables[0].B = "a.1" }, "leads back"},
		{func(t *Topology) { t.Cables = append(t.Cables, t.Cables[0]) }, "two cables end in port a.0"},
		{func(t *Topology) { t.Hosts[0].Ports = 1; t.Cables[0].A = "a.1" }, "host a has no port 1"},
		{func(t *Topology) { t.Cables[0].A = "a.15" }, "host a has no port 15"},
		{func(t *Topology) { t.Cables[0].A = "a" }, "no port"},
		{func(t *Topology) { t.Cables[0].A = "a.+1" }, "no port"},
		{func(t *Topology) { t.Cables[0].A = "a.01" }, "no port"},
		{func(t *Topology) { t.Cables[0].A = ".1" }, "no port"},
	} {
		topology := Pair()
		c.change(&topology)
		if _, err := topology.complete(); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%+v: %v, not %q", topology, err, c.why)
		}
	}
}
