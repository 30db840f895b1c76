package address

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host"
)

// desk is some machines with cables, as their kernels would show them; the
// managers on them are real.
type desk struct {
	t     *testing.T
	mu    sync.Mutex
	cond  *sync.Cond
	nodes map[string]*machine
	asked int // proposals so far
	// saying has claims told in the order in which they were taken.
	saying sync.Mutex
	// spares are what all of them have besides the block.
	spares []netip.Prefix
}

// machine is the edge of one machine: interfaces, a journal, what was done.
type machine struct {
	d       *desk
	id      string
	state   string
	m       *Manager
	stop    func()
	nics    []host.Interface
	routes  []host.Route
	ends    []End
	journal []host.Change
	log     []string
	denied  bool
	forward bool   // is asked for
	old     bool   // of a version that says less
	broken  string // kind of change that fails
	flushed bool   // the packet filter is gone
	inUse   map[netip.Prefix]bool
	index   int
	telling sync.Mutex // facts are told in the order in which they were taken
}

func newDesk(t *testing.T) *desk {
	d := &desk{t: t, nodes: map[string]*machine{}}
	d.cond = sync.NewCond(&d.mu)
	return d
}

func (d *desk) node(id string) *machine {
	n := &machine{d: d, id: id, state: filepath.Join(d.t.TempDir(), "addresses.json"), inUse: map[netip.Prefix]bool{},
		nics: []host.Interface{{Name: "lo", Index: 1, Loopback: true, Up: true}, {Name: "eth0", Index: 2, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("192.168.7.5/24")}}}, index: 2}
	d.mu.Lock() // others may run already
	defer d.mu.Unlock()
	d.nodes[id] = n
	return n
}

func (n *machine) start() {
	m, err := New(Config{Self: n.id, StateFile: n.state, Peer: n, Applier: n, Retry: time.Millisecond, Changed: n.changed, Forward: n.forward, Old: n.old, Spares: n.d.spares,
		InUse: func(p netip.Prefix) bool { return n.used(p) }})
	if err != nil {
		n.d.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	n.d.mu.Lock()
	n.m = m
	n.d.mu.Unlock()
	go func() {
		defer close(done)
		if err := m.Run(ctx); err != nil {
			n.d.t.Error(err)
		}
	}()
	n.stop = func() { cancel(); <-done }
	n.d.t.Cleanup(func() { n.stop() })
	n.facts()
}

func (n *machine) used(p netip.Prefix) bool { return n.inUse[p] }

// changed does what the agent does: everybody hears of the claims.
func (n *machine) changed() {
	n.d.saying.Lock()
	defer n.d.saying.Unlock()
	n.d.mu.Lock()
	all := map[string]*Manager{}
	for id, o := range n.d.nodes {
		if o.m != nil {
			all[id] = o.m
		}
	}
	n.d.mu.Unlock()
	claims := map[string][]*peerv1.AddressClaim{}
	for id, m := range all {
		claims[id] = m.Claims()
	}
	for _, m := range all {
		m.SetClaims(claims)
	}
	n.d.mu.Lock()
	n.d.cond.Broadcast()
	n.d.mu.Unlock()
}

func (n *machine) Propose(ctx context.Context, nodeID string, req *peerv1.ProposeAddressRequest) (*peerv1.ProposeAddressResponse, error) {
	n.d.mu.Lock()
	n.d.asked++
	var m *Manager
	if o := n.d.nodes[nodeID]; o != nil {
		m = o.m
	}
	n.d.mu.Unlock()
	if m == nil {
		return nil, fault.Newf(fault.NodeDown, "", "%s is down", nodeID)
	}
	return m.HandlePropose(ctx, n.id, req)
}

func (n *machine) nic(name string) *host.Interface {
	for i := range n.nics {
		if n.nics[i].Name == name {
			return &n.nics[i]
		}
	}
	return nil
}

func (n *machine) Apply(_ context.Context, c host.Change) error {
	err := func() error {
		n.d.mu.Lock()
		defer n.d.mu.Unlock()
		if n.denied {
			return fmt.Errorf("apply: %w", host.ErrPermission)
		}
		if string(c.Kind) == n.broken {
			return errors.New("device or resource busy")
		}
		nic := n.nic(c.Interface)
		if nic == nil && c.Kind != host.ChangeFilter {
			return host.ErrNoInterface
		}
		switch c.Kind {
		case host.ChangeLinkUp:
			nic.Up = true
		case host.ChangeMTU:
			nic.MTU = c.MTU
		case host.ChangeForward:
			nic.Forwarding = true
		case host.ChangeUnmanage:
			nic.ManagedBy = "" // as long as the file is there
		case host.ChangeAddress:
			if !nic.Up {
				return errors.New("the interface is not up")
			}
			if !slices.Contains(nic.Addresses, c.Prefix) {
				nic.Addresses = append(nic.Addresses, c.Prefix)
				n.routes = append(n.routes, host.Route{Destination: c.Prefix.Masked(), Interface: c.Interface, Source: c.Prefix.Addr()})
			}
		case host.ChangeRoute:
			n.routes = append(n.routes, host.Route{Destination: c.Prefix, Interface: c.Interface, Gateway: c.Gateway, Source: c.Source, Metric: c.Metric})
		case host.ChangeFilter:
			for _, name := range c.Interfaces { // as the root half refuses
				if i := n.nic(name); i != nil && !i.Cable {
					n.d.t.Errorf("%s: a filter that is open to %s", n.id, name)
				}
			}
			n.journal = slices.DeleteFunc(n.journal, func(o host.Change) bool { return o.Kind == host.ChangeFilter })
			n.flushed = false
		}
		n.log = append(n.log, "+ "+c.String())
		if !slices.ContainsFunc(n.journal, func(o host.Change) bool { return o.String() == c.String() }) {
			n.journal = append(n.journal, c)
		}
		return nil
	}()
	if err == nil {
		n.facts()
	}
	return err
}

func (n *machine) Revert(_ context.Context, c host.Change) error {
	n.d.mu.Lock()
	if nic := n.nic(c.Interface); nic != nil {
		switch c.Kind {
		case host.ChangeAddress:
			nic.Addresses = slices.DeleteFunc(nic.Addresses, func(p netip.Prefix) bool { return p == c.Prefix })
			n.routes = slices.DeleteFunc(n.routes, func(r host.Route) bool {
				return r.Interface == c.Interface && r.Destination == c.Prefix.Masked()
			})
		case host.ChangeRoute:
			n.routes = slices.DeleteFunc(n.routes, func(r host.Route) bool {
				return r.Destination == c.Prefix && r.Interface == c.Interface && r.Gateway == c.Gateway
			})
		case host.ChangeMTU:
			nic.MTU = c.OldMTU
		case host.ChangeForward:
			nic.Forwarding = c.WasOn
		case host.ChangeUnmanage:
			nic.ManagedBy = c.Manager
		case host.ChangeLinkUp:
			nic.Up = c.WasUp
		}
	}
	n.journal = slices.DeleteFunc(n.journal, func(o host.Change) bool { return o.String() == c.String() })
	n.log = append(n.log, "- "+c.String())
	n.d.mu.Unlock()
	n.facts()
	return nil
}

func (n *machine) Lacks(context.Context, host.Change) (string, error) {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	if !n.flushed {
		return "", nil
	}
	return "the table is not there", nil
}

func (n *machine) Applied(context.Context) ([]host.Change, error) {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	return slices.Clone(n.journal), nil
}

// facts gives the manager what is there now.
func (n *machine) facts() {
	n.telling.Lock()
	defer n.telling.Unlock()
	n.d.mu.Lock()
	net := host.Network{Interfaces: slices.Clone(n.nics), Routes: slices.Clone(n.routes)}
	for i := range net.Interfaces {
		net.Interfaces[i].Addresses = slices.Clone(net.Interfaces[i].Addresses)
	}
	ends, m := slices.Clone(n.ends), n.m
	n.d.cond.Broadcast()
	n.d.mu.Unlock()
	if m != nil {
		m.Update(net, ends)
	}
}

// plug makes an interface and its end.
func (n *machine) plug(port, iface, peer, peerPort string, mtu int) {
	n.d.mu.Lock()
	n.index++
	n.nics = append(n.nics, host.Interface{Name: iface, Index: n.index, MTU: 1500, MaxMTU: mtu, Cable: true})
	n.ends = append(n.ends, End{Port: port, Interface: iface, Present: true, PeerID: peer, PeerPort: peerPort, NegotiatedGbps: 40})
	n.d.mu.Unlock()
	n.facts()
}

// unplug takes both away, as the driver does.
func (n *machine) unplug(port string) {
	n.d.mu.Lock()
	for _, e := range n.ends {
		if e.Port == port {
			n.nics = slices.DeleteFunc(n.nics, func(i host.Interface) bool { return i.Name == e.Interface })
			n.routes = slices.DeleteFunc(n.routes, func(r host.Route) bool { return r.Interface == e.Interface })
		}
	}
	n.ends = slices.DeleteFunc(n.ends, func(e End) bool { return e.Port == port })
	n.d.mu.Unlock()
	n.facts()
}

func (n *machine) change(f func()) {
	n.d.mu.Lock()
	f()
	n.d.mu.Unlock()
	n.facts()
}

// await waits, from one event to the next.
func (d *desk) await(what string, ok func() bool) {
	d.t.Helper()
	timer := time.AfterFunc(time.Minute, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.cond.Broadcast()
	})
	defer timer.Stop()
	deadline := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			for id, n := range d.nodes {
				d.t.Logf("%s: links %+v\n%s", id, n.m.Links(), strings.Join(n.log, "\n"))
			}
			d.t.Fatalf("never: %s", what)
		}
		d.mu.Lock()
		wake := time.AfterFunc(50*time.Millisecond, d.cond.Broadcast) // a condition may rest on no event
		d.cond.Wait()
		d.mu.Unlock()
		wake.Stop()
	}
}

func (n *machine) link(port string) Link {
	for _, l := range n.m.Links() {
		if l.Port == port {
			return l
		}
	}
	return Link{}
}

func (d *desk) pair() (*machine, *machine) {
	a, b := d.node("alpha"), d.node("beta")
	a.plug("0-1", "thunderbolt0", "beta", "0-2", 65520)
	b.plug("0-2", "thunderbolt0", "alpha", "0-1", 9000)
	return a, b
}

func facing(a, b Link) bool {
	return a.Prefix.IsValid() && b.Prefix.IsValid() && a.Prefix.Masked() == b.Prefix.Masked() && a.Remote == b.Prefix.Addr() && b.Remote == a.Prefix.Addr()
}

func TestACableGetsFacingAddressesAndEqualMTUs(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	// What a system gives a cable by itself stays.
	selfAssigned := []netip.Prefix{netip.MustParsePrefix("169.254.11.7/16"), netip.MustParsePrefix("fe80::1234/64")}
	for _, n := range []*machine{a, b} {
		n.nic("thunderbolt0").Addresses = slices.Clone(selfAssigned)
		n.routes = append(n.routes, host.Route{Destination: netip.MustParsePrefix("169.254.0.0/16"), Interface: "thunderbolt0"})
	}
	a.start()
	b.start()
	d.await("both ends addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	if !a.link("0-1").Prefix.Addr().Less(b.link("0-2").Prefix.Addr()) {
		t.Error("the lower ID has the higher address")
	}
	d.await("node addresses", func() bool { return a.m.NodeAddress().IsValid() && b.m.NodeAddress().IsValid() })
	// Of an end that does not see its interface yet it is known later.
	d.await("equal MTUs", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return a.nic("thunderbolt0").MTU == 9000 && b.nic("thunderbolt0").MTU == 9000
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range []*machine{a, b} {
		if got := n.nic("thunderbolt0").Addresses; len(got) != 3 || !slices.Equal(got[:2], selfAssigned) {
			t.Errorf("%s has addresses %v", n.id, got)
		}
		filter := slices.IndexFunc(n.log, func(s string) bool { return strings.Contains(s, "packet filter") })
		address := slices.IndexFunc(n.log, func(s string) bool { return strings.HasPrefix(s, "+ address") })
		if filter < 0 || filter > address {
			t.Errorf("%s: an address came before the filter:\n%s", n.id, strings.Join(n.log, "\n"))
		}
	}
}

func TestRoutesToNodeAddressesFollowProvenLinks(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.plug("0-3", "thunderbolt1", "beta", "0-4", 65520)
	b.plug("0-4", "thunderbolt1", "alpha", "0-3", 65520)
	a.change(func() { a.ends[0].NegotiatedGbps = 20 })
	a.start()
	b.start()
	d.await("addresses", func() bool {
		return facing(a.link("0-1"), b.link("0-2")) && facing(a.link("0-3"), b.link("0-4")) && b.m.NodeAddress().IsValid()
	})
	routes := func() (out []host.Route) {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, r := range a.routes {
			if r.Destination == netip.PrefixFrom(b.m.book.node.Addr(), 32) {
				out = append(out, r)
			}
		}
		slices.SortFunc(out, func(x, y host.Route) int { return x.Metric - y.Metric })
		return out
	}
	a.change(func() { a.ends[0].Proven, a.ends[1].Proven = true, true })
	d.await("two routes, the faster first", func() bool {
		r := routes()
		return len(r) == 2 && r[0].Interface == "thunderbolt1" && r[1].Interface == "thunderbolt0" && r[0].Gateway == a.link("0-3").Remote && r[0].Source == a.m.NodeAddress()
	})
	a.change(func() { a.ends[1].Proven = false })
	d.await("the route over the silent cable gone", func() bool { r := routes(); return len(r) == 1 && r[0].Interface == "thunderbolt0" })
}

func TestAReplugUnderAnotherNameHasItsAddressWithoutAsking(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) && b.m.NodeAddress().IsValid() })
	was := a.link("0-1").Prefix
	a.unplug("0-1")
	b.unplug("0-2")
	d.await("the old address off the books", func() bool {
		return !slices.ContainsFunc(append(a.m.Applied(), b.m.Applied()...), func(c host.Change) bool { return c.Interface == "thunderbolt0" })
	})
	d.mu.Lock()
	asked := d.asked
	d.mu.Unlock()
	a.plug("0-1", "renamed7", "beta", "0-2", 65520)
	b.plug("0-2", "renamed8", "alpha", "0-1", 9000)
	d.await("addressed again", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	if got := a.link("0-1"); got.Prefix != was || got.Interface != "renamed7" {
		t.Errorf("it was %s and is %+v", was, got)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked != asked {
		t.Errorf("%d proposals were made for it", d.asked-asked)
	}
}

func TestAReplugUnderTheSameNameIsNotTakenForTheOldInterface(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	d.mu.Lock() // no facts in between: events were merged
	a.index++
	*a.nic("thunderbolt0") = host.Interface{Name: "thunderbolt0", Index: a.index, MTU: 1500, MaxMTU: 65520, Cable: true}
	d.mu.Unlock()
	a.facts()
	d.await("the address on the new interface", func() bool {
		d.mu.Lock()
		nic := *a.nic("thunderbolt0")
		d.mu.Unlock()
		return len(nic.Addresses) == 1 && nic.Up && nic.MTU == 9000 && facing(a.link("0-1"), b.link("0-2"))
	})
}

// A manager that has left an interface shows nothing any more; it would come back
// if what it was told was taken back.
func TestAManagerIsToldOnceAndNotToldOtherwise(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.nic("thunderbolt0").ManagedBy = "NetworkManager"
	a.start()
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	told := func(sign string) (n int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, l := range a.log {
			if strings.HasPrefix(l, sign+" tell NetworkManager") {
				n++
			}
		}
		return n
	}
	for i := range 3 {
		// Something else changes, and is taken care of.
		a.change(func() { a.nic("thunderbolt0").MTU = 1400 + i })
		b.plug(fmt.Sprintf("0-%d", 5+i), fmt.Sprintf("thunderbolt%d", 1+i), "", "", 9000)
		a.m.SetClaims(map[string][]*peerv1.AddressClaim{"beta": b.m.Claims()})
	}
	a.stop()
	a.start() // as an upgrade does
	d.await("addressed again", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	if told("+") != 1 || told("-") != 0 {
		t.Errorf("told %d times, and %d times the contrary:\n%s", told("+"), told("-"), strings.Join(a.log, "\n"))
	}
	d.mu.Lock() // no facts in between: events were merged
	a.index++
	*a.nic("thunderbolt0") = host.Interface{Name: "thunderbolt0", Index: a.index, MTU: 1500, MaxMTU: 65520, Cable: true}
	d.mu.Unlock()
	a.facts()
	d.await("the new interface has its address", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(a.nic("thunderbolt0").Addresses) == 1
	})
	if told("-") != 0 {
		t.Error("told the contrary because of a new interface of the same name")
	}
	a.unplug("0-1")
	d.await("what was told is taken back with the cable", func() bool { return told("-") > 0 })
}

func TestAManagerGetsAnInterfaceBackWhenAllElseIsUndone(t *testing.T) {
	var kinds []host.ChangeKind
	// As it is made where the manager found the interface late.
	for _, k := range undoing([]host.Change{{Kind: host.ChangeFilter}, {Kind: host.ChangeMTU}, {Kind: host.ChangeLinkUp}, {Kind: host.ChangeAddress}, {Kind: host.ChangeUnmanage}, {Kind: host.ChangeRoute}}) {
		kinds = append(kinds, k.Kind)
	}
	want := []host.ChangeKind{host.ChangeRoute, host.ChangeAddress, host.ChangeLinkUp, host.ChangeMTU, host.ChangeUnmanage, host.ChangeFilter}
	if !slices.Equal(kinds, want) {
		t.Errorf("undone in the order %v, want %v", kinds, want)
	}
}

func TestAnAddressThatTheLANTakesIsGivenUpByBothEnds(t *testing.T) {
	for _, taker := range []string{"alpha", "beta"} {
		d := newDesk(t)
		a, b := d.pair()
		a.start()
		b.start()
		d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
		was := a.link("0-1").Prefix.Masked()
		n := d.nodes[taker]
		n.change(func() {
			n.routes = append(n.routes, host.Route{Destination: netip.PrefixFrom(was.Addr(), 24).Masked(), Interface: "eth0"})
		})
		d.await("both moved on, when "+taker+" has to", func() bool {
			l := a.link("0-1")
			return facing(l, b.link("0-2")) && l.Prefix.Masked() != was
		})
	}
}

// What two nodes' LAN has, the third knows nothing of; yet all of them reach each
// other's node address over cables.
func TestANodeAddressLeavesWhatTheLANOfAnotherNodeHas(t *testing.T) {
	lan := netip.MustParsePrefix("10.77.0.5/16")
	for _, old := range []bool{false, true} {
		d := newDesk(t)
		d.spares = []netip.Prefix{netip.MustParsePrefix("172.29.0.0/16")}
		a, b := d.pair()
		b.old = old
		proven := func(n *machine) { n.change(func() { n.ends[0].Proven = true }) }
		proven(a)
		proven(b)
		a.start()
		b.start()
		toward := func(from, to *machine) bool {
			from.d.mu.Lock()
			defer from.d.mu.Unlock()
			at := to.m.NodeAddress()
			return at.IsValid() && slices.ContainsFunc(from.routes, func(r host.Route) bool {
				return r.Destination == netip.PrefixFrom(at, 32) && r.Interface == "thunderbolt0"
			})
		}
		d.await("routes over the cable", func() bool { return toward(a, b) && toward(b, a) })
		was := b.m.NodeAddress()
		conflict := func(n *machine) bool {
			return slices.ContainsFunc(n.m.Conflicts(), func(c Conflict) bool { return c.Prefix.Addr() == was })
		}
		a.change(func() {
			eth := a.nic("eth0")
			eth.Addresses = append(eth.Addresses, lan)
			a.routes = append(a.routes, host.Route{Destination: lan.Masked(), Interface: "eth0"})
		})
		if old {
			d.await("one that does not move is a conflict", func() bool { return conflict(a) })
			continue
		}
		d.await("routes over the cable, to other addresses", func() bool {
			return toward(a, b) && toward(b, a) && !lan.Masked().Contains(a.m.NodeAddress()) && !lan.Masked().Contains(b.m.NodeAddress())
		})
		if conflict(a) || conflict(b) {
			t.Error("what was moved is a conflict")
		}
		// Where all for nodes is taken somewhere it stays, and is a conflict at both.
		was = b.m.NodeAddress()
		a.change(func() {
			a.routes = append(a.routes, host.Route{Destination: netip.MustParsePrefix("172.29.192.0/18"), Interface: "eth0"}) // that of nodes
		})
		d.await("one that cannot move is a conflict", func() bool { return conflict(a) && conflict(b) })
		if b.m.NodeAddress() != was {
			t.Errorf("%s was given up for %s, which is no better", was, b.m.NodeAddress())
		}
	}
}

func TestAnAddressInUseStaysAndIsAConflict(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	was := a.link("0-1").Prefix
	a.m.mu.Lock()
	a.inUse[was] = true
	a.m.mu.Unlock()
	a.change(func() {
		a.routes = append(a.routes, host.Route{Destination: was.Masked(), Interface: "eth0"})
	})
	d.await("a conflict", func() bool {
		c := a.m.Conflicts()
		return len(c) == 1 && c[0].Port == "0-1" && strings.Contains(c[0].With, "eth0")
	})
	if got := a.link("0-1").Prefix; got != was {
		t.Errorf("it moved to %s", got)
	}
}

func TestWithoutPermissionTheChangesAreWantedAndMayBeMadeByHand(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.denied = true
	a.start()
	b.start()
	d.await("the changes are wanted", func() bool { return len(a.m.Wanted()) >= 4 && b.link("0-2").Prefix.IsValid() })
	l := a.link("0-1")
	if l.Prefix.IsValid() || !strings.Contains(l.Reason, "permission") {
		t.Errorf("the link is %+v", l)
	}
	if ok, why := a.m.FilterActive(); ok || !strings.Contains(why, "permission") {
		t.Errorf("the filter: %v %q", ok, why)
	}
	want := a.m.Wanted()
	if want[0].Kind != host.ChangeFilter {
		t.Errorf("the first thing to do is %s", want[0])
	}
	a.change(func() { // a person does it
		for _, c := range want {
			if nic := a.nic(c.Interface); nic != nil && c.Kind == host.ChangeAddress {
				nic.Up = true
				nic.Addresses = append(nic.Addresses, c.Prefix)
				a.routes = append(a.routes, host.Route{Destination: c.Prefix.Masked(), Interface: c.Interface})
			}
		}
	})
	d.await("addressed by hand", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	if applied := a.m.Applied(); len(applied) != 0 {
		t.Errorf("it claims to have applied %v", applied)
	}
}

func TestAChangeThatFailsIsSaidAndTriedAgain(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.broken = string(host.ChangeLinkUp)
	a.start()
	b.start()
	d.await("it says what failed", func() bool { return strings.Contains(a.link("0-1").Reason, "device or resource busy") })
	d.mu.Lock()
	a.broken = ""
	d.mu.Unlock()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
}

func TestThatNoSubnetIsFreeIsToldFromOtherReasons(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	d.await("another reason", func() bool { l := a.link("0-1"); return l.Reason != "" && !l.NoneFree })
	lan := netip.MustParsePrefix("10.77.0.5/16")
	a.change(func() {
		eth := a.nic("eth0")
		eth.Addresses = append(eth.Addresses, lan)
		a.routes = append(a.routes, host.Route{Destination: lan.Masked(), Interface: "eth0"})
	})
	d.await("none is free", func() bool { l := a.link("0-1"); return l.NoneFree && strings.Contains(l.Reason, "10.77.0.5/16") })
	a.change(func() { a.nic("eth0").Addresses, a.routes = nil, nil })
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	if a.link("0-1").NoneFree {
		t.Error("it has an address, and none is free")
	}
}

func TestAMachineThatCannotBeAskedIsAskedAgain(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	d.await("it says why", func() bool { return strings.Contains(a.link("0-1").Reason, "beta is down") })
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
}

func TestARestartedAgentKeepsAddressesThoughPeersAreNotHeardFromYet(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed", func() bool { return facing(a.link("0-1"), b.link("0-2")) && a.m.NodeAddress().IsValid() })
	was := a.link("0-1")
	a.stop()
	a.d.mu.Lock()
	a.ends[0].PeerID, a.ends[0].PeerPort = "", ""
	a.log = nil
	a.d.mu.Unlock()
	a.start()
	d.await("the new life has looked", func() bool { return len(a.m.Applied()) > 2 })
	a.change(func() { a.ends[0].PeerID, a.ends[0].PeerPort = "beta", "0-2" })
	d.await("the same address", func() bool { return a.link("0-1") == was })
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, line := range a.log {
		if strings.HasPrefix(line, "- ") || strings.HasPrefix(line, "+ address") {
			t.Errorf("it did %q", line)
		}
	}
}

func TestDownUndoesEverythingAndTheFilterLast(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	a.change(func() { a.ends[0].Proven = true })
	d.await("a route", func() bool {
		return slices.ContainsFunc(a.m.Applied(), func(c host.Change) bool { return c.Kind == host.ChangeRoute })
	})
	d.mu.Lock()
	a.log = nil
	d.mu.Unlock()
	if err := a.m.Down(context.Background()); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(a.journal) != 0 || len(a.nic("thunderbolt0").Addresses) != 0 || len(a.nic("lo").Addresses) != 0 || a.nic("thunderbolt0").MTU != 1500 || a.nic("thunderbolt0").Up {
		t.Errorf("left: %v, %+v", a.journal, a.nics)
	}
	if n := len(a.log); n < 5 || !strings.Contains(a.log[n-1], "packet filter") || !strings.Contains(a.log[0], "route to") {
		t.Errorf("undone in this order:\n%s", strings.Join(a.log, "\n"))
	}
	if len(a.nic("eth0").Addresses) != 1 {
		t.Error("it took an address that is not its own")
	}
}

func TestProposalsThatCannotBeAreRefused(t *testing.T) {
	d := newDesk(t)
	_, b := d.pair()
	b.start()
	good := func() *peerv1.ProposeAddressRequest {
		return &peerv1.ProposeAddressRequest{Port: "0-2", ProposerPort: "0-1", Prefix: "10.77.3.0/30", Mtu: 1500}
	}
	for name, f := range map[string]func(*peerv1.ProposeAddressRequest) string{
		"no prefix":         func(r *peerv1.ProposeAddressRequest) string { r.Prefix = "10.77.3.0"; return "alpha" },
		"no port":           func(r *peerv1.ProposeAddressRequest) string { r.Port = ""; return "alpha" },
		"port with a slash": func(r *peerv1.ProposeAddressRequest) string { r.ProposerPort = "a/b"; return "alpha" },
		"higher ID":         func(*peerv1.ProposeAddressRequest) string { return "gamma" },
		"another's cable":   func(*peerv1.ProposeAddressRequest) string { return "aaron" },
	} {
		r := good()
		from := f(r)
		if _, err := b.m.HandlePropose(context.Background(), from, r); fault.As(err) == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, prefix := range map[string]string{"outside": "10.78.0.0/30", "too wide": "10.77.0.0/24", "node range": "10.77.200.4/30", "not its beginning": "10.77.3.1/30"} {
		r := good()
		r.Prefix = prefix
		resp, err := b.m.HandlePropose(context.Background(), "alpha", r)
		if err != nil || resp.GetAccepted() || resp.GetConflict() == "" {
			t.Errorf("%s: %v, %v", name, resp, err)
		}
	}
	if resp, err := b.m.HandlePropose(context.Background(), "alpha", good()); err != nil || !resp.GetAccepted() || resp.GetMaxMtu() != 9000 {
		t.Errorf("a good one: %v, %v", resp, err)
	}
}

func FuzzPropose(f *testing.F) {
	f.Add("0-2", "0-1", "10.77.3.0/30", uint32(9000))
	f.Add("", "0-1", "::/0", uint32(0))
	f.Fuzz(func(t *testing.T, port, from, prefix string, mtu uint32) {
		m, err := New(Config{Self: "beta", StateFile: filepath.Join(t.TempDir(), "a")})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := m.HandlePropose(context.Background(), "alpha", &peerv1.ProposeAddressRequest{Port: port, ProposerPort: from, Prefix: prefix, Mtu: mtu})
		if err == nil && resp.GetAccepted() {
			for _, c := range m.Claims() {
				if p := netip.MustParsePrefix(c.Prefix); !DefaultBlock.Contains(p.Addr()) {
					t.Fatalf("%q was accepted", prefix)
				}
			}
		}
	})
}

// Two machines that only a cable joins, and that do not know each other yet or
// have just booted, find each other over it: it has to be up for that.
func TestACableOfWhichNothingIsKnownIsSetUp(t *testing.T) {
	d := newDesk(t)
	a := d.node("alpha")
	a.plug("0-1", "thunderbolt0", "", "", 65520)
	a.start()
	up := func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return a.nic("thunderbolt0").Up
	}
	d.await("the cable up", up)
	if err := a.m.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if up() {
		t.Error("down left it up")
	}
}

// filtered reports whether the packet filter is there, and the manager says so.
func (n *machine) filtered() bool {
	active, _ := n.m.FilterActive()
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	return active && !n.flushed
}

func TestAFilterThatSomebodyRemovedIsPutBack(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed and closed", func() bool { return facing(a.link("0-1"), b.link("0-2")) && a.filtered() })

	a.change(func() { a.flushed = true })
	d.await("it is put back when facts come", a.filtered)

	d.mu.Lock()
	a.flushed = true // and no facts come
	d.mu.Unlock()
	if active, why := a.m.CheckFilter(t.Context()); !active || !a.filtered() {
		t.Errorf("asked before a rank starts: %v %q", active, why)
	}

	a.change(func() { a.flushed, a.broken = true, string(host.ChangeFilter) })
	d.await("what keeps it away is said", func() bool {
		active, why := a.m.FilterActive()
		return !active && strings.Contains(why, "busy")
	})
	if active, why := a.m.CheckFilter(t.Context()); active || why == "" {
		t.Errorf("asked while it cannot be set: %v %q", active, why)
	}
	if l := a.link("0-1"); !l.Prefix.IsValid() {
		t.Errorf("the cable lost its address: %+v", l)
	}
	a.change(func() { a.broken = "" })
	d.await("it is put back once it can be", a.filtered)
}

// The journal of an earlier life still has the filter, which went meanwhile. It
// is put back before anything is known of this machine.
func TestAnAdoptedFilterIsLookedAt(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed and closed", func() bool { return facing(a.link("0-1"), b.link("0-2")) && a.filtered() })
	a.stop()
	d.mu.Lock()
	a.flushed = true
	d.mu.Unlock()
	m, err := New(Config{Self: a.id, StateFile: a.state, Peer: a, Applier: a, Retry: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	a.m = nil // it is told no facts
	d.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	deadline := time.Now().Add(time.Minute)
	for there := false; !there; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it is not put back")
		}
		d.mu.Lock()
		there = !a.flushed
		d.mu.Unlock()
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// What an earlier life addressed and a rank may still use stays behind the
// filter, whatever became of the memory.
func TestTheFilterStaysWhenTheMemoryIsLost(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.start()
	b.start()
	d.await("addressed", func() bool {
		active, _ := a.m.FilterActive()
		return facing(a.link("0-1"), b.link("0-2")) && active
	})
	own := a.link("0-1").Prefix.Addr()
	a.stop()
	if err := os.Remove(a.state); err != nil {
		t.Fatal(err)
	}
	a.d.mu.Lock()
	a.ends[0].PeerID, a.ends[0].PeerPort = "", ""
	a.log = nil
	a.d.mu.Unlock()
	a.start()
	d.await("the new life has looked", func() bool { return len(a.m.Applied()) > 2 })
	a.change(func() { a.ends[0].PeerID, a.ends[0].PeerPort = "beta", "0-2" })
	d.await("addressed again", func() bool { return facing(a.link("0-1"), b.link("0-2")) })
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, line := range a.log {
		if strings.HasPrefix(line, "- packet filter") {
			t.Errorf("it did %q", line)
		}
	}
	for _, c := range a.journal {
		if c.Kind == host.ChangeFilter && !slices.Contains(c.Addresses, own) {
			t.Errorf("%s is not protected: %v", own, c.Addresses)
		}
	}
}

func TestRoutesLeadThroughNodesThatForward(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.plug("0-3", "thunderbolt1", "delta", "0-1", 65520)
	a.change(func() { a.ends[0].Proven, a.ends[1].Proven, a.ends[1].NegotiatedGbps = true, true, 20 })
	a.start()
	b.start()
	delta := d.node("delta")
	delta.plug("0-1", "thunderbolt0", "alpha", "0-3", 65520)
	delta.start()
	d.await("addresses", func() bool {
		return facing(a.link("0-1"), b.link("0-2")) && facing(a.link("0-3"), delta.link("0-1")) && a.m.NodeAddress().IsValid()
	})
	far := netip.MustParsePrefix("10.77.222.9/32")
	// Only alpha hears of gamma, which is behind beta, and behind delta.
	tell := func() {
		a.m.SetClaims(map[string][]*peerv1.AddressClaim{
			"beta": b.m.Claims(), "delta": delta.m.Claims(), "gamma": {{Prefix: far.String(), Kind: kindNode}},
			"omega": {{Prefix: "10.77.222.10/32", Kind: kindNode}},
		})
	}
	routes := func(to netip.Prefix) (out []host.Route) {
		tell()
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, r := range a.routes {
			if r.Destination == to {
				out = append(out, r)
			}
		}
		slices.SortFunc(out, func(x, y host.Route) int { return x.Metric - y.Metric })
		return out
	}
	a.m.SetReach(map[string]Reach{"beta": {Neighbours: []string{"alpha", "gamma"}}})
	d.await("a settled state", func() bool { tell(); return b.m.NodeAddress().IsValid() })
	if r := routes(far); len(r) != 0 {
		t.Errorf("beta does not forward, and there is %v", r)
	}
	a.m.SetReach(map[string]Reach{
		"beta": {Forwards: true, Neighbours: []string{"alpha", "gamma"}}, "delta": {Forwards: true, Neighbours: []string{"gamma", "alpha"}},
		"gamma": {Forwards: true, Neighbours: []string{"beta", "omega"}},
	})
	d.await("two ways to gamma, the faster first", func() bool {
		r := routes(far)
		return len(r) == 2 && r[0].Gateway == a.link("0-1").Remote && r[1].Gateway == a.link("0-3").Remote &&
			r[0].Source == a.m.NodeAddress() && r[0].Metric == throughMetric
	})
	d.await("and to who is behind gamma", func() bool { return len(routes(netip.MustParsePrefix("10.77.222.10/32"))) == 2 })
	if r := routes(netip.PrefixFrom(b.m.NodeAddress(), 32)); len(r) != 1 || r[0].Metric != firstMetric {
		t.Errorf("to beta, which has a cable: %v", r)
	}
	a.change(func() { a.ends[0].Proven = false })
	d.await("one way, and beta by no other", func() bool {
		r := routes(far)
		return len(r) == 1 && r[0].Gateway == a.link("0-3").Remote
	})
	a.m.SetReach(nil)
	d.await("none", func() bool { return len(routes(far)) == 0 })
}

func TestForwardingIsSwitchedOnOnlyWhereAskedAndBehindTheFilter(t *testing.T) {
	d := newDesk(t)
	a, b := d.pair()
	a.forward = true
	a.start()
	b.start()
	d.await("alpha forwards", func() bool { return a.m.Forwards() })
	d.mu.Lock()
	on := slices.IndexFunc(a.log, func(s string) bool { return strings.Contains(s, "pass on what arrives by thunderbolt0") })
	guarded := slices.IndexFunc(a.journal, func(c host.Change) bool {
		return c.Kind == host.ChangeFilter && slices.Equal(c.Forwarders, []string{"thunderbolt0"})
	})
	if on < 0 || guarded < 0 {
		t.Errorf("on %d, filter %d:\n%s", on, guarded, strings.Join(a.log, "\n"))
	}
	d.mu.Unlock()
	if b.m.Forwards() {
		t.Error("beta forwards unasked")
	}
	if err := a.m.Down(context.Background()); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if a.nic("thunderbolt0").Forwarding {
		t.Error("down left it on")
	}
}
