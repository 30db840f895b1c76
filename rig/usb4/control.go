//go:build linux

package usb4

// maxWaiting is how many packets may wait for the driver to give ring 0 buffers.
const maxWaiting = 64

// controlChannel is ring 0 of a host: packets between its driver, its router
// and other domains.
type controlChannel struct {
	waiting  []packet // for buffers
	buffer   [maxPacket]byte
	counters ControlCounters
}

func (c *controlChannel) reset() { c.waiting = nil }

// controlRing is called when one of the two rings was switched on or off.
func (h *Host) controlRing() {
	f := h.fabric
	f.tell()
	if !h.listening() {
		h.control.waiting = nil
		return
	}
	f.note(h, nil, "control channel started")
	if !h.awake {
		h.awake = true
		now := f.clock.Now()
		for _, p := range h.ports {
			p.train(now)
		}
	}
	h.portsListen()
}

// transmitControl handles what the driver has put into transmit ring 0, unless
// too much waits for it to take.
func (h *Host) transmitControl() {
	r := &h.tx[0]
	table := r.descriptors()
	if table == nil {
		h.starve()
		h.fabric.fault(r, r.base, int(r.size)*descriptorSize)
		return
	}
	mem := h.client.Memory
	asked := uint32(0)
	for r.cons != r.prod && len(h.control.waiting) < maxWaiting {
		d := at(table, r.cons)
		word := d.word()
		n := sizeOf(word)
		// A copy: the guest could change it between check and use.
		b := h.control.buffer[:min(n, maxPacket)]
		there := mem.Read(d.address(), b)
		if !there && h.starve() {
			break
		}
		r.counters.Frames++
		r.counters.Bytes += uint64(n)
		switch {
		case n > maxPacket:
			h.control.counters.Malformed++
		case !there:
			r.counters.Dropped.DMA++
			h.fabric.fault(r, d.address(), n)
		default:
			h.received(uint8(word>>descEOFShift&0xf), b)
		}
		d.finish(word | descCompleted)
		asked |= word
		r.cons = r.next(r.cons)
	}
	if asked&descInterrupt != 0 {
		h.complete(r)
	}
}

// received handles a packet of the driver.
func (h *Host) received(kind uint8, b []byte) {
	p, ok := parsePacket(kind, b)
	if !ok {
		h.control.counters.BadCRC++
		h.fabric.log.Warn("a control packet with a wrong CRC or length", "host", h.name, "bytes", len(b))
		return
	}
	h.fabric.tracePacket(h, nil, true, &p)
	handle := packetHandlers[p.kind]
	if handle == nil {
		h.control.counters.Malformed++
		h.fabric.log.Warn("a control packet of a type that drivers do not send", "host", h.name, "type", kind)
		return
	}
	handle(h, &p)
}

// packetHandlers are by type. It is filled by init because handlers lead back
// to it.
var packetHandlers [16]func(*Host, *packet)

func init() {
	packetHandlers = [16]func(*Host, *packet){
		packetRead:            (*Host).request,
		packetWrite:           (*Host).request,
		packetError:           (*Host).acknowledge,
		packetNotifyAck:       func(*Host, *packet) {}, // of notifications that we do not send
		packetXDomainRequest:  (*Host).forward,
		packetXDomainResponse: (*Host).forward,
	}
}

// send gives a packet to the driver of the host.
func (h *Host) send(p packet) {
	if !h.listening() || len(h.control.waiting) >= 2*maxWaiting {
		h.control.counters.Dropped++
		return
	}
	h.control.waiting = append(h.control.waiting, p)
	h.deliverControl()
}

// deliverControl puts waiting packets into receive ring 0.
func (h *Host) deliverControl() {
	r := &h.rx[0]
	if !r.enabled() || !h.mastering() {
		return
	}
	full := len(h.control.waiting) >= maxWaiting
	for len(h.control.waiting) > 0 && r.free() > 0 {
		p := &h.control.waiting[0]
		table := r.descriptors()
		if table == nil {
			h.starve()
			h.fabric.fault(r, r.base, int(r.size)*descriptorSize)
			return
		}
		d := at(table, r.prod)
		b := p.append(h.control.buffer[:0])
		if !h.client.Memory.Write(d.address(), b) {
			h.starve()
			h.fabric.fault(r, d.address(), len(b))
			r.counters.Dropped.DMA++
			return
		}
		asked := d.word()
		d.finish(uint32(len(b)) | uint32(p.kind)<<descEOFShift | descCompleted)
		h.fabric.tracePacket(h, nil, false, p)
		r.prod = r.next(r.prod)
		r.counters.Frames++
		r.counters.Bytes += uint64(len(b))
		if asked&descInterrupt != 0 {
			h.complete(r)
		}
		h.control.waiting = h.control.waiting[1:]
	}
	if full && len(h.control.waiting) < maxWaiting {
		h.dirtyTX |= 1 // it was waiting for us; only Settle gets here
	}
}

// fail answers a packet with an error.
func (h *Host) fail(p *packet, code uint32, adapter int) {
	h.control.counters.Errors++
	h.send(newPacket(packetError, p.words[0]|fromRouter, p.words[1], code|uint32(adapter)<<8))
}

// request answers a READ or WRITE.
func (h *Host) request(p *packet) {
	if p.n < 3 {
		h.control.counters.Malformed++
		return
	}
	a := address(p.words[2])
	if route := p.route(); route != 0 {
		h.requestBeyond(p, route)
		return
	}
	read, write, size, code := h.space(a)
	if code != noError {
		h.fail(p, code, a.adapter())
		return
	}
	length := a.length()
	if a.offset()+length > size || 3+int(length) > maxDwords || p.kind == packetWrite && p.n < 3+int(length) {
		h.fail(p, errorSpace, a.adapter())
		return
	}
	h.control.counters.Requests++
	reply := newPacket(p.kind, p.words[0]|fromRouter, p.words[1], a.from(h.router.nhi().number))
	if p.kind == packetRead {
		for i := range length {
			reply.words[3+i] = read(a.offset() + i)
		}
		reply.n += int(length)
		h.send(reply)
		return
	}
	for i := range length {
		write(a.offset()+i, p.words[3+i])
	}
	h.send(reply)
}

const noError = 0xff

// space finds the configuration space that an address means.
func (h *Host) space(a address) (read func(uint32) uint32, write func(offset, v uint32), size, code uint32) {
	s := a.space()
	if s == spaceRouter {
		return h.router.read, h.router.write, routerSize, noError
	}
	if a.adapter() >= len(h.router.adapters) {
		return nil, nil, 0, errorNoPort
	}
	ad := h.router.adapter(a.adapter())
	if ad == nil || ad.space(s) == 0 {
		return nil, nil, 0, errorSpace
	}
	return func(o uint32) uint32 { return ad.read(s, o) }, func(o, v uint32) { ad.write(s, o, v) }, ad.space(s), noError
}

// towards finds the port that the first hop of a route leads out of. code is
// the error if there is no way.
func (h *Host) towards(route uint64) (p *Port, adapter int, code uint32) {
	n := int(route & 0xff)
	a := h.router.adapter(n)
	if a == nil || a.port == nil || a.second {
		return nil, n, errorNoPort
	}
	if !a.port.up {
		return a.port, n, errorNotConnected
	}
	return a.port, n, noError
}

// requestBeyond answers a request for a router behind one of our ports. There
// is none that this domain may configure: what is there is the host of another
// domain, and says so. The driver then looks for it by XDomain packets
// (tb.c, tb_scan_port).
func (h *Host) requestBeyond(p *packet, route uint64) {
	port, n, code := h.towards(route)
	if code == noError {
		code = errorNoPort
		if port.lanes[0].config[adapterBuffers]&adapterLocked != 0 {
			code = errorLocked
		}
	}
	h.fail(p, code, n)
}

// forward sends an XDomain packet to the host of another domain, whose driver
// gets it with the adapter through which it came as the route.
func (h *Host) forward(p *packet) {
	route := p.route()
	port, _, code := h.towards(route)
	if code != noError || route>>8 != 0 { // hosts pass nothing on for others
		// No error: the driver would take it for the answer to whichever
		// request it is waiting for (ctl.c, tb_cfg_match).
		h.control.counters.Dropped++
		return
	}
	peer := port.peer()
	h.control.counters.XDomain++
	port.counters.OutPackets++
	peer.counters.InPackets++
	port.wire().counters.Control++
	out := *p
	out.words[0], out.words[1] = fromRouter, uint32(peer.lanes[0].number)
	peer.host.send(out)
}

// sendEvent tells the driver that something was plugged in or pulled.
func (h *Host) sendEvent(adapter int, unplug bool) {
	w := uint32(adapter)
	if unplug {
		w |= 1 << 31
	}
	h.control.counters.Events++
	h.send(newPacket(packetEvent, fromRouter, 0, w))
}

// acknowledge handles an ERROR of the driver: the acknowledgement of an event
// (ctl.c, tb_cfg_ack_plug).
func (h *Host) acknowledge(p *packet) {
	if p.n < 3 || p.words[2]&0xff != errorAckPlug {
		return
	}
	a := h.router.adapter(int(p.words[2] >> 8 & 0x3f))
	if a == nil || a.port == nil || a.second {
		return
	}
	h.control.counters.Acks++
	a.port.acknowledged(p.words[2]>>30 == 3)
}
