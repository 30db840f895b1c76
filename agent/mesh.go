package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host"
	"tbcluster/host/beat"
	"tbcluster/host/sock"
	"tbcluster/mesh/address"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/discover"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/mesh/member"
)

// look reads the machine's facts.
func (a *Agent) look(ctx context.Context) error {
	m, err := a.opt.Host.Machine(ctx)
	if err != nil {
		return err
	}
	tb, err := a.opt.Host.Thunderbolt(ctx)
	if err != nil {
		return err
	}
	n, err := a.opt.Host.Network(ctx)
	if err != nil {
		return err
	}
	a.facts.Store(&facts{m, tb, n})
	return nil
}

// watchHost looks at the machine whenever something may have changed.
func (a *Agent) watchHost(ctx context.Context) {
	f := a.facts.Load()
	a.tracker.Update(f.tb, f.net)
	a.finder.Rescan()
	a.poke()
	for range a.opt.Host.Watch(ctx) {
		if err := a.lookAgain(ctx); err != nil && ctx.Err() == nil {
			a.log.Warn("look at the machine", "error", err)
		}
	}
}

// lookAgain looks at the machine and tells everybody what changed. Looks come
// one after the other, so that no older one is taken for the newest.
func (a *Agent) lookAgain(ctx context.Context) error {
	a.looking.Lock()
	defer a.looking.Unlock()
	before := a.facts.Load()
	if err := a.look(ctx); err != nil {
		return err
	}
	now := a.facts.Load()
	gone, changed := interfacesChanged(before.net, now.net)
	for _, name := range gone {
		a.wayGone(name)
	}
	if changed {
		a.finder.Rescan()
	}
	a.tracker.Update(now.tb, now.net)
	if factsChanged(before, now) {
		a.poke()
	}
	return nil
}

// factsChanged reports whether anything but counters and memory is other than it
// was. Those are read now and then.
func factsChanged(before, now *facts) bool {
	lasting := func(f *facts) (host.Machine, host.Thunderbolt, host.Network) {
		m, n := f.machine, f.net
		m.Memory = host.Memory{}
		n.Interfaces = slices.Clone(n.Interfaces)
		for i := range n.Interfaces {
			x := &n.Interfaces[i]
			x.RxBytes, x.TxBytes, x.RxErrors, x.TxErrors, x.RxDropped, x.TxDropped = 0, 0, 0, 0, 0, 0
		}
		return m, f.tb, n
	}
	m1, t1, n1 := lasting(before)
	m2, t2, n2 := lasting(now)
	return m1 != m2 || !reflect.DeepEqual(t1, t2) || !reflect.DeepEqual(n1, n2)
}

// wayGone ends what went over an interface that is gone or silent.
func (a *Agent) wayGone(iface string) {
	a.member.WayGone(iface)
	a.channel.WayGone(iface)
}

// interfacesChanged returns the names of interfaces that are gone (another one
// under the same name included), and whether anything about addresses or
// interfaces changed.
func interfacesChanged(before, now host.Network) (gone []string, changed bool) {
	for _, b := range before.Interfaces {
		n, ok := now.Interface(b.Name)
		if !ok || n.Index != b.Index || b.Up && !n.Up {
			gone = append(gone, b.Name)
		}
		if !ok || n.Index != b.Index || n.Up != b.Up || n.Carrier != b.Carrier || !slices.Equal(n.Addresses, b.Addresses) {
			changed = true
		}
	}
	return gone, changed || len(now.Interfaces) != len(before.Interfaces)
}

// interfaceOf names the interface that has an address. One that was not there
// when the machine was last looked at is looked for once more.
func (a *Agent) interfaceOf(local netip.Addr) (string, bool) {
	if name, cable := holderOf(a.facts.Load().net, local); name != "" {
		return name, cable
	}
	n, err := a.opt.Host.Network(context.Background())
	if err != nil {
		a.log.Warn("look for an address", "address", local, "error", err)
		return "", false
	}
	return holderOf(n, local)
}

func holderOf(n host.Network, local netip.Addr) (string, bool) {
	zone := local.Zone()
	local = local.Unmap().WithZone("")
	for _, i := range n.Interfaces {
		if zone != "" && zone != i.Name {
			continue
		}
		for _, p := range i.Addresses {
			if p.Addr().WithZone("") == local {
				return i.Name, i.Cable
			}
		}
	}
	return "", false
}

// discoverable lists the interfaces over which other nodes may be found.
func (a *Agent) discoverable() ([]discover.Interface, error) {
	var out []discover.Interface
	for _, i := range a.facts.Load().net.Interfaces {
		if !i.Up || i.Loopback || !i.Carrier {
			continue
		}
		d := discover.Interface{Name: i.Name, Index: i.Index, Cable: i.Cable, Multicast: true}
		for _, p := range i.Addresses {
			d.Addresses = append(d.Addresses, netip.PrefixFrom(p.Addr().WithZone(""), p.Bits()))
		}
		out = append(out, d)
	}
	return out, nil
}

// DialLink dials the probe of one link, bound to its interface.
func (a *Agent) DialLink(ctx context.Context, nodeID, iface string, _, remote netip.AddrPort) (net.Conn, error) {
	return a.channel.DialWay(ctx, identity.NodeID(nodeID), channel.Link, channel.Way{Kind: channel.Cable, Interface: iface, Addr: remote})
}

// acked reports whether the far machine has acknowledged all of a connection.
func acked(c net.Conn) bool {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	return sock.Acked(c)
}

// serveLink answers the probe of one link.
func (a *Agent) serveLink(c *channel.Conn) {
	via := c.Via()
	if err := bindTo(c, via.Interface); err != nil {
		a.log.Debug("bind the probe of a link", "interface", via.Interface, "error", err)
		return
	}
	if err := a.tracker.Serve(c, string(c.Peer()), via.Interface); err != nil {
		a.log.Debug("probe of a link ended", "node", a.nameOf(c.Peer()), "interface", via.Interface, "error", err)
	}
}

// bindTo keeps an accepted connection on the interface that has its local
// address: an answer that leaves by another proves nothing.
func bindTo(c *channel.Conn, iface string) error {
	if iface == "" {
		return errors.New("no interface has the address that was dialled")
	}
	t, ok := c.NetConn().(*net.TCPConn)
	if !ok {
		return errors.ErrUnsupported
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	return sock.Control(iface)("tcp", t.RemoteAddr().String(), raw)
}

// Propose asks the node at the other end of a link about an address.
func (a *Agent) Propose(ctx context.Context, nodeID string, q *peerv1.ProposeAddressRequest) (*peerv1.ProposeAddressResponse, error) {
	c, err := a.channel.Client(identity.NodeID(nodeID))
	if err != nil {
		return nil, err
	}
	resp, err := peerv1.NewPeerServiceClient(c).ProposeAddress(ctx, q)
	if err != nil {
		return nil, fault.FromStatus(err)
	}
	return resp, nil
}

// addressInUse tells whether an instance or transfer uses an own address now.
func (a *Agent) addressInUse(p netip.Prefix) bool {
	if len(a.moves.active()) > 0 {
		return true
	}
	return a.ranks.uses(p.Addr())
}

// announce tells the LAN and the cables who is here.
func (a *Agent) announce() {
	n := discover.Announcement{Name: a.name(), OS: a.facts.Load().machine.OS, Port: a.controlPort}
	if p := a.pairNumber.Load(); p != nil {
		n.Pair = *p
	}
	a.finder.Announce(n)
}

// reconcileLoop makes one picture of everything that changed: what each part
// needs of the others is handed on, own state is published, and the cluster's
// state is posted. Every part says when it has changed, and none does so for
// being told what it knows already, so the loop comes to rest.
func (a *Agent) reconcileLoop(ctx context.Context) {
	members, cancelMembers := a.member.Subscribe()
	defer cancelMembers()
	found, cancelFound := a.finder.Subscribe()
	defer cancelFound()
	defer a.store.OnChange(a.poke)()
	slow := time.NewTimer(beat.Until(ownEvery(0))) // counters, memory, what ended long ago
	defer slow.Stop()
	var waiters []chan struct{}
	news, pending := true, false
	var last time.Time // the whole picture
	for {
		begin := time.Now()
		if news || pending && begin.Sub(last) > lookEvery(int(a.others.Load())) || begin.Sub(last) > pictureEvery {
			a.reconcile(ctx)
			last, pending = begin, false
		}
		took := time.Since(begin)
		for _, w := range waiters {
			close(w)
		}
		waiters = waiters[:0]
		news = true
		least := gather
		select {
		case <-ctx.Done():
			return
		case <-a.poked:
		case w := <-a.waiting:
			waiters = append(waiters, w)
		case <-members:
			// Among many nodes one of them always tells a counter.
			_, news = a.sections.readNews(a.member.Snapshot())
			pending, least = true, gatherAmong(int(a.others.Load()))
		case <-found:
			news = a.foundNews()
		case <-slow.C:
			// The picture may be the same for longer than what was met is so.
			a.noteMet(a.member.Snapshot())
			news = a.ownNews(ctx)
			slow.Reset(beat.Until(ownEvery(int(a.others.Load()))))
		}
		if !news && (!pending || time.Since(last) <= lookEvery(int(a.others.Load()))) {
			continue
		}
		// What changes together is seen together, and among many nodes, where
		// something always changes, the picture is not all that this does.
		wait := max(least, min(gatherShare*took, gatherMost)-time.Since(begin))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

const (
	// gather is how long a change waits for others; gatherShare times what the
	// last picture took is the least between the beginnings of two, up to
	// gatherMost.
	gather      = 15 * time.Millisecond
	gatherShare = 6
	gatherMost  = 150 * time.Millisecond
	// pictureEvery is how often the picture is made anew though nothing told of a
	// change.
	pictureEvery = 30 * time.Second
)

// gatherAmong is how long what one of n others says waits for more: where
// something changes, both ends of a cable tell of it and what follows from it, and
// among many a picture for each costs more than it is worth.
func gatherAmong(n int) time.Duration {
	if n < 32 {
		return gather
	}
	return min(time.Duration(n)*2*time.Millisecond, gatherMost)
}

// lookEvery is how often the counters of n others make a new picture: at once
// among a few, and every sixteen seconds among 64.
func lookEvery(n int) time.Duration {
	if n < 8 {
		return 0
	}
	return time.Duration(n) * time.Second / 4
}

// foundNews reports whether other nodes, or the same at other places, were found
// since it was called last. One that announces itself anew may have been started
// anew: if it is not connected it is tried at once.
func (a *Agent) foundNews() bool {
	before, now := a.candidates, a.finder.Candidates()
	a.candidates = now
	names := map[identity.NodeID]string{}
	for _, c := range before {
		names[c.Node] = c.Instance
	}
	for _, c := range now {
		if c.Node == "" || names[c.Node] == c.Instance {
			continue
		}
		if v, ok := a.member.Node(c.Node); ok && v.State != member.Up {
			a.member.Kick(c.Node)
		}
	}
	return !slices.EqualFunc(before, now, discover.Candidate.Same)
}

// ownEvery is how often a node among n others looks at what changes of itself
// without a word.
func ownEvery(n int) time.Duration {
	return min(max(2*time.Second, time.Duration(n)*time.Second/8), discover.ReachedGap*2/3)
}

func (a *Agent) reconcile(ctx context.Context) {
	views := a.member.Snapshot()
	a.others.Store(int64(len(views)))
	known := a.sections.read(views)
	peers, claims, reach := a.peersOf(views, known)
	a.tracker.SetPeers(peers)
	byPort := map[string]link.Address{}
	for _, l := range a.address.Links() {
		byPort[l.Port] = link.Address{Interface: l.Interface, Prefix: l.Prefix, Remote: l.Remote, Reason: a.named(l.Reason), NoneFree: l.NoneFree}
	}
	a.tracker.SetAddresses(byPort)
	a.address.SetClaims(claims)
	a.address.SetReach(reach)
	var ends []address.End
	for _, e := range a.tracker.Ends() {
		ends = append(ends, address.End{Port: e.Port, Interface: e.Interface, Present: e.Present, PeerID: e.PeerID, PeerPort: e.PeerPort,
			Proven: e.Proven, NegotiatedGbps: e.NegotiatedGbps})
	}
	a.address.Update(a.facts.Load().net, ends)
	a.leaveDeadCables()
	a.setWays(peers, known)
	a.noteMet(views)
	a.publish(ctx, known)
	a.post(views, known)
}

// peersOf turns what is known of the other nodes into what links and addresses
// need of them.
func (a *Agent) peersOf(views []member.NodeView, known map[string]nodeSections) (peers []link.Peer, claims map[string][]*peerv1.AddressClaim, reach map[string]address.Reach) {
	claims, reach = map[string][]*peerv1.AddressClaim{}, map[string]address.Reach{}
	for _, v := range views {
		if m, ok := a.store.Member(v.ID); !ok || m.Revoked {
			continue
		}
		k := known[string(v.ID)]
		p := link.Peer{NodeID: string(v.ID), Name: a.nameOf(v.ID), Up: v.State == member.Up || v.State == member.Suspect}
		if k.node != nil {
			p.LinkPort = uint16(k.node.ControlPort)
		}
		if k.links != nil {
			// No ends is something else than nothing said.
			p.Reports = append([]*peerv1.LinkReport{}, k.links.Links...)
			claims[string(v.ID)] = k.links.Claims
			if r := (address.Reach{Forwards: k.links.Forwards}); p.Up && r.Forwards {
				for _, l := range k.links.Links {
					if l.Proven {
						r.Neighbours = append(r.Neighbours, l.ProbedNodeId)
					}
				}
				reach[string(v.ID)] = r
			}
		}
		peers = append(peers, p)
	}
	return peers, claims, reach
}

// leaveDeadCables ends the connections over cables that carry nothing any more,
// so that they are made anew by another way: a silent cable ends none itself.
func (a *Agent) leaveDeadCables() {
	now := map[string]bool{}
	for _, r := range a.tracker.Reports() {
		if r.Interface != "" && !link.Severed(r) {
			now[r.Interface] = true
		}
	}
	for name := range a.carrying {
		if !now[name] {
			a.wayGone(name)
		}
	}
	a.carrying = now
}

// noteMet remembers the addresses at which nodes answered, for times when
// nothing finds them.
func (a *Agent) noteMet(views []member.NodeView) {
	for _, v := range views {
		if v.State != member.Up {
			continue
		}
		if a.adjacent(v.Via) {
			a.finder.Reached(v.ID)
		}
		for _, w := range a.channel.Ways(v.ID) {
			// Where the other side made the connection its port is another.
			if w.Kind == channel.LAN && strings.HasSuffix(v.Via, w.Addr.String()) {
				a.finder.Met(v.ID, w.Addr)
			}
		}
	}
}

// adjacent reports whether a connection ("interface address:port") goes to a
// machine on a network of this one, without a router between.
func (a *Agent) adjacent(via string) bool {
	_, addr, ok := strings.Cut(via, " ")
	if !ok {
		addr = via
	}
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return false
	}
	far := at.Addr().Unmap().WithZone("")
	if far.IsLinkLocalUnicast() {
		return true
	}
	for _, i := range a.facts.Load().net.Interfaces {
		if i.Loopback || !i.Up {
			continue
		}
		for _, p := range i.Addresses {
			if p.Contains(far) && !p.IsSingleIP() {
				return true
			}
		}
	}
	return false
}

// meetEvery is how often peers of the configuration are tried that nobody has
// met yet.
const meetEvery = 10 * time.Second

// meetStatic finds out which nodes the peers of the configuration are.
func (a *Agent) meetStatic(ctx context.Context) {
	if len(a.opt.Config.Peers) == 0 {
		return
	}
	found, cancel := a.finder.Subscribe()
	defer cancel()
	for {
		for _, c := range a.finder.Candidates() {
			if c.Node != "" {
				continue
			}
			for _, at := range c.Addresses {
				dial, stop := context.WithTimeout(ctx, 5*time.Second)
				conn, err := a.channel.DialAddress(dial, channel.Control, channel.Way{Kind: channel.LAN, Interface: at.Interface, Addr: at.Addr})
				stop()
				if err != nil {
					a.log.Debug("try a peer of the configuration", "peer", c.Name, "address", at.Addr, "error", err)
					continue
				}
				a.finder.Met(conn.Peer(), at.Addr)
				_ = conn.Close() // it has told who is there
				a.poke()
				break
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-found:
		case <-time.After(meetEvery):
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}

// setWays tells the channel how each node can be reached: cables with
// addresses first, then what discovery found.
func (a *Agent) setWays(peers []link.Peer, known map[string]nodeSections) {
	addresses := map[string]address.Link{}
	for _, l := range a.address.Links() {
		addresses[l.Port] = l
	}
	linkIDs := a.ownLinkIDs()
	ways := map[string][]channel.Way{}
	add := func(node string, w channel.Way) {
		if !slices.ContainsFunc(ways[node], func(have channel.Way) bool { return have.Addr == w.Addr && have.Interface == w.Interface }) {
			ways[node] = append(ways[node], w)
		}
	}
	ports := map[string]uint16{}
	for _, p := range peers {
		ports[p.NodeID] = p.LinkPort
	}
	ends := a.tracker.Ends()
	slices.SortStableFunc(ends, func(x, y link.End) int {
		switch {
		case x.Proven == y.Proven:
			return 0
		case x.Proven:
			return -1
		}
		return 1
	})
	for _, e := range ends {
		l, ok := addresses[e.Port]
		port := ports[e.PeerID]
		if !ok || e.PeerID == "" || !e.Present || e.Interface == "" || !l.Prefix.IsValid() || !l.Remote.IsValid() || port == 0 {
			continue
		}
		add(e.PeerID, channel.Way{Kind: channel.Cable, Interface: e.Interface, Addr: netip.AddrPortFrom(l.Remote, port), LinkID: linkIDs[e.Port]})
	}
	ours := a.cableAddresses(known)
	for _, c := range a.finder.Candidates() {
		if c.Node == "" {
			continue
		}
		for _, at := range c.Addresses {
			w := channel.Way{Kind: channel.LAN, Interface: at.Interface, Addr: at.Addr}
			if at.Cable {
				w.Kind = channel.Cable
			}
			if ours(at.Addr.Addr()) {
				continue
			}
			add(string(c.Node), w)
		}
	}
	for _, p := range peers {
		// Where nobody found it, it may still be where it last said it was.
		for _, at := range a.shown.of(p.NodeID, known[p.NodeID]).dialable {
			add(p.NodeID, channel.Way{Kind: channel.LAN, Addr: at})
		}
		id := identity.NodeID(p.NodeID)
		if slices.Equal(a.channel.Ways(id), ways[p.NodeID]) {
			continue
		}
		a.channel.SetWays(id, ways[p.NodeID])
		if len(ways[p.NodeID]) > 0 {
			a.member.Kick(id)
		}
	}
}

// cableAddresses tells which addresses are link and node addresses of ours:
// they are ways only as the links say, by the LAN they would lead nowhere. A LAN
// may lie in one of our blocks, though.
func (a *Agent) cableAddresses(known map[string]nodeSections) func(netip.Addr) bool {
	claimed := map[netip.Addr]bool{}
	for id, k := range known {
		for _, at := range a.shown.of(id, k).claimed {
			claimed[at] = true
		}
	}
	var lans []netip.Prefix
	for _, i := range a.facts.Load().net.Interfaces {
		if !i.Cable && !i.Loopback {
			lans = append(lans, i.Addresses...)
		}
	}
	blocks := a.opt.Config.Blocks()
	return func(at netip.Addr) bool {
		holds := func(p netip.Prefix) bool { return p.Masked().Contains(at) }
		return claimed[at] || slices.ContainsFunc(blocks, holds) && !slices.ContainsFunc(lans, holds)
	}
}

// ownLinkIDs maps own ports to the IDs of the links there, as last posted.
func (a *Agent) ownLinkIDs() map[string]string {
	out := map[string]string{}
	s, _ := a.board.get()
	for _, l := range s.Links {
		if l.A.GetNodeId() == a.id() {
			out[l.A.GetPort()] = l.Id
		}
		if l.B.GetNodeId() == a.id() {
			out[l.B.GetPort()] = l.Id
		}
	}
	return out
}

// lanAddresses are the addresses by which this node can be dialled without a
// cable.
func lanAddresses(n host.Network) []string {
	out, _ := lanPlaces(n)
	return out
}

// lanPlaces are those addresses, and the interface that has each.
func lanPlaces(n host.Network) (addresses, interfaces []string) {
	for _, i := range n.Interfaces {
		if i.Loopback || i.Cable || !i.Up {
			continue
		}
		for _, p := range i.Addresses {
			if !p.Addr().IsLinkLocalUnicast() && !strings.Contains(p.Addr().String(), "%") {
				addresses, interfaces = append(addresses, p.Addr().String()), append(interfaces, i.Name)
			}
		}
	}
	return addresses, interfaces
}
