package address

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host"
)

// wanted returns everything that should be in force, in the order in which it
// is made: the filter before any address that it protects.
func (m *Manager) wanted() []host.Change {
	var out []host.Change
	if f := m.wantedFilter(); f != nil {
		out = append(out, *f)
	}
	for _, e := range m.usable() {
		if a := m.standing(e); a != nil {
			i, _ := m.net.Interface(e.Interface)
			out = append(out, linkChanges(i, m.told(i.Name), m.book.own(a), min(a.MTU, m.largestMTU(i)))...)
			if m.cfg.Forward && i.Up {
				out = append(out, host.Change{Kind: host.ChangeForward, Interface: i.Name, WasOn: i.Forwarding})
			}
		}
	}
	out = append(out, m.openings()...)
	node, ok := m.nodeChange()
	if !ok {
		return out
	}
	out = append(out, node)
	ways := m.ways()
	for _, peer := range sortedKeys(ways) {
		if to, ok := m.nodeAddressOf(peer); ok {
			out = append(out, routeChanges(to, m.book.node, ways[peer], firstMetric)...)
		}
	}
	through := m.through(ways)
	for _, peer := range sortedKeys(through) {
		if to, ok := m.nodeAddressOf(peer); ok {
			out = append(out, routeChanges(to, m.book.node, through[peer], throughMetric)...)
		}
	}
	return out
}

// told returns the managers that were told to leave an interface alone, sorted.
func (m *Manager) told(iface string) []string {
	var managers []string
	for id := range m.applied {
		if id.kind == host.ChangeUnmanage && id.iface == iface {
			managers = append(managers, id.manager)
		}
	}
	slices.Sort(managers)
	return managers
}

// ways returns the links to each node that a cable leads to.
func (m *Manager) ways() map[string][]way {
	ways := map[string][]way{}
	for _, e := range m.ends {
		if a := m.standing(e); a != nil {
			ways[e.PeerID] = append(ways[e.PeerID], way{port: e.Port, iface: e.Interface, gateway: m.book.far(a), gbps: e.NegotiatedGbps, proven: e.Proven && e.Present})
		}
	}
	return ways
}

// nodeAddressOf returns the node address that another node claims.
func (m *Manager) nodeAddressOf(peer string) (netip.Prefix, bool) {
	for _, c := range m.book.claims[peer] {
		// Only what can be a node address: a claim must not draw other traffic.
		if c.kind == kindNode && m.book.space.isNode(c.prefix) && c.prefix != m.book.node && !overlapping(m.book.uses, c.prefix).there() {
			return c.prefix, true
		}
	}
	return netip.Prefix{}, false
}

// astray returns the node addresses of others to which a cable leads and no
// route: the own network has that range. It passes when that node moves, which
// one that is of an older version or whose address is in use does not.
func (m *Manager) astray() []Conflict {
	var out []Conflict
	for peer, list := range m.book.claims {
		for _, c := range list {
			if c.kind != kindNode || !m.book.space.isNode(c.prefix) {
				continue
			}
			if u := overlapping(m.book.uses, c.prefix); u.there() {
				out = append(out, Conflict{Prefix: c.prefix, Node: peer, With: u.by})
			}
		}
	}
	if len(out) == 0 {
		return nil
	}
	ways := m.ways()
	through := m.through(ways)
	out = slices.DeleteFunc(out, func(c Conflict) bool {
		return !slices.ContainsFunc(ways[c.Node], func(w way) bool { return w.proven }) && len(through[c.Node]) == 0
	})
	slices.SortFunc(out, func(a, b Conflict) int { return cmp.Compare(a.Node, b.Node) })
	return out
}

// maxThrough bounds the routes to one node through others.
const maxThrough = 4

// through returns the ways to the nodes that no proven link leads to, through
// nodes that pass packets on: the fewest of them, and of equal ones the faster
// first link. Every node works this out from the same reports, so each next
// one is nearer.
func (m *Manager) through(ways map[string][]way) map[string][]way {
	first := map[string][]way{} // first links of the shortest ways, by node
	var front []string
	for _, peer := range sortedKeys(ways) {
		var best *way
		for i, w := range ways[peer] {
			if w.proven && w.iface != "" && w.gateway.IsValid() && (best == nil || w.gbps > best.gbps) {
				best = &ways[peer][i]
			}
		}
		if best != nil {
			first[peer], front = []way{*best}, append(front, peer)
		}
	}
	out := map[string][]way{}
	for len(front) > 0 {
		next := map[string][]way{}
		for _, via := range front {
			r := m.reach[via]
			if !r.Forwards {
				continue
			}
			for _, to := range r.Neighbours {
				if _, nearer := first[to]; nearer || to == m.cfg.Self {
					continue
				}
				for _, w := range first[via] {
					if !slices.ContainsFunc(next[to], func(o way) bool { return o.gateway == w.gateway }) && len(next[to]) < maxThrough {
						next[to] = append(next[to], w)
					}
				}
			}
		}
		front = sortedKeys(next)
		for _, to := range front {
			first[to], out[to] = next[to], next[to]
		}
	}
	return out
}

// openings set cables up of which is not known yet where they lead: where there
// is no other way, that is found out over the cable itself.
func (m *Manager) openings() []host.Change {
	var out []host.Change
	for _, e := range m.ends {
		if i, ok := m.net.Interface(e.Interface); ok && e.Present && m.standing(e) == nil && i.ManagedBy == "" {
			out = append(out, host.Change{Kind: host.ChangeLinkUp, Interface: i.Name, WasUp: i.Up})
		}
	}
	return out
}

func sortedKeys[V any](of map[string]V) []string {
	out := make([]string, 0, len(of))
	for k := range of {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// usable returns the ends that can have an address now.
func (m *Manager) usable() []End {
	var out []End
	for _, e := range m.ends {
		if _, ok := m.net.Interface(e.Interface); ok && e.Present && e.PeerID != "" {
			out = append(out, e)
		}
	}
	return out
}

// nodeChange is the own node address on the loopback; false where there is no
// need for one or no loopback.
func (m *Manager) nodeChange() (host.Change, bool) {
	if !m.book.node.IsValid() || len(m.book.agreements) == 0 {
		return host.Change{}, false
	}
	for _, i := range m.net.Interfaces {
		if i.Loopback {
			return host.Change{Kind: host.ChangeAddress, Interface: i.Name, Prefix: m.book.node}, true
		}
	}
	return host.Change{}, false
}

// wantedFilter protects every own address, remembered ones too, so that a
// replug finds it ready; open are the cables that lead to paired nodes.
func (m *Manager) wantedFilter() *host.Change {
	f := &host.Change{Kind: host.ChangeFilter}
	if !m.protect(f) {
		return nil
	}
	// Nor does the LAN reach through this machine what only cables reach, should
	// somebody have it pass packets on.
	for _, a := range m.book.agreements {
		if !overlapping(m.book.uses, a.Prefix).there() {
			f.Addresses = append(f.Addresses, m.book.far(a))
		}
	}
	for peer := range m.ways() {
		if to, ok := m.nodeAddressOf(peer); ok {
			f.Addresses = append(f.Addresses, to.Addr())
		}
	}
	for _, e := range m.usable() {
		i, _ := m.net.Interface(e.Interface)
		c := host.Change{Kind: host.ChangeForward, Interface: i.Name}
		was := m.applied[identify(c)]
		// What passed packets on before us goes on as it did.
		if m.cfg.Forward && (was == nil && !i.Forwarding || was != nil && !was.change.WasOn) {
			f.Forwarders = append(f.Forwarders, i.Name)
		}
	}
	tidy(f)
	return f
}

// protect adds the own addresses to a filter, and the cables that it is open
// to; false where there is nothing to protect.
func (m *Manager) protect(f *host.Change) bool {
	for _, a := range m.book.agreements {
		f.Addresses = append(f.Addresses, m.book.own(a).Addr())
	}
	for _, e := range m.applied {
		// Of an earlier life whose memory is gone: whoever uses it is protected
		// until it is undone.
		if e.change.Kind == host.ChangeAddress && m.retained(e) {
			f.Addresses = append(f.Addresses, e.change.Prefix.Addr())
		}
	}
	if len(f.Addresses) == 0 {
		return false
	}
	if m.book.node.IsValid() {
		f.Addresses = append(f.Addresses, m.book.node.Addr())
	}
	for _, e := range m.usable() {
		f.Interfaces = append(f.Interfaces, e.Interface)
	}
	for _, e := range m.applied {
		// The node address is on the loopback, which is open anyway.
		if i, _ := m.net.Interface(e.change.Interface); e.change.Kind == host.ChangeAddress && !i.Loopback && m.retained(e) {
			f.Interfaces = append(f.Interfaces, e.change.Interface)
		}
	}
	tidy(f)
	return true
}

func tidy(f *host.Change) {
	slices.SortFunc(f.Addresses, netip.Addr.Compare)
	slices.Sort(f.Interfaces)
	slices.Sort(f.Forwarders)
	f.Addresses, f.Interfaces, f.Forwarders = slices.Compact(f.Addresses), slices.Compact(f.Interfaces), slices.Compact(f.Forwarders)
}

// retained reports whether a change stays in force though nothing wants it
// now: it is on a cable of which is not known yet where it leads.
func (m *Manager) retained(e *entry) bool {
	i, there := m.net.Interface(e.change.Interface)
	if !there || e.index != i.Index {
		return false
	}
	if m.cfg.Clock.Now().Before(e.keep) {
		return true
	}
	if e.change.Kind == host.ChangeRoute {
		return false
	}
	return slices.ContainsFunc(m.ends, func(end End) bool {
		return end.Present && end.Interface == i.Name && end.PeerID == "" && slices.ContainsFunc(m.book.agreements, func(a *agreement) bool {
			return a.Port == end.Port && slices.Contains(i.Addresses, m.book.own(a))
		})
	})
}

func sameFilter(a, b host.Change) bool {
	return slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.Interfaces, b.Interfaces) && slices.Equal(a.Forwarders, b.Forwarders)
}

// reconcile brings the machine to what is wanted; false once Down was called.
func (m *Manager) reconcile(ctx context.Context, background *sync.WaitGroup) bool {
	m.applying.Lock()
	defer m.applying.Unlock()
	m.mu.Lock()
	if m.closing {
		m.mu.Unlock()
		return false
	}
	filter := m.filter
	m.mu.Unlock()
	gone := m.look(ctx, lookEvery)
	m.mu.Lock()
	if !m.ready { // an empty machine would ask for everything to be undone
		m.mu.Unlock()
		if gone { // what an earlier life protected
			m.make(ctx, *filter)
		}
		return true
	}
	before := m.book.node
	m.decide(ctx, background)
	if m.book.agreeMTUs() || m.book.node != before {
		m.dirty = true
	}
	wanted := m.wanted()
	m.mu.Unlock()
	m.remember() // before it is in force: what a crash leaves, the next life knows

	changed := m.remove(ctx, wanted)
	for _, c := range wanted {
		if ctx.Err() != nil {
			break
		}
		made, ok := m.make(ctx, c)
		changed = changed || made
		if !ok {
			break
		}
	}
	m.remember()
	m.mu.Lock()
	if changed {
		m.survey()
	}
	print := m.fingerprint()
	news := print != m.print
	m.print = print
	m.mu.Unlock()
	if news {
		poke(m.notify)
	}
	return true
}

// look finds out whether something of the filter that was set is gone: whoever
// restarts the packet filter of the system removes ours with it. Called while
// nothing else is applied. One that was there is not looked at again so soon, but
// as soon as it may be.
func (m *Manager) look(ctx context.Context, soon time.Duration) (gone bool) {
	m.mu.Lock()
	f := m.filter
	due := f != nil && (m.lacks != "" || time.Since(m.looked) >= soon)
	if due {
		m.looked = time.Now()
	}
	m.lookLater = f != nil && !due
	m.mu.Unlock()
	if !due {
		return false
	}
	lacks, err := m.cfg.Applier.Lacks(ctx, *f)
	if ctx.Err() != nil {
		return false // it was not looked at
	}
	what := "somebody removed or changed the packet filter; it is set again"
	if err != nil {
		// Setting it again costs little, and whether it is needed is not known.
		what, lacks = "the packet filter cannot be looked at; it is set again", err.Error()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if lacks != "" && (m.lacks == "" || m.lacks == notLooked) {
		delete(m.failed, identify(*f)) // put back at once
		m.cfg.Log.Warn(what, "why", lacks)
	}
	m.lacks = lacks
	return lacks != ""
}

// fingerprint holds everything that Changed announces. The interface's index is
// part of it: an address on a new interface is news though it is the same.
func (m *Manager) fingerprint() string {
	var b strings.Builder
	for _, l := range m.links() {
		i, _ := m.net.Interface(l.Interface)
		fmt.Fprintln(&b, l, i.Index)
	}
	for _, c := range m.book.ownClaims() {
		fmt.Fprintln(&b, c.GetPrefix(), c.GetKind(), c.GetKey(), c.GetInUse(), c.GetMaxMtu())
	}
	active, why := m.filterActive()
	fmt.Fprintln(&b, m.nodeAddress(), m.clash, m.missing(), active, why, m.forwards())
	return b.String()
}

// decide judges what is agreed, chooses the node address and asks peers.
// Called with the mutex held.
func (m *Manager) decide(ctx context.Context, background *sync.WaitGroup) {
	m.clash = nil
	now := m.cfg.Clock.Now()
	for _, e := range m.usable() {
		a := m.book.find(e.PeerID, e.Port, e.PeerPort)
		if a != nil {
			if v := m.book.standing(a); v.clash != "" && !v.move {
				m.clash = append(m.clash, Conflict{Prefix: m.book.own(a), Port: e.Port, With: v.clash})
			} else if v.move && m.cfg.Self > e.PeerID {
				// Not claimed any more, so that the lower ID hears of it when it
				// asks again.
				m.cfg.Log.Info("gave up a link address", "port", e.Port, "prefix", a.Prefix, "clashes_with", v.clash)
				m.book.drop(a)
				m.dirty = true
			}
		}
		if m.cfg.Self < e.PeerID {
			m.consider(ctx, background, e, now)
		}
	}
	if len(m.usable()) > 0 || len(m.book.agreements) > 0 {
		if _, v := m.book.chooseNode(); v.clash != "" && !v.move {
			m.clash = append(m.clash, Conflict{Prefix: m.book.node, With: v.clash})
		}
	}
	m.clash = append(m.clash, m.astray()...)
}

// consider asks the far end of a link for which this node proposes, where
// nothing is agreed, what is agreed has to move, or the far end may not know.
func (m *Manager) consider(ctx context.Context, background *sync.WaitGroup, e End, now time.Time) {
	port := e.PeerPort
	a := m.standing(e)
	if port == "" && a != nil {
		port = a.PeerPort
	}
	if port == "" {
		return
	}
	key := linkKey(e.PeerID, e.Port, port)
	q := m.asking[e.Port]
	if q == nil || q.key != key && !q.running {
		q = &ask{key: key}
		m.asking[e.Port] = q
	}
	if q.running || now.Before(q.next) {
		return
	}
	if a != nil && a.confirmed && m.book.newest(a) && a.MTU > 0 {
		forgotten := m.heard[e.PeerID] && !m.book.claimed(a) && (a.seen || now.Sub(q.asked) > claimAfter)
		if !forgotten {
			return
		}
	}
	if a != nil && a.confirmed && a.MTU == 0 && now.Sub(q.asked) < claimAfter {
		return // the far end does not see its interface yet
	}
	i, _ := m.net.Interface(e.Interface)
	first := netip.Prefix{}
	if a != nil {
		first = a.Prefix
	}
	q.running = true
	background.Go(func() { m.ask(ctx, q, e.PeerID, e.Port, port, first, m.largestMTU(i)) })
}

// noneFreeError is that no subnet is left to propose.
type noneFreeError struct{ space, taken string }

func (e noneFreeError) Error() string {
	return fmt.Sprintf("no subnet of %s is free at both ends; the last was taken by %s", e.space, e.taken)
}

// ask proposes one subnet after the other until the far end takes one.
func (m *Manager) ask(ctx context.Context, q *ask, peer, port, peerPort string, first netip.Prefix, mtu int) {
	var refused []netip.Prefix
	tries := 0
	err := func() error {
		for candidate := first; ; candidate = (netip.Prefix{}) {
			m.mu.Lock()
			if !candidate.IsValid() {
				var why string
				if candidate, why = m.book.next(peer, port, peerPort, refused); !candidate.IsValid() {
					m.mu.Unlock()
					return noneFreeError{m.book.space.String(), cmp.Or(why, "what the other end uses")}
				}
			}
			m.mu.Unlock()
			asked, cancel := context.WithTimeout(ctx, askTimeout)
			resp, err := m.cfg.Peer.Propose(asked, peer, &peerv1.ProposeAddressRequest{Port: peerPort, ProposerPort: port, Prefix: candidate.String(), Mtu: uint32(mtu)})
			cancel()
			m.mu.Lock()
			m.book.settled(candidate)
			if err != nil {
				m.mu.Unlock()
				return err
			}
			if resp.GetAccepted() {
				agreed := agreeMTU(mtu, resp.GetMaxMtu())
				// Something may have taken it while the far end was asked.
				if !m.book.free(candidate, peer, port, peerPort).there() || candidate == first {
					m.book.record(peer, port, peerPort, candidate, agreed)
					m.dirty = true
					q.asked = m.cfg.Clock.Now()
					m.mu.Unlock()
					return nil
				}
			}
			refused = append(refused, candidate)
			if taken, err := netip.ParsePrefix(resp.GetTaken()); err == nil && taken.Overlaps(candidate) {
				refused = append(refused, taken.Masked())
			}
			if tries++; tries%blockRefusals == 0 {
				// An older version does not say what range is in its way.
				refused = append(refused, m.book.space.of(candidate.Addr()).block)
			}
			m.mu.Unlock()
			if tries >= maxRefusals {
				return fmt.Errorf("the other end refused %d subnets of %s, the last one because of %s", tries, m.book.space, cmp.Or(resp.GetConflict(), "another link of this node"))
			}
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	q.running, q.reason, q.noneFree = false, "", false
	if err != nil && ctx.Err() == nil {
		q.reason = "no address could be agreed on: " + err.Error()
		if f := fault.As(err); f != nil {
			q.reason = "no address could be agreed on: " + f.Error()
		}
		q.noneFree = errors.As(err, &noneFreeError{})
		q.wait = min(max(2*q.wait, m.cfg.Retry), longestRetry)
		q.next = m.cfg.Clock.Now().Add(q.wait)
		m.cfg.Log.Debug("proposing an address failed", "port", port, "peer", peer, "error", err)
	} else {
		q.wait, q.next = 0, time.Time{}
	}
	poke(m.wake)
}

// maxRefusals bounds how long two nodes search at one go, blockRefusals within
// one block.
const (
	maxRefusals   = 256
	blockRefusals = 64
)

// remove undoes what is not wanted any more, the latest first, and strikes
// what went with its interface from the journal.
func (m *Manager) remove(ctx context.Context, wanted []host.Change) bool {
	keep := map[identity]bool{}
	filter := false
	for _, c := range wanted {
		keep[identify(c)] = true
		filter = filter || c.Kind == host.ChangeFilter
	}
	m.mu.Lock()
	var gone []*entry
	for id, e := range m.applied {
		i, there := m.net.Interface(id.iface)
		if there && e.index != i.Index && keep[id] {
			delete(m.applied, id) // the interface was made anew: make it again
			continue
		}
		if !keep[id] && !m.retained(e) {
			gone = append(gone, e)
		}
	}
	drop := m.filter
	if filter {
		drop = nil
	}
	m.mu.Unlock()
	slices.SortFunc(gone, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(last(a.change), last(b.change)), cmp.Compare(b.turn, a.turn))
	})
	changed := false
	for _, e := range gone {
		if err := m.cfg.Applier.Revert(ctx, e.change); err != nil {
			level := slog.LevelWarn
			if errors.Is(err, host.ErrPermission) {
				level = slog.LevelDebug
			}
			m.cfg.Log.Log(ctx, level, "undoing a network change failed", "change", e.change.String(), "error", err)
			continue // tried again next time
		}
		m.mu.Lock()
		delete(m.applied, identify(e.change))
		m.mu.Unlock()
		changed = true
	}
	if drop != nil {
		if err := m.cfg.Applier.Revert(ctx, *drop); err != nil {
			m.cfg.Log.Warn("removing the packet filter failed", "error", err)
		} else {
			m.mu.Lock()
			m.filter, m.lacks = nil, ""
			m.mu.Unlock()
			changed = true
		}
	}
	return changed
}

// make makes one change if need be. ok is false where nothing more can be
// made now.
func (m *Manager) make(ctx context.Context, c host.Change) (made, ok bool) {
	id := identify(c)
	now := m.cfg.Clock.Now()
	m.mu.Lock()
	i, there := m.net.Interface(c.Interface)
	e := m.applied[id]
	t := m.failed[id]
	due := false
	switch {
	case !m.denied.IsZero() && now.Sub(m.denied) < permissionRetry:
	case t != nil && now.Before(t.next):
	case c.Kind == host.ChangeFilter:
		due = !m.filterIs(c)
	case !there || m.blocked(c):
	case e == nil:
		// Facts may be of an interface that was there a moment ago; making these
		// again costs nothing.
		due = c.Kind == host.ChangeAddress || c.Kind == host.ChangeRoute || c.Kind == host.ChangeLinkUp || c.Kind == host.ChangeUnmanage || !satisfied(c, m.net)
	default:
		due = now.Sub(e.at) > driftAfter && !satisfied(c, m.net)
	}
	denied := !m.denied.IsZero()
	m.mu.Unlock()
	if !due {
		return false, true
	}
	err := m.cfg.Applier.Apply(ctx, c)
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case err == nil:
		m.denied = time.Time{}
		delete(m.failed, id)
		if c.Kind == host.ChangeFilter {
			if m.lacks != "" {
				m.cfg.Log.Info("the packet filter is set again", "change", c.String())
			}
			m.filter, m.lacks = &c, ""
			break
		}
		if e == nil {
			m.turn++
			e = &entry{change: c, turn: m.turn}
			m.applied[id] = e
		}
		e.index, e.at = i.Index, now
		m.cfg.Log.Info("network change", "change", c.String())
	case errors.Is(err, host.ErrPermission):
		if !denied {
			m.cfg.Log.Warn("no permission to change the network; `tbcluster doctor` shows the commands")
		}
		m.denied = now
		return false, false
	case errors.Is(err, host.ErrNoInterface):
		// It was pulled meanwhile; new facts are on their way.
		return false, true
	default:
		if t == nil {
			t = &trouble{}
			m.failed[id] = t
		}
		t.err, t.wait = err, min(max(2*t.wait, m.cfg.Retry), longestRetry)
		t.next = now.Add(t.wait)
		m.cfg.Log.Warn("a network change failed", "change", c.String(), "error", err)
		return false, true
	}
	return true, true
}

// blocked reports whether what a change rests on is missing: an address on an
// interface that could not be set up, a route without its source.
func (m *Manager) blocked(c host.Change) bool {
	switch c.Kind {
	case host.ChangeAddress:
		return m.failed[identify(host.Change{Kind: host.ChangeLinkUp, Interface: c.Interface})] != nil
	case host.ChangeRoute:
		node, ok := m.nodeChange()
		return !ok || !m.inForce(node)
	}
	return false
}

// remember writes the state file when something was agreed.
func (m *Manager) remember() {
	m.mu.Lock()
	if !m.dirty {
		m.mu.Unlock()
		return
	}
	m.dirty = false
	mem := memory{Node: m.book.node}
	for _, a := range m.book.agreements {
		c := *a
		mem.Agreements = append(mem.Agreements, &c)
	}
	m.mu.Unlock()
	if err := save(m.cfg.StateFile, mem); err != nil {
		m.cfg.Log.Error("addresses could not be remembered", "file", m.cfg.StateFile, "error", err)
		m.mu.Lock()
		m.dirty = true
		m.mu.Unlock()
	}
}

// due is how long until something has to be tried again.
func (m *Manager) due() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Clock.Now()
	wait := longestRetry
	consider := func(at time.Time) {
		if d := at.Sub(now); d < wait {
			wait = max(d, time.Millisecond)
		}
	}
	if m.lookLater {
		wait = min(wait, max(lookEvery-time.Since(m.looked), time.Millisecond))
	}
	for _, q := range m.asking {
		if !q.running && q.next.After(now) {
			consider(q.next)
		}
		// By then a far end that said yes has claimed what it said yes to.
		if claimed := q.asked.Add(claimAfter + time.Millisecond); claimed.After(now) {
			consider(claimed)
		}
	}
	for _, t := range m.failed {
		consider(t.next)
	}
	if !m.denied.IsZero() {
		consider(m.denied.Add(permissionRetry))
	}
	return wait
}

// Down ends changes for good and undoes everything, the filter last.
func (m *Manager) Down(ctx context.Context) error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	poke(m.wake)
	m.applying.Lock()
	defer m.applying.Unlock()
	m.remember()
	applied, err := m.cfg.Applier.Applied(ctx)
	if err != nil {
		return fault.New(fault.Internal, "read the journal of network changes", err, "see the log of the root half")
	}
	var errs []error
	for _, c := range undoing(applied) {
		if err := m.cfg.Applier.Revert(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c, err))
		}
	}
	m.mu.Lock()
	clear(m.applied)
	m.filter, m.lacks = nil, ""
	m.mu.Unlock()
	if len(errs) > 0 {
		return fault.New(fault.Partial, "undo network changes", errors.Join(errs...), "run `tbcluster down` again; what is left is listed by `tbcluster doctor`")
	}
	return nil
}
