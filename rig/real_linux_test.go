package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// Tests of the real driver in guests. Each boots what several subtests use one
// after the other; Renew brings back what a subtest has changed. Guests mostly wait
// for their kernel to wait, so two tests at a time take half the time; those that
// measure rates have the machine for themselves.

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

// oneLane has ports of one lane: before it shows a peer, the driver takes three
// seconds more where it has two lanes to bond.
func oneLane(t Topology) Topology {
	for i := range t.Hubs {
		t.Hubs[i].Lanes = 1
	}
	return t.Each(func(h *HostSpec) { h.Lanes = 1 })
}

func TestTwoHostsOneCable(t *testing.T) {
	t.Parallel()
	group(t, oneLane(Pair()),
		subtest{name: "enumeration", run: testEnumeration},
		subtest{name: "discovery and properties", run: testDiscovery},
		subtest{name: "ping and TCP", run: testNetwork},
		subtest{name: "injected faults", run: testInjected},
		subtest{name: "unplug and plug", run: testUnplug},
		subtest{name: "flap", run: testFlap},
		subtest{name: "driver reload", run: testReload},
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
		if w[1].Sent != w[1].Delivered+w[1].InFlight || w[1].Lost != 0 {
			t.Errorf("a perfect cable counts %+v", w[1])
		}
	}
}

func testUnplug(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	traffic(t, c, 1<<18)
	// thunderbolt_net takes ten seconds to log out from somebody who is gone. Here
	// it may; other tests have their interfaces down before: see quiet.
	c.Unplug()
	r.Settled(t)
	for _, h := range r.Hosts() {
		if p := h.State().Peers(); len(p) != 0 {
			t.Fatalf("host %s still shows %+v", h.Name(), p)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := c.Traffic(ctx, 1, 1); err == nil || !strings.Contains(err.Error(), "the cable a.0 - b.0 is unplugged") {
		t.Errorf("bytes over a cable that is out: %v", err)
	}
	c.Plug()
	r.Settled(t)
	traffic(t, c, 1<<18)
}

func testFlap(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	traffic(t, c, 1<<18)
	for i, out := range []time.Duration{10 * time.Millisecond, 300 * time.Millisecond} {
		if i > 0 {
			quiet(t, c)
		}
		if err := c.Flap(t.Context(), out); err != nil {
			t.Fatal(err)
		}
		r.Settled(t)
		traffic(t, c, 1<<18)
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
	quiet(t, c) // testUnplug and walks have it up
	if err := b.Cut(); err != nil {
		t.Fatal(err)
	}
	r.Settled(t)
	if p := a.State().Peers(); len(p) != 0 {
		t.Fatalf("host a still shows %+v", p)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := c.Traffic(ctx, 1, 1); !fault.Is(err, fault.NodeDown) || !strings.Contains(err.Error(), "host b is off") {
		t.Errorf("bytes for a host that is off: %v", err)
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

[[step]]
when = "carrier b.0"
do = "traffic"
cable = "a.0"
bytes = "64k"
`

// testScenario plays a scenario, and then what came of it.
func testScenario(t *testing.T, r *Rig) {
	s, err := ParseScenario("scenario", []byte(scenario))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		quiet(t, r.Cable("a.0"))
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

// counts waits until a file of a guest has a number, and fails the test where it
// comes to have another: the last frames are still being handled, perhaps.
func counts(t *testing.T, what string, h *Host, file string, want uint64) {
	t.Helper()
	n := number(t, h, file)
	for end := time.Now().Add(patience); n < want && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		n = number(t, h, file)
	}
	if n != want {
		t.Errorf("%s: %d, not %d", what, n, want)
	}
}

// testInjected has the network driver count what was injected.
func testInjected(t *testing.T, r *Rig) {
	c, b := r.Cable("a.0"), r.Host("b")
	if err := c.Address(t.Context()); err != nil {
		t.Fatal(err)
	}
	statistics := "/sys/class/net/" + c.Interface(1) + "/statistics/"
	a0, _ := c.Ends()
	const every = 40
	for _, x := range []struct {
		name string
		wire usb4.WireOptions
	}{
		{"loss", usb4.WireOptions{Loss: usb4.Injection{Every: every}}},
		{"flagged", usb4.WireOptions{CorruptFlagged: usb4.Injection{Every: every}}},
		{"overrun", usb4.WireOptions{Overrun: usb4.Injection{Every: every}}},
		{"silent", usb4.WireOptions{Corrupt: usb4.Injection{Every: every}}},
	} {
		before, crc, over, sums := c.Counters().AtoB, number(t, b, statistics+"rx_crc_errors"), number(t, b, statistics+"rx_over_errors"), checksumErrors(t, b)
		if err := c.SetWire(a0, x.wire); err != nil {
			t.Fatal(err)
		}
		traffic(t, c, 2<<20)
		if err := c.SetWire(a0, usb4.WireOptions{}); err != nil {
			t.Fatal(err)
		}
		after := c.Counters().AtoB
		// What is judged is what crossed while the injection was on, to the frame.
		for _, e := range []struct {
			what        string
			got, judged uint64
			on          bool
		}{
			{"lost", after.Lost - before.Lost, after.Judged.Loss - before.Judged.Loss, x.wire.Loss.Every != 0},
			{"corrupted with the flag", after.CorruptedFlagged - before.CorruptedFlagged, after.Judged.CorruptFlagged - before.Judged.CorruptFlagged, x.wire.CorruptFlagged.Every != 0},
			{"overrun", after.Overrun - before.Overrun, after.Judged.Overrun - before.Judged.Overrun, x.wire.Overrun.Every != 0},
			{"corrupted", after.Corrupted - before.Corrupted, after.Judged.Corrupt - before.Judged.Corrupt, x.wire.Corrupt.Every != 0},
		} {
			if e.got != e.judged/every || e.on && e.judged < 10*every || !e.on && e.judged != 0 {
				t.Errorf("%s: %d of %d frames are %s, of every %d one injected: %v", x.name, e.got, e.judged, e.what, every, e.on)
			}
		}
		counts(t, x.name+": CRC errors that the driver counts", b, statistics+"rx_crc_errors", crc+after.CorruptedFlagged-before.CorruptedFlagged)
		counts(t, x.name+": overruns that the driver counts", b, statistics+"rx_over_errors", over+after.Overrun-before.Overrun)
		if after.Sent-before.Sent != after.Delivered+after.InFlight-before.Delivered-before.InFlight+after.Lost-before.Lost {
			t.Errorf("%s: %+v", x.name, after)
		}
		// A bit that nobody flags is found by the checksum of TCP, or it was in a
		// header and the packet is dropped for that.
		n, most := checksumErrors(t, b)-sums, after.Corrupted-before.Corrupted
		if n > most || n == 0 && most > 0 {
			t.Errorf("%s: TCP counts %d wrong checksums, the cable %d frames with a bit flipped", x.name, n, most)
		}
		if most > 0 {
			t.Logf("%s: %d frames with a bit flipped, %d found by TCP, all bytes intact", x.name, most, n)
		}
	}
}

// checksumErrors returns how many segments with a wrong checksum TCP has had.
func checksumErrors(t *testing.T, h *Host) uint64 {
	t.Helper()
	return lookUp(t, run(t, h, "cat /proc/net/snmp"), "Tcp:", "InCsumErrors")
}

// lookUp finds a number in a file of lines of names, each followed by one of
// numbers.
func lookUp(t *testing.T, text, group, name string) uint64 {
	t.Helper()
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != group {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		if i := slices.Index(names, name); i >= 0 && i < len(fields) {
			n, err := strconv.ParseUint(fields[i], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("there is no %s %s in\n%s", group, name, text)
	return 0
}

func TestThreeHostsInARing(t *testing.T) {
	t.Parallel()
	group(t, oneLane(Ring(3)), subtest{name: "traffic on every cable", run: func(t *testing.T, r *Rig) {
		for _, c := range r.Cables() {
			traffic(t, c, 1<<18)
		}
	}}, subtest{name: "one cable goes, two stay", run: func(t *testing.T, r *Rig) {
		c := r.Cables()
		quiet(t, c[0])
		c[0].Unplug()
		r.Settled(t)
		traffic(t, c[1], 1<<18)
		traffic(t, c[2], 1<<18)
	}})
}

func TestTwoCablesBetweenTwoHosts(t *testing.T) {
	group(t, oneLane(Pair(2)), subtest{name: "traffic on both", run: func(t *testing.T, r *Rig) {
		for _, c := range r.Cables() {
			traffic(t, c, 1<<18)
		}
		first, second := r.Cables()[0].Counters(), r.Cables()[1].Counters()
		if first.AtoB.SentBytes < 1<<18 || second.AtoB.SentBytes < 1<<18 {
			t.Errorf("the bytes did not go over both cables: %+v, %+v", first.AtoB, second.AtoB)
		}
	}}, subtest{name: "one goes and comes back", run: func(t *testing.T, r *Rig) {
		c := r.Cables()
		quiet(t, c[1])
		c[1].Unplug()
		r.Settled(t)
		traffic(t, c[0], 1<<18)
		c[1].Plug()
		r.Settled(t)
		traffic(t, c[1], 1<<18)
	}}, subtest{name: "raw rings", run: testRings}, subtest{name: "slow receiver", run: testSlowReceiver})
}

// testBonding trains the cable to other speeds and numbers of lanes.
func testBonding(t *testing.T, r *Rig) {
	c := r.Cable("a.0")
	for _, o := range []usb4.CableOptions{{Lanes: 2, Speed: usb4.Gen2}, {Lanes: 1}, {}} {
		if err := c.SetOptions(o); err != nil {
			t.Fatal(err)
		}
		quiet(t, c)
		if err := c.Flap(t.Context(), 50*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		r.Settled(t) // compares lanes and speed
		for _, h := range r.Hosts() {
			p := h.State().Peer(h.Device(0))
			t.Logf("trained at %d lanes of %s: after %.1f s host %s shows %d x %g Gb/s", o.Lanes, o.Speed, time.Since(begun).Seconds(), h.Name(), p.RxLanes, p.RxGbps)
		}
	}
}

// TestOtherHosts has hosts that differ: an IOMMU that translates, USB4 version
// 2 with generation 4, the stable kernel.
func TestOtherHosts(t *testing.T) {
	t.Parallel()
	topology := Pair()
	topology.Hosts = []HostSpec{{Version: 2, Speed: usb4.Gen4, IOMMU: true}, {Version: 2, Speed: usb4.Gen4, Kernel: image.Stable}}
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
		subtest{name: "bonding and speed", run: testBonding},
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
	t.Parallel()
	// Generation 4 comes up bonded; with others the driver takes one second to show
	// a peer with one lane more, and four with two.
	walk(t, seedOf(t, 6), 50, Pair().Each(func(h *HostSpec) { h.Version, h.Speed = 2, usb4.Gen4 }))
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
		topology := Pair().Each(func(h *HostSpec) { h.Allow, h.CommandLine = LinuxFaults, []string{"kasan_multi_shot"} })
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
