package agent

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	v1 "tbcluster/api/tbcluster/v1"
)

// board holds the cluster's state as this node sees it and wakes whoever
// watches. States are immutable once posted, so a watcher needs to keep only
// the one it sent last: however far behind it falls, the next delta is from
// there to now, and a stopped client costs nothing.
type board struct {
	mu      sync.Mutex
	state   *v1.ClusterState
	changed chan struct{} // closed at each change
	begun   chan struct{} // closed when there is a state
}

func newBoard() *board {
	return &board{state: &v1.ClusterState{}, changed: make(chan struct{}), begun: make(chan struct{})}
}

// post makes s the state, keeping the old objects where nothing changed, and
// reports whether anything did.
func (b *board) post(s *v1.ClusterState) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.state
	s.Revision = old.Revision + 1
	d := diff(old, s)
	if d == nil && old.SelfNodeId == s.SelfNodeId && old.ClusterName == s.ClusterName {
		return false
	}
	b.state = s
	if old.Revision == 0 {
		close(b.begun)
	}
	close(b.changed)
	b.changed = make(chan struct{})
	return true
}

// get returns the state and a channel that is closed when there is a newer one.
func (b *board) get() (*v1.ClusterState, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state, b.changed
}

// diff returns what is new in b, or nil. Objects of b that equal those of a
// are replaced by them, so that the next comparison is one of pointers.
func diff(a, b *v1.ClusterState) *v1.ClusterDelta {
	d := &v1.ClusterDelta{}
	some := false
	some = diffList(a.Nodes, b.Nodes, (*v1.Node).GetId, &d.Nodes, &d.RemovedNodeIds) || some
	some = diffList(a.Links, b.Links, (*v1.Link).GetId, &d.Links, &d.RemovedLinkIds) || some
	some = diffList(a.Transfers, b.Transfers, (*v1.Transfer).GetId, &d.Transfers, &d.RemovedTransferIds) || some
	some = diffList(a.Instances, b.Instances, (*v1.Instance).GetId, &d.Instances, &d.RemovedInstanceIds) || some
	some = diffList(a.Models, b.Models, (*v1.Model).GetId, &d.Models, &d.RemovedModelIds) || some
	if !slices.EqualFunc(a.Findings, b.Findings, func(x, y *v1.Finding) bool { return proto.Equal(x, y) }) {
		d.FindingsChanged, d.Findings, some = true, b.Findings, true
	}
	if !some {
		return nil
	}
	return d
}

func diffList[T proto.Message](a, b []T, id func(T) string, changed *[]T, removed *[]string) bool {
	old := make(map[string]T, len(a))
	for _, x := range a {
		old[id(x)] = x
	}
	for i, x := range b {
		was, ok := old[id(x)]
		delete(old, id(x))
		switch {
		case !ok:
			*changed = append(*changed, x)
		case proto.Message(was) == proto.Message(x):
		case proto.Equal(was, x):
			b[i] = was
		default:
			*changed = append(*changed, x)
		}
	}
	*removed = slices.Sorted(maps.Keys(old))
	if len(*removed) == 0 {
		*removed = nil
	}
	return len(*changed) > 0 || len(*removed) > 0
}

// order sorts every list of a state as its comments promise.
func order(s *v1.ClusterState) {
	slices.SortFunc(s.Nodes, func(a, b *v1.Node) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Id, b.Id))
	})
	slices.SortFunc(s.Links, func(a, b *v1.Link) int { return cmp.Compare(a.Id, b.Id) })
	slices.SortFunc(s.Transfers, func(a, b *v1.Transfer) int {
		return cmp.Or(b.StartedAt.AsTime().Compare(a.StartedAt.AsTime()), cmp.Compare(a.Id, b.Id))
	})
	slices.SortFunc(s.Instances, func(a, b *v1.Instance) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Id, b.Id))
	})
	for _, m := range s.Models {
		slices.SortFunc(m.Copies, func(a, b *v1.ModelCopy) int {
			return cmp.Or(cmp.Compare(a.NodeName, b.NodeName), cmp.Compare(a.Path, b.Path))
		})
	}
	slices.SortFunc(s.Models, func(a, b *v1.Model) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Id, b.Id))
	})
	slices.SortStableFunc(s.Findings, func(a, b *v1.Finding) int {
		return cmp.Or(cmp.Compare(b.Severity, a.Severity), cmp.Compare(a.NodeName, b.NodeName),
			cmp.Compare(a.Code, b.Code), cmp.Compare(a.Subject, b.Subject))
	})
}
