package darwin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// ErrNoRoute is wrapped where no route leads to an address.
var ErrNoRoute = errors.New("no route")

// Way is the route that macOS uses for an address.
type Way struct {
	Destination netip.Prefix // 0.0.0.0/0 or ::/0 for the default route
	Gateway     netip.Addr   // invalid where the address is on the link
	Interface   string
}

// RouteTo returns the route that is used for a, as `route -n get` tells it, or
// an error that wraps ErrNoRoute.
func RouteTo(ctx context.Context, r Runner, a netip.Addr) (Way, error) {
	family := "-inet"
	if a.Is6() {
		family = "-inet6"
	}
	out, err := r.Run(ctx, "route", "-n", "get", family, a.String())
	if err != nil {
		if strings.Contains(err.Error(), "not in table") {
			return Way{}, fmt.Errorf("%s: %w", a, ErrNoRoute)
		}
		return Way{}, err
	}
	return parseRouteGet(string(out), a.Is6())
}

// parseRouteGet parses `route -n get ADDRESS`.
func parseRouteGet(text string, six bool) (Way, error) {
	if strings.Contains(text, "not in table") {
		return Way{}, ErrNoRoute
	}
	v := keysOf(text)
	w := Way{Interface: v["interface"]}
	if w.Interface == "" {
		return Way{}, errors.New("route: no interface in the answer")
	}
	if g, err := netip.ParseAddr(v["gateway"]); err == nil {
		w.Gateway = g
	}
	destination, mask := routeField(text, "destination"), routeField(text, "mask")
	if destination == "default" {
		w.Destination, _ = parseDestination("default", six)
		return w, nil
	}
	a, err := netip.ParseAddr(destination)
	if err != nil || a.Is6() != six {
		return Way{}, fmt.Errorf("route: destination %q", destination)
	}
	a = a.WithZone("")
	bits := a.BitLen() // a host route has no mask
	if mask != "" {
		m, err := netip.ParseAddr(mask)
		if err != nil || m.BitLen() != a.BitLen() {
			return Way{}, fmt.Errorf("route: mask %q", mask)
		}
		if bits, err = ones(m); err != nil {
			return Way{}, err
		}
	}
	w.Destination = netip.PrefixFrom(a, bits).Masked()
	return w, nil
}

// routeField is the value of a key in the answer. Not by keysOf: a value can
// hold colons, and keys are aligned to the right.
func routeField(text, key string) string {
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), key+": "); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// ones counts the leading ones of a mask, which may have no others.
func ones(mask netip.Addr) (int, error) {
	n, ended := 0, false
	for _, b := range mask.AsSlice() {
		for i := 7; i >= 0; i-- {
			one := b>>i&1 == 1
			if one && ended {
				return 0, fmt.Errorf("mask %s has holes", mask)
			}
			if one {
				n++
			}
			ended = ended || !one
		}
	}
	return n, nil
}

// Neighbour is the hardware address behind an IP address on a link.
type Neighbour struct {
	MAC       string // as macOS prints it: bytes without leading zeros
	Interface string
}

// NeighbourOf returns who answers for a, as `arp -n` tells it; ok is false where
// nobody has.
func NeighbourOf(ctx context.Context, r Runner, a netip.Addr) (n Neighbour, ok bool, err error) {
	out, err := r.Run(ctx, "arp", "-n", a.String())
	// arp ends with status 1 where there is no entry.
	if err != nil && !strings.Contains(string(out)+err.Error(), "no entry") {
		return Neighbour{}, false, err
	}
	n, ok = parseARP(string(out), a)
	return n, ok, nil
}

// parseARP parses "? (A) at MAC on INTERFACE …".
func parseARP(text string, a netip.Addr) (Neighbour, bool) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) >= 6 && f[1] == "("+a.String()+")" && f[2] == "at" && f[4] == "on" && strings.Count(f[3], ":") == 5 {
			return Neighbour{MAC: f[3], Interface: f[5]}, true
		}
	}
	return Neighbour{}, false
}
