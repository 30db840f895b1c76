package transfer

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"tbcluster/api/fault"
	"tbcluster/transfer/tcp"
	"tbcluster/transfer/transport"
)

const (
	// pathsEvery is how often Deps.Paths is asked in any case.
	pathsEvery = 500 * time.Millisecond
	// connsPerPath is how many connections share a path: one has its own
	// congestion window and its own pair of processors for TLS.
	connsPerPath = 4
	// lowLimit is a rate in bytes per second that one connection carries easily.
	lowLimit = 100 << 20
	// Between two tries of a path that fails.
	firstBackoff = 500 * time.Millisecond
	maxBackoff   = 4 * time.Second
	// lanPatience is how long cables that are there but do not answer are
	// waited for before the LAN is used beside them.
	lanPatience = 5 * time.Second
	// connectTimeout bounds one try, both ends together.
	connectTimeout = 10 * time.Second
)

// pathManager keeps what is in use in step with what there is.
type pathManager struct {
	c       *coordinator
	next    int // number of the next path
	routes  []*pathRoute
	results chan connected
}

// pathRoute is the way from one source to the destination.
type pathRoute struct {
	src   *peer
	paths map[Path]*usedPath
	// none is since when nothing was up; zero while something is.
	none time.Time
	done bool
}

type usedPath struct {
	id      int
	state   pathState
	backoff time.Duration
	retryAt time.Time
	why     error
}

type pathState uint8

const (
	connecting pathState = iota
	up
	failed
)

type connected struct {
	r    *pathRoute
	path Path
	id   int
	err  error
}

func newPathManager(c *coordinator) *pathManager {
	m := &pathManager{c: c, results: make(chan connected, 64)}
	for _, s := range c.srcs {
		m.routes = append(m.routes, &pathRoute{src: s, paths: map[Path]*usedPath{}, none: time.Now()})
	}
	return m
}

// run returns when ctx ends, or with a Fault when a source has had no way to
// the destination for too long.
func (m *pathManager) run(ctx context.Context) error {
	tick := time.NewTicker(pathsEvery)
	defer tick.Stop()
	down := make(chan func(), 16)
	for _, r := range m.routes {
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case n := <-r.src.down:
					select {
					case down <- func() { m.lost(r, n) }:
					case <-ctx.Done():
						return
					}
				}
			}
		}()
	}
	for {
		for _, r := range m.routes {
			m.reconcile(ctx, r)
		}
		if err := m.judge(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-m.c.deps.PathsChanged:
			m.hurry()
		case f := <-down:
			f()
		case done := <-m.results:
			m.connected(done)
		}
	}
}

// hurry tries again at once what has failed before: something has changed.
func (m *pathManager) hurry() {
	for _, r := range m.routes {
		for _, u := range r.paths {
			u.retryAt, u.backoff = time.Time{}, 0
		}
	}
}

// conns returns how many connections a path gets. A low limit gets one, for
// several chunks at a time would all be slow to arrive.
func (m *pathManager) conns() int {
	if l := m.c.job.Options.LimitBytesPerSecond; l > 0 && l < lowLimit {
		return 1
	}
	return connsPerPath
}

// wanted lists the paths to use now: cables while there are any, the loopback
// on one node, else the LAN.
func (m *pathManager) wanted(r *pathRoute) []Path {
	all := m.c.deps.Paths(r.src.node, m.c.dst.node)
	if r.src.node == m.c.dst.node && len(all) == 0 {
		lo := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		all = []Path{{SrcAddr: lo, DstAddr: lo, Transport: tcp.Name, Kind: Loopback}}
	}
	kinds := map[PathKind][]Path{}
	cables := map[string]bool{}
	for _, p := range all {
		if p.Transport == "" {
			p.Transport = tcp.Name
		}
		if p.Transport != tcp.Name {
			continue // a transport that workers do not have
		}
		if p.Kind == Cable {
			if limit := m.c.job.Options.MaxCables; limit > 0 && len(cables) == limit && !cables[p.LinkID] {
				continue
			}
			cables[p.LinkID] = true
		}
		kinds[p.Kind] = append(kinds[p.Kind], p)
	}
	if ps := kinds[Loopback]; len(ps) > 0 {
		return ps
	}
	ps := kinds[Cable]
	if len(kinds[LAN]) > 0 && (len(ps) == 0 || r.silent()) {
		m.c.warn("no cable to " + m.c.dst.name + " carries bytes: copying over the LAN, which is slower")
		ps = append(ps, kinds[LAN]...)
	}
	return ps
}

// silent reports whether the LAN is needed beside the cables: they have been
// given time, or it carries already and none of them does yet.
func (r *pathRoute) silent() bool {
	if !r.none.IsZero() {
		return time.Since(r.none) > lanPatience
	}
	for p, u := range r.paths {
		if u.state == up && p.Kind != LAN {
			return false
		}
	}
	return true
}

// reconcile takes up new paths and leaves those that are gone.
func (m *pathManager) reconcile(ctx context.Context, r *pathRoute) {
	select {
	case <-r.src.sent:
		r.done = true
		return
	default:
	}
	now := time.Now()
	wanted := map[Path]bool{}
	for _, p := range m.wanted(r) {
		wanted[p] = true
		u := r.paths[p]
		if u == nil {
			u = &usedPath{state: failed}
			r.paths[p] = u
		}
		if u.state == failed && !now.Before(u.retryAt) {
			m.next++
			u.id, u.state = m.next, connecting
			go m.connect(ctx, r, p, u.id)
		}
	}
	for p, u := range r.paths {
		if wanted[p] {
			continue
		}
		if u.state == up {
			m.leave(r, p, u)
		}
		if u.state != connecting {
			delete(r.paths, p)
		}
	}
	m.note(r)
}

// note keeps account of whether anything is up.
func (m *pathManager) note(r *pathRoute) {
	for _, u := range r.paths {
		if u.state == up {
			r.none = time.Time{}
			return
		}
	}
	if r.none.IsZero() {
		r.none = time.Now()
	}
}

// connect opens one path at both ends.
func (m *pathManager) connect(ctx context.Context, r *pathRoute, p Path, id int) {
	try, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	src, dst := p.SrcInterface, p.DstInterface
	if p.Kind != Cable {
		src, dst = "", "" // routes choose
	}
	var out listenOut
	err := m.c.dst.ctl.ask(try, kListen, listenIn{Path: id, Transport: p.Transport, Interface: dst, Addr: zoned(p.DstAddr, p.DstInterface),
		Peers: []transport.Hash{r.src.hash}}, &out)
	if err == nil {
		err = r.src.ctl.ask(try, kConnect, connectIn{Path: id, Transport: p.Transport, Interface: src, Local: zoned(p.SrcAddr, p.SrcInterface),
			Remote: zoned(p.DstAddr, p.SrcInterface), Port: out.Port, Peer: m.c.dst.hash, Conns: m.conns()}, nil)
	}
	if err == nil {
		m.c.linkUp(pathKey{r.src, id}, p)
	}
	select {
	case m.results <- connected{r, p, id, err}:
	case <-ctx.Done():
	}
}

// zoned writes an address as the node with that interface must: a link-local
// one means nothing without the interface's own name.
func zoned(a netip.Addr, iface string) string {
	if a.Is6() && a.IsLinkLocalUnicast() && iface != "" {
		a = a.WithZone(iface)
	}
	return a.String()
}

func (m *pathManager) connected(c connected) {
	u := c.r.paths[c.path]
	if u == nil || u.id != c.id || u.state != connecting {
		m.c.linkDown(c.path) // it has failed since
		return
	}
	if c.err != nil {
		m.fail(c.r, c.path, u, c.err)
		return
	}
	u.state, u.backoff, u.why = up, 0, nil
	m.note(c.r)
}

// lost is called when a source says that a path has failed.
func (m *pathManager) lost(r *pathRoute, n pathNote) {
	for p, u := range r.paths {
		if u.id == n.Path && u.state != failed {
			m.fail(r, p, u, errors.New(n.Why))
		}
	}
}

// fail leaves a path and sets when to try it again.
func (m *pathManager) fail(r *pathRoute, p Path, u *usedPath, why error) {
	m.leave(r, p, u)
	u.backoff = min(max(2*u.backoff, firstBackoff), maxBackoff)
	u.retryAt, u.why = time.Now().Add(u.backoff), why
	m.note(r)
}

// leave ends a path at both ends.
func (m *pathManager) leave(r *pathRoute, p Path, u *usedPath) {
	u.state = failed
	m.c.linkDown(p)
	for _, w := range []*peer{r.src, m.c.dst} {
		_ = w.ctl.tell(kDisconnect, pathNote{Path: u.id}) // where it cannot be told the transfer has ended
	}
}

// judge sets state and phase by what is up, and gives up when nothing has been
// for too long.
func (m *pathManager) judge() error {
	if m.c.isPaused() {
		for _, r := range m.routes {
			if !r.none.IsZero() {
				r.none = time.Now()
			}
		}
		return nil
	}
	state, phase := Copying, "copying"
	for _, r := range m.routes {
		if r.done || r.none.IsZero() {
			continue
		}
		waited := time.Since(r.none)
		state, phase = Connecting, "connecting to "+m.c.dst.name
		if waited > 2*time.Second || len(r.paths) == 0 {
			phase = "waiting for a link to " + m.c.dst.name
		}
		if waited < m.c.deps.LinkWait {
			continue
		}
		why := errors.New("no cable and no LAN joins them")
		for _, u := range r.paths {
			if u.why != nil {
				why = u.why
			}
		}
		return fault.New(fault.Connection, "no link leads from "+r.src.name+" to "+m.c.dst.name, why,
			"plug the cable in (tbcluster status shows links), then run the same command again: it goes on where this one ended").At(m.c.dst.name)
	}
	m.c.set(state, phase)
	return nil
}

func (c *coordinator) isPaused() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.paused
}
