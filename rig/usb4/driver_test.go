//go:build linux

package usb4

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"testing"
	"time"

	"tbcluster/rig/vfiouser"
	"tbcluster/rig/vfiouser/vfiotest"
)

// patience is how long tests wait for what must come.
const patience = time.Minute

// driver is a model of the kernel's driver: it knows registers, rings and
// control packets, and speaks to a host as QEMU does.
type driver struct {
	t      testing.TB
	host   *Host
	client *vfiotest.Client
	memory *vfiotest.Memory
	top    uint64 // of the memory that is given out
	irqs   [numVectors]*vfiotest.Interrupt
	vector int // the next one
	tx, rx *driverRing
	seen   []packet // that were not waited for
	done   chan error
}

const (
	guestBase = 0x4000_0000 // where the guest's memory is for the device
	guestSize = 16 << 20
)

// powerOn attaches a machine to a host.
func powerOn(t testing.TB, h *Host) *driver {
	t.Helper()
	client, server := vfiotest.Pair(t)
	d := &driver{t: t, host: h, client: vfiotest.New(t, client), memory: vfiotest.NewMemory(t, guestSize), done: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { d.done <- vfiouser.Serve(ctx, server, h) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-d.done:
		case <-time.After(patience):
			t.Error("the server does not end")
		}
	})
	d.client.Hello()
	if err := d.client.Map(guestBase, guestSize, 0, d.memory.FD, true); err != nil {
		t.Fatal(err)
	}
	fds := make([]int, numVectors)
	for i := range d.irqs {
		d.irqs[i] = vfiotest.NewInterrupt(t)
		fds[i] = d.irqs[i].FD
	}
	if err := d.client.SetIRQs(1<<2|1<<5, vfiouser.InterruptMSIX, 0, numVectors, fds...); err != nil {
		t.Fatal(err)
	}
	d.client.Write(vfiouser.RegionConfig, pciCommand, []byte{6, 0}) // memory, bus master
	return d
}

// powerOff is the end of the machine.
func (d *driver) powerOff() {
	d.t.Helper()
	d.client.Close()
	select {
	case err := <-d.done:
		d.done <- nil
		if err != nil {
			d.t.Errorf("the machine ended with %v", err)
		}
	case <-time.After(patience):
		d.t.Fatal("the server does not end")
	}
}

// alloc gives out memory.
func (d *driver) alloc(n int) (addr uint64, b []byte) {
	d.t.Helper()
	at := (d.top + 63) &^ 63
	if at+uint64(n) > guestSize {
		d.t.Fatal("the guest is out of memory")
	}
	d.top = at + uint64(n)
	return guestBase + at, d.memory.Bytes[at:d.top]
}

func (d *driver) reg(at uint32) uint32         { return d.client.Read32(vfiouser.RegionBAR0, uint64(at)) }
func (d *driver) write(at uint32, v uint32)    { d.client.Post(vfiouser.RegionBAR0, uint64(at), v) }
func (d *driver) settled()                     { d.reg(regCaps); d.reg(regCaps) }
func (d *driver) modify(at, clear, set uint32) { d.write(at, d.reg(at)&^clear|set) }

// driverRing is a ring as the driver sees it.
type driverRing struct {
	d          *driver
	number     int
	transmits  bool
	size       uint32
	base       uint64
	table      []byte
	head, tail uint32 // of what is with the device
	buffers    []uint64
	bytes      [][]byte
	irq        *vfiotest.Interrupt
	vector     int
}

// start makes and starts a ring as tb_ring_start does. mask is that of a
// receive ring.
func (d *driver) start(number int, transmits bool, size, options, mask uint32) *driverRing {
	d.t.Helper()
	r := &driverRing{d: d, number: number, transmits: transmits, size: size}
	r.base, r.table = d.alloc(int(size) * descriptorSize)
	clear(r.table)
	for range size {
		a, b := d.alloc(maxFrame)
		r.buffers = append(r.buffers, a)
		r.bytes = append(r.bytes, b)
	}
	r.vector = d.vector
	d.vector++
	r.irq = d.irqs[r.vector]
	bank, opts := r.banks()
	d.write(bank+ringBase, uint32(r.base))
	d.write(bank+ringBaseHi, uint32(r.base>>32))
	frame := uint32(0)
	if options&optionRaw != 0 {
		frame = maxPacket
	}
	if transmits {
		d.write(bank+ringSize, size)
	} else {
		d.write(bank+ringSize, size|frame<<16)
	}
	d.write(opts+ringMask, mask)
	d.write(opts+ringOptions, options&^optionE2E|optionEnable)
	if options&optionE2E != 0 {
		d.write(opts+ringOptions, options|optionEnable)
	}
	index := uint32(number)
	if !transmits {
		index += uint32(len(d.host.tx))
	}
	d.modify(regDMAMisc, 0, noAutoClear)
	d.modify(regVectors+index/8*4, 0xf<<(index%8*4), uint32(r.vector)<<(index%8*4))
	d.write(regThrottle+uint32(r.vector)*4, 0)
	d.modify(regEnable, 0, 1<<index)
	return r
}

func (r *driverRing) banks() (ring, options uint32) {
	if r.transmits {
		return regTXRing + 16*uint32(r.number), regTXOptions + 32*uint32(r.number)
	}
	return regRXRing + 16*uint32(r.number), regRXOptions + 32*uint32(r.number)
}

func (r *driverRing) bit() uint32 {
	if r.transmits {
		return 1 << r.number
	}
	return 1 << (r.number + len(r.d.host.tx))
}

// stop stops the ring as tb_ring_stop does.
func (r *driverRing) stop() {
	d := r.d
	d.write(regMask, r.bit())
	bank, opts := r.banks()
	d.write(opts+ringOptions, 0)
	for _, o := range []uint32{ringBase, ringBaseHi, ringIndices, ringSize} {
		d.write(bank+o, 0)
	}
	d.settled()
}

func (r *driverRing) word(i uint32) uint32 { return descriptor(r.table[i*descriptorSize:]).word() }

// room returns how many more descriptors the driver may post.
func (r *driverRing) room() int { return int((r.tail + r.size - r.head - 1) % r.size) }

// post puts a descriptor on the ring, without the doorbell.
func (r *driverRing) post(n int, sof, eof uint32) {
	d := descriptor(r.table[r.head*descriptorSize:])
	binary.LittleEndian.PutUint64(d, r.buffers[r.head])
	binary.LittleEndian.PutUint32(d[12:], 0)
	d.finish(uint32(n)&descLength | eof<<descEOFShift | sof<<descSOFShift | descOverrun | descInterrupt) // POSTED is OVERRUN's bit
	r.head = (r.head + 1) % r.size
}

// doorbell tells the device of what was posted.
func (r *driverRing) doorbell() {
	bank, _ := r.banks()
	v := r.head
	if r.transmits {
		v <<= 16
	}
	r.d.write(bank+ringIndices, v)
}

// fill gives a receive ring all buffers that it may have.
func (r *driverRing) fill() {
	for r.room() > 0 {
		r.post(0, 0, 0)
	}
	r.doorbell()
}

// frame is one that has arrived.
type frame struct {
	bytes    []byte
	sof, eof uint32
	flags    uint32
}

// completed returns the next completed descriptor. What it returns must be used
// before the descriptor is posted again.
func (r *driverRing) completed() (frame, bool) {
	if r.tail == r.head {
		return frame{}, false
	}
	w := r.word(r.tail)
	if w&descCompleted == 0 {
		return frame{}, false
	}
	f := frame{bytes: r.bytes[r.tail][:sizeOf(w)], sof: w >> descSOFShift & 0xf, eof: w >> descEOFShift & 0xf, flags: w >> descFlagShift << descFlagShift}
	r.tail = (r.tail + 1) % r.size
	return f, true
}

// wait waits for the ring's interrupt and clears it, as ring_msix does.
func (r *driverRing) wait(d time.Duration) bool {
	if r.irq.Wait(d) == 0 {
		return false
	}
	r.d.write(regClear, r.bit())
	return true
}

// next waits for the next completed descriptor.
func (r *driverRing) next() frame {
	r.d.t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if f, ok := r.completed(); ok {
			return f
		}
		if !r.wait(time.Until(deadline)) {
			r.d.t.Fatalf("%s: nothing on ring %d (transmits %v)", r.d.host.name, r.number, r.transmits)
		}
	}
}

// awaken starts the control channel, as tb_ctl_start does.
func (d *driver) awaken() {
	d.t.Helper()
	d.tx = d.start(0, true, 10, optionRaw, 0)
	d.rx = d.start(0, false, 10, optionRaw, 0xffffffff)
	d.rx.fill()
	d.settled()
}

// sleep stops it.
func (d *driver) sleep() { d.rx.stop(); d.tx.stop() }

// send sends a control packet.
func (d *driver) send(p packet) {
	d.t.Helper()
	for d.tx.room() == 0 {
		d.tx.next()
	}
	b := p.append(nil)
	copy(d.tx.bytes[d.tx.head], b)
	d.tx.post(len(b), uint32(p.kind), uint32(p.kind))
	d.tx.doorbell()
}

// receive waits for a control packet that fits.
func (d *driver) receive(what string, fits func(*packet) bool) packet {
	d.t.Helper()
	for i := range d.seen {
		if p := d.seen[i]; fits(&p) {
			d.seen = append(d.seen[:i], d.seen[i+1:]...)
			return p
		}
	}
	for deadline := time.Now().Add(patience); ; {
		f, ok := d.rx.completed()
		if !ok {
			if !d.rx.wait(time.Until(deadline)) {
				d.t.Fatalf("%s waits in vain for %s; has %d other packets: %s", d.host.name, what, len(d.seen), d.describe())
			}
			continue
		}
		if f.sof != 0 {
			d.t.Errorf("a control packet with start of frame %d", f.sof)
		}
		p, ok := parsePacket(uint8(f.eof), f.bytes)
		if !ok {
			d.t.Fatalf("the host sent a packet with a wrong CRC: % x", f.bytes)
		}
		d.rx.fill()
		if fits(&p) {
			return p
		}
		d.seen = append(d.seen, p)
	}
}

func (d *driver) describe() string {
	s := ""
	for i := range d.seen {
		s += "\n\t" + d.seen[i].describe(false)
	}
	return s
}

func accessWord(s space, adapter int, offset, length uint32) uint32 {
	return offset | length<<13 | uint32(adapter)<<19 | uint32(s)<<25
}

// ask sends a READ or WRITE and returns what comes back, an ERROR included.
func (d *driver) ask(kind packetType, route uint64, s space, adapter int, offset, length uint32, data ...uint32) packet {
	d.t.Helper()
	d.send(newPacket(kind, append([]uint32{uint32(route >> 32), uint32(route), accessWord(s, adapter, offset, length)}, data...)...))
	return d.receive(fmt.Sprintf("an answer to %d", kind), func(p *packet) bool { return p.kind == kind || p.kind == packetError })
}

// get reads configuration space of the host.
func (d *driver) get(s space, adapter int, offset, length uint32) []uint32 {
	d.t.Helper()
	p := d.ask(packetRead, 0, s, adapter, offset, length)
	if p.kind != packetRead || p.n != 3+int(length) {
		d.t.Fatalf("read of space %d adapter %d at %#x: %s", s, adapter, offset, p.describe(false))
	}
	return append([]uint32(nil), p.words[3:p.n]...)
}

func (d *driver) get1(s space, adapter int, offset uint32) uint32 {
	d.t.Helper()
	return d.get(s, adapter, offset, 1)[0]
}

// put writes configuration space of the host.
func (d *driver) put(s space, adapter int, offset uint32, data ...uint32) {
	d.t.Helper()
	if p := d.ask(packetWrite, 0, s, adapter, offset, uint32(len(data)), data...); p.kind != packetWrite {
		d.t.Fatalf("write of space %d adapter %d at %#x: %s", s, adapter, offset, p.describe(false))
	}
}

// change changes bits of a dword.
func (d *driver) change(s space, adapter int, offset, clear, set uint32) {
	d.t.Helper()
	d.put(s, adapter, offset, d.get1(s, adapter, offset)&^clear|set)
}

// event waits for a hotplug event of a port, and acknowledges it.
func (d *driver) event(port int, plugged bool) {
	d.t.Helper()
	d.eventUnanswered(port, plugged)
	adapter := uint32(d.host.ports[port].Adapter())
	pg := uint32(3)
	if plugged {
		pg = 2
	}
	d.send(newPacket(packetError, 0, 0, errorAckPlug|adapter<<8|pg<<30))
}

// eventUnanswered waits for an event and does not acknowledge it.
func (d *driver) eventUnanswered(port int, plugged bool) {
	d.t.Helper()
	adapter := uint32(d.host.ports[port].Adapter())
	what := map[bool]string{true: "plug", false: "unplug"}[plugged]
	d.receive(fmt.Sprintf("%s of port %d", what, port), func(p *packet) bool {
		return p.kind == packetEvent && p.words[2]&0x3f == adapter && p.words[2]>>31 == 0 == plugged
	})
}

// enumerate does what the driver does with a host router when it is loaded: it
// takes it, looks at everything, and asks for events.
func (d *driver) enumerate() {
	d.t.Helper()
	head := d.get(spaceRouter, 0, 0, 5)
	d.put(spaceRouter, 0, routerPorts, head[1], 0, routerValid, 0xff|head[4]&0xff000000)
	for i := range d.host.ports {
		d.change(spaceAdapter, d.host.ports[i].Adapter(), adapterHops, adapterNoEvent, 0)
	}
}

// bring powers a host on, and its driver.
func bring(t testing.TB, h *Host) *driver {
	t.Helper()
	d := powerOn(t, h)
	d.awaken()
	d.enumerate()
	return d
}

// fabric returns a fabric that goes with the test. With USB4_TRACE in the
// environment its trace goes to standard error.
func fabric(t testing.TB, o Options) *Fabric {
	t.Helper()
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("USB4_TRACE") != "" {
		f.Trace(os.Stderr, TraceFilter{Registers: os.Getenv("USB4_TRACE") == "all", Interrupts: true})
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func addHost(t testing.TB, f *Fabric, o HostOptions) *Host {
	t.Helper()
	h, err := f.AddHost(o)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func connect(t testing.TB, a, b *Port, o CableOptions) *Cable {
	t.Helper()
	c, err := a.node.fabric.Connect(a, b, o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// two returns two hosts with a cable between them, drivers awake, both told of
// the plug.
func two(t testing.TB, f *Fabric, o HostOptions, k CableOptions) (a, b *driver, c *Cable) {
	t.Helper()
	oa, ob := o, o
	oa.Name, ob.Name = "a", "b"
	ha, hb := addHost(t, f, oa), addHost(t, f, ob)
	c = connect(t, ha.Port(0), hb.Port(0), k)
	a, b = bring(t, ha), bring(t, hb)
	a.event(0, true)
	b.event(0, true)
	return a, b, c
}

// stream is a way for frames from one driver to another.
type stream struct {
	tx, rx *driverRing
}

const (
	frameSOF, frameEOF = 1, 2
	frameMask          = 1<<frameSOF<<16 | 1<<frameEOF
)

// streamOver sets up a path over a cable, from one of its ends.
func streamOver(c *Cable, from, to *driver, ring, size int, options uint32) stream {
	out, in := c.ends[0], c.ends[1]
	if out.node.host != from.host {
		out, in = in, out
	}
	hop := uint32(8 + ring)
	s := stream{
		tx: from.start(ring, true, uint32(size), options, 0),
		rx: to.start(ring, false, uint32(size), options|uint32(ring)<<optionHopShift, frameMask),
	}
	to.put(spacePaths, in.Adapter(), 2*hop, uint32(ring)|uint32(to.host.router.nhi().number)<<11|14<<pathCreditShift|pathEnable, 0)
	from.put(spacePaths, from.host.router.nhi().number, 2*uint32(ring), hop|uint32(out.Adapter())<<11|pathEnable, 0)
	return s
}

// pattern is the content of frame n of a stream.
func pattern(b []byte, n int) {
	x := uint64(n)*0x9e3779b97f4a7c15 + 1
	for i := 0; i+8 <= len(b); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(b[i:], x)
	}
	binary.LittleEndian.PutUint32(b, uint32(n))
}

// post puts frame n on the transmit ring.
func (s stream) post(n, size int) {
	b := s.tx.bytes[s.tx.head][:size]
	pattern(b, n)
	s.tx.post(size, frameSOF, frameEOF)
}
