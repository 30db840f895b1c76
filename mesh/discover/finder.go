package discover

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/host"
	"tbcluster/host/beat"
	"tbcluster/mesh/identity"
)

// DefaultPort is the control port where none is written.
const DefaultPort = 7871

const (
	// browseFor is how long one browse of the library is of use: it stops
	// asking after the first answer and never tells of a node twice. In a crowd
	// each says by itself that it is there, and is asked to answer to this node
	// alone; only where somebody is not heard all the same they are asked by a
	// browse, whose answers all hear: so it lasts longer with many nodes, by the
	// square of their number in crowds.
	browseFor = 10 * time.Second
	crowd     = 8
	// longestBrowse bounds that: what nobody confirms has to go some day.
	longestBrowse = 10 * time.Minute
	// sendAgain is how many browses pass between looks at whether sending works.
	sendAgain = 3
	// lookEvery is how often the interfaces are listed without being told to.
	lookEvery = 3 * time.Second
	// resolveEvery is how often names of static peers are looked up.
	resolveEvery = time.Minute
	// saveEvery is how often the memory of addresses is written at most.
	saveEvery = 5 * time.Second
	// fullAgain is how soon after it began a browse that has heard too much is
	// begun anew: a flood costs one browse a second, and hides nobody for longer.
	fullAgain = time.Second
	// goneAfter browses and a half without a word a node's mDNS addresses are no
	// more.
	goneAfter = 3
)

// askAt is when to ask after a start and after a change of interfaces: at once
// and soon again, since the other side may be starting too, and an IPv6 address
// is good for nothing in its first second or two (duplicate detection).
var askAt = []time.Duration{
	0, 100 * time.Millisecond, 300 * time.Millisecond, 700 * time.Millisecond,
	1200 * time.Millisecond, 1800 * time.Millisecond, 2500 * time.Millisecond, 4 * time.Second, 6 * time.Second,
}

const (
	// askCrowd is how often a crowd on a LAN is asked after a change of the
	// interface: they have answered by then, and who starts later says so unasked.
	askCrowd = 3
	// askLately is how long a crowd that was asked for somebody who waits is known to
	// have been: what did not arrive then is asked for all to hear. askLeast lies
	// between two of those.
	askLately = 15 * time.Second
	askLeast  = time.Second
)

// Options are the settings of a Finder.
type Options struct {
	Self identity.NodeID
	// Dir is the agent's state directory, for the memory of addresses.
	Dir string
	// Static are peers of the configuration: "host", "host:port", addresses.
	Static []string
	// Interfaces lists the interfaces that are up, without the loopback; nil
	// asks the system and takes thunderboltN for cables.
	Interfaces func() ([]Interface, error)
	// Known says whether a node is in the cluster: strangers never displace it.
	Known func(identity.NodeID) bool
	// Invites says whether a node can have an open code of that public number; nil
	// takes every word for it. Strangers with one are displaced last.
	Invites func(identity.NodeID, string) bool
	Clock   host.Clock   // nil is the system's
	Log     *slog.Logger // nil discards
}

// Announcement is what this node says of itself.
type Announcement struct {
	Name string
	OS   string
	Port uint16
	Pair string // public number of an open code, or ""
}

// Finder finds nodes nearby. Its methods may be called at once from several
// goroutines.
type Finder struct {
	o       Options
	statics []static

	mu          sync.Mutex
	table       table
	interfaces  []Interface
	announced   Announcement
	troubles    []Trouble
	subscribers map[int]chan struct{}
	nextSub     int
	unsaved     bool

	rescan   chan struct{}
	ask      chan struct{}
	announce chan struct{}
}

// New returns a Finder. Run starts it. Faults: CONFIG_INVALID for a static peer
// that is none, STATE_TOO_NEW.
func New(o Options) (*Finder, error) {
	if o.Interfaces == nil {
		o.Interfaces = systemInterfaces
	}
	if o.Known == nil {
		o.Known = func(identity.NodeID) bool { return false }
	}
	if o.Clock == nil {
		o.Clock = host.SystemClock{}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	f := &Finder{
		o: o, table: table{self: o.Self, known: o.Known, invites: o.Invites, nodes: map[identity.NodeID]*found{}},
		subscribers: map[int]chan struct{}{},
		rescan:      make(chan struct{}, 1), ask: make(chan struct{}, 1), announce: make(chan struct{}, 1),
	}
	for _, s := range o.Static {
		peer, err := parseStatic(s)
		if err != nil {
			return nil, err
		}
		f.statics = append(f.statics, peer)
	}
	remembered, err := loadMemory(o.Dir, o.Log)
	if err != nil {
		return nil, err
	}
	f.table.remember(remembered)
	return f, nil
}

// Announce sets what this node says of itself; before the first call it says
// nothing.
func (f *Finder) Announce(a Announcement) {
	f.mu.Lock()
	changed := f.announced != a
	f.announced = a
	f.mu.Unlock()
	if changed {
		signal(f.announce)
	}
}

// Reached notes that a node is in reach on an own network now, without a router
// between: what it announces should be heard.
func (f *Finder) Reached(node identity.NodeID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.table.reached(node, f.o.Clock.Now())
}

// Unheard returns nodes that are in reach and whose announcements have not been
// heard for longer than that can be chance, sorted: somebody on the way loses
// multicast, or keeps one of both from it. hears says that those of another node
// in reach have been.
func (f *Finder) Unheard() (unheard []identity.NodeID, hears bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table.unheard(f.o.Clock.Now())
}

// Rescan looks at the interfaces now, and asks and announces anew if they changed.
func (f *Finder) Rescan() { signal(f.rescan) }

// Ask asks on every interface now, though nothing has changed there: somebody
// waits for an answer.
func (f *Finder) Ask() { signal(f.ask) }

// AskedWithin is how old the last announcement of a node is at most that still
// announces itself, also where one was lost: it grows with the number of nodes.
func (f *Finder) AskedWithin() time.Duration { return f.browseFor() * 5 / 2 }

// Met remembers that node answered at addr.
func (f *Finder) Met(node identity.NodeID, addr netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.table.met(node, addr, f.o.Clock.Now()) {
		f.unsaved = true
		f.tell()
	}
}

// Forget drops all memory of a node.
func (f *Finder) Forget(node identity.NodeID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.table.forget(node) {
		f.unsaved = true
		f.tell()
	}
}

// Candidates returns what was found, sorted.
func (f *Finder) Candidates() []Candidate {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table.candidates(f.interfaces, f.statics, f.o.Clock.Now())
}

// Troubles returns where multicast does not work now.
func (f *Finder) Troubles() []Trouble {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.troubles)
}

// Subscribe returns a channel that gets a value soon after Candidates or
// Troubles changed, the name of an announcement included; it has room for one.
func (f *Finder) Subscribe() (changed <-chan struct{}, cancel func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, n := make(chan struct{}, 1), f.nextSub
	f.nextSub++
	f.subscribers[n] = c
	return c, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.subscribers, n)
	}
}

// tell wakes the subscribers. The caller holds mu.
func (f *Finder) tell() {
	for _, c := range f.subscribers {
		signal(c)
	}
}

// signal puts a value into a channel with room for one, unless it has one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run finds and announces until ctx ends, then says goodbye.
func (f *Finder) Run(ctx context.Context) error {
	var background sync.WaitGroup
	defer background.Wait()
	if len(f.statics) > 0 {
		background.Go(func() { f.resolve(ctx) })
	}
	m := &mdns{self: f.o.Self, found: f.heard, full: make(chan struct{}, 1), log: f.o.Log}
	defer m.close()
	askEach := func() {
		m.browse(ctx, m.cableNames())
		f.trouble(nil, m.ask(ctx, nil, true))
	}
	var askedAt, allAt time.Time // for somebody who waits; of all

	look, browse, save := time.NewTimer(beat.Until(lookEvery)), time.NewTimer(f.browseFor()), time.NewTimer(beat.Until(saveEvery))
	browses, deaf := 0, false
	defer look.Stop()
	defer browse.Stop()
	defer save.Stop()
	ask := time.NewTimer(0)
	defer ask.Stop()
	asked := 0
	asking := map[string]bool{} // interfaces
	anew := func() {
		changed := f.look(m)
		if len(changed) == 0 {
			return
		}
		m.browse(ctx, changed)
		if f.crowded() {
			m.announceOn(f.announcement(), changed)
		} else {
			// Among a few, said once too often is better than missed once.
			m.announce(f.announcement())
		}
		if asked >= len(askAt) {
			clear(asking)
		}
		for name := range changed {
			asking[name] = true
		}
		asked = 0
		ask.Reset(askAt[0])
	}
	select {
	case <-f.announce: // anew says it
	default:
	}
	anew()
	for {
		select {
		case <-ctx.Done():
			m.goodbye()
			return f.save()
		case <-look.C:
			look.Reset(beat.Until(lookEvery))
			f.expire()
			anew()
		case <-f.rescan:
			anew()
		case <-f.ask:
			switch now := time.Now(); {
			case now.Sub(allAt) < askLeast: // it is being answered
			case f.crowded() && !deaf && now.Sub(askedAt) > askLately:
				askEach()
			default:
				m.browse(ctx, nil)
				f.trouble(nil, m.ask(ctx, nil, false))
				allAt = now
			}
			askedAt = time.Now()
		case <-f.announce:
			m.announce(f.announcement())
		case <-browse.C:
			browse.Reset(f.browseFor())
			crowded := f.crowded()
			if crowded {
				m.present(f.announcement())
				askEach()
			}
			if crowded && !deaf && !f.quiet() {
				continue
			}
			m.browse(ctx, nil)
			deaf = false
			if browses++; !crowded && browses%sendAgain == 0 {
				f.trouble(nil, m.ask(ctx, nil, false))
			}
		case <-m.full:
			deaf = true
			browse.Reset(max(0, fullAgain-time.Since(m.browsedAt)))
		case <-ask.C:
			among := f.crowded()
			if among && asked >= askCrowd {
				maps.DeleteFunc(asking, func(name string, _ bool) bool { return !m.cables[name] })
			}
			f.trouble(asking, m.ask(ctx, asking, among))
			if asked++; asked < len(askAt) {
				ask.Reset(askAt[asked] - askAt[asked-1])
			}
		case <-save.C:
			save.Reset(beat.Until(saveEvery))
			if err := f.save(); err != nil {
				f.o.Log.Error("cannot keep the addresses of nodes", "error", err)
			}
		}
	}
}

// crowded is table.crowded for the nodes of now.
func (f *Finder) crowded() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table.crowded()
}

// quiet is table.quiet now.
func (f *Finder) quiet() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table.quiet(f.o.Clock.Now())
}

// browseFor is how long a browse lasts among the nodes of now.
func (f *Finder) browseFor() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table.browseFor()
}

func (f *Finder) announcement() Announcement {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.announced
}

// look lists the interfaces and names those that have come, gone or changed.
func (f *Finder) look(m *mdns) map[string]bool {
	interfaces, err := f.o.Interfaces()
	if err != nil {
		f.o.Log.Warn("cannot list the network interfaces", "error", err)
		return nil
	}
	if len(interfaces) > maxInterfaces {
		interfaces = interfaces[:maxInterfaces]
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	changed := map[string]bool{}
	for _, list := range [][2][]Interface{{interfaces, f.interfaces}, {f.interfaces, interfaces}} {
		for _, i := range list[0] {
			if m.interfaces == nil || !slices.ContainsFunc(list[1], i.same) {
				changed[i.Name] = true
			}
		}
	}
	if m.interfaces != nil && len(changed) == 0 {
		return nil
	}
	f.interfaces = interfaces
	m.interfaces = make([]net.Interface, 0, len(interfaces))
	m.addresses, m.cables = map[string][]netip.Prefix{}, map[string]bool{}
	for _, i := range interfaces {
		if !i.Multicast {
			continue
		}
		ni, err := net.InterfaceByIndex(i.Index)
		if err != nil {
			continue // gone since; the next look sees that
		}
		m.interfaces = append(m.interfaces, *ni)
		m.addresses[ni.Name], m.cables[ni.Name] = i.Addresses, i.Cable
	}
	f.tell()
	return changed
}

// heard takes what somebody announced.
func (f *Finder) heard(s said) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.table.heard(s, f.o.Clock.Now()) {
		f.tell()
	}
}

func (f *Finder) expire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.table.expire(f.o.Clock.Now()) {
		f.tell()
	}
}

// trouble notes where multicast does not work, of the interfaces that were asked
// on; nil is all.
func (f *Finder) trouble(asked map[string]bool, now []Trouble) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.troubles {
		there := slices.ContainsFunc(f.interfaces, func(i Interface) bool { return i.Name == t.Interface })
		if asked != nil && !asked[t.Interface] && there {
			now = append(now, t)
		}
	}
	slices.SortFunc(now, func(a, b Trouble) int { return strings.Compare(a.Interface, b.Interface) })
	same := slices.EqualFunc(now, f.troubles, func(a, b Trouble) bool {
		return a.Interface == b.Interface && a.Cause == b.Cause
	})
	f.troubles = now
	if !same {
		f.tell()
	}
}
