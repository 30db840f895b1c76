package tui

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

// store is the cluster as the agent's watch tells it: cleaned on arrival, kept
// by ID, given out as immutable states.
type store struct {
	revision  uint64
	self      string
	name      string
	nodes     map[string]*pb.Node
	links     map[string]*pb.Link
	transfers map[string]*pb.Transfer
	instances map[string]*pb.Instance
	models    map[string]*pb.Model
	findings  []*pb.Finding
	// wire maps the shown ID of a thing to the one that the agent knows, where
	// cleaning changed it.
	wire map[string]string
	full bool // a snapshot has come
}

// apply takes one event in. An error means that the stream cannot be trusted
// any more and has to be opened anew.
func (s *store) apply(ev *pb.WatchResponse) error {
	switch e := ev.GetEvent().(type) {
	case *pb.WatchResponse_Snapshot:
		s.reset(e.Snapshot)
	case *pb.WatchResponse_Delta:
		if !s.full {
			return fmt.Errorf("a change came before the first snapshot")
		}
		if ev.GetRevision() <= s.revision {
			return fmt.Errorf("revision %d came after %d", ev.GetRevision(), s.revision)
		}
		s.change(e.Delta)
	}
	s.revision = ev.GetRevision()
	return nil
}

func (s *store) reset(c *pb.ClusterState) {
	*s = store{
		self: clean(c.GetSelfNodeId()), name: clean(c.GetClusterName()), full: true,
		nodes: map[string]*pb.Node{}, links: map[string]*pb.Link{}, transfers: map[string]*pb.Transfer{},
		instances: map[string]*pb.Instance{}, models: map[string]*pb.Model{}, wire: map[string]string{},
	}
	s.change(&pb.ClusterDelta{
		Nodes: c.GetNodes(), Links: c.GetLinks(), Transfers: c.GetTransfers(), Instances: c.GetInstances(),
		Models: c.GetModels(), FindingsChanged: true, Findings: c.GetFindings(),
	})
}

func (s *store) change(d *pb.ClusterDelta) {
	raw := d
	d = cleanMessage(d)
	remember := func(shown, id string) {
		if shown != id {
			s.wire[shown] = id
		}
	}
	put(s.nodes, d.GetNodes(), d.GetRemovedNodeIds())
	put(s.links, d.GetLinks(), d.GetRemovedLinkIds())
	put(s.transfers, d.GetTransfers(), d.GetRemovedTransferIds())
	put(s.instances, d.GetInstances(), d.GetRemovedInstanceIds())
	put(s.models, d.GetModels(), d.GetRemovedModelIds())
	for i, v := range raw.GetNodes() {
		remember(d.GetNodes()[i].GetId(), v.GetId())
	}
	for i, v := range raw.GetTransfers() {
		remember(d.GetTransfers()[i].GetId(), v.GetId())
	}
	for i, v := range raw.GetInstances() {
		remember(d.GetInstances()[i].GetId(), v.GetId())
	}
	for i, v := range raw.GetModels() {
		remember(d.GetModels()[i].GetId(), v.GetId())
	}
	if d.GetFindingsChanged() {
		s.findings = d.GetFindings()
	}
}

func put[V interface{ GetId() string }](m map[string]V, fresh []V, gone []string) {
	for _, v := range fresh {
		m[v.GetId()] = v
	}
	for _, id := range gone {
		delete(m, id)
	}
}

// state returns the state in the order that the API promises. What it points
// to is never changed afterwards.
func (s *store) state() *pb.ClusterState {
	return &pb.ClusterState{
		Revision: s.revision, SelfNodeId: s.self, ClusterName: s.name,
		Nodes: sorted(s.nodes, func(a, b *pb.Node) int {
			return cmp.Or(strings.Compare(a.GetName(), b.GetName()), strings.Compare(a.GetId(), b.GetId()))
		}),
		Links: sorted(s.links, func(a, b *pb.Link) int { return strings.Compare(a.GetId(), b.GetId()) }),
		Transfers: sorted(s.transfers, func(a, b *pb.Transfer) int {
			return cmp.Or(b.GetStartedAt().AsTime().Compare(a.GetStartedAt().AsTime()), strings.Compare(a.GetId(), b.GetId()))
		}),
		Instances: sorted(s.instances, func(a, b *pb.Instance) int {
			return cmp.Or(strings.Compare(a.GetName(), b.GetName()), strings.Compare(a.GetId(), b.GetId()))
		}),
		Models: sorted(s.models, func(a, b *pb.Model) int {
			return cmp.Or(strings.Compare(a.GetName(), b.GetName()), strings.Compare(a.GetId(), b.GetId()))
		}),
		Findings: s.findings,
	}
}

func sorted[V any](m map[string]V, order func(a, b V) int) []V {
	l := make([]V, 0, len(m))
	for _, v := range m {
		l = append(l, v)
	}
	slices.SortFunc(l, order)
	return l
}

// snapshot is what a view is drawn from: one state with what was seen to
// lead to it. It is never changed after it was made.
type snapshot struct {
	*pb.ClusterState
	node  map[string]*pb.Node
	model map[string]*pb.Model
	wire  map[string]string
	rates rates
	log   []event
}

func newSnapshot(c *pb.ClusterState) *snapshot {
	s := &snapshot{ClusterState: c, node: map[string]*pb.Node{}, model: map[string]*pb.Model{}}
	for _, n := range c.GetNodes() {
		s.node[n.GetId()] = n
	}
	for _, m := range c.GetModels() {
		s.model[m.GetId()] = m
	}
	return s
}

// nodeName is the name of a node ID, for people.
func (s *snapshot) nodeName(id string) string {
	if n := s.node[id]; n != nil {
		return n.GetName()
	}
	if id == "" {
		return "?"
	}
	return cut(id, 9)
}

// id is the ID under which the agent knows what is shown as id.
func (s *snapshot) id(shown string) string {
	if raw, ok := s.wire[shown]; ok {
		return raw
	}
	return shown
}

func findingID(f *pb.Finding) string {
	return f.GetCode() + "|" + f.GetNodeId() + "|" + f.GetSubject()
}
