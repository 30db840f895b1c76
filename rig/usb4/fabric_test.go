//go:build linux

package usb4

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"tbcluster/rig/vfiouser"
)

func TestTheHostIsAUSB4Controller(t *testing.T) {
	f := fabric(t, Options{})
	h := addHost(t, f, HostOptions{Name: "a", UID: 0x1122334455667788, Ports: 2})
	d := powerOn(t, h)
	c := d.client.Read(vfiouser.RegionConfig, 0, 64)
	if got := fmt.Sprintf("%x %x %x", c[0:4], c[9:12], c[0x34]); got != "6b1d0140 40030c 40" {
		t.Errorf("IDs, class, capabilities: %s", got)
	}
	if got := d.reg(regCaps); got != 12 {
		t.Errorf("capabilities are %#x: want 12 hops, no version 2", got)
	}
	d.awaken()
	if got := d.get(spaceRouter, 0, 0, 5); got[0] != 0x40011d6b || got[1]>>8&0x3f != 5 || got[1]>>14&0x3f != 5 || got[4]>>24 != 0x20 {
		t.Errorf("router: %08x", got)
	}
	if got := d.get(spaceRouter, 0, routerUID, 2); got[0] != 0x55667788 || got[1] != 0x11223344 {
		t.Errorf("UID: %08x", got)
	}
	for n, want := range []uint32{0, typeLane, typeLane, typeLane, typeLane, typeNHI} {
		if n == 0 {
			continue
		}
		a := d.get(spaceAdapter, n, 0, 8)
		if a[adapterType] != want || a[adapterNumber]>>20&0x3f != uint32(n) {
			t.Errorf("adapter %d: %08x", n, a)
		}
		var caps []uint32
		for o := a[adapterCaps] & 0xff; o != 0; {
			v := d.get1(spaceAdapter, n, o)
			caps = append(caps, v>>8&0xff)
			o = v & 0xff
		}
		wantCaps := [][]uint32{nil, {1, 3, 6}, {1, 3}, {1, 3, 6}, {1, 3}, nil}[n]
		if !slices.Equal(caps, wantCaps) {
			t.Errorf("adapter %d has capabilities %d, want %d", n, caps, wantCaps)
		}
		if want == typeLane {
			if s := d.get1(spaceAdapter, n, laneState) >> laneStateShift & 0xf; s != stateUnplugged {
				t.Errorf("adapter %d is in state %d", n, s)
			}
		}
	}
	if credits := d.get1(spacePaths, 1, 0) >> pathCreditShift & 0x7f; credits != controlCredits {
		t.Errorf("%d control credits", credits)
	}
}

func TestTheRouterDoesWhatTheDriverNeeds(t *testing.T) {
	f := fabric(t, Options{})
	d := bring(t, addHost(t, f, HostOptions{Name: "a", Ports: 3}))
	// Router operations: buffer allocation is answered, the rest is not there.
	d.put(spaceRouter, 0, routerOp, opBufferAllocation|routerOpValid)
	if got := d.get1(spaceRouter, 0, routerOp); got&(routerOpValid|routerOpNone|0x3f<<24) != 0 {
		t.Errorf("buffer allocation: %#x", got)
	}
	if n := d.get1(spaceRouter, 0, routerMeta); n != 5 || d.get(spaceRouter, 0, routerData, n)[4] != 5|14<<16 {
		t.Errorf("buffer allocation has %d answers", n)
	}
	d.put(spaceRouter, 0, routerOp, 0x22|routerOpValid)
	if got := d.get1(spaceRouter, 0, routerOp); got&routerOpValid != 0 || got&routerOpNone == 0 {
		t.Errorf("reading NVM: %#x", got)
	}
	// Sleep is granted, and ends.
	d.change(spaceRouter, 0, routerControl, 0, routerSleep)
	if d.get1(spaceRouter, 0, routerStatus)&routerSlept == 0 {
		t.Error("it does not say that it sleeps")
	}
	d.put(spaceRouter, 0, routerEnable, routerValid)
	if d.get1(spaceRouter, 0, routerStatus)&routerSlept != 0 {
		t.Error("it still sleeps")
	}
	// Nobody answers on the sideband, so that the scan for retimers ends.
	d.put(spaceAdapter, 1, sideband, 1|4<<8|sidePending)
	if got := d.get1(spaceAdapter, 1, sideband); got&sidePending != 0 || got&sideNoResponse == 0 {
		t.Errorf("sideband: %#x", got)
	}
	// Time goes on.
	ns := func() uint64 {
		v := d.get(spaceRouter, 0, routerTMUTime, 3)
		return uint64(v[0])>>16 | uint64(v[1])<<16 | uint64(v[2])<<48
	}
	if a, b := ns(), ns(); b <= a || b-a > uint64(time.Minute) {
		t.Errorf("time goes from %d to %d ns", a, b)
	}
	// Read-only registers stay.
	before := d.get(spaceRouter, 0, 0, 9)
	d.put(spaceRouter, 0, 0, 1)
	d.put(spaceRouter, 0, routerUID, 1, 2)
	d.put(spaceAdapter, 1, adapterType, 0)
	if after := d.get(spaceRouter, 0, 0, 9); !slices.Equal(after, before) || d.get1(spaceAdapter, 1, adapterType) != typeLane {
		t.Errorf("router %08x became %08x", before, after)
	}
}

func TestErrorsOfTheControlChannel(t *testing.T) {
	f := fabric(t, Options{})
	a, b := addHost(t, f, HostOptions{Name: "a", Ports: 2}), addHost(t, f, HostOptions{Name: "b"})
	connect(t, a.Port(0), b.Port(0), CableOptions{})
	d := bring(t, a)
	bring(t, b)
	d.event(0, true)
	d.change(spaceAdapter, 1, adapterBuffers, adapterLocked, 0)
	for name, c := range map[string]struct {
		route   uint64
		s       space
		adapter int
		offset  uint32
		length  uint32
		code    uint32
		port    int
	}{
		"behind the end":             {0, spaceRouter, 0, routerSize - 1, 2, errorSpace, 0},
		"too long":                   {0, spaceRouter, 0, 0, 61, errorSpace, 0},
		"no such adapter":            {0, spaceAdapter, 9, 0, 1, errorNoPort, 9},
		"the control adapter":        {0, spaceAdapter, 0, 0, 1, errorSpace, 0},
		"paths of lane 1":            {0, spacePaths, 2, 0, 2, errorSpace, 2},
		"behind the paths":           {0, spacePaths, 1, 2 * lanePaths, 2, errorSpace, 1},
		"the host of another domain": {1, spaceRouter, 0, 0, 1, errorNoPort, 1},
		"behind an empty port":       {3, spaceRouter, 0, 0, 1, errorNotConnected, 3},
		"behind lane 1":              {2, spaceRouter, 0, 0, 1, errorNoPort, 2},
		"behind the host interface":  {5, spaceRouter, 0, 0, 1, errorNoPort, 5},
	} {
		p := d.ask(packetRead, c.route, c.s, c.adapter, c.offset, c.length)
		if p.kind != packetError || p.words[2]&0xff != c.code || int(p.words[2]>>8&0x3f) != c.port || p.words[0]>>31 != 1 {
			t.Errorf("%s: %s", name, p.describe(false))
		}
	}
	d.change(spaceAdapter, 1, adapterBuffers, 0, adapterLocked)
	if p := d.ask(packetRead, 1, spaceRouter, 0, 0, 1); p.kind != packetError || p.words[2]&0xff != errorLocked {
		t.Errorf("through a locked port: %s", p.describe(false))
	}
	// A wrong CRC is no packet at all; what follows is.
	copy(d.tx.bytes[d.tx.head], bytes.Repeat([]byte{1}, 16))
	d.tx.post(16, 1, 1)
	if d.get1(spaceRouter, 0, routerIDs) != 0x40011d6b {
		t.Error("no answer after a bad packet")
	}
	if c := f.Counters().Hosts[0].Control; c.BadCRC != 1 || c.Errors != 11 {
		t.Errorf("counters: %+v", c)
	}
}

func TestPlugAndUnplug(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	state := func(d *driver) uint32 { return d.get1(spaceAdapter, 1, laneState) >> laneStateShift & 0xf }
	for i := range 3 {
		if !c.Up() || state(a) != stateUp || state(b) != stateUp {
			t.Fatalf("round %d: plugged: up %v, states %d %d", i, c.Up(), state(a), state(b))
		}
		c.Unplug()
		a.event(0, false)
		b.event(0, false)
		if c.Up() || state(a) != stateUnplugged || state(b) != stateUnplugged {
			t.Fatalf("round %d: unplugged: up %v, states %d %d", i, c.Up(), state(a), state(b))
		}
		c.Plug()
		a.event(0, true)
		b.event(0, true)
	}
	c.Plug() // it is
	state(a) // the acknowledgements have arrived
	state(b)
	for _, h := range f.Counters().Hosts {
		if p := h.Ports[0]; p.Plugs != 4 || p.Unplugs != 3 || h.Control.Acks != 7 {
			t.Errorf("%s: %d plugs, %d unplugs, %d acknowledged", h.Name, p.Plugs, p.Unplugs, h.Control.Acks)
		}
	}
	if err := c.Flap(context.Background(), time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for _, d := range []*driver{a, b} {
		d.event(0, false)
		d.event(0, true)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Flap(ctx, time.Hour); !errors.Is(err, context.Canceled) || !c.Plugged() {
		t.Errorf("a flap that was called off: %v, plugged %v", err, c.Plugged())
	}
}

func TestAnEventIsRepeatedUntilItIsAcknowledged(t *testing.T) {
	f := fabric(t, Options{})
	ha, hb := addHost(t, f, HostOptions{Name: "a"}), addHost(t, f, HostOptions{Name: "b"})
	a, _ := bring(t, ha), bring(t, hb)
	c := connect(t, ha.Port(0), hb.Port(0), CableOptions{})
	a.eventUnanswered(0, true)
	c.Unplug() // while the plug is not acknowledged: it is heard of only after that
	a.eventUnanswered(0, true)
	a.event(0, true)
	a.event(0, false)
	c.Plug()
	a.event(0, true)
}

func TestAFlapThatTheDriverSleepsThroughIsToldWhole(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	a.sleep()
	c.Unplug()
	c.Plug()
	b.event(0, false)
	b.event(0, true)
	c.Unplug() // the second time it is not told of the plug in between
	b.event(0, false)
	c.Plug()
	b.event(0, true)
	a.awaken()
	a.event(0, false)
	a.event(0, true)
	if got := f.Counters().Hosts[0].Ports[0]; got.Plugs != 2 || got.Unplugs != 1 {
		t.Errorf("%d plugs, %d unplugs", got.Plugs, got.Unplugs)
	}
}

func TestTheSleepingFunctionIsWoken(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	c.Unplug()
	a.event(0, false)
	b.event(0, false)
	status := func() uint16 {
		return binary.LittleEndian.Uint16(a.client.Read(vfiouser.RegionConfig, pmControl, 2))
	}
	a.change(spaceAdapter, 1, portCtl, 0, portWakePlug)
	a.sleep()
	a.client.Write(vfiouser.RegionConfig, pmControl, []byte{pmD3, pmEnable >> 8})
	if got := status(); got != pmD3|pmEnable|pmNoReset {
		t.Fatalf("asleep, the status is %#x", got)
	}
	c.Plug()
	b.event(0, true)
	if got := status(); got&pmStatus == 0 {
		t.Fatalf("plugged, the status is %#x", got)
	}
	a.client.Write(vfiouser.RegionConfig, pmControl, []byte{0, pmStatus >> 8})
	if got := status(); got != pmNoReset {
		t.Fatalf("awake, the status is %#x", got)
	}
	a.awaken()
	a.event(0, true)
}

// xdomain exchanges a request and a response between two drivers.
func xdomain(t *testing.T, from, to *driver, port, peer int) {
	t.Helper()
	route, back := uint64(from.host.ports[port].Adapter()), uint64(to.host.ports[peer].Adapter())
	request := newPacket(packetXDomainRequest, 0, uint32(route), 5|1<<27, uuidXDP, 2, 3, 4, 12)
	from.send(request)
	got := to.receive("an XDomain request", func(p *packet) bool { return p.kind == packetXDomainRequest })
	if got.words[0] != fromRouter || uint64(got.words[1]) != back || !slices.Equal(got.words[2:got.n], request.words[2:request.n]) {
		t.Fatalf("the request arrived as %08x", got.words[:got.n])
	}
	to.send(newPacket(packetXDomainResponse, 0, got.words[1], 5|1<<27, uuidXDP, 2, 3, 4, 2, 9, 9, 9, 9))
	answer := from.receive("an XDomain response", func(p *packet) bool { return p.kind == packetXDomainResponse })
	if uint64(answer.words[1]) != route || answer.n != 12 || answer.words[11] != 9 {
		t.Fatalf("the response arrived as %08x", answer.words[:answer.n])
	}
}

func TestDomainsTalk(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	xdomain(t, a, b, 0, 0)
	xdomain(t, b, a, 0, 0)
	if k := c.Counters(); k.AtoB.Control != 2 || k.BtoA.Control != 2 {
		t.Errorf("%d and %d control packets", k.AtoB.Control, k.BtoA.Control)
	}
	// Nobody is there, and nobody answers.
	c.Unplug()
	a.event(0, false)
	a.send(newPacket(packetXDomainRequest, 0, 1, 5, uuidXDP, 2, 3, 4, 12))
	a.get1(spaceRouter, 0, 0)
	if got := f.Counters().Hosts[0].Control; got.XDomain != 2 || got.Dropped != 1 {
		t.Errorf("%d sent on, %d dropped", got.XDomain, got.Dropped)
	}
}

// A driver that has just answered gets answers of others a while later, and
// requests at once.
func TestAnswersThatCrossAreKeptApart(t *testing.T) {
	clock, a, b, _ := byHand(t, CableOptions{})
	say := func(d *driver, kind packetType, n uint32) {
		d.send(newPacket(kind, 0, 1, 4, uuidXDP, 2, 3, 4, 2, n))
		d.settled()
	}
	hears := func(d *driver, what string, kind packetType, n uint32) {
		t.Helper()
		if p := d.receive(what, func(p *packet) bool { return p.kind == kind }); p.words[8] != n {
			t.Fatalf("%s is number %d, not %d", what, p.words[8], n)
		}
	}
	silence := func(d *driver, what string) {
		t.Helper()
		d.get1(spaceRouter, 0, 0) // its own router answers
		if len(d.seen) != 0 {
			t.Fatalf("%s: it came: %s", what, d.describe())
		}
	}
	say(a, packetXDomainResponse, 1)
	hears(b, "the first answer", packetXDomainResponse, 1)
	say(b, packetXDomainResponse, 2)
	silence(a, "an answer to who has just answered")
	say(b, packetXDomainRequest, 3)
	hears(a, "a request", packetXDomainRequest, 3)
	say(b, packetXDomainResponse, 4)
	clock.advance(answerGap - 1)
	silence(a, "too early")
	clock.advance(1)
	hears(a, "the late answer", packetXDomainResponse, 2)
	hears(a, "the one after it", packetXDomainResponse, 4)
	clock.advance(answerGap)
	// Who answers all the time gets one all the same.
	say(a, packetXDomainResponse, 5)
	say(b, packetXDomainResponse, 6)
	for waited := time.Duration(0); waited < lateAtMost; waited += answerGap / 2 {
		silence(a, "it answers still")
		clock.advance(answerGap / 2)
		say(a, packetXDomainResponse, 7)
	}
	hears(a, "after the longest wait", packetXDomainResponse, 6)
	// What waits when the driver starts anew is lost.
	say(b, packetXDomainResponse, 8)
	a.host.Reset()
	f := a.host.fabric
	f.lock()
	defer f.unlock()
	if len(a.host.control.late) != 0 || a.host.control.answer.index >= 0 {
		t.Error("an answer waits for a driver that is gone")
	}
}

func TestPacketsBetweenDomainsAreHeld(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	release := c.Hold()
	again := c.Hold()
	for i := range uint32(3) {
		a.send(newPacket(packetXDomainRequest, 0, 1, 4, uuidXDP, 2, 3, 4, 12, i))
	}
	a.settled()
	b.get1(spaceRouter, 0, 0) // its own router answers
	if len(b.seen) != 0 {
		t.Errorf("it came: %s", b.describe())
	}
	release()
	release()
	b.get1(spaceRouter, 0, 0)
	if len(b.seen) != 0 {
		t.Errorf("it came when one of two let it go: %s", b.describe())
	}
	again()
	for i := range uint32(3) {
		if p := b.receive("what was held", func(p *packet) bool { return p.kind == packetXDomainRequest }); p.words[8] != i {
			t.Errorf("packet %d came as number %d", p.words[8], i)
		}
	}
	// What was on its way when the cable was pulled is lost.
	release = c.Hold()
	a.send(newPacket(packetXDomainRequest, 0, 1, 4, uuidXDP, 2, 3, 4, 12, 9))
	a.settled()
	c.Unplug()
	release()
	b.event(0, false)
	b.get1(spaceRouter, 0, 0)
	if len(b.seen) != 0 {
		t.Errorf("it came out of a cable that was pulled: %s", b.describe())
	}
}

func TestThreeHostsInARing(t *testing.T) {
	f := fabric(t, Options{})
	var hosts []*Host
	for _, n := range []string{"a", "b", "c"} {
		hosts = append(hosts, addHost(t, f, HostOptions{Name: n, Ports: 2}))
	}
	var cables []*Cable
	for i := range hosts {
		cables = append(cables, connect(t, hosts[i].Port(1), hosts[(i+1)%3].Port(0), CableOptions{}))
	}
	var drivers []*driver
	for _, h := range hosts {
		drivers = append(drivers, bring(t, h))
	}
	for _, d := range drivers {
		d.event(0, true)
		d.event(1, true)
	}
	for i, d := range drivers {
		next := drivers[(i+1)%3]
		xdomain(t, d, next, 1, 0)
		xdomain(t, next, d, 0, 1)
	}
	var streams []stream
	for i, d := range drivers {
		streams = append(streams, streamOver(cables[i], d, drivers[(i+1)%3], 1, 64, optionE2E))
	}
	for i, s := range streams {
		exchange(t, fmt.Sprintf("cable %d", i), s, 500, 4096)
	}
	for _, c := range cables {
		if k := c.Counters(); k.AtoB.Delivered != 500 || k.BtoA.Delivered != 0 {
			t.Errorf("%s: %d frames one way, %d the other", c, k.AtoB.Delivered, k.BtoA.Delivered)
		}
	}
}

// exchange sends frames over a stream and checks each that arrives: all of
// them, in order, with their content.
func exchange(t testing.TB, what string, s stream, count, size int) {
	t.Helper()
	want := make([]byte, size)
	s.rx.fill()
	s.rx.d.settled()
	for sent, got := 0, 0; got < count; {
		for s.tx.room() > 0 && sent < count {
			s.post(sent, size)
			sent++
		}
		s.tx.doorbell()
		f := s.rx.next()
		for ok := true; ok; f, ok = s.rx.completed() {
			pattern(want, got)
			if !bytes.Equal(f.bytes, want) || f.sof != frameSOF || f.eof != frameEOF || f.flags != descCompleted {
				t.Fatalf("%s: frame %d has %d bytes, starts %x, sof %d eof %d flags %#x", what, got, len(f.bytes), f.bytes[:min(8, len(f.bytes))], f.sof, f.eof, f.flags)
			}
			got++
		}
		s.rx.fill()
		for _, ok := s.tx.completed(); ok; _, ok = s.tx.completed() {
		}
	}
	for s.tx.tail != s.tx.head {
		s.tx.next()
	}
}

func TestFramesCross(t *testing.T) {
	for _, size := range []int{16, 256, 4095, 4096} {
		for _, options := range []uint32{0, optionE2E} {
			t.Run(fmt.Sprintf("%d bytes, options %#x", size, options), func(t *testing.T) {
				f := fabric(t, Options{})
				a, b, c := two(t, f, HostOptions{}, CableOptions{})
				ab, ba := streamOver(c, a, b, 1, 64, options), streamOver(c, b, a, 1, 64, options)
				n := 1000
				if options == 0 {
					n = 60 // without flow control, no more than there are buffers
				}
				exchange(t, "a to b", ab, n, size)
				exchange(t, "b to a", ba, n, size)
				k := f.Counters()
				if r := k.Hosts[0].TX[1]; r.Frames != uint64(n) || r.Bytes != uint64(n*size) || r.Interrupts == 0 {
					t.Errorf("transmit ring: %+v", r)
				}
				if r := k.Hosts[1].RX[1]; r.Frames != uint64(n) || r.Bytes != uint64(n*size) || r.Interrupts == 0 || r.Dropped.Total() != 0 {
					t.Errorf("receive ring: %+v", r)
				}
				if w := k.Cables[0].AtoB; w.Sent != uint64(n) || w.Delivered != uint64(n) || w.DeliveredBytes != uint64(n*size) {
					t.Errorf("cable: %+v", w)
				}
				if p := k.Hosts[0].Ports[0]; p.OutFrames != uint64(n) || p.InFrames != uint64(n) || p.OutBytes != uint64(n*size) {
					t.Errorf("port: %+v", p)
				}
				found := 0
				for _, p := range k.Hosts[0].Paths {
					if p.Enabled && p.Frames == uint64(n) && p.Bytes == uint64(n*size) {
						found++
					}
				}
				if found != 2 {
					t.Errorf("paths of a: %+v", k.Hosts[0].Paths)
				}
			})
		}
	}
}

func TestPathCountersAreInTheirSpace(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 16, optionE2E)
	hop := b.get(spacePaths, 1, 2*9, 2)
	b.put(spacePaths, 1, 2*9, hop[0], hop[1]|3<<pathCounterNum|pathCounter)
	exchange(t, "counted", s, 20, 100)
	if got := b.get(spaceCounters, 1, 3*setSize, setSize); got[0] != 20 || got[1] != 0 || got[2] != 0 {
		t.Errorf("counters: %d", got)
	}
	b.put(spaceCounters, 1, 3*setSize, 0)
	if got := b.get1(spaceCounters, 1, 3*setSize); got != 0 {
		t.Errorf("cleared, it is %d", got)
	}
}

func TestWithoutBuffersFramesWaitOrAreLost(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	held, loose := streamOver(c, a, b, 1, 32, optionE2E), streamOver(c, a, b, 2, 32, 0)
	for i := range 10 {
		held.post(i, 512)
		loose.post(i, 512)
	}
	held.tx.doorbell()
	loose.tx.doorbell()
	a.settled()
	k := f.Counters().Hosts
	if r := k[0].TX[1]; r.Frames != 0 || r.Held != 1 {
		t.Errorf("with flow control: %+v", r)
	}
	if r := k[0].TX[2]; r.Frames != 10 {
		t.Errorf("without: %+v", r)
	}
	if r := k[1].RX[2]; r.Dropped.NoBuffer != 10 || r.Frames != 0 {
		t.Errorf("without: %+v", r)
	}
	if got := b.reg(regNotify); got>>(24+2)&1 != 1 {
		t.Errorf("the overflow of ring 2 is not in the status %#x", got)
	}
	// Buffers, three at a time, let as many frames come.
	for n := range 3 {
		for range 3 {
			held.rx.post(0, 0, 0)
		}
		held.rx.doorbell()
		for i := range 3 {
			if got := held.rx.next(); binary.LittleEndian.Uint32(got.bytes) != uint32(3*n+i) {
				t.Fatalf("frame %d is %d", 3*n+i, binary.LittleEndian.Uint32(got.bytes))
			}
		}
		b.settled()
		if r := f.Counters().Hosts[0].TX[1]; r.Frames != uint64(3*n+3) {
			t.Errorf("after %d buffers %d frames are sent", 3*n+3, r.Frames)
		}
	}
	// A receiver without flow control never grants the sender anything.
	b.write(regRXOptions+32, optionEnable)
	held.rx.fill()
	b.settled()
	if r := f.Counters().Hosts[0].TX[1]; r.Frames != 9 {
		t.Errorf("%d frames are sent to a ring without flow control", r.Frames)
	}
}

func TestCausesOfLossAreCountedApart(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 64, 0)
	s.rx.fill()
	b.settled()
	drops := func() (sender, receiver Drops) {
		k := f.Counters().Hosts
		return k[0].TX[1].Dropped, k[1].RX[1].Dropped
	}
	send := func(sof, eof uint32) {
		t.Helper()
		pattern(s.tx.bytes[s.tx.head][:64], 1)
		s.tx.post(64, sof, eof)
		s.tx.doorbell()
		s.tx.next() // sent, whatever became of it
	}
	send(frameSOF, 7)
	send(7, frameEOF)
	if _, got := drops(); got != (Drops{PDF: 2}) {
		t.Errorf("with a PDF that is not taken: %+v", got)
	}
	b.change(spacePaths, 1, 2*9, pathEnable, 0)
	send(frameSOF, frameEOF)
	if got, _ := drops(); got != (Drops{NoPath: 1}) {
		t.Errorf("without a path there: %+v", got)
	}
	b.change(spacePaths, 1, 2*9, 0, pathEnable)
	a.change(spacePaths, 3, 2, pathEnable, 0)
	send(frameSOF, frameEOF)
	if got, _ := drops(); got != (Drops{NoPath: 2}) {
		t.Errorf("without a path here: %+v", got)
	}
	a.change(spacePaths, 3, 2, 0, pathEnable)
	b.write(regRXOptions+32, 0)
	b.settled()
	send(frameSOF, frameEOF)
	if got, _ := drops(); got != (Drops{NoPath: 2, RingOff: 1}) {
		t.Errorf("to a ring that is off: %+v", got)
	}
	b.write(regRXOptions+32, optionEnable)
	b.settled()
	s.tx.buffers[s.tx.head] = 0x10
	s.tx.post(64, frameSOF, frameEOF)
	s.tx.doorbell()
	s.tx.next()
	if got, _ := drops(); got != (Drops{NoPath: 2, RingOff: 1, DMA: 1}) {
		t.Errorf("from memory that is not there: %+v", got)
	}
	c.Unplug()
	send(frameSOF, frameEOF)
	if got, _ := drops(); got != (Drops{NoPath: 2, RingOff: 1, DMA: 1, LinkDown: 1}) || got.Total() != 5 {
		t.Errorf("over a cable that is not in: %+v", got)
	}
}

func TestAFrameThatDoesNotFitOverruns(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 16, 0)
	b.write(regRXRing+16+ringSize, 16|512<<16)
	s.rx.fill()
	b.settled()
	s.post(0, 1000)
	s.tx.doorbell()
	got := s.rx.next()
	want := make([]byte, 1000)
	pattern(want, 0)
	if got.flags != descCompleted|descOverrun || !bytes.Equal(got.bytes, want[:512]) {
		t.Errorf("%d bytes, flags %#x", len(got.bytes), got.flags)
	}
	if r := f.Counters().Hosts[1].RX[1]; r.Overruns != 1 || r.Bytes != 512 {
		t.Errorf("%+v", r)
	}
}

func TestLanesAreBonded(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{Lanes: 2}, CableOptions{})
	lane := func(d *driver, n int) (state, width, speed uint32) {
		s := d.get1(spaceAdapter, n, laneState)
		return s >> laneStateShift & 0xf, s >> laneWidthShift & 0x3f, s >> laneSpeedShift & 0xf
	}
	check := func(what string, wantState1, wantWidth uint32) {
		t.Helper()
		for _, d := range []*driver{a, b} {
			if s, w, v := lane(d, 1); s != stateUp || w != wantWidth || v != 4 {
				t.Errorf("%s: %s lane 0: state %d width %d speed %d", what, d.host.name, s, w, v)
			}
			if s, _, _ := lane(d, 2); s != wantState1 {
				t.Errorf("%s: %s lane 1: state %d", what, d.host.name, s)
			}
		}
	}
	check("plugged", stateUp, widthSingle)
	dual := func(d *driver, n int) { d.change(spaceAdapter, n, laneState, laneTargetMask, laneTargetDual) }
	// The one with the higher UUID sets its widths, the other one bonds.
	dual(b, 2)
	dual(b, 1)
	check("one end is set", stateUp, widthSingle)
	dual(a, 1)
	dual(a, 2)
	check("both ends are set", stateUp, widthSingle)
	a.change(spaceAdapter, 1, laneState, 0, laneBond)
	check("bonded", stateUp, widthDual)
	if v := a.get1(spaceAdapter, 1, laneState); v&laneBond != 0 {
		t.Error("the request to bond stays")
	}
	c.Unplug()
	a.event(0, false)
	b.event(0, false)
	c.Plug()
	a.event(0, true)
	b.event(0, true)
	check("plugged again", stateUp, widthSingle)
	// Lane 1 is switched off at one end, and on again.
	a.change(spaceAdapter, 2, laneState, 0, laneDisable)
	if s, _, _ := lane(a, 2); s != stateDisabled {
		t.Errorf("off, it is in state %d", s)
	}
	if s, _, _ := lane(b, 2); s != stateUnplugged {
		t.Errorf("at the other end it is in state %d", s)
	}
	a.change(spaceAdapter, 2, laneState, laneDisable, 0)
	check("on again", stateUp, widthSingle)
	// A cable that comes up slower and with one lane.
	if err := c.SetOptions(CableOptions{Lanes: 1, Speed: Gen2}); err != nil {
		t.Fatal(err)
	}
	if err := c.Flap(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	for _, d := range []*driver{a, b} {
		d.event(0, false)
		d.event(0, true)
		if s, w, v := lane(d, 1); s != stateUp || w != widthSingle || v != 8 {
			t.Errorf("%s lane 0: state %d width %d speed %d", d.host.name, s, w, v)
		}
		if s, _, _ := lane(d, 2); s != stateUnplugged {
			t.Errorf("%s lane 1: state %d", d.host.name, s)
		}
	}
}

func TestGeneration4ComesUpBonded(t *testing.T) {
	f := fabric(t, Options{})
	a, _, _ := two(t, f, HostOptions{Version: 2, Speed: Gen4}, CableOptions{})
	if s := a.get1(spaceAdapter, 1, laneState); s>>laneWidthShift&0x3f != widthDual || s>>laneSpeedShift&0xf != 2 {
		t.Errorf("lane state %#x", s)
	}
	if a.get1(spaceAdapter, 1, portInfo)&portBonded == 0 {
		t.Error("the port does not say that it is bonded")
	}
}

func TestADownstreamPortResetIsAnUnplugForTheOther(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	a.change(spaceAdapter, 1, portCtl, 0, portReset)
	b.event(0, false)
	if c.Up() {
		t.Error("the link is up")
	}
	a.change(spaceAdapter, 1, portCtl, portReset, 0)
	a.event(0, true)
	b.event(0, true)
	if got := f.Counters().Hosts[0].Ports[0].Unplugs; got != 0 {
		t.Errorf("the one that resets is told of %d unplugs", got)
	}
}

func TestVersion2IsReset(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{Version: 2}, CableOptions{})
	if got := a.reg(regCaps); got != 12|capsVersion2 {
		t.Fatalf("capabilities %#x", got)
	}
	s := streamOver(c, a, b, 1, 16, optionE2E)
	exchange(t, "before", s, 30, 100)
	a.write(regReset, resetHost)
	if a.reg(regReset) != resetHost {
		t.Error("the reset is over at once")
	}
	b.event(0, false)
	for deadline := time.Now().Add(patience); a.reg(regReset) != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the reset does not end")
		}
	}
	if a.reg(regTXOptions) != 0 || a.reg(regEnable) != 0 || a.reg(regTXRing+16) != 0 {
		t.Error("rings are still there")
	}
	if c.Up() {
		t.Error("the link is up before the driver is")
	}
	a.vector = 0
	a.awaken()
	a.enumerate()
	a.event(0, true)
	b.event(0, true)
	if p := f.Counters().Hosts[0].Paths; slices.ContainsFunc(p, func(p PathCounters) bool { return p.Enabled }) {
		t.Errorf("paths are still there: %+v", p)
	}
	// A reset of version 1 does not exist.
	h := addHost(t, f, HostOptions{Name: "old"})
	d := powerOn(t, h)
	d.write(regReset, resetHost)
	if d.reg(regReset) != 0 || f.Counters().Hosts[2].Resets != 0 {
		t.Error("version 1 was reset")
	}
}

func TestADriverThatIsUnloadedLeavesTheLinkUp(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	a.sleep()
	if !c.Up() || a.host.Awake() {
		t.Errorf("link up %v, driver awake %v", c.Up(), a.host.Awake())
	}
	b.get1(spaceRouter, 0, 0)
	if len(b.seen) != 0 {
		t.Errorf("the other end hears%s", b.describe())
	}
	a.vector = 0
	a.awaken()
	a.get1(spaceRouter, 0, 0)
	xdomain(t, a, b, 0, 0)
}

func TestAHostThatLosesPowerIsUnplugged(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, b, a, 1, 64, optionE2E)
	for i := range 20 {
		s.post(i, 100)
	}
	s.tx.doorbell() // held: a has given no buffers
	b.settled()
	changed := f.Changed()
	a.powerOff()
	<-changed
	b.event(0, false)
	for range 20 {
		s.tx.next() // lost, and so done
	}
	if c.Up() || a.host.Attached() {
		t.Error("it is still there")
	}
	if got := f.Counters().Hosts[1].TX[1].Dropped; got.LinkDown != 20 {
		t.Errorf("dropped: %+v", got)
	}
	a = bring(t, a.host)
	a.event(0, true)
	b.event(0, true)
	xdomain(t, b, a, 0, 0)
	if got := f.Counters().Hosts[0].Attached; got != 2 {
		t.Errorf("%d machines have come", got)
	}
}

// The kernel's DMA test sends, stops the ring and takes the path away without
// waiting for anything.
func TestWhatWasSentBeforeARingWasStoppedIsSent(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 64, 0)
	s.rx.fill()
	b.settled()
	var burst [][2]uint32
	for i := range 20 {
		s.post(i, 64)
		burst = append(burst, [2]uint32{regTXRing + 16 + ringIndices, s.tx.head << 16})
	}
	a.client.Multi(vfiouser.RegionBAR0, append(burst, [2]uint32{regTXOptions + 32, 0})...)
	a.settled()
	if r := f.Counters().Hosts[1].RX[1]; r.Frames != 20 {
		t.Errorf("stopped: %d of 20 frames have come", r.Frames)
	}
	// The same with the packet that takes the path away.
	s = streamOver(c, a, b, 2, 64, 0)
	s.rx.fill()
	b.settled()
	for i := range 20 {
		s.post(i, 64)
	}
	p := newPacket(packetWrite, 0, 0, accessWord(spacePaths, 3, 4, 1), 0)
	raw := p.append(nil)
	copy(a.tx.bytes[a.tx.head], raw)
	a.tx.post(len(raw), 2, 2)
	a.client.Multi(vfiouser.RegionBAR0, [2]uint32{regTXRing + 32 + ringIndices, s.tx.head << 16}, [2]uint32{regTXRing + ringIndices, a.tx.head << 16})
	a.settled()
	if r := f.Counters().Hosts[1].RX[2]; r.Frames != 20 {
		t.Errorf("path taken away: %d of 20 frames have come", r.Frames)
	}
}

func TestTwoCablesBetweenTwoHosts(t *testing.T) {
	f := fabric(t, Options{})
	ha, hb := addHost(t, f, HostOptions{Name: "a", Ports: 2}), addHost(t, f, HostOptions{Name: "b", Ports: 2})
	// Crosswise, so that a mistake shows.
	c := []*Cable{connect(t, ha.Port(0), hb.Port(1), CableOptions{}), connect(t, ha.Port(1), hb.Port(0), CableOptions{})}
	a, b := bring(t, ha), bring(t, hb)
	for i := range 2 {
		a.event(i, true)
		b.event(i, true)
	}
	xdomain(t, a, b, 0, 1)
	xdomain(t, a, b, 1, 0)
	s := []stream{streamOver(c[0], a, b, 1, 32, optionE2E), streamOver(c[1], a, b, 2, 32, optionE2E)}
	exchange(t, "cable 0", s[0], 100, 300)
	exchange(t, "cable 1", s[1], 200, 300)
	c[0].Unplug()
	a.event(0, false)
	b.event(1, false)
	exchange(t, "cable 1 alone", s[1], 100, 300)
	k := f.Counters().Cables
	if k[0].AtoB.Delivered != 100 || k[1].AtoB.Delivered != 300 || k[0].Up || !k[1].Up {
		t.Errorf("%+v", k)
	}
}

func TestAHostMayBeConnectedToItself(t *testing.T) {
	f := fabric(t, Options{})
	h := addHost(t, f, HostOptions{Name: "a", Ports: 2})
	c := connect(t, h.Port(0), h.Port(1), CableOptions{})
	d := bring(t, h)
	d.event(0, true)
	d.event(1, true)
	xdomain(t, d, d, 0, 1)
	exchange(t, "loop", streamOver(c, d, d, 1, 32, optionE2E), 500, 4096)
}

func TestWithoutBusMasteringNothingMoves(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 16, optionE2E)
	s.rx.fill()
	b.settled()
	a.client.Write(vfiouser.RegionConfig, pciCommand, []byte{2, 0})
	s.post(0, 100)
	s.tx.doorbell()
	a.settled()
	if got := f.Counters().Hosts[0].TX[1].Frames; got != 0 {
		t.Errorf("%d frames were sent", got)
	}
	a.client.Write(vfiouser.RegionConfig, pciCommand, []byte{6, 0})
	s.rx.next()
}

func TestInterruptsComeTogetherAndAreThrottled(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 64, 0)
	s.rx.fill()
	b.settled()
	send := func() {
		s.post(0, 16)
		s.tx.doorbell()
		a.settled()
	}
	came := func() uint64 { return f.Counters().Hosts[1].Interrupts[s.rx.vector] }
	for i := range 3 {
		s.post(i, 16)
	}
	s.tx.doorbell()
	a.settled()
	if n := came(); n != 1 || s.rx.irq.Wait(patience) != 1 {
		t.Errorf("three frames at once: %d interrupts", n)
	}
	send() // the status is not cleared, and yet it interrupts
	if n := came(); n != 2 || s.rx.irq.Wait(patience) != 1 {
		t.Errorf("one more frame: %d interrupts", n)
	}
	// Disabled: the status is set, and interrupts when it is enabled again.
	b.write(regClear, s.rx.bit())
	b.write(regMask, s.rx.bit())
	b.settled()
	send()
	if n := came(); n != 2 {
		t.Errorf("disabled: %d interrupts", n)
	}
	b.modify(regEnable, 0, s.rx.bit())
	b.settled()
	if n := came(); n != 3 || s.rx.irq.Wait(patience) != 1 {
		t.Errorf("enabled again: %d interrupts", n)
	}
	// Throttled to one in 50 ms: the first comes at once, the others with the
	// end of the interval.
	b.write(regClear, s.rx.bit())
	const interval = 16 * time.Millisecond // what 16 bits of 256 ns can say
	b.write(regThrottle+4*uint32(s.rx.vector), uint32(interval/throttleNanos))
	b.settled()
	start := time.Now()
	for range 5 {
		send()
		b.write(regClear, s.rx.bit())
		b.settled()
	}
	sent := time.Since(start)
	if s.rx.irq.Wait(patience) == 0 {
		t.Fatal("no interrupt")
	}
	for deadline := time.Now().Add(patience); came() < 5; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d interrupts", came())
		}
	}
	took := time.Since(start)
	if most := 4 + uint64(took/interval) + 1; came() > most || f.Counters().Hosts[1].Throttled == 0 || sent < interval && took < interval {
		t.Errorf("%d interrupts in %v, sent in %v", came(), took, sent)
	}
}

func TestBuffersInSeveralPieces(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 16, optionE2E)
	// Behind an IOMMU: two pages that lie side by side for the device only.
	for _, d := range []*driver{a, b} {
		for i, page := range []uint64{2, 0} {
			if err := d.client.Map(0x1000_0000+uint64(i)*4096, 4096, guestSize-4*4096+page*4096, d.memory.FD, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	at := uint64(0x1000_0000 + 4096 - 100)
	pieces := func(d *driver) []byte {
		m := d.memory.Bytes[guestSize-4*4096:]
		return slices.Concat(m[2*4096+4096-100:3*4096], m[:200])
	}
	want := make([]byte, 304)
	pattern(want, 9)
	copy(a.memory.Bytes[guestSize-4*4096+2*4096+4096-100:], want[:100])
	copy(a.memory.Bytes[guestSize-4*4096:], want[100:])
	s.tx.buffers[0], s.rx.buffers[0] = at, at
	s.rx.fill()
	s.tx.post(300, frameSOF, frameEOF)
	s.tx.doorbell()
	s.rx.next()
	if !bytes.Equal(pieces(b), want[:300]) {
		t.Error("what arrived is not what was sent")
	}
}

// A virtual IOMMU takes pages away and gives them again.
func TestMemoryThatIsAwayForAMomentLosesNothing(t *testing.T) {
	f := fabric(t, Options{})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 64, optionE2E)
	s.rx.fill()
	b.settled()
	for n, d := range []*driver{a, b, a} {
		if err := d.client.Unmap(guestBase, guestSize); err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			s.post(10*n+i, 512)
		}
		s.tx.doorbell()
		if n == 2 { // and a packet
			p := newPacket(packetRead, 0, 0, accessWord(spaceRouter, 0, 0, 1))
			a.send(p)
		}
		d.settled()
		if err := d.client.Map(guestBase, guestSize, 0, d.memory.FD, true); err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			if got := s.rx.next(); binary.LittleEndian.Uint32(got.bytes) != uint32(10*n+i) {
				t.Fatalf("frame %d is %d", 10*n+i, binary.LittleEndian.Uint32(got.bytes))
			}
		}
	}
	a.receive("the answer", func(p *packet) bool { return p.kind == packetRead })
	k := f.Counters().Hosts
	if k[0].TX[1].Dropped.Total() != 0 || k[1].RX[1].Dropped.Total() != 0 {
		t.Errorf("dropped %+v, %+v", k[0].TX[1].Dropped, k[1].RX[1].Dropped)
	}
}

func TestTheTraceCanBeRead(t *testing.T) {
	var b bytes.Buffer
	f := fabric(t, Options{})
	tr := f.Trace(&b, TraceFilter{Registers: true, Interrupts: true})
	only := &bytes.Buffer{}
	filtered := f.Trace(only, TraceFilter{NoControl: true, Hosts: []string{"b"}, Rings: []int{1}})
	a, bb, c := two(t, f, HostOptions{}, CableOptions{WireOptions: WireOptions{Loss: Injection{Every: 2}}})
	xdomain(t, a, bb, 0, 0)
	s := streamOver(c, a, bb, 1, 16, 0)
	s.rx.fill()
	bb.settled()
	s.post(0, 4096)
	s.post(1, 64)
	s.tx.doorbell()
	a.settled()
	c.Unplug()
	a.event(0, false)
	if err := errors.Join(tr.Close(), filtered.Close(), tr.Close()); err != nil {
		t.Fatal(err)
	}
	a.get1(spaceRouter, 0, 0) // after the end
	text := b.String()
	for _, want := range []string{
		"a       = power on\n", "> write tx ring 0 base: 0x", "> READ route 0 router 0x0+5 seq 0\n", "< READ route 0 router 0x0+5 seq 0: IDs 40011d6b, ports ",
		"> WRITE route 0 router 0x1+4 seq 0: ports ", "link to b.0 up, 2 lanes of 20 Gb/s", "< EVENT route 0: plug, adapter 1\n", "> ACK route 0: plug acknowledged, adapter 1\n",
		"> XDOMAIN request route 1 seq 1: UUID request\n", "< XDOMAIN request route 1 seq 1: UUID request\n", "< XDOMAIN response route 1 seq 1: UUID response",
		"a.0     = tx1 hop 9 4096 bytes sof 1 eof 2 to b.0 rx1\n", "a.0     = tx1 hop 9 64 bytes sof 1 eof 2, dropped: injected loss\n",
		"(to adapter 3 hop 1)", "cable to b.0 unplugged", "< EVENT route 0: unplug, adapter 1\n", "< interrupt ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in the trace", want)
		}
	}
	for _, not := range []string{"READ", "a       =", "power off"} {
		if strings.Contains(only.String(), not) {
			t.Errorf("%q in the filtered trace:\n%s", not, only)
		}
	}
	if !strings.Contains(only.String(), "tx1 hop 9 4096 bytes") {
		t.Errorf("no frame in the filtered trace:\n%s", only)
	}
	if t.Failed() {
		t.Logf("%s", text)
	}
	broken := f.Trace(brokenWriter{}, TraceFilter{})
	a.get1(spaceRouter, 0, 0)
	if err := broken.Close(); err == nil || !strings.Contains(err.Error(), "write the trace") {
		t.Errorf("a writer that fails: %v", err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestWhatIsNotRightIsRefused(t *testing.T) {
	f := fabric(t, Options{})
	for _, o := range []HostOptions{
		{}, {Name: "x", Ports: 16}, {Name: "x", Lanes: 3}, {Name: "x", Version: 3}, {Name: "x", Hops: 17}, {Name: "x", Hops: 1},
		{Name: "x", Speed: 5}, {Name: "x", Speed: Gen4}, {Name: "x", Vendor: 0x8086},
	} {
		if h, err := f.AddHost(o); err == nil {
			t.Errorf("%+v is %v", o, h)
		}
	}
	a, b := addHost(t, f, HostOptions{Name: "a", UID: 5}), addHost(t, f, HostOptions{Name: "b", UID: 6})
	for _, o := range []HostOptions{{Name: "a"}, {Name: "c", UID: 5}} {
		if _, err := f.AddHost(o); err == nil {
			t.Errorf("%+v is a second one", o)
		}
	}
	for _, o := range []CableOptions{{Lanes: 3}, {Speed: 7}, {WireOptions: WireOptions{Rate: -1}}, {WireOptions: WireOptions{Latency: -1}}, {WireOptions: WireOptions{Latency: MaxLatency + 1}}, {WireOptions: WireOptions{Loss: Injection{Probability: 1.5}}}} {
		if _, err := f.Connect(a.Port(0), b.Port(0), o); err == nil {
			t.Errorf("a cable of %+v", o)
		}
	}
	if _, err := f.Connect(a.Port(0), a.Port(0), CableOptions{}); err == nil {
		t.Error("a cable from a port to itself")
	}
	c := connect(t, a.Port(0), b.Port(0), CableOptions{Unplugged: true})
	if c.Plugged() {
		t.Error("it is plugged in")
	}
	if _, err := f.Connect(a.Port(0), b.Port(0), CableOptions{}); err == nil {
		t.Error("a second cable in the same port")
	}
	if f.Host("a") != a || f.Host("z") != nil || a.Port(1) != nil || a.Port(-1) != nil || a.Port(0).Cable() != c || len(f.Cables()) != 1 {
		t.Error("the fabric does not know what it has")
	}
}
