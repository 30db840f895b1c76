package address

import (
	"fmt"
	"net/netip"

	"tbcluster/host"
)

// use is a range that somebody uses already.
type use struct {
	prefix netip.Prefix
	by     string // for people
}

// occupied returns what this machine's interfaces and routes use, but for what
// is ours. Default routes, in one piece or as a VPN's two halves, claim nothing
// of their own.
func occupied(n host.Network, ours func(p netip.Prefix, iface string) bool) []use {
	var out []use
	for _, i := range n.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr().Is4() && !ours(p, i.Name) {
				out = append(out, use{p.Masked(), fmt.Sprintf("%s on interface %s", p, i.Name)})
			}
		}
	}
	for _, r := range n.Routes {
		p := r.Destination
		if p.IsValid() && p.Addr().Is4() && p.Bits() > 1 && !ours(p, r.Interface) {
			out = append(out, use{p.Masked(), fmt.Sprintf("the route to %s on %s", p, r.Interface)})
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
