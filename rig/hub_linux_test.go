package rig

import (
	"strings"
	"testing"

	"tbcluster/api/fault"
)

// A hub is a router that the driver of one host takes, and finds hosts of other
// domains behind.
func TestHub(t *testing.T) {
	t.Parallel()
	group(t, oneLane(Hubbed(3)),
		subtest{name: "the driver takes it", run: func(t *testing.T, r *Rig) {
			// That it is there, and who is behind it, Settled has seen.
			out := run(t, r.Host("a"), "cd /sys/bus/thunderbolt/devices/0-1; cat device_name vendor_name device vendor generation; ls -d 0-301 0-501")
			if out != "hub\ntbcluster rig\n0x4002\n0x1d6b\n4\n0-301\n0-501" {
				t.Errorf("the hub says of itself\n%s", out)
			}
		}},
		subtest{name: "traffic to both hosts behind it", run: func(t *testing.T, r *Rig) {
			before := r.Counters()
			traffic(t, r.Cable("hub.1"), 1<<20)
			traffic(t, r.Cable("hub.2"), 1<<20)
			after := r.Counters()
			carried := func(i int) (frames, bytes uint64) {
				x, y, z, w := after.Cables[i].AtoB, after.Cables[i].BtoA, before.Cables[i].AtoB, before.Cables[i].BtoA
				return x.Sent + y.Sent - z.Sent - w.Sent, x.SentBytes + y.SentBytes - z.SentBytes - w.SentBytes
			}
			// ended is how many frames of a host may have come as far as the hub: what
			// IPv6 says by itself while the other host has not set up its path.
			ended := func(host string) uint64 {
				i := r.Host(host).index
				d := sum(after.Hosts[i].TX, before.Hosts[i].TX).Dropped
				return d.NoPath + d.LinkDown
			}
			up, _ := carried(0)
			b, bBytes := carried(1)
			c, cBytes := carried(2)
			t.Logf("%d frames between a and the hub, %d between hub and b, %d between hub and c; of a, b and c %d, %d and %d came to no host", up, b, c, ended("a"), ended("b"), ended("c"))
			if up+ended("b")+ended("c") < b+c || b+c+ended("a") < up || bBytes < 2<<20 || cBytes < 2<<20 {
				t.Errorf("what crossed the hub does not add up; %d bytes between hub and b, %d between hub and c", bBytes, cBytes)
			}
			if err := r.Cable("a.0").Address(t.Context()); !fault.Is(err, fault.Usage) {
				t.Errorf("a network over the cable to the hub: %v", err)
			}
		}},
		subtest{name: "what is behind it goes and comes back", run: func(t *testing.T, r *Rig) {
			for _, c := range r.Cables() {
				quiet(t, c)
			}
			for _, port := range []string{"b.0", "a.0"} {
				r.Cable(port).Unplug()
				r.Settled(t)
				r.Cable(port).Plug()
				r.Settled(t)
			}
			traffic(t, r.Cable("b.0"), 1<<18)
		}},
		subtest{name: "frames through it are compared", run: func(t *testing.T, r *Rig) {
			rings(t, r, "")
			for _, port := range []string{"b.0", "c.0"} {
				x := r.Cable(port).rawRing(t)
				x.verify(t, true)
				const frames = 2000
				run(t, x.receiver(), "echo 1 >"+x.to+"/reset")
				got := x.send(t, frames, 4096)
				if n := got.receiver; n["rx_frames"] != frames || n["rx_bad"] != 0 || got.missing != 0 || got.wire.Sent != frames {
					t.Errorf("%s: %+v", port, got)
				}
			}
		}},
		subtest{name: "the driver that has it is loaded anew", run: func(t *testing.T, r *Rig) {
			if err := r.Host("a").ReloadDriver(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.Settled(t)
			traffic(t, r.Cable("c.0"), 1<<18)
		}},
	)
}

func TestAHubIsPartOfATopology(t *testing.T) {
	top, err := Hubbed(3, 2).complete()
	if err != nil {
		t.Fatal(err)
	}
	if len(top.Hubs) != 2 || top.Hubs[1].Name != "hub2" || top.Hubs[1].Ports != 3 || top.Hosts[0].Ports != 2 || len(top.Cables) != 6 || top.Cables[4] != (CableSpec{A: "b.1", B: "hub2.1"}) {
		t.Errorf("%+v", top)
	}
	for want, change := range map[string]func(*Topology){
		"two hosts or hubs of the rig are called a": func(t *Topology) { t.Hubs[0].Name = "a" },
		"there is no host hub3":                     func(t *Topology) { t.Cables[0].B = "hub3.0" },
		"host hub has no port 2":                    func(t *Topology) { t.Hubs[0].Ports = 2 },
		"the cable hub.1 - hub.2 leads back":        func(t *Topology) { t.Cables = []CableSpec{{A: "hub.1", B: "hub.2"}} },
	} {
		top := Hubbed(3)
		change(&top)
		if _, err := top.complete(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
	if _, err := NewWalk(1, Hubbed(2)); err == nil {
		t.Error("a walk takes a hub")
	}
}
