package link

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

// NodeInfo is a node of the cluster as Assemble needs it.
type NodeInfo struct {
	ID, Name string
	Up       bool
	Since    time.Time // since when it is up or down; may be zero
}

// Assemble joins what all nodes report of their own ends into links, sorted by
// ID. It is pure. A node that is in nodes but not in reports has not said
// anything yet. Nodes that are not in nodes are left out.
func Assemble(self string, nodes []NodeInfo, reports map[string][]*peerv1.LinkReport) []*tbclusterv1.Link {
	a := assembly{self: self, nodes: map[string]NodeInfo{}, silent: map[string]bool{}}
	known := map[string][]*peerv1.LinkReport{}
	for _, n := range nodes {
		a.nodes[n.ID] = n
		list, ok := reports[n.ID]
		if ok {
			known[n.ID] = list
		} else {
			a.silent[n.ID] = true
		}
	}
	m := newMatcher(latest(known, func(node string) bool { return a.nodes[node].Up }))
	m.run()
	a.byLocal = map[string]string{}
	for _, s := range m.sides {
		a.byLocal[s.local] = s.node
	}
	var links []*tbclusterv1.Link
	done := map[*side]bool{}
	for _, s := range m.sides {
		switch {
		case done[s]:
		case s.peer != nil:
			done[s.peer] = true
			links = append(links, a.pair(s, s.peer))
		default:
			if l := a.single(s); l != nil {
				links = append(links, l)
			}
		}
	}
	slices.SortFunc(links, func(x, y *tbclusterv1.Link) int { return cmp.Compare(x.GetId(), y.GetId()) })
	return links
}

type assembly struct {
	self    string
	nodes   map[string]NodeInfo
	silent  map[string]bool   // nodes that have reported nothing yet
	byLocal map[string]string // canonical UUID → node
}

func (a *assembly) name(node string) string {
	if n := a.nodes[node].Name; n != "" {
		return n
	}
	return node
}

// view is a link as one end sees it.
type view struct {
	state  tbclusterv1.LinkState
	reason string
}

// The states from worst to best.
var rank = map[tbclusterv1.LinkState]int{
	tbclusterv1.LinkState_LINK_STATE_DOWN:      0,
	tbclusterv1.LinkState_LINK_STATE_CABLED:    1,
	tbclusterv1.LinkState_LINK_STATE_ADDRESSED: 2,
	tbclusterv1.LinkState_LINK_STATE_PROVEN:    3,
}

// reportState is the state that a report amounts to. An end that met its peer
// since the interface appeared and no longer does is down; one that never did is
// on its way.
func reportState(r *peerv1.LinkReport) tbclusterv1.LinkState {
	switch {
	case !r.GetPresent():
		return tbclusterv1.LinkState_LINK_STATE_DOWN
	case r.GetProven():
		return tbclusterv1.LinkState_LINK_STATE_PROVEN
	case r.GetProbedNodeId() != "":
		return tbclusterv1.LinkState_LINK_STATE_DOWN
	case r.GetAddress() != "":
		return tbclusterv1.LinkState_LINK_STATE_ADDRESSED
	}
	return tbclusterv1.LinkState_LINK_STATE_CABLED
}

// Severed reports whether an end shows by itself that its cable carries
// nothing: it is unplugged, has lost its interface, or nothing comes through. An
// end whose far agent is away is not severed.
func Severed(r *peerv1.LinkReport) bool {
	return reportState(r) == tbclusterv1.LinkState_LINK_STATE_DOWN
}

func (a *assembly) view(s *side) view {
	n := a.nodes[s.node]
	if !n.Up {
		return view{tbclusterv1.LinkState_LINK_STATE_DOWN, a.name(s.node) + " is down"}
	}
	v := view{state: reportState(s.report), reason: s.report.GetReason()}
	if v.reason != "" {
		v.reason = a.name(s.node) + ": " + v.reason
	}
	return v
}

// pair makes the link of two ends that belong together.
func (a *assembly) pair(x, y *side) *tbclusterv1.Link {
	if x.node > y.node || x.node == y.node && x.report.GetPort() > y.report.GetPort() {
		x, y = y, x
	}
	vx, vy := a.view(x), a.view(y)
	l := &tbclusterv1.Link{
		Id:             linkID(x.node, x.report.GetPort(), y.node, y.report.GetPort()),
		A:              a.end(x),
		B:              a.end(y),
		NegotiatedGbps: lower(x.report.GetNegotiatedGbps(), y.report.GetNegotiatedGbps()),
		CapableGbps:    lower(x.report.GetCapableGbps(), y.report.GetCapableGbps()),
		Lanes:          uint32(lower(float64(x.report.GetLanes()), float64(y.report.GetLanes()))),
		RttUs:          max(x.report.GetRttUs(), y.report.GetRttUs()),
		Flaps:          max(x.report.GetFlaps(), y.report.GetFlaps()),
		Errors:         x.report.GetErrors() + y.report.GetErrors(),
		ATxBytes:       x.report.GetTxBytes(),
		ARxBytes:       x.report.GetRxBytes(),
		Hops:           max(x.report.GetHops(), y.report.GetHops()),
		FlapHistory:    a.flaps(x, y),
	}
	measured(l, x, y)
	worse, better, worseSide := vx, vy, x
	if rank[vy.state] < rank[vx.state] {
		worse, better, worseSide = vy, vx, y
	}
	l.State, l.Reason = worse.state, worse.reason
	if !x.report.GetPresent() && !y.report.GetPresent() && a.nodes[x.node].Up && a.nodes[y.node].Up && strings.HasSuffix(l.Reason, unpluggedOrOff) {
		l.Reason = "the cable is unplugged" // both machines are on, and say so
	}
	if l.Reason == "" && worse.state == better.state {
		l.Reason = better.reason
	}
	if l.State == tbclusterv1.LinkState_LINK_STATE_CABLED {
		// Whoever proposes the address knows, the other one waits.
		for _, v := range []struct {
			*side
			view
		}{{y, vy}, {x, vx}} {
			if o := v.report.GetObstacle(); o != tbclusterv1.LinkObstacle_LINK_OBSTACLE_UNSPECIFIED {
				l.Obstacle, l.Reason = o, v.reason
			}
		}
	}
	if l.Reason == "" && worse.state != tbclusterv1.LinkState_LINK_STATE_PROVEN {
		l.Reason = missing(worse.state, a.name(worseSide.node))
	}
	if x.node == y.node {
		l.State = min(l.State, tbclusterv1.LinkState_LINK_STATE_CABLED)
		if worse.state == tbclusterv1.LinkState_LINK_STATE_DOWN {
			l.State = worse.state
		}
		l.Reason = "the cable joins two ports of " + a.name(x.node)
	}
	l.StateSince = a.since(x, y)
	a.speed(l)
	l.Paths = a.paths(l)
	l.Evidence = a.evidence(l, x, y)
	if l.State != tbclusterv1.LinkState_LINK_STATE_PROVEN {
		l.RttUs = 0
	}
	return l
}

// missing says what keeps a link at a state, where its end does not.
func missing(s tbclusterv1.LinkState, node string) string {
	switch s {
	case tbclusterv1.LinkState_LINK_STATE_DOWN:
		return node + " sees no cable there"
	case tbclusterv1.LinkState_LINK_STATE_CABLED:
		return node + " has no address on it yet"
	}
	return node + " has had no answer over it yet"
}

// single makes the link of an end without a counterpart; nil where there is
// nothing to show.
func (a *assembly) single(s *side) *tbclusterv1.Link {
	r := s.report
	v := a.view(s)
	other, known := a.byLocal[s.remote]
	if p := r.GetProbedNodeId(); p != "" {
		if _, member := a.nodes[p]; member {
			other, known = p, true
		}
	}
	if !r.GetPresent() && (!known || a.nodes[other].Up) {
		return nil // pulled out, and the far end has forgotten it or was never one of us
	}
	l := &tbclusterv1.Link{
		Id:             linkID(s.node, r.GetPort(), "", s.remote),
		A:              a.end(s),
		State:          v.state,
		Reason:         v.reason,
		NegotiatedGbps: r.GetNegotiatedGbps(),
		CapableGbps:    r.GetCapableGbps(),
		Lanes:          r.GetLanes(),
		Flaps:          r.GetFlaps(),
		Errors:         r.GetErrors(),
		ATxBytes:       r.GetTxBytes(),
		ARxBytes:       r.GetRxBytes(),
		StateSince:     r.GetStateSince(),
		Hops:           r.GetHops(),
		FlapHistory:    a.flaps(s),
	}
	measured(l, s)
	device := strings.TrimSpace(r.GetRemoteVendor() + " " + r.GetRemoteDevice())
	switch {
	case known:
		l.B = &tbclusterv1.LinkEnd{NodeId: other, NodeName: a.name(other), Port: r.GetProbedPort()}
		if l.B.Port != "" {
			l.Id = linkID(s.node, r.GetPort(), other, l.B.Port)
		}
		if l.State == tbclusterv1.LinkState_LINK_STATE_PROVEN { // proven takes both
			l.State = tbclusterv1.LinkState_LINK_STATE_ADDRESSED
		}
		switch {
		case l.State == tbclusterv1.LinkState_LINK_STATE_DOWN && l.Reason != "":
		case !a.nodes[other].Up:
			l.State, l.Reason = tbclusterv1.LinkState_LINK_STATE_DOWN, a.name(other)+" is down"
		default:
			l.Reason = fmt.Sprintf("only %s sees this cable, %s does not", a.name(s.node), a.name(other))
		}
	case a.waiting(s.node) != "":
		l.Reason = "which machine is at the other end is not known before " + a.waiting(s.node) + " has reported"
	default:
		l.B = &tbclusterv1.LinkEnd{NodeName: device}
		l.State = min(l.State, tbclusterv1.LinkState_LINK_STATE_CABLED)
		if v.state == tbclusterv1.LinkState_LINK_STATE_DOWN {
			l.State = v.state
			break
		}
		l.Reason = "no node of this cluster is at the other end: `tbcluster pair` lets that machine in"
		if device == "" {
			l.B = nil
		}
	}
	if l.B.GetNodeId() != "" && l.B.GetNodeId() < l.A.GetNodeId() {
		l.A, l.B = l.B, l.A
		l.ATxBytes, l.ARxBytes = 0, 0 // counted by the other node's end
	}
	a.speed(l)
	l.Evidence = a.name(s.node) + " sees " + cmp.Or(device, "a machine") + " on port " + r.GetPort()
	if !r.GetPresent() {
		l.Evidence = a.name(s.node) + " saw it on port " + r.GetPort()
	}
	return l
}

// waiting names a node other than that one that may yet say that it is the far
// end; "" if all have spoken.
func (a *assembly) waiting(node string) string {
	var names []string
	for id := range a.silent {
		if id != node {
			names = append(names, a.name(id))
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

func (a *assembly) end(s *side) *tbclusterv1.LinkEnd {
	r := s.report
	return &tbclusterv1.LinkEnd{
		NodeId:    s.node,
		NodeName:  a.name(s.node),
		Port:      r.GetPort(),
		Interface: r.GetInterface(),
		Address:   r.GetAddress(),
		Mtu:       r.GetMtu(),
		TxBytes:   r.GetTxBytes(),
		RxBytes:   r.GetRxBytes(),
		TxErrors:  r.GetTxErrors(),
		RxErrors:  r.GetRxErrors(),
		TxDropped: r.GetTxDropped(),
		RxDropped: r.GetRxDropped(),
	}
}

// measured takes the newer measurement of the ends.
func measured(l *tbclusterv1.Link, sides ...*side) {
	for _, s := range sides {
		m := s.report.GetMeasurement()
		if m == nil || l.Measurement != nil && !m.GetMeasuredAt().AsTime().After(l.Measurement.GetMeasuredAt().AsTime()) {
			continue
		}
		l.Measurement = m
		l.MeasuredBytesPerSecond = min(m.GetAToBBytesPerSecond(), m.GetBToABytesPerSecond())
	}
}

// sameFlap is how far apart two ends may see one flap: a silent cable is
// noticed within seconds, and clocks differ a little.
const sameFlap = 10 * time.Second

// flaps joins what both ends remember, oldest first. Where clocks differ much,
// what both saw is there twice.
func (a *assembly) flaps(sides ...*side) []*tbclusterv1.LinkFlap {
	var out []*tbclusterv1.LinkFlap
	for _, s := range sides {
		known := len(out)
		joined := make([]bool, known)
	next:
		for _, f := range s.report.GetFlapHistory() {
			at := f.GetDownAt().AsTime()
			for i, o := range out[:known] {
				if !joined[i] && at.Sub(o.GetDownAt().AsTime()).Abs() <= sameFlap {
					joined[i] = true
					o.SeenBy = append(o.SeenBy, a.name(s.node))
					if at.Before(o.GetDownAt().AsTime()) {
						o.DownAt = f.GetDownAt()
					}
					if f.GetBackAt() == nil || o.GetBackAt() != nil && f.GetBackAt().AsTime().After(o.GetBackAt().AsTime()) {
						o.BackAt = f.GetBackAt()
					}
					continue next
				}
			}
			out = append(out, &tbclusterv1.LinkFlap{DownAt: f.GetDownAt(), BackAt: f.GetBackAt(), Reason: cut(f.GetReason()), SeenBy: []string{a.name(s.node)}})
		}
	}
	slices.SortStableFunc(out, func(x, y *tbclusterv1.LinkFlap) int {
		return x.GetDownAt().AsTime().Compare(y.GetDownAt().AsTime())
	})
	return out[max(0, len(out)-maxFlaps):]
}

// since is when the later of both ends came to its state; a node's going down
// counts.
func (a *assembly) since(x, y *side) *timestamppb.Timestamp {
	var latest time.Time
	for _, s := range []*side{x, y} {
		t := time.Time{}
		if ts := s.report.GetStateSince(); ts != nil {
			t = ts.AsTime()
		}
		if n := a.nodes[s.node]; !n.Up && n.Since.After(t) {
			t = n.Since
		}
		if t.After(latest) {
			latest = t
		}
	}
	if latest.IsZero() {
		return nil
	}
	return timestamppb.New(latest)
}

// speed says so where a link trained below what both ends can do.
func (a *assembly) speed(l *tbclusterv1.Link) {
	if l.State == tbclusterv1.LinkState_LINK_STATE_DOWN || l.NegotiatedGbps <= 0 || l.NegotiatedGbps >= l.CapableGbps {
		return
	}
	slow := fmt.Sprintf("it runs at %g of %g Gb/s", l.NegotiatedGbps, l.CapableGbps)
	if l.Reason == "" {
		l.Reason = slow
	} else {
		l.Reason += "; " + slow
	}
}

// paths lists tcp where both ends have addresses, from the answering node's
// side, a's where it is neither.
func (a *assembly) paths(l *tbclusterv1.Link) []*tbclusterv1.Path {
	if rank[l.State] < rank[tbclusterv1.LinkState_LINK_STATE_ADDRESSED] {
		return nil
	}
	own, far := l.A, l.B
	if l.B.GetNodeId() == a.self {
		own, far = far, own
	}
	return []*tbclusterv1.Path{{Transport: "tcp", Interface: own.GetInterface(), Address: bare(own.GetAddress()), PeerAddress: bare(far.GetAddress())}}
}

func (a *assembly) evidence(l *tbclusterv1.Link, x, y *side) string {
	uuids := "each end names the other's UUID"
	if x.local != y.remote || y.local != x.remote {
		uuids = "UUIDs do not tell; a probe bound to the interface met the other end"
	}
	switch l.State {
	case tbclusterv1.LinkState_LINK_STATE_PROVEN:
		return fmt.Sprintf("%s; pings between %s and %s come back in %.2g ms", uuids, x.report.GetInterface(), y.report.GetInterface(), float64(l.RttUs)/1000)
	case tbclusterv1.LinkState_LINK_STATE_ADDRESSED:
		return uuids + "; both ends have addresses"
	case tbclusterv1.LinkState_LINK_STATE_CABLED:
		return uuids
	}
	var see []string
	for _, s := range []*side{x, y} {
		if s.report.GetPresent() && a.nodes[s.node].Up {
			see = append(see, a.name(s.node))
		}
	}
	if len(see) == 0 {
		return "neither end sees it now"
	}
	if len(see) > 1 {
		return strings.Join(see, " and ") + " still see the cable"
	}
	return see[0] + " still sees the cable"
}

// linkID is stable over replugs: it rests on nodes and ports only.
func linkID(node, port, farNode, farPort string) string {
	if farNode != "" && (farNode < node || farNode == node && farPort < port) {
		node, port, farNode, farPort = farNode, farPort, node, port
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{node, port, farNode, farPort}, "\x00")))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:5]))
}

// lower is the lower of two numbers of which 0 means unknown.
func lower(a, b float64) float64 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// bare drops the prefix length.
func bare(address string) string {
	if p, err := netip.ParsePrefix(address); err == nil {
		return p.Addr().String()
	}
	return address
}
