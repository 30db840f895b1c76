package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"tbcluster/host"
)

// dumpTries is how often a list is asked for again that changed while the
// kernel wrote it.
const dumpTries = 8

// dump asks for a list until it is whole.
func dump[T any](what string, list func() ([]T, error)) ([]T, error) {
	for try := 1; ; try++ {
		all, err := list()
		switch {
		case err == nil:
			return all, nil
		case errors.Is(err, netlink.ErrDumpInterrupted) && try < dumpTries:
		default:
			return nil, fmt.Errorf("list %s: %w", what, err)
		}
	}
}

// link is a network interface with what package netlink does not read.
type link struct {
	*netlink.LinkAttrs
	kind   string
	maxMTU int
}

// links lists the interfaces of this network namespace.
func links() ([]link, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return nil, err
	}
	all := make([]link, 0, len(messages))
	for _, m := range messages {
		l, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, err
		}
		attrs, err := nl.ParseRouteAttr(m[unix.SizeofIfInfomsg:])
		if err != nil {
			return nil, err
		}
		one := link{LinkAttrs: l.Attrs(), kind: l.Type()}
		for _, a := range attrs {
			if a.Attr.Type == unix.IFLA_MAX_MTU && len(a.Value) == 4 {
				one.maxMTU = maxMTU(binary.NativeEndian.Uint32(a.Value))
			}
		}
		all = append(all, one)
	}
	return all, nil
}

// maxMTU is what the kernel says, where it says something: drivers without a
// limit have 0 or the largest number.
func maxMTU(v uint32) int {
	if v > 1<<30 {
		return 0
	}
	return int(v)
}

// Network implements host.Host.
func (m *machine) Network(context.Context) (host.Network, error) {
	all, err := dump("network interfaces", links)
	if err != nil {
		return host.Network{}, err
	}
	addresses, err := dump("addresses", func() ([]netlink.Addr, error) {
		return netlink.AddrList(nil, netlink.FAMILY_ALL)
	})
	if err != nil {
		return host.Network{}, err
	}
	cables, err := tree{m.sysfs}.interfaces()
	if err != nil {
		return host.Network{}, err
	}
	byIndex := make(map[int]link, len(all))
	for _, l := range all {
		byIndex[l.Index] = l
	}
	var n host.Network
	for _, l := range all {
		_, cable := cables[l.Name]
		i := interfaceOf(l)
		i.Cable = cable
		if cable {
			if i.Forwarding, err = m.forwards(i.Name); err != nil {
				return host.Network{}, fmt.Errorf("whether %s passes packets on: %w", i.Name, err)
			}
		}
		if master, ok := byIndex[l.MasterIndex]; ok && master.kind == "bridge" {
			i.Bridge = master.Name
		}
		if i.ManagedBy, err = m.seeker.managedBy(i.Name, i.Index); err != nil {
			return host.Network{}, fmt.Errorf("who manages %s: %w", i.Name, err)
		}
		for _, a := range addresses {
			if a.LinkIndex != l.Index {
				continue
			}
			if p, ok := prefixOf(a.IPNet); ok {
				i.Addresses = append(i.Addresses, p)
			}
		}
		n.Interfaces = append(n.Interfaces, i)
	}
	if n.Routes, err = routes(byIndex); err != nil {
		return host.Network{}, err
	}
	return n, nil
}

func interfaceOf(l link) host.Interface {
	i := host.Interface{
		Name: l.Name, Index: l.Index, MTU: l.MTU, MaxMTU: l.maxMTU, MAC: l.HardwareAddr.String(),
		Up:       l.RawFlags&unix.IFF_UP != 0,
		Carrier:  l.RawFlags&unix.IFF_LOWER_UP != 0,
		Loopback: l.RawFlags&unix.IFF_LOOPBACK != 0,
	}
	if s := l.Statistics; s != nil {
		i.RxBytes, i.TxBytes = s.RxBytes, s.TxBytes
		i.RxErrors, i.TxErrors = s.RxErrors, s.TxErrors
		i.RxDropped, i.TxDropped = s.RxDropped, s.TxDropped
	}
	return i
}

// routes lists the routes of all tables, those for broadcast and multicast left
// out: they lead to no host.
func routes(byIndex map[int]link) ([]host.Route, error) {
	all, err := dump("routes", func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, err
	}
	var out []host.Route
	for _, r := range all {
		switch r.Type {
		case unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST:
			continue
		}
		if r.Family != unix.AF_INET && r.Family != unix.AF_INET6 {
			continue
		}
		one := host.Route{Table: r.Table, Metric: r.Priority, DHCP: r.Protocol == unix.RTPROT_DHCP, Interface: byIndex[r.LinkIndex].nameOrNone()}
		one.Destination = destination(r)
		one.Source, _ = addrOf(r.Src)
		one.Gateway = gateway(r.Gw, r.Via)
		if len(r.MultiPath) == 0 {
			out = append(out, one)
			continue
		}
		for _, hop := range r.MultiPath {
			one.Interface = byIndex[hop.LinkIndex].nameOrNone()
			one.Gateway = gateway(hop.Gw, hop.Via)
			out = append(out, one)
		}
	}
	return out, nil
}

func (l link) nameOrNone() string {
	if l.LinkAttrs == nil {
		return "" // blackhole and its like
	}
	return l.Name
}

// gateway is the next hop, which can be of the other family (RTA_VIA).
func gateway(gw net.IP, via netlink.Destination) netip.Addr {
	if a, ok := addrOf(gw); ok {
		return a
	}
	if v, ok := via.(*netlink.Via); ok {
		a, _ := addrOf(v.Addr)
		return a
	}
	return netip.Addr{}
}

// destination is the destination of r; none is the default route.
func destination(r netlink.Route) netip.Prefix {
	if p, ok := prefixOf(r.Dst); ok {
		return p.Masked()
	}
	if r.Family == unix.AF_INET6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func addrOf(ip net.IP) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := addrOf(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits != a.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, ones), true
}

// ipNet is p as package netlink wants it, host bits kept.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
