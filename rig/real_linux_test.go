package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// Tests of the real driver in guests. Each boots what several subtests use one
// after the other; Renew brings back what a subtest has changed.

// group runs subtests on one rig. The first finds it as it came up.
func group(t *testing.T, topology Topology, tests ...subtest) {
	t.Helper()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	begun := time.Now()
	r := Start(t, topology)
	r.Settled(t)
	t.Logf("up and settled after %.1f s", time.Since(begun).Seconds())
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if i > 0 && test.fresh {
				r.Renew(t)
			} else if i > 0 {
				r.healed(t)
			}
			begun := time.Now()
			test.run(t, r)
			t.Logf("took %.1f s", time.Since(begun).Seconds())
			if err := r.Verify(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

type subtest struct {
	name string
	run  func(*testing.T, *Rig)
	// fresh has the drivers loaded anew before: not all tests need that, and it
	// takes ten seconds.
	fresh bool
}

// healed is Heal for tests.
func (r *Rig) healed(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := r.Heal(ctx); err != nil {
		t.Fatal(err)
	}
}

// run runs a shell script and fails the test where that fails.
func run(t *testing.T, h *Host, script string) string {
	t.Helper()
	out, err := h.Sh(t.Context(), script)
	if err != nil {
		t.Fatalf("host %s: %v\n%s", h.Name(), err, out)
	}
	return strings.TrimSpace(out)
}

// traffic sends bytes over a cable.
func traffic(t *testing.T, c *Cable, size int64) Traffic {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	got, err := c.Traffic(ctx, uint64(size), size)
	if err != nil {
		t.Fatalf("%s: %v\n%s", c, err, c.rig.Describe())
	}
	t.Logf("%s: %d bytes each way, %.3f Gb/s, CRC-32C %s and %s", c, got.Bytes, got.Gbps(), got.There, got.Back)
	return got
}

func TestTwoHostsOneCable(t *testing.T) {
	group(t, Pair(),
		subtest{name: "enumeration", run: testEnumeration},
		subtest{name: "discovery and properties", run: testDiscovery},
		subtest{name: "ping and TCP", run: testNetwork},
		subtest{name: "unplug and plug", run: testUnplug},
		subtest{name: "flap", run: testFlap},
		subtest{name: "bonding and speed", run: testBonding},
		subtest{name: "driver reload", run: testReload},
		subtest{name: "injected faults", run: testInjected},
		subtest{name: "scenario", run: testScenario},
		subtest{name: "crash and return", run: testCrash},
	)
}

func testEnumeration(t *testing.T, r *Rig) {
	for _, h := range r.Hosts() {
		s := h.State()
		if len(s.Domains) != 1 || s.Domains[0].Generation != 4 || s.Domains[0].Security != "user" {
			t.Errorf("host %s shows\n%s", h.Name(), s)
		}
		out := run(t, h, "lspci -n -d ::0c03; cat /sys/bus/pci/drivers/thunderbolt/0000:*/class; grep -c thunderbolt /proc/interrupts")
		for _, want := range []string{"0c03: 1d6b:4001", "0x0c0340"} {
			if !strings.Contains(out, want) {
				t.Errorf("host %s: %q is missing in\n%s", h.Name(), want, out)
			}
		}
		for line := range strings.Lines(h.Dmesg()) {
			if strings.Contains(line, "thunderbolt") && regexp.MustCompile(`fail|error|timeout|timed out|invalid`).MatchString(line) {
				t.Errorf("host %s: the driver complains: %s", h.Name(), line)
			}
		}
		n := h.Counters()
		if n.Control.BadCRC != 0 || n.Control.Malformed != 0 || n.Control.Dropped != 0 {
			t.Errorf("host %s: %+v", h.Name(), n.Control)
		}
	}
}

func testDiscovery(t *testing.T, r *Rig) {
	a, b := r.Host("a"), r.Host("b")
	for _, pair := range [][2]*Host{{a, b}, {b, a}} {
		h, far := pair[0], pair[1]
		p := h.State().Peer(h.Device(0))
		if p == nil || p.UUID != far.State().Domains[0].UUID || p.Name != far.Name() || p.Vendor != "Linux" {
			t.Fatalf("host %s shows %+v", h.Name(), p)
		}
		if len(p.Services) != 1 || p.Services[0].Key != "network" || p.Services[0].Driver != "thunderbolt-net" {
			t.Errorf("host %s shows the services %+v", h.Name(), p.Services)
		}
		out := run(t, h, "cd /sys/bus/thunderbolt/devices/"+h.Device(0)+".0; cat prtcid prtcvers prtcrevs modalias")
		if want := "1\n1\n1\ntbsvc:knetworkp00000001v00000001r00000001"; out != want {
			t.Errorf("host %s: the network service says\n%s", h.Name(), out)
		}
	}
}

func testNetwork(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	if err := c.Address(t.Context()); err != nil {
		t.Fatal(err)
	}
	out := run(t, r.Host("a"), "ping -c 5 -i 0.2 -W 10 "+c.IP(1))
	if !strings.Contains(out, "5 received, 0% packet loss") && !strings.Contains(out, "5 packets received, 0% packet loss") {
		t.Errorf("ping says\n%s", out)
	}
	before := c.Counters()
	traffic(t, c, 4<<20)
	after := c.Counters()
	for _, w := range [][2]usb4.WireCounters{{before.AtoB, after.AtoB}, {before.BtoA, after.BtoA}} {
		if n := w[1].SentBytes - w[0].SentBytes; n < 4<<20 {
			t.Errorf("%d bytes went over the cable one way, fewer than were sent", n)
		}
		if w[1].Sent != w[1].Delivered || w[1].Lost != 0 {
			t.Errorf("a perfect cable counts %+v", w[1])
		}
	}
}

func testUnplug(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	traffic(t, c, 1<<18)
	// thunderbolt_net takes ten seconds to log out from somebody who is gone.
	c.Unplug()
	r.Settled(t)
	for _, h := range r.Hosts() {
		if p := h.State().Peers(); len(p) != 0 {
			t.Fatalf("host %s still shows %+v", h.Name(), p)
		}
	}
	c.Plug()
	r.Settled(t)
	traffic(t, c, 1<<18)
}

func testFlap(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	traffic(t, c, 1<<18)
	for _, out := range []time.Duration{10 * time.Millisecond, 300 * time.Millisecond} {
		if err := c.Flap(t.Context(), out); err != nil {
			t.Fatal(err)
		}
		r.Settled(t)
		traffic(t, c, 1<<18)
	}
}

func testBonding(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	for _, o := range []usb4.CableOptions{{Lanes: 1}, {Lanes: 2, Speed: usb4.Gen2}, {}} {
		if err := c.SetOptions(o); err != nil {
			t.Fatal(err)
		}
		if err := c.Flap(t.Context(), 50*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		r.Settled(t) // compares lanes and speed
		for _, h := range r.Hosts() {
			p := h.State().Peer(h.Device(0))
			t.Logf("trained at %d lanes of %s: host %s shows %d x %g Gb/s", o.Lanes, o.Speed, h.Name(), p.RxLanes, p.RxGbps)
		}
	}
}

func testReload(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	for _, h := range r.Hosts() {
		traffic(t, c, 1<<18)
		if err := h.ReloadDriver(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.Settled(t)
	}
	traffic(t, c, 1<<18)
}

func testCrash(t *testing.T, r *Rig) {
	c, a, b := r.Cable("a.0"), r.Host("a"), r.Host("b")
	traffic(t, c, 1<<18)
	if err := b.Cut(); err != nil {
		t.Fatal(err)
	}
	r.Settled(t)
	if p := a.State().Peers(); len(p) != 0 {
		t.Fatalf("host a still shows %+v", p)
	}
	if err := b.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.Settled(t)
	traffic(t, c, 1<<18)
}

const scenario = `
seed = 3

[[step]]
do = "traffic"
cable = "a.0"
bytes = "64k"

[[step]]
do = "unplug"
cable = "b.0"
unsettled = true

[[step]]
when = "no-peer a.0"
do = "plug"
cable = "a.0"

[[step]]
do = "run"
host = "a"
run = ["cat", "/sys/bus/thunderbolt/devices/0-1/device_name"]
expect = "^b\n$"
`

// testScenario plays a scenario, and then what came of it.
func testScenario(t *testing.T, r *Rig) {
	s, err := ParseScenario("scenario", []byte(scenario))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		played, err := r.Play(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		b, err := played.Encode()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("as it was played:\n%s", b)
		for i, step := range played.Steps {
			if step.Took == 0 && step.Do != DoUnplug || step.Result == "" || i > 0 && step.At < played.Steps[i-1].At {
				t.Errorf("step %d: %+v", i+1, step)
			}
		}
		if s, err = ParseScenario("played", b); err != nil {
			t.Fatal(err)
		}
	}
	s.Steps = []Step{{Do: DoRun, Host: "a", Run: []string{"echo", "yes"}, Expect: "no"}}
	if _, err := r.Play(t.Context(), s); err == nil || !strings.Contains(err.Error(), "step 1") {
		t.Errorf("a step that fails: %v", err)
	}
}

// number reads a number from a file of a guest.
func number(t *testing.T, h *Host, file string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(run(t, h, "cat "+file), 10, 64)
	if err != nil {
		t.Fatalf("host %s: %s: %v", h.Name(), file, err)
	}
	return n
}

func testInjected(t *testing.T, r *Rig) {
	c, b := r.Cable("a.0"), r.Host("b")
	if err := c.Address(t.Context()); err != nil {
		t.Fatal(err)
	}
	statistics := "/sys/class/net/" + c.Interface(1) + "/statistics/"
	a0, _ := c.Ends()
	const every = 40
	for name, o := range map[string]usb4.WireOptions{
		"loss":    {Loss: usb4.Injection{Every: every}},
		"flagged": {CorruptFlagged: usb4.Injection{Every: every}},
		"overrun": {Overrun: usb4.Injection{Every: every}},
	} {
		before, crc, over := c.Counters().AtoB, number(t, b, statistics+"rx_crc_errors"), number(t, b, statistics+"rx_over_errors")
		if err := c.SetWire(a0, o); err != nil {
			t.Fatal(err)
		}
		traffic(t, c, 2<<20)
		if err := c.SetWire(a0, usb4.WireOptions{}); err != nil {
			t.Fatal(err)
		}
		after := c.Counters().AtoB
		sent := after.Sent - before.Sent
		if sent < 10*every {
			t.Fatalf("%s: only %d frames were sent", name, sent)
		}
		// The counting begins when the option is set, between two frames: what
		// was sent from before to after may be one injection more or less.
		expect := func(what string, got uint64, injected bool) {
			t.Helper()
			if want := sent / every; injected && (got+1 < want || got > want+1) || !injected && got != 0 {
				t.Errorf("%s: of %d frames %d are counted as %s, of every %d one injected: %v", name, sent, got, what, every, injected)
			}
		}
		expect("lost on the wire", after.Lost-before.Lost, name == "loss")
		expect("corrupted on the wire", after.CorruptedFlagged-before.CorruptedFlagged, name == "flagged")
		expect("overrun on the wire", after.Overrun-before.Overrun, name == "overrun")
		if n := number(t, b, statistics+"rx_crc_errors") - crc; n != after.CorruptedFlagged-before.CorruptedFlagged {
			t.Errorf("%s: the driver counts %d CRC errors, the cable %d", name, n, after.CorruptedFlagged-before.CorruptedFlagged)
		}
		if n := number(t, b, statistics+"rx_over_errors") - over; n != after.Overrun-before.Overrun {
			t.Errorf("%s: the driver counts %d overruns, the cable %d", name, n, after.Overrun-before.Overrun)
		}
		if after.Sent-before.Sent != after.Delivered-before.Delivered+after.Lost-before.Lost {
			t.Errorf("%s: %+v", name, after)
		}
	}
}

func TestThreeHostsInARing(t *testing.T) {
	group(t, Ring(3), subtest{name: "traffic on every cable", run: func(t *testing.T, r *Rig) {
		for _, c := range r.Cables() {
			traffic(t, c, 1<<18)
		}
	}}, subtest{name: "one cable goes, two stay", run: func(t *testing.T, r *Rig) {
		c := r.Cables()
		c[0].Unplug()
		r.Settled(t)
		traffic(t, c[1], 1<<18)
		traffic(t, c[2], 1<<18)
	}})
}

func TestTwoCablesBetweenTwoHosts(t *testing.T) {
	group(t, Pair(2), subtest{name: "traffic on both", run: func(t *testing.T, r *Rig) {
		for _, c := range r.Cables() {
			traffic(t, c, 1<<18)
		}
		first, second := r.Cables()[0].Counters(), r.Cables()[1].Counters()
		if first.AtoB.SentBytes < 1<<18 || second.AtoB.SentBytes < 1<<18 {
			t.Errorf("the bytes did not go over both cables: %+v, %+v", first.AtoB, second.AtoB)
		}
	}}, subtest{name: "one goes and comes back", run: func(t *testing.T, r *Rig) {
		c := r.Cables()
		c[1].Unplug()
		r.Settled(t)
		traffic(t, c[0], 1<<18)
		c[1].Plug()
		r.Settled(t)
		traffic(t, c[1], 1<<18)
	}}, subtest{name: "raw rings", run: testRings}, subtest{name: "rates", run: testRates})
}

// rings loads the raw ring module on all hosts.
func rings(t *testing.T, r *Rig) {
	t.Helper()
	store, err := image.Open(image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range r.Hosts() {
		dir, err := store.Modules(t.Context(), h.Spec().Kernel)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.CopyIn(t.Context(), filepath.Join(dir, "tbring.ko"), "/tmp/tbring.ko"); err != nil {
			t.Fatal(err)
		}
		run(t, h, "insmod /tmp/tbring.ko")
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, h := range r.Hosts() {
			if _, err := h.Sh(ctx, "rmmod tbring"); err != nil {
				t.Errorf("unload tbring: %v", err)
			}
		}
	})
	for _, h := range r.Hosts() {
		for _, e := range cableEnds(r, h) {
			if _, err := ring(t.Context(), h, e); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func cableEnds(r *Rig, h *Host) []int {
	var ports []int
	for _, c := range r.Cables() {
		for _, e := range c.ends() {
			if e.host == h {
				ports = append(ports, e.port)
			}
		}
	}
	return ports
}

// ring waits until the raw ring towards what is behind a port is there, and
// returns its directory.
func ring(ctx context.Context, h *Host, port int) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var dir string
	err := h.rig.Await(ctx, "wait for the raw ring of host "+h.Name(), func() string {
		p := h.State().Peer(h.Device(port))
		if p == nil {
			return "there is no peer"
		}
		for _, s := range p.Services {
			if s.Key == "tbring" && s.Driver == "tbring" {
				dir = "/sys/kernel/debug/tbring/" + s.Device
				return ""
			}
		}
		return "there is no such service"
	})
	return dir, err
}

// ringStats reads the counters of a raw ring.
func ringStats(t *testing.T, h *Host, dir string) map[string]uint64 {
	t.Helper()
	stats := map[string]uint64{}
	for line := range strings.Lines(run(t, h, "cat "+dir+"/stats")) {
		var name string
		var n uint64
		if _, err := fmt.Sscan(line, &name, &n); err != nil {
			t.Fatalf("statistics of a raw ring: %q: %v", line, err)
		}
		stats[name] = n
	}
	return stats
}

func testRings(t *testing.T, r *Rig) {
	rings(t, r)
	a, b := r.Host("a"), r.Host("b")
	for port := range 2 {
		from, err := ring(t.Context(), a, port)
		if err != nil {
			t.Fatal(err)
		}
		to, err := ring(t.Context(), b, port)
		if err != nil {
			t.Fatal(err)
		}
		const frames = 20000
		before := r.Cables()[port].Counters().AtoB
		begun := time.Now()
		run(t, a, fmt.Sprintf("echo %d 4096 >%s/send", frames, from))
		took := time.Since(begun)
		got := waitRing(t, r, b, to, frames)
		after := r.Cables()[port].Counters().AtoB
		if got["rx_frames"] != frames || got["rx_lost"] != 0 || got["rx_bad"] != 0 || got["rx_stale"] != 0 || got["rx_crc"] != 0 {
			t.Errorf("cable %d: the receiver counts %v", port, got)
		}
		if after.Sent-before.Sent < frames {
			t.Errorf("cable %d: %d frames were sent over it", port, after.Sent-before.Sent)
		}
		t.Logf("cable %d: %d frames of 4096 bytes in %v: %.2f Gb/s", port, frames, took, frames*4096*8/took.Seconds()/1e9)
	}
}

// waitRing waits until a receiver has counted all frames, or no more come.
func waitRing(t *testing.T, r *Rig, h *Host, dir string, frames uint64) map[string]uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got map[string]uint64
	err := r.Await(ctx, "wait for the frames of a raw ring", func() string {
		got = ringStats(t, h, dir)
		if n := got["rx_frames"] + got["rx_lost"] + got["rx_crc"] + got["rx_overrun"]; n < frames {
			return fmt.Sprintf("%d of %d are there: %v", n, frames, got)
		}
		return ""
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// testRates sends over both cables at once, each limited, and looks how long the
// frames took on the wire.
func testRates(t *testing.T, r *Rig) {
	rings(t, r)
	a, b := r.Host("a"), r.Host("b")
	limits := []int64{50_000_000, 100_000_000}
	type end struct{ from, to string }
	ends := make([]end, len(limits))
	for port, rate := range limits {
		if err := r.Cables()[port].SetOptions(usb4.CableOptions{WireOptions: usb4.WireOptions{Rate: rate}}); err != nil {
			t.Fatal(err)
		}
		from, err := ring(t.Context(), a, port)
		if err != nil {
			t.Fatal(err)
		}
		to, err := ring(t.Context(), b, port)
		if err != nil {
			t.Fatal(err)
		}
		ends[port] = end{from, to}
	}
	// Three seconds of frames for each, at the same time. Where the machine does
	// not let us run for longer than a wire makes up for, the wire is slower for
	// a while: then it has to be right at another time.
	const seconds, attempts = 3, 5
	for attempt := 1; ; attempt++ {
		var scripts []string
		frames := make([]uint64, len(limits))
		for port, rate := range limits {
			frames[port] = uint64(rate) * seconds / 8 / 4096
			run(t, b, "echo 1 >"+ends[port].to+"/reset")
			scripts = append(scripts, fmt.Sprintf("(echo %d 4096 >%s/send) & p%d=$!", frames[port], ends[port].from, port))
		}
		run(t, a, strings.Join(scripts, "\n")+"\nwait $p0; wait $p1")
		wrong := false
		for port, rate := range limits {
			got := waitRing(t, r, b, ends[port].to, frames[port])
			// From the first frame to the last there is one frame less than there are.
			measured := float64(got["rx_frames"]-1) * 4096 * 8 / (float64(got["rx_ns"]) / 1e9)
			off := measured/float64(rate) - 1
			t.Logf("cable %d limited to %d Mb/s: %.2f Mb/s (%+.2f %%)", port, rate/1_000_000, measured/1e6, off*100)
			wrong = wrong || off < -0.03 || off > 0.03
		}
		if !wrong {
			return
		}
		if attempt == attempts {
			t.Fatalf("the cables did not hold their rates within 3 %% in %d attempts", attempts)
		}
	}
}

// TestOtherHosts has hosts that differ: an IOMMU that translates, USB4 version
// 2, the stable kernel.
func TestOtherHosts(t *testing.T) {
	topology := Pair()
	topology.Hosts = []HostSpec{{Version: 2, IOMMU: true}, {Version: 2, Kernel: image.Stable}}
	group(t, topology,
		subtest{name: "what differs is there", run: func(t *testing.T, r *Rig) {
			a, b := r.Host("a"), r.Host("b")
			if !strings.Contains(run(t, b, "uname -r"), "6.12") {
				t.Errorf("host b runs %s", run(t, b, "uname -r"))
			}
			if out := run(t, a, "ls /sys/class/iommu; ls -d /sys/bus/pci/drivers/thunderbolt/0000:*/iommu_group"); !strings.Contains(out, "dmar") || !strings.Contains(out, "iommu_group") {
				t.Errorf("host a has no IOMMU before its router:\n%s", out)
			}
			traffic(t, r.Cable("a.0"), 4<<20)
		}},
		subtest{name: "reload of both", fresh: true, run: func(t *testing.T, r *Rig) {
			traffic(t, r.Cable("a.0"), 1<<18)
		}},
		subtest{name: "rdma_rxe and perftest", run: testRXE},
	)
}

// testRXE runs an RDMA device in software over the cable.
func testRXE(t *testing.T, r *Rig) {
	c, a, b := r.Cable("a.0"), r.Host("a"), r.Host("b")
	if err := c.Address(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, h := range []*Host{a, b} {
		run(t, h, "modprobe rdma_rxe; modprobe ib_uverbs; modprobe rdma_ucm || true; rdma link add rxe0 type rxe netdev "+c.Interface(i)+"; ibv_devinfo -d rxe0")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	// Few iterations, for it polls; messages of a page.
	const args = " -d rxe0 -x 1 -n 20 -s 4096 -F "
	for _, tool := range []string{"ib_send_bw -e", "ib_read_bw"} {
		served := make(chan error, 1)
		go func() {
			_, err := b.Sh(ctx, tool+args)
			served <- err
		}()
		out, err := a.Sh(ctx, "for i in 1 2 3 4 5 6 7 8 9 10; do "+tool+args+c.IP(1)+" && exit 0; sleep 1; done; exit 1")
		if err = errors.Join(err, <-served); err != nil {
			t.Fatalf("%s: %v\n%s", tool, err, out)
		}
		if !strings.Contains(out, "4096") {
			t.Errorf("%s says\n%s", tool, out)
		}
		t.Logf("%s:\n%s", tool, out)
	}
	for _, h := range []*Host{a, b} {
		run(t, h, "rdma link del rxe0; rmmod rdma_rxe")
	}
}

// TestWalk does random things to two hosts.
func TestWalk(t *testing.T) {
	// With one lane: the driver bonds two by waiting for five seconds.
	walk(t, seedOf(t, 6), 50, Pair().Each(func(h *HostSpec) { h.Lanes = 1 }))
}

// TestWalkLong does a thousand random things to hosts with the debug kernel, in
// runs of a hundred. TBCLUSTER_RIG_SEED is the seed of the first run (1) and
// TBCLUSTER_RIG_RUNS their number (10), to go on where an earlier one ended;
// TBCLUSTER_RIG_SUMMARY is a file to which a line for each run is added.
func TestWalkLong(t *testing.T) {
	if os.Getenv("TBCLUSTER_LONG") == "" {
		t.Skip("a long test: TBCLUSTER_LONG=1, or make test-rig-long")
	}
	runs, seed := uint64(10), seedOf(t, 1)
	if s := os.Getenv("TBCLUSTER_RIG_RUNS"); s != "" {
		var err error
		if runs, err = strconv.ParseUint(s, 10, 16); err != nil {
			t.Fatalf("TBCLUSTER_RIG_RUNS: %v", err)
		}
	}
	for i := range runs {
		topology := Pair()
		topology.Kernel = image.Debug
		if (seed+i)%4 != 0 {
			// Every fourth bonds two lanes, which takes five seconds each time.
			topology = topology.Each(func(h *HostSpec) { h.Lanes = 1 })
		}
		t.Run(fmt.Sprintf("seed %d", seed+i), func(t *testing.T) { walk(t, seed+i, 100, topology) })
	}
}

func seedOf(t *testing.T, seed uint64) uint64 {
	t.Helper()
	if s := os.Getenv("TBCLUSTER_RIG_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("TBCLUSTER_RIG_SEED: %v", err)
		}
	}
	return seed
}

func walk(t *testing.T, seed uint64, steps int, topology Topology) {
	t.Helper()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	topology.Seed = seed
	r := Start(t, topology)
	r.Settled(t)
	played, sum, err := r.Walk(t.Context(), seed, steps)
	t.Log(sum)
	if name := os.Getenv("TBCLUSTER_RIG_SUMMARY"); name != "" {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		_, err = fmt.Fprintf(f, "| %s | %v |\n", topology.Kernel, sum)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if err != nil {
		b, _ := played.Encode()
		t.Fatalf("%v\nas it was played:\n%s", err, b)
	}
}
