package darwin

import (
	"errors"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// machine is a replay that changes as its commands change it.
func machine(t *testing.T) *replay {
	r := recordedNetwork(t)
	r.answers["route -n get -inet 198.18.3.2"] = "   route to: 198.18.3.2\ndestination: 198.18.3.0\n       mask: 255.255.255.252\n  interface: en4\n"
	r.answers["route -n get -inet 198.18.9.2"] = file(t, "route_get_wrong_default.txt")
	r.answers["pfctl -a com.apple/tbcluster -s rules"] = ""
	r.answers["pfctl -s info"] = "Status: Disabled for 0 days 01:02:03            Debug: Urgent\n"
	r.react = func(command string, r *replay) {
		edit := func(old, new string) {
			text := r.answers["ifconfig -a"]
			if !strings.Contains(text, old) {
				t.Errorf("%s: no %q in the machine", command, old)
			}
			r.answers["ifconfig -a"] = strings.Replace(text, old, new, 1)
			r.answers[command] = ""
		}
		const mac, address = "\tether 36:00:00:aa:00:88\n", "\tinet 198.18.3.1 netmask 0xfffffffc broadcast 198.18.3.3\n"
		const up, down = "en4: flags=8963<UP,", "en4: flags=8962<"
		const route, gone = "route -n get -inet 198.18.9.2", "route: writing to routing socket: not in table"
		switch {
		case command == "ifconfig en4 inet 198.18.3.1 netmask 255.255.255.252 alias":
			edit(mac, mac+address)
		case command == "ifconfig en4 inet 198.18.3.1 -alias":
			edit(address, "")
		case command == "ifconfig en4 up":
			edit(down, up)
		case command == "ifconfig en4 down":
			edit(up, down)
		case command == "ifconfig en4 mtu 9000":
			edit("SIMPLEX,MULTICAST> mtu 1500\n\toptions=460<TSO4,TSO6,CHANNEL_IO>\n\tether 36:00:00:aa:00:88", "SIMPLEX,MULTICAST> mtu 9000\n\toptions=460<TSO4,TSO6,CHANNEL_IO>\n\tether 36:00:00:aa:00:88")
		case command == "ifconfig en4 mtu 1500":
			edit("mtu 9000", "mtu 1500")
		case command == "route -n add -inet -net 198.18.9.2/32 198.18.3.2 -ifa 198.18.9.1":
			r.answers[route] = "   route to: 198.18.9.2\ndestination: 198.18.9.2\n    gateway: 198.18.3.2\n  interface: en4\n"
			r.answers[command] = "add net 198.18.9.2: gateway 198.18.3.2\n"
		case command == "route -n delete -inet -net 198.18.9.2/32 198.18.3.2":
			r.answers[route], r.answers[command] = gone, ""
		case command == "pfctl -E":
			r.answers[command] = "No ALTQ support in kernel\npf enabled\nToken : 1234567890\n"
			r.answers["pfctl -s info"] = "Status: Enabled for 0 days 00:00:00             Debug: Urgent\n"
		case command == "pfctl -X 1234567890", command == "pfctl -q -a com.apple/tbcluster -F rules":
			r.answers[command] = ""
			r.answers["pfctl -a com.apple/tbcluster -s rules"] = ""
		case strings.HasPrefix(command, "sh -c "+load+" sh "):
			r.answers[command] = ""
			r.answers["pfctl -a com.apple/tbcluster -s rules"] = strings.TrimPrefix(command, "sh -c "+load+" sh ")
		}
	}
	return r
}

var (
	address = host.Change{Kind: host.ChangeAddress, Interface: "en4", Prefix: netip.MustParsePrefix("198.18.3.1/30")}
	filter  = host.Change{
		Kind: host.ChangeFilter, Interfaces: []string{"en4", "en2"},
		Addresses: []netip.Addr{netip.MustParseAddr("198.18.3.1"), netip.MustParseAddr("fd77::1")},
	}
)

func TestChangesAreMadeOnceAndUndone(t *testing.T) {
	loadRules := "sh -c " + load + " sh " + filterRules(filter, "1234567890")
	for name, c := range map[string]struct {
		change   host.Change
		do, undo []string
	}{
		"address": {address,
			[]string{"ifconfig en4 inet 198.18.3.1 netmask 255.255.255.252 alias"},
			[]string{"ifconfig en4 inet 198.18.3.1 -alias"}},
		"MTU": {host.Change{Kind: host.ChangeMTU, Interface: "en4", MTU: 9000, OldMTU: 1500},
			[]string{"ifconfig en4 mtu 9000"}, []string{"ifconfig en4 mtu 1500"}},
		"up already": {host.Change{Kind: host.ChangeLinkUp, Interface: "en4", WasUp: true}, nil, nil},
		"route": {host.Change{Kind: host.ChangeRoute, Interface: "en4", Prefix: netip.MustParsePrefix("198.18.9.2/32"),
			Gateway: netip.MustParseAddr("198.18.3.2"), Source: netip.MustParseAddr("198.18.9.1")},
			[]string{"route -n add -inet -net 198.18.9.2/32 198.18.3.2 -ifa 198.18.9.1"},
			[]string{"route -n delete -inet -net 198.18.9.2/32 198.18.3.2"}},
		"filter": {filter, []string{"pfctl -E", loadRules, loadRules},
			[]string{"pfctl -q -a com.apple/tbcluster -F rules", "pfctl -X 1234567890"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := machine(t)
			h := New(Options{Runner: r})
			before := r.answers["ifconfig -a"]
			for range 2 {
				if err := h.Apply(t.Context(), c.change); err != nil {
					t.Fatal(err)
				}
			}
			if got := r.changes(); !slices.Equal(got, c.do) {
				t.Errorf("ran %q, want %q", got, c.do)
			}
			for range 2 {
				if err := h.Revert(t.Context(), c.change); err != nil {
					t.Fatal(err)
				}
			}
			if got := r.changes(); !slices.Equal(got, c.undo) {
				t.Errorf("undoing ran %q, want %q", got, c.undo)
			}
			if after := r.answers["ifconfig -a"]; after != before {
				t.Errorf("before\n%s\nafter\n%s", before, after)
			}
		})
	}
}

func TestAnInterfaceThatWasDownIsDownAgain(t *testing.T) {
	r := machine(t)
	h := New(Options{Runner: r})
	c := host.Change{Kind: host.ChangeLinkUp, Interface: "en4"}
	r.answers["ifconfig -a"] = strings.Replace(r.answers["ifconfig -a"], "en4: flags=8963<UP,", "en4: flags=8962<", 1)
	if err := errors.Join(h.Apply(t.Context(), c), h.Revert(t.Context(), c)); err != nil {
		t.Fatal(err)
	}
	if got, want := r.changes(), []string{"ifconfig en4 up", "ifconfig en4 down"}; !slices.Equal(got, want) {
		t.Errorf("ran %q, want %q", got, want)
	}
}

// macOS may keep a route of its own to where the cable leads.
func TestAnAddressWhoseRouteLeadsElsewhereIsTakenBack(t *testing.T) {
	r := machine(t)
	r.answers["route -n get -inet 198.18.3.2"] = file(t, "route_get_wrong_default.txt")
	before := r.answers["ifconfig -a"]
	err := New(Options{Runner: r}).Apply(t.Context(), address)
	if err == nil || !strings.Contains(err.Error(), "leads to en0 instead of en4") {
		t.Errorf("got %v", err)
	}
	if r.answers["ifconfig -a"] != before {
		t.Error("the address is still there")
	}
}

// route(8) says that it failed and ends well.
func TestARouteThatWasNotMadeIsAnError(t *testing.T) {
	r := machine(t)
	c := host.Change{Kind: host.ChangeRoute, Interface: "en4", Prefix: netip.MustParsePrefix("198.18.9.2/32"), Gateway: netip.MustParseAddr("198.18.3.9")}
	r.answers["route -n add -inet -net 198.18.9.2/32 198.18.3.9"] = "route: writing to routing socket: Network is unreachable"
	if err := New(Options{Runner: r}).Apply(t.Context(), c); err == nil || !strings.Contains(err.Error(), "Network is unreachable") {
		t.Errorf("got %v", err)
	}
}

func TestWithoutTheRightToChange(t *testing.T) {
	r := machine(t)
	r.fails = map[string]string{
		"ifconfig en4 inet 198.18.3.1 netmask 255.255.255.252 alias": "ifconfig: ioctl (SIOCAIFADDR): permission denied: Operation not permitted",
		"pfctl -E": "pfctl: /dev/pf: Permission denied",
	}
	h := New(Options{Runner: r})
	for _, c := range []host.Change{address, filter} {
		err := h.Apply(t.Context(), c)
		f := fault.As(err)
		if !errors.Is(err, host.ErrPermission) || f == nil || f.Reason != fault.NoPermission {
			t.Fatalf("%s: got %v", c, err)
		}
		for _, line := range h.Commands(c) {
			if !strings.Contains(f.Fix, line) {
				t.Errorf("%s: the fix %q has no %q", c, f.Fix, line)
			}
		}
	}
}

func TestWhatCannotBeDone(t *testing.T) {
	h := New(Options{Runner: machine(t)})
	err := h.Apply(t.Context(), host.Change{Kind: host.ChangeAddress, Interface: "en9", Prefix: address.Prefix})
	if !errors.Is(err, host.ErrNoInterface) {
		t.Errorf("no such interface: %v", err)
	}
	if err := h.Revert(t.Context(), host.Change{Kind: host.ChangeAddress, Interface: "en9", Prefix: address.Prefix}); err != nil {
		t.Errorf("undoing there: %v", err)
	}
	if err := h.Apply(t.Context(), host.Change{Kind: host.ChangeUnmanage, Interface: "en4", Manager: "configd"}); !fault.Is(err, fault.Unsupported) {
		t.Errorf("unmanage: %v", err)
	}
	for _, c := range []host.Change{
		{}, {Kind: "x", Interface: "en4"}, {Kind: host.ChangeLinkUp, Interface: "en4;reboot"},
		{Kind: host.ChangeRoute, Interface: "en4", Prefix: netip.MustParsePrefix("0.0.0.0/0")},
		{Kind: host.ChangeFilter, Interfaces: []string{"en4' x"}},
		{Kind: host.ChangeMTU, Interface: "en4"},
	} {
		if err := h.Apply(t.Context(), c); !fault.Is(err, fault.Usage) || h.Commands(c) != nil {
			t.Errorf("%+v: got %v", c, err)
		}
	}
}

func TestTheRulesOfTheFilter(t *testing.T) {
	const want = `pass in quick on en2 from any to { 198.18.3.1, fd77::1 } no state
pass in quick on en4 from any to { 198.18.3.1, fd77::1 } no state
pass in quick on lo0 from any to { 198.18.3.1, fd77::1 } no state
block drop in quick from any to { 198.18.3.1, fd77::1 } label "tbcluster-token-12"
`
	if got := filterRules(filter, "12"); got != want {
		t.Errorf("got\n%s", got)
	}
	if got := parseLabel(want); got != "12" {
		t.Errorf("token %q", got)
	}
}

func TestRulesThatSomebodyRemovedAreMissed(t *testing.T) {
	r := machine(t)
	h := New(Options{Runner: r})
	look := func(what string, there bool) {
		t.Helper()
		if lacks, err := h.Lacks(t.Context(), filter); err != nil || (lacks == "") != there {
			t.Errorf("%s: %q, %v", what, lacks, err)
		}
	}
	look("before they are loaded", false)
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	look("when they are loaded", true)
	r.answers["pfctl -a com.apple/tbcluster -s rules"] = ""
	look("when they are flushed", false)
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	look("when they are loaded again", true)
	r.answers["pfctl -s info"] = "Status: Disabled for 0 days 00:00:01            Debug: Urgent\n"
	look("when pf is switched off", false)
	r.changes()
	if err := h.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	if got, want := r.changes(), []string{"pfctl -X 1234567890", "pfctl -E"}; len(got) != 3 || !slices.Equal(got[:2], want) {
		t.Errorf("ran %q, want %q and the rules", got, want)
	}
	look("when it is switched on again", true)
}

func FuzzProfile(f *testing.F) {
	for _, name := range []string{"mbp_a_rdma_off", "mbp_b_rdma_on", "peer_behind_hub", "mesh3_studio"} {
		f.Add([]byte(file(f, "system_profiler_tb_"+name+".json")))
	}
	f.Add([]byte(`{"SPThunderboltDataType":[{"_items":[{"domain_uuid_key":"x","services_title":[{"protocol_id_key":-1}]}]}]}`))
	f.Add([]byte(strings.Repeat(`{"SPThunderboltDataType":[{"_items":[`, 1) + strings.Repeat(`{"_items":[`, 40) + strings.Repeat(`]}`, 41) + `]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		tb, err := parseProfile(b, map[string]string{"Thunderbolt 1": "en1"})
		if err != nil {
			return
		}
		for _, d := range tb.Domains {
			for _, p := range d.Peers {
				if p.RemoteUUID == "" || !(p.RxGbps >= 0) || p.CapableGbps > 0 && p.CapableGbps < p.RxGbps {
					t.Errorf("impossible peer %+v", p)
				}
			}
		}
	})
}

func FuzzText(f *testing.F) {
	for _, name := range []string{
		"ifconfig_a_member_with_own_ip.txt", "netstat_rn.txt", "netstat_ibdn.txt", "networksetup_listallhardwareports_mbp.txt",
		"vm_stat_head.txt", "sysctl_machine.txt", "route_get_direct.txt", "arp_peer_ok.txt", "ioreg_platform.txt", "sw_vers_26_5_1.txt",
	} {
		f.Add(file(f, name))
	}
	f.Add("en0: flags=1<UP> mtu 99999999999\n\tinet 1.2.3.4 netmask 0xff00ff00\n\tinet6 fe80::1%en0 prefixlen 129\n\tmember: \n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, i := range parseIfconfig(text) {
			if i.Name == "" || i.MTU < 0 {
				t.Errorf("impossible interface %+v", i)
			}
			for _, p := range i.Addresses {
				if !p.IsValid() {
					t.Errorf("invalid address on %+v", i)
				}
			}
		}
		for _, r := range parseRoutes(text) {
			if !r.Destination.IsValid() || r.Destination != r.Destination.Masked() {
				t.Errorf("impossible route %+v", r)
			}
		}
		for _, six := range []bool{false, true} {
			if w, err := parseRouteGet(text, six); err == nil && (!w.Destination.IsValid() || w.Interface == "") {
				t.Errorf("impossible way %+v", w)
			}
		}
		parseCounters(text)
		cables(parseHardwarePorts(text))
		parseARP(text, netip.MustParseAddr("198.18.1.2"))
		if n, err := parseVMStat(text); err == nil && n > 1<<62 {
			t.Errorf("%d bytes of memory", n)
		}
		for _, token := range []string{parseToken(text), parseLabel(text)} {
			if !regexp.MustCompile(`^\d*$`).MatchString(token) {
				t.Errorf("token %q", token)
			}
		}
		if m, err := machineOf(text, text, text, text); err == nil && m.Memory.Available > m.Memory.Total {
			t.Errorf("impossible machine %+v", m)
		}
	})
}
