package tui

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"

	pb "tbcluster/api/tbcluster/v1"
)

// cabledAtRandom is a cluster of n nodes with so many cables, of which no node
// has more than four.
func cabledAtRandom(r *rand.Rand, n, cables int) *pb.ClusterState {
	s := &pb.ClusterState{Revision: 1, SelfNodeId: "n0", ClusterName: "desk"}
	ports := make([]int, n)
	for i := range n {
		name := strings.Repeat("x", r.IntN(14)) + fmt.Sprintf("node%d", i)
		s.Nodes = append(s.Nodes, &pb.Node{Id: fmt.Sprintf("n%d", i), Name: name, State: pb.NodeState_NODE_STATE_UP, Memory: &pb.Memory{TotalBytes: 128 << 30}})
	}
	for k := 0; k < cables; k++ {
		a, b := r.IntN(n), r.IntN(n)
		if a == b || ports[a] == 4 || ports[b] == 4 {
			continue
		}
		ports[a]++
		ports[b]++
		state := pb.LinkState_LINK_STATE_PROVEN
		if r.IntN(5) == 0 {
			state = pb.LinkState_LINK_STATE_DOWN
		}
		s.Links = append(s.Links, &pb.Link{
			Id: fmt.Sprintf("l%02d", k), State: state, NegotiatedGbps: 40, CapableGbps: 40,
			A: &pb.LinkEnd{NodeId: s.Nodes[a].Id, NodeName: s.Nodes[a].Name, Port: fmt.Sprintf("0-%d", ports[a])},
			B: &pb.LinkEnd{NodeId: s.Nodes[b].Id, NodeName: s.Nodes[b].Name, Port: fmt.Sprintf("0-%d", ports[b])},
		})
	}
	return s
}

// A drawing that is wrong is worse than none: whatever the cables, either each
// pair of nodes has its line with a whole label, or the table is drawn.
func TestDrawingsOfManyNodesAreWholeOrNotMade(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 8))
	drawn, tried := map[int]int{}, map[int]int{}
	for range 120 {
		n := 5 + r.IntN(4)
		s := cabledAtRandom(r, n, n-1+r.IntN(n))
		m := screen(t, s, 80+r.IntN(80), 24+r.IntN(30))
		f := m.frameOf(1)
		d := f.drawing()
		tried[n]++
		lines, _ := drawCluster(f)
		if len(lines) > f.h {
			t.Fatalf("%d lines where there are %d", len(lines), f.h)
		}
		if d == nil {
			continue
		}
		drawn[n]++
		text := ansi.Strip(strings.Join(lines, "\n"))
		pairs, _ := f.pairs()
		labels := strings.Count(text, " 40") + strings.Count(text, "✕ down")
		for k, ls := range pairs {
			up := false
			for _, l := range ls {
				up = up || l.GetState() == pb.LinkState_LINK_STATE_PROVEN
				if _, ok := d.at[l.GetId()]; !ok {
					t.Fatalf("no place for the cable of %v:\n%s", k, text)
				}
			}
		}
		if labels < len(pairs) {
			t.Fatalf("%d labels for %d pairs:\n%s", labels, len(pairs), text)
		}
		for _, x := range s.GetNodes() {
			if _, ok := d.at[x.GetId()]; !ok {
				t.Fatalf("no place for %s:\n%s", x.GetName(), text)
			}
		}
		// Every end of a line is at a node or another line: nothing hangs loose.
		for y := range d.c.h {
			for x := range d.c.w {
				c := d.c.cell(x, y)
				for _, to := range []struct {
					a, back arm
					dx, dy  int
				}{{rightward, left, 1, 0}, {left, rightward, -1, 0}, {up, down, 0, -1}, {down, up, 0, 1}} {
					if c.arms&to.a == 0 {
						continue
					}
					o := d.c.cell(x+to.dx, y+to.dy)
					if o == nil || o.arms != 0 && o.arms&to.back == 0 {
						t.Fatalf("a line breaks off at %d,%d:\n%s", x, y, text)
					}
				}
			}
		}
	}
	t.Logf("drawn %v of %v", drawn, tried)
	for n := range tried {
		if drawn[n]*3 < tried[n] {
			t.Errorf("only %d of %d clusters of %d nodes were drawn", drawn[n], tried[n], n)
		}
	}
}

func TestRingsOfUpToEightAreDrawnAtBothSizes(t *testing.T) {
	for n := 5; n <= 8; n++ {
		s := cabledAtRandom(rand.New(rand.NewPCG(1, 1)), n, 0)
		for i := range n {
			a, b := s.Nodes[i], s.Nodes[(i+1)%n]
			a.Name = fmt.Sprintf("box-%d", i)
			s.Links = append(s.Links, &pb.Link{Id: fmt.Sprint(i), State: pb.LinkState_LINK_STATE_PROVEN, NegotiatedGbps: 40, CapableGbps: 40,
				A: &pb.LinkEnd{NodeId: a.Id}, B: &pb.LinkEnd{NodeId: b.Id}})
		}
		for _, size := range sizes {
			m := screen(t, s, size.w, size.h)
			if m.frameOf(1).drawing() == nil {
				t.Errorf("a ring of %d at %s is no drawing:\n%s", n, size.name, m.View())
			}
		}
	}
}
