package agent

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/mesh/member"
)

// shown keeps what was made of the sections of nodes. Sections that are not new
// are the same messages as before, and what follows from the same is the same:
// among many nodes a change of one costs little then. It belongs to the reconcile
// loop.
type shown struct {
	nodes  map[string]shownNode
	inputs []linkInput
	last   []*v1.Link
	read   map[string]readNode
}

type shownNode struct {
	from nodeInput
	node *v1.Node
}

// nodeInput is all that a node is shown by.
type nodeInput struct {
	section     *peerv1.NodeSection
	name        string
	role        identity.Role
	state       member.State
	reason, via string
	since       time.Time
	incarnation uint64
	version     string
	rtt         uint64
}

// linkInput is all that a node adds to the links.
type linkInput struct {
	info    link.NodeInfo
	section *peerv1.LinksSection
}

// readNode is what was read of a node's sections.
type readNode struct {
	node     *peerv1.NodeSection
	dialable []netip.AddrPort
	links    *peerv1.LinksSection
	claimed  []netip.Addr
}

func newShown() *shown { return &shown{nodes: map[string]shownNode{}, read: map[string]readNode{}} }

// node is another node as it is shown, which is not to be changed.
func (s *shown) node(m identity.Member, v member.NodeView, section *peerv1.NodeSection, rtt uint64) *v1.Node {
	id := string(v.ID)
	from := nodeInput{section, m.Name, m.Role, v.State, v.Reason, v.Via, v.Since, v.Incarnation, v.Version, rtt}
	if have, ok := s.nodes[id]; ok && have.from == from {
		return have.node
	}
	n := &v1.Node{}
	if section.GetNode() != nil {
		n = proto.CloneOf(section.Node)
	}
	// What a node says of itself is its own matter, but not who it is, nor what we
	// know better.
	n.Id, n.Name, n.Self, n.Role = id, m.Name, false, roles[m.Role]
	n.State, n.Reason = nodeStates[v.State], v.Reason
	if !v.Since.IsZero() {
		n.StateSince = timestamppb.New(v.Since)
	}
	n.Incarnation, n.ControlPath = v.Incarnation, v.Via
	if v.Version != "" {
		n.Version = v.Version
	}
	n.RttUs = rtt
	s.nodes[id] = shownNode{from, n}
	return n
}

// links are all links, which are not to be changed; the list is the caller's.
func (s *shown) links(self string, infos []link.NodeInfo, known map[string]nodeSections) []*v1.Link {
	inputs := make([]linkInput, 0, len(infos))
	for _, i := range infos {
		inputs = append(inputs, linkInput{i, known[i.ID].links})
	}
	if s.last == nil || !slices.Equal(inputs, s.inputs) {
		reports := map[string][]*peerv1.LinkReport{}
		for _, i := range inputs {
			if i.section != nil {
				reports[i.info.ID] = i.section.Links
			}
		}
		s.last, s.inputs = link.Assemble(self, infos, reports), inputs
	}
	return slices.Clone(s.last)
}

// posted takes the state that was posted: it has the objects of the one before
// where they are equal.
func (s *shown) posted(state *v1.ClusterState) {
	s.last = append([]*v1.Link{}, state.Links...)
	here := make(map[string]bool, len(state.Nodes))
	for _, n := range state.Nodes {
		here[n.Id] = true
		if have, ok := s.nodes[n.Id]; ok {
			s.nodes[n.Id] = shownNode{have.from, n}
		}
	}
	maps.DeleteFunc(s.nodes, func(id string, _ shownNode) bool { return !here[id] })
	maps.DeleteFunc(s.read, func(id string, _ readNode) bool { return !here[id] })
}

// of reads a node's sections, once for each.
func (s *shown) of(id string, k nodeSections) readNode {
	r := s.read[id]
	if r.node == k.node && r.links == k.links {
		return r
	}
	if r.node != k.node {
		r.node, r.dialable = k.node, dialable(k.node)
	}
	if r.links != k.links {
		r.links, r.claimed = k.links, nil
		for _, c := range k.links.GetClaims() {
			if p, err := netip.ParsePrefix(c.Prefix); err == nil && c.Kind != "range" {
				r.claimed = append(r.claimed, p.Addr())
			}
		}
	}
	s.read[id] = r
	return r
}
