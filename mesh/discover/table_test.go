package discover

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tbcluster/api/fault"
	"tbcluster/mesh/identity"
)

func newID(t testing.TB) identity.NodeID {
	t.Helper()
	k, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k.ID()
}

func newTable(t testing.TB, known ...identity.NodeID) *table {
	return &table{
		self: newID(t), nodes: map[identity.NodeID]*found{},
		known: func(id identity.NodeID) bool {
			for _, k := range known {
				if k == id {
					return true
				}
			}
			return false
		},
	}
}

func prefixes(ss ...string) (list []netip.Prefix) {
	for _, s := range ss {
		list = append(list, netip.MustParsePrefix(s))
	}
	return list
}

func addrs(ss ...string) (list []netip.Addr) {
	for _, s := range ss {
		list = append(list, netip.MustParseAddr(s))
	}
	return list
}

var t0 = time.Unix(1_000_000, 0)

func TestAddressesAreSpreadOverTheInterfaces(t *testing.T) {
	id := newID(t)
	tab := newTable(t)
	interfaces := []Interface{
		{Name: "lan0", Addresses: prefixes("192.168.7.2/24", "fe80::2/64")},
		{Name: "thunderbolt0", Cable: true, Addresses: prefixes("169.254.9.1/16", "fe80::2/64", "10.77.3.1/30")},
		{Name: "thunderbolt1", Cable: true, Addresses: prefixes("169.254.9.2/16", "fe80::3/64")},
		{Name: "vpn0", Addresses: prefixes("100.64.0.1/32")},
		{Name: "docker0", Addresses: prefixes("172.17.0.1/16")},
	}
	tab.heard(said{node: id, port: 7871, addrs: addrs("192.168.7.3", "fe80::9", "169.254.1.1", "10.77.3.2", "203.0.113.5", "172.17.0.1")}, t0)
	tab.met(id, netip.MustParseAddrPort("192.168.7.3:7871"), t0)
	tab.met(id, netip.MustParseAddrPort("192.168.7.9:7872"), t0)
	var got []string
	for _, a := range tab.candidates(interfaces, nil, t0)[0].Addresses {
		got = append(got, a.Interface+" "+a.Addr.String()+" "+string(a.Source))
	}
	want := []string{
		"thunderbolt0 10.77.3.2:7871 mdns",
		"thunderbolt0 169.254.1.1:7871 mdns",
		"thunderbolt1 169.254.1.1:7871 mdns",
		"thunderbolt0 [fe80::9%thunderbolt0]:7871 mdns",
		"thunderbolt1 [fe80::9%thunderbolt1]:7871 mdns",
		"lan0 192.168.7.3:7871 mdns",
		" 203.0.113.5:7871 mdns",
		"lan0 192.168.7.9:7872 memory",
		"lan0 [fe80::9%lan0]:7871 mdns",
	}
	// 169.254 counts as link-local: after what is routed, over each cable.
	if !reflect.DeepEqual(sorted(got), sorted(want)) {
		t.Fatalf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got[0] != want[0] || got[5] != want[5] {
		t.Fatalf("order\n%s", strings.Join(got, "\n"))
	}
}

func sorted(s []string) map[string]bool {
	m := map[string]bool{}
	for _, x := range s {
		m[x] = true
	}
	return m
}

// Who shows a code is found, whoever shouts: the number follows from the node's
// key.
func TestFloodOfForgeriesDisplacesNobodyWhoInvites(t *testing.T) {
	inviter := newID(t)
	tab := newTable(t)
	tab.invites = func(id identity.NodeID, number string) bool { return id == inviter && number == "4711" }
	tab.heard(said{node: inviter, port: 1, pair: "4711", addrs: addrs("192.0.2.1")}, t0)
	for i := range 2 * maxNodes {
		tab.heard(said{node: newID(t), port: 1, pair: "4711", addrs: addrs("192.0.2.3")}, t0.Add(time.Duration(i)*time.Millisecond))
	}
	if len(tab.nodes) > maxNodes || tab.nodes[inviter] == nil || tab.nodes[inviter].pair != "4711" {
		t.Fatalf("%d nodes, the inviting one is %+v", len(tab.nodes), tab.nodes[inviter])
	}
	for id, f := range tab.nodes {
		if id != inviter && f.pair != "" {
			t.Fatal("a forger is taken for who invites")
		}
	}
}

func TestFloodOfForgeriesDisplacesNoMember(t *testing.T) {
	member, met := newID(t), newID(t)
	tab := newTable(t, member, met)
	tab.heard(said{node: member, port: 1, addrs: addrs("192.0.2.1")}, t0)
	tab.met(met, netip.MustParseAddrPort("192.0.2.2:1"), t0)
	forged := make([]identity.NodeID, 2*maxNodes)
	for i := range forged {
		forged[i] = newID(t)
	}
	for round := range 3 {
		for i, id := range forged {
			tab.heard(said{node: id, port: 1, addrs: addrs("192.0.2.3")}, t0.Add(time.Duration(round*len(forged)+i)*time.Millisecond))
		}
	}
	if len(tab.nodes) > maxNodes {
		t.Fatalf("%d nodes", len(tab.nodes))
	}
	if tab.nodes[member] == nil || tab.nodes[met] == nil {
		t.Fatal("a member was displaced")
	}
	// A thousand addresses for one node: bounded, and what was met stays.
	for i := range 1000 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		tab.heard(said{node: met, port: 1, addrs: []netip.Addr{a}}, t0.Add(time.Hour))
	}
	f := tab.nodes[met]
	if len(f.heardAt) > maxAddresses || len(f.metAt) != 1 {
		t.Fatalf("%d heard, %d met", len(f.heardAt), len(f.metAt))
	}
	for i := range 100 {
		tab.met(met, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 1)}), 1), t0.Add(time.Duration(i)))
	}
	if len(f.metAt) > maxMemory {
		t.Fatalf("%d met", len(f.metAt))
	}
}

func TestWhatIsNotHeardAgainGoes(t *testing.T) {
	id := newID(t)
	tab := newTable(t)
	if !tab.heard(said{node: id, port: 1, pair: "4711", addrs: addrs("192.0.2.1")}, t0) {
		t.Fatal("a new node is no news")
	}
	if tab.heard(said{node: id, port: 1, pair: "4711", addrs: addrs("192.0.2.1")}, t0.Add(time.Second)) {
		t.Fatal("the same again is news")
	}
	if !tab.heard(said{node: id, port: 1, addrs: addrs("192.0.2.1")}, t0.Add(time.Second)) {
		t.Fatal("the end of a code is no news")
	}
	if !tab.heard(said{node: id, port: 1, instance: "again", addrs: addrs("192.0.2.1")}, t0.Add(time.Second)) {
		t.Fatal("another announcement is no news")
	}
	tab.heard(said{node: id, port: 2, addrs: addrs("192.0.2.1")}, t0.Add(2*time.Second))
	c := tab.candidates(nil, nil, t0)
	if len(c[0].Addresses) != 1 || c[0].Addresses[0].Addr.Port() != 2 {
		t.Fatalf("the old port is still there: %+v", c)
	}
	if tab.expire(t0.Add(35 * time.Second)); len(tab.nodes) != 1 {
		t.Fatal("gone too early")
	}
	if !tab.expire(t0.Add(38*time.Second)) || len(tab.nodes) != 0 {
		t.Fatal("still there")
	}
	tab.heard(said{node: id, port: 1, addrs: addrs("192.0.2.1")}, t0)
	tab.met(id, netip.MustParseAddrPort("192.0.2.1:1"), t0)
	if !tab.heard(said{node: id, bye: true}, t0) {
		t.Fatal("a goodbye is no news")
	}
	c = tab.candidates(nil, nil, t0)
	if len(c) != 1 || len(c[0].Addresses) != 1 || c[0].Addresses[0].Source != Memory {
		t.Fatalf("after a goodbye: %+v", c)
	}
	if tab.heard(said{node: tab.self, port: 1}, t0) {
		t.Fatal("this node found itself")
	}
}

func TestStaticPeers(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.1":          "192.0.2.1:7871",
		"192.0.2.1:9000":     "192.0.2.1:9000",
		"2001:db8::1":        "[2001:db8::1]:7871",
		"[2001:db8::1]:9000": "[2001:db8::1]:9000",
		"[fe80::1%lan0]:80":  "[fe80::1%lan0]:80",
	} {
		s, err := parseStatic(text)
		if err != nil || len(s.resolved()) != 1 || s.resolved()[0].String() != want {
			t.Errorf("parseStatic(%q) = %v, %v", text, s.resolved(), err)
		}
	}
	for _, text := range []string{"", "a b", "host:0", "host:x", "host:70000", "[::1", "http://x", ":80", strings.Repeat("a", 300)} {
		if _, err := parseStatic(text); !fault.Is(err, fault.ConfigInvalid) {
			t.Errorf("parseStatic(%q): %v", text, err)
		}
	}
	id := newID(t)
	f, err := New(Options{Self: newID(t), Dir: t.TempDir(), Static: []string{"192.0.2.1", "198.51.100.1:9"}})
	if err != nil {
		t.Fatal(err)
	}
	if c := f.Candidates(); len(c) != 2 || c[0].Node != "" || c[0].Addresses[0].Source != Static {
		t.Fatalf("candidates %+v", c)
	}
	f.Met(id, netip.MustParseAddrPort("192.0.2.1:7871"))
	if c := f.Candidates(); len(c) != 2 || c[1].Node != id || len(c[1].Addresses) != 1 {
		t.Fatalf("candidates after one was met %+v", c)
	}
}

func TestMemoryOutlivesARestart(t *testing.T) {
	dir, id, self := t.TempDir(), newID(t), newID(t)
	f, err := New(Options{Self: self, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	f.Met(id, netip.MustParseAddrPort("[fe80::1%lan0]:7871"))
	f.Met(id, netip.MustParseAddrPort("192.0.2.1:7871"))
	f.Met(self, netip.MustParseAddrPort("192.0.2.1:7871"))
	if err := f.save(); err != nil {
		t.Fatal(err)
	}
	again, err := New(Options{Self: self, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	again.interfaces = []Interface{{Name: "new0", Addresses: prefixes("fe80::7/64")}}
	c := again.Candidates()
	if len(c) != 1 || c[0].Node != id || len(c[0].Addresses) != 2 || c[0].Addresses[1].Interface != "new0" {
		t.Fatalf("candidates %+v", c)
	}
	again.Forget(id)
	if err := again.save(); err != nil {
		t.Fatal(err)
	}
	if third, err := New(Options{Self: self, Dir: dir}); err != nil || len(third.Candidates()) != 0 {
		t.Fatalf("forgotten and remembered, %v", err)
	}
	path := filepath.Join(dir, MemoryFile)
	for content, want := range map[string]fault.Reason{`{"schema":2}`: fault.StateTooNew, `x`: ""} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := New(Options{Self: self, Dir: dir}); want == "" && err != nil || want != "" && !fault.Is(err, want) {
			t.Errorf("%q: %v", content, err)
		}
	}
}

func TestWhatIsOverDoesNotCountAgain(t *testing.T) {
	id := newID(t)
	say := func(process string, n uint64, code, addr string) said {
		return said{node: id, port: 1, pair: code, addrs: addrs(addr), turn: turn{process, n}}
	}
	for name, c := range map[string]struct {
		then  said
		after time.Duration
		code  string
	}{
		"older, soon":               {say("a", 1, "", "192.0.2.2"), oldFor - 1, "4711"},
		"older, late":               {say("a", 1, "", "192.0.2.2"), oldFor, ""},
		"the clock was set back":    {say("a", 1, "", "192.0.2.2"), -time.Hour, ""},
		"newer":                     {say("a", 3, "", "192.0.2.2"), 1, ""},
		"the same again":            {say("a", 2, "4711", "192.0.2.2"), 1, "4711"},
		"started anew":              {say("b", 1, "", "192.0.2.2"), 1, ""},
		"a version without turns":   {said{node: id, port: 1, addrs: addrs("192.0.2.2")}, 1, ""},
		"older, with other address": {say("a", 1, "", "192.0.2.3"), 1, "4711"},
	} {
		tab := newTable(t)
		tab.heard(say("a", 2, "4711", "192.0.2.2"), t0)
		tab.heard(c.then, t0.Add(c.after))
		got := tab.candidates(nil, nil, t0)[0]
		if got.Pair != c.code {
			t.Errorf("%s: code %q", name, got.Pair)
		}
		if at := netip.AddrPortFrom(c.then.addrs[0], 1); !slices.ContainsFunc(got.Addresses, func(a Address) bool { return a.Addr == at }) {
			t.Errorf("%s: not at %v but %v", name, at, got.Addresses)
		}
	}
	// Who forges a later turn, again and again, hides neither where a node listens
	// nor that it shows a code.
	tab := newTable(t)
	now := t0
	for range 10 {
		forged := say("a", math.MaxUint64, "", "192.0.2.66")
		forged.port = 6
		tab.heard(forged, now)
		now = now.Add(oldFor - time.Second)
		if !tab.heard(say("a", 1, "4711", "192.0.2.2"), now) {
			t.Error("what a node says itself is no news")
		}
		c := tab.candidates(nil, nil, now)[0]
		if real := netip.MustParseAddrPort("192.0.2.2:1"); c.Pair != "4711" || !slices.ContainsFunc(c.Addresses, func(a Address) bool { return a.Addr == real }) {
			t.Fatalf("hidden: %+v", c)
		}
	}
}

// Who answers to this node alone is there, but what it says to all may be lost.
func TestAnAnswerToOneIsNoAnnouncement(t *testing.T) {
	near := newID(t)
	tab := newTable(t, near)
	long := tab.goneAfter()
	for d := time.Duration(0); d <= 2*long; d += 5 * time.Second {
		now := t0.Add(d)
		tab.reached(near, now)
		tab.heard(said{node: near, port: 7871, addrs: addrs("192.0.2.9"), alone: d > 0}, now)
		tab.expire(now)
		// It is asked again, for all to hear, before it is missed.
		if asked, missed := tab.quiet(now), d > long; missed && !asked || d <= 2*browseFor && asked {
			t.Errorf("after %v: quiet %v", d, asked)
		}
		if list, _ := tab.unheard(now); (len(list) > 0) != (d > long) {
			t.Errorf("after %v: unheard %v", d, list)
		}
	}
	if c := tab.candidates(nil, nil, t0.Add(2*long)); len(c) != 1 || len(c[0].Addresses) != 1 {
		t.Errorf("candidates: %+v", c)
	}
	tab.heard(said{node: near, port: 7871}, t0.Add(2*long))
	if tab.quiet(t0.Add(2 * long)) {
		t.Error("quiet, though just heard")
	}
}

// answer packs an announcement, changed before.
func answer(t testing.TB, id identity.NodeID, change func(*dns.Msg)) []byte {
	t.Helper()
	msg := response("n", 7871, Announcement{Name: "n", Port: 7871}.txt(id, turn{"a", 1}), prefixes("192.0.2.9/24", "fe80::9/64"), 120)
	change(msg)
	data, err := msg.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestAnswersToOneAreRead(t *testing.T) {
	id := newID(t)
	list, err := parseAnswer(answer(t, id, func(m *dns.Msg) { m.Extra, m.Answer = m.Answer[1:], m.Answer[:1] }))
	if err != nil || len(list) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	if s := list[0]; s.node != id || s.name != "n" || s.instance != "n" || s.port != 7871 || s.turn != (turn{"a", 1}) ||
		!slices.Equal(s.addrs, []netip.Addr{netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("fe80::9")}) {
		t.Errorf("%+v", s)
	}
	for what, change := range map[string]func(*dns.Msg){
		"a question":            func(m *dns.Msg) { m.Response = false },
		"a name that goes":      func(m *dns.Msg) { m.Answer[0].Header().Ttl = 0 },
		"another service":       func(m *dns.Msg) { m.Answer[0].Header().Name = "_other._tcp.local." },
		"nothing but a name":    func(m *dns.Msg) { m.Answer = m.Answer[:1] },
		"a text without a name": func(m *dns.Msg) { m.Answer = m.Answer[1:] },
	} {
		if list, _ := parseAnswer(answer(t, id, change)); len(list) != 0 {
			t.Errorf("%s: %+v", what, list)
		}
	}
	many := answer(t, id, func(m *dns.Msg) {
		for i := range 100 {
			more := response(fmt.Sprint(i), 7871, Announcement{Name: "n", Port: 7871}.txt(id, turn{"a", 1}), nil, 120)
			m.Answer = append(m.Answer, more.Answer...)
		}
	})
	if list, err := parseAnswer(many); err != nil || len(list) != maxInstances {
		t.Errorf("%d of many names are read, %v", len(list), err)
	}
}

// FuzzParseAnswer reads what anybody may send to the one who asked.
func FuzzParseAnswer(f *testing.F) {
	k, err := identity.NewKey()
	if err != nil {
		f.Fatal(err)
	}
	for _, change := range []func(*dns.Msg){
		func(*dns.Msg) {},
		func(m *dns.Msg) { m.Answer = append(m.Answer, m.Answer...) },
		func(m *dns.Msg) { m.Answer = m.Answer[:1] },
		func(m *dns.Msg) { m.Ns, m.Answer = m.Answer, nil },
		func(m *dns.Msg) { m.Response = false },
	} {
		f.Add(answer(f, k.ID(), change))
	}
	f.Add([]byte{0, 0, 0x84, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xc0, 0x0c})
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := parseAnswer(data)
		if len(list) > maxInstances {
			t.Errorf("%d announcements", len(list))
		}
		for _, s := range list {
			if s.node == "" || !s.bye && s.port == 0 || len(s.addrs) > maxAddresses || strings.ContainsAny(s.name+s.os+s.instance+s.pair, "\x1b\n\x00") {
				t.Errorf("%+v, %v", s, err)
			}
		}
	})
}

func TestHostileAnnouncements(t *testing.T) {
	id := newID(t)
	good := Announcement{Name: "alpha", OS: "linux", Port: 7871, Pair: "4711"}.txt(id, turn{"0a1b2c3d", 7})
	ips := []net.IP{net.IPv4(192, 0, 2, 1), net.IPv4(127, 0, 0, 1), net.IPv4zero, net.IPv4bcast, net.IPv4(224, 0, 0, 1), net.IPv6loopback, nil, {1, 2, 3}}
	s, err := parseSaid("x", good, 1, ips)
	if err != nil || s.node != id || s.name != "alpha" || s.os != "linux" || s.port != 7871 || s.pair != "4711" || s.proto != 1 || s.turn != (turn{"0a1b2c3d", 7}) || len(s.addrs) != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	for name, txt := range map[string][]string{
		"no ID":        {"name=x", "port=1"},
		"bad ID":       {"id=AAAA", "port=1"},
		"port":         {"id=" + string(id), "port=70000"},
		"no port":      {"id=" + string(id), "port="},
		"pair":         {"id=" + string(id), "port=1", "pair=\x1b[2J"},
		"proto":        {"id=" + string(id), "port=1", "proto=-1"},
		"long string":  {"id=" + string(id), strings.Repeat("x", 300)},
		"many strings": make([]string, 100),
	} {
		if _, err := parseSaid("x", txt, 1, nil); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	s, err = parseSaid("\x1b]0;x\a", []string{"id=" + string(id), "name=\x1b[31mRed\x00", "os=\x1b" + strings.Repeat("y", 100), "future=1"}, 5, nil)
	if err != nil || s.name != "31mred" || len(s.os) > 16 || strings.ContainsAny(s.name+s.os+s.instance, "\x1b\x00\a") {
		t.Fatalf("%+v, %v", s, err)
	}
}

func TestATurnThatIsNoneOrdersNothing(t *testing.T) {
	id := newID(t)
	for _, text := range []string{"x", "x.-1", ".5", "", "x.18446744073709551616", "later version"} {
		s, err := parseSaid("x", []string{"id=" + string(id), "turn=" + text}, 1, nil)
		if err != nil || s.turn.before(turn{s.turn.process, s.turn.n + 1}) {
			t.Errorf("%q: %+v, %v", text, s.turn, err)
		}
	}
}

func FuzzParseSaid(f *testing.F) {
	id := newID(f)
	f.Add("alpha", strings.Join(Announcement{Name: "a", Port: 1}.txt(id, turn{"a", 1}), "\n"), 1, []byte{192, 0, 2, 1})
	f.Add("\x1b", "id="+string(id)+"\nbye=1", -1, []byte{})
	f.Add("", "pair=1\nproto=\nport=0x", 1<<40, make([]byte, 16))
	f.Fuzz(func(t *testing.T, instance, txt string, port int, ip []byte) {
		s, err := parseSaid(instance, strings.Split(txt, "\n"), port, []net.IP{ip})
		if err != nil {
			return
		}
		if got, err := identity.ParseID(string(s.node)); err != nil || got != s.node {
			t.Fatalf("node %q", s.node)
		}
		if !s.bye && s.port == 0 || len(s.name) > 63 || len(s.os) > 16 || len(s.instance) > 64 {
			t.Fatalf("%+v", s)
		}
		tab := newTable(t)
		tab.heard(s, t0)
		tab.candidates([]Interface{{Name: "x", Addresses: prefixes("fe80::1/64")}}, nil, t0)
	})
}

func FuzzParseStatic(f *testing.F) {
	for _, s := range []string{"host", "host:1", "[::1]:1", "1.2.3.4", ":", "[", "fe80::1%x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseStatic(text)
		if err == nil && (s.port == 0 || s.host == "" && len(s.resolved()) != 1) {
			t.Fatalf("%+v", s)
		}
	})
}

func TestWhoIsInReachAndNeverHeardIsNamed(t *testing.T) {
	near, far, heard, left := newID(t), newID(t), newID(t), newID(t)
	tab := newTable(t, near, far, heard, left)
	say := func(id identity.NodeID, at time.Time) {
		tab.heard(said{node: id, port: 7871, addrs: addrs("192.0.2.9")}, at)
	}
	unheard := func(at time.Time, want ...identity.NodeID) {
		t.Helper()
		got, hears := tab.unheard(at)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("after %v: %v, want %v", at.Sub(t0), got, want)
		}
		if !hears {
			t.Errorf("after %v: one is heard", at.Sub(t0))
		}
	}
	long := tab.goneAfter()
	step := 5 * time.Second
	for d := time.Duration(0); d <= 2*long; d += step {
		now := t0.Add(d)
		tab.reached(near, now)
		tab.reached(heard, now)
		tab.reached(tab.self, now)
		say(heard, now)
		if d < 20*time.Second {
			tab.reached(left, now)
			say(near, now) // at first it is heard: multicast is blocked later
		}
		tab.met(far, netip.MustParseAddrPort("198.51.100.7:7871"), now) // by a router
		tab.expire(now)
		if d <= long {
			unheard(now)
		}
	}
	end := t0.Add(2 * long)
	unheard(end, near)
	if c := tab.candidates(nil, nil, end); len(c) != 2 { // far, by memory, and heard
		t.Errorf("candidates: %+v", c)
	}
	// One announcement is enough.
	say(near, end)
	unheard(end.Add(step))
	// Where nobody is heard it is not the others' matter.
	lonely := newTable(t, near)
	for d := time.Duration(0); d <= 2*long; d += step {
		lonely.reached(near, t0.Add(d))
	}
	if got, hears := lonely.unheard(end); len(got) != 1 || hears {
		t.Errorf("alone with one that is not heard: %v, hears %v", got, hears)
	}
	// Who was away has to be in reach for long again.
	tab.reached(left, end)
	tab.reached(left, end.Add(step))
	unheard(end.Add(step))
}

func TestCausesOfBlockedMulticast(t *testing.T) {
	send := func(errs ...syscall.Errno) error {
		var all []error
		for _, e := range errs {
			all = append(all, &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("sendmsg", e)})
		}
		return errors.Join(all...)
	}
	for _, x := range []struct {
		goos    string
		err     error
		want    Cause
		blocked bool
	}{
		// What macOS gives to a program without the Local Network permission is a
		// matter of routes elsewhere.
		{"darwin", send(syscall.EHOSTUNREACH), Permission, true},
		{"darwin", send(syscall.ENETUNREACH, syscall.EHOSTUNREACH), Permission, true},
		{"darwin", send(syscall.ENETUNREACH), Unrouted, false},
		{"darwin", send(syscall.ENETDOWN), Unrouted, false},
		{"linux", send(syscall.EHOSTUNREACH), Unrouted, false},
		{"linux", send(syscall.ENETUNREACH), Unrouted, false},
		{"linux", send(syscall.EPERM), Refused, true},
		{"linux", send(syscall.ENETUNREACH, syscall.EPERM), Refused, true},
		{"linux", send(syscall.EACCES), Refused, true},
		{"linux", send(syscall.ENODEV), Gone, false},
		{"linux", send(syscall.EADDRNOTAVAIL), Gone, false},
		{"linux", errors.New("odd"), Other, false},
	} {
		tr := Trouble{"lan0", x.err, causeOf(x.goos, x.err)}
		if tr.Cause != x.want || tr.Blocked() != x.blocked || !strings.HasPrefix(tr.String(), "lan0: ") {
			t.Errorf("%s, %v: %s, blocked %v: %s", x.goos, x.err, tr.Cause, tr.Blocked(), tr)
		}
	}
}
