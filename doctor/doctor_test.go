package doctor

import (
	"bytes"
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
			{Name: "thunderbolt0", Cable: true, Up: true, Carrier: true, MTU: 65520},
			{Name: "eth0", Up: true, Carrier: true, MTU: 1500},
		}},
		Nodes: []*tbclusterv1.Node{
			{Id: "aaa", Name: "alpha", State: tbclusterv1.NodeState_NODE_STATE_UP, Version: "0.1.0"},
			{Id: "bbb", Name: "beta", State: tbclusterv1.NodeState_NODE_STATE_UP, Version: "0.1.0"},
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
	}, []string{"beta is down", "tbcluster node forget beta"}},
	"not-paired": {func(f *Facts) {
		f.Links[0].B, f.Links[0].State = &tbclusterv1.LinkEnd{NodeName: "Mac16,9"}, tbclusterv1.LinkState_LINK_STATE_CABLED
	}, []string{"Mac16,9", "tbcluster pair CODE", "0-1"}},
	"link-below-capability": {func(f *Facts) { f.Links[0].NegotiatedGbps = 20 }, []string{"20 of 40 Gb/s", "alpha–beta (port 0-1 to 0-2)", "2 lanes"}},
	"link-silent":           {func(f *Facts) { down(f) }, []string{"carries nothing", "thunderbolt0 has carrier"}},
	"link-down": {func(f *Facts) {
		down(f).A.Interface = ""
	}, []string{"plugged in and down", "dmesg"}},
	"link-unplugged": {func(f *Facts) { down(f).Flaps = 3; f.Thunderbolt.Domains[0].Peers = nil }, []string{"is unplugged", "3 times"}},
	"link-not-proven": {func(f *Facts) {
		f.Links[0].State, f.Links[0].Reason = tbclusterv1.LinkState_LINK_STATE_ADDRESSED, "no answer from beta over thunderbolt0 yet"
	}, []string{"not usable yet", "no answer from beta"}},
	"no-permission": {func(f *Facts) {
		f.Wanted = []host.Change{{Kind: host.ChangeLinkUp, Interface: "thunderbolt0"}}
		f.Commands = []string{"ip link set thunderbolt0 up"}
	}, []string{"may not set addresses", "ip link set thunderbolt0 up", "set thunderbolt0 up"}},
	"filter-inactive": {func(f *Facts) { f.FilterReason = "nft is missing" }, []string{"not closed to the LAN", "nft is missing", "--insecure-ranks"}},
	"mtu-mismatch":    {func(f *Facts) { f.Links[0].B.Mtu = 1500 }, []string{"different MTUs", "beta has 1500", "set 1500 at both"}},
	"address-conflict": {func(f *Facts) {
		f.Conflicts = []Conflict{{Prefix: "10.77.1.1/30", Port: "0-1", With: "the route to 10.77.1.0/24 on eth0"}}
	}, []string{"10.77.1.1/30", "eth0"}},
	"interface-managed":          {func(f *Facts) { f.Network.Interfaces[0].ManagedBy = "NetworkManager" }, []string{"NetworkManager manages thunderbolt0"}},
	"thunderbolt-driver-missing": {func(f *Facts) { f.Thunderbolt = host.Thunderbolt{} }, []string{"modprobe thunderbolt"}},
	"thunderbolt-not-authorised": {func(f *Facts) { f.Thunderbolt.Domains[0].Others[0].Authorized = false }, []string{"OWC dock", "port 0-3", "boltctl"}},
	"thunderbolt-net-missing": {func(f *Facts) {
		f.NetModuleMissing = true
		f.Thunderbolt.Domains[0].Peers[0].Interface = ""
	}, []string{"modprobe thunderbolt_net", "beta"}},
	"peer-behind-hub":   {func(f *Facts) { f.Thunderbolt.Domains[0].Peers[0].BehindHub = true }, []string{"behind a hub", "beta on port 0-1"}},
	"disk-low":          {func(f *Facts) { f.Disks[0].Free = 5 << 30 }, []string{"/home on alpha", "5.4 GB"}},
	"memory-low":        {func(f *Facts) { f.Machine.Memory.Available = 1 << 30 }, []string{"1.1 GB", "68.7 GB"}},
	"engine-missing":    {func(f *Facts) { f.Engines[1].Available = false }, []string{"tbcluster engine install llamacpp", "vllm: not found"}},
	"clock-skew":        {func(f *Facts) { f.ClockOffsets["bbb"] = -90 * time.Second }, []string{"beta is 1m30s behind that of alpha"}},
	"version-mismatch":  {func(f *Facts) { f.Version = "0.0.9" }, []string{"0.0.9", "Install 0.1.0 on alpha"}},
	"multicast-blocked": {func(f *Facts) { f.Multicast = "sendto: no route to host" }, []string{"multicast does not work", "no route to host", "peers"}},
	"data-on-lan":       {func(f *Facts) { f.DataInterface["bbb"] = "eth0" }, []string{"beta over eth0"}},
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
	f.NetModuleMissing = true
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
