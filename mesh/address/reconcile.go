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
			out = append(out, linkChanges(i, m.book.own(a), a.MTU)...)
		}
	}
	out = append(out, m.openings()...)
	node, ok := m.nodeChange()
	if !ok {
		return out
	}
	out = append(out, node)
	ways := map[string][]way{}
	for _, e := range m.ends {
		if a := m.standing(e); a != nil {
			ways[e.PeerID] = append(ways[e.PeerID], way{port: e.Port, iface: e.Interface, gateway: m.book.far(a), gbps: e.NegotiatedGbps, proven: e.Proven && e.Present})
		}
	}
	for _, peer := range sortedKeys(ways) {
		for _, c := range m.book.claims[peer] {
			// Only what can be a node address: a claim must not draw other traffic.
			if c.kind == kindNode && m.book.space.isNode(c.prefix) && c.prefix != m.book.node && overlapping(m.book.uses, c.prefix) == "" {
				out = append(out, routeChanges(c.prefix, m.book.node, ways[peer])...)
				break
			}
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
	f := host.Change{Kind: host.ChangeFilter}
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
		return nil
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
	slices.SortFunc(f.Addresses, netip.Addr.Compare)
	slices.Sort(f.Interfaces)
	f.Addresses, f.Interfaces = slices.Compact(f.Addresses), slices.Compact(f.Interfaces)
	return &f
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
	return slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.Interfaces, b.Interfaces)
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
	if !m.ready { // an empty machine would ask for everything to be undone
		m.mu.Unlock()
		return true
	}
	before := m.book.node
	m.decide(ctx, background)
	if m.book.node != before {
		m.dirty = true
	}
	wanted := m.wanted()
	m.mu.Unlock()

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

// fingerprint holds everything that Changed announces. The interface's index is
// part of it: an address on a new interface is news though it is the same.
func (m *Manager) fingerprint() string {
	var b strings.Builder
	for _, l := range m.links() {
		i, _ := m.net.Interface(l.Interface)
		fmt.Fprintln(&b, l, i.Index)
	}
	for _, c := range m.book.ownClaims() {
		fmt.Fprintln(&b, c.GetPrefix(), c.GetKind(), c.GetKey(), c.GetInUse())
	}
	active, why := m.filterActive()
	fmt.Fprintln(&b, m.nodeAddress(), m.clash, m.missing(), active, why)
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
	background.Go(func() { m.ask(ctx, q, e.PeerID, e.Port, port, first, largestMTU(i)) })
}

// ask proposes one subnet after the other until the far end takes one.
func (m *Manager) ask(ctx context.Context, q *ask, peer, port, peerPort string, first netip.Prefix, mtu int) {
	refused := map[netip.Prefix]bool{}
	err := func() error {
		for candidate := first; ; candidate = (netip.Prefix{}) {
			m.mu.Lock()
			if !candidate.IsValid() {
				var why string
				if candidate, why = m.book.next(peer, port, peerPort, refused); !candidate.IsValid() {
					m.mu.Unlock()
					return fmt.Errorf("no subnet of %s is free at both ends; the last was taken by %s", m.cfg.Block, why)
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
				agreed := 0
				if mtu > 0 && resp.GetMaxMtu() > 0 {
					agreed = min(mtu, int(min(resp.GetMaxMtu(), MaxMTU)))
				}
				// Something may have taken it while the far end was asked.
				if by := m.book.free(candidate, peer, port, peerPort); by == "" || candidate == first {
					m.book.record(peer, port, peerPort, candidate, agreed)
					m.dirty = true
					q.asked = m.cfg.Clock.Now()
					m.mu.Unlock()
					return nil
				}
			}
			refused[candidate] = true
			m.mu.Unlock()
			if len(refused) >= maxRefusals {
				return fmt.Errorf("the other end refused %d subnets of %s, the last one because of %s", len(refused), m.cfg.Block, cmp.Or(resp.GetConflict(), "another link of this node"))
			}
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	q.running, q.reason = false, ""
	if err != nil && ctx.Err() == nil {
		q.reason = "no address could be agreed on: " + err.Error()
		if f := fault.As(err); f != nil {
			q.reason = "no address could be agreed on: " + f.Error()
		}
		q.wait = min(max(2*q.wait, m.cfg.Retry), longestRetry)
		q.next = m.cfg.Clock.Now().Add(q.wait)
		m.cfg.Log.Debug("proposing an address failed", "port", port, "peer", peer, "error", err)
	} else {
		q.wait, q.next = 0, time.Time{}
	}
	poke(m.wake)
}

// maxRefusals bounds how long two nodes search at one go.
const maxRefusals = 256

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
	slices.SortFunc(gone, func(a, b *entry) int { return cmp.Compare(b.turn, a.turn) })
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
			m.filter = nil
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
		due = m.filter == nil || !sameFilter(*m.filter, c)
	case !there || m.blocked(c):
	case e == nil:
		// Facts may be of an interface that was there a moment ago; making these
		// again costs nothing.
		due = c.Kind == host.ChangeAddress || c.Kind == host.ChangeRoute || c.Kind == host.ChangeLinkUp || !satisfied(c, m.net)
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
			m.filter = &c
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
	m.filter = nil
	m.mu.Unlock()
	if len(errs) > 0 {
		return fault.New(fault.Partial, "undo network changes", errors.Join(errs...), "run `tbcluster down` again; what is left is listed by `tbcluster doctor`")
	}
	return nil
}
