package agent

import (
	"net/netip"
	"testing"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/transfer"
)

func TestTheWayOverTheLANNamesItsInterfaces(t *testing.T) {
	node := func(interfaces ...host.Interface) *peerv1.NodeSection {
		s := &peerv1.NodeSection{}
		s.LanAddresses, s.LanInterfaces = lanPlaces(host.Network{Interfaces: interfaces})
		return s
	}
	at := func(name string, addresses ...string) host.Interface {
		i := host.Interface{Name: name, Up: true}
		for _, a := range addresses {
			i.Addresses = append(i.Addresses, netip.MustParsePrefix(a))
		}
		return i
	}
	cable, lo := at("thunderbolt0", "10.77.1.1/30"), at("lo", "127.0.0.1/8")
	cable.Cable, lo.Loopback = true, true
	src := node(lo, cable, at("wlan0", "fe80::1/64", "2001:db8::1/64"), at("eth0", "192.0.2.1/24"))
	dst := node(at("enp3s0", "fe80::2/64", "192.0.2.2/24"))
	p, ok := lanPath(src, dst)
	want := transfer.Path{SrcInterface: "eth0", SrcAddr: netip.MustParseAddr("192.0.2.1"), DstInterface: "enp3s0", DstAddr: netip.MustParseAddr("192.0.2.2"),
		Transport: "tcp", Kind: transfer.LAN}
	if !ok || p != want {
		t.Errorf("%+v, %v; want %+v", p, ok, want)
	}
	src.LanInterfaces = nil // an agent that does not say
	want.SrcInterface = ""
	if p, ok := lanPath(src, dst); !ok || p != want {
		t.Errorf("%+v, %v; want %+v", p, ok, want)
	}
	if p, ok := lanPath(node(cable), dst); ok {
		t.Errorf("%+v without a LAN", p)
	}
}

func TestATransferShowsTheKindOfEachWay(t *testing.T) {
	v := transferView(&v1.Transfer{}, transfer.Progress{Links: []transfer.LinkProgress{
		{LinkID: "l-1", Interface: "thunderbolt0", Kind: transfer.Cable}, {Interface: "eth0", Kind: transfer.LAN}, {Kind: transfer.Loopback},
	}})
	for i, want := range []string{"cable", "lan", "loopback"} {
		if got := v.Links[i].Kind; got != want {
			t.Errorf("way %d is of kind %q, want %q", i, got, want)
		}
	}
}
