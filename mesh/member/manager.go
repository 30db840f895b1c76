package member

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/mesh/identity"
)

// Bounds of what is kept of each node.
const (
	MaxSection  = 4 << 20 // bytes
	MaxSections = 16
	maxName     = 64 // bytes of a section's name
)

// TrustSection is the section that the Manager publishes and merges by itself.
const TrustSection = "trust"

// Session is one gRPC connection to a node; *channel.Session is one.
type Session interface {
	grpc.ClientConnInterface
	Close() error
	Via() string // "INTERFACE ADDRESS", or the address alone
}

// Options are the settings of a Manager.
type Options struct {
	Self  identity.NodeID
	Store *identity.Store
	// Dir is the agent's state directory.
	Dir string
	// Dial connects to a node over its best way (channel.Channel.Session).
	Dial func(ctx context.Context, node identity.NodeID) (Session, error)
	// Peer tells who calls HandleSync and over which way
	// (channel.PeerFromContext, ConnFromContext).
	Peer func(ctx context.Context) (node identity.NodeID, via string, ok bool)
	// Version of tbcluster, told to the others, and what it can do beyond the
	// version before.
	Version  string
	Features []string
	// Keep names the sections that are kept on disk, so that a node that is down
	// can be described after a restart; nil is "node".
	Keep []string
	// Heartbeat is the interval for a cluster of n nodes; nil is Heartbeat.
	Heartbeat func(n int) time.Duration
	// Clock is the wall clock, for what is told and kept; intervals are measured
	// by the time since start, which nobody sets. nil is the system's.
	Clock host.Clock
	Log   *slog.Logger // nil discards
}

// Section is the newest content of a section.
type Section struct {
	Version uint64 // 0 for one that was kept from before
	Data    []byte // not to be written to
}

// NodeView is one other node as this node sees it.
type NodeView struct {
	ID          identity.NodeID
	State       State
	Reason      string // for people; "" when up
	Since       time.Time
	LastHeard   time.Time // zero if never
	Incarnation uint64
	Version     string // of tbcluster there
	Features    []string
	// Met is set once it was heard from since this start.
	Met bool
	// Untrusting is set while it answers and does not let this node in.
	Untrusting bool
	// Sections is shared, and not to be changed. Revision is another number
	// whenever Sections is another than before.
	Sections  map[string]Section
	Revision  uint64
	RTT       time.Duration // 0 if unknown
	Via       string        // way of the stream; "" when there is none
	ClockSkew time.Duration // its clock minus ours; 0 if unknown
}

// Heartbeat is the interval of heartbeats in a cluster of n nodes: 1 s up to 16
// nodes, 1 s more for every 16 more. Measured: 64 idle processes over TLS 1.3
// cost a core at 1 s, a fifth of one at 4 s.
func Heartbeat(n int) time.Duration {
	return time.Duration(max(1, (n+15)/16)) * time.Second
}

// Manager keeps this node in touch with the others.
type Manager struct {
	o    Options
	path string

	mu          sync.Mutex
	ctx         context.Context // of Run; nil before
	incarnation uint64
	own         map[string]Section
	merged      []byte // the records of trust that were merged last
	peers       map[identity.NodeID]*peer
	revision    uint64 // the last of a peer's sections
	subscribers map[int]chan struct{}
	nextSub     int
	dirty       chan struct{} // something to keep has changed
	work        sync.WaitGroup
}

// New returns a Manager; Run starts it. Faults: FILE_IO, STATE_TOO_NEW.
func New(o Options) (*Manager, error) {
	if o.Keep == nil {
		o.Keep = []string{"node"}
	}
	if o.Heartbeat == nil {
		o.Heartbeat = Heartbeat
	}
	if o.Clock == nil {
		o.Clock = host.SystemClock{}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	m := &Manager{
		o: o, path: statePath(o.Dir), own: map[string]Section{}, peers: map[identity.NodeID]*peer{},
		subscribers: map[int]chan struct{}{}, dirty: make(chan struct{}, 1),
	}
	kept, err := m.load()
	if err != nil {
		return nil, err
	}
	m.incarnation = max(kept.Incarnation+1, uint64(max(0, o.Clock.Now().Unix())))
	m.syncPeers()
	for id, k := range kept.Nodes {
		if p := m.peers[id]; p != nil {
			p.restore(k, time.Now(), o.Clock.Now())
		}
	}
	if err := m.Publish(TrustSection, o.Store.Export()); err != nil {
		return nil, err
	}
	// The incarnation must be on disk before anybody hears it.
	return m, m.save()
}

// Run works until ctx ends, then says goodbye to all.
func (m *Manager) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.mu.Lock()
	if m.ctx != nil {
		m.mu.Unlock()
		return fault.New(fault.Internal, "run the membership twice", nil, "")
	}
	m.ctx = ctx
	for _, p := range m.peers {
		m.start(p)
	}
	m.mu.Unlock()
	defer m.o.Store.OnChange(m.trustChanged)()
	m.trustChanged() // whatever came between New and now

	m.saveWhenDirty(ctx)

	m.goodbye("its agent was stopped")
	m.mu.Lock()
	for _, p := range m.peers {
		p.cancel()
	}
	m.mu.Unlock()
	m.work.Wait()
	return m.save()
}

// goodbye tells all peers that this node goes, and waits a little for them to
// have heard it.
func (m *Manager) goodbye(reason string) {
	m.mu.Lock()
	var streams []*stream
	for _, p := range m.peers {
		if p.stream != nil {
			streams = append(streams, p.stream)
		}
	}
	m.mu.Unlock()
	late := time.After(goodbyeWithin)
	for _, s := range streams {
		s.sayGoodbye(reason)
	}
	for _, s := range streams {
		select {
		case <-s.ctx.Done():
		case <-late:
			return
		}
	}
}

// goodbyeWithin bounds how long a stop takes for the sake of peers that hang.
const goodbyeWithin = 2 * time.Second

// Incarnation returns the number of this start of the agent.
func (m *Manager) Incarnation() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.incarnation
}

// raise takes a higher incarnation than others remember of this node, which
// happens when its state was lost and its clock went back.
func (m *Manager) raise(above uint64) {
	m.mu.Lock()
	if above < m.incarnation || above >= maxIncarnation {
		m.mu.Unlock()
		return
	}
	m.incarnation = above + 1
	for _, p := range m.peers {
		if p.stream != nil {
			p.stream.end(errors.New("this node takes a new incarnation"))
		}
	}
	m.mu.Unlock()
	if err := m.save(); err != nil {
		m.o.Log.Error("cannot keep the incarnation", "error", err)
	}
}

// maxIncarnation is more than any clock or counter gives; above it somebody
// makes numbers up.
const maxIncarnation = 1 << 60

// Publish sets a section of this node's own state. The same bytes again are no
// change. Its error is a fault (INTERNAL) when a bound is exceeded.
func (m *Manager) Publish(section string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, ok := m.own[section]
	switch {
	case section == "" || len(section) > maxName || !ok && len(m.own) >= MaxSections:
		return fault.Newf(fault.Internal, "", "publish section %q: no such room", section)
	case len(data) > MaxSection:
		return fault.Newf(fault.Internal, "", "publish section %q: %d bytes are more than %d", section, len(data), MaxSection)
	case ok && bytes.Equal(old.Data, data):
		return nil
	}
	m.own[section] = Section{Version: old.Version + 1, Data: bytes.Clone(data)}
	for _, p := range m.peers {
		if p.stream != nil {
			p.stream.poke()
		}
	}
	return nil
}

// trustChanged follows the trust store: who is in, and what to tell.
func (m *Manager) trustChanged() {
	if err := m.Publish(TrustSection, m.o.Store.Export()); err != nil {
		m.o.Log.Error("cannot tell the others of a change of trust", "error", err)
	}
	m.syncPeers()
}

// syncPeers has one peer for each other member, and none for anybody else.
func (m *Manager) syncPeers() {
	in := map[identity.NodeID]bool{}
	for _, member := range m.o.Store.Members() {
		if !member.Self && !member.Revoked {
			in[member.ID] = true
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range in {
		if m.peers[id] == nil {
			p := newPeer(m.o.Self, id, time.Now())
			m.setSections(p, p.sections)
			m.peers[id] = p
			m.start(p)
		}
	}
	for id, p := range m.peers {
		if !in[id] {
			delete(m.peers, id)
			p.gone = true
			p.cancel()
			if p.stream != nil {
				p.stream.end(errors.New("it is in the cluster no more"))
			}
		}
	}
	m.touch()
	m.tell()
}

// heartbeat is this node's own interval now. The caller holds mu.
func (m *Manager) heartbeat() time.Duration { return m.o.Heartbeat(len(m.peers) + 1) }

// Snapshot returns all other members but the forgotten ones, sorted by ID.
func (m *Manager) Snapshot() []NodeView {
	hidden := m.forgotten()
	m.mu.Lock()
	defer m.mu.Unlock()
	views := make([]NodeView, 0, len(m.peers))
	for id, p := range m.peers {
		if !hidden[id] {
			views = append(views, p.view())
		}
	}
	slices.SortFunc(views, func(a, b NodeView) int { return cmpID(a.ID, b.ID) })
	return views
}

func (m *Manager) forgotten() map[identity.NodeID]bool {
	hidden := map[identity.NodeID]bool{}
	for _, member := range m.o.Store.Members() {
		if member.Forgotten {
			hidden[member.ID] = true
		}
	}
	return hidden
}

// Node returns one other member.
func (m *Manager) Node(id identity.NodeID) (NodeView, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.peers[id]
	if p == nil {
		return NodeView{}, false
	}
	return p.view(), true
}

// Subscribe returns a channel that gets a value soon after Snapshot changed
// (not for RTT, LastHeard or ClockSkew alone); it has room for one.
func (m *Manager) Subscribe() (changed <-chan struct{}, cancel func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c, n := make(chan struct{}, 1), m.nextSub
	m.nextSub++
	m.subscribers[n] = c
	return c, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.subscribers, n)
	}
}

// tell wakes the subscribers. The caller holds mu.
func (m *Manager) tell() {
	for _, c := range m.subscribers {
		signal(c)
	}
}

// touch says that there is something to keep. It may be called with mu or not.
func (m *Manager) touch() { signal(m.dirty) }

// signal puts a value into a channel with room for one, unless it has one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Kick says that there is news of how to reach a node: dial it now if there is
// no stream, beside an attempt that began before the news.
func (m *Manager) Kick(node identity.NodeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.peers[node]; p != nil && p.stream == nil {
		p.failures, p.kicked = 0, true
		at := time.Now()
		if !p.dials {
			at = at.Add(knockAfter) // the other end has the same news
		}
		if at.Before(p.nextDial) {
			p.nextDial = at
		}
		signal(p.wake)
	}
}

// WayGone says that an interface of this node is gone, before the connections
// over it end: whoever was reached by it is not late because of that.
func (m *Manager) WayGone(iface string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.peers {
		if p.stream == nil {
			continue
		}
		if name, _, _ := strings.Cut(p.stream.via, " "); name == iface {
			p.stream.end(errWayGone)
		}
	}
}

// Forget drops a node that is down from the list, here and at all others, until
// it is met again. Faults: NODE_UNKNOWN, NODE_IN_USE when it is not down, DENIED.
func (m *Manager) Forget(node identity.NodeID) error {
	v, ok := m.Node(node)
	if !ok {
		return fault.Newf(fault.NodeUnknown, "`tbcluster status` lists the nodes", "node %s is not in the cluster", node.Short())
	}
	if v.State != Down {
		f := fault.Newf(fault.NodeInUse, "stop its agent first, or put it out for good with `tbcluster pair --revoke`", "forget node %s", node.Short())
		f.Why = "it is " + string(v.State)
		return f
	}
	if err := m.o.Store.Forget(node); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.peers[node]; p != nil {
		m.setSections(p, map[string]Section{})
	}
	m.touch()
	m.tell()
	return nil
}

func cmpID(a, b identity.NodeID) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// accept checks what a peer said of a section and keeps it. The caller holds mu.
func (m *Manager) acceptSection(p *peer, name string, s Section) (changed bool, err error) {
	old, ok := p.sections[name]
	switch {
	case name == "" || len(name) > maxName:
		return false, fmt.Errorf("a section with a name of %d bytes", len(name))
	case len(s.Data) > MaxSection:
		return false, fmt.Errorf("section %q of %d bytes is too large", name, len(s.Data))
	case !ok && len(p.sections) >= MaxSections:
		return false, fmt.Errorf("more than %d sections", MaxSections)
	case s.Version == 0 || ok && s.Version <= old.Version:
		return false, nil
	}
	sections := maps.Clone(p.sections)
	sections[name] = s
	m.setSections(p, sections)
	if slices.Contains(m.o.Keep, name) {
		m.touch()
	}
	return true, nil
}

func (p *peer) view() NodeView {
	v := NodeView{
		ID: p.id, State: p.state, Reason: p.reason, Since: p.since, LastHeard: p.lastHeard,
		Incarnation: p.incarnation, Version: p.version, Sections: p.sections, Revision: p.revision,
		RTT: p.rtt, ClockSkew: p.skew, Features: p.features, Met: p.met, Untrusting: p.untrusting,
	}
	if p.stream != nil {
		v.Via = p.stream.via
	}
	return v
}
