package link

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

const (
	cabled    = tbclusterv1.LinkState_LINK_STATE_CABLED
	addressed = tbclusterv1.LinkState_LINK_STATE_ADDRESSED
	proven    = tbclusterv1.LinkState_LINK_STATE_PROVEN
	down      = tbclusterv1.LinkState_LINK_STATE_DOWN
)

// quick is a twentieth of the real timing, but for silence: a machine with much
// else to do stands still for a while, and that is no flap.
var quick = Timing{
	PingEvery: 50 * time.Millisecond, SilentAfter: time.Second,
	RetryFirst: 5 * time.Millisecond, RetryMost: 25 * time.Millisecond,
	DialTimeout: 40 * time.Millisecond, RotateAfter: 150 * time.Millisecond,
}

// wire is a cable made of real TCP: what is dialled at one end arrives at the
// other's listener, through a relay that can be cut or fall silent.
type wire struct {
	mu     sync.Mutex
	cond   *sync.Cond
	silent bool
	cut    bool
	conns  map[net.Conn]struct{}
	ends   [2]*plug
}

// plug is one end of a wire: an interface of a machine.
type plug struct {
	m     *machine
	port  string
	iface string
	index int
	addr  netip.Prefix
	wire  *wire
	far   *plug
}

// machine is a node with a tracker.
type machine struct {
	t       *testing.T
	id      string
	uuid    string
	tracker *Tracker
	mu      sync.Mutex
	plugs   []*plug
	listens map[string]net.Listener // by interface and address
	changed chan struct{}
	index   int
	refuse  bool // no agent listens
	acked   bool // of each connection all is acknowledged
}

func newMachine(t *testing.T, id, uuid string) *machine {
	m := &machine{t: t, id: id, uuid: uuid, listens: map[string]net.Listener{}, changed: make(chan struct{}, 1)}
	m.tracker = NewTracker(Config{Self: id, Dialer: m, Listener: m, Timing: quick, Acked: m.isAcked, Changed: func() {
		select {
		case m.changed <- struct{}{}:
		default:
		}
	}})
	t.Cleanup(m.tracker.Close)
	return m
}

func (m *machine) isAcked(net.Conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.acked
}

func (m *machine) plug(iface string) *plug {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.plugs {
		if p.iface == iface && iface != "" {
			return p
		}
	}
	return nil
}

func (m *machine) ListenLink(iface string, addr netip.Addr) (io.Closer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	key := iface + " " + addr.String()
	m.mu.Lock()
	m.listens[key] = l
	m.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if p := m.plug(iface); p != nil {
				go func() { _ = m.tracker.Serve(c, p.far.m.id, iface) }()
			} else {
				_ = c.Close()
			}
		}
	}()
	return l, nil
}

func (m *machine) DialLink(ctx context.Context, nodeID, iface string, local, remote netip.AddrPort) (net.Conn, error) {
	p := m.plug(iface)
	if p == nil {
		return nil, syscall.ENODEV
	}
	if p.far.m.id != nodeID {
		return nil, fmt.Errorf("that is %s, not %s", p.far.m.id, nodeID)
	}
	w := p.wire
	w.mu.Lock()
	dead := w.silent || w.cut
	w.mu.Unlock()
	far := p.far.m
	far.mu.Lock()
	l, refuse := far.listens[p.far.iface+" "+remote.Addr().String()], far.refuse
	far.mu.Unlock()
	if dead || l == nil && !refuse { // nobody answers ARP
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if refuse {
		return nil, syscall.ECONNREFUSED
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	near, inner := net.Pipe()
	w.relay(inner, c)
	return near, nil
}

// relay carries bytes both ways for as long as the wire lives. As a kernel does,
// it takes what is sent while the wire is silent.
func (w *wire) relay(a, b net.Conn) {
	w.mu.Lock()
	w.conns[a], w.conns[b] = struct{}{}, struct{}{}
	w.mu.Unlock()
	pump := func(to, from net.Conn) {
		defer to.Close()
		defer from.Close()
		sent := make(chan []byte, 10_000)
		go func() {
			defer close(sent)
			for {
				buf := make([]byte, 512)
				n, err := from.Read(buf)
				if err != nil {
					return
				}
				sent <- buf[:n]
			}
		}()
		for b := range sent {
			w.mu.Lock()
			for w.silent && !w.cut {
				w.cond.Wait()
			}
			w.mu.Unlock()
			if _, err := to.Write(b); err != nil {
				return
			}
		}
	}
	go pump(a, b)
	go pump(b, a)
}

func (w *wire) setSilent(silent bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.silent = silent
	w.cond.Broadcast()
}

// connect joins two machines by a cable between ports and gives it addresses.
func connect(a *machine, portA string, b *machine, portB, subnet string) *wire {
	w := &wire{conns: map[net.Conn]struct{}{}}
	w.cond = sync.NewCond(&w.mu)
	base := netip.MustParsePrefix(subnet)
	low := base.Addr().Next()
	pa := &plug{m: a, port: portA, wire: w, addr: netip.PrefixFrom(low, 30)}
	pb := &plug{m: b, port: portB, wire: w, addr: netip.PrefixFrom(low.Next(), 30)}
	pa.far, pb.far = pb, pa
	w.ends = [2]*plug{pa, pb}
	for _, p := range w.ends {
		p.m.mu.Lock()
		p.m.plugs = append(p.m.plugs, p)
		p.m.mu.Unlock()
	}
	w.mend("thunderbolt")
	return w
}

// cutNow does what the driver does on unplug.
func (w *wire) cutNow() {
	w.mu.Lock()
	w.cut = true
	w.cond.Broadcast()
	conns := w.conns
	w.conns = map[net.Conn]struct{}{}
	w.mu.Unlock()
	for _, p := range w.ends {
		p.m.mu.Lock()
		p.iface = ""
		p.m.mu.Unlock()
		p.m.facts()
	}
	for c := range conns {
		_ = c.Close()
	}
}

func (w *wire) mend(prefix string) {
	w.mu.Lock()
	w.cut, w.silent = false, false
	w.mu.Unlock()
	for _, p := range w.ends {
		p.m.mu.Lock()
		p.m.index++
		p.index = p.m.index
		p.iface = fmt.Sprintf("%s%d", prefix, p.index)
		p.m.mu.Unlock()
	}
	for _, p := range w.ends {
		p.m.facts()
	}
	for _, p := range w.ends {
		p.m.address()
	}
}

// facts gives the tracker what the machine sees now.
func (m *machine) facts() {
	m.mu.Lock()
	d := host.Domain{ID: "0", UUID: m.uuid}
	var n host.Network
	for _, p := range m.plugs {
		if p.iface == "" {
			continue
		}
		d.Peers = append(d.Peers, host.XDomain{Port: p.port, RemoteUUID: p.far.m.uuid, Interface: p.iface, RxGbps: 40, TxGbps: 40, CapableGbps: 40, RxLanes: 2, TxLanes: 2, Device: p.far.m.id})
		n.Interfaces = append(n.Interfaces, host.Interface{Name: p.iface, Index: p.index, Up: true, Carrier: true, MTU: 1500, Cable: true})
	}
	m.mu.Unlock()
	m.tracker.Update(host.Thunderbolt{DriverLoaded: true, Domains: []host.Domain{d}}, n)
}

// address gives the tracker the link addresses.
func (m *machine) address() {
	m.mu.Lock()
	by := map[string]Address{}
	for _, p := range m.plugs {
		if p.iface != "" && p.addr.IsValid() {
			by[p.port] = Address{Interface: p.iface, Prefix: p.addr, Remote: other(p.addr)}
		}
	}
	m.mu.Unlock()
	m.tracker.SetAddresses(by)
}

func other(p netip.Prefix) netip.Addr {
	first := p.Masked().Addr().Next()
	if p.Addr() == first {
		return first.Next()
	}
	return first
}

// exchange tells every machine what the others report, as membership does.
func exchange(ms ...*machine) {
	for _, m := range ms {
		var peers []Peer
		for _, o := range ms {
			if o != m {
				peers = append(peers, Peer{NodeID: o.id, Name: o.id, Up: true, LinkPort: 7871, Reports: o.tracker.Reports()})
			}
		}
		m.tracker.SetPeers(peers)
	}
}

func links(self *machine, ms ...*machine) []*tbclusterv1.Link {
	var nodes []NodeInfo
	reports := map[string][]*peerv1.LinkReport{}
	for _, m := range ms {
		nodes = append(nodes, NodeInfo{ID: m.id, Name: m.id, Up: true})
		reports[m.id] = m.tracker.Reports()
	}
	return Assemble(self.id, nodes, reports)
}

// await waits, from one change of a tracker to the next, until the links are
// as they should be.
func await(t *testing.T, what string, ms []*machine, ok func([]*tbclusterv1.Link) bool) []*tbclusterv1.Link {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(20 * time.Millisecond) // facts are read anew now and then
	defer tick.Stop()
	for {
		exchange(ms...)
		l := links(ms[0], ms...)
		if ok(l) {
			return l
		}
		select {
		case <-ms[0].changed:
		case <-ms[1].changed:
		case <-tick.C:
		case <-deadline:
			t.Fatalf("never %s: %v", what, l)
		}
	}
}

func all(state tbclusterv1.LinkState, n int) func([]*tbclusterv1.Link) bool {
	return func(l []*tbclusterv1.Link) bool {
		return len(l) == n && !slices.ContainsFunc(l, func(x *tbclusterv1.Link) bool { return x.GetState() != state })
	}
}

func pairOf(t *testing.T) (*machine, *machine, *wire) {
	a, b := newMachine(t, "alpha", "a0000000-0000-4000-8000-000000000001"), newMachine(t, "beta", "b0000000-0000-4000-8000-000000000001")
	w := connect(a, "0-1", b, "0-2", "10.77.1.0/30")
	return a, b, w
}

func TestACableIsProvenOncePingsComeBack(t *testing.T) {
	a, b, _ := pairOf(t)
	l := await(t, "proven", []*machine{a, b}, all(proven, 1))[0]
	if l.A.NodeId != "alpha" || l.A.Port != "0-1" || l.B.NodeId != "beta" || l.B.Port != "0-2" {
		t.Errorf("ends are %v and %v", l.A, l.B)
	}
	if l.Reason != "" || l.RttUs == 0 || l.NegotiatedGbps != 40 || l.Lanes != 2 {
		t.Errorf("link is %v", l)
	}
	if len(l.Paths) != 1 || l.Paths[0].Transport != "tcp" || l.Paths[0].Address != "10.77.1.1" || l.Paths[0].PeerAddress != "10.77.1.2" || l.Paths[0].Interface != l.A.Interface {
		t.Errorf("paths are %v", l.Paths)
	}
	for _, m := range []*machine{a, b} {
		if r := m.tracker.Reports()[0]; r.ProbedNodeId == "" || r.ProbedPort == r.Port {
			t.Errorf("%s met %q on port %q", m.id, r.ProbedNodeId, r.ProbedPort)
		}
	}
}

func TestASilentCableIsDownAndComesBack(t *testing.T) {
	a, b, w := pairOf(t)
	ms := []*machine{a, b}
	id := await(t, "proven", ms, all(proven, 1))[0].Id
	began := time.Now()
	w.setSilent(true)
	l := await(t, "down", ms, all(down, 1))[0]
	t.Logf("it took %v to see that nothing answers", time.Since(began)) // the limit is measured elsewhere
	if !strings.Contains(l.Reason, "carrier") || l.Flaps != 1 || l.Evidence != "alpha and beta still see the cable" {
		t.Errorf("a silent cable is shown as %v", l)
	}
	w.setSilent(false)
	if l := await(t, "proven again", ms, all(proven, 1))[0]; l.Id != id || l.Flaps != 1 {
		t.Errorf("it came back as %v, was %s", l, id)
	}
}

func TestACutIsDownAtOnceAndAReplugUnderAnotherNameIsTheSameLink(t *testing.T) {
	a, b, w := pairOf(t)
	ms := []*machine{a, b}
	id := await(t, "proven", ms, all(proven, 1))[0].Id
	w.cutNow()
	exchange(ms...)
	l := links(a, ms...)
	if len(l) != 1 || l[0].State != down || l[0].Id != id || l[0].A.Interface != "" || l[0].Reason == "" {
		t.Fatalf("right after the cut: %v", l)
	}
	// The replug is seen by both before either has heard of it from the other.
	w.mend("renamed")
	for _, m := range ms {
		if e := m.tracker.Ends()[0]; e.PeerID == "" || e.PeerPort == "" {
			t.Errorf("%s has forgotten who was at the other end: %+v", m.id, e)
		}
	}
	l = await(t, "proven again", ms, all(proven, 1))
	if l[0].Id != id || !strings.HasPrefix(l[0].A.Interface, "renamed") {
		t.Errorf("it came back as %v, was %s", l[0], id)
	}
}

func TestOnlyOneOfTwoCrossingConnectionsStays(t *testing.T) {
	a, b, _ := pairOf(t)
	await(t, "down to one connection", []*machine{a, b}, func(l []*tbclusterv1.Link) bool {
		if !all(proven, 1)(l) {
			return false
		}
		count := func(m *machine) (dialed, accepted int) {
			m.tracker.mu.Lock()
			defer m.tracker.mu.Unlock()
			for _, e := range m.tracker.ends {
				for s := range e.sessions {
					if s.dialed {
						dialed++
					} else {
						accepted++
					}
				}
			}
			return
		}
		da, aa := count(a)
		db, ab := count(b)
		return da+aa == 1 && db+ab == 1 && da == ab
	})
}

func TestTwoCablesWithOneUUIDAreToldApartByTrying(t *testing.T) {
	a, b := newMachine(t, "alpha", "a0000000-0000-4000-8000-000000000001"), newMachine(t, "beta", "b0000000-0000-4000-8000-000000000001")
	ms := []*machine{a, b}
	// Crossed: the guess in order of ports is wrong. Addresses follow the guess,
	// as mesh/address would agree on them.
	connect(a, "0-1", b, "0-4", "10.77.1.0/30")
	connect(a, "0-3", b, "0-2", "10.77.2.0/30")
	for _, m := range ms {
		m.mu.Lock()
		for _, p := range m.plugs {
			p.addr = netip.Prefix{}
		}
		m.mu.Unlock()
	}
	subnets := map[string]string{}
	l := await(t, "both proven", ms, func(l []*tbclusterv1.Link) bool {
		for _, e := range a.tracker.Ends() {
			if e.PeerPort == "" {
				continue
			}
			k := e.Port + "/" + e.PeerPort
			if subnets[k] == "" {
				subnets[k] = fmt.Sprintf("10.77.%d.0/30", len(subnets)+1)
			}
			base := netip.MustParsePrefix(subnets[k]).Addr()
			for _, p := range a.plugs {
				if p.port == e.Port {
					p.addr = netip.PrefixFrom(base.Next(), 30)
				}
			}
			for _, p := range b.plugs {
				if p.port == e.PeerPort {
					p.addr = netip.PrefixFrom(base.Next().Next(), 30)
				}
			}
		}
		a.address()
		b.address()
		a.facts()
		b.facts()
		return all(proven, 2)(l)
	})
	for _, x := range l {
		if got := x.A.Port + "-" + x.B.Port; got != "0-1-0-4" && got != "0-3-0-2" {
			t.Errorf("a link joins %s", got)
		}
	}
}

func TestAnAgentThatIsGoneIsToldFromASilentCable(t *testing.T) {
	a, b, _ := pairOf(t)
	ms := []*machine{a, b}
	await(t, "proven", ms, all(proven, 1))
	b.mu.Lock()
	b.refuse = true
	b.mu.Unlock()
	b.tracker.Close()
	deadline := time.After(time.Minute)
	for {
		r := a.tracker.Reports()[0]
		if !r.Proven && r.ProbedNodeId == "" && strings.Contains(r.Reason, "no agent of beta") {
			return
		}
		select {
		case <-a.changed:
		case <-deadline:
			t.Fatalf("it still says %v", r)
		}
	}
}

func TestAnAgentThatStandsStillIsToldFromASilentCable(t *testing.T) {
	a, b, w := pairOf(t)
	ms := []*machine{a, b}
	await(t, "proven", ms, all(proven, 1))
	for _, m := range ms {
		m.mu.Lock()
		m.acked = true
		m.mu.Unlock()
	}
	w.setSilent(true)
	l := await(t, "proven no more", ms, all(addressed, 1))[0]
	if !strings.Contains(l.Reason, "agent") || l.Flaps != 0 {
		t.Errorf("it is shown as %v", l)
	}
	for _, m := range ms {
		if r := m.tracker.Reports()[0]; Severed(r) {
			t.Errorf("%s counts the cable as severed: %v", m.id, r)
		}
	}
	w.setSilent(false)
	await(t, "proven again", ms, all(proven, 1))
	// The same without a word from the other machine's system.
	w.setSilent(true)
	for _, m := range ms {
		m.mu.Lock()
		m.acked = false
		m.mu.Unlock()
	}
	await(t, "down", ms, all(down, 1))
}

// A machine with a new identity is another node, and its cables are the same.
func TestACableGoesOnWithTheNewIdentityOfTheMachine(t *testing.T) {
	for _, id := range []string{"gamma", "aaa"} { // on either side of alpha
		a, b, w := pairOf(t)
		await(t, "proven", []*machine{a, b}, all(proven, 1))
		old := b.tracker.Reports()
		b.tracker.Close()
		c := newMachine(t, id, b.uuid)
		near, far := *w.ends[0], *w.ends[1]
		near.far, far.far, far.m = &far, &near, c
		c.plugs, c.index = []*plug{&far}, b.index
		w.mu.Lock()
		conns := w.conns
		w.conns = map[net.Conn]struct{}{}
		w.mu.Unlock()
		for x := range conns {
			_ = x.Close()
		}
		a.mu.Lock()
		a.plugs = []*plug{&near}
		a.mu.Unlock()
		c.facts()
		c.address()
		names := func(l []*tbclusterv1.Link) []string { return []string{l[0].A.NodeId, l[0].B.NodeId} }
		deadline := time.Now().Add(time.Minute)
		var l []*tbclusterv1.Link
		for {
			was := Peer{NodeID: "beta", Name: "beta", Reports: old}
			a.tracker.SetPeers([]Peer{was, {NodeID: id, Name: id, Up: true, LinkPort: 7871, Reports: c.tracker.Reports()}})
			c.tracker.SetPeers([]Peer{was, {NodeID: "alpha", Name: "alpha", Up: true, LinkPort: 7871, Reports: a.tracker.Reports()}})
			l = Assemble("alpha", []NodeInfo{{ID: "alpha", Name: "alpha", Up: true}, {ID: "beta", Name: "beta"}, {ID: id, Name: id, Up: true}},
				map[string][]*peerv1.LinkReport{"alpha": a.tracker.Reports(), "beta": old, id: c.tracker.Reports()})
			if all(proven, 1)(l) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("never proven: %v", l)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if n := names(l); !slices.Contains(n, "alpha") || !slices.Contains(n, id) {
			t.Errorf("it joins %v", n)
		}
		// Before the new one is let in, what the old one said is all that is known.
		l = Assemble("alpha", []NodeInfo{{ID: "alpha", Name: "alpha", Up: true}, {ID: "beta", Name: "beta"}},
			map[string][]*peerv1.LinkReport{"alpha": a.tracker.Reports(), "beta": old})
		if len(l) == 0 || !slices.Contains(names(l), "beta") {
			t.Errorf("without the new one it is %v", l)
		}
	}
}

func TestAProbeFromTheWrongNodeOrInterfaceIsTurnedAway(t *testing.T) {
	a, b, _ := pairOf(t)
	await(t, "proven", []*machine{a, b}, all(proven, 1))
	for what, try := range map[string][2]string{"interface": {"beta", "eth0"}, "node": {"gamma", a.plugs[0].iface}} {
		near, far := net.Pipe()
		if err := a.tracker.Serve(far, try[0], try[1]); err == nil {
			t.Errorf("wrong %s was served", what)
		}
		if _, err := near.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("wrong %s: the connection is still open: %v", what, err)
		}
	}
}

func TestAnUnpluggedStrangerIsForgottenAndAPeerIsNot(t *testing.T) {
	a, b, w := pairOf(t)
	a.tracker.Update(host.Thunderbolt{}, host.Network{})
	if r := a.tracker.Reports(); len(r) != 0 {
		t.Errorf("a machine that never was a peer is kept: %v", r)
	}
	a.facts()
	exchange(a, b)
	w.cutNow()
	exchange(a, b)
	if r := a.tracker.Reports(); len(r) != 1 || r[0].Present {
		t.Errorf("a peer's end is %v", r)
	}
	a.tracker.SetPeers(nil)
	if r := a.tracker.Reports(); len(r) != 0 {
		t.Errorf("the end of a forgotten peer is kept: %v", r)
	}
}

// present are the links that are not down, and all.
func present(list []*tbclusterv1.Link) (up, all int) {
	for _, l := range list {
		if l.State != down {
			up++
		}
	}
	return up, len(list)
}

func TestACableThatComesBackInOtherPortsLeavesNothingBehind(t *testing.T) {
	a, b := newMachine(t, "a", uuidA), newMachine(t, "b", uuidB)
	ms := []*machine{a, b}
	w := connect(a, "0-1", b, "0-1", "10.77.1.0/30")
	other := connect(a, "0-3", b, "0-3", "10.77.2.0/30")
	await(t, "both proven", ms, func(l []*tbclusterv1.Link) bool { return len(l) == 2 && l[0].State == proven && l[1].State == proven })
	w.cutNow()
	await(t, "one down", ms, func(l []*tbclusterv1.Link) bool { up, all := present(l); return up == 1 && all == 2 })
	// Another cable flaps meanwhile: it is in its own port, and the one that is out
	// stays out.
	other.cutNow()
	await(t, "both down", ms, func(l []*tbclusterv1.Link) bool { up, all := present(l); return up == 0 && all == 2 })
	other.mend("thunderbolt")
	await(t, "one back", ms, func(l []*tbclusterv1.Link) bool { up, all := present(l); return up == 1 && all == 2 })

	// The names of the ports change, as a controller that is counted anew does.
	for _, p := range w.ends {
		p.m.mu.Lock()
		p.port = "1-1"
		p.m.mu.Unlock()
	}
	w.mend("thunderbolt")
	l := await(t, "both proven, and no ghost", ms, func(l []*tbclusterv1.Link) bool {
		return len(l) == 2 && l[0].State == proven && l[1].State == proven
	})
	ports := []string{l[0].A.Port + l[0].B.Port, l[1].A.Port + l[1].B.Port}
	if slices.Sort(ports); !slices.Equal(ports, []string{"0-30-3", "1-11-1"}) {
		t.Errorf("ports %v", ports)
	}
	// So fast that nobody saw it out.
	for _, p := range w.ends {
		p.m.mu.Lock()
		p.port = "2-1"
		p.m.mu.Unlock()
	}
	w.mend("thunderbolt")
	await(t, "both proven after a quick move", ms, func(l []*tbclusterv1.Link) bool {
		return len(l) == 2 && l[0].State == proven && l[1].State == proven
	})
	// And one end alone.
	w.cutNow()
	await(t, "one down again", ms, func(l []*tbclusterv1.Link) bool { up, all := present(l); return up == 1 && all == 2 })
	w.ends[0].m.mu.Lock()
	w.ends[0].port = "0-301"
	w.ends[0].m.mu.Unlock()
	w.mend("thunderbolt")
	await(t, "both proven once more", ms, func(l []*tbclusterv1.Link) bool {
		return len(l) == 2 && l[0].State == proven && l[1].State == proven
	})
}

func TestAnEndRemembersWhatHappenedToIt(t *testing.T) {
	a, b := newMachine(t, "a", uuidA), newMachine(t, "b", uuidB)
	ms := []*machine{a, b}
	for _, m := range ms {
		m.tracker.cfg.History = openHistory(t, filepath.Join(t.TempDir(), "history.json"))
	}
	w := connect(a, "0-1", b, "0-2", "10.77.1.0/30")
	is := func(state tbclusterv1.LinkState) func([]*tbclusterv1.Link) bool {
		return func(l []*tbclusterv1.Link) bool { return len(l) == 1 && l[0].State == state }
	}
	await(t, "proven", ms, is(proven))
	for range 3 {
		w.cutNow()
		await(t, "down", ms, is(down))
		w.mend("other")
		await(t, "proven again", ms, is(proven))
	}
	w.setSilent(true)
	await(t, "silent", ms, is(down))
	m := Measurement{AToB: 7, BToA: 8, RTT: time.Millisecond, At: day, Duration: time.Second, NegotiatedGbps: 1}
	if err := a.tracker.Measured("0-1", "b", "0-2", m); err != nil {
		t.Fatal(err)
	}
	for _, wrong := range [][3]string{{"0-3", "b", "0-2"}, {"0-1", "c", "0-2"}, {"0-1", "b", "0-1"}} {
		if err := a.tracker.Measured(wrong[0], wrong[1], wrong[2], m); err == nil {
			t.Errorf("measured a cable that there is not: %v", wrong)
		}
	}
	l := await(t, "with its history", ms, func(l []*tbclusterv1.Link) bool {
		return l[0].Measurement != nil && len(l[0].FlapHistory) == 4 && len(l[0].FlapHistory[3].SeenBy) == 2
	})[0]
	// What it ran at is what the end knows, not what somebody says.
	if l.Measurement.NegotiatedGbps != 40 || l.MeasuredBytesPerSecond != 7 {
		t.Errorf("measured %v", l.Measurement)
	}
	for i, f := range l.FlapHistory {
		if len(f.SeenBy) != 2 || f.Reason == "" || (f.BackAt == nil) != (i == 3) {
			t.Errorf("flap %d: %v", i, f)
		}
	}
	// Everything is on disk when a tracker ends.
	a.tracker.Close()
	flaps, got := openHistory(t, a.tracker.cfg.History.path).of("0-1", "b", "0-2", 40)
	if len(flaps) != 4 || got == nil || got.AToB != 7 {
		t.Errorf("kept %v, %v", flaps, got)
	}
	b.tracker.Forget("a")
	if r := b.tracker.Reports(); len(r[0].FlapHistory) != 0 {
		t.Errorf("a node that was forgotten is remembered: %v", r)
	}
}

func TestAnEndReportsThatNoAddressIsFree(t *testing.T) {
	e := &end{listed: true, nic: host.Interface{Name: "thunderbolt0"}, peerID: "b", addr: Address{Reason: "all is taken", NoneFree: true}}
	name := func(id string) string { return id }
	if r := e.report(name); r.GetObstacle() != tbclusterv1.LinkObstacle_LINK_OBSTACLE_NO_ADDRESS || r.GetReason() != "all is taken" {
		t.Errorf("reports %v", r)
	}
	for what, change := range map[string]func(*end){
		"it is pulled out":       func(e *end) { e.listed = false },
		"it has no interface":    func(e *end) { e.nic = host.Interface{} },
		"another reason":         func(e *end) { e.addr.NoneFree = false },
		"the far end is unknown": func(e *end) { e.peerID = "" },
	} {
		c := *e
		change(&c)
		if r := c.report(name); r.GetObstacle() != tbclusterv1.LinkObstacle_LINK_OBSTACLE_UNSPECIFIED {
			t.Errorf("%s: %v", what, r)
		}
	}
}
