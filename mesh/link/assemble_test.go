package link

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

const (
	uuidA = "a0000000-0000-4000-8000-00000000000a"
	uuidB = "b0000000-0000-4000-8000-00000000000b"
	uuidX = "c0000000-0000-4000-8000-00000000000c"
)

var t0 = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func two() ([]NodeInfo, map[string][]*peerv1.LinkReport) {
	nodes := []NodeInfo{{ID: "aaa", Name: "alpha", Up: true}, {ID: "bbb", Name: "beta", Up: true}}
	return nodes, map[string][]*peerv1.LinkReport{
		"aaa": {{Port: "0-1", LocalUuid: uuidA, RemoteUuid: uuidB, Interface: "thunderbolt0", Address: "10.77.1.1/30", Present: true, Proven: true,
			ProbedNodeId: "bbb", ProbedPort: "0-2", RttUs: 210, NegotiatedGbps: 40, CapableGbps: 80, Lanes: 2, TxBytes: 7, RxBytes: 8, Errors: 1, StateSince: timestamppb.New(t0)}},
		"bbb": {{Port: "0-2", LocalUuid: uuidB, RemoteUuid: uuidA, Interface: "thunderbolt3", Address: "10.77.1.2/30", Present: true, Proven: true,
			ProbedNodeId: "aaa", ProbedPort: "0-1", RttUs: 190, NegotiatedGbps: 40, CapableGbps: 40, Lanes: 2, Errors: 2, StateSince: timestamppb.New(t0.Add(time.Second))}},
	}
}

func one(t *testing.T, self string, nodes []NodeInfo, reports map[string][]*peerv1.LinkReport) *tbclusterv1.Link {
	t.Helper()
	l := Assemble(self, nodes, reports)
	if len(l) != 1 {
		t.Fatalf("there are %d links: %v", len(l), l)
	}
	return l[0]
}

func TestTwoEndsMakeOneLinkWithWhatBothKnow(t *testing.T) {
	nodes, reports := two()
	l := one(t, "bbb", nodes, reports)
	if l.A.NodeName != "alpha" || l.B.NodeName != "beta" || l.A.Port != "0-1" || l.B.Port != "0-2" || l.State != proven || l.Reason != "" {
		t.Errorf("%v", l)
	}
	if l.NegotiatedGbps != 40 || l.CapableGbps != 40 || l.RttUs != 210 || l.Errors != 3 || l.ATxBytes != 7 || l.ARxBytes != 8 || !l.StateSince.AsTime().Equal(t0.Add(time.Second)) {
		t.Errorf("%v", l)
	}
	if p := l.Paths[0]; p.Interface != "thunderbolt3" || p.Address != "10.77.1.2" || p.PeerAddress != "10.77.1.1" {
		t.Errorf("beta's path is %v", p)
	}
	if p := one(t, "zzz", nodes, reports).Paths[0]; p.Interface != "thunderbolt0" {
		t.Errorf("a third node is told of %v", p)
	}
}

func TestTheWorseViewCounts(t *testing.T) {
	for name, c := range map[string]struct {
		change func(nodes []NodeInfo, a, b *peerv1.LinkReport)
		state  tbclusterv1.LinkState
		reason string
	}{
		"one end only": {func(_ []NodeInfo, _, b *peerv1.LinkReport) {
			b.Proven, b.ProbedNodeId, b.Reason = false, "", "no answer"
		}, addressed, "beta: no answer"},
		"without its words": {func(_ []NodeInfo, _, b *peerv1.LinkReport) { b.Proven, b.ProbedNodeId = false, "" }, addressed, "beta has had no answer"},
		"no address": {func(_ []NodeInfo, a, b *peerv1.LinkReport) {
			a.Proven, a.ProbedNodeId, b.Proven, b.ProbedNodeId, b.Address, b.Reason = false, "", false, "", "", "no permission"
		}, cabled, "beta: no permission"},
		"silent at one end": {func(_ []NodeInfo, a, _ *peerv1.LinkReport) {
			a.Proven, a.Reason = false, "carrier, but nothing answers"
		}, down, "alpha: carrier, but nothing answers"},
		"gone at one end": {func(_ []NodeInfo, a, _ *peerv1.LinkReport) { a.Present, a.Proven, a.ProbedNodeId = false, false, "" }, down, "alpha sees no cable"},
		"gone at both ends": {func(_ []NodeInfo, a, b *peerv1.LinkReport) {
			for _, r := range []*peerv1.LinkReport{a, b} {
				r.Present, r.Proven, r.Reason = false, false, unpluggedOrOff
			}
		}, down, "the cable is unplugged"},
		"gone at one end, with its words": {func(_ []NodeInfo, a, _ *peerv1.LinkReport) {
			a.Present, a.Proven, a.Reason = false, false, unpluggedOrOff
		}, down, "alpha: " + unpluggedOrOff},
		"a node down": {func(n []NodeInfo, _, _ *peerv1.LinkReport) { n[1].Up, n[1].Since = false, t0.Add(time.Minute) }, down, "beta is down"},
	} {
		nodes, reports := two()
		c.change(nodes, reports["aaa"][0], reports["bbb"][0])
		l := one(t, "aaa", nodes, reports)
		if l.State != c.state || !strings.Contains(l.Reason, c.reason) || l.RttUs != 0 || l.Evidence == "" {
			t.Errorf("%s: %v %q", name, l.State, l.Reason)
		}
		if name == "gone at both ends" && l.Reason != c.reason {
			t.Errorf("%s: %q", name, l.Reason)
		}
		if (l.State == addressed) != (len(l.Paths) == 1) {
			t.Errorf("%s: paths %v", name, l.Paths)
		}
		if !nodes[1].Up && !l.StateSince.AsTime().Equal(nodes[1].Since) {
			t.Errorf("%s: since %v", name, l.StateSince.AsTime())
		}
	}
}

func TestALinkForWhichNoAddressIsFreeSaysSoToPrograms(t *testing.T) {
	for _, knows := range []string{"aaa", "bbb"} {
		nodes, reports := two()
		for id, r := range reports {
			r[0].Proven, r[0].ProbedNodeId, r[0].Address, r[0].Reason = false, "", "", "it waits"
			if id == knows {
				r[0].Reason, r[0].Obstacle = "all is taken", tbclusterv1.LinkObstacle_LINK_OBSTACLE_NO_ADDRESS
			}
		}
		l := one(t, "aaa", nodes, reports)
		if l.State != cabled || l.Obstacle != tbclusterv1.LinkObstacle_LINK_OBSTACLE_NO_ADDRESS || !strings.Contains(l.Reason, "all is taken") {
			t.Errorf("%s knows: %v", knows, l)
		}
		// A word of before it was pulled out counts no more.
		reports["aaa"][0].Present = false
		if l := one(t, "aaa", nodes, reports); l.State != down || l.Obstacle != tbclusterv1.LinkObstacle_LINK_OBSTACLE_UNSPECIFIED {
			t.Errorf("%s knew: %v", knows, l)
		}
	}
}

func TestALinkBelowItsCapabilitySaysSo(t *testing.T) {
	nodes, reports := two()
	reports["bbb"][0].NegotiatedGbps = 20
	if l := one(t, "aaa", nodes, reports); l.State != proven || l.Reason != "it runs at 20 of 40 Gb/s" {
		t.Errorf("%v", l)
	}
}

func TestUUIDsMatchHoweverTheyAreWritten(t *testing.T) {
	nodes, reports := two()
	for _, r := range []*peerv1.LinkReport{reports["aaa"][0], reports["bbb"][0]} {
		r.Proven, r.ProbedNodeId, r.ProbedPort, r.Address = false, "", "", ""
	}
	reports["bbb"][0].LocalUuid = strings.ToUpper(uuidB)
	reports["bbb"][0].RemoteUuid = "000000a0-0040-0000-0000-00800a000000" // each word backwards
	if l := one(t, "aaa", nodes, reports); l.B.GetNodeId() != "bbb" || l.State != cabled {
		t.Errorf("%v", l)
	}
}

func TestAProbeMatchesWhatUUIDsDoNot(t *testing.T) {
	nodes, reports := two()
	reports["aaa"][0].LocalUuid, reports["bbb"][0].LocalUuid = "", ""
	l := one(t, "aaa", nodes, reports)
	if l.State != proven || l.B.GetPort() != "0-2" || !strings.Contains(l.Evidence, "UUIDs do not tell") {
		t.Errorf("%v", l)
	}
}

func TestAStrangerIsNamedByItsDevice(t *testing.T) {
	nodes, reports := two()
	reports["bbb"] = []*peerv1.LinkReport{}
	reports["aaa"] = []*peerv1.LinkReport{{Port: "0-1", LocalUuid: uuidA, RemoteUuid: uuidX, Present: true, RemoteVendor: "Apple Inc.", RemoteDevice: "Mac16,9"}}
	l := one(t, "aaa", nodes, reports)
	if l.State != cabled || l.B.GetNodeId() != "" || l.B.GetNodeName() != "Apple Inc. Mac16,9" || !strings.Contains(l.Reason, "tbcluster pair") {
		t.Errorf("%v", l)
	}
	reports["aaa"][0].RemoteVendor, reports["aaa"][0].RemoteDevice = "", ""
	if l := one(t, "aaa", nodes, reports); l.B != nil {
		t.Errorf("of a machine without a name is said %v", l.B)
	}
	// While beta has not spoken, it may be beta.
	delete(reports, "bbb")
	if l := one(t, "aaa", nodes, reports); l.B != nil || !strings.Contains(l.Reason, "beta has reported") {
		t.Errorf("before beta has reported: %v", l)
	}
	reports["aaa"][0].Present = false
	if l := Assemble("aaa", nodes, reports); len(l) != 0 {
		t.Errorf("an unplugged stranger is kept: %v", l)
	}
}

func TestACableSeenFromOneSideIsNotProven(t *testing.T) {
	nodes, reports := two()
	reports["bbb"] = []*peerv1.LinkReport{{Port: "0-9", LocalUuid: uuidB, RemoteUuid: uuidX, Present: false}}
	l := one(t, "aaa", nodes, reports)
	if l.State != addressed || l.B.GetNodeId() != "bbb" || !strings.Contains(l.Reason, "only alpha sees this cable") {
		t.Errorf("%v", l)
	}
	if id := one(t, "aaa", nodes, map[string][]*peerv1.LinkReport{"aaa": reports["aaa"], "bbb": nil}).Id; id == "" {
		t.Error("it has no ID")
	}
}

func TestTheIDIsThatOfNodesAndPorts(t *testing.T) {
	nodes, reports := two()
	id := one(t, "aaa", nodes, reports).Id
	for _, r := range []*peerv1.LinkReport{reports["aaa"][0], reports["bbb"][0]} {
		r.Interface, r.Address, r.Proven, r.ProbedNodeId, r.Present = "other", "", false, "", false
	}
	if got := one(t, "bbb", nodes, reports).Id; got != id {
		t.Errorf("unplugged it is %s, was %s", got, id)
	}
	reports["bbb"][0].Port, reports["aaa"][0].ProbedPort = "0-4", ""
	if got := one(t, "bbb", nodes, reports).Id; got == id {
		t.Error("another port has the same ID")
	}
}

func TestAMovedCableLeavesNoGhost(t *testing.T) {
	nodes, reports := two()
	// beta's cable went from 0-2 to 0-4; alpha's stayed.
	old := proto.CloneOf(reports["bbb"][0])
	old.Present, old.Proven, old.ProbedNodeId = false, false, ""
	now := reports["bbb"][0]
	now.Port, now.Proven, now.ProbedNodeId = "0-4", false, ""
	a := reports["aaa"][0]
	a.Proven, a.ProbedNodeId = false, "" // its hint still says 0-2
	reports["bbb"] = []*peerv1.LinkReport{old, now}
	if l := one(t, "aaa", nodes, reports); l.B.GetPort() != "0-4" || l.State != addressed {
		t.Errorf("%v", l)
	}
}

func TestACableFromAMachineToItselfIsSaidToBeOne(t *testing.T) {
	nodes := []NodeInfo{{ID: "aaa", Name: "alpha", Up: true}}
	l := one(t, "aaa", nodes, map[string][]*peerv1.LinkReport{"aaa": {
		{Port: "0-1", LocalUuid: uuidA, RemoteUuid: uuidB, Present: true}, {Port: "1-1", LocalUuid: uuidB, RemoteUuid: uuidA, Present: true}}})
	if l.State != cabled || l.A.Port != "0-1" || l.B.GetPort() != "1-1" || !strings.Contains(l.Reason, "two ports of alpha") {
		t.Errorf("%v", l)
	}
}

// TestRandomClustersAreJoinedAsTheyAreCabled makes clusters with one UUID for
// several ports, ends that know more or less, and any order of reports.
func TestRandomClustersAreJoinedAsTheyAreCabled(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		n := 2 + r.IntN(5)
		var nodes []NodeInfo
		reports := map[string][]*peerv1.LinkReport{}
		port := map[string]int{}
		uuid := func(i, p int) string { // one UUID for two ports
			return fmt.Sprintf("%08x-0000-4000-8000-%012x", 0x1000*(i+1)+p/2, i+1)
		}
		for i := range n {
			id := fmt.Sprintf("n%d", i)
			nodes = append(nodes, NodeInfo{ID: id, Name: id, Up: true})
			reports[id] = []*peerv1.LinkReport{}
		}
		want := map[string]bool{}
		for k := range 1 + r.IntN(10) {
			i, j := r.IntN(n), r.IntN(n)
			if i == j {
				continue
			}
			a, b := nodes[min(i, j)].ID, nodes[max(i, j)].ID
			pa, pb := port[a], port[b]
			port[a]++
			port[b]++
			ra := &peerv1.LinkReport{Port: fmt.Sprint("p", pa), LocalUuid: uuid(min(i, j), pa), RemoteUuid: uuid(max(i, j), pb), Present: true}
			rb := &peerv1.LinkReport{Port: fmt.Sprint("p", pb), LocalUuid: ra.RemoteUuid, RemoteUuid: ra.LocalUuid, Present: true}
			switch r.IntN(3) { // what tells them apart
			case 0:
				ra.Address, rb.Address = fmt.Sprintf("10.77.%d.1/30", k), fmt.Sprintf("10.77.%d.2/30", k)
			case 1:
				ra.ProbedNodeId, ra.ProbedPort, ra.Proven = b, rb.Port, true
			case 2:
				ra.ProbedNodeId, ra.ProbedPort, ra.Proven = b, rb.Port, true
				rb.ProbedNodeId, rb.ProbedPort, rb.Proven = a, ra.Port, true
			}
			reports[a], reports[b] = append(reports[a], ra), append(reports[b], rb)
			want[fmt.Sprintf("%s:%s-%s:%s", a, ra.Port, b, rb.Port)] = true
		}
		first := Assemble("n0", nodes, reports)
		got := map[string]bool{}
		for _, l := range first {
			got[fmt.Sprintf("%s:%s-%s:%s", l.A.NodeId, l.A.Port, l.B.GetNodeId(), l.B.GetPort())] = true
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("seed %d: joined %v, cabled %v", seed, got, want)
		}
		for _, list := range reports {
			r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		}
		slices.Reverse(nodes)
		again := Assemble("n0", nodes, reports)
		if !slices.EqualFunc(first, again, func(a, b *tbclusterv1.Link) bool { return proto.Equal(a, b) }) {
			t.Fatalf("seed %d: another order gives %v, not %v", seed, again, first)
		}
	}
}

// FuzzAssemble feeds what a peer might report: nothing of it may break the view.
func FuzzAssemble(f *testing.F) {
	f.Add("0-1", uuidA, uuidB, "10.77.1.1/30", "bbb", "0-2", true, true)
	f.Add("", "", "", "nonsense", "aaa", "", false, true)
	f.Add("0-1", uuidA, uuidA, "", "aaa", "0-1", true, false)
	f.Fuzz(func(t *testing.T, port, local, remote, address, probed, probedPort string, present, isProven bool) {
		nodes, reports := two()
		reports["aaa"] = append(reports["aaa"], &peerv1.LinkReport{Port: port, LocalUuid: local, RemoteUuid: remote, Address: address,
			ProbedNodeId: probed, ProbedPort: probedPort, Present: present, Proven: isProven})
		for _, l := range Assemble("bbb", nodes, reports) {
			if l.Id == "" || l.State == 0 || l.A == nil || l.State == proven && l.B.GetNodeId() == "" {
				t.Fatalf("%v", l)
			}
		}
	})
}
