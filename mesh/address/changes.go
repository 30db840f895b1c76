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
// follow.
const firstMetric = 100

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

// largestMTU is what an interface can be set to; 0 if it is not there.
func largestMTU(i host.Interface) int {
	if i.MaxMTU > 0 {
		return min(i.MaxMTU, MaxMTU)
	}
	return min(i.MTU, MaxMTU)
}

// linkChanges returns what gives an interface its link address.
func linkChanges(i host.Interface, own netip.Prefix, mtu int) []host.Change {
	var out []host.Change
	if i.ManagedBy != "" {
		out = append(out, host.Change{Kind: host.ChangeUnmanage, Interface: i.Name, Manager: i.ManagedBy})
	}
	if mtu > 0 && mtu <= largestMTU(i) {
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

// routeChanges returns host routes to a peer's node address over proven links.
// A link keeps its rank while another comes and goes, so that routes stay put.
func routeChanges(node, own netip.Prefix, ways []way) []host.Change {
	slices.SortFunc(ways, func(a, b way) int { return cmp.Or(cmp.Compare(b.gbps, a.gbps), cmp.Compare(a.port, b.port)) })
	var out []host.Change
	for rank, w := range ways {
		if w.proven && w.iface != "" && w.gateway.IsValid() {
			out = append(out, host.Change{
				Kind: host.ChangeRoute, Interface: w.iface, Prefix: node, Gateway: w.gateway,
				Source: own.Addr(), Metric: firstMetric + rank,
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
	case host.ChangeUnmanage:
		return there && i.ManagedBy == ""
	case host.ChangeRoute:
		return slices.ContainsFunc(n.Routes, func(r host.Route) bool {
			return r.Destination == c.Prefix && r.Interface == c.Interface && (!c.Gateway.IsValid() || r.Gateway == c.Gateway)
		})
	}
	return false
}

// undoing orders changes for undoing: latest first, the packet filter after
// everything that it protects.
func undoing(applied []host.Change) []host.Change {
	out := slices.Clone(applied)
	slices.Reverse(out)
	slices.SortStableFunc(out, func(a, b host.Change) int { return last(a) - last(b) })
	return out
}

func last(c host.Change) int {
	if c.Kind == host.ChangeFilter {
		return 1
	}
	return 0
}
