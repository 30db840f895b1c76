//go:build linux

package usb4

import (
	"bytes"
	"hash/crc32"
	"testing"
	"time"
)

// hubbed is host a with a hub behind it, and hosts b and c behind the hub.
type hubbed struct {
	clock   *handClock
	a, b, c *driver
	hub     *Hub
	cables  [3]*Cable // to a, b, c
}

// withHub brings all of it up, as the driver of a does: the hub is taken, and so
// are events of its ports.
func withHub(t *testing.T) hubbed {
	t.Helper()
	x := hubbed{clock: &handClock{now: time.Hour}}
	f := fabric(t, Options{Clock: x.clock})
	var hosts []*Host
	for _, name := range []string{"a", "b", "c"} {
		hosts = append(hosts, addHost(t, f, HostOptions{Name: name}))
	}
	var err error
	if x.hub, err = f.AddHub(HubOptions{Name: "hub"}); err != nil {
		t.Fatal(err)
	}
	for i, h := range hosts {
		x.cables[i] = connect(t, h.Port(0), x.hub.Port(i), CableOptions{})
	}
	x.b, x.c = bring(t, hosts[1]), bring(t, hosts[2])
	x.clock.advance(time.Second)
	if x.cables[1].Up() {
		t.Fatal("a port of a hub is up that is not plugged in itself")
	}
	x.a = bring(t, hosts[0])
	x.clock.advance(defaultTraining) // the hub is there
	x.a.event(0, true)
	x.clock.advance(defaultTraining) // and what is behind it
	x.takeHub(t)
	x.b.event(0, true)
	x.c.event(0, true)
	return x
}

// at asks a router of the domain of a.
func (x hubbed) at(t *testing.T, kind packetType, route uint64, s space, adapter int, offset, length uint32, data ...uint32) packet {
	t.Helper()
	p := x.a.ask(kind, route, s, adapter, offset, length, data...)
	if p.kind != kind || p.route() != route {
		t.Fatalf("route %x, space %d adapter %d at %#x: %s", route, s, adapter, offset, p.describe(false))
	}
	return p
}

func (x hubbed) read(t *testing.T, route uint64, s space, adapter int, offset uint32) uint32 {
	t.Helper()
	return x.at(t, packetRead, route, s, adapter, offset, 1).words[3]
}

func (x hubbed) write(t *testing.T, route uint64, s space, adapter int, offset uint32, data ...uint32) {
	t.Helper()
	x.at(t, packetWrite, route, s, adapter, offset, uint32(len(data)), data...)
}

// unlock lets requests out of a port.
func (x hubbed) unlock(t *testing.T, route uint64, adapter int) {
	t.Helper()
	x.write(t, route, spaceAdapter, adapter, adapterBuffers, x.read(t, route, spaceAdapter, adapter, adapterBuffers)&^adapterLocked)
}

func (x hubbed) takeHub(t *testing.T) {
	t.Helper()
	if p := x.a.ask(packetRead, 1, spaceRouter, 0, 0, 1); p.kind != packetError || p.words[2]&0xff != errorLocked {
		t.Errorf("behind a port that is locked there is %s", p.describe(false))
	}
	x.unlock(t, 0, 1)
	p := x.at(t, packetRead, 1, spaceRouter, 0, 0, 5)
	if upstream := address(p.words[2]).adapter(); upstream != 1 || p.words[3+routerPorts]>>8&0x3f != 1 || p.words[3+routerPorts]>>14&0x3f != 6 {
		t.Errorf("the hub says that its upstream adapter is %d: %s", upstream, p.describe(false))
	}
	x.write(t, 1, spaceRouter, 0, routerPorts, p.words[3+routerPorts]|1<<20, 1, routerValid, 0xff|p.words[3+routerVersion]&0xff000000)
	for _, adapter := range []int{1, 3, 5} {
		x.write(t, 1, spaceAdapter, adapter, adapterHops, x.read(t, 1, spaceAdapter, adapter, adapterHops)&^adapterNoEvent)
	}
	for _, adapter := range []uint32{3, 5} {
		x.hubEvent(t, adapter, true)
	}
}

// hubEvent waits for an event of the hub, and acknowledges it.
func (x hubbed) hubEvent(t *testing.T, adapter uint32, plugged bool) {
	t.Helper()
	x.a.receive("an event of the hub", func(p *packet) bool {
		return p.kind == packetEvent && p.route() == 1 && p.words[2]&0x3f == adapter && p.words[2]>>31 == 0 == plugged
	})
	pg := uint32(3)
	if plugged {
		pg = 2
	}
	x.a.send(newPacket(packetError, 0, 1, errorAckPlug|adapter<<8|pg<<30))
}

func TestAHubIsTakenByItsHost(t *testing.T) {
	x := withHub(t)
	uid := uint64(x.read(t, 1, spaceRouter, 0, routerUID)) | uint64(x.read(t, 1, spaceRouter, 0, routerUID+1))<<32
	if uid != x.hub.options.UID || uid == x.a.host.options.UID {
		t.Errorf("the hub has the UID %x", uid)
	}
	// The DROM, sixteen dwords at a time as the driver does.
	var drom []byte
	for at := uint32(0); at < 64; at += 16 {
		x.write(t, 1, spaceRouter, 0, routerMeta, at<<dromAddressShift|16<<dromSizeShift)
		x.write(t, 1, spaceRouter, 0, routerOp, opReadDROM|routerOpValid)
		if s := x.read(t, 1, spaceRouter, 0, routerOp); s&(routerOpValid|routerOpNone) != 0 {
			t.Fatalf("the operation says %#x", s)
		}
		for i := range uint32(16) {
			drom = le.AppendUint32(drom, x.read(t, 1, spaceRouter, 0, routerData+i))
		}
	}
	n := int(le.Uint16(drom[14:]))
	if crc := crc32.Checksum(drom[13:13+n], castagnoli); le.Uint32(drom[9:]) != crc || le.Uint64(drom[1:]) != uid || drom[13] != 3 {
		t.Errorf("the DROM is % x", drom)
	}
	if !bytes.Contains(drom, []byte("\x02hub\x00")) || !bytes.Contains(drom, []byte("\x01"+vendorName+"\x00")) {
		t.Errorf("its names are not in the DROM % x", drom)
	}
	// No event is left, and none is repeated.
	x.clock.advance(10 * eventRepeat)
	x.a.settled()
	for f, ok := x.a.rx.completed(); ok; f, ok = x.a.rx.completed() {
		p, _ := parsePacket(uint8(f.eof), f.bytes)
		t.Errorf("and then came %s", p.describe(false))
	}
}

func TestDomainsTalkThroughAHub(t *testing.T) {
	x := withHub(t)
	x.unlock(t, 1, 3)
	x.unlock(t, 1, 5)
	// What is behind the hub is another domain, from both sides.
	if p := x.a.ask(packetRead, 0x301, spaceRouter, 0, 0, 1); p.kind != packetError || p.words[2]&0xff != errorNoPort {
		t.Errorf("a reads of b: %s", p.describe(false))
	}
	x.b.change(spaceAdapter, 1, adapterBuffers, adapterLocked, 0)
	if p := x.b.ask(packetRead, 1, spaceRouter, 0, 0, 1); p.kind != packetError || p.words[2]&0xff != errorNoPort {
		t.Errorf("b reads of the hub: %s", p.describe(false))
	}
	for _, c := range []struct {
		from, to  *driver
		by, known uint64 // the route that the sender uses, and that the receiver sees
	}{
		{x.a, x.b, 0x301, 1}, {x.b, x.a, 1, 0x301}, {x.a, x.c, 0x501, 1}, {x.c, x.a, 1, 0x501},
	} {
		c.from.send(newPacket(packetXDomainRequest, uint32(c.by>>32), uint32(c.by), 4, uuidXDP, 2, 3, 4, 12, uint32(c.by)))
		p := c.to.receive("a packet of "+c.from.host.name, func(p *packet) bool { return p.kind == packetXDomainRequest })
		if p.route() != c.known || p.words[8] != uint32(c.by) {
			t.Errorf("from %s by route %x: %s", c.from.host.name, c.by, p.describe(false))
		}
	}
	before := x.control()
	for _, route := range []uint64{0x201, 0x1, 0x30301} { // no port, the hub itself, beyond b
		x.a.send(newPacket(packetXDomainRequest, 0, uint32(route), 4, uuidXDP, 2, 3, 4, 12, 0))
	}
	x.a.settled()
	if n := x.control().Dropped - before.Dropped; n != 3 {
		t.Errorf("%d packets that lead nowhere were dropped, not 3", n)
	}
}

// control is what the control channel of a counts.
func (x hubbed) control() ControlCounters {
	h := x.a.host
	h.fabric.mu.Lock()
	defer h.fabric.mu.Unlock()
	return h.control.counters
}

// streamThrough sets up a path from a through the hub to a host behind it, as
// tb_xdomain_enable_paths does at both ends.
func (x hubbed) streamThrough(t *testing.T, to *driver, adapter int, ring, size int) stream {
	t.Helper()
	hop := uint32(8 + ring)
	s := stream{
		tx: x.a.start(ring, true, uint32(size), optionE2E, 0),
		rx: to.start(ring, false, uint32(size), optionE2E|uint32(ring)<<optionHopShift, frameMask),
	}
	to.put(spacePaths, 1, 2*hop, uint32(ring)|uint32(to.host.router.nhi().number)<<11|14<<pathCreditShift|pathEnable, 0)
	x.write(t, 1, spacePaths, 1, 2*(hop+1), hop|uint32(adapter)<<11|14<<pathCreditShift|pathEnable, 0)
	x.a.put(spacePaths, x.a.host.router.nhi().number, 2*uint32(ring), (hop+1)|1<<11|pathEnable, 0)
	return s
}

func TestFramesCrossAHub(t *testing.T) {
	x := withHub(t)
	s := x.streamThrough(t, x.b, 3, 1, 64)
	other := x.streamThrough(t, x.c, 5, 2, 64)
	exchange(t, "through the hub", s, 200, 4096)
	exchange(t, "to the other", other, 100, 1000)
	k := x.hub.fabric.Counters()
	if n, b, c := k.Cables[0].AtoB, k.Cables[1].BtoA, k.Cables[2].BtoA; n.Delivered != 300 || b.Delivered != 200 || c.Delivered != 100 || n.Sent != 300 || b.Sent != 200 {
		t.Errorf("cables: to the hub %+v, to b %+v, to c %+v", n, b, c)
	}
	var through uint64
	for _, p := range k.Hubs[0].Paths {
		through += p.Frames
	}
	if through != 300 || k.Hubs[0].Name != "hub" {
		t.Errorf("%d frames by the paths of the hub: %+v", through, k.Hubs)
	}
	// Injections of both cables, each counted with its own.
	set := func(c *Cable, from *Port, o WireOptions) {
		t.Helper()
		if err := c.SetWire(from, o); err != nil {
			t.Fatal(err)
		}
	}
	set(x.cables[0], x.a.host.Port(0), WireOptions{Loss: Injection{Every: 10}})
	set(x.cables[1], x.hub.Port(1), WireOptions{Loss: Injection{Every: 9}, CorruptFlagged: Injection{Every: 8}})
	s.postAll(60, 100)
	set(x.cables[0], x.a.host.Port(0), WireOptions{})
	set(x.cables[1], x.hub.Port(1), WireOptions{})
	first, second := x.cables[0].Counters().AtoB, x.cables[1].Counters().BtoA
	if first.Lost != 6 || first.Judged.Loss != 60 || second.Lost != 6 || second.Judged.Loss != 54 || second.CorruptedFlagged != 6 || second.Judged.CorruptFlagged != 48 {
		t.Errorf("to the hub %+v, from there %+v", first, second)
	}
	if first.Sent != first.Delivered+first.Lost || second.Sent != second.Delivered+second.Lost || second.Sent != 200+54 {
		t.Errorf("to the hub %+v, from there %+v", first, second)
	}
	for _, ok := s.rx.completed(); ok; _, ok = s.rx.completed() {
	}
	for _, ok := s.tx.completed(); ok; _, ok = s.tx.completed() {
	}
	// The slowest cable sets the pace, latencies add up: 4 ms a frame.
	set(x.cables[0], x.a.host.Port(0), WireOptions{Rate: 81_920_000, Latency: 3 * time.Millisecond})
	set(x.cables[1], x.hub.Port(1), WireOptions{Rate: 8_192_000, Latency: 2 * time.Millisecond})
	before := x.cables[1].Counters().BtoA.Delivered
	s.postAll(40, 4096)
	x.clock.advance(9*time.Millisecond - 1)
	if n := x.cables[1].Counters().BtoA.Delivered - before; n != 0 {
		t.Errorf("%d frames have come too early", n)
	}
	x.clock.advance(1)
	if n := x.cables[1].Counters().BtoA.Delivered - before; n != 1 {
		t.Errorf("%d frames have come with the first", n)
	}
	x.clock.advance(80 * time.Millisecond)
	if n := x.cables[1].Counters().BtoA.Delivered - before; n < 20 || n > 22 {
		t.Errorf("%d frames have come after 80 ms more", n)
	}
	// What is under way when the first cable is pulled is lost.
	x.cables[0].Unplug()
	if w := x.cables[1].Counters().BtoA; w.InFlight != 0 || w.DroppedAfter == 0 || w.Sent != w.Delivered+w.Lost+w.DroppedAfter {
		t.Errorf("%+v", w)
	}
}

func TestWhatIsBehindAHubGoesWithIt(t *testing.T) {
	x := withHub(t)
	x.cables[1].Unplug()
	x.hubEvent(t, 3, false)
	x.b.event(0, false)
	x.cables[1].Plug()
	x.clock.advance(defaultTraining)
	x.hubEvent(t, 3, true)
	x.b.event(0, true)
	x.cables[0].Unplug()
	x.a.event(0, false)
	x.b.event(0, false)
	x.c.event(0, false)
	if x.hub.router.enumerated() || x.cables[1].Up() || x.cables[2].Up() {
		t.Error("a hub that was pulled is as it was")
	}
	x.cables[0].Plug()
	x.clock.advance(defaultTraining)
	x.a.event(0, true)
	x.clock.advance(defaultTraining)
	x.takeHub(t)
	x.b.event(0, true)
	x.c.event(0, true)
	// So it is when the host resets the port.
	x.a.change(spaceAdapter, 1, portCtl, 0, portReset)
	x.b.event(0, false)
	x.a.change(spaceAdapter, 1, portCtl, portReset, 0)
	x.clock.advance(2 * defaultTraining)
	x.b.event(0, true)
	// And when the host loses its power.
	x.a.powerOff()
	x.b.event(0, false)
	x.c.event(0, false)
}

func TestAHubBehindAHub(t *testing.T) {
	f := fabric(t, Options{})
	a, b := addHost(t, f, HostOptions{Name: "a", Ports: 2}), addHost(t, f, HostOptions{Name: "b"})
	var hubs []*Hub
	for _, name := range []string{"one", "two"} {
		h, err := f.AddHub(HubOptions{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		hubs = append(hubs, h)
	}
	connect(t, a.Port(1), hubs[0].Port(0), CableOptions{Training: -1})
	connect(t, hubs[0].Port(2), hubs[1].Port(0), CableOptions{Training: -1})
	connect(t, hubs[1].Port(1), b.Port(0), CableOptions{Training: -1})
	da, db := bring(t, a), bring(t, b)
	da.event(1, true)
	for _, r := range []struct {
		route   uint64
		adapter int
	}{{0, 3}, {3, 5}, {0x503, 3}} {
		ask := func(kind packetType, s space, offset, length uint32, data ...uint32) packet {
			t.Helper()
			p := da.ask(kind, r.route, s, r.adapter, offset, length, data...)
			if p.kind != kind {
				t.Fatalf("route %x: %s", r.route, p.describe(false))
			}
			return p
		}
		if r.route != 0 {
			ask(packetWrite, spaceRouter, routerEnable, 1, routerValid)
			v := ask(packetRead, spaceAdapter, adapterHops, 1).words[3]
			ask(packetWrite, spaceAdapter, adapterHops, 1, v&^adapterNoEvent)
			da.receive("an event", func(p *packet) bool {
				return p.kind == packetEvent && p.route() == r.route && int(p.words[2]&0x3f) == r.adapter
			})
			da.send(newPacket(packetError, 0, uint32(r.route), errorAckPlug|uint32(r.adapter)<<8|2<<30))
		}
		v := ask(packetRead, spaceAdapter, adapterBuffers, 1).words[3]
		ask(packetWrite, spaceAdapter, adapterBuffers, 1, v&^adapterLocked)
	}
	db.event(0, true)
	db.send(newPacket(packetXDomainRequest, 0, 1, 4, uuidXDP, 2, 3, 4, 12, 7))
	if p := da.receive("a packet of b", func(p *packet) bool { return p.kind == packetXDomainRequest }); p.route() != 0x30503 {
		t.Errorf("b is at route %x", p.route())
	}
	// Upstream to upstream leads nowhere, and does not hang.
	three, err := f.AddHub(HubOptions{Name: "three"})
	if err != nil {
		t.Fatal(err)
	}
	four, err := f.AddHub(HubOptions{Name: "four"})
	if err != nil {
		t.Fatal(err)
	}
	c := connect(t, three.Port(0), four.Port(0), CableOptions{Training: -1})
	connect(t, three.Port(1), four.Port(1), CableOptions{Training: -1})
	c.Unplug()
	c.Plug()
	if _, err := f.AddHub(HubOptions{Name: "a"}); err == nil {
		t.Error("a hub has the name of a host")
	}
	if _, err := f.AddHub(HubOptions{Name: "x", Ports: 1}); err == nil {
		t.Error("a hub has one port")
	}
}
