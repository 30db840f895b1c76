package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"tbcluster/host"
)

// maxName is the most bytes that the kernel takes for an interface's name.
const maxName = 15

// validName returns an error unless name can be an interface's, and means just
// one in a file of a network manager and on a command line.
func validName(name string) error {
	if name == "" || len(name) > maxName || name == "." || name == ".." || name[0] == '-' {
		return fmt.Errorf("%q is no name of an interface", name)
	}
	for _, r := range name {
		if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_.-", r)) {
			return fmt.Errorf("interface %q: names with %q are not supported", name, r)
		}
	}
	return nil
}

// valid returns an error unless c is complete. A change comes from a process
// with fewer rights than this one.
func valid(c host.Change) error {
	if c.Kind == host.ChangeFilter {
		return validFilter(c)
	}
	if err := validName(c.Interface); err != nil {
		return err
	}
	switch c.Kind {
	case host.ChangeLinkUp, host.ChangeForward:
		return nil
	case host.ChangeMTU:
		if c.MTU < 68 || c.MTU > 1<<20 || c.OldMTU < 0 || c.OldMTU > 1<<20 {
			return fmt.Errorf("MTU %d, from %d: out of range", c.MTU, c.OldMTU)
		}
		return nil
	case host.ChangeAddress:
		if !c.Prefix.IsValid() || !usable(c.Prefix.Addr()) {
			return fmt.Errorf("%s is no address for an interface", c.Prefix)
		}
		return nil
	case host.ChangeRoute:
		return validRoute(c)
	case host.ChangeUnmanage:
		if _, ok := managerNamed(c.Manager); !ok {
			return fmt.Errorf("no manager %q is known", c.Manager)
		}
		return nil
	}
	return fmt.Errorf("unknown change %q", string(c.Kind))
}

func validRoute(c host.Change) error {
	p := c.Prefix
	switch {
	case !p.IsValid() || p.Addr().Is4In6():
		return errors.New("a route needs a destination")
	case p.Bits() == 0:
		return errors.New("the default route is never touched")
	case p != p.Masked():
		return fmt.Errorf("%s has bits set after its prefix", p)
	case c.Gateway.IsValid() && (c.Gateway.Is4() != p.Addr().Is4() || !usable(c.Gateway)):
		return fmt.Errorf("gateway %s does not fit %s", c.Gateway, p)
	case c.Source.IsValid() && (c.Source.Is4() != p.Addr().Is4() || !usable(c.Source)):
		return fmt.Errorf("source %s does not fit %s", c.Source, p)
	case c.Metric < 0:
		return fmt.Errorf("metric %d is negative", c.Metric)
	}
	return nil
}

// usable reports whether a can be a host's address. One without a zone: the
// interface says more.
func usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.Is4In6() && a.Zone() == ""
}

func validFilter(c host.Change) error {
	for _, a := range c.Addresses {
		if !usable(a) {
			return fmt.Errorf("%s is no address to filter", a)
		}
	}
	for _, i := range slices.Concat(c.Interfaces, c.Forwarders) {
		if err := validName(i); err != nil {
			return err
		}
	}
	return nil
}
