package lab

import (
	"errors"
	"fmt"
	"log"
	"net"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// lanInterface is the LAN interface of every node.
const lanInterface = "eth0"

// makeLAN makes the bridge, in the keeper's network namespace, which has no
// other interface: nothing leads out of the lab.
func (k *keeper) makeLAN() error {
	var err error
	if k.nl, err = netlink.NewHandle(); err != nil {
		return err
	}
	k.bridges = map[int]int{}
	_, err = k.bridge(0)
	return err
}

// bridge returns the index of the bridge of one side of the LAN, which is made
// if there is none. Side 0 is the whole LAN, until it falls into parts.
func (k *keeper) bridge(side int) (int, error) {
	if index, ok := k.bridges[side]; ok {
		return index, nil
	}
	// Without a querier on the LAN, snooping would let multicast die out.
	snooping := false
	attrs := netlink.NewLinkAttrs()
	attrs.Name = fmt.Sprintf("lan%d", side)
	bridge := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping}
	if err := k.nl.LinkAdd(bridge); err != nil {
		return 0, fmt.Errorf("make a bridge: %w", err)
	}
	link, err := k.nl.LinkByName(attrs.Name)
	if err != nil {
		return 0, err
	}
	k.bridges[side] = link.Attrs().Index
	return link.Attrs().Index, k.nl.LinkSetUp(link)
}

// setSide puts a node on one side of the LAN: those on other sides are not
// reached from there.
func (k *keeper) setSide(n *node, side int) error {
	if side < 0 || side >= MaxNodes {
		return fault.Newf(fault.Usage, fmt.Sprintf("choose 0 to %d", MaxNodes-1), "the LAN has no side %d", side)
	}
	n.side = side
	if n.boot == nil {
		return nil
	}
	bridge, err := k.bridge(side)
	if err == nil {
		var port netlink.Link
		if port, err = k.nl.LinkByName(n.lanPort()); err == nil {
			err = k.nl.LinkSetMasterByIndex(port, bridge)
		}
	}
	if err != nil {
		return failed("put "+n.name+" on another side of the LAN", err, "try again")
	}
	return nil
}

// lanPort is the name of a node's port at the bridge; names have 15 bytes.
func (n *node) lanPort() string { return "lan-" + n.name }

// joinLAN gives a node its loopback and its LAN interface.
func (k *keeper) joinLAN(n *node) error {
	lo, err := n.boot.nl.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := n.boot.nl.LinkSetUp(lo); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = n.lanPort()
	bridge, err := k.bridge(n.side)
	if err != nil {
		return err
	}
	attrs.MasterIndex = bridge
	mac := n.lanMAC()
	veth := netlink.NewVeth(attrs)
	veth.PeerName = lanInterface
	veth.PeerNamespace = netlink.NsFd(int(n.boot.ns))
	veth.PeerHardwareAddr = net.HardwareAddr(mac[:])
	if err := k.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("make a veth pair: %w", err)
	}
	eth, err := n.boot.nl.LinkByName(lanInterface)
	if err != nil {
		return err
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: n.lanAddress(), Mask: net.CIDRMask(lanPrefix.Bits(), 32)}}
	if err := n.boot.nl.AddrAdd(eth, addr); err != nil {
		return fmt.Errorf("give it an address: %w", err)
	}
	// The kernel would take a second to see whether somebody else has the
	// link-local address; on a desk that is long past when an agent starts.
	local := &netlink.Addr{IPNet: &net.IPNet{IP: linkLocal(mac), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD, Scope: int(netlink.SCOPE_LINK)}
	if err := n.boot.nl.AddrAdd(eth, local); err != nil {
		log.Printf("%s: no IPv6 on the LAN: %v", n.name, err) // a kernel without it
	}
	if err := n.boot.nl.LinkSetUp(eth); err != nil {
		return err
	}
	// A desk's default route would carry multicast; here nothing leads outside,
	// and a connection to there shall fail at once.
	multicast := &net.IPNet{IP: net.IPv4(224, 0, 0, 0), Mask: net.CIDRMask(4, 32)}
	if err := n.boot.nl.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: multicast, Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("route multicast: %w", err)
	}
	if err := k.setMulticast(n, n.multicast); err != nil {
		return err
	}
	return k.setLAN(n, !n.lanCut)
}

// multicastTable is what blocks multicast, in a node's own packet filter, for
// all of its interfaces.
const multicastTable = "lab_multicast"

// setMulticast blocks multicast on a node, or lets it through again. Only UDP is
// meant: without neighbour discovery there would be no IPv6.
func (k *keeper) setMulticast(n *node, how Multicast) error {
	if how != "" && how != MulticastLost && how != MulticastRefused {
		return fault.Newf(fault.Usage, "choose lost or refused", "multicast cannot be %q", how)
	}
	n.multicast = how
	if n.boot == nil {
		return nil
	}
	conn, err := nftables.New(nftables.WithNetNSFd(int(n.boot.ns)))
	if err != nil {
		return failed("change the packet filter of "+n.name, err, "use a kernel with nf_tables")
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: multicastTable}
	// Added first, so that deleting one that is not there is no error.
	conn.AddTable(table)
	conn.DelTable(table)
	if how != "" {
		conn.AddTable(table)
		hooks := []*nftables.ChainHook{nftables.ChainHookInput}
		if how == MulticastRefused {
			hooks = append(hooks, nftables.ChainHookOutput)
		}
		for i, hook := range hooks {
			chain := conn.AddChain(&nftables.Chain{
				Name: []string{"arriving", "leaving"}[i], Table: table, Type: nftables.ChainTypeFilter,
				Hooknum: hook, Priority: nftables.ChainPriorityRef(-1000),
			})
			dropMulticast(conn, table, chain)
		}
	}
	if err := conn.Flush(); err != nil {
		return failed("change the packet filter of "+n.name, err, "use a kernel with nf_tables")
	}
	return nil
}

// dropMulticast drops UDP to 224.0.0.0/4 and ff00::/8.
func dropMulticast(conn *nftables.Conn, table *nftables.Table, chain *nftables.Chain) {
	for _, f := range []struct{ family, offset, mask, value byte }{
		{unix.NFPROTO_IPV4, 16, 0xf0, 0xe0},
		{unix.NFPROTO_IPV6, 24, 0xff, 0xff},
	} {
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.family}},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: uint32(f.offset), Len: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{f.mask}, Xor: []byte{0}},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.value}},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
	}
}

// lanMAC is the hardware address of a node's LAN interface.
func (n *node) lanMAC() [6]byte { return [6]byte{0x02, 0x4c, 0x41, 0x4e, 0, byte(n.index)} }

// linkLocal is the IPv6 address that the kernel derives from a hardware address
// (RFC 4291, appendix A).
func linkLocal(mac [6]byte) net.IP {
	ip := net.ParseIP("fe80::")
	copy(ip[8:], []byte{mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
	return ip
}

// setLAN plugs a node into the LAN, or pulls its plug.
func (k *keeper) setLAN(n *node, plugged bool) error {
	n.lanCut = !plugged
	if n.boot == nil {
		return nil
	}
	port, err := k.nl.LinkByName(n.lanPort())
	if err == nil {
		if plugged {
			err = k.nl.LinkSetUp(port)
		} else {
			err = k.nl.LinkSetDown(port)
		}
	}
	if err != nil {
		return failed("change the LAN plug of "+n.name, err, "try again")
	}
	return nil
}

// leaveLAN removes the LAN interface of a node that went off. The kernel does
// so too, but some time later.
func (k *keeper) leaveLAN(n *node) error { return deleteLink(k.nl, n.lanPort()) }

// deleteLink deletes an interface; one that is gone is no error.
func deleteLink(nl *netlink.Handle, name string) error {
	link, err := nl.LinkByName(name)
	if err == nil {
		err = nl.LinkDel(link)
	}
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}
