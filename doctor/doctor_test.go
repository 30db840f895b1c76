package doctor

import (
	"bytes"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

// healthy is a node of a cluster of two with one proven cable: nothing to find.
func healthy() Facts {
	return Facts{
		Now: now, Self: "aaa", Name: "alpha", Version: "0.1.0",
		Machine: host.Machine{OS: "linux", Memory: host.Memory{Total: 64 << 30, Available: 32 << 30}},
		Thunderbolt: host.Thunderbolt{DriverLoaded: true, Domains: []host.Domain{{
			ID: "0", UUID: "u1", Security: "user",
			Peers:  []host.XDomain{{Port: "0-1", RemoteUUID: "u2", Vendor: "Intel", Device: "beta", Interface: "thunderbolt0", RxGbps: 40, TxGbps: 40}},
			Others: []host.Device{{Port: "0-3", Vendor: "OWC", Name: "dock", Authorized: true}},
		}}},
		Network: host.Network{Interfaces: []host.Interface{
			{Name: "thunderbolt0", Cable: true, Up: true, Carrier: true, MTU: 65520, Addresses: []netip.Prefix{netip.MustParsePrefix("10.77.1.1/30")}},
			{Name: "eth0", Up: true, Carrier: true, MTU: 1500},
		}},
		Diagnosis: host.Diagnosis{
			RDMA:    []host.RDMAPort{{Device: "mlx5_0", Port: 1, State: "DOWN"}}, // of no cable
			Memlock: host.Limit{Known: true, Bytes: 2 << 30},
			Ways:    []host.Way{{To: netip.MustParseAddr("10.77.1.2"), Interface: "thunderbolt0"}},
		},
		Nodes: []*tbclusterv1.Node{
			{Id: "aaa", Name: "alpha", State: tbclusterv1.NodeState_NODE_STATE_UP, Version: "0.1.0", Engines: llama("b6200")},
			{Id: "bbb", Name: "beta", State: tbclusterv1.NodeState_NODE_STATE_UP, Version: "0.1.0", Engines: llama("b6200")},
		},
		Links: []*tbclusterv1.Link{{
			Id:    "link1",
			A:     &tbclusterv1.LinkEnd{NodeId: "aaa", NodeName: "alpha", Port: "0-1", Interface: "thunderbolt0", Address: "10.77.1.1/30", Mtu: 65520},
			B:     &tbclusterv1.LinkEnd{NodeId: "bbb", NodeName: "beta", Port: "0-2", Interface: "thunderbolt0", Address: "10.77.1.2/30", Mtu: 65520},
			State: tbclusterv1.LinkState_LINK_STATE_PROVEN, StateSince: timestamppb.New(now.Add(-time.Hour)),
			NegotiatedGbps: 40, CapableGbps: 40, Lanes: 2,
		}},
		Disks:         []Disk{{Path: "/home", Free: 500 << 30, Total: 1 << 40}, {Path: "/small", Free: 1 << 30, Total: 2 << 30}},
		Engines:       []Engine{{Name: "vllm", Reason: "not found"}, {Name: "llamacpp", Available: true, Installable: true}},
		ClockOffsets:  map[string]time.Duration{"bbb": 40 * time.Millisecond},
		DataInterface: map[string]string{"bbb": "thunderbolt0"},
	}
}

func llama(version string) []*tbclusterv1.Engine {
	return []*tbclusterv1.Engine{{Name: "llamacpp", Available: true, Version: version}, {Name: "vllm", Version: "?"}}
}

func down(f *Facts) *tbclusterv1.Link {
	l := f.Links[0]
	l.State, l.Reason = tbclusterv1.LinkState_LINK_STATE_DOWN, "nothing answers"
	return l
}

// provocations make a healthy node ill: code → how, and words that the finding
// must hold.
var provocations = map[string]struct {
	ill  func(f *Facts)
	says []string
}{
	"node-down": {func(f *Facts) {
		f.Nodes[1].State, f.Nodes[1].Reason = tbclusterv1.NodeState_NODE_STATE_DOWN, "no heartbeat for 11 s"
	}, []string{"beta is down", "tbcluster node forget beta` takes it off the lists until it comes back"}},
	"node-renewed": {func(f *Facts) {
		f.Nodes[1].State, f.Nodes[1].Reason = tbclusterv1.NodeState_NODE_STATE_DOWN, "not heard from"
		f.Renewed = map[string]Renewed{"bbb": {Node: "node 7WCA2TZ", Where: "node 7WCA2TZ answers at an address of beta"}}
		down(f)
	}, []string{"beta came back as another node: node 7WCA2TZ", "pair --revoke beta", "pair CODE", "at an address of beta; not heard from"}},
	"not-paired": {func(f *Facts) {
		f.Links[0].B, f.Links[0].State = &tbclusterv1.LinkEnd{NodeName: "Mac16,9"}, tbclusterv1.LinkState_LINK_STATE_CABLED
	}, []string{"Mac16,9", "run `tbcluster pair` on alpha", "tbcluster pair CODE", "0-1"}},
	"link-below-capability": {func(f *Facts) { f.Links[0].NegotiatedGbps = 20 }, []string{"20 of 40 Gb/s", "sold for 40 Gb/s", "alpha–beta (port 0-1 to 0-2)", "2 lanes"}},
	"link-silent":           {func(f *Facts) { down(f) }, []string{"carries nothing", "thunderbolt0 has carrier"}},
	"link-down": {func(f *Facts) {
		down(f).A.Interface = ""
	}, []string{"plugged in and down", "dmesg"}},
	"link-unplugged": {func(f *Facts) { down(f).Flaps = 3; f.Thunderbolt.Domains[0].Peers = nil }, []string{"is unplugged", "3 times"}},
	"link-not-proven": {func(f *Facts) {
		f.Links[0].State, f.Links[0].Reason = tbclusterv1.LinkState_LINK_STATE_ADDRESSED, "no answer from beta over thunderbolt0 yet"
	}, []string{"not usable yet", "no answer from beta"}},
	"link-without-address": {func(f *Facts) {
		f.Links[0].State, f.Links[0].Reason = tbclusterv1.LinkState_LINK_STATE_CABLED,
			"alpha: all is taken, by 10.77.0.5/16 on interface eth0" // in whatever words
		f.Links[0].Obstacle = tbclusterv1.LinkObstacle_LINK_OBSTACLE_NO_ADDRESS
	}, []string{"no address is free for the cable", "10.77.0.5/16 on interface eth0", "address_spares"}},
	"no-permission": {func(f *Facts) {
		f.Wanted = []host.Change{{Kind: host.ChangeLinkUp, Interface: "thunderbolt0"}}
		f.Commands = []string{"ip link set thunderbolt0 up"}
	}, []string{"may not set addresses", "ip link set thunderbolt0 up", "set thunderbolt0 up"}},
	"filter-inactive": {func(f *Facts) { f.FilterReason = "nft is missing" }, []string{"not closed to the LAN", "nft is missing", "--insecure-ranks"}},
	"mtu-mismatch":    {func(f *Facts) { f.Links[0].B.Mtu = 1500 }, []string{"different MTUs", "beta has 1500", "set 1500 by hand at both"}},
	"address-conflict": {func(f *Facts) {
		f.Conflicts = []Conflict{{Prefix: "10.77.1.1/30", Port: "0-1", With: "the route to 10.77.1.0/24 on eth0"}}
	}, []string{"10.77.1.1/30", "eth0"}},
	"interface-released": {func(f *Facts) {
		f.Released = []Released{{Manager: "systemd-networkd", Interface: "thunderbolt0", Did: []string{"printf '[Link]' > /run/systemd/network/10-tbcluster-thunderbolt0.network"}}}
	}, []string{"systemd-networkd was told to leave thunderbolt0", "/run/systemd/network/10-tbcluster-thunderbolt0.network"}},
	"interface-managed":          {func(f *Facts) { f.Network.Interfaces[0].ManagedBy = "NetworkManager" }, []string{"NetworkManager manages thunderbolt0"}},
	"thunderbolt-driver-missing": {func(f *Facts) { f.Thunderbolt = host.Thunderbolt{} }, []string{"modprobe thunderbolt"}},
	"thunderbolt-not-authorised": {func(f *Facts) { f.Thunderbolt.Domains[0].Others[0].Authorized = false }, []string{"OWC dock", "port 0-3", "boltctl"}},
	"thunderbolt-net-missing": {func(f *Facts) {
		f.Diagnosis.NoNetModule = true
		f.Thunderbolt.Domains[0].Peers[0].Interface = ""
	}, []string{"modprobe thunderbolt_net", "beta"}},
	"thunderbolt-hosts-off": {func(f *Facts) { f.Diagnosis.HostsOff = true }, []string{"xdomain=N", "ignore other machines"}},
	"thunderbolt-dma-open": {func(f *Facts) {
		f.Thunderbolt.Domains[0].Security, f.Thunderbolt.Domains[0].IOMMU = "none", false
	}, []string{"read all memory of alpha", "security none", "iommu_dma_protection 0"}},
	"offload-when-forwarding": {func(f *Facts) {
		f.Diagnosis.Offloads = map[string][]string{"thunderbolt0": {"tso", "gso"}}
	}, []string{"thunderbolt0 on alpha", "sudo ethtool -K thunderbolt0 tso off gso off"}},
	"firewall-in-the-way": {func(f *Facts) {
		down(f)
		f.Firewalls = []host.Firewall{{Tool: "nft", Name: "chain input of the nftables table inet filter", Family: "inet", Table: "filter", Chain: "input"}}
	}, []string{"a firewall on alpha", "sudo nft insert rule inet filter input iifname thunderbolt0 accept", "chain input"}},
	"node-blocked": {func(f *Facts) {
		f.Nodes[1].State, f.Nodes[1].Reason = tbclusterv1.NodeState_NODE_STATE_DOWN, "no heartbeat for 11 s"
		f.Heard = map[string]Heard{"bbb": {Address: "192.168.1.7:7871", Port: 7871, Since: now.Add(-time.Minute)}}
	}, []string{"beta announces itself, but alpha cannot connect", "sudo ufw allow 7871/tcp", "192.168.1.7:7871"}},
	"node-distrusts": {func(f *Facts) {
		f.Nodes[1].State, f.Nodes[1].Reason = tbclusterv1.NodeState_NODE_STATE_DOWN, "not heard from any more: it does not trust this node"
		f.Nodes[1].StateSince = timestamppb.New(now.Add(-time.Minute))
		f.Heard = map[string]Heard{"bbb": {Address: "192.168.1.7:7871", Port: 7871, Since: now.Add(-time.Minute)}}
		f.Untrusting = map[string]bool{"bbb": true}
	}, []string{"beta does not let alpha into", "it does not trust this node", "pair --new-identity` on alpha", "`tbcluster pair` on beta"}},
	"wrong-way": {func(f *Facts) {
		f.Diagnosis.Ways = []host.Way{{To: netip.MustParseAddr("10.77.1.2"), Interface: "tun0", Gateway: netip.MustParseAddr("10.8.0.1")}}
	}, []string{"for beta over tun0", "10.77.1.2 is reached over tun0 by 10.8.0.1", "ip route get 10.77.1.2"}},
	"default-route-on-cable": {func(f *Facts) {
		f.Network.Interfaces[0].Bridge = "br0"
		f.Network.Routes = append(f.Network.Routes, host.Route{Destination: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.0.0.1"), Interface: "br0", DHCP: true})
	}, []string{"default route of alpha", "sudo ip route del default dev br0", "by 10.0.0.1"}},
	"lan-lease-on-cable": {func(f *Facts) {
		f.Network.Interfaces[0].Bridge = "bridge0"
		f.Network.Interfaces = append(f.Network.Interfaces, host.Interface{Name: "bridge0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.57/24")}})
		f.Diagnosis.Leases = []string{"bridge0"}
	}, []string{"bridge0 on alpha got a LAN address", "10.0.0.57/24", "Thunderbolt Bridge"}},
	"addresses-reset": {func(f *Facts) { f.Diagnosis.Resetters = []string{"io.exo.networksetup"} }, []string{"io.exo.networksetup on alpha", "launchctl bootout system/io.exo.networksetup"}},
	"engine-mismatch": {func(f *Facts) { f.Nodes[0].Engines[0].Version = "b6100" }, []string{"alpha has llamacpp b6100, another node has b6200", "tbcluster engine install llamacpp", "1 of 2 nodes have b6200"}},
	"rdma-port-down": {func(f *Facts) {
		f.Diagnosis.RDMA = []host.RDMAPort{{Device: "mlx5_0", Port: 1, State: "DOWN"}, {Device: "tbr0", Port: 1, State: "DOWN", Interface: "thunderbolt0"}}
		f.Diagnosis.Memlock = host.Limit{Known: true, Unlimited: true}
	}, []string{"RDMA device tbr0 on alpha is down", "port 0-1 sees beta", "rdma_ctl status"}},
	"memlock-low": {func(f *Facts) {
		f.Diagnosis.RDMA = []host.RDMAPort{{Device: "tbr0", Port: 1, State: "ACTIVE", Active: true}}
		f.Diagnosis.Memlock = host.Limit{Known: true, Bytes: 8 << 20}
	}, []string{"lock only 8 MiB", "LimitMEMLOCK=infinity", "tbr0"}},
	"foreign-rdma-driver": {func(f *Facts) {
		f.Thunderbolt.Domains[0].Peers[0].Services = map[string]uint32{"network": 1, "tbverb1": 7}
	}, []string{"beta on port 0-1 of alpha", "tbverb1", "modprobe -r thunderbolt_ibverbs"}},
	"peer-behind-hub":   {func(f *Facts) { f.Thunderbolt.Domains[0].Peers[0].BehindHub = true }, []string{"behind a hub", "beta on port 0-1"}},
	"disk-low":          {func(f *Facts) { f.Disks[0].Free = 5 << 30 }, []string{"/home on alpha", "5.4 GB"}},
	"memory-low":        {func(f *Facts) { f.Machine.Memory.Available = 1 << 30 }, []string{"1.0 GiB", "64 GiB"}},
	"engine-missing":    {func(f *Facts) { f.Engines[1].Available = false }, []string{"tbcluster engine install llamacpp", "vllm: not found"}},
	"clock-skew":        {func(f *Facts) { f.ClockOffsets["bbb"] = -90 * time.Second }, []string{"beta is 1m30s behind that of alpha"}},
	"version-mismatch":  {func(f *Facts) { f.Version = "0.0.9" }, []string{"alpha runs tbcluster 0.0.9, another node runs 0.1.0", "Install 0.1.0 on alpha"}},
	"multicast-blocked": {func(f *Facts) { f.Multicast = "sendto: no route to host" }, []string{"multicast does not work at alpha", "no route to host", "peers"}},
	"data-on-lan":       {func(f *Facts) { f.DataInterface["bbb"] = "eth0" }, []string{"beta over eth0"}},
}

func TestMostNodesAreMoreThanHalf(t *testing.T) {
	for want, n := range map[string][2]int{"another node runs": {1, 2}, "most nodes run": {2, 3}, "2 other nodes run": {2, 4}, "3 other nodes run": {3, 7}} {
		if got := howMany(n[0], n[1], "runs", "run"); got != want {
			t.Errorf("%v: %q, want %q", n, got, want)
		}
	}
	f := healthy()
	f.Version = "0.0.9"
	f.Nodes = append(f.Nodes, &tbclusterv1.Node{Id: "ccc", Name: "gamma", State: nodeUp, Version: "0.1.0"})
	if found := Check(f); len(found) != 1 || found[0].Title != "alpha runs tbcluster 0.0.9, most nodes run 0.1.0" || found[0].Evidence != "2 of 3 nodes run 0.1.0" {
		t.Errorf("found %v", found)
	}
}

func TestAClockThatIsWrongByDaysIsSaidInDays(t *testing.T) {
	for d, want := range map[time.Duration]string{90 * time.Second: "1m30s", 26 * time.Hour: "26h0m0s", 120*time.Hour - time.Second: "5 days", 75 * time.Hour: "3 days 3 h"} {
		if got := span(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

// A link is in its state since the later of what both ends say, each by its own
// clock.
func TestAClockThatIsAheadHidesNoLinkThatIsStuck(t *testing.T) {
	const ahead = 48 * time.Hour
	for _, c := range []struct {
		since, offset time.Duration // of the link's state before now, of beta's clock
		found         bool
	}{
		{time.Hour, 0, true},
		{time.Hour, -ahead, true},
		{time.Hour - ahead, ahead, true},
		{0, 0, false},
		{-ahead, ahead, false},
		{-40 * time.Millisecond, 40 * time.Millisecond, false},
	} {
		f := healthy()
		provocations["link-not-proven"].ill(&f)
		f.Links[0].StateSince = timestamppb.New(now.Add(-c.since))
		f.ClockOffsets["bbb"] = c.offset
		found := slices.ContainsFunc(Check(f), func(x *tbclusterv1.Finding) bool { return x.GetCode() == "link-not-proven" })
		if found != c.found {
			t.Errorf("since %v, beta %v ahead: found %v", c.since, c.offset, found)
		}
	}
}

func TestAManagerOfAnInterfaceWithoutAddressIsNoFinding(t *testing.T) {
	f := healthy()
	f.Network.Interfaces[0].ManagedBy = "NetworkManager"
	f.Links = nil
	for _, x := range checkManaged(f) {
		t.Errorf("%+v", x)
	}
}

func TestAHealthyNodeHasNoFindings(t *testing.T) {
	if found := Check(healthy()); len(found) != 0 {
		t.Errorf("found %v", found)
	}
	if found := Check(Facts{Machine: host.Machine{OS: "darwin"}}); len(found) != 0 {
		t.Errorf("of an unknown machine was found %v", found)
	}
}

func TestEveryFindingIsProvokedByItsFactsAndFilledIn(t *testing.T) {
	for _, e := range Catalogue() {
		p, ok := provocations[e.Code]
		if !ok {
			t.Errorf("%s has no test that provokes it", e.Code)
			continue
		}
		f := healthy()
		p.ill(&f)
		found := Check(f)
		i := slices.IndexFunc(found, func(x *tbclusterv1.Finding) bool { return x.GetCode() == e.Code })
		if i < 0 {
			t.Errorf("%s was not found, but %v", e.Code, found)
			continue
		}
		if len(found) > 1 {
			t.Errorf("%s brought others: %v", e.Code, found)
		}
		x := found[i]
		all := strings.Join([]string{x.Title, x.Meaning, x.Fix, x.Evidence}, "\n")
		if strings.ContainsAny(all, "{}") || x.Title == "" || x.Meaning == "" || x.Fix == "" || x.Evidence == "" || x.NodeId == "" || x.NodeName == "" || !x.Since.AsTime().Equal(now) {
			t.Errorf("%s is not complete: %v", e.Code, x)
		}
		for _, want := range p.says {
			if !strings.Contains(all, want) {
				t.Errorf("%s does not say %q:\n%s", e.Code, want, all)
			}
		}
	}
	if len(provocations) != len(Catalogue()) {
		t.Errorf("%d provocations for %d findings", len(provocations), len(Catalogue()))
	}
}

func TestTheCatalogueIsWellFormed(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range Catalogue() {
		if seen[e.Code] || e.Code != strings.ToLower(e.Code) || strings.ContainsAny(e.Code, " _") {
			t.Errorf("code %q", e.Code)
		}
		seen[e.Code] = true
		if severityWords[e.Severity] == "" || strings.HasSuffix(e.Title, ".") || strings.Contains(e.Title, "\n") || !strings.HasSuffix(e.Meaning, ".") {
			t.Errorf("%s: %+v", e.Code, e)
		}
	}
}

// The words are read aloud by whoever is stuck: what is so, why that matters,
// what to do.
func TestEveryFindingSaysWhatWhyAndWhatToDo(t *testing.T) {
	for _, e := range Catalogue() {
		for what, s := range map[string]string{"title": e.Title, "meaning": e.Meaning, "fix": e.Fix} {
			for _, bad := range []string{"  ", "simply", "just ", "please", "TO" + "DO", "e.g.", "i.e.", "!"} {
				if strings.Contains(s, bad) {
					t.Errorf("%s: the %s holds %q: %s", e.Code, what, bad, s)
				}
			}
		}
		if strings.Count(e.Title, ".") > strings.Count(e.Title, "thunderbolt.") || len(e.Title) > 100 {
			t.Errorf("%s: the title is no single short sentence: %s", e.Code, e.Title)
		}
		if len(e.Meaning) < 20 || len(e.Meaning) > 320 {
			t.Errorf("%s: the meaning has %d characters", e.Code, len(e.Meaning))
		}
		// What to do begins with something to do.
		first, _, _ := strings.Cut(e.Fix, " ")
		if !slices.Contains(doing, strings.Trim(first, ",")) {
			t.Errorf("%s: the fix begins with %q, which is nothing to do: %s", e.Code, first, e.Fix)
		}
		for _, s := range []string{e.Meaning, e.Fix} {
			if strings.Count(s, "`")%2 != 0 {
				t.Errorf("%s: a quoted command does not end: %s", e.Code, s)
			}
		}
	}
}

// doing are the words with which something to do begins; "On" and "In" say where.
var doing = []string{"See", "On", "Run", "Switch", "Install", "Unplug", "Plug", "Let", "Take", "Allow", "Start", "Stop", "Remove",
	"Find", "Set", "Free", "Bring", "Leave"}

func TestFirewallsOfEachKindAreOpenedInTheirOwnWay(t *testing.T) {
	for tool, want := range map[string]string{"ufw": "sudo ufw allow in on thunderbolt0", "firewalld": "--zone=trusted --add-interface=thunderbolt0",
		"macOS": "socketfilterfw --add"} {
		f := healthy()
		down(&f)
		f.Firewalls = []host.Firewall{{Tool: tool, Name: "it"}}
		if found := Check(f); len(found) != 1 || !strings.Contains(found[0].Fix, want) {
			t.Errorf("%s: %v", tool, found)
		}
	}
	f := healthy()
	f.Firewalls = []host.Firewall{{Tool: "ufw", Name: "it"}}
	if found := Check(f); len(found) != 0 {
		t.Errorf("a firewall that is in nobody's way: %v", found)
	}
}

// The new node may be the one that speaks for all; it does not know what it was.
func TestThatAMachineIsAnotherNodeIsSaidByWhoeverKnows(t *testing.T) {
	f := healthy()
	f.Self, f.Name = "bbb", "beta"
	f.Nodes = append(f.Nodes, &tbclusterv1.Node{Id: "ccc", Name: "gamma", State: tbclusterv1.NodeState_NODE_STATE_DOWN})
	f.Renewed = map[string]Renewed{"ccc": {Node: "gamma-2", Member: true, Where: "gamma-2 has what gamma had"}}
	found := Check(f)
	if len(found) != 1 || found[0].Code != "node-renewed" || found[0].Subject != "ccc" {
		t.Fatalf("found %v", found)
	}
	if got := found[0].Fix; !strings.Contains(got, "pair --revoke gamma`") || !strings.Contains(got, "gamma-2 is in the cluster already") || !strings.Contains(got, "`tbcluster node rename gamma-2 gamma`") || strings.Contains(got, "CODE") {
		t.Error(got)
	}
}

func TestWhereMulticastIsLostIsSaid(t *testing.T) {
	for what, c := range map[string]struct {
		change  func(*Facts)
		subject string
		words   []string
	}{
		"nobody is heard":    {func(f *Facts) { f.Unheard = []string{"bbb"} }, "", []string{"does not work at alpha", "of what beta announces"}},
		"one of two is not":  {func(f *Facts) { f.Unheard, f.Hears = []string{"bbb"}, true }, "bbb", []string{"between alpha and beta", "of what beta announces"}},
		"nor can it be sent": {func(f *Facts) { f.Unheard, f.Multicast = []string{"bbb"}, "refused" }, "", []string{"at alpha", "refused; nothing is heard of what beta"}},
	} {
		f := healthy()
		c.change(&f)
		found := Check(f)
		if len(found) != 1 || found[0].Code != "multicast-blocked" || found[0].Subject != c.subject {
			t.Errorf("%s: found %v", what, found)
			continue
		}
		for _, w := range c.words {
			if text := found[0].Title + " " + found[0].Evidence; !strings.Contains(text, w) {
				t.Errorf("%s: no %q in %q", what, w, text)
			}
		}
	}
}

func TestEndsThatJustCameMayDifferInMTU(t *testing.T) {
	f := healthy()
	f.Links[0].B.Mtu, f.Links[0].StateSince = 1500, timestamppb.New(now.Add(-time.Second))
	if found := Check(f); len(found) != 0 {
		t.Errorf("found %v", found)
	}
}

func TestANodeThatWasHeardOnceIsDownAllTheSame(t *testing.T) {
	f := healthy()
	f.Nodes[1].State = tbclusterv1.NodeState_NODE_STATE_DOWN
	f.Nodes[1].Reason = "no heartbeat for 11 s"
	f.Heard = map[string]Heard{"bbb": {Address: "192.168.1.7:7871", Port: 7871, Since: now.Add(-time.Second)}}
	if found := Check(f); len(found) != 1 || found[0].Code != "node-down" {
		t.Errorf("found %v", found)
	}
}

func TestRDMAIsNotAskedOfThunderbolt4OnAMac(t *testing.T) {
	f := healthy()
	f.Machine.OS = "darwin"
	f.Thunderbolt.Domains[0].Peers[0].Interface = "en2"
	f.Diagnosis.RDMA = []host.RDMAPort{{Device: "rdma_en2", Port: 1, State: "DOWN", Interface: "en2"}}
	if found := Check(f); len(found) != 0 {
		t.Errorf("at 40 Gb/s: %v", found)
	}
	f.Thunderbolt.Domains[0].Peers[0].RxGbps = 80
	if found := Check(f); len(found) != 1 || found[0].Code != "rdma-port-down" {
		t.Errorf("at 80 Gb/s: %v", found)
	}
}

func TestOneNodeSpeaksAboutALink(t *testing.T) {
	f := healthy()
	f.Links[0].NegotiatedGbps = 20
	f.Self, f.Name = "bbb", "beta"
	if found := Check(f); len(found) != 0 {
		t.Errorf("both ends found %v", found)
	}
	f.Nodes[0].State = tbclusterv1.NodeState_NODE_STATE_DOWN
	found := Check(f)
	if !slices.ContainsFunc(found, func(x *tbclusterv1.Finding) bool { return x.GetCode() == "link-below-capability" }) {
		t.Errorf("with alpha down, beta found %v", found)
	}
}

func TestTheWorstComesFirstAndKeepsItsTime(t *testing.T) {
	f := healthy()
	f.DataInterface["bbb"] = "eth0"
	f.Disks[0].Free = 1
	f.Diagnosis.NoNetModule = true
	f.Thunderbolt.Domains[0].Peers[0].Interface = ""
	first := Check(f)
	var codes []string
	for _, x := range first {
		codes = append(codes, x.Code)
	}
	if !slices.Equal(codes, []string{"thunderbolt-net-missing", "data-on-lan", "disk-low"}) {
		t.Errorf("in this order: %v", codes)
	}
	f.Now = now.Add(time.Hour)
	again := Check(f)
	Carry(first, again)
	for i := range again {
		if !proto.Equal(again[i], first[i]) {
			t.Errorf("%v became %v", first[i], again[i])
		}
	}
}

func TestWordsOfStrangersCannotDriveATerminal(t *testing.T) {
	f := healthy()
	f.Links[0].B, f.Links[0].State = &tbclusterv1.LinkEnd{NodeName: "evil\x1b[2J\u202e"}, tbclusterv1.LinkState_LINK_STATE_CABLED
	for _, x := range Check(f) {
		if strings.ContainsAny(x.Title+x.Evidence, "\x1b\u202e") {
			t.Errorf("%q", x.Title)
		}
	}
}

func TestTheDocumentIsCurrent(t *testing.T) {
	have, err := os.ReadFile("../docs/findings.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, Markdown()) {
		t.Error(`docs/findings.md is not what the catalogue says: run "go generate ./doctor"`)
	}
}
