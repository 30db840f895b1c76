package address

import (
	"cmp"
	"net/netip"
	"slices"

	"tbcluster/host"
)

// MaxMTU is the largest MTU that is set: that of Linux's Thunderbolt network.
const MaxMTU = 65520

// firstMetric is the metric of the best route to a node address; worse ones
// follow. throughMetric is that of the best through another node.
const (
	firstMetric   = 100
	throughMetric = 1000
)

// identity is a change without what is only recorded for undoing it.
type identity struct {
	kind    host.ChangeKind
	iface   string
	prefix  netip.Prefix
	gateway netip.Addr
	source  netip.Addr
	metric  int
	mtu     int
	manager string
}

func identify(c host.Change) identity {
	return identity{c.Kind, c.Interface, c.Prefix, c.Gateway, c.Source, c.Metric, c.MTU, c.Manager}
}

// leastMTU is the smallest that is agreed on; IPv6 needs it.
const leastMTU = 1280

// largestMTU is what an interface can be set to; 0 if it is not there.
func (m *Manager) largestMTU(i host.Interface) int {
	mtu := min(i.MTU, MaxMTU)
	if i.MaxMTU > 0 {
		mtu = min(i.MaxMTU, MaxMTU)
	}
	if m.cfg.MTU > 0 {
		mtu = min(mtu, m.cfg.MTU)
	}
	return mtu
}

// agreeMTU is what both ends of a link set, by the largest that each can; 0 if
// it is not known of one, or makes no sense.
func agreeMTU(own int, far uint32) int {
	agreed := min(own, int(min(far, MaxMTU)))
	if agreed < leastMTU {
		return 0
	}
	return agreed
}

// linkChanges returns what gives an interface its link address. The managers in
// told were told to leave it alone: they would come back if that was undone.
func linkChanges(i host.Interface, told []string, own netip.Prefix, mtu int) []host.Change {
	var out []host.Change
	if i.ManagedBy != "" && !slices.Contains(told, i.ManagedBy) {
		told = append(told, i.ManagedBy)
	}
	for _, manager := range told {
		out = append(out, host.Change{Kind: host.ChangeUnmanage, Interface: i.Name, Manager: manager})
	}
	if mtu > 0 {
		out = append(out, host.Change{Kind: host.ChangeMTU, Interface: i.Name, MTU: mtu, OldMTU: i.MTU})
	}
	return append(out,
		host.Change{Kind: host.ChangeLinkUp, Interface: i.Name, WasUp: i.Up},
		host.Change{Kind: host.ChangeAddress, Interface: i.Name, Prefix: own})
}

// way is one link by which a node address can be reached.
type way struct {
	port, iface string
	gateway     netip.Addr
	gbps        float64
	proven      bool
}

// routeChanges returns host routes to a node address over proven links, with
// metrics from first on. A link keeps its rank while another comes and goes, so
// that routes stay put.
func routeChanges(node, own netip.Prefix, ways []way, first int) []host.Change {
	slices.SortFunc(ways, func(a, b way) int { return cmp.Or(cmp.Compare(b.gbps, a.gbps), cmp.Compare(a.port, b.port)) })
	var out []host.Change
	for rank, w := range ways {
		if w.proven && w.iface != "" && w.gateway.IsValid() {
			out = append(out, host.Change{
				Kind: host.ChangeRoute, Interface: w.iface, Prefix: node, Gateway: w.gateway,
				Source: own.Addr(), Metric: first + rank,
			})
		}
	}
	return out
}

// satisfied reports whether the machine already is as a change would make it,
// as far as facts tell.
func satisfied(c host.Change, n host.Network) bool {
	i, there := n.Interface(c.Interface)
	switch c.Kind {
	case host.ChangeLinkUp:
		return there && i.Up
	case host.ChangeMTU:
		return there && i.MTU == c.MTU
	case host.ChangeAddress:
		return there && slices.Contains(i.Addresses, c.Prefix)
	case host.ChangeForward:
		return there && i.Forwarding
	case host.ChangeUnmanage:
		return there && i.ManagedBy == ""
	case host.ChangeRoute:
		return slices.ContainsFunc(n.Routes, func(r host.Route) bool {
			return r.Destination == c.Prefix && r.Interface == c.Interface && (!c.Gateway.IsValid() || r.Gateway == c.Gateway)
		})
	}
	return false
}

// undoing orders changes for undoing: latest first, but managers get an interface
// back only when all else of it is undone, or they would have it set down under
// them; the packet filter after everything that it protects.
func undoing(applied []host.Change) []host.Change {
	out := slices.Clone(applied)
	slices.Reverse(out)
	slices.SortStableFunc(out, func(a, b host.Change) int { return last(a) - last(b) })
	return out
}

func last(c host.Change) int {
	switch c.Kind {
	case host.ChangeUnmanage:
		return 1
	case host.ChangeFilter:
		return 2
	}
	return 0
}
