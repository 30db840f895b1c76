package linux

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"tbcluster/host"
	"tbcluster/host/nstest"
)

// greet accepts connections at addr in ns and says hello on each.
func greet(t *testing.T, ns *nstest.Namespace, addr string) {
	t.Helper()
	var l net.Listener
	var err error
	ns.Do(func() { l, err = net.Listen("tcp", addr) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, "hello")
			c.Close()
		}
	}()
}

// reach dials from ns and returns an error unless it is greeted.
func reach(ctx context.Context, ns *nstest.Namespace, addr string) error {
	var c net.Conn
	var err error
	ns.Do(func() { c, err = (&net.Dialer{}).DialContext(ctx, "tcp", addr) })
	if err != nil {
		return err
	}
	defer c.Close()
	b := make([]byte, 5)
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	_, err = c.Read(b)
	return err
}

// mustReach fails the test unless it is greeted.
func mustReach(t *testing.T, what string, ns *nstest.Namespace, addr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := reach(ctx, ns, addr); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// dropped is how many packets our table has dropped.
func dropped(own *nstest.Namespace) (n int) {
	for _, m := range regexp.MustCompile(`counter packets (\d+)`).FindAllStringSubmatch(own.Run("nft", "list", "table", "inet", tableName), -1) {
		k, _ := strconv.Atoi(m[1])
		n += k
	}
	return n
}

// mustDrop dials until our table has dropped a packet of it.
func mustDrop(t *testing.T, what string, own, from *nstest.Namespace, addr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	before := dropped(own)
	result := make(chan error, 1)
	go func() { result <- reach(ctx, from, addr) }()
	for dropped(own) == before {
		select {
		case err := <-result:
			t.Errorf("%s: no packet dropped, but %v", what, err)
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
	cancel()
	if err := <-result; err == nil {
		t.Errorf("%s: it got through", what)
	}
}

// desk is a node with a cable to a neighbour, and a LAN host that has routes to
// the link addresses by hand.
func desk(t *testing.T) (own, neighbour, lan *nstest.Namespace) {
	own, neighbour = cabled(t, "cable")
	lan = nstest.New(t)
	nstest.Cable(t, own, "lan0", lan, "eth0")
	t.Cleanup(func() { own.Cut("lan0") })
	for _, end := range []struct {
		ns           *nstest.Namespace
		name, prefix string
	}{
		{own, "cable", "10.77.0.1/30"}, {own, "cable", "fd77::1/64"}, {own, "lan0", "192.0.2.1/24"}, {own, "lan0", "fd00::1/64"},
		{neighbour, "cable0", "10.77.0.2/30"}, {neighbour, "cable0", "fd77::2/64"},
		{lan, "eth0", "192.0.2.9/24"}, {lan, "eth0", "fd00::9/64"},
	} {
		end.ns.Address(end.name, end.prefix)
	}
	lan.Run("ip", "route", "add", "10.77.0.0/16", "via", "192.0.2.1")
	lan.Run("ip", "-6", "route", "add", "fd77::/64", "via", "fd00::1")
	neighbour.Run("ip", "route", "add", "192.0.2.0/24", "via", "10.77.0.1")
	greet(t, own, "10.77.0.1:7000")
	greet(t, own, "[fd77::1]:7000")
	greet(t, own, "192.0.2.1:7000")
	return own, neighbour, lan
}

func TestALANHostWithAHandMadeRouteReachesNothing(t *testing.T) {
	own, neighbour, lan := desk(t)
	h := New(Options{SysfsRoot: t.TempDir()})
	mustReach(t, "without the filter the LAN host gets through (or this test shows nothing)", lan, "10.77.0.1:7000")
	mustReach(t, "without the filter, IPv6", lan, "[fd77::1]:7000")

	filter := host.Change{
		Kind: host.ChangeFilter, Interfaces: []string{"cable"},
		Addresses: []netip.Addr{addr("10.77.0.1"), addr("10.77.0.2"), addr("fd77::1")},
	}
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Revert(context.Background(), filter); err != nil {
			t.Error(err)
		}
		mustReach(t, "after undoing", lan, "10.77.0.1:7000")
	})
	mustDrop(t, "from the LAN", own, lan, "10.77.0.1:7000")
	mustDrop(t, "from the LAN, IPv6", own, lan, "[fd77::1]:7000")
	mustReach(t, "over the cable", neighbour, "10.77.0.1:7000")
	mustReach(t, "over the cable, IPv6", neighbour, "[fd77::1]:7000")
	mustReach(t, "from the node itself", own, "10.77.0.1:7000")
	mustReach(t, "what is none of ours, from the LAN", lan, "192.0.2.1:7000")
}

// lacks fails the test unless what is said of the filter has the words, or
// nothing is said where there are none.
func lacks(t *testing.T, what string, h host.Host, filter host.Change, words string) {
	t.Helper()
	got, err := h.Lacks(t.Context(), filter)
	if err != nil || words == "" && got != "" || !strings.Contains(got, words) {
		t.Errorf("%s: %q, %v; want %q", what, got, err, words)
	}
}

func TestWhatSomebodyDidToTheFilterIsSeen(t *testing.T) {
	own, _, lan := desk(t)
	h := New(Options{SysfsRoot: t.TempDir()})
	filter := host.Change{
		Kind: host.ChangeFilter, Interfaces: []string{"cable", "thunderbolt7"}, Forwarders: []string{"cable"},
		Addresses: []netip.Addr{addr("10.77.0.1"), addr("10.77.0.2"), addr("fd77::1")},
	}
	for i := range 300 { // more than one message of elements
		filter.Addresses = append(filter.Addresses, netip.AddrFrom4([4]byte{10, 77, 9, byte(i)}), netip.AddrFrom4([4]byte{10, 77, 8, byte(i)}))
	}
	lacks(t, "before it is set", h, filter, "is not there")
	table := "inet " + tableName
	for _, x := range []struct{ does, words string }{
		{"flush ruleset", "is not there"},
		{"delete table " + table, "is not there"},
		{"add table " + table + " { flags dormant; }", "dormant"},
		{"flush chain " + table + " prerouting", "0 rules"},
		{"insert rule " + table + " prerouting accept", "5 rules"},
		{"flush chain " + table + " prerouting; add rule " + table + " prerouting accept; add rule " + table + " prerouting accept; " +
			"add rule " + table + " prerouting accept; add rule " + table + " prerouting accept", "rule 1 of the chain prerouting"},
		{"flush chain " + table + " forward; add rule " + table + " forward iifname @forwarders oifname @interfaces counter drop", "rule 1 of the chain forward"},
		{"delete element " + table + " addresses4 { 10.77.0.1 }", "addresses4"},
		{"add element " + table + " interfaces { \"lan0\" }", "interfaces"},
		{"flush chain " + table + " forward", "forward"},
	} {
		if err := h.Apply(t.Context(), filter); err != nil {
			t.Fatal(err)
		}
		lacks(t, "when it was set", h, filter, "")
		lacks(t, "once more", h, filter, "")
		own.Run("nft", "add", "table", "inet", "mine") // of somebody else
		lacks(t, "after another table", h, filter, "")
		lacks(t, "of another filter", h, host.Change{Kind: host.ChangeFilter, Addresses: filter.Addresses}, "interfaces")
		own.Run("nft", x.does)
		lacks(t, x.does, h, filter, x.words)
		lacks(t, x.does+", once more", h, filter, x.words)
	}
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	lacks(t, "set again", h, filter, "")
	mustDrop(t, "from the LAN", own, lan, "10.77.0.1:7000")
	lacks(t, "after it dropped something", h, filter, "")
	if err := h.Revert(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	own.Run("nft", "flush", "ruleset")
}

func TestWhatIsForwardedIsDroppedToo(t *testing.T) {
	own, neighbour, lan := desk(t)
	h := New(Options{SysfsRoot: t.TempDir()})
	greet(t, neighbour, "10.77.0.2:7000")
	own.Run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
	t.Cleanup(func() { own.Run("sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward") })
	mustReach(t, "without the filter (or this test shows nothing)", lan, "10.77.0.2:7000")
	filter := host.Change{Kind: host.ChangeFilter, Interfaces: []string{"cable"}, Addresses: []netip.Addr{addr("10.77.0.1"), addr("10.77.0.2")}}
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	mustDrop(t, "from the LAN to the neighbour", own, lan, "10.77.0.2:7000")
	if err := h.Revert(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
}

func TestTheFilterStaysRightWhenACableComesBack(t *testing.T) {
	own, _, lan := desk(t)
	h := New(Options{SysfsRoot: t.TempDir()})
	filter := host.Change{Kind: host.ChangeFilter, Interfaces: []string{"cable"}, Addresses: []netip.Addr{addr("10.77.0.1")}}
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	own.Cut("cable")
	other := nstest.New(t)
	nstest.Cable(t, own, "cable", other, "cable0")
	own.Address("cable", "10.77.0.1/30")
	other.Address("cable0", "10.77.0.2/30")
	mustReach(t, "over the cable that came back", other, "10.77.0.1:7000")
	mustDrop(t, "from the LAN", own, lan, "10.77.0.1:7000")

	// Applied again it replaces what was there: the cable is open no more.
	filter.Interfaces = nil
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	mustDrop(t, "over a cable that is none of ours any more", own, other, "10.77.0.1:7000")
	if err := h.Revert(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
}

// A cluster of 64 nodes has many addresses.
func TestAFilterOfManyAddresses(t *testing.T) {
	h := New(Options{SysfsRoot: t.TempDir()})
	filter := host.Change{Kind: host.ChangeFilter}
	a := addr("10.77.0.1")
	for i := range 4096 {
		filter.Addresses = append(filter.Addresses, a)
		a = a.Next()
		if i < 256 {
			filter.Interfaces = append(filter.Interfaces, fmt.Sprintf("thunderbolt%d", i))
		}
	}
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	listed := nstest.Own(t).Run("nft", "list", "table", "inet", tableName)
	if n := len(regexp.MustCompile(`10\.77\.\d+\.\d+`).FindAllString(listed, -1)); n != len(filter.Addresses) {
		t.Errorf("%d addresses in the table, want %d", n, len(filter.Addresses))
	}
	if err := h.Revert(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
}
