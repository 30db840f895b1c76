//go:build linux

package usb4

import "time"

// maxWaiting is how many packets may wait for the driver to give ring 0 buffers.
const maxWaiting = 64

// controlChannel is ring 0 of a host: packets between its driver, its router
// and other domains.
type controlChannel struct {
	waiting  []packet // for buffers
	buffer   [maxPacket]byte
	counters ControlCounters

	// answered is when the driver last answered another domain, where it has;
	// late are answers of others that wait because of that, until answer.
	answered    time.Duration
	hasAnswered bool
	late        []lateAnswer
	answer      *event
}

// lateAnswer is an answer for the driver, with since when it waits.
type lateAnswer struct {
	packet packet
	since  time.Duration
}

const (
	// answerGap is how long after an answer of its own a driver gets the next one
	// of another domain, unless it keeps answering: then it waits no longer than
	// lateAtMost, since drivers wait for half a second.
	//
	// Until Linux has done with an answer that it sends, it takes an answer that
	// comes for that to its own (xdomain.c, tb_xdomain_match), and ends one request
	// twice (ctl.c, tb_ctl_rx_callback). On a machine that is a matter of
	// microseconds, in one that is translated of a thousand times as many.
	answerGap  = 100 * time.Millisecond
	lateAtMost = 300 * time.Millisecond
)

func (h *Host) resetControl() {
	c := &h.control
	c.waiting, c.late, c.hasAnswered = nil, nil, false
	h.fabric.schedule.cancel(c.answer)
}

// take gives the driver a packet of another domain, an answer perhaps later.
func (h *Host) take(p packet) {
	c, now := &h.control, h.fabric.clock.Now()
	if p.kind != packetXDomainResponse || len(c.late) == 0 && (!c.hasAnswered || now >= c.answered+answerGap) {
		h.send(p)
		return
	}
	if len(c.late) >= maxWaiting {
		c.counters.Dropped++
		return
	}
	c.late = append(c.late, lateAnswer{p, now})
	h.fabric.schedule.at(c.answer, c.next())
}

// next is when the first late answer goes to the driver.
func (c *controlChannel) next() time.Duration {
	return min(c.answered+answerGap, c.late[0].since+lateAtMost)
}

// giveAnswers gives the driver the answers whose time has come.
func (h *Host) giveAnswers(now time.Duration) {
	c := &h.control
	for len(c.late) > 0 && now >= c.next() {
		p := c.late[0].packet
		c.late = c.late[1:]
		h.send(p)
	}
	if len(c.late) > 0 {
		h.fabric.schedule.at(c.answer, c.next())
	}
}

// controlRing is called when one of the two rings was switched on or off.
func (h *Host) controlRing() {
	f := h.fabric
	f.tell()
	if !h.listening() {
		h.resetControl()
		return
	}
	f.note(&h.node, nil, "control channel started")
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
	h.fabric.tracePacket(&h.node, nil, true, &p)
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
		h.fabric.tracePacket(&h.node, nil, false, p)
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
	n, adapter, code := h.follow(p.route())
	if code != noError {
		h.fail(p, code, adapter)
		return
	}
	read, write, size, code := n.space(a)
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
	reply := newPacket(p.kind, p.words[0]|fromRouter, p.words[1], a.from(n.router.upstream().number))
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
func (n *node) space(a address) (read func(uint32) uint32, write func(offset, v uint32), size, code uint32) {
	s := a.space()
	if s == spaceRouter {
		return n.router.read, n.router.write, routerSize, noError
	}
	if a.adapter() >= len(n.router.adapters) {
		return nil, nil, 0, errorNoPort
	}
	ad := n.router.adapter(a.adapter())
	if ad == nil || ad.space(s) == 0 {
		return nil, nil, 0, errorSpace
	}
	return func(o uint32) uint32 { return ad.read(s, o) }, func(o, v uint32) { ad.write(s, o, v) }, ad.space(s), noError
}

// forward sends an XDomain packet to the host of another domain, whose driver
// gets it with the adapter through which it came as the route.
func (h *Host) forward(p *packet) {
	port, code := h.outOf(p.route())
	if code != noError {
		// No error: the driver would take it for the answer to whichever
		// request it is waiting for (ctl.c, tb_cfg_match).
		h.control.counters.Dropped++
		return
	}
	to, route := port.peer().beyond()
	if to == nil { // a hub that nobody has taken, or one itself
		h.control.counters.Dropped++
		return
	}
	h.control.counters.XDomain++
	if p.kind == packetXDomainResponse {
		h.control.answered, h.control.hasAnswered = h.fabric.clock.Now(), true
	}
	port.counters.OutPackets++
	port.peer().counters.InPackets++
	port.wire().counters.Control++
	out := *p
	out.words[0], out.words[1] = fromRouter|uint32(route>>32), uint32(route)
	if port.cable.holding > 0 {
		port.cable.held = append(port.cable.held, heldPacket{to, out})
		return
	}
	to.take(out)
}

// heldPacket is a packet that waits for Cable.Hold to end.
type heldPacket struct {
	to     *Host
	packet packet
}

// sendEvent tells the driver that something was plugged in or pulled at a router
// of its domain.
func (n *node) sendEvent(adapter int, unplug bool) {
	h, route := n.manager()
	if h == nil {
		return
	}
	w := uint32(adapter)
	if unplug {
		w |= 1 << 31
	}
	h.control.counters.Events++
	h.send(newPacket(packetEvent, fromRouter|uint32(route>>32), uint32(route), w))
}

// acknowledge handles an ERROR of the driver: the acknowledgement of an event
// (ctl.c, tb_cfg_ack_plug).
func (h *Host) acknowledge(p *packet) {
	if p.n < 3 || p.words[2]&0xff != errorAckPlug {
		return
	}
	n, _, code := h.follow(p.route())
	if code != noError {
		return
	}
	a := n.router.adapter(int(p.words[2] >> 8 & 0x3f))
	if a == nil || a.port == nil || a.second {
		return
	}
	h.control.counters.Acks++
	a.port.acknowledged(p.words[2]>>30 == 3)
}
