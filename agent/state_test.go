package agent

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
)

// random makes a state out of few things, so that states overlap.
func random(r *rand.Rand) *v1.ClusterState {
	s := &v1.ClusterState{}
	for i := range 5 {
		if r.IntN(3) > 0 {
			s.Nodes = append(s.Nodes, &v1.Node{Id: fmt.Sprint("n", i), Name: fmt.Sprint("name", r.IntN(2))})
		}
		if r.IntN(3) > 0 {
			s.Links = append(s.Links, &v1.Link{Id: fmt.Sprint("l", i), RttUs: uint64(r.IntN(2))})
		}
		if r.IntN(3) > 0 {
			s.Instances = append(s.Instances, &v1.Instance{Id: fmt.Sprint("i", i), Reason: fmt.Sprint(r.IntN(2))})
		}
		if r.IntN(3) > 0 {
			s.Findings = append(s.Findings, &v1.Finding{Code: fmt.Sprint("f", i)})
		}
	}
	return s
}

// apply is what a client does with a delta.
func apply(s *v1.ClusterState, d *v1.ClusterDelta) *v1.ClusterState {
	s = shallow(s)
	if d == nil {
		return s
	}
	s.Nodes = merge(s.Nodes, d.Nodes, d.RemovedNodeIds, (*v1.Node).GetId)
	s.Links = merge(s.Links, d.Links, d.RemovedLinkIds, (*v1.Link).GetId)
	s.Instances = merge(s.Instances, d.Instances, d.RemovedInstanceIds, (*v1.Instance).GetId)
	if d.FindingsChanged {
		s.Findings = d.Findings
	}
	order(s)
	return s
}

func merge[T any](have, changed []T, removed []string, id func(T) string) []T {
	gone := slices.Clone(removed)
	for _, x := range changed {
		gone = append(gone, id(x))
	}
	have = slices.DeleteFunc(slices.Clone(have), func(x T) bool { return slices.Contains(gone, id(x)) })
	return append(have, changed...)
}

func TestDeltasLeadFromAnyStateToAnyOther(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		a, b := random(r), random(r)
		order(a)
		order(b)
		got := apply(a, diff(a, shallow(b)))
		if !proto.Equal(got, b) {
			t.Fatalf("from %v\nto %v\ncame %v", a, b, got)
		}
		if d := diff(b, proto.CloneOf(b)); d != nil {
			t.Fatalf("equal states differ by %v", d)
		}
	}
}

func TestABoardHasBegunWithItsFirstState(t *testing.T) {
	b := newBoard()
	select {
	case <-b.begun:
		t.Fatal("an empty board has begun")
	default:
	}
	for range 2 { // the same again, and another one, begin nothing anew
		b.post(&v1.ClusterState{SelfNodeId: "n0"})
	}
	b.post(&v1.ClusterState{SelfNodeId: "n1"})
	<-b.begun
}

func TestAWatcherThatSleptMissesNothing(t *testing.T) {
	b := newBoard()
	r := rand.New(rand.NewPCG(3, 4))
	sent, changed := b.get()
	mine := shallow(sent)
	for range 200 {
		for range r.IntN(5) {
			s := random(r)
			order(s)
			b.post(s)
		}
		select {
		case <-changed:
		default:
			continue
		}
		var now *v1.ClusterState
		now, changed = b.get()
		mine = apply(mine, diff(sent, shallow(now)))
		sent = now
		mine.Revision = now.Revision
		if !proto.Equal(mine, now) {
			t.Fatalf("have %v\nwant %v", mine, now)
		}
	}
	if b.post(proto.CloneOf(sent)) {
		t.Error("an equal state was posted as news")
	}
}

// Alpha says what it found a moment ago; gamma, which answers, sees beta up and
// the cable proven.
func TestWhatAnotherNodeFoundDoesNotOutliveWhatThisOneKnows(t *testing.T) {
	found := func(code, subject string) *v1.Finding { return &v1.Finding{Code: code, Subject: subject, NodeId: "x"} }
	known := map[string]nodeSections{
		"alpha": {findings: &peerv1.FindingsSection{Findings: []*v1.Finding{found("node-down", "beta"), found("link-down", "l"), found("disk-low", "/")}}},
		"gamma": {findings: &peerv1.FindingsSection{Findings: []*v1.Finding{found("node-down", "beta")}}},
	}
	state := func(beta v1.NodeState, cable v1.LinkState) *v1.ClusterState {
		return &v1.ClusterState{SelfNodeId: "gamma", Links: []*v1.Link{{Id: "l", State: cable}}, Nodes: []*v1.Node{
			{Id: "alpha", Name: "alpha", State: v1.NodeState_NODE_STATE_UP}, {Id: "beta", Name: "beta", State: beta},
			{Id: "gamma", Name: "gamma", State: v1.NodeState_NODE_STATE_UP, Self: true}}}
	}
	codes := func(s *v1.ClusterState) (out []string) {
		(&Agent{}).collect(s, known, map[string]string{})
		for _, f := range s.Findings {
			out = append(out, f.NodeId+" "+f.Code)
		}
		return out
	}
	if got := codes(state(v1.NodeState_NODE_STATE_UP, v1.LinkState_LINK_STATE_PROVEN)); !slices.Equal(got, []string{"alpha disk-low"}) {
		t.Errorf("of what is over: %v", got)
	}
	want := []string{"alpha node-down", "alpha link-down", "alpha disk-low", "gamma node-down"}
	if got := codes(state(v1.NodeState_NODE_STATE_DOWN, v1.LinkState_LINK_STATE_DOWN)); !slices.Equal(got, want) {
		t.Errorf("of what is so: %v", got)
	}
}

func TestTheDoctorLooksAgainWhenSomethingStandsOtherwise(t *testing.T) {
	state := func() *v1.ClusterState {
		return &v1.ClusterState{
			SelfNodeId: "a",
			Nodes:      []*v1.Node{{Id: "a", State: v1.NodeState_NODE_STATE_UP}, {Id: "b", State: v1.NodeState_NODE_STATE_UP}},
			Links: []*v1.Link{
				{Id: "l", State: v1.LinkState_LINK_STATE_PROVEN, A: &v1.LinkEnd{NodeId: "a"}, B: &v1.LinkEnd{NodeId: "b"}},
				{Id: "m", State: v1.LinkState_LINK_STATE_PROVEN, A: &v1.LinkEnd{NodeId: "b"}, B: &v1.LinkEnd{NodeId: "c"}},
			},
		}
	}
	before := standing(state())
	for what, change := range map[string]func(*v1.ClusterState){
		"a node is down":       func(s *v1.ClusterState) { s.Nodes[1].State = v1.NodeState_NODE_STATE_DOWN },
		"a cable is down":      func(s *v1.ClusterState) { s.Links[0].State = v1.LinkState_LINK_STATE_DOWN },
		"a cable is gone":      func(s *v1.ClusterState) { s.Links = nil },
		"a machine has paired": func(s *v1.ClusterState) { s.Links[0].B.NodeId = "c" },
	} {
		s := state()
		change(s)
		if standing(s) == before {
			t.Errorf("%s, and nothing stands otherwise", what)
		}
	}
	s := state()
	s.Nodes[0].RttUs, s.Links[0].ATxBytes = 7, 1<<30
	if standing(s) != before {
		t.Error("numbers that move all the time are taken for news")
	}
	s.Links[1].State = v1.LinkState_LINK_STATE_DOWN
	if standing(s) != before {
		t.Error("a cable between two others is taken for news")
	}
}
