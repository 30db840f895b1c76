package agent

import (
	"net/netip"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/mesh/member"
)

func TestWhatIsNotNewIsTheSame(t *testing.T) {
	s := newShown()
	section := &peerv1.NodeSection{Node: &v1.Node{Id: "liar", Name: "liar", CpuCount: 8}, ControlPort: 7871, LanAddresses: []string{"192.0.2.7"}}
	m := identity.Member{ID: "b", Name: "beta", Role: identity.Viewer}
	v := member.NodeView{ID: "b", State: member.Up, Since: time.Unix(1, 0), Via: "lan0 192.0.2.7:7871", Incarnation: 3, Version: "1"}
	first := s.node(m, v, section, 100)
	if first.Id != "b" || first.Name != "beta" || first.Role != v1.Role_ROLE_VIEWER || first.CpuCount != 8 || first.State != v1.NodeState_NODE_STATE_UP || first.RttUs != 100 {
		t.Errorf("shown as %v", first)
	}
	if s.node(m, v, section, 100) != first {
		t.Error("the same node is another one")
	}
	renamed, down, admin := m, v, m
	renamed.Name, admin.Role = "b2", identity.Admin
	down.State, down.Reason = member.Down, "it said goodbye"
	for what, n := range map[string]*v1.Node{
		"name": s.node(renamed, v, section, 100), "role": s.node(admin, v, section, 100), "state": s.node(m, down, section, 100),
		"round trip": s.node(m, v, section, 900), "section": s.node(m, v, proto.CloneOf(section), 100), "nothing said": s.node(m, v, nil, 100),
	} {
		if n == first {
			t.Errorf("%s: the same as before", what)
		}
	}
	if section.Node.Id != "liar" {
		t.Error("the section was changed")
	}

	report := &peerv1.LinkReport{Port: "0-1", LocalUuid: "u", RemoteUuid: "w", Present: true}
	known := map[string]nodeSections{"a": {}, "b": {node: section, links: &peerv1.LinksSection{Links: []*peerv1.LinkReport{report},
		Claims: []*peerv1.AddressClaim{{Kind: "link", Prefix: "10.77.0.1/30"}, {Kind: "range", Prefix: "10.0.0.1/8"}, {Kind: "node", Prefix: "?"}}}}}
	infos := []link.NodeInfo{{ID: "a", Name: "alpha", Up: true}, {ID: "b", Name: "beta", Up: true}}
	links := s.links("a", infos, known)
	if len(links) != 1 || links[0] != s.links("a", infos, known)[0] {
		t.Fatalf("links %v are others when asked again", links)
	}
	infos[1].Up = false
	if l := s.links("a", infos, known); l[0] == links[0] || l[0].State != v1.LinkState_LINK_STATE_DOWN {
		t.Errorf("its node is down: %v", l[0])
	}
	r := s.of("b", known["b"])
	if len(r.dialable) != 1 || r.dialable[0] != netip.MustParseAddrPort("192.0.2.7:7871") || len(r.claimed) != 1 || r.claimed[0] != netip.MustParseAddr("10.77.0.1") {
		t.Errorf("read %v and %v", r.dialable, r.claimed)
	}
	moved := proto.CloneOf(section)
	moved.ControlPort = 7
	if r := s.of("b", nodeSections{node: moved}); len(r.dialable) != 1 || r.dialable[0].Port() != 7 || r.claimed != nil {
		t.Errorf("read %v and %v of other sections", r.dialable, r.claimed)
	}

	// Of equal objects the one that was posted before stays.
	b := newBoard()
	state := func(section *peerv1.NodeSection) *v1.ClusterState {
		st := &v1.ClusterState{Nodes: []*v1.Node{s.node(m, v, section, 100)}, Links: s.links("a", infos, known)}
		b.post(st)
		s.posted(st)
		return st
	}
	old := state(section)
	next := state(proto.CloneOf(section))
	if next.Nodes[0] != old.Nodes[0] || next.Links[0] != old.Links[0] {
		t.Error("what is equal was replaced")
	}
	s.posted(&v1.ClusterState{})
	if len(s.nodes)+len(s.read)+len(s.last) != 0 {
		t.Error("nodes that are gone are kept")
	}
}
