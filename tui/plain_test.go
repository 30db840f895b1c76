package tui

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// page of lines that may be read while it is written.
type paper struct {
	mu    sync.Mutex
	text  bytes.Buffer
	wrote chan struct{}
}

func (p *paper) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, err := p.text.Write(b)
	select {
	case p.wrote <- struct{}{}:
	default:
	}
	return n, err
}

// until waits until a text was written.
func (p *paper) until(t *testing.T, text string) {
	t.Helper()
	for {
		p.mu.Lock()
		all := p.text.String()
		p.mu.Unlock()
		if strings.Contains(all, text) {
			return
		}
		select {
		case <-p.wrote:
		case <-t.Context().Done():
			t.Fatalf("%q was not written:\n%s", text, all)
		}
	}
}

func TestWhatEndedLongAgoIsNoChange(t *testing.T) {
	s := &pb.ClusterState{Nodes: []*pb.Node{{Id: "n0", Name: "alpha"}}, Transfers: []*pb.Transfer{
		{Id: "old", Sources: []string{"alpha:old"}, Destination: "beta:x", DestinationNodeId: "n1", State: pb.TransferState_TRANSFER_STATE_DONE},
		{Id: "new", Sources: []string{"alpha:new"}, Destination: "beta:x", DestinationNodeId: "n1", State: pb.TransferState_TRANSFER_STATE_COPYING},
	}}
	copies := func(before *pb.ClusterState) string {
		var out []string
		for _, l := range changes(before, s) {
			if strings.HasPrefix(l.text, "copy ") {
				out = append(out, l.text)
			}
		}
		return strings.Join(out, "\n")
	}
	// Beta is not listed any more, and has a name all the same.
	if got := copies(nil); strings.Contains(got, "old") || !strings.HasPrefix(got, "copy new → beta: copying") {
		t.Errorf("at first it says\n%s", got)
	}
	before := &pb.ClusterState{Nodes: s.Nodes}
	if got := copies(before); !strings.Contains(got, "copy old → beta: done") {
		t.Errorf("of what ended since it says\n%s", got)
	}
}

func TestPlainPrintsOneLinePerChangeAndStops(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	p := &paper{wrote: make(chan struct{}, 1)}
	done := make(chan error, 1)
	go func() {
		done <- Plain(t.Context(), a.dial(t), p, func(s *pb.ClusterState) bool {
			return s.GetInstances()[0].GetState() == pb.InstanceState_INSTANCE_STATE_READY
		})
	}()
	for _, l := range []string{
		"node alpha: up\n",
		"cable beta 0-3 – gamma 0-3: proven, 20 Gb/s of 40 that both ends can\n",
		"copy qwen-235b → gamma: copying 61 % of 119 GB, 3.1 GB/s\n",
		"instance qwen-235b (qwen-235b on alpha+beta): loading 41 %\n",
		"model smol on beta: complete\n",
		"to look at on beta: the cable beta–gamma runs at 20 of 40 Gb/s. To do: unplug it and plug it in again\n",
	} {
		p.until(t, l)
	}
	a.server.Stop()
	p.until(t, "the agent is away: ")
	a.start(t)
	p.until(t, "the agent is back\n")
	i := load(t, "three").GetInstances()[1]
	i.State, i.Name = pb.InstanceState_INSTANCE_STATE_READY, "two\nlines\x1b[0m"
	a.change(&pb.ClusterDelta{Instances: []*pb.Instance{i}})
	p.until(t, `instance two↵lines\x1b[0m (qwen-235b on alpha+beta): ready`+"\n")
	f := load(t, "three").GetInstances()[0]
	f.Name, f.State = "a", pb.InstanceState_INSTANCE_STATE_READY
	a.change(&pb.ClusterDelta{Instances: []*pb.Instance{f}})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestPlainEndsWithItsContext(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	ctx, cancel := context.WithCancel(t.Context())
	p := &paper{wrote: make(chan struct{}, 1)}
	done := make(chan error, 1)
	go func() { done <- Plain(ctx, a.dial(t), p, nil) }()
	p.until(t, "node gamma")
	cancel()
	if err := <-done; !fault.Is(err, fault.Interrupted) {
		t.Errorf("%v", err)
	}
}

func TestNumbersThatAlwaysMoveAreNoChange(t *testing.T) {
	before, after := load(t, "three"), load(t, "three")
	for _, n := range after.GetNodes() {
		n.RttUs += 40
		n.Memory.AvailableBytes -= 1 << 20
	}
	for _, l := range after.GetLinks() {
		l.ATxBytes += 1 << 30
		l.Evidence = "probe 0.3 ms ago"
	}
	after.GetTransfers()[0].DoneBytes += 1 << 20
	if got := changes(before, after); len(got) != 0 {
		t.Errorf("%v", got)
	}
}
