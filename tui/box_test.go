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

// What one node found of another is about that other one.
func TestAFindingOfAnotherNodeBeginsWithThatNode(t *testing.T) {
	before := load(t, "three")
	s := proto.CloneOf(before)
	s.Nodes[2].State = pb.NodeState_NODE_STATE_DOWN
	s.Findings = []*pb.Finding{{
		Code: "node-down", Severity: pb.Severity_SEVERITY_WARNING, Title: "gamma is down", NodeId: "naaaa", NodeName: "alpha", Subject: "ncccc",
	}}
	m := screen(t, before, 80, 24)
	m.take(report{state: s, live: true})
	if v := m.View(); !strings.Contains(v, "▲ gamma is down, seen by alpha") {
		t.Errorf("the box does not begin with gamma:\n%s", v)
	}
	press(m, "7")
	if v := m.View(); !strings.Contains(v, "to look at: gamma is down,") {
		t.Errorf("the log does not begin with gamma:\n%s", v)
	}
	press(m, "5", "enter")
	v := m.View()
	of, by := strings.Index(v, "│ of           node gamma"), strings.Index(v, "│ seen by      alpha")
	if of < 0 || by < of || strings.Contains(v, "ncccc") {
		t.Errorf("the page does not name gamma, then alpha:\n%s", v)
	}
}

func TestTheLegendHasEverySymbolOfAState(t *testing.T) {
	m := screen(t, load(t, "three"), 140, 60)
	press(m, "?")
	v := m.View()
	for _, w := range []word{transferWords[pb.TransferState_TRANSFER_STATE_COPYING], severityWords[pb.Severity_SEVERITY_INFO], {symbol: "·"}} {
		if !strings.Contains(v, "   "+w.symbol+" ") {
			t.Errorf("the legend lacks %s:\n%s", w.symbol, v)
		}
	}
}

func TestTheCopyFormBeginsWithWhatCanBeCopied(t *testing.T) {
	s := load(t, "three")
	// The first model lies everywhere; the second not on gamma.
	full := s.GetModels()[0]
	for _, id := range []string{"naaaa", "nbbbb", "ncccc"} {
		full.Copies = append(full.Copies, &pb.ModelCopy{NodeId: id, Complete: true, Path: "/m"})
	}
	m := screen(t, s, 80, 24)
	press(m, "C")
	f := m.form.(*copyForm)
	if f.model.id() != "m2" || f.node.id() != "ncccc" {
		t.Errorf("chosen are %s to %s", f.model.id(), f.node.id())
	}
	// A third one lies on gamma alone: going to it takes the node along.
	s.Models = append(s.Models, &pb.Model{Id: "m3", Name: "third", SizeBytes: 1, Copies: []*pb.ModelCopy{{NodeId: "ncccc", Complete: true, Path: "/m"}}})
	m = screen(t, s, 80, 24)
	press(m, "C", "end")
	if f = m.form.(*copyForm); f.model.id() != "m3" || f.node.id() != "naaaa" {
		t.Errorf("after another model was chosen: %s to %s", f.model.id(), f.node.id())
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
