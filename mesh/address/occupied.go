package address

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"tbcluster/host"
)

// use is a range that somebody uses already.
type use struct {
	prefix netip.Prefix
	by     string // for people
	// outside is set for what is neither on a cable nor on the loopback: a LAN, a
	// VPN, a route.
	outside bool
}

// occupied returns what this machine's interfaces and routes use, but for what
// is ours. Default routes, in one piece or as a VPN's two halves, claim nothing
// of their own.
func occupied(n host.Network, ours func(p netip.Prefix, iface string) bool) []use {
	var out []use
	inside := map[string]bool{}
	for _, i := range n.Interfaces {
		inside[i.Name] = i.Cable || i.Loopback
		for _, p := range i.Addresses {
			if p.Addr().Is4() && !ours(p, i.Name) {
				out = append(out, use{p.Masked(), fmt.Sprintf("%s on interface %s", p, i.Name), !inside[i.Name]})
			}
		}
	}
	for _, r := range n.Routes {
		p := r.Destination
		if p.IsValid() && p.Addr().Is4() && p.Bits() > 1 && !ours(p, r.Interface) {
			out = append(out, use{p.Masked(), fmt.Sprintf("the route to %s on %s", p, r.Interface), !inside[r.Interface]})
		}
	}
	return out
}

// there reports whether somebody uses it.
func (u use) there() bool { return u.by != "" }

// overlapping returns the largest range in use that holds some of p; the zero
// use if there is none.
func overlapping(uses []use, p netip.Prefix) use {
	var found use
	for _, u := range uses {
		if u.prefix.Overlaps(p) && (!found.there() || u.prefix.Bits() < found.prefix.Bits()) {
			found = u
		}
	}
	return found
}

// maxRanges bounds what a node says of its own network.
const maxRanges = 16

// ranges returns, largest first, what of this machine's network is outside and
// in the way of addresses of ours: another node's packets to an address in there
// would not come to a cable here.
func ranges(uses []use, s spaces) []netip.Prefix {
	var all []netip.Prefix
	for _, u := range uses {
		if u.outside && slices.ContainsFunc(s, func(o space) bool { return o.block.Overlaps(u.prefix) }) {
			all = append(all, u.prefix)
		}
	}
	slices.SortFunc(all, func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), a.Addr().Compare(b.Addr()))
	})
	var out []netip.Prefix
	for _, p := range all {
		if !slices.ContainsFunc(out, p.Overlaps) && len(out) < maxRanges {
			out = append(out, p)
		}
	}
	return out
}
