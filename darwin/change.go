package darwin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// validName returns an error unless name can be an interface's on macOS: letters
// and digits.
func validName(name string) error {
	ok := name != "" && len(name) <= 15
	for _, r := range name {
		ok = ok && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9')
	}
	if !ok {
		return fmt.Errorf("%q is no name of an interface", name)
	}
	return nil
}

// valid returns an error unless c is complete. A change comes from a process
// with fewer rights than this one.
func valid(c host.Change) error {
	if c.Kind == host.ChangeFilter {
		for _, a := range c.Addresses {
			if !usable(a) {
				return fmt.Errorf("%s is no address to filter", a)
			}
		}
		for _, i := range c.Interfaces {
			if err := validName(i); err != nil {
				return err
			}
		}
		if len(c.Forwarders) > 0 {
			return fault.New(fault.Unsupported, c.String(), errors.New("macOS forwards by one switch for all interfaces"), "let a Linux node forward")
		}
		return nil
	}
	if err := validName(c.Interface); err != nil {
		return err
	}
	switch c.Kind {
	case host.ChangeLinkUp:
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
	case host.ChangeForward:
		return fault.New(fault.Unsupported, c.String(), errors.New("on macOS that is one switch for all interfaces"), "let a Linux node forward")
	case host.ChangeUnmanage:
		return fault.New(fault.Unsupported, c.String(), errors.New("macOS has no manager that could be told so"), "")
	}
	return fmt.Errorf("unknown change %q", string(c.Kind))
}

func validRoute(c host.Change) error {
	p := c.Prefix
	switch {
	case !p.IsValid() || p.Addr().Is4In6() || p != p.Masked():
		return fmt.Errorf("%s is no destination", p)
	case p.Bits() == 0:
		return errors.New("the default route is never touched")
	case c.Gateway.IsValid() && (c.Gateway.Is4() != p.Addr().Is4() || !usable(c.Gateway)):
		return fmt.Errorf("gateway %s does not fit %s", c.Gateway, p)
	case c.Source.IsValid() && (c.Source.Is4() != p.Addr().Is4() || !usable(c.Source)):
		return fmt.Errorf("source %s does not fit %s", c.Source, p)
	}
	return nil
}

func usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.Is4In6() && a.Zone() == ""
}

// command is a program and its arguments.
type command []string

// String returns the command as a shell reads it. Only the rules of the packet
// filter hold what needs quoting, and they hold no quotes of that kind.
func (c command) String() string {
	words := make([]string, len(c))
	for i, w := range c {
		if words[i] = w; strings.ContainsAny(w, " \t\n|<>{}$\"!*") {
			words[i] = "'" + w + "'"
		}
	}
	return strings.Join(words, " ")
}

// doing returns the command that makes a change of any kind but the filter.
func doing(c host.Change) command {
	switch c.Kind {
	case host.ChangeLinkUp:
		return command{"ifconfig", c.Interface, "up"}
	case host.ChangeMTU:
		return command{"ifconfig", c.Interface, "mtu", strconv.Itoa(c.MTU)}
	case host.ChangeAddress:
		if c.Prefix.Addr().Is6() {
			return command{"ifconfig", c.Interface, "inet6", c.Prefix.Addr().String(), "prefixlen", strconv.Itoa(c.Prefix.Bits()), "alias"}
		}
		mask := net.IP(net.CIDRMask(c.Prefix.Bits(), 32)).String()
		return command{"ifconfig", c.Interface, "inet", c.Prefix.Addr().String(), "netmask", mask, "alias"}
	case host.ChangeRoute:
		return routeCommand("add", c)
	}
	return nil
}

// undoing returns the command that undoes it.
func undoing(c host.Change) command {
	switch c.Kind {
	case host.ChangeLinkUp:
		return command{"ifconfig", c.Interface, "down"}
	case host.ChangeMTU:
		return command{"ifconfig", c.Interface, "mtu", strconv.Itoa(c.OldMTU)}
	case host.ChangeAddress:
		return command{"ifconfig", c.Interface, family(c.Prefix.Addr()), c.Prefix.Addr().String(), "-alias"}
	case host.ChangeRoute:
		return routeCommand("delete", c)
	}
	return nil
}

func family(a netip.Addr) string {
	if a.Is6() {
		return "inet6"
	}
	return "inet"
}

// routeCommand adds or deletes a route (route(8)). There are no metrics on
// macOS: it keeps one route for a destination.
func routeCommand(verb string, c host.Change) command {
	r := command{"route", "-n", verb, "-" + family(c.Prefix.Addr()), "-net", c.Prefix.String()}
	if c.Gateway.IsValid() {
		r = append(r, c.Gateway.String())
	} else {
		r = append(r, "-interface", c.Interface)
	}
	if verb == "add" && c.Source.IsValid() {
		r = append(r, "-ifa", c.Source.String())
	}
	return r
}

// Commands implements host.Host.
func (m *mac) Commands(c host.Change) []string {
	if valid(c) != nil {
		return nil
	}
	if c.Kind == host.ChangeFilter {
		return filterCommands(c)
	}
	return []string{doing(c).String()}
}

// Apply implements host.Host. An address that is there already, whoever made
// it, is left as it is.
func (m *mac) Apply(ctx context.Context, c host.Change) error {
	return m.carryOut(ctx, c, c.String(), func() error {
		switch c.Kind {
		case host.ChangeFilter:
			return m.setFilter(ctx, c)
		case host.ChangeRoute:
			return m.addRoute(ctx, c)
		}
		i, err := m.find(ctx, c.Interface)
		if err != nil {
			return err
		}
		if done(i, c) {
			return nil
		}
		if _, err := m.run.Run(ctx, doing(c)[0], doing(c)[1:]...); err != nil {
			return err
		}
		return m.verify(ctx, c)
	})
}

// Revert implements host.Host. macOS marks no addresses and routes: one that
// somebody else made just like ours is removed too.
func (m *mac) Revert(ctx context.Context, c host.Change) error {
	return m.carryOut(ctx, c, "undo: "+c.String(), func() error {
		switch c.Kind {
		case host.ChangeFilter:
			return m.removeFilter(ctx)
		case host.ChangeRoute:
			return m.removeRoute(ctx, c)
		}
		i, err := m.find(ctx, c.Interface)
		if errors.Is(err, host.ErrNoInterface) || err == nil && !done(i, c) {
			return nil
		}
		if err != nil {
			return err
		}
		if c.Kind == host.ChangeLinkUp && c.WasUp || c.Kind == host.ChangeMTU && c.OldMTU == 0 {
			return nil
		}
		_, err = m.run.Run(ctx, undoing(c)[0], undoing(c)[1:]...)
		return err
	})
}

func (m *mac) carryOut(ctx context.Context, c host.Change, what string, do func() error) error {
	if err := valid(c); err != nil {
		if f := fault.As(err); f != nil {
			return f
		}
		return fault.New(fault.Usage, what, err, "")
	}
	m.changing.Lock()
	defer m.changing.Unlock()
	err := do()
	switch {
	case err == nil:
		return nil
	case fault.As(err) != nil:
		return err
	case denied(err):
		return fault.New(fault.NoPermission, what, fmt.Errorf("%w: %w", host.ErrPermission, err),
			"run the agent as root (`sudo tbcluster up`), or run as root: "+strings.Join(m.Commands(c), "; "))
	}
	return fault.New(fault.Partial, what, err, "")
}

// denied reports whether a program said that it may not.
func denied(err error) bool {
	for _, words := range []string{"peration not permitted", "ermission denied", "must be root"} {
		if strings.Contains(err.Error(), words) {
			return true
		}
	}
	return false
}

// done reports whether an interface is as c would have it.
func done(i host.Interface, c host.Change) bool {
	switch c.Kind {
	case host.ChangeLinkUp:
		return i.Up
	case host.ChangeMTU:
		return i.MTU == c.MTU
	case host.ChangeAddress:
		for _, p := range i.Addresses {
			if p == c.Prefix {
				return true
			}
		}
	}
	return false
}

// find returns an interface, or an error that wraps host.ErrNoInterface.
func (m *mac) find(ctx context.Context, name string) (host.Interface, error) {
	b, err := m.run.Run(ctx, "ifconfig", "-a")
	if err != nil {
		return host.Interface{}, err
	}
	if i, ok := (host.Network{Interfaces: parseIfconfig(string(b))}).Interface(name); ok {
		return i, nil
	}
	return host.Interface{}, fmt.Errorf("%s: %w", name, host.ErrNoInterface)
}

// verify looks whether what a command should have done is done, and for the
// address of a link, whether its other end is reached through it: macOS may
// keep a route of its own that leads elsewhere.
func (m *mac) verify(ctx context.Context, c host.Change) error {
	i, err := m.find(ctx, c.Interface)
	if err != nil {
		return err
	}
	if !done(i, c) {
		return fmt.Errorf("`%s` changed nothing", doing(c))
	}
	peer, ok := otherEnd(c)
	if !ok {
		return nil
	}
	way, err := RouteTo(ctx, m.run, peer)
	if err == nil && way.Interface != c.Interface {
		err = fmt.Errorf("the route to the other end, %s, leads to %s instead of %s", peer, way.Interface, c.Interface)
	}
	if err != nil {
		_, undone := m.run.Run(ctx, undoing(c)[0], undoing(c)[1:]...)
		return errors.Join(err, undone)
	}
	return nil
}

// otherEnd returns the other address of a link's /30.
func otherEnd(c host.Change) (netip.Addr, bool) {
	if c.Kind != host.ChangeAddress || !c.Prefix.Addr().Is4() || c.Prefix.Bits() != 30 {
		return netip.Addr{}, false
	}
	first := c.Prefix.Masked().Addr().Next()
	if c.Prefix.Addr() == first {
		return first.Next(), true
	}
	return first, true
}

// leads reports whether way is the route that c makes.
func leads(way Way, c host.Change) bool {
	return way.Destination == c.Prefix && way.Interface == c.Interface && way.Gateway == c.Gateway
}

func (m *mac) addRoute(ctx context.Context, c host.Change) error {
	if _, err := m.find(ctx, c.Interface); err != nil {
		return err
	}
	way, err := RouteTo(ctx, m.run, c.Prefix.Addr())
	if err != nil && !errors.Is(err, ErrNoRoute) {
		return err
	}
	if err == nil && way.Destination == c.Prefix {
		if leads(way, c) {
			return nil
		}
		return fmt.Errorf("another route to %s is there, through %s", c.Prefix, way.Interface)
	}
	out, err := m.run.Run(ctx, doing(c)[0], doing(c)[1:]...)
	if err != nil {
		return err
	}
	// route(8) ends with status 0 when the kernel refused.
	if way, err = RouteTo(ctx, m.run, c.Prefix.Addr()); err != nil {
		return err
	}
	if !leads(way, c) {
		return fmt.Errorf("`%s` made no route: %s", doing(c), strings.TrimSpace(string(out)))
	}
	return nil
}

func (m *mac) removeRoute(ctx context.Context, c host.Change) error {
	way, err := RouteTo(ctx, m.run, c.Prefix.Addr())
	if errors.Is(err, ErrNoRoute) || err == nil && !leads(way, c) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = m.run.Run(ctx, undoing(c)[0], undoing(c)[1:]...)
	return err
}
