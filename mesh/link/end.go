package link

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

// key names an end over replugs.
type key struct {
	port   string
	remote string // canonical UUID
}

// end is one own link end. The tracker's mutex guards it.
type end struct {
	key
	local  string // own domain's UUID as the system writes it
	x      host.XDomain
	nic    host.Interface // zero where x has none
	addr   Address
	listed bool   // the Thunderbolt layer sees it now
	fresh  bool   // it is here for the first time, and nobody knows from where
	turned uint64 // number of the update by which it appeared or vanished

	peerID   string // node at the far end, by UUIDs
	peerPort string // port there, by UUIDs or a guess
	lastPeer string // the last node that was known to be there

	// What probes have shown since the interface appeared.
	probedID   string
	probedPort string // kept over replugs as a hint
	hadNIC     bool   // it had an interface since it was plugged
	met        bool
	silent     bool // it was met and answers no more
	trouble    string
	lastPong   time.Time
	rtt        time.Duration
	shownRTT   time.Duration

	sessions map[*session]struct{}
	prober   *prober

	state tbclusterv1.LinkState
	since time.Time
	flaps uint32
}

// proven reports whether any connection's pings come back.
func (e *end) proven() bool {
	for s := range e.sessions {
		if s.good {
			return true
		}
	}
	return false
}

// addressed reports whether the link address is on the interface that the end
// has now.
func (e *end) addressed() bool {
	return e.nic.Name != "" && e.addr.Prefix.IsValid() && e.addr.Interface == e.nic.Name
}

// peer is the node at the far end; "" while unknown.
func (e *end) peer() string {
	if e.peerID != "" {
		return e.peerID
	}
	return e.probedID
}

// unpluggedOrOff is what one end alone can say of a cable that it does not see.
const unpluggedOrOff = "the cable is unplugged or the machine at the other end is off"

// current derives the state and what keeps it from being better.
func (e *end) current(name func(string) string) (tbclusterv1.LinkState, string) {
	peer := name(e.peer())
	switch {
	case !e.listed:
		return tbclusterv1.LinkState_LINK_STATE_DOWN, unpluggedOrOff
	case e.nic.Name == "" && e.hadNIC && e.peer() != "":
		return tbclusterv1.LinkState_LINK_STATE_DOWN, "its network interface has vanished"
	case e.nic.Name == "":
		return tbclusterv1.LinkState_LINK_STATE_CABLED, "it has no network interface"
	case !e.addressed():
		if e.peer() == "" {
			return tbclusterv1.LinkState_LINK_STATE_CABLED, "the machine at the other end is not known"
		}
		if e.addr.Reason != "" {
			return tbclusterv1.LinkState_LINK_STATE_CABLED, e.addr.Reason
		}
		return tbclusterv1.LinkState_LINK_STATE_CABLED, "it has no address yet"
	case e.proven():
		return tbclusterv1.LinkState_LINK_STATE_PROVEN, ""
	case e.silent:
		return tbclusterv1.LinkState_LINK_STATE_DOWN, fmt.Sprintf("the cable has carrier, but nothing answers over %s any more", e.nic.Name)
	case e.trouble != "":
		return tbclusterv1.LinkState_LINK_STATE_ADDRESSED, e.trouble
	}
	return tbclusterv1.LinkState_LINK_STATE_ADDRESSED, fmt.Sprintf("no answer from %s over %s yet", peer, e.nic.Name)
}

// settle brings state, since and flaps up to date.
func (e *end) settle(now time.Time, name func(string) string, h *History) {
	if p := e.peer(); p != "" {
		e.lastPeer = p
	}
	s, reason := e.current(name)
	if s == e.state {
		return
	}
	switch s {
	case tbclusterv1.LinkState_LINK_STATE_DOWN:
		e.flaps++
		h.down(e.port, e.lastPeer, reason, now)
	case tbclusterv1.LinkState_LINK_STATE_PROVEN:
		h.back(e.port, e.lastPeer, now)
	}
	e.state, e.since = s, now
}

// unmeet forgets what probes have shown; the port met stays as a hint.
func (e *end) unmeet() {
	e.met, e.silent, e.trouble, e.probedID = false, false, "", ""
	e.rtt, e.shownRTT = 0, 0
}

func (e *end) report(name func(string) string) *peerv1.LinkReport {
	state, reason := e.current(name)
	r := &peerv1.LinkReport{
		Port:           e.port,
		LocalUuid:      e.local,
		RemoteUuid:     e.x.RemoteUUID,
		Interface:      e.nic.Name,
		Mtu:            uint32(max(e.nic.MTU, 0)),
		NegotiatedGbps: negotiated(e.x),
		CapableGbps:    e.x.CapableGbps,
		Lanes:          uint32(max(e.x.TxLanes, e.x.RxLanes, 0)),
		ProbedPort:     e.probedPort,
		Present:        e.listed,
		Reason:         reason,
		TxBytes:        e.nic.TxBytes,
		RxBytes:        e.nic.RxBytes,
		Errors:         e.nic.RxErrors + e.nic.TxErrors + e.nic.RxDropped + e.nic.TxDropped,
		RxErrors:       e.nic.RxErrors,
		TxErrors:       e.nic.TxErrors,
		RxDropped:      e.nic.RxDropped,
		TxDropped:      e.nic.TxDropped,
		Hops:           uint32(max(e.x.Hops, 0)),
		Flaps:          e.flaps,
		RemoteDevice:   e.x.Device,
		RemoteVendor:   e.x.Vendor,
		StateSince:     timestamppb.New(e.since),
	}
	if e.addressed() {
		r.Address = e.addr.Prefix.String()
	}
	if state == tbclusterv1.LinkState_LINK_STATE_CABLED && reason == e.addr.Reason && e.addr.NoneFree {
		r.Obstacle = tbclusterv1.LinkObstacle_LINK_OBSTACLE_NO_ADDRESS
	}
	switch state {
	case tbclusterv1.LinkState_LINK_STATE_PROVEN:
		r.Proven, r.ProbedNodeId, r.RttUs = true, e.probedID, uint64(max(e.shownRTT.Microseconds(), 1))
	case tbclusterv1.LinkState_LINK_STATE_DOWN:
		// A present end that met somebody and is not proven counts as down.
		r.ProbedNodeId = e.probedID
		if r.ProbedNodeId == "" {
			r.ProbedNodeId = e.peerID
		}
	}
	return r
}

// remembered adds what the history has of the end.
func (e *end) remembered(r *peerv1.LinkReport, h *History) {
	flaps, m := h.of(e.port, e.lastPeer, e.farPort(), negotiated(e.x))
	for _, f := range flaps {
		p := &tbclusterv1.LinkFlap{DownAt: timestamppb.New(f.Down), Reason: f.Reason}
		if !f.Back.IsZero() {
			p.BackAt = timestamppb.New(f.Back)
		}
		r.FlapHistory = append(r.FlapHistory, p)
	}
	if m != nil {
		r.Measurement = m.Proto()
	}
}

// farPort is the port at the far end as far as known.
func (e *end) farPort() string {
	if e.probedID != "" && e.probedPort != "" {
		return e.probedPort
	}
	return e.peerPort
}

// negotiated is the lower of both directions' rates.
func negotiated(x host.XDomain) float64 { return lower(x.RxGbps, x.TxGbps) }
