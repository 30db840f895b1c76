//go:build linux

package usb4

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
// over the cable, from the lane adapter there to a host interface.
type route struct {
	why  cause // it leads nowhere
	out  *path // entry of the sender's host interface adapter
	in   *path // entry of the receiver's lane adapter
	wire *wire
	to   *ring // nil if why is set, but for causeRingOff
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
	nhi := h.router.nhi()
	if rt.out = nhi.enabledPath(uint32(ring)); rt.out == nil {
		rt.why = causeNoPath
		return rt
	}
	lane := h.router.adapter(rt.out.outAdapter())
	if lane == nil || lane.port == nil || lane.second {
		rt.why = causeNoPath
		return rt
	}
	port := lane.port
	if !port.up {
		rt.why = causeLinkDown
		return rt
	}
	rt.wire = port.wire()
	peer := port.peer()
	if rt.in = peer.lanes[0].enabledPath(rt.out.outHop()); rt.in == nil || rt.in.outAdapter() != peer.host.router.nhi().number {
		rt.in, rt.why = nil, causeNoPath
		return rt
	}
	if n := int(rt.in.outHop()); n > 0 && n < len(peer.host.rx) {
		rt.to = &peer.host.rx[n]
	} else {
		rt.why = causeNoPath
		return rt
	}
	if !rt.to.enabled() {
		rt.why = causeRingOff
	}
	return rt
}
