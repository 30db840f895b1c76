package link

import (
	"cmp"
	"net/netip"
	"slices"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
)

// side is one end as its node reports it.
type side struct {
	node   string
	report *peerv1.LinkReport
	local  string // canonical
	remote string // canonical
	peer   *side  // the other end once matched
}

func (s *side) match(o *side) { s.peer, o.peer = o, s }

// group is the ends of two nodes that name each other by the same two UUIDs;
// more than one pair where a controller has one UUID for several ports.
type group struct {
	a, b   string // node IDs, a <= b
	ua, ub string // canonical UUIDs of a's and b's domain
}

// matcher joins ends into links.
type matcher struct {
	sides []*side
	nodes map[string][]*side
	// rotate gives the number of the try for a group whose pairs are not told
	// apart by anything but trying; nil means guess in order of ports.
	rotate func(group) int
}

func newMatcher(reports map[string][]*peerv1.LinkReport) *matcher {
	m := &matcher{nodes: map[string][]*side{}}
	canonical := canonicalUUIDs()
	for node, list := range reports {
		for _, r := range list {
			s := &side{node: node, report: r, local: canonical(r.GetLocalUuid()), remote: canonical(r.GetRemoteUuid())}
			m.sides = append(m.sides, s)
			m.nodes[node] = append(m.nodes[node], s)
		}
	}
	slices.SortFunc(m.sides, compareSides)
	for _, list := range m.nodes {
		slices.SortFunc(list, compareSides)
	}
	return m
}

// latest leaves out what nodes that are not up said of ends whose machine speaks
// as a node that is up: it has a new identity since, and the cables go on. A
// domain's UUID tells the machine.
func latest(reports map[string][]*peerv1.LinkReport, up func(node string) bool) map[string][]*peerv1.LinkReport {
	canonical := canonicalUUIDs()
	speaks := map[string]bool{}
	for node, list := range reports {
		for _, r := range list {
			if u := canonical(r.GetLocalUuid()); u != "" && up(node) {
				speaks[u] = true
			}
		}
	}
	out := make(map[string][]*peerv1.LinkReport, len(reports))
	for node, list := range reports {
		if !up(node) {
			list = slices.DeleteFunc(slices.Clone(list), func(r *peerv1.LinkReport) bool { return speaks[canonical(r.GetLocalUuid())] })
		}
		out[node] = list
	}
	return out
}

func compareSides(a, b *side) int {
	return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.report.GetPort(), b.report.GetPort()), cmp.Compare(a.remote, b.remote))
}

// run matches every side that has a counterpart.
func (m *matcher) run() {
	m.byProbe()
	for _, g := range m.groups() {
		m.matchGroup(g)
	}
}

// byProbe matches what a bound probe has shown, first where both ends say so.
func (m *matcher) byProbe() {
	for _, mutual := range []bool{true, false} {
		for _, s := range m.sides {
			r := s.report
			if s.peer != nil || !r.GetPresent() || r.GetProbedNodeId() == "" || r.GetProbedPort() == "" {
				continue
			}
			for _, o := range m.nodes[r.GetProbedNodeId()] {
				q := o.report
				if o == s || o.peer != nil || q.GetPort() != r.GetProbedPort() || !q.GetPresent() {
					continue
				}
				back := q.GetProbedNodeId() == s.node && q.GetProbedPort() == r.GetPort()
				if back || !mutual && q.GetProbedNodeId() == "" {
					s.match(o)
					break
				}
			}
		}
	}
}

// groups returns the groups in a fixed order.
func (m *matcher) groups() []group {
	byLocal := map[string][]string{} // canonical UUID → nodes
	for _, s := range m.sides {
		if s.local != "" && !slices.Contains(byLocal[s.local], s.node) {
			byLocal[s.local] = append(byLocal[s.local], s.node)
		}
	}
	var out []group
	seen := map[group]bool{}
	for _, s := range m.sides {
		if s.local == "" || s.remote == "" {
			continue
		}
		for _, node := range byLocal[s.remote] {
			g := group{a: s.node, b: node, ua: s.local, ub: s.remote}
			if g.a > g.b || g.a == g.b && g.ua > g.ub {
				g = group{a: g.b, b: g.a, ua: g.ub, ub: g.ua}
			}
			if !seen[g] {
				seen[g] = true
				out = append(out, g)
			}
		}
	}
	return out
}

// open returns the unmatched sides of both ends of a group.
func (m *matcher) open(g group) (as, bs []*side) {
	for _, s := range m.nodes[g.a] {
		if s.peer == nil && s.local == g.ua && s.remote == g.ub {
			as = append(as, s)
		}
	}
	for _, s := range m.nodes[g.b] {
		if s.peer == nil && s.local == g.ub && s.remote == g.ua {
			bs = append(bs, s)
		}
	}
	return as, bs
}

func (m *matcher) matchGroup(g group) {
	try := 0
	if m.rotate != nil {
		try = m.rotate(g)
	}
	// What is plugged now first: a moved cable leaves a dead end at its old port.
	for _, present := range []bool{true, false} {
		as, bs := m.open(g)
		if present {
			as, bs = onlyPresent(as), onlyPresent(bs)
		}
		if try == 0 {
			matchWhere(as, bs, samePorts)
			matchWhere(as, bs, sameSubnet)
		}
		as, bs = unmatched(as), unmatched(bs)
		if len(as) == 0 || len(bs) == 0 {
			continue
		}
		if g.a == g.b { // a cable from a machine to itself
			matchLoop(as, bs)
			continue
		}
		// One side may not have told of all its ends yet; a wrong guess costs
		// seconds, waiting for the other's next word does not.
		if m.rotate != nil && present && try == 0 && len(as) != len(bs) {
			return
		}
		for i, s := range as {
			if j := (i + try) % len(bs); bs[j].peer == nil {
				s.match(bs[j])
			}
		}
	}
}

func matchWhere(as, bs []*side, fits func(a, b *side) bool) {
	for _, a := range as {
		for _, b := range bs {
			if a != b && a.peer == nil && b.peer == nil && fits(a, b) {
				a.match(b)
			}
		}
	}
}

func matchLoop(as, bs []*side) {
	matchWhere(as, bs, func(_, _ *side) bool { return true })
}

// samePorts tells whether each end last met the other's port, as far as it met
// any, and at least one did.
func samePorts(a, b *side) bool {
	pa, pb := a.report.GetProbedPort(), b.report.GetProbedPort()
	return (pa != "" || pb != "") && (pa == "" || pa == b.report.GetPort()) && (pb == "" || pb == a.report.GetPort())
}

// sameSubnet tells whether both ends have addresses in one subnet: it was
// agreed for exactly these two ports.
func sameSubnet(a, b *side) bool {
	pa, errA := netip.ParsePrefix(a.report.GetAddress())
	pb, errB := netip.ParsePrefix(b.report.GetAddress())
	return errA == nil && errB == nil && pa.Masked() == pb.Masked()
}

func onlyPresent(list []*side) []*side {
	return slices.DeleteFunc(slices.Clone(list), func(s *side) bool { return !s.report.GetPresent() })
}

func unmatched(list []*side) []*side {
	return slices.DeleteFunc(slices.Clone(list), func(s *side) bool { return s.peer != nil })
}
