package rig

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"tbcluster/rig/state"
)

// want is a peer that a host has to show.
type want struct {
	device string // "0-1"
	name   string // of the peer
	uuid   string // of the peer's host router, "" if not known yet
	lanes  int
	gbps   float64
	// sure is false where the driver at the other end is not loaded: the peer
	// may be there yet.
	sure bool
}

// truth returns the peers that a host has to show, by the state of the fabric.
// The rig's lock is held.
func (h *Host) truth() []want {
	var list []want
	for _, l := range h.rig.links {
		for i, e := range l.ends {
			far, c := l.ends[1-i].host, l.last()
			if e.host != h || !plugged(l.cables) || !far.on {
				continue
			}
			w := want{device: e.device, name: far.Name(), lanes: c.lanes, gbps: float64(c.speed.Gbps()), sure: far.driver}
			if len(far.state.Domains) > 0 {
				w.uuid = far.state.Domains[0].UUID
			}
			list = append(list, w)
		}
	}
	return list
}

// routers returns the hubs that a host has to show.
func (h *Host) routers() []string {
	var list []string
	for _, hub := range h.rig.hubs {
		if hub.host == h && plugged(hub.cables) {
			list = append(list, hub.device)
		}
	}
	return list
}

// differences compares what a host shows with what it has to show.
func differences(host string, s state.State, driver bool, wants []want, routers []string, stale map[string]uint64) []string {
	var list []string
	differ := func(format string, args ...any) { list = append(list, host+": "+fmt.Sprintf(format, args...)) }
	if s.Driver != driver {
		differ("the driver is loaded: %v, not %v", s.Driver, driver)
	}
	if !driver {
		return list
	}
	if len(s.Domains) != 1 {
		differ("there are %d domains, not 1", len(s.Domains))
		return list
	}
	d := s.Domains[0]
	if d.UUID == "" {
		differ("its own router has no UUID")
	}
	for _, o := range d.Others {
		if !slices.Contains(routers, o) {
			differ("%s is a router, and there is none", o)
		}
	}
	for _, o := range routers {
		if !slices.Contains(d.Others, o) {
			differ("the hub %s is missing", o)
		}
	}
	expected := map[string]bool{}
	for _, w := range wants {
		expected[w.device] = true
		p := s.Peer(w.device)
		if !w.sure {
			continue
		}
		switch {
		case p == nil:
			differ("%s (%s) is missing", w.device, w.name)
			continue
		case stale[w.device] == p.Inode && p.Inode != 0:
			differ("%s (%s) is still the one from before", w.device, w.name)
			continue
		}
		if p.Name != w.name || w.uuid == "" || !strings.EqualFold(p.UUID, w.uuid) {
			differ("%s is %s %s, not %s %s", w.device, p.Name, p.UUID, w.name, w.uuid)
		}
		if p.RxLanes != w.lanes || p.TxLanes != w.lanes || p.RxGbps != w.gbps || p.TxGbps != w.gbps {
			differ("%s (%s) has %d lanes of %g Gb/s in and %d of %g out, not %d of %g", w.device, w.name, p.RxLanes, p.RxGbps, p.TxLanes, p.TxGbps, w.lanes, w.gbps)
		}
		if n := p.Interface(); n == nil {
			differ("%s (%s) has no network interface", w.device, w.name)
		}
	}
	for _, p := range d.Peers {
		if !expected[p.Device] {
			differ("%s (%s) is there, and behind that port is no host that is on", p.Device, p.Name)
		}
	}
	return list
}

// Differences returns what hosts show otherwise than it is.
func (r *Rig) Differences() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []string
	for _, h := range r.hosts {
		if !h.on {
			continue
		}
		if h.broken != nil {
			list = append(list, h.Name()+": the probe has ended: "+h.broken.Error())
			continue
		}
		list = append(list, differences(h.Name(), h.state, h.driver, h.truth(), h.routers(), h.stale)...)
	}
	return list
}

// Settle waits until all hosts that are on show the truth of the fabric: the
// right peers, by name and UUID, behind the right ports, with the lanes and the
// speed of the cable and a network interface, and nothing else.
//
// A host whose QEMU has ended, and nobody had it do so, is an error at once.
func (r *Rig) Settle(ctx context.Context) error {
	lost := func() error {
		for _, h := range r.hosts {
			if h.Lost() != "" {
				return h.powered()
			}
		}
		return nil
	}
	var gone error
	err := r.Await(ctx, "wait until all hosts show what is plugged", func() string {
		if gone = lost(); gone != nil {
			return ""
		}
		return strings.Join(r.Differences(), "; ")
	})
	if gone != nil {
		return gone
	}
	return err
}
