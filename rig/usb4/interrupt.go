//go:build linux

package usb4

import (
	"math/bits"
	"time"
)

// Interrupts of the host interface. A ring that has completed something sets
// its bit of the status and, if its interrupt is enabled, has its vector sent:
// once for everything that was completed in one piece of work. A bit that is
// set already is no reason not to send: the driver clears it by a posted write
// (nhi.c, ring_clear_msix), and what is completed before that write arrives
// would never be seen. Each vector can be throttled: no two closer than its
// interval.

// gate is what a vector passes through.
type gate struct {
	host     *Host
	vector   int
	interval time.Duration
	next     time.Duration // no sooner than this
	due      *event
}

func (g *gate) init(h *Host, vector int) {
	g.host, g.vector = h, vector
	g.due = newEvent(func(now time.Duration) { g.send(now) })
}

func (g *gate) reset() {
	g.interval, g.next = 0, 0
	g.host.fabric.schedule.cancel(g.due)
}

// pass sends the vector now, or when throttling allows.
func (g *gate) pass() (now bool) {
	if g.interval == 0 {
		g.host.interrupts[g.vector]++
		return true
	}
	if g.due.index >= 0 {
		return false // it is under way
	}
	t := g.host.fabric.clock.Now()
	if t < g.next {
		g.host.throttled++
		g.host.fabric.schedule.at(g.due, g.next)
		return false
	}
	g.next = t + g.interval
	g.host.interrupts[g.vector]++
	return true
}

// send is what is due after throttling.
func (g *gate) send(now time.Duration) {
	g.next = now + g.interval
	g.host.interrupts[g.vector]++
	g.host.late |= 1 << g.vector
	g.host.warm()
}

// complete notes that a ring has completed descriptors that ask for an
// interrupt.
func (h *Host) complete(r *ring) {
	h.raised |= r.bit
	h.warm()
}

// warm has interrupt called at the end of this piece of work.
func (h *Host) warm() {
	if !h.hot {
		h.hot = true
		h.fabric.firing = append(h.fabric.firing, h)
	}
}

// enable changes which rings interrupt. Those whose status is set and that were
// not enabled before interrupt now.
func (h *Host) enable(set uint64) {
	set &= 1<<(2*len(h.tx)) - 1
	if again := set &^ h.enabled & h.notify; again != 0 {
		h.raised |= again
		h.warm()
	}
	h.enabled = set
}

// interrupt sets the status of what was raised and returns the vectors to send.
func (h *Host) interrupt() uint32 {
	h.hot = false
	vectors := h.late
	h.late = 0
	h.notify |= h.raised
	send := h.raised & h.enabled
	h.raised = 0
	for ; send != 0; send &= send - 1 {
		i := bits.TrailingZeros64(send)
		if i < len(h.tx) {
			h.tx[i].counters.Interrupts++
		} else {
			h.rx[i-len(h.tx)].counters.Interrupts++
		}
		if v := h.vectors[i]; h.gates[v].pass() {
			vectors |= 1 << v
		}
	}
	if !h.attached || !h.pci.mastering() {
		return 0
	}
	if vectors != 0 && h.fabric.traceInterrupts {
		h.fabric.trace(kindInterrupt, &h.node, nil, func() string { return vectorNames(vectors) })
	}
	return vectors
}
