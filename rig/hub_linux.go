package rig

import (
	"fmt"
	"slices"

	"tbcluster/api/fault"
	"tbcluster/rig/usb4"
)

// HubSpec is a hub. Its port 0 leads to the host whose driver takes it, or to a
// hub that is nearer to that; hosts in its other ports see that host, and it them.
type HubSpec struct {
	// Name is unique among hosts and hubs; "" is hub, hub2, … by place.
	Name string
	// Ports, Lanes and Speed are those of usb4.HubOptions: as many ports as its
	// cables need, 2 lanes, 20 Gb/s a lane.
	Ports, Lanes int
	Speed        usb4.Generation
}

// Hubbed is a host with a hub, which leads to the other hosts: cables[0] hubs side
// by side (default 1), each with all of them.
func Hubbed(hosts int, cables ...int) Topology {
	t := Topology{Hosts: make([]HostSpec, max(hosts, 0))}
	for k := range per(cables) {
		t.Hubs = append(t.Hubs, HubSpec{})
		for i := range hosts {
			t.Cables = append(t.Cables, CableSpec{A: fmt.Sprintf("%s.%d", hostName(i), k), B: fmt.Sprintf("%s.%d", hubName(k), i)})
		}
	}
	return t
}

// hubName is the name of the i-th hub that has no other.
func hubName(i int) string {
	if i == 0 {
		return "hub"
	}
	return fmt.Sprintf("hub%d", i+1)
}

// link is what lets two hosts see each other: a cable, or several with hubs in
// between, the last of which leads from one domain to the other.
type link struct {
	ends   [2]end // in the order of the last cable's ends
	cables []*Cable
}

// end is a host and what is behind one of its ports, by device name and port.
type end struct {
	host   *Host
	port   int
	device string
}

// plugged reports whether all cables are.
func plugged(cables []*Cable) bool {
	return !slices.ContainsFunc(cables, func(c *Cable) bool { return !c.Plugged() })
}

// last is the cable whose lanes both ends show.
func (l *link) last() *Cable { return l.cables[len(l.cables)-1] }

// joins reports whether a host is at one end.
func (l *link) joins(h *Host) bool { return l.ends[0].host == h || l.ends[1].host == h }

// hubAt is a hub as its host shows it.
type hubAt struct {
	host   *Host
	device string
	cables []*Cable
}

// findLinks works out which hosts see each other, by which cables, and who shows
// which hub.
func (r *Rig) findLinks() error {
	byPort := map[*usb4.Port]*Cable{}
	for _, c := range r.cables {
		a, b := c.Cable.Ends()
		byPort[a], byPort[b] = c, c
	}
	hosts := map[*usb4.Host]*Host{}
	for _, h := range r.hosts {
		hosts[h.router] = h
	}
	// up goes from a port to the host behind whose driver it is: the host, the
	// adapters of the route from there, and the cables in between.
	up := func(p *usb4.Port) (h *Host, first *usb4.Port, route uint64, cables []*Cable) {
		for range len(r.cables) + 1 {
			route = route<<8 | uint64(p.Adapter())
			if p.Host() != nil {
				return hosts[p.Host()], p, route, cables
			}
			c := byPort[p.Hub().Port(0)]
			if c == nil {
				break
			}
			cables = append([]*Cable{c}, cables...)
			a, b := c.Cable.Ends()
			if p = a; leadsUp(a) {
				p = b
			}
			if leadsUp(p) {
				break // two hubs by their upstream ports
			}
		}
		return nil, nil, 0, nil
	}
	for _, c := range r.cables {
		a, b := c.Cable.Ends()
		if leadsUp(a) || leadsUp(b) {
			if leadsUp(a) {
				a, b = b, a
			}
			if h, _, route, cables := up(a); h != nil && !leadsUp(a) {
				r.hubs = append(r.hubs, hubAt{host: h, device: fmt.Sprintf("0-%x", route), cables: append(cables, c)})
			}
			continue
		}
		l := &link{}
		for i, p := range []*usb4.Port{a, b} {
			h, first, route, cables := up(p)
			if h != nil {
				l.ends[i] = end{host: h, port: first.Index(), device: fmt.Sprintf("0-%x", route)}
			}
			l.cables = append(l.cables, cables...)
		}
		l.cables = append(l.cables, c)
		switch {
		case l.ends[0].host == nil || l.ends[1].host == nil: // a hub that nobody has
		case l.ends[0].host == l.ends[1].host:
			return fault.Newf(fault.Usage, "join two hosts", "the cable %s leads back to host %s", c, l.ends[0].host.Name())
		default:
			c.link = l
			r.links = append(r.links, l)
		}
	}
	return nil
}

// leadsUp reports whether a port is the upstream one of a hub.
func leadsUp(p *usb4.Port) bool { return p.Hub() != nil && p.Index() == 0 }
