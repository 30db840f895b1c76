package linux

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"tbcluster/host"
	"tbcluster/host/nstest"
)

func network(t *testing.T, h host.Host) host.Network {
	t.Helper()
	n, err := h.Network(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func mustInterface(t *testing.T, n host.Network, name string) host.Interface {
	t.Helper()
	i, ok := n.Interface(name)
	if !ok {
		t.Fatalf("no interface %s in %+v", name, n.Interfaces)
	}
	return i
}

func TestInterfacesAreSeenAsTheyAre(t *testing.T) {
	own, neighbour := cabled(t, "thunderbolt0")
	cabled(t, "lan0")
	s := newSysfs(t)
	s.peer("0-2", "peer")
	s.netdev("thunderbolt0", "0-2.0")
	h := New(Options{SysfsRoot: s.root})
	own.Run("ip", "link", "set", "thunderbolt0", "mtu", "4000", "address", "02:00:00:00:00:01")
	own.Run("ip", "link", "add", "br0", "type", "bridge")
	t.Cleanup(func() { own.Cut("br0") })
	own.Run("ip", "link", "set", "lan0", "master", "br0")
	own.Address("thunderbolt0", "10.77.0.1/30")
	own.Address("thunderbolt0", "fe80::1/64")

	n := network(t, h)
	i := mustInterface(t, n, "thunderbolt0")
	if !i.Up || !i.Carrier || !i.Cable || i.Loopback || i.MTU != 4000 || i.MaxMTU != 65535 || i.MAC != "02:00:00:00:00:01" || i.Bridge != "" || i.ManagedBy != "" {
		t.Errorf("the cable: %+v", i)
	}
	if want := []netip.Prefix{prefix("10.77.0.1/30"), prefix("fe80::1/64")}; !slices.Equal(i.Addresses, want) {
		t.Errorf("addresses %v, want %v", i.Addresses, want)
	}
	real, err := net.InterfaceByName("thunderbolt0")
	if err != nil || real.Index != i.Index {
		t.Errorf("index %d, want %+v, %v", i.Index, real, err)
	}
	if i := mustInterface(t, n, "lan0"); i.Cable || i.Bridge != "br0" {
		t.Errorf("a bridge's member: %+v", i)
	}
	if i := mustInterface(t, n, "lo"); !i.Loopback || !i.Up || i.Cable {
		t.Errorf("the loopback: %+v", i)
	}
	neighbour.Run("ip", "link", "set", "cable0", "down")
	if i := mustInterface(t, network(t, h), "thunderbolt0"); !i.Up || i.Carrier {
		t.Errorf("with the other end down: %+v", i)
	}
}

func TestCountersCount(t *testing.T) {
	own, neighbour := cabled(t, "cable")
	h := New(Options{SysfsRoot: t.TempDir()})
	own.Address("cable", "10.77.0.1/30")
	neighbour.Address("cable0", "10.77.0.2/30")
	before := mustInterface(t, network(t, h), "cable")
	c, err := net.Dial("udp4", "10.77.0.2:9")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const size = 1200
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	// The address had to be asked for, so an answer has come before it is out:
	// the neighbour refuses the datagram, which the next write tells.
	buf := make([]byte, 1)
	if _, err := c.Read(buf); err == nil {
		t.Fatal("somebody answered")
	}
	after := mustInterface(t, network(t, h), "cable")
	if after.TxBytes < before.TxBytes+size || after.RxBytes <= before.RxBytes {
		t.Errorf("sent %d bytes: before %+v, after %+v", size, before, after)
	}
}

func TestRoutesOfAllTables(t *testing.T) {
	own, _ := cabled(t, "cable")
	cabled(t, "cable1")
	h := New(Options{SysfsRoot: t.TempDir()})
	own.Run("ip", "address", "add", "10.77.0.1/30", "dev", "cable")
	own.Run("ip", "address", "add", "10.77.0.5/30", "dev", "cable1")
	own.Run("ip", "route", "add", "default", "via", "10.77.0.2", "metric", "50")
	own.Run("ip", "route", "add", "192.0.2.0/24", "dev", "cable1", "table", "1000", "src", "10.77.0.5")
	own.Run("ip", "route", "add", "blackhole", "198.51.100.0/24")
	own.Run("ip", "route", "add", "203.0.113.0/24", "nexthop", "via", "10.77.0.2", "nexthop", "via", "10.77.0.6")
	own.Run("ip", "route", "add", "203.0.114.0/24", "via", "inet6", "fe80::9", "dev", "cable")
	t.Cleanup(func() { own.Run("ip", "route", "del", "blackhole", "198.51.100.0/24") })
	got := network(t, h).Routes
	for _, want := range []host.Route{
		{Destination: prefix("0.0.0.0/0"), Gateway: addr("10.77.0.2"), Interface: "cable", Table: 254, Metric: 50},
		{Destination: prefix("10.77.0.0/30"), Source: addr("10.77.0.1"), Interface: "cable", Table: 254},
		{Destination: prefix("192.0.2.0/24"), Source: addr("10.77.0.5"), Interface: "cable1", Table: 1000},
		{Destination: prefix("198.51.100.0/24"), Table: 254},
		{Destination: prefix("203.0.113.0/24"), Gateway: addr("10.77.0.2"), Interface: "cable", Table: 254},
		{Destination: prefix("203.0.113.0/24"), Gateway: addr("10.77.0.6"), Interface: "cable1", Table: 254},
		{Destination: prefix("203.0.114.0/24"), Gateway: addr("fe80::9"), Interface: "cable", Table: 254},
		{Destination: prefix("10.77.0.1/32"), Source: addr("10.77.0.1"), Interface: "cable", Table: 255},
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %+v in\n%s", want, strings.ReplaceAll(own.Run("ip", "route", "show", "table", "all"), "\n", "\n\t"))
		}
	}
	for _, r := range got {
		if r.Destination.Addr() == addr("10.77.0.3") || r.Destination.Addr().IsMulticast() {
			t.Errorf("a route to no host: %+v", r)
		}
	}
}

// Interfaces come and go while they are listed.
func TestListingWhileInterfacesComeAndGo(t *testing.T) {
	own := nstest.Own(t)
	h := New(Options{SysfsRoot: t.TempDir()})
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				own.Run("ip", "link", "add", "comes", "type", "veth", "peer", "goes")
				own.Run("ip", "address", "add", "10.77.0.1/30", "dev", "comes")
				own.Run("ip", "link", "del", "comes")
			}
		}
	}()
	for range 200 {
		if _, err := h.Network(t.Context()); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	<-done
}
