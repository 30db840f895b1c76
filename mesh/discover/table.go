package discover

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"tbcluster/mesh/identity"
)

const (
	// maxNodes bounds the table; strangers make room for each other, never
	// members for strangers.
	maxNodes = 256
	// maxMemory is how many addresses of one node are remembered.
	maxMemory = 8
	// maxPlaces bounds the addresses of a candidate after link-local ones were
	// multiplied by the interfaces.
	maxPlaces = 64
	// oldFor is how long an announcement is known to be an old one when it comes
	// after a newer one; what comes later than that is no echo, and counts.
	oldFor = 5 * time.Second
	// staticFor is how long a static peer counts as the node last met there.
	staticFor = 10 * time.Minute
)

// Source tells where an address comes from.
type Source string

// The sources of addresses.
const (
	MDNS   Source = "mdns"
	Static Source = "static"
	Memory Source = "memory" // the node was met there before
)

// Address is one place at which a candidate may be.
type Address struct {
	Addr netip.AddrPort
	// Interface to bind to; "" leaves it to the routes. A link-local address
	// comes once for every interface on which it may be.
	Interface string
	Cable     bool
	Source    Source
}

// Candidate is a node that may be there.
type Candidate struct {
	Node      identity.NodeID // "" for a static peer that was never met
	Name      string
	OS        string
	Proto     int    // major version of its control protocol; 0 if unknown
	Pair      string // number of its open code, or ""
	Addresses []Address
	Seen      time.Time // last by mDNS; zero if never
	// Instance is the name under which it last announced itself; another one may
	// mean that it was started anew.
	Instance string
}

// Same reports whether c and o are the same node at the same places, whenever
// and under whatever name it announced itself.
func (c Candidate) Same(o Candidate) bool {
	return c.Node == o.Node && c.Name == o.Name && c.OS == o.OS && c.Proto == o.Proto && c.Pair == o.Pair && slices.Equal(c.Addresses, o.Addresses)
}

// found is what is known of one node.
type found struct {
	said
	seen    time.Time                    // last announcement; zero if none counts
	saidAt  time.Time                    // when said was heard
	heardAt map[netip.AddrPort]time.Time // announced addresses
	metAt   map[netip.AddrPort]time.Time // where it answered
	// heardLast is when what it says to all was last heard, however long ago;
	// reachedAt when it was last in reach, without a gap since reachedSince.
	heardLast, reachedAt, reachedSince time.Time
}

// table is what is known of all nodes.
type table struct {
	self  identity.NodeID
	known func(identity.NodeID) bool
	// invites is Options.Invites.
	invites func(identity.NodeID, string) bool
	nodes   map[identity.NodeID]*found
	// crowd and period are the constant crowd and browseFor where they are 0.
	crowd  int
	period time.Duration
}

// crowded reports whether there are so many nodes that what all of them hear costs.
func (t *table) crowded() bool { return len(t.nodes) >= cmp.Or(t.crowd, crowd) }

// at returns the entry of a node, made if there is room for it.
func (t *table) at(node identity.NodeID) *found {
	if f := t.nodes[node]; f != nil {
		return f
	}
	if len(t.nodes) >= maxNodes && !t.makeRoom(node) {
		return nil
	}
	f := &found{heardAt: map[netip.AddrPort]time.Time{}, metAt: map[netip.AddrPort]time.Time{}}
	f.node = node
	t.nodes[node] = f
	return f
}

// makeRoom drops the stranger that was not heard of for the longest time; the
// newest one is none other than who shouts loudest, and is as good as any.
func (t *table) makeRoom(newcomer identity.NodeID) bool {
	var oldest *found
	// Who shows a code is looked for now, and that cannot be said by just anybody.
	before := func(a, b *found) bool {
		if (a.pair != "") != (b.pair != "") {
			return a.pair == ""
		}
		return a.seen.Before(b.seen)
	}
	for id, f := range t.nodes {
		if !t.known(id) && (oldest == nil || before(f, oldest)) {
			oldest = f
		}
	}
	if oldest == nil && !t.known(newcomer) {
		return false
	}
	if oldest == nil {
		return true // members only: there are not more of those than trust holds
	}
	delete(t.nodes, oldest.node)
	return true
}

// heard takes an announcement. It says whether that is worth telling.
func (t *table) heard(s said, now time.Time) bool {
	alone := s.alone // of this word, whichever is the newest
	if s.node == t.self {
		return false
	}
	if s.bye {
		return t.bye(s.node)
	}
	if s.pair != "" && t.invites != nil && !t.invites(s.node, s.pair) {
		s.pair = ""
	}
	f := t.at(s.node)
	if f == nil {
		return false
	}
	addrs, port := s.addrs, s.port
	if since := now.Sub(f.saidAt); s.turn.before(f.turn) && since >= 0 && since < oldFor {
		// Where it listens, and with which code, may be tried all the same: who forges
		// a later turn shall not hide that.
		code := s.pair
		s = f.said
		s.pair = cmp.Or(s.pair, code)
	} else {
		f.saidAt = now
	}
	news := f.seen.IsZero() || f.name != s.name || f.os != s.os || f.proto != s.proto || f.pair != s.pair || f.port != s.port ||
		f.instance != s.instance // it announces itself anew: it may have been started anew
	if f.port != s.port {
		clear(f.heardAt) // it listens elsewhere now
	}
	s.addrs = nil
	f.said, f.seen = s, now
	if !alone {
		f.heardLast = now
	}
	for _, a := range addrs {
		place := netip.AddrPortFrom(a, port)
		if _, ok := f.heardAt[place]; !ok {
			news = true
			if len(f.heardAt) >= maxAddresses {
				dropOldest(f.heardAt)
			}
		}
		f.heardAt[place] = now
	}
	return news
}

// bye drops what a node announced; where it was met is another matter.
func (t *table) bye(node identity.NodeID) bool {
	f := t.nodes[node]
	if f == nil || f.seen.IsZero() {
		return false
	}
	f.seen, f.pair = time.Time{}, ""
	clear(f.heardAt)
	t.tidy(f)
	return true
}

func (t *table) tidy(f *found) {
	if len(f.heardAt) == 0 && len(f.metAt) == 0 {
		delete(t.nodes, f.node)
	}
}

// browseFor is how long a browse lasts among so many nodes.
func (t *table) browseFor() time.Duration {
	crowds := len(t.nodes) / cmp.Or(t.crowd, crowd)
	return min(cmp.Or(t.period, browseFor)*time.Duration(1+crowds*crowds), longestBrowse)
}

// goneAfter is how long a node may say nothing before it counts as gone.
func (t *table) goneAfter() time.Duration {
	return goneAfter*t.browseFor() + cmp.Or(t.period, browseFor)/2
}

// ReachedGap is how long Reached may say nothing of a node without that being a
// new beginning.
const ReachedGap = 15 * time.Second

// reached notes that what a node announces should be heard.
func (t *table) reached(node identity.NodeID, now time.Time) {
	if node == t.self {
		return
	}
	f := t.at(node)
	if f == nil {
		return
	}
	if now.Sub(f.reachedAt) > ReachedGap || now.Before(f.reachedAt) {
		f.reachedSince = now
	}
	f.reachedAt = now
}

// unheard lists nodes that are in reach and were not heard for long; hears says
// that another one was.
func (t *table) unheard(now time.Time) (list []identity.NodeID, hears bool) {
	long := t.goneAfter()
	for id, f := range t.nodes {
		switch {
		case now.Sub(f.reachedAt) > ReachedGap:
		case now.Sub(f.heardLast) <= long:
			hears = true
		case now.Sub(f.reachedSince) > long:
			list = append(list, id)
		}
	}
	slices.Sort(list)
	return list, hears
}

// quiet reports whether a node in reach has not announced itself for so long that
// it will be missed soon.
func (t *table) quiet(now time.Time) bool {
	long := t.browseFor() * 5 / 2
	for _, f := range t.nodes {
		if now.Sub(f.reachedAt) <= ReachedGap && now.Sub(f.reachedSince) > long && now.Sub(f.heardLast) > long {
			return true
		}
	}
	return false
}

// expire drops what was not heard of for long.
func (t *table) expire(now time.Time) (news bool) {
	gone := t.goneAfter()
	for _, f := range t.nodes {
		for a, at := range f.heardAt {
			if now.Sub(at) > gone {
				delete(f.heardAt, a)
				news = true
			}
		}
		if !f.seen.IsZero() && now.Sub(f.seen) > gone {
			f.seen, f.pair, news = time.Time{}, "", true
		}
		if now.Sub(f.reachedAt) > ReachedGap {
			t.tidy(f)
		}
	}
	return news
}

// met remembers where a node answered. It says whether that is news.
func (t *table) met(node identity.NodeID, addr netip.AddrPort, now time.Time) bool {
	addr = netip.AddrPortFrom(addr.Addr().Unmap().WithZone(""), addr.Port())
	if node == t.self || !usable(addr.Addr()) || addr.Port() == 0 {
		return false
	}
	f := t.at(node)
	if f == nil {
		return false
	}
	_, ok := f.metAt[addr]
	if !ok && len(f.metAt) >= maxMemory {
		dropOldest(f.metAt)
	}
	f.metAt[addr] = now
	return !ok
}

func (t *table) forget(node identity.NodeID) bool {
	_, ok := t.nodes[node]
	delete(t.nodes, node)
	return ok
}

func dropOldest(m map[netip.AddrPort]time.Time) {
	var oldest netip.AddrPort
	for a, at := range m {
		if !oldest.IsValid() || at.Before(m[oldest]) {
			oldest = a
		}
	}
	delete(m, oldest)
}

// candidates says who may be where, by the interfaces of now.
func (t *table) candidates(interfaces []Interface, statics []static, now time.Time) []Candidate {
	own := map[netip.Addr]bool{}
	for _, i := range interfaces {
		for _, p := range i.Addresses {
			own[p.Addr()] = true
		}
	}
	byAddr := map[netip.AddrPort]identity.NodeID{} // of static peers
	var list []Candidate
	for id, f := range t.nodes {
		c := Candidate{Node: id, Name: f.name, OS: f.os, Proto: f.proto, Pair: f.pair, Seen: f.seen, Instance: f.instance}
		var places []Address
		for _, of := range []struct {
			addrs  map[netip.AddrPort]time.Time
			source Source
		}{{f.heardAt, MDNS}, {f.metAt, Memory}} {
			for a := range of.addrs {
				// Another machine's bridge of containers has the same address as ours.
				if !own[a.Addr()] {
					places = append(places, spread(a, interfaces, of.source)...)
				}
			}
		}
		for a, at := range f.metAt {
			if now.Sub(at) < staticFor {
				byAddr[a] = id
			}
		}
		if len(f.heardAt) == 0 && len(f.metAt) == 0 && f.seen.IsZero() {
			continue // in reach by other means: nothing was found
		}
		c.Addresses = order(places)
		list = append(list, c)
	}
	for _, s := range statics {
		for _, a := range s.resolved() {
			if own[a.Addr()] {
				continue
			}
			places := spread(a, interfaces, Static)
			if id, ok := byAddr[netip.AddrPortFrom(a.Addr().WithZone(""), a.Port())]; ok {
				i := slices.IndexFunc(list, func(c Candidate) bool { return c.Node == id })
				list[i].Addresses = order(append(list[i].Addresses, places...))
				continue
			}
			list = append(list, Candidate{Name: s.text, Addresses: order(places)})
		}
	}
	slices.SortFunc(list, func(a, b Candidate) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name))
	})
	return list
}

var selfAssigned = netip.MustParsePrefix("169.254.0.0/16")

// spread says over which interfaces an address may be reached. Link-local ones
// could be on any; others are on those whose network they are in, else the
// routes know.
func spread(a netip.AddrPort, interfaces []Interface, source Source) []Address {
	var places []Address
	addr := a.Addr()
	for _, i := range interfaces {
		place := Address{Addr: a, Interface: i.Name, Cable: i.Cable, Source: source}
		switch {
		case addr.Is6() && addr.IsLinkLocalUnicast():
			if zone := addr.Zone(); zone != "" && zone != i.Name {
				continue
			}
			if !slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() }) {
				continue // nothing of the kind is spoken there
			}
			place.Addr = netip.AddrPortFrom(addr.WithZone(i.Name), a.Port())
		case !slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Contains(addr) && !p.IsSingleIP() }):
			continue
		}
		places = append(places, place)
	}
	if len(places) == 0 && !addr.IsLinkLocalUnicast() && !selfAssigned.Contains(addr) {
		places = []Address{{Addr: a, Source: source}}
	}
	return places
}

// order sorts and bounds: cables first, routed addresses before link-local
// guesses, what was announced before what is remembered, each place once.
func order(places []Address) []Address {
	rank := func(a Address) int {
		r := 0
		if !a.Cable {
			r += 4
		}
		if a.Addr.Addr().IsLinkLocalUnicast() {
			r += 2
		}
		if a.Source == Memory {
			r++
		}
		return r
	}
	slices.SortFunc(places, func(a, b Address) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), a.Addr.Compare(b.Addr), cmp.Compare(a.Interface, b.Interface))
	})
	seen := map[Address]bool{}
	places = slices.DeleteFunc(places, func(a Address) bool {
		a.Source = ""
		dup := seen[a]
		seen[a] = true
		return dup
	})
	return places[:min(len(places), maxPlaces)]
}
