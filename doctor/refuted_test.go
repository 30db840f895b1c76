package doctor

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

const (
	nodeUp      = tbclusterv1.NodeState_NODE_STATE_UP
	nodeDown    = tbclusterv1.NodeState_NODE_STATE_DOWN
	linkProven  = tbclusterv1.LinkState_LINK_STATE_PROVEN
	linkCabled  = tbclusterv1.LinkState_LINK_STATE_CABLED
	linkIsDown  = tbclusterv1.LinkState_LINK_STATE_DOWN
	nodeSuspect = tbclusterv1.NodeState_NODE_STATE_SUSPECT
)

// trio is the cluster as alpha (aaa) sees it: all well.
func trio() *tbclusterv1.ClusterState {
	s := &tbclusterv1.ClusterState{SelfNodeId: "aaa", Links: []*tbclusterv1.Link{
		{Id: "l", A: &tbclusterv1.LinkEnd{NodeId: "aaa"}, B: &tbclusterv1.LinkEnd{NodeId: "bbb"}, State: linkProven},
		{Id: "stranger", A: &tbclusterv1.LinkEnd{NodeId: "ccc"}, B: &tbclusterv1.LinkEnd{NodeName: "Mac16,9"}, State: linkCabled},
	}}
	for _, id := range []string{"aaa", "bbb", "ccc"} {
		s.Nodes = append(s.Nodes, &tbclusterv1.Node{Id: id, Self: id == "aaa", State: nodeUp})
	}
	return s
}

func TestWhatANodeFoundIsShownUntilThisOneKnowsBetter(t *testing.T) {
	said := func(by, code, of string) *tbclusterv1.Finding {
		return &tbclusterv1.Finding{NodeId: by, Code: code, Subject: of}
	}
	down := func(id string) func(*tbclusterv1.ClusterState) {
		return func(s *tbclusterv1.ClusterState) { nodeOf(s, id).State = nodeDown }
	}
	forget := func(id string) func(*tbclusterv1.ClusterState) {
		return func(s *tbclusterv1.ClusterState) {
			s.Nodes = slices.DeleteFunc(s.Nodes, func(n *tbclusterv1.Node) bool { return n.Id == id })
		}
	}
	cable := func(state tbclusterv1.LinkState) func(*tbclusterv1.ClusterState) {
		return func(s *tbclusterv1.ClusterState) { s.Links[0].State = state }
	}
	well := func(*tbclusterv1.ClusterState) {}
	for what, c := range map[string]struct {
		state func(*tbclusterv1.ClusterState)
		f     *tbclusterv1.Finding
		shown bool
	}{
		"a third node is up":              {well, said("ccc", "node-down", "bbb"), false},
		"it is this node that is up":      {well, said("ccc", "node-down", "aaa"), false},
		"its own word is older, too":      {well, said("aaa", "node-down", "bbb"), false},
		"it is down":                      {down("bbb"), said("ccc", "node-down", "bbb"), true},
		"it is late":                      {func(s *tbclusterv1.ClusterState) { s.Nodes[1].State = nodeSuspect }, said("ccc", "node-down", "bbb"), true},
		"it was forgotten":                {forget("bbb"), said("ccc", "node-down", "bbb"), false},
		"an older version names no node":  {well, said("ccc", "node-down", ""), true},
		"the old one is up":               {well, said("ccc", "node-renewed", "bbb"), false},
		"the old one was put out":         {forget("bbb"), said("ccc", "node-renewed", "bbb"), false},
		"the old one is down":             {down("bbb"), said("ccc", "node-renewed", "bbb"), true},
		"it connects to this node":        {well, said("ccc", "node-blocked", "aaa"), false},
		"this node connected":             {well, said("aaa", "node-blocked", "bbb"), false},
		"two others may not be connected": {well, said("ccc", "node-blocked", "bbb"), true},
		"it lets this node in":            {well, said("aaa", "node-distrusts", "bbb"), false},
		"multicast is lost between two":   {well, said("bbb", "multicast-blocked", "ccc"), true},
		"it is lost, and one is gone":     {forget("ccc"), said("bbb", "multicast-blocked", "ccc"), false},
		"it is lost at one":               {well, said("bbb", "multicast-blocked", ""), true},
		"a node paired":                   {func(s *tbclusterv1.ClusterState) { s.Links[1].B.NodeId = "ddd" }, said("ccc", "not-paired", "stranger"), false},
		"its cable is another now":        {func(s *tbclusterv1.ClusterState) { s.Links = s.Links[:1] }, said("ccc", "not-paired", "stranger"), false},
		"it has not paired":               {well, said("ccc", "not-paired", "stranger"), true},
		"the cable carries":               {well, said("bbb", "link-unplugged", "l"), false},
		"the cable is not silent":         {well, said("bbb", "link-silent", "l"), false},
		"the cable has an address":        {well, said("bbb", "link-without-address", "l"), false},
		"the cable is usable":             {well, said("bbb", "link-not-proven", "l"), false},
		"the firewall lets it through":    {well, said("bbb", "firewall-in-the-way", "l"), false},
		"the cable is down":               {cable(linkIsDown), said("bbb", "link-down", "l"), true},
		"the cable is stuck":              {cable(linkCabled), said("bbb", "link-not-proven", "l"), true},
		"a slow cable carries":            {well, said("bbb", "link-below-capability", "l"), true},
		"its own matter":                  {well, said("bbb", "disk-low", "/home"), true},
	} {
		s := trio()
		c.state(s)
		if got := Standing(s, []*tbclusterv1.Finding{c.f}); (len(got) == 1) != c.shown {
			t.Errorf("%s: %v stands as %v", what, c.f, got)
		}
	}
	for code := range refutations {
		if !slices.ContainsFunc(Catalogue(), func(e Entry) bool { return e.Code == code }) {
			t.Errorf("%s is in no catalogue", code)
		}
	}
}

func TestThatMulticastIsLostIsSaidOnce(t *testing.T) {
	lost := func(by, of string) *tbclusterv1.Finding {
		return &tbclusterv1.Finding{NodeId: by, Code: "multicast-blocked", Subject: of}
	}
	for what, c := range map[string]struct{ found, want []*tbclusterv1.Finding }{
		"at one, which others see": {
			[]*tbclusterv1.Finding{lost("aaa", "bbb"), lost("bbb", ""), lost("ccc", "bbb")},
			[]*tbclusterv1.Finding{lost("bbb", "")}},
		"between two, which both see": {
			[]*tbclusterv1.Finding{lost("aaa", "bbb"), lost("bbb", "aaa")},
			[]*tbclusterv1.Finding{lost("aaa", "bbb")}},
		"one way": {[]*tbclusterv1.Finding{lost("bbb", "aaa")}, []*tbclusterv1.Finding{lost("bbb", "aaa")}},
	} {
		got := Standing(trio(), c.found)
		if !slices.EqualFunc(got, c.want, func(a, b *tbclusterv1.Finding) bool { return proto.Equal(a, b) }) {
			t.Errorf("%s: %v", what, got)
		}
	}
}

func TestThatAMachineIsAnotherNodeIsSaidOnceAndInPlaceOfThatItIsDown(t *testing.T) {
	s := trio()
	s.Nodes[1].State, s.Nodes[2].State = nodeDown, nodeDown
	renewed := &tbclusterv1.Finding{NodeId: "aaa", Code: "node-renewed", Subject: "bbb"}
	other := &tbclusterv1.Finding{NodeId: "aaa", Code: "node-down", Subject: "ccc"}
	got := Standing(s, []*tbclusterv1.Finding{
		{NodeId: "new", Code: "node-down", Subject: "bbb"}, // it never met the old one
		renewed, {NodeId: "ddd", Code: "node-renewed", Subject: "bbb"}, other,
	})
	if len(got) != 2 || !proto.Equal(got[0], renewed) || !proto.Equal(got[1], other) {
		t.Errorf("stands: %v", got)
	}
}
