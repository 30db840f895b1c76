package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// action carries out and undoes one kind of change.
type action struct {
	apply, revert func(*machine, context.Context, host.Change) error
}

var actions = map[host.ChangeKind]action{
	host.ChangeLinkUp:   {(*machine).linkUp, (*machine).linkDown},
	host.ChangeMTU:      {(*machine).setMTU, (*machine).resetMTU},
	host.ChangeAddress:  {(*machine).addAddress, (*machine).removeAddress},
	host.ChangeRoute:    {(*machine).addRoute, (*machine).removeRoute},
	host.ChangeFilter:   {(*machine).setFilter, (*machine).removeFilter},
	host.ChangeForward:  {(*machine).forward, (*machine).forwardNoMore},
	host.ChangeUnmanage: {(*machine).unmanage, (*machine).manage},
}

// Apply implements host.Host.
func (m *machine) Apply(ctx context.Context, c host.Change) error {
	return m.carryOut(ctx, c, c.String(), func(a action) error { return a.apply(m, ctx, c) })
}

// Revert implements host.Host. It undoes only what Apply made: a route or
// address that somebody else made, an MTU that was changed since and an
// interface that was up before stay, and so does everything of an interface
// that was made anew since under the same name.
func (m *machine) Revert(ctx context.Context, c host.Change) error {
	if c.Index != 0 && c.Kind != host.ChangeUnmanage && valid(c) == nil {
		l, err := find(c.Interface)
		if err == nil && l.Attrs().Index != c.Index || errors.Is(err, host.ErrNoInterface) {
			return nil
		}
	}
	return m.carryOut(ctx, c, "undo: "+c.String(), func(a action) error { return a.revert(m, ctx, c) })
}

func (m *machine) carryOut(ctx context.Context, c host.Change, what string, do func(action) error) error {
	if err := valid(c); err != nil {
		return fault.New(fault.Usage, what, err, "")
	}
	if err := ctx.Err(); err != nil {
		return fault.New(fault.Interrupted, what, err, "")
	}
	m.changing.Lock()
	defer m.changing.Unlock()
	return explain(c, what, do(actions[c.Kind]))
}

// explain makes a Fault of what the kernel said.
func explain(c host.Change, what string, err error) error {
	denied := "run the agent as root (`sudo tbcluster up`), or run as root: " + strings.Join(commands(c), "; ")
	switch {
	case err == nil:
		return nil
	case fault.As(err) != nil:
		return err
	case errors.Is(err, unix.EPERM), errors.Is(err, fs.ErrPermission):
		return fault.New(fault.NoPermission, what, fmt.Errorf("%w: %w", host.ErrPermission, err), denied)
	case errors.Is(err, host.ErrNoInterface):
		return fault.New(fault.Partial, what, err, "plug the cable in again")
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return fault.New(fault.Unsupported, what, err, "use a kernel with what it lacks: for the packet filter nf_tables with the family inet")
	}
	return fault.New(fault.Partial, what, err, "")
}

// find returns an interface, or an error that wraps host.ErrNoInterface.
func find(name string) (netlink.Link, error) {
	l, err := netlink.LinkByName(name)
	if err == nil {
		return l, nil
	}
	if errors.As(err, &netlink.LinkNotFoundError{}) || gone(err) {
		return nil, fmt.Errorf("%s: %w", name, host.ErrNoInterface)
	}
	return nil, fmt.Errorf("find interface %s: %w", name, err)
}

// gone reports whether err says that the interface went away.
func gone(err error) bool { return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) }

// noInterface makes err wrap host.ErrNoInterface where the interface went away.
func noInterface(name string, err error) error {
	if err != nil && gone(err) {
		return fmt.Errorf("%s: %w", name, host.ErrNoInterface)
	}
	return err
}

// lost makes nothing of err where the interface is gone, and with it what there
// was to undo.
func lost(err error) error {
	if errors.Is(err, host.ErrNoInterface) || err != nil && gone(err) {
		return nil
	}
	return err
}

func (m *machine) linkUp(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return err
	}
	if l.Attrs().RawFlags&unix.IFF_UP != 0 {
		return nil
	}
	return noInterface(c.Interface, netlink.LinkSetUp(l))
}

func (m *machine) linkDown(_ context.Context, c host.Change) error {
	if c.WasUp {
		return nil
	}
	l, err := find(c.Interface)
	if err != nil {
		return lost(err)
	}
	return lost(netlink.LinkSetDown(l))
}

func (m *machine) setMTU(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return err
	}
	if l.Attrs().MTU == c.MTU {
		return nil
	}
	return noInterface(c.Interface, netlink.LinkSetMTU(l, c.MTU))
}

func (m *machine) resetMTU(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return lost(err)
	}
	if c.OldMTU == 0 || l.Attrs().MTU != c.MTU {
		return nil
	}
	return lost(netlink.LinkSetMTU(l, c.OldMTU))
}

// ifaProto is IFA_PROTO of <linux/if_addr.h>: who made an address. Kernels
// before 5.18 ignore it.
const ifaProto = 11

// addAddress does not use package netlink's own: it knows no IFA_PROTO.
func (m *machine) addAddress(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return err
	}
	err = addressRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK, l.Attrs().Index, c.Prefix)
	if !errors.Is(err, unix.EEXIST) {
		return noInterface(c.Interface, err)
	}
	// The kernel says so for one with another prefix length too (IPv6).
	if _, ok, err := lookAddress(l.Attrs().Index, c.Prefix); ok || err != nil {
		return err
	}
	return fmt.Errorf("%s is on %s already, with another prefix length", c.Prefix.Addr(), c.Interface)
}

func (m *machine) removeAddress(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return lost(err)
	}
	ours, ok, err := lookAddress(l.Attrs().Index, c.Prefix)
	if err != nil || !ok || !ours {
		return lost(err)
	}
	err = addressRequest(unix.RTM_DELADDR, unix.NLM_F_ACK, l.Attrs().Index, c.Prefix)
	if errors.Is(err, unix.EADDRNOTAVAIL) {
		return nil
	}
	return lost(err)
}

func addressRequest(kind, flags, index int, p netip.Prefix) error {
	req := nl.NewNetlinkRequest(kind, flags)
	family := unix.AF_INET
	if p.Addr().Is6() {
		family = unix.AF_INET6
	}
	msg := nl.NewIfAddrmsg(family)
	msg.Index = uint32(index)
	msg.Prefixlen = uint8(p.Bits())
	switch {
	case p.Addr().IsLoopback():
		msg.Scope = unix.RT_SCOPE_HOST
	case p.Addr().IsLinkLocalUnicast() && p.Addr().Is6():
		msg.Scope = unix.RT_SCOPE_LINK
	}
	if p.Addr().Is6() {
		// Nobody else is on a cable: it is usable at once.
		msg.Flags = unix.IFA_F_NODAD
	}
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFA_LOCAL, p.Addr().AsSlice()))
	req.AddData(nl.NewRtAttr(unix.IFA_ADDRESS, p.Addr().AsSlice()))
	req.AddData(nl.NewRtAttr(ifaProto, []byte{routeProtocol}))
	if p.Addr().Is4() && p.Bits() < 31 {
		req.AddData(nl.NewRtAttr(unix.IFA_BROADCAST, broadcast(p)))
	}
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// broadcast is the last address of p.
func broadcast(p netip.Prefix) []byte {
	a := p.Addr().As4()
	last := binary.BigEndian.Uint32(a[:]) | ^uint32(0)>>p.Bits()
	return binary.BigEndian.AppendUint32(nil, last)
}

// lookAddress looks for p on an interface; ours is true if it bears our mark,
// or if this kernel has no marks.
func lookAddress(index int, p netip.Prefix) (ours, ok bool, err error) {
	marks, err := kernelMarksAddresses()
	if err != nil {
		return false, false, err
	}
	messages, err := dump("addresses", func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWADDR)
	})
	if err != nil {
		return false, false, err
	}
	for _, b := range messages {
		msg := nl.DeserializeIfAddrmsg(b)
		if int(msg.Index) != index || int(msg.Prefixlen) != p.Bits() {
			continue
		}
		attrs, err := nl.ParseRouteAttr(b[msg.Len():])
		if err != nil {
			return false, false, fmt.Errorf("list addresses: %w", err)
		}
		// IFA_LOCAL is there for IPv4 and for peers, IFA_ADDRESS else.
		var local, address netip.Addr
		proto := 0
		for _, a := range attrs {
			switch a.Attr.Type {
			case unix.IFA_LOCAL:
				local, _ = netip.AddrFromSlice(a.Value)
			case unix.IFA_ADDRESS:
				address, _ = netip.AddrFromSlice(a.Value)
			case ifaProto:
				if len(a.Value) > 0 {
					proto = int(a.Value[0])
				}
			}
		}
		if local == p.Addr() || !local.IsValid() && address == p.Addr() {
			return proto == routeProtocol || !marks, true, nil
		}
	}
	return false, false, nil
}

// kernelMarksAddresses reports whether the kernel is 5.18 or newer.
func kernelMarksAddresses() (bool, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return false, fmt.Errorf("kernel release: %w", err)
	}
	major, minor := parseRelease(unix.ByteSliceToString(uts.Release[:]))
	return major > 5 || major == 5 && minor >= 18, nil
}

// routeOf is c as package netlink has it.
func routeOf(c host.Change, index int) *netlink.Route {
	r := &netlink.Route{
		LinkIndex: index, Dst: ipNet(c.Prefix), Table: unix.RT_TABLE_MAIN,
		Protocol: routeProtocol, Priority: c.Metric, Scope: netlink.SCOPE_LINK,
	}
	if c.Prefix.Addr().Is6() {
		// IPv6 has no scopes of routes, and a metric always.
		r.Scope = netlink.SCOPE_UNIVERSE
		if r.Priority == 0 {
			r.Priority = 1024
		}
	}
	if c.Gateway.IsValid() {
		r.Gw, r.Scope = net.IP(c.Gateway.AsSlice()), netlink.SCOPE_UNIVERSE
	}
	if c.Source.IsValid() {
		r.Src = net.IP(c.Source.AsSlice())
	}
	return r
}

// lookRoutes returns the routes to want's destination, of its metric.
func lookRoutes(want *netlink.Route, family int) ([]netlink.Route, error) {
	return dump("routes", func() ([]netlink.Route, error) {
		all, err := netlink.RouteListFiltered(family, want, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		var same []netlink.Route
		for _, r := range all {
			if r.Priority == want.Priority {
				same = append(same, r)
			}
		}
		return same, err
	})
}

// sameWay reports whether two routes lead the same way.
func sameWay(a, b *netlink.Route) bool {
	return a.LinkIndex == b.LinkIndex && a.Gw.Equal(b.Gw) && (b.Src == nil || a.Src.Equal(b.Src))
}

func family(c host.Change) int {
	if c.Prefix.Addr().Is6() {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

// addRoute adds beside routes of ours and never beside one of somebody else
// that leads elsewhere: which of the two is used would be a matter of order.
func (m *machine) addRoute(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return err
	}
	r := routeOf(c, l.Attrs().Index)
	there, err := lookRoutes(r, family(c))
	if err != nil {
		return err
	}
	for i := range there {
		switch {
		case sameWay(&there[i], r):
			return nil
		case there[i].Protocol != routeProtocol:
			return fmt.Errorf("another route to %s is there, of protocol %s", c.Prefix, there[i].Protocol)
		}
	}
	err = netlink.RouteAppend(r)
	switch {
	case errors.Is(err, unix.EEXIST):
		return nil
	case errors.Is(err, unix.ENETDOWN):
		return fmt.Errorf("%s is down: %w", c.Interface, err)
	case errors.Is(err, unix.EINVAL) && c.Source.IsValid():
		return fmt.Errorf("the kernel refused it (is %s an address of this machine?): %w", c.Source, err)
	}
	return noInterface(c.Interface, err)
}

func (m *machine) removeRoute(_ context.Context, c host.Change) error {
	l, err := find(c.Interface)
	if err != nil {
		return lost(err)
	}
	r := routeOf(c, l.Attrs().Index)
	there, err := lookRoutes(r, family(c))
	if err != nil {
		return err
	}
	for i := range there {
		if there[i].Protocol != routeProtocol || !sameWay(&there[i], r) {
			continue
		}
		if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			return lost(err)
		}
	}
	return nil
}
