//go:build linux

package usb4

import "time"

// cause is why a frame does not arrive.
type cause uint8

const (
	arrives cause = iota
	causeNoPath
	causeLinkDown
	causeRingOff
	causeNoBuffer
	causePDF
	causeDMA
	causeInjected
	numCauses
)

// causeNames are what traces call the causes.
var causeNames = [numCauses]string{"", "no path", "link down", "ring off", "no buffer", "PDF mismatch", "DMA fault", "injected loss"}

// add counts n frames that were lost.
func (d *Drops) add(c cause) {
	switch c {
	case causeNoPath:
		d.NoPath++
	case causeLinkDown:
		d.LinkDown++
	case causeRingOff:
		d.RingOff++
	case causeNoBuffer:
		d.NoBuffer++
	case causePDF:
		d.PDF++
	case causeDMA:
		d.DMA++
	case causeInjected:
		d.Injected++
	}
}

// route is the way of the frames of a transmit ring, as the path configuration
// spaces of the routers on it say: from the host interface to a lane adapter,
// over the cable, from the lane adapter there to a host interface, or on through
// a hub to the next cable.
type route struct {
	why  cause // it leads nowhere
	out  *path // entry of the sender's host interface adapter
	in   *path // entry of the receiver's lane adapter
	wire *wire // whose rate and latency frames keep to, and where they are under way
	to   *ring // nil if why is set, but for causeRingOff

	// Where hubs are in between: all cables in order, of which wire is the slowest,
	// and the entries of the hubs.
	over []*wire
	via  []*path
}

// first is the wire out of the sender, last that to the receiver.
func (rt *route) first() *wire {
	if rt.over != nil {
		return rt.over[0]
	}
	return rt.wire
}

func (rt *route) last() *wire {
	if rt.over != nil {
		return rt.over[len(rt.over)-1]
	}
	return rt.wire
}

// latency is that of all cables.
func (rt *route) latency() time.Duration {
	if rt.over == nil {
		return rt.wire.options.Latency
	}
	var sum time.Duration
	for _, w := range rt.over {
		sum += w.options.Latency
	}
	return sum
}

// slow reports whether frames have to wait for their turn.
func (rt *route) slow() bool { return rt.wire.options.Rate != 0 || rt.delayed() }

// delayed reports whether frames take time to arrive, or come after some that do.
func (rt *route) delayed() bool { return rt.wire.flying() > 0 || rt.latency() != 0 }

// lossy reports whether a cable loses frames.
func (rt *route) lossy() bool {
	if rt.over == nil {
		return rt.wire.lost.on
	}
	for _, w := range rt.over {
		if w.lost.on {
			return true
		}
	}
	return false
}

// lose decides whether a frame is lost, and on which cable.
func (rt *route) lose() verdict {
	if rt.over == nil {
		if rt.wire.lose() {
			return lostOn
		}
		return passes
	}
	for i, w := range rt.over {
		if w.lose() {
			return lostOn + verdict(i)
		}
	}
	return passes
}

// spoil is that of all cables.
func (rt *route) spoil(b []byte) (flags uint32) {
	if rt.over == nil {
		return rt.wire.spoil(b)
	}
	for _, w := range rt.over {
		flags |= w.spoil(b)
	}
	return flags
}

// sent counts a frame that sets out: on the wire where it may be under way. The
// others count it when it has passed.
func (rt *route) sent(n int) { rt.wire.sent(n) }

// arrived counts a frame that has come to the end.
func (rt *route) arrived(n int) {
	rt.wire.arrived(n)
	for _, w := range rt.over {
		if w != rt.wire {
			w.sent(n)
			w.arrived(n)
		}
	}
	for _, p := range rt.via {
		p.count(n, false)
	}
}

// lost counts a frame that was lost on one of the cables.
func (rt *route) lost(n int, v verdict) {
	if rt.over == nil {
		rt.wire.sent(n)
		return
	}
	last := int(v - lostOn)
	for i, w := range rt.over[:last+1] {
		w.sent(n)
		if i < last {
			w.arrived(n)
			rt.via[i].count(n, false)
		}
	}
}

// routeOf returns the way of a transmit ring's frames.
func (f *Fabric) routeOf(r *ring) *route {
	if r.wired != f.wiring {
		r.route = r.host.resolve(r.number)
		r.wired = f.wiring
	}
	return &r.route
}

func (h *Host) resolve(ring int) route {
	var rt route
	if rt.out = h.router.nhi().enabledPath(uint32(ring)); rt.out == nil {
		rt.why = causeNoPath
		return rt
	}
	var over []*wire
	over, rt.why = rt.walk(&h.node)
	for _, w := range over {
		if rt.wire == nil || w.options.Rate != 0 && (rt.wire.options.Rate == 0 || w.options.Rate < rt.wire.options.Rate) {
			rt.wire = w
		}
	}
	if len(over) > 1 {
		rt.over = over
	}
	return rt
}

// walk goes the way from a host, by its entry rt.out, and returns the cables that
// frames cross and where they end.
func (rt *route) walk(n *node) (over []*wire, why cause) {
	entry := rt.out
	for range 2*maxDepth + 1 {
		lane := n.router.adapter(entry.outAdapter())
		if lane == nil || lane.port == nil || lane.second {
			return over, causeNoPath
		}
		if !lane.port.up {
			return over, causeLinkDown
		}
		over = append(over, lane.port.wire())
		peer := lane.port.peer()
		in := peer.lanes[0].enabledPath(entry.outHop())
		if in == nil {
			return over, causeNoPath
		}
		if peer.node.hub != nil {
			rt.via = append(rt.via, in)
			n, entry = peer.node, in
			continue
		}
		ring := int(in.outHop())
		if in.outAdapter() != peer.node.router.nhi().number {
			return over, causeNoPath
		}
		rt.in = in
		if ring <= 0 || ring >= len(peer.node.host.rx) {
			return over, causeNoPath
		}
		rt.to = &peer.node.host.rx[ring]
		if !rt.to.enabled() {
			return over, causeRingOff
		}
		return over, arrives
	}
	return over, causeNoPath // a loop
}
