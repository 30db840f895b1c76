package link

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/host/beat"
)

// Tracker keeps this node's own link ends. All methods may be called at once.
type Tracker struct {
	cfg  Config
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup
	wake chan struct{} // something of the fingerprint changed

	mu     sync.Mutex
	closed bool
	ends   map[key]*end
	peers  map[string]Peer
	byPort map[string]Address
	// tries counts, for ends whose ports UUIDs do not tell apart, which pairing
	// is tried now and since when.
	tries map[group]*try
	print string // fingerprint of what was last announced
	// updates counts calls of Update: what one shows has happened at once.
	updates uint64
}

type try struct {
	number int
	since  time.Time
}

// NewTracker returns a tracker without ends.
func NewTracker(cfg Config) *Tracker {
	cfg.Timing = cfg.Timing.withDefaults()
	if cfg.Clock == nil {
		cfg.Clock = host.SystemClock{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	t := &Tracker{
		cfg:    cfg,
		wake:   make(chan struct{}, 1),
		ends:   map[key]*end{},
		peers:  map[string]Peer{},
		byPort: map[string]Address{},
		tries:  map[group]*try{},
	}
	t.ctx, t.stop = context.WithCancel(context.Background())
	t.wg.Add(2)
	go t.announce()
	go t.keep()
	return t
}

// Close ends all probes and listeners and waits for them.
func (t *Tracker) Close() {
	t.mu.Lock()
	t.closed = true
	for _, e := range t.ends {
		t.disconnect(e)
	}
	t.mu.Unlock()
	t.stop()
	t.wg.Wait()
	t.save()
}

// saveEvery is how often the history is written at most: a cable that flaps all
// the time wears no disk.
const saveEvery = 2 * time.Second

// keep writes the history.
func (t *Tracker) keep() {
	defer t.wg.Done()
	tick := time.NewTimer(beat.Until(saveEvery))
	defer tick.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-tick.C:
			t.save()
			tick.Reset(beat.Until(saveEvery))
		}
	}
}

func (t *Tracker) save() {
	if err := t.cfg.History.Save(); err != nil {
		t.cfg.Log.Error("cannot keep the history of cables", "error", err)
	}
}

// Measured remembers what a bench of an own end found. The end must lead to that
// port of that node now.
func (t *Tracker) Measured(port, peer, peerPort string, m Measurement) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.ends {
		if e.listed && e.port == port && e.peer() == peer && (e.farPort() == "" || e.farPort() == peerPort) {
			m.NegotiatedGbps = negotiated(e.x)
			t.cfg.History.measured(port, peer, peerPort, m, t.cfg.Clock.Now())
			t.touch()
			return nil
		}
	}
	return fmt.Errorf("no cable leads from port %s to port %s of %s now", port, peerPort, t.name(peer))
}

// Forget drops what is remembered of the cables to a node.
func (t *Tracker) Forget(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cfg.History.forget(node)
	t.touch()
}

// announce calls Changed, one call at a time.
func (t *Tracker) announce() {
	defer t.wg.Done()
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-t.wake:
			if t.cfg.Changed != nil {
				t.cfg.Changed()
			}
		}
	}
}

// Update takes new facts; call it whenever host.Watch fires.
func (t *Tracker) Update(tb host.Thunderbolt, net host.Network) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.updates++
	seen := map[key]bool{}
	for _, d := range tb.Domains {
		for _, x := range d.Peers {
			k := key{port: x.Port, remote: CanonicalUUID(x.RemoteUUID)}
			seen[k] = true
			e := t.ends[k]
			if e == nil {
				e = &end{key: k, fresh: true, sessions: map[*session]struct{}{}}
				t.ends[k] = e
			}
			nic, _ := net.Interface(x.Interface)
			t.refresh(e, d.UUID, x, nic)
		}
	}
	for k, e := range t.ends {
		if !seen[k] && e.listed {
			t.cfg.Log.Info("link end vanished", "port", e.port, "peer", t.name(e.peer()))
			e.listed, e.hadNIC, e.nic = false, false, host.Interface{}
			e.turned, e.fresh = t.updates, false
			t.disconnect(e)
			e.unmeet()
		}
	}
	t.settle()
}

// refresh takes what is new about one end. A new interface starts it afresh,
// even under the name of the old one.
func (t *Tracker) refresh(e *end, local string, x host.XDomain, nic host.Interface) {
	if !e.listed {
		e.listed, e.hadNIC = true, false
		e.turned = t.updates
		e.unmeet()
		t.cfg.Log.Info("link end appeared", "port", e.port, "interface", nic.Name)
	}
	if e.nic.Name != nic.Name || e.nic.Index != nic.Index {
		t.disconnect(e)
		if nic.Name != "" {
			e.unmeet()
			// The address went with the old interface; SetAddresses tells anew.
			delete(t.byPort, e.port)
		}
	}
	e.local, e.x, e.nic = local, x, nic
	e.hadNIC = e.hadNIC || nic.Name != ""
}

// SetPeers takes all paired nodes (without this one).
func (t *Tracker) SetPeers(peers []Peer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.peers
	t.peers = make(map[string]Peer, len(peers))
	for _, p := range peers {
		t.peers[p.NodeID] = p
	}
	t.settle()
	// A peer that came up or told of an address is worth a dial now.
	for _, e := range t.ends {
		if e.prober == nil {
			continue
		}
		now, was := t.peers[e.peer()], before[e.peer()]
		if now.Up && !was.Up || hasAddress(now, e.addr) && !hasAddress(was, e.addr) {
			e.prober.kick()
		}
	}
}

// hasAddress reports whether the peer says that it has the far address.
func hasAddress(p Peer, a Address) bool {
	return a.Remote.IsValid() && slices.ContainsFunc(p.Reports, func(r *peerv1.LinkReport) bool {
		return bare(r.GetAddress()) == a.Remote.String()
	})
}

// SetAddresses takes the link addresses of own ends by port, all of them.
func (t *Tracker) SetAddresses(byPort map[string]Address) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.byPort = make(map[string]Address, len(byPort))
	for port, a := range byPort {
		t.byPort[port] = a
	}
	t.settle()
}

// Reports returns own ends for section "links", sorted by port.
func (t *Tracker) Reports() []*peerv1.LinkReport {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*peerv1.LinkReport, 0, len(t.ends))
	for _, e := range t.sorted() {
		r := e.report(t.name)
		e.remembered(r, t.cfg.History)
		out = append(out, r)
	}
	return out
}

// reports are own ends without what is remembered of them.
func (t *Tracker) reports() []*peerv1.LinkReport {
	out := make([]*peerv1.LinkReport, 0, len(t.ends))
	for _, e := range t.sorted() {
		out = append(out, e.report(t.name))
	}
	return out
}

// Ends returns own ends with their far ends, sorted by port.
func (t *Tracker) Ends() []End {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]End, 0, len(t.ends))
	for _, e := range t.sorted() {
		out = append(out, End{
			Port:           e.port,
			Interface:      e.nic.Name,
			Present:        e.listed,
			PeerID:         e.peer(),
			PeerPort:       e.peerPort,
			Proven:         e.state == tbclusterv1.LinkState_LINK_STATE_PROVEN,
			NegotiatedGbps: negotiated(e.x),
			RTT:            e.shownRTT,
		})
	}
	return out
}

func (t *Tracker) sorted() []*end {
	out := make([]*end, 0, len(t.ends))
	for _, e := range t.ends {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b *end) int {
		return cmp.Or(cmp.Compare(a.port, b.port), cmp.Compare(a.remote, b.remote))
	})
	return out
}

func (t *Tracker) name(node string) string {
	if p, ok := t.peers[node]; ok && p.Name != "" {
		return p.Name
	}
	return node
}

// settle derives everything that follows from facts, peers and addresses.
// Called with the mutex held after each change of those.
func (t *Tracker) settle() {
	if t.closed {
		return
	}
	t.match()
	t.prune()
	for _, e := range t.ends {
		a := Address{}
		if e.listed {
			a = t.byPort[e.port]
		}
		if a != e.addr {
			e.addr = a
		}
		t.steer(e)
	}
	t.touch()
}

// touch brings states up to date and announces what changed but for counters and
// round trips.
func (t *Tracker) touch() {
	now := t.cfg.Clock.Now()
	var b strings.Builder
	for _, e := range t.sorted() {
		e.settle(now, t.name, t.cfg.History)
		state, reason := e.current(t.name)
		_, measured := t.cfg.History.of(e.port, e.lastPeer, e.farPort(), negotiated(e.x))
		fmt.Fprintf(&b, "%q %q %q %v %v %q %q %q %q %q %v %v %v %q %v", e.port, e.remote, e.local, state, e.listed, reason,
			e.nic.Name, e.peerID, e.peerPort, e.probedPort, e.addr.Prefix, e.nic.MTU, e.x.RxGbps+e.x.TxGbps+e.x.CapableGbps, e.x.Device, e.shownRTT > 0)
		if measured != nil {
			fmt.Fprintf(&b, " %v", *measured)
		}
		b.WriteByte('|')
	}
	if s := b.String(); s != t.print {
		t.print = s
		select {
		case t.wake <- struct{}{}:
		default:
		}
	}
}

// match finds the node and port at the far end of each own end, with the same
// matcher by which Assemble joins the cluster's links.
func (t *Tracker) match() {
	canonical := canonicalUUIDs()
	own := map[string]bool{}
	for _, e := range t.ends {
		own[canonical(e.local)] = true
	}
	reports := map[string][]*peerv1.LinkReport{t.cfg.Self: t.reports()}
	said := map[string][]*peerv1.LinkReport{t.cfg.Self: reports[t.cfg.Self]}
	for id, p := range t.peers {
		said[id] = p.Reports
	}
	said = latest(said, func(node string) bool { return node == t.cfg.Self || t.peers[node].Up })
	owners := map[string][]string{} // canonical UUID → nodes that have it
	for id := range t.peers {
		for _, r := range said[id] {
			if u := canonical(r.GetLocalUuid()); u != "" && !slices.Contains(owners[u], id) {
				owners[u] = append(owners[u], id)
			}
			if own[canonical(r.GetRemoteUuid())] || r.GetProbedNodeId() == t.cfg.Self {
				reports[id] = append(reports[id], r)
			}
		}
	}
	m := newMatcher(reports)
	m.rotate = t.rotation
	m.run()
	for _, s := range m.nodes[t.cfg.Self] {
		e := t.ends[key{port: s.report.GetPort(), remote: s.remote}]
		if e == nil {
			continue
		}
		nodes := owners[s.remote]
		switch {
		case s.peer != nil && s.peer.node == t.cfg.Self, own[s.remote] && s.remote != "":
			e.peerID, e.peerPort = "", "" // a cable back to this machine
		case s.peer != nil:
			e.peerID, e.peerPort = s.peer.node, s.peer.report.GetPort()
		case len(nodes) == 1:
			// The node is known, its port is not: keep what it was.
			if e.peerID != nodes[0] {
				e.peerPort = ""
			}
			e.peerID = nodes[0]
		case len(nodes) > 1:
			e.peerID, e.peerPort = "", ""
		}
		if _, paired := t.peers[e.peerID]; !paired {
			e.peerID, e.peerPort = "", ""
		}
		if e.peerID != "" && e.probedID != "" && e.probedID != e.peerID && !t.peers[e.probedID].Up {
			e.unmeet() // the machine there has another identity than when it was met
		}
	}
}

// rotation returns the number of the pairing to try for a group, and goes on
// to the next where a wrong pair of ports must have been guessed: both ends of
// unproven links had addresses for RotateAfter and nothing came through. It
// also ends the wait for the other end's word on as many ports.
func (t *Tracker) rotation(g group) int {
	peer, own, remote := g.b, g.ua, g.ub
	switch t.cfg.Self {
	case g.a:
	case g.b:
		peer, own, remote = g.a, g.ub, g.ua
	default:
		return 0
	}
	near, stuck, addressed := 0, 0, true
	for _, e := range t.ends {
		if e.listed && e.remote == remote && CanonicalUUID(e.local) == own {
			near++
			if !e.proven() {
				stuck++
				addressed = addressed && e.addressed()
			}
		}
	}
	far := 0
	for _, r := range t.peers[peer].Reports {
		if r.GetPresent() && CanonicalUUID(r.GetLocalUuid()) == remote && CanonicalUUID(r.GetRemoteUuid()) == own {
			far++
			addressed = addressed && (r.GetProven() || r.GetAddress() != "")
		}
	}
	if near <= 1 && far <= 1 || stuck == 0 || !t.peers[peer].Up {
		delete(t.tries, g)
		return 0
	}
	now := t.cfg.Clock.Now()
	c := t.tries[g]
	if c == nil {
		c = &try{since: now}
		t.tries[g] = c
	}
	if !addressed && (near == far || c.number > 0) {
		c.since = now // nothing to learn from yet
	}
	if now.Sub(c.since) >= t.cfg.Timing.RotateAfter {
		c.number, c.since = c.number+1, now
	}
	return c.number
}

// prune drops ends that are gone for good: whose peer is not known, whose port
// has another cable now, or whose cable has come back in another port (as it
// seems too where the ports got other names).
func (t *Tracker) prune() {
	t.pruneMoved()
	taken := map[string]bool{}
	for _, e := range t.ends {
		if e.listed {
			taken[e.port] = true
		}
	}
	for k, e := range t.ends {
		if !e.listed && (e.peerID == "" || taken[e.port]) {
			t.disconnect(e)
			delete(t.ends, k)
		}
	}
}

// pruneMoved drops, for each end that appeared in another port after one to the
// same node had vanished, one that had: the one that vanished last before.
func (t *Tracker) pruneMoved() {
	var gone, here []*end
	for _, e := range t.ends {
		switch {
		case e.listed && e.fresh && e.peer() != "":
			here = append(here, e)
		case !e.listed:
			gone = append(gone, e)
		}
	}
	slices.SortFunc(here, func(a, b *end) int { return cmp.Compare(a.turned, b.turned) })
	for _, n := range here {
		var from *end
		for _, e := range gone {
			if e.peerID == n.peer() && e.turned <= n.turned && (from == nil || e.turned > from.turned) {
				from = e
			}
		}
		if from == nil {
			continue
		}
		n.fresh = false
		gone = slices.DeleteFunc(gone, func(e *end) bool { return e == from })
		t.disconnect(from)
		delete(t.ends, from.key)
	}
}
