package linux

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/nstest"
)

// configuration is everything that a change could leave behind. Left out are
// times, and the local routes of IPv6 addresses, which the kernel makes in its
// own time.
func configuration(own *nstest.Namespace) string {
	text := own.Run("ip", "address") + own.Run("ip", "rule") + own.Run("ip", "route", "show", "table", "all") +
		own.Run("ip", "-6", "route", "show", "table", "all") + own.Run("nft", "list", "ruleset") + own.Run("ip", "-4", "netconf")
	return regexp.MustCompile(`(?m)(valid_lft|preferred_lft|expires) \S+|^local fd77:.*\n`).ReplaceAllString(text, "")
}

// cabled returns the machine in the tests' own namespace with a cable to a
// neighbour; the cable's own end is up and has settled.
func cabled(t *testing.T, name string) (own, neighbour *nstest.Namespace) {
	t.Helper()
	own, neighbour = nstest.Own(t), nstest.New(t)
	nstest.Cable(t, own, name, neighbour, "cable0")
	// The kernel makes link-local addresses in its own time, which would look
	// like something that a change left.
	own.Run("ip", "link", "set", name, "addrgenmode", "none")
	own.Run("ip", "-6", "address", "flush", "dev", name)
	t.Cleanup(func() {
		if strings.Contains(own.Run("ip", "link"), " "+name+"@") {
			own.Cut(name)
		}
	})
	return own, neighbour
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }

// kinds are changes of every kind on interface "cable", in an order in which
// they can be applied.
var kinds = []host.Change{
	{Kind: host.ChangeLinkUp, Interface: "cable"},
	{Kind: host.ChangeMTU, Interface: "cable", MTU: 9000, OldMTU: 1500},
	{Kind: host.ChangeAddress, Interface: "cable", Prefix: prefix("10.77.0.1/30")},
	{Kind: host.ChangeAddress, Interface: "cable", Prefix: prefix("fd77::1/64")},
	{Kind: host.ChangeAddress, Interface: "lo", Prefix: prefix("10.77.9.1/32")},
	{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("10.77.9.2/32"), Gateway: addr("10.77.0.2"), Source: addr("10.77.9.1"), Metric: 10},
	{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("10.77.9.3/32"), Metric: 10},
	{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("10.77.9.4/32"), Gateway: addr("10.77.0.2")},
	{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("fd77:9::/64"), Gateway: addr("fd77::2"), Metric: 5},
	{Kind: host.ChangeForward, Interface: "cable"},
	{Kind: host.ChangeFilter, Addresses: []netip.Addr{addr("10.77.0.1"), addr("10.77.9.1"), addr("fd77::1"), addr("10.77.0.1")}, Interfaces: []string{"cable", "cable1"}, Forwarders: []string{"cable"}},
}

func TestUndoingLeavesNothingBehind(t *testing.T) {
	own, _ := cabled(t, "cable")
	own.Run("ip", "link", "set", "cable", "down")
	h := New(Options{SysfsRoot: t.TempDir()})
	before := []string{configuration(own)}
	for _, c := range kinds {
		for range 2 { // once more changes nothing
			if err := h.Apply(t.Context(), c); err != nil {
				t.Fatalf("%s: %v", c, err)
			}
		}
		now := configuration(own)
		if now == before[len(before)-1] {
			t.Fatalf("%s changed nothing", c)
		}
		before = append(before, now)
	}
	for i := len(kinds) - 1; i >= 0; i-- {
		for range 2 {
			if err := h.Revert(t.Context(), kinds[i]); err != nil {
				t.Fatalf("undo: %s: %v", kinds[i], err)
			}
		}
		if now := configuration(own); now != before[i] {
			t.Errorf("undo: %s: before\n%s\nafter\n%s", kinds[i], before[i], now)
		}
	}
}

// The commands that people are told to type do what Apply does.
func TestCommandsDoTheSame(t *testing.T) {
	own, _ := cabled(t, "cable")
	own.Run("ip", "link", "set", "cable", "down")
	h := New(Options{SysfsRoot: t.TempDir()})
	// By hand nobody's mark is made, and iproute2 sets no broadcast address.
	unmarked := func() string {
		return regexp.MustCompile(` proto (116|0x74|boot)| brd 10\.77\.\S+|(?m)^broadcast .*\n`).ReplaceAllString(configuration(own), "")
	}
	for _, c := range kinds {
		if err := h.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	want := unmarked()
	for i := len(kinds) - 1; i >= 0; i-- {
		if err := h.Revert(t.Context(), kinds[i]); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		own.Run("nft", "delete", "table", "inet", tableName)
		own.Run("sysctl", "-w", "net.ipv4.conf.cable.forwarding=0")
		own.Run("ip", "address", "del", "10.77.9.1/32", "dev", "lo")
	})
	for _, c := range kinds {
		for _, line := range h.Commands(c) {
			own.Run("sh", "-c", strings.Replace(line, "ip address add fd77::1/64", "ip address add fd77::1/64 nodad", 1))
		}
	}
	if got := unmarked(); got != want {
		t.Errorf("by hand\n%s\nby Apply\n%s", got, want)
	}
}

func TestWhatOthersMadeIsLeftAlone(t *testing.T) {
	own, _ := cabled(t, "cable")
	h := New(Options{SysfsRoot: t.TempDir()})
	own.Run("ip", "address", "add", "10.77.0.1/30", "dev", "cable")
	own.Run("ip", "route", "add", "10.77.9.2/32", "via", "10.77.0.2", "dev", "cable", "metric", "10")
	own.Run("ip", "link", "set", "cable", "mtu", "2000")
	own.Run("nft", "add", "table", "inet", "theirs")
	before := configuration(own)
	for _, c := range []host.Change{
		{Kind: host.ChangeLinkUp, Interface: "cable", WasUp: true},
		{Kind: host.ChangeAddress, Interface: "cable", Prefix: prefix("10.77.0.1/30")},
		{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("10.77.9.2/32"), Gateway: addr("10.77.0.2"), Metric: 10},
	} {
		if err := h.Apply(t.Context(), c); err != nil {
			t.Errorf("%s: %v", c, err)
		}
		if err := h.Revert(t.Context(), c); err != nil {
			t.Errorf("undo: %s: %v", c, err)
		}
	}
	// Somebody changed it since.
	if err := h.Revert(t.Context(), host.Change{Kind: host.ChangeMTU, Interface: "cable", MTU: 9000, OldMTU: 1500}); err != nil {
		t.Error(err)
	}
	filter := host.Change{Kind: host.ChangeFilter, Addresses: []netip.Addr{addr("10.77.0.1")}}
	if err := errors.Join(h.Apply(t.Context(), filter), h.Revert(t.Context(), filter)); err != nil {
		t.Error(err)
	}
	if after := configuration(own); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	own.Run("nft", "delete", "table", "inet", "theirs")
}

// A route of somebody else to the same place that leads elsewhere is an error:
// which of the two would be used is a matter of order.
func TestARouteThatLeadsElsewhereIsAnError(t *testing.T) {
	own, _ := cabled(t, "cable")
	h := New(Options{SysfsRoot: t.TempDir()})
	own.Run("ip", "address", "add", "10.77.0.1/30", "dev", "cable")
	own.Run("ip", "route", "add", "10.77.9.2/32", "dev", "lo")
	before := configuration(own)
	c := host.Change{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("10.77.9.2/32"), Gateway: addr("10.77.0.2")}
	if err := h.Apply(t.Context(), c); err == nil || !strings.Contains(err.Error(), "another route to 10.77.9.2/32") {
		t.Errorf("got %v", err)
	}
	if err := h.Revert(t.Context(), c); err != nil {
		t.Error(err)
	}
	if after := configuration(own); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	own.Run("ip", "route", "del", "10.77.9.2/32", "dev", "lo")
}

// Two cables to one node: each has its route, and each is undone by itself.
func TestRoutesOverTwoCables(t *testing.T) {
	own, _ := cabled(t, "cable")
	cabled(t, "cable1")
	h := New(Options{SysfsRoot: t.TempDir()})
	own.Run("ip", "address", "add", "10.77.0.1/30", "dev", "cable")
	own.Run("ip", "address", "add", "10.77.0.5/30", "dev", "cable1")
	a := host.Change{Kind: host.ChangeRoute, Interface: "cable", Prefix: prefix("10.77.9.2/32"), Gateway: addr("10.77.0.2"), Metric: 7}
	b := host.Change{Kind: host.ChangeRoute, Interface: "cable1", Prefix: prefix("10.77.9.2/32"), Gateway: addr("10.77.0.6"), Metric: 7}
	for _, c := range []host.Change{a, b} {
		if err := h.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Revert(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if got := own.Run("ip", "route", "get", "10.77.9.2"); !strings.Contains(got, "via 10.77.0.6 dev cable1") {
		t.Errorf("with one route left: %s", got)
	}
}

func TestUndoingOnAnInterfaceThatIsGone(t *testing.T) {
	own, _ := cabled(t, "cable")
	h := New(Options{SysfsRoot: t.TempDir()})
	for _, c := range kinds {
		if err := h.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	own.Cut("cable")
	for i := len(kinds) - 1; i >= 0; i-- {
		if err := h.Revert(t.Context(), kinds[i]); err != nil {
			t.Errorf("undo: %s: %v", kinds[i], err)
		}
	}
	for _, c := range kinds {
		if c.Interface != "cable" {
			continue
		}
		if err := h.Apply(t.Context(), c); !errors.Is(err, host.ErrNoInterface) || fault.As(err) == nil {
			t.Errorf("%s: got %v", c, err)
		}
	}
}

// Without the right to change the network every change fails in a way that
// names the commands.
func TestWithoutTheRightToChange(t *testing.T) {
	cabled(t, "cable")
	run := t.TempDir()
	write(t, run, map[string]string{"NetworkManager/conf.d/other.conf": ""})
	if err := os.Chmod(filepath.Join(run, "NetworkManager/conf.d"), 0o555); err != nil {
		t.Fatal(err)
	}
	h := New(Options{SysfsRoot: t.TempDir(), RunRoot: run, ProcRoot: t.TempDir()})
	// Applied with the right, so that there is something to undo without.
	for _, c := range kinds {
		if err := h.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	changes := append([]host.Change{{Kind: host.ChangeUnmanage, Interface: "cable", Manager: "NetworkManager"}}, kinds...)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never given back: the thread ends without rights
		caps := [2]unix.CapUserData{}
		if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
			t.Error(err)
			return
		}
		check := func(what string, c host.Change, err error) {
			f := fault.As(err)
			if !errors.Is(err, host.ErrPermission) || f == nil || f.Reason != fault.NoPermission {
				t.Errorf("%s %s: got %v", what, c, err)
				return
			}
			for _, line := range h.Commands(c) {
				if !strings.Contains(f.Fix, line) {
					t.Errorf("%s: the fix %q has no %q", c, f.Fix, line)
				}
			}
		}
		for _, c := range changes {
			if c.Kind != host.ChangeUnmanage {
				check("undo", c, h.Revert(t.Context(), c))
			}
		}
		for _, c := range changes {
			switch c.Kind { // things that are not there yet
			case host.ChangeLinkUp:
				continue // it is up
			case host.ChangeMTU:
				c.MTU = 4000
			case host.ChangeAddress:
				c.Prefix = netip.PrefixFrom(c.Prefix.Addr().Next().Next(), c.Prefix.Bits())
			case host.ChangeRoute:
				c.Metric += 50
			}
			check("do", c, h.Apply(t.Context(), c))
		}
	}()
	<-done
	for i := len(kinds) - 1; i >= 0; i-- {
		if err := h.Revert(t.Context(), kinds[i]); err != nil {
			t.Error(err)
		}
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	h := New(Options{SysfsRoot: t.TempDir()})
	for _, c := range []host.Change{
		{},
		{Kind: "reboot", Interface: "lo"},
		{Kind: host.ChangeLinkUp},
		{Kind: host.ChangeLinkUp, Interface: "a;reboot"},
		{Kind: host.ChangeLinkUp, Interface: "-all"},
		{Kind: host.ChangeLinkUp, Interface: "sixteen-letters."},
		{Kind: host.ChangeMTU, Interface: "lo", MTU: 0},
		{Kind: host.ChangeAddress, Interface: "lo"},
		{Kind: host.ChangeAddress, Interface: "lo", Prefix: prefix("0.0.0.0/0")},
		{Kind: host.ChangeAddress, Interface: "lo", Prefix: prefix("224.0.0.1/32")},
		{Kind: host.ChangeRoute, Interface: "lo", Prefix: prefix("0.0.0.0/0")},
		{Kind: host.ChangeRoute, Interface: "lo", Prefix: prefix("10.0.0.1/8")},
		{Kind: host.ChangeRoute, Interface: "lo", Prefix: prefix("10.0.0.0/8"), Gateway: addr("fe80::1")},
		{Kind: host.ChangeRoute, Interface: "lo", Prefix: prefix("10.0.0.0/8"), Source: addr("::")},
		{Kind: host.ChangeRoute, Interface: "lo", Prefix: prefix("10.0.0.0/8"), Metric: -1},
		{Kind: host.ChangeForward, Interface: "a b"},
		{Kind: host.ChangeFilter, Forwarders: []string{"*"}},
		{Kind: host.ChangeFilter, Addresses: []netip.Addr{{}}},
		{Kind: host.ChangeFilter, Interfaces: []string{`x" drop`}},
		{Kind: host.ChangeUnmanage, Interface: "../../etc/x", Manager: "NetworkManager"},
		{Kind: host.ChangeUnmanage, Interface: "eth*", Manager: "NetworkManager"},
		{Kind: host.ChangeUnmanage, Interface: "eth0", Manager: "connman"},
	} {
		if err := h.Apply(t.Context(), c); !fault.Is(err, fault.Usage) {
			t.Errorf("Apply %+v: got %v", c, err)
		}
		if err := h.Revert(t.Context(), c); !fault.Is(err, fault.Usage) {
			t.Errorf("Revert %+v: got %v", c, err)
		}
		if lines := h.Commands(c); lines != nil {
			t.Errorf("Commands %+v: got %q", c, lines)
		}
	}
}

func FuzzChange(f *testing.F) {
	for _, c := range kinds {
		f.Add(string(c.Kind), c.Interface, c.Prefix.String(), c.Gateway.String(), "NetworkManager", c.MTU)
	}
	f.Add("unmanage", "eth0$(x)", "", "", "systemd-networkd", 0)
	f.Add("address", "a'b", "fe80::1%a'/64", "fe80::1%b", "", -1)
	f.Fuzz(func(t *testing.T, kind, iface, pre, gateway, manager string, mtu int) {
		p, _ := netip.ParsePrefix(pre)
		g, _ := netip.ParseAddr(gateway)
		c := host.Change{Kind: host.ChangeKind(kind), Interface: iface, Prefix: p, Gateway: g, Source: g, Manager: manager, MTU: mtu,
			Addresses: []netip.Addr{g}, Interfaces: []string{iface}}
		for _, line := range commands(c) {
			// Outside of what we quote ourselves, nothing that a shell acts on.
			bare := regexp.MustCompile(`'[^']*'`).ReplaceAllString(line, "")
			if strings.ContainsAny(strings.Replace(bare, " > /run/", " ", 1), "'\"`$;&|<>()*?[]!\n\\") {
				t.Errorf("%+v makes %q", c, line)
			}
		}
	})
}
