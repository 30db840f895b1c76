package tui

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "tbcluster/api/tbcluster/v1"
)

// manyCopies is a desk with that many copies that are done.
func manyCopies(t *testing.T, n int) *pb.ClusterState {
	t.Helper()
	s := load(t, "three")
	s.Transfers = nil
	for i := range n {
		s.Transfers = append(s.Transfers, &pb.Transfer{
			Id: fmt.Sprintf("t%02d", i), State: pb.TransferState_TRANSFER_STATE_DONE, Sources: []string{fmt.Sprintf("alpha:/old-%02d", i)},
			Destination: "beta:/x", StartedAt: timestamppb.New(noon.Add(-time.Duration(i+1) * time.Minute)),
		})
	}
	return s
}

// Whoever left a box at its end and looks elsewhere sees in it what begins.
func TestABoxWithoutTheKeysShowsWhatBegins(t *testing.T) {
	old := manyCopies(t, 27)
	m := screen(t, old, 80, 24)
	begin := func() {
		s := proto.CloneOf(old)
		s.Transfers = append([]*pb.Transfer{{
			Id: "new", State: pb.TransferState_TRANSFER_STATE_COPYING, Sources: []string{"alpha:/new"}, Destination: "gamma:/x",
			TotalBytes: 100, DoneBytes: 5, StartedAt: timestamppb.New(noon),
		}}, s.Transfers...)
		m.take(report{state: s, live: true})
	}
	press(m, "3", "G", "1")
	begin()
	if v := m.View(); !strings.Contains(v, "▶ new → gamma") || !strings.Contains(v, "1 copying") {
		t.Errorf("a copy that began is not seen:\n%s", v)
	}
	// The box keeps its place for when the keys go to it again.
	press(m, "3")
	if v := m.View(); !strings.Contains(v, "old-26 → beta") || !strings.Contains(v, "28 of 28") {
		t.Errorf("the box lost its place:\n%s", v)
	}
	m.take(report{state: old, live: true})
	begin()
	if v := m.View(); !strings.Contains(v, "old-26 → beta") {
		t.Errorf("a box that has the keys was moved:\n%s", v)
	}
}

func TestTheHeaderNamesInstancesThatAreDegraded(t *testing.T) {
	s := load(t, "three")
	for _, i := range s.GetInstances() {
		i.State = pb.InstanceState_INSTANCE_STATE_DEGRADED
	}
	for _, w := range []int{80, 140} {
		head, _, _ := strings.Cut(screen(t, s, w, 24).View(), "\n")
		if !strings.Contains(head, "▲ 2 degraded") {
			t.Errorf("%d wide: %q", w, head)
		}
	}
}
