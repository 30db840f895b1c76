package address

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
)

// Kinds of claim, as AddressClaim.kind has them.
const (
	kindLink = "link"
	kindNode = "node"
	// kindRange is what a node's own network has: its LAN, a VPN. Versions before
	// 0.2 do not know it.
	kindRange = "range"
)

// agreement is the subnet of one link, as both ends remember it.
type agreement struct {
	Peer     string       `json:"peer"`
	Port     string       `json:"port"`
	PeerPort string       `json:"peer_port"`
	Prefix   netip.Prefix `json:"prefix"` // the subnet
	MTU      int          `json:"mtu,omitempty"`
	Turn     uint64       `json:"turn"` // grows with each agreement of this node
	// confirmed is set once the far end has said yes in this life of the agent.
	confirmed bool
	// seen is set once the far end was seen to claim it: should that claim go,
	// the far end has given it up.
	seen bool
}

// maxPorts bounds what is remembered of one own port and peer: a cable that was
// moved about.
const maxPorts = 4

// claim is what another node claims.
type claim struct {
	node   string
	prefix netip.Prefix // masked
	kind   string
	port   string // of a link
	peer   string // of a link
	inUse  bool
	maxMTU uint32 // of a link's interface there; 0 if unknown
}

func (c claim) precedence() string {
	if c.kind == kindNode {
		return precedence(kindNode, c.node)
	}
	return precedence(kindLink, min(c.node, c.peer), max(c.node, c.peer))
}

func (c claim) String() string {
	switch c.kind {
	case kindNode:
		return "the node address of " + c.node
	case kindRange:
		return fmt.Sprintf("%s, which is outside the cables on %s", c.prefix, c.node)
	}
	return fmt.Sprintf("the link between %s and %s", c.node, c.peer)
}

// parseClaims reads a node's claims; what is none is left out.
func parseClaims(node string, list []*peerv1.AddressClaim) []claim {
	var out []claim
	for _, c := range list {
		p, err := netip.ParsePrefix(c.GetPrefix())
		if err != nil || !p.Addr().Is4() {
			continue
		}
		k := claim{node: node, prefix: p.Masked(), kind: c.GetKind(), inUse: c.GetInUse(), maxMTU: c.GetMaxMtu()}
		switch c.GetKind() {
		case kindLink:
			k.port, k.peer, _ = strings.Cut(c.GetKey(), "/")
			if k.peer == "" {
				continue
			}
		case kindNode, kindRange:
		default:
			continue
		}
		out = append(out, k)
	}
	return out
}

// book is what is agreed, claimed and occupied; all decisions are made in it.
// It does no I/O and is not safe for concurrent use.
type book struct {
	self  string
	space spaces
	inUse func(netip.Prefix) bool
	old   bool // says and heeds nothing that versions before 0.2 did not

	node       netip.Prefix // own node address, /32
	agreements []*agreement
	turn       uint64
	pending    map[netip.Prefix]string // proposed and not answered yet, by link
	claims     map[string][]claim      // of other nodes
	uses       []use                   // of this machine
	largest    map[string]int          // MTU that an own port can have, where something is plugged in
}

func newBook(self string, s spaces, inUse func(netip.Prefix) bool) *book {
	if inUse == nil {
		inUse = func(netip.Prefix) bool { return false }
	}
	return &book{self: self, space: s, inUse: inUse, pending: map[netip.Prefix]string{}, claims: map[string][]claim{}, largest: map[string]int{}}
}

func linkKey(peer, port, peerPort string) string { return peer + "\x00" + port + "\x00" + peerPort }

func (a *agreement) key() string { return linkKey(a.Peer, a.Port, a.PeerPort) }

// own returns this node's address in a link's subnet, with its length: the
// lower ID has the lower one.
func (b *book) own(a *agreement) netip.Prefix {
	low := a.Prefix.Addr().Next()
	if b.self > a.Peer {
		low = low.Next()
	}
	return netip.PrefixFrom(low, 30)
}

// far returns the other node's address.
func (b *book) far(a *agreement) netip.Addr {
	low := a.Prefix.Addr().Next()
	if b.self < a.Peer {
		low = low.Next()
	}
	return low
}

// find returns the agreement for a link. The lower ID goes by both ports, as it
// proposes; the higher takes the last one agreed for its port.
func (b *book) find(peer, port, peerPort string) *agreement {
	var last *agreement
	for _, a := range b.agreements {
		if a.Peer != peer || a.Port != port {
			continue
		}
		if b.self < peer && peerPort != "" {
			if a.PeerPort == peerPort {
				return a
			}
			continue
		}
		if last == nil || a.Turn > last.Turn {
			last = a
		}
	}
	return last
}

// newest reports whether no later agreement with that peer is about one of the
// two ports: the far end would go by that one.
func (b *book) newest(a *agreement) bool {
	return !slices.ContainsFunc(b.agreements, func(o *agreement) bool {
		return o.Peer == a.Peer && (o.Port == a.Port || o.PeerPort == a.PeerPort) && o.Turn > a.Turn
	})
}

// record notes an agreement and forgets what it replaces.
func (b *book) record(peer, port, peerPort string, prefix netip.Prefix, mtu int) *agreement {
	key := linkKey(peer, port, peerPort)
	b.agreements = slices.DeleteFunc(b.agreements, func(a *agreement) bool {
		return a.key() == key || a.Peer == peer && a.Prefix.Overlaps(prefix)
	})
	b.turn++
	a := &agreement{Peer: peer, Port: port, PeerPort: peerPort, Prefix: prefix, MTU: mtu, Turn: b.turn, confirmed: true}
	b.agreements = append(b.agreements, a)
	slices.SortFunc(b.agreements, func(x, y *agreement) int { return cmp.Compare(y.Turn, x.Turn) })
	kept := 0
	b.agreements = slices.DeleteFunc(b.agreements, func(o *agreement) bool {
		if o.Peer != peer || o.Port != port {
			return false
		}
		kept++
		return kept > maxPorts
	})
	return a
}

func (b *book) drop(a *agreement) {
	b.agreements = slices.DeleteFunc(b.agreements, func(o *agreement) bool { return o == a })
}

// free says who uses some of a subnet that a link would take, and what range;
// the zero use if nobody does.
func (b *book) free(prefix netip.Prefix, peer, port, peerPort string) use {
	if u := overlapping(b.uses, prefix); u.there() {
		return u
	}
	key := linkKey(peer, port, peerPort)
	for p, k := range b.pending {
		if k != key && p.Overlaps(prefix) {
			return use{prefix: p, by: "a subnet proposed for another link"}
		}
	}
	for _, a := range b.agreements {
		// What the two nodes agreed before about other ports is the lower ID's
		// to change.
		if a.Prefix.Overlaps(prefix) && a.key() != key && (a.Peer != peer || b.self < peer) {
			return use{prefix: a.Prefix, by: fmt.Sprintf("the link of port %s to %s", a.Port, a.Peer)}
		}
	}
	if b.node.IsValid() && b.node.Overlaps(prefix) {
		return use{prefix: b.node, by: "the own node address"}
	}
	for _, list := range b.claims {
		for _, c := range list {
			if c.kind != kindRange && c.prefix.Overlaps(prefix) && !(c.kind == kindLink && c.node == peer && c.peer == b.self) {
				return use{prefix: c.prefix, by: c.String()}
			}
		}
	}
	return use{}
}

// verdict is whether an address may stay.
type verdict struct {
	clash string // with what it clashes; "" if with nothing
	move  bool   // it must go now
}

// standing judges the subnet of an agreement that clashes with what became
// known later. What this machine's own network took is given up; against
// another link or node the one of lower precedence keeps it. What is in use
// does not move.
func (b *book) standing(a *agreement) verdict {
	clash := overlapping(b.uses, a.Prefix).by
	if clash == "" {
		own := precedence(kindLink, min(b.self, a.Peer), max(b.self, a.Peer))
		clash = b.outranked(a.Prefix, own, func(c claim) bool {
			return c.kind == kindLink && (c.node == a.Peer && c.peer == b.self)
		})
	}
	if clash == "" {
		return verdict{}
	}
	return verdict{clash: clash, move: !b.inUse(b.own(a)) && !b.farInUse(a)}
}

// farInUse reports whether the far end says that it uses the subnet.
func (b *book) farInUse(a *agreement) bool {
	return slices.ContainsFunc(b.claims[a.Peer], func(c claim) bool {
		return c.kind == kindLink && c.peer == b.self && c.prefix == a.Prefix && c.inUse
	})
}

// outranked returns the claim of lower precedence that overlaps; "" if none.
func (b *book) outranked(p netip.Prefix, own string, same func(claim) bool) string {
	for _, list := range b.claims {
		for _, c := range list {
			if c.kind != kindRange && c.prefix.Overlaps(p) && !same(c) && c.precedence() < own {
				return c.String()
			}
		}
	}
	return ""
}

// standingNode judges the own node address.
func (b *book) standingNode() verdict {
	clash := overlapping(b.uses, b.node).by
	if clash == "" {
		clash = b.outranked(b.node, precedence(kindNode, b.self), func(claim) bool { return false })
	}
	if clash == "" {
		clash = b.elsewhere(b.node).by
	}
	if clash == "" {
		return verdict{}
	}
	return verdict{clash: clash, move: !b.inUse(b.node)}
}

// elsewhere returns the range on another node's network that holds some of p;
// the zero use if there is none. A node address in there is of no use: over its
// LAN that node could not tell it from a machine that is there.
func (b *book) elsewhere(p netip.Prefix) use {
	var found use
	if b.old {
		return found
	}
	for _, list := range b.claims {
		for _, c := range list {
			if c.kind != kindRange || !c.prefix.Overlaps(p) {
				continue
			}
			u := use{prefix: c.prefix, by: c.String()}
			if !found.there() || cmp.Or(cmp.Compare(u.prefix.Bits(), found.prefix.Bits()), cmp.Compare(u.by, found.by)) < 0 {
				found = u
			}
		}
	}
	return found
}

// next returns the first free subnet for a link for which this node proposes,
// but for ranges already refused, and keeps it for this link until settled.
func (b *book) next(peer, port, peerPort string, refused []netip.Prefix) (netip.Prefix, string) {
	why := ""
	for p := range b.space.linkCandidates(b.self, port, peer, peerPort) {
		if slices.ContainsFunc(refused, p.Overlaps) {
			continue
		}
		taken := b.free(p, peer, port, peerPort)
		if !taken.there() {
			b.pending[p] = linkKey(peer, port, peerPort)
			return p, ""
		}
		why = taken.by
		if taken.prefix.Bits() < p.Bits() {
			refused = append(refused, taken.prefix) // nothing within is free either
		}
	}
	return netip.Prefix{}, why
}

// settled ends the keeping of a proposed subnet.
func (b *book) settled(p netip.Prefix) { delete(b.pending, p) }

// accept answers a proposal of the lower ID for an own port. mtu is the largest
// that this end can set, 0 if unknown.
func (b *book) accept(from, port, fromPort string, prefix netip.Prefix, mtu int) (conflict use) {
	if !b.space.isLink(prefix) {
		return use{prefix: prefix, by: fmt.Sprintf("%s is no link subnet of %s", prefix, b.space)}
	}
	for _, a := range b.agreements {
		if a.key() == linkKey(from, port, fromPort) && a.Prefix == prefix {
			if v := b.standing(a); v.move {
				b.drop(a)
				return use{prefix: cmp.Or(overlapping(b.uses, prefix).prefix, prefix), by: v.clash}
			}
			b.record(from, port, fromPort, prefix, mtu)
			return use{}
		}
	}
	if taken := b.free(prefix, from, port, fromPort); taken.there() {
		return taken
	}
	b.record(from, port, fromPort, prefix, mtu)
	return use{}
}

// chooseNode makes sure that there is a node address and that it may stay. One
// that is free here, but in a range that another node's network has, is taken
// only where there is no better one.
func (b *book) chooseNode() (changed bool, v verdict) {
	if b.space.isNode(b.node) {
		if v = b.standingNode(); !v.move {
			return false, v
		}
	}
	old := b.node
	b.node = netip.Prefix{}
	second := netip.Prefix{}
	if b.space.isNode(old) && !b.free(old, "", "", "").there() {
		second = old
	}
	var taken, foreign []netip.Prefix // as a whole
	for p := range b.space.nodeCandidates(b.self) {
		if slices.ContainsFunc(taken, p.Overlaps) || second.IsValid() && slices.ContainsFunc(foreign, p.Overlaps) {
			continue
		}
		if u := b.free(p, "", "", ""); u.there() {
			if u.prefix.Bits() < p.Bits() {
				taken = append(taken, u.prefix)
			}
			continue
		}
		u := b.elsewhere(p)
		if !u.there() {
			b.node = p
			return b.node != old, v
		}
		if u.prefix.Bits() < p.Bits() {
			foreign = append(foreign, u.prefix)
		}
		if !second.IsValid() {
			second = p
		}
	}
	if b.node = second; second == old {
		v.move = false // there is no better one
	}
	return b.node != old, v
}

// ownClaims lists what this node claims.
func (b *book) ownClaims() []*peerv1.AddressClaim {
	var out []*peerv1.AddressClaim
	for _, a := range b.agreements {
		own := b.own(a)
		out = append(out, &peerv1.AddressClaim{Prefix: own.String(), Kind: kindLink, Key: a.Port + "/" + a.Peer, InUse: b.inUse(own), MaxMtu: uint32(b.largest[a.Port])})
	}
	if b.node.IsValid() {
		out = append(out, &peerv1.AddressClaim{Prefix: b.node.String(), Kind: kindNode, InUse: b.inUse(b.node)})
	}
	if !b.old {
		for _, p := range ranges(b.uses, b.space) {
			out = append(out, &peerv1.AddressClaim{Prefix: p.String(), Kind: kindRange})
		}
	}
	slices.SortFunc(out, func(x, y *peerv1.AddressClaim) int {
		return cmp.Or(cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Key, y.Key), cmp.Compare(x.Prefix, y.Prefix))
	})
	return out
}

// agreeMTUs brings what was agreed on to what both ends can do now: an end may
// have another interface, or another limit set, than when they were asked.
func (b *book) agreeMTUs() (changed bool) {
	for _, a := range b.agreements {
		own := b.largest[a.Port]
		for _, c := range b.claims[a.Peer] {
			if c.kind != kindLink || c.peer != b.self || c.port != a.PeerPort || c.prefix != a.Prefix {
				continue
			}
			if mtu := agreeMTU(own, c.maxMTU); mtu > 0 && mtu != a.MTU {
				a.MTU, changed = mtu, true
			}
		}
	}
	return changed
}

// claimed reports whether the far end claims its address of an agreement.
func (b *book) claimed(a *agreement) bool {
	return slices.ContainsFunc(b.claims[a.Peer], func(c claim) bool {
		return c.kind == kindLink && c.peer == b.self && c.port == a.PeerPort && c.prefix == a.Prefix
	})
}
