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

// The waits of a Manager.
const (
	defaultRetry = 250 * time.Millisecond
	longestRetry = 10 * time.Second
	// lookEvery is how often the packet filter is looked at, at most.
	lookEvery  = 2 * time.Second
	askTimeout = 5 * time.Second
	// A change that facts do not show is made again, but not while the facts may
	// be older than it.
	driftAfter = 5 * time.Second
	// Claims travel by membership; a far end that claims nothing for so long
	// after it said yes has forgotten.
	claimAfter = 5 * time.Second
	// Without the right to change anything it is tried again now and then: a
	// root half may come.
	permissionRetry = 30 * time.Second
	// What an earlier life applied stays for so long before peers are heard from.
	adoptFor = 30 * time.Second
)

// Manager gives own links and this node their addresses. All methods may be
// called at once.
type Manager struct {
	cfg    Config
	wake   chan struct{} // reconcile
	notify chan struct{} // tell Changed

	applying sync.Mutex // one reconciliation, or Down, at a time

	mu      sync.Mutex
	book    *book
	net     host.Network
	ends    []End
	asking  map[string]*ask     // by port
	applied map[identity]*entry // in force, as far as known
	turn    uint64              // of entries
	filter  *host.Change        // in force, unless it lacks something
	looked  time.Time           // when it was looked at
	// lookLater is set where it was to be looked at again, too soon.
	lookLater bool
	lacks     string // what of the filter is not there any more; "" if nothing
	failed    map[identity]*trouble
	denied    time.Time // when permission was last refused; zero if not
	print     string    // fingerprint of what was last announced
	dirty     bool      // the book is newer than the state file
	clash     []Conflict
	reach     map[string]Reach // of other nodes
	closing   bool
	heard     map[string]bool // peers whose claims have come
	ready     bool            // facts have come
}

// entry is a change in force.
type entry struct {
	change host.Change
	index  int // of its interface when it was made, or unseen or lost
	turn   uint64
	at     time.Time
	// keep is until when a change of an earlier life stays though nothing wants
	// it: who is at the other end is not known before peers are heard from.
	keep time.Time
}

// Indexes of no interface.
const (
	unseen = 0  // adopted, facts have not come
	lost   = -1 // adopted, and not on the interface that is there now
)

// notLooked is what an adopted filter lacks until it was looked at.
const notLooked = "it was not looked at yet"

// ask is a question to a peer about one link, under way or failed.
type ask struct {
	key     string
	running bool
	wait    time.Duration
	next    time.Time // not before
	reason  string
	// noneFree is set where reason is that no subnet was left to propose.
	noneFree bool
	asked    time.Time // when the far end last said yes
}

type trouble struct {
	err  error
	wait time.Duration
	next time.Time
}

// New reads what was remembered. It applies nothing until Run. A broken memory
// is set aside and logged: addresses are then agreed anew.
func New(cfg Config) (*Manager, error) {
	if !cfg.Block.IsValid() {
		cfg.Block = DefaultBlock
	}
	if cfg.Clock == nil {
		cfg.Clock = host.SystemClock{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Retry <= 0 {
		cfg.Retry = defaultRetry
	}
	s, err := newSpaces(cfg.Block, cfg.Spares)
	if err != nil {
		return nil, err
	}
	mem, err := load(cfg.StateFile)
	if err != nil && !errors.Is(err, errBroken) {
		return nil, err
	}
	if err != nil {
		cfg.Log.Warn("the memory of addresses was set aside", "file", cfg.StateFile, "error", err)
	}
	b := newBook(cfg.Self, s, cfg.InUse)
	b.old = cfg.Old
	if s.isNode(mem.Node) {
		b.node = mem.Node
	}
	for _, a := range mem.Agreements {
		if s.isLink(a.Prefix) && a.Peer != cfg.Self {
			b.agreements = append(b.agreements, a)
			b.turn = max(b.turn, a.Turn)
		}
	}
	return &Manager{
		cfg: cfg, book: b,
		wake: make(chan struct{}, 1), notify: make(chan struct{}, 1),
		asking: map[string]*ask{}, applied: map[identity]*entry{}, failed: map[identity]*trouble{}, heard: map[string]bool{},
	}, nil
}

// Run brings the machine to what is wanted, again after every change, until
// ctx ends or Down is called. It leaves addresses in force.
func (m *Manager) Run(ctx context.Context) error {
	journal, err := m.cfg.Applier.Applied(ctx)
	if err != nil {
		return fault.New(fault.Internal, "read the journal of network changes", err, "see the log of the root half")
	}
	m.adopt(journal)
	var background sync.WaitGroup
	defer background.Wait()
	inner, stop := context.WithCancel(ctx)
	defer stop()
	background.Go(func() { m.announce(inner) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.wake:
		case <-timer.C:
		}
		if !m.reconcile(inner, &background) {
			return nil
		}
		timer.Reset(m.due())
	}
}

// announce calls Changed, one call at a time.
func (m *Manager) announce(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.notify:
			if m.cfg.Changed != nil {
				m.cfg.Changed()
			}
		}
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// adopt takes over what an earlier life applied.
func (m *Manager) adopt(journal []host.Change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range journal {
		if c.Kind == host.ChangeFilter {
			m.filter, m.lacks = &c, notLooked
			continue
		}
		m.turn++
		now := m.cfg.Clock.Now()
		m.applied[identify(c)] = &entry{change: c, turn: m.turn, at: now, keep: now.Add(adoptFor)}
	}
	m.locate()
	m.survey()
}

// Update takes new facts and own ends.
func (m *Manager) Update(net host.Network, ends []End) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range ends {
		// A cable that was pulled or went elsewhere starts without old failures.
		if a := m.asking[e.Port]; a != nil && !a.running && !slices.Contains(m.ends, e) {
			a.wait, a.next = 0, time.Time{}
		}
	}
	for _, i := range net.Interfaces {
		if before, ok := m.net.Interface(i.Name); !ok || before.Index != i.Index {
			for id := range m.failed { // a new interface starts without old failures
				if id.iface == i.Name {
					delete(m.failed, id)
				}
			}
		}
	}
	m.net, m.ready = net, true
	m.ends = slices.Clone(ends)
	clear(m.book.largest)
	for _, e := range m.usable() {
		if m.cfg.Old {
			break
		}
		i, _ := net.Interface(e.Interface)
		m.book.largest[e.Port] = m.largestMTU(i)
	}
	m.locate()
	m.survey()
	poke(m.wake)
}

// locate finds out whether adopted changes are on the interfaces that are there.
func (m *Manager) locate() {
	for _, e := range m.applied {
		if i, there := m.net.Interface(e.change.Interface); there && e.index == unseen {
			e.index = i.Index
			if !satisfied(e.change, m.net) {
				e.index = lost
			}
		}
	}
}

// survey works out what of this machine's network is not ours.
func (m *Manager) survey() {
	cable := map[string]bool{}
	loopback := map[string]bool{}
	for _, i := range m.net.Interfaces {
		cable[i.Name], loopback[i.Name] = i.Cable, i.Loopback
	}
	nodes := map[netip.Prefix]bool{}
	for _, list := range m.book.claims {
		for _, c := range list {
			if c.kind == kindNode {
				nodes[c.prefix] = true
			}
		}
	}
	m.book.uses = occupied(m.net, func(p netip.Prefix, iface string) bool {
		for id := range m.applied {
			if id.iface == iface && (id.kind == host.ChangeAddress || id.kind == host.ChangeRoute) && contains(id.prefix, p) {
				return true
			}
		}
		// Made by hand from our commands, or by a life whose journal is gone.
		if loopback[iface] {
			return p == m.book.node
		}
		if !cable[iface] {
			return false
		}
		return nodes[p] || slices.ContainsFunc(m.book.agreements, func(a *agreement) bool { return contains(a.Prefix, p) })
	})
}

// contains reports whether all of p is within outer's subnet.
func contains(outer, p netip.Prefix) bool {
	return outer.IsValid() && outer.Masked().Contains(p.Addr()) && p.Bits() >= outer.Bits()
}

// SetClaims takes every other node's claims by node ID, those of down nodes too.
func (m *Manager) SetClaims(byNode map[string][]*peerv1.AddressClaim) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.book.claims = make(map[string][]claim, len(byNode))
	for id, list := range byNode {
		if id == m.cfg.Self {
			continue
		}
		m.book.claims[id] = parseClaims(id, list)
		if !m.heard[id] {
			m.heard[id] = true
			for _, e := range m.ends { // it is there now: ask at once
				if a := m.asking[e.Port]; e.PeerID == id && a != nil {
					a.wait, a.next = 0, time.Time{}
				}
			}
		}
	}
	for _, a := range m.book.agreements {
		a.seen = a.seen || m.book.claimed(a)
	}
	m.survey()
	poke(m.wake)
}

// SetReach takes what every other node says of its cables, by node ID: what a
// packet can take its way through.
func (m *Manager) SetReach(byNode map[string]Reach) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reach = byNode
	poke(m.wake)
}

// Forwards tells whether this node passes packets on between its cables.
func (m *Manager) Forwards() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.forwards()
}

func (m *Manager) forwards() bool {
	for id, e := range m.applied {
		if i, there := m.net.Interface(id.iface); id.kind == host.ChangeForward && there && i.Index == e.index {
			return true
		}
	}
	return false
}

// Forget drops what was agreed with a node that was forgotten or revoked.
func (m *Manager) Forget(nodeID string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := len(m.book.agreements)
	m.book.agreements = slices.DeleteFunc(m.book.agreements, func(a *agreement) bool { return a.Peer == nodeID })
	delete(m.book.claims, nodeID)
	delete(m.heard, nodeID)
	m.dirty = m.dirty || len(m.book.agreements) != before
	poke(m.wake)
}

// HandlePropose answers another node's proposal.
func (m *Manager) HandlePropose(_ context.Context, from string, req *peerv1.ProposeAddressRequest) (*peerv1.ProposeAddressResponse, error) {
	prefix, err := netip.ParsePrefix(req.GetPrefix())
	if err != nil {
		return nil, fault.New(fault.Protocol, "read the proposed subnet", err, "")
	}
	for _, port := range []string{req.GetPort(), req.GetProposerPort()} {
		if !portName(port) {
			return nil, fault.Newf(fault.Protocol, "", "%q is no name of a port", port)
		}
	}
	if from >= m.cfg.Self {
		return nil, fault.Newf(fault.Protocol, "", "the node with the lower ID proposes, which is not %s", from)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return nil, fault.Newf(fault.NodeDown, "", "this node is on its way down")
	}
	mtu := 0
	for _, e := range m.ends {
		if e.Port != req.GetPort() || !e.Present {
			continue
		}
		if e.PeerID != "" && e.PeerID != from {
			return nil, fault.Newf(fault.NodeUnknown, "see where the cables go by `tbcluster status`", "port %s of %s leads to %s, not to %s", e.Port, m.cfg.Self, e.PeerID, from)
		}
		if i, ok := m.net.Interface(e.Interface); ok {
			mtu = m.largestMTU(i)
		}
	}
	agreed := agreeMTU(mtu, req.GetMtu())
	conflict := m.book.accept(from, req.GetPort(), req.GetProposerPort(), prefix, agreed)
	m.dirty = true
	poke(m.wake)
	resp := &peerv1.ProposeAddressResponse{Accepted: !conflict.there(), Conflict: conflict.by, MaxMtu: uint32(mtu)}
	if conflict.prefix.IsValid() && !m.cfg.Old {
		resp.Taken = conflict.prefix.String()
	}
	return resp, nil
}

// portName reports whether text can name a port.
func portName(text string) bool {
	return text != "" && len(text) <= 64 && !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' })
}

// Claims returns own claims for section "links".
func (m *Manager) Claims() []*peerv1.AddressClaim {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.book.ownClaims()
}

// Links returns the address or the reason of every own end that is present,
// sorted by port.
func (m *Manager) Links() []Link {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.links()
}

func (m *Manager) links() []Link {
	var out []Link
	for _, e := range m.ends {
		if !e.Present {
			continue
		}
		l := Link{Port: e.Port, PeerID: e.PeerID, Interface: e.Interface}
		a := m.standing(e)
		switch {
		case m.closing:
			l.Reason = "this node is on its way down"
		case e.Interface == "":
			l.Reason = "it has no network interface"
		case a == nil:
			l.Reason, l.NoneFree = m.waitingFor(e)
		default:
			own := m.book.own(a)
			c := host.Change{Kind: host.ChangeAddress, Interface: e.Interface, Prefix: own}
			if m.inForce(c) {
				l.Prefix, l.Remote = own, m.book.far(a)
			} else {
				l.Reason = m.obstacle(c, e.Interface)
			}
		}
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b Link) int { return cmp.Compare(a.Port, b.Port) })
	return out
}

// standing returns the agreement that an end goes by; nil if there is none or
// it has to move.
func (m *Manager) standing(e End) *agreement {
	if e.PeerID == "" {
		return nil
	}
	a := m.book.find(e.PeerID, e.Port, e.PeerPort)
	if a == nil || m.book.standing(a).move {
		return nil
	}
	return a
}

// waitingFor says why an end has no agreed subnet, and whether none is free.
func (m *Manager) waitingFor(e End) (reason string, noneFree bool) {
	if a := m.asking[e.Port]; a != nil && a.reason != "" {
		return a.reason, a.noneFree
	}
	switch {
	case e.PeerID == "":
		reason = "the machine at the other end is not known"
	case m.cfg.Self > e.PeerID:
		reason = "the other end has not proposed an address yet"
	case e.PeerPort == "":
		reason = "the port at the other end is not known yet"
	default:
		reason = "an address is being agreed on"
	}
	return reason, false
}

// inForce reports whether a change is in force: applied by us on the interface
// that is there now, or made by hand.
func (m *Manager) inForce(c host.Change) bool {
	i, there := m.net.Interface(c.Interface)
	if e := m.applied[identify(c)]; e != nil && there && e.index == i.Index {
		return true
	}
	return !m.denied.IsZero() && satisfied(c, m.net)
}

// obstacle says why a change is not in force.
func (m *Manager) obstacle(c host.Change, iface string) string {
	if !m.denied.IsZero() {
		return "the agent has no permission to set addresses: start it as root, or run the commands that `tbcluster doctor` shows"
	}
	for id, t := range m.failed {
		if id == identify(c) || id.iface == iface {
			return fmt.Sprintf("%s failed: %v", id.kind, t.err)
		}
	}
	return "its address is being set"
}

// NodeAddress returns the own node address; invalid until it is applied.
func (m *Manager) NodeAddress() netip.Addr {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.nodeAddress()
}

func (m *Manager) nodeAddress() netip.Addr {
	if c, ok := m.nodeChange(); ok && m.inForce(c) {
		return c.Prefix.Addr()
	}
	return netip.Addr{}
}

// Conflicts returns clashes that cannot be resolved now.
func (m *Manager) Conflicts() []Conflict {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.clash)
}

// Applied returns the changes in force, oldest first.
func (m *Manager) Applied() []host.Change {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.inOrder()
}

func (m *Manager) inOrder() []host.Change {
	entries := make([]*entry, 0, len(m.applied))
	for _, e := range m.applied {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b *entry) int { return cmp.Compare(a.turn, b.turn) })
	var out []host.Change
	if m.filter != nil {
		out = append(out, *m.filter)
	}
	for _, e := range entries {
		out = append(out, e.change)
	}
	return out
}

// Wanted returns changes that are wanted and not permitted, in the order in
// which a person would make them.
func (m *Manager) Wanted() []host.Change {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.missing()
}

func (m *Manager) missing() []host.Change {
	if m.denied.IsZero() || m.closing {
		return nil
	}
	var out []host.Change
	for _, c := range m.wanted() {
		if c.Kind == host.ChangeFilter && !m.filterIs(c) || c.Kind != host.ChangeFilter && !m.inForce(c) {
			out = append(out, c)
		}
	}
	return out
}

// protects reports whether a filter drops what others send to own addresses
// and forgets no cable.
func (m *Manager) protects(f host.Change) bool {
	own := &host.Change{}
	m.protect(own)
	return slices.Equal(f.Interfaces, own.Interfaces) &&
		!slices.ContainsFunc(own.Addresses, func(a netip.Addr) bool { return !slices.Contains(f.Addresses, a) })
}

// filterIs reports whether a filter is in force.
func (m *Manager) filterIs(c host.Change) bool {
	return m.filter != nil && m.lacks == "" && sameFilter(*m.filter, c)
}

// CheckFilter looks whether the packet filter is there, sets it again if not,
// and tells what FilterActive does.
func (m *Manager) CheckFilter(ctx context.Context) (bool, string) {
	m.applying.Lock()
	defer m.applying.Unlock()
	if m.look(ctx, 0) {
		m.mu.Lock()
		c := m.wantedFilter()
		m.mu.Unlock()
		if c != nil {
			m.make(ctx, *c)
		}
		poke(m.wake) // Changed tells of it
	}
	if err := ctx.Err(); err != nil {
		return false, err.Error()
	}
	return m.FilterActive()
}

// FilterActive tells whether the packet filter is in force for all own
// addresses, and what keeps it from being so; "" while there is nothing to
// protect or it is about to be set.
func (m *Manager) FilterActive() (bool, string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.filterActive()
}

func (m *Manager) filterActive() (bool, string) {
	want := m.wantedFilter()
	switch {
	case m.filter != nil && m.lacks == "" && want != nil && m.protects(*m.filter):
		return true, ""
	case want == nil:
		return false, ""
	case !m.denied.IsZero():
		return false, "the agent has no permission to set it"
	}
	if t := m.failed[identify(*want)]; t != nil {
		return false, t.err.Error()
	}
	return false, ""
}
