package tui

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// nobody is a connection at whose other end is nothing.
type nobody struct{}

func (nobody) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	return errors.New("nobody is there")
}

func (nobody) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errors.New("nobody is there")
}

// agent is a server of the API on a real socket. It has a state that a test
// changes, and keeps what it was asked.
type agent struct {
	pb.UnimplementedClusterServiceServer
	pb.UnimplementedNodeServiceServer
	pb.UnimplementedLinkServiceServer
	pb.UnimplementedPairingServiceServer

	socket string

	mu       sync.Mutex
	state    *pb.ClusterState
	revision uint64
	watchers map[chan *pb.WatchResponse]bool
	asked    []proto.Message
	answers  map[string]error // by the name of the request, e.g. "PlaceRequest"
	joined   chan *pb.OpenResponse
	ended    chan string // streams that their client ended
	hang     chan struct{}
	server   *grpc.Server
}

func newAgent(t testing.TB, state *pb.ClusterState) *agent {
	t.Helper()
	a := &agent{
		socket: filepath.Join(t.TempDir(), "a.sock"), state: state, revision: state.GetRevision(),
		watchers: map[chan *pb.WatchResponse]bool{}, answers: map[string]error{},
		joined: make(chan *pb.OpenResponse), ended: make(chan string, 16),
	}
	a.start(t)
	t.Cleanup(func() { a.server.Stop() })
	return a
}

func (a *agent) start(t testing.TB) {
	t.Helper()
	l, err := net.Listen("unix", a.socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
		a.mu.Lock()
		hang := a.hang
		a.mu.Unlock()
		if hang != nil {
			select {
			case <-hang:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		return h(ctx, req)
	}))
	pb.RegisterClusterServiceServer(s, a)
	pb.RegisterNodeServiceServer(s, a)
	pb.RegisterLinkServiceServer(s, a)
	pb.RegisterPairingServiceServer(s, a)
	pb.RegisterModelServiceServer(s, modelService{a: a})
	pb.RegisterTransferServiceServer(s, transferService{a: a})
	pb.RegisterInstanceServiceServer(s, instanceService{a: a})
	healthpb.RegisterHealthServer(s, health.NewServer())
	a.server = s
	go s.Serve(l)
}

func (a *agent) dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	c, err := grpc.NewClient("unix:"+a.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// change sends a delta to all who watch.
func (a *agent) change(d *pb.ClusterDelta) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.revision++
	for w := range a.watchers {
		w <- &pb.WatchResponse{Revision: a.revision, Event: &pb.WatchResponse_Delta{Delta: d}}
	}
}

func (a *agent) note(m proto.Message) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked = append(a.asked, proto.Clone(m))
	return a.answers[string(m.ProtoReflect().Descriptor().Name())]
}

func (a *agent) answer(request string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers[request] = err
}

// requests of one kind that came, oldest first.
func requests[M proto.Message](a *agent) (out []M) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.asked {
		if m, ok := r.(M); ok {
			out = append(out, m)
		}
	}
	return out
}

func (a *agent) Watch(_ *pb.WatchRequest, s grpc.ServerStreamingServer[pb.WatchResponse]) error {
	ch := make(chan *pb.WatchResponse, 1024)
	a.mu.Lock()
	a.watchers[ch] = true
	first := &pb.WatchResponse{Revision: a.revision, Event: &pb.WatchResponse_Snapshot{Snapshot: a.state}}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		delete(a.watchers, ch)
		a.mu.Unlock()
	}()
	if err := s.Send(first); err != nil {
		return err
	}
	for {
		select {
		case <-s.Context().Done():
			return nil
		case ev := <-ch:
			if err := s.Send(ev); err != nil {
				return err
			}
		}
	}
}

func (a *agent) Forget(_ context.Context, r *pb.ForgetRequest) (*pb.ForgetResponse, error) {
	return &pb.ForgetResponse{}, a.note(r)
}

func (a *agent) Logs(_ *pb.NodeServiceLogsRequest, s grpc.ServerStreamingServer[pb.NodeServiceLogsResponse]) error {
	if err := s.Send(&pb.NodeServiceLogsResponse{Line: &pb.LogLine{Text: "agent is up"}}); err != nil {
		return err
	}
	<-s.Context().Done()
	a.ended <- "node log"
	return nil
}

func (a *agent) Rescan(_ context.Context, r *pb.RescanRequest) (*pb.RescanResponse, error) {
	return &pb.RescanResponse{Links: make([]*pb.Link, 3)}, a.note(r)
}

func (a *agent) Bench(_ context.Context, r *pb.BenchRequest) (*pb.BenchResponse, error) {
	if err := a.note(r); err != nil && !r.GetEvenIfUsed() {
		return nil, err
	}
	l := proto.CloneOf(a.state.GetLinks()[0])
	l.A.NodeName = "al\x1bpha"
	return &pb.BenchResponse{Link: l, Measurement: &pb.LinkMeasurement{AToBBytesPerSecond: 4.8e9, BToABytesPerSecond: 4.7e9, RttUs: 90}}, nil
}

func (a *agent) Open(r *pb.OpenRequest, s grpc.ServerStreamingServer[pb.OpenResponse]) error {
	if err := a.note(r); err != nil {
		return err
	}
	if err := s.Send(&pb.OpenResponse{Event: &pb.OpenResponse_Code{Code: &pb.PairingCode{
		Code: "7-K3QX-9M2D", ExpiresAt: timestamppb.New(time.Now().Add(2 * time.Minute))}}}); err != nil {
		return err
	}
	for {
		select {
		case <-s.Context().Done():
			a.ended <- "open"
			return nil
		case ev := <-a.joined:
			if err := s.Send(ev); err != nil || ev.GetJoined() != nil {
				return err
			}
		}
	}
}

func (a *agent) Join(_ context.Context, r *pb.JoinRequest) (*pb.JoinResponse, error) {
	return &pb.JoinResponse{Peer: &pb.Member{Name: "omega"}}, a.note(r)
}

type modelService struct {
	pb.UnimplementedModelServiceServer
	a *agent
}

func (s modelService) Scan(_ context.Context, r *pb.ScanRequest) (*pb.ScanResponse, error) {
	return &pb.ScanResponse{Models: make([]*pb.Model, 2)}, s.a.note(r)
}

func (s modelService) Remove(_ context.Context, r *pb.RemoveRequest) (*pb.RemoveResponse, error) {
	return &pb.RemoveResponse{}, s.a.note(r)
}

type transferService struct {
	pb.UnimplementedTransferServiceServer
	a *agent
}

func (s transferService) Start(_ context.Context, r *pb.StartTransferRequest) (*pb.StartTransferResponse, error) {
	return &pb.StartTransferResponse{Transfer: &pb.Transfer{Id: "new", State: pb.TransferState_TRANSFER_STATE_SCANNING}}, s.a.note(r)
}

func (s transferService) Watch(_ *pb.WatchTransferRequest, out grpc.ServerStreamingServer[pb.WatchTransferResponse]) error {
	return out.Send(&pb.WatchTransferResponse{Transfer: &pb.Transfer{
		Id: "new", State: pb.TransferState_TRANSFER_STATE_DONE, TotalBytes: 60_000_000, TotalFiles: 1, SkippedBytes: 38_000_000}})
}

func (s transferService) Cancel(_ context.Context, r *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error) {
	return &pb.CancelTransferResponse{}, s.a.note(r)
}

func (s transferService) Pause(_ context.Context, r *pb.PauseTransferRequest) (*pb.PauseTransferResponse, error) {
	return &pb.PauseTransferResponse{}, s.a.note(r)
}

func (s transferService) Resume(_ context.Context, r *pb.ResumeTransferRequest) (*pb.ResumeTransferResponse, error) {
	return &pb.ResumeTransferResponse{}, s.a.note(r)
}

type instanceService struct {
	pb.UnimplementedInstanceServiceServer
	a *agent
}

func (s instanceService) Plan(_ context.Context, r *pb.PlanRequest) (*pb.PlanResponse, error) {
	if err := s.a.note(r); err != nil {
		return nil, err
	}
	ok := &pb.PlanOption{Engine: "llamacpp", Feasible: true, Reason: "all 30 layers fit on one node",
		Ranks: []*pb.PlanRank{{NodeName: "beta", Role: "server", Layers: 30, NeedBytes: 3e8, BudgetBytes: 9e10}}}
	return &pb.PlanResponse{PlanId: "plan-1", Choice: ok, Alternatives: []*pb.PlanOption{ok, {
		Engine: "llamacpp", Reason: "needs 119 GB, gamma may use 48 GB", Ranks: []*pb.PlanRank{{NodeName: "gamma"}}}}}, nil
}

func (s instanceService) Place(_ context.Context, r *pb.PlaceRequest) (*pb.PlaceResponse, error) {
	return &pb.PlaceResponse{Instance: &pb.Instance{Id: "i9", Name: "smol-2"}}, s.a.note(r)
}

func (s instanceService) Stop(_ context.Context, r *pb.StopInstanceRequest) (*pb.StopInstanceResponse, error) {
	return &pb.StopInstanceResponse{}, s.a.note(r)
}

func (s instanceService) Logs(r *pb.InstanceLogsRequest, out grpc.ServerStreamingServer[pb.InstanceLogsResponse]) error {
	if err := s.a.note(r); err != nil {
		return err
	}
	for _, l := range []string{"main: loading model", "\x1b[31mserver is listening\x1b[0m"} {
		if err := out.Send(&pb.InstanceLogsResponse{Line: &pb.LogLine{Text: l, NodeName: "alpha"}}); err != nil {
			return err
		}
	}
	<-out.Context().Done()
	s.a.ended <- "instance log"
	return nil
}

// user sits before a screen that talks to an agent.
type user struct {
	t    *testing.T
	m    *Model
	msgs chan tea.Msg
	left bool
}

func sit(t *testing.T, a *agent, o Options) *user {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	o.Conn = a.dial(t)
	u := &user{t: t, m: NewModel(ctx, o), msgs: make(chan tea.Msg)}
	done := make(chan struct{})
	t.Cleanup(func() {
		cancel()
		// Commands that still run may want to say something.
		go func() {
			for {
				select {
				case <-u.msgs:
				case <-done:
					return
				}
			}
		}()
		for range u.m.feed.out {
		}
		close(done)
	})
	u.m.t = noCodes
	u.run(u.m.Init())
	return u
}

func (u *user) run(c tea.Cmd) {
	if c != nil {
		go func() { u.msgs <- c() }()
	}
}

func (u *user) take(msg tea.Msg) {
	switch msg := msg.(type) {
	case nil:
	case tea.BatchMsg:
		for _, c := range msg {
			u.run(c)
		}
	case tea.QuitMsg:
		u.left = true
	default:
		_, c := u.m.Update(msg)
		u.run(c)
	}
}

func (u *user) press(keys ...string) {
	for _, k := range keys {
		u.take(keyMsg(k))
	}
}

// until waits for something to be so, taking in what comes meanwhile.
func (u *user) until(what string, so func() bool) {
	u.t.Helper()
	limit := time.After(time.Minute)
	for !so() {
		select {
		case msg := <-u.msgs:
			u.take(msg)
		case <-limit:
			u.t.Fatalf("waited in vain for %s; the screen:\n%s", what, u.m.View())
		}
	}
}

// sees waits until the screen shows a text.
func (u *user) sees(text string) {
	u.t.Helper()
	u.until("“"+text+"”", func() bool { return strings.Contains(u.m.View(), text) })
}

func TestScreenFollowsTheAgent(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("desk  3 nodes  4 cables  1 ready, 1 starting  1 copying")
	cut := load(t, "three").GetLinks()[0]
	cut.State, cut.Reason = pb.LinkState_LINK_STATE_DOWN, "the cable was unplugged"
	a.change(&pb.ClusterDelta{Links: []*pb.Link{cut}, RemovedTransferIds: []string{"t1"}})
	u.sees("✕ down")
	u.sees("3/4 cables")
	if strings.Contains(u.m.View(), "qwen-235b → gamma") {
		t.Error("a transfer that is gone is still shown")
	}
	u.press("7")
	u.sees("cable alpha 0-2 – beta 0-1:")
	u.sees("down: the cable was")
}

func TestBurstOfChangesIsDrawnFourTimesASecond(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	ctx, cancel := context.WithCancel(context.Background())
	f := newFeed(a.dial(t), nil)
	go f.run(ctx)
	defer func() {
		cancel()
		for range f.out {
		}
	}()
	r := <-f.out
	if !r.live || len(r.state.GetNodes()) != 3 {
		t.Fatalf("first report: %v", r)
	}
	began := time.Now()
	const last = 500
	go func() {
		for i := range last + 1 {
			n := load(t, "three").GetNodes()[1]
			n.RttUs = uint64(i)
			a.change(&pb.ClusterDelta{Nodes: []*pb.Node{n}})
			time.Sleep(time.Millisecond)
		}
	}()
	reports := 0
	for r := range f.out {
		reports++
		if r.state.GetNodes()[1].GetRttUs() == last {
			break
		}
	}
	if most := int(time.Since(began)/repaintEvery) + 1; reports > most {
		t.Errorf("%d reports in %v, at most %d are wanted", reports, time.Since(began), most)
	}
}

func TestAgentGoesAwayAndComesBack(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	a.server.Stop()
	u.sees("this is old")
	// What was known stays on the screen.
	u.sees("qwen-235b")
	a.mu.Lock()
	a.state, a.revision = load(t, "pair"), 1
	a.mu.Unlock()
	a.start(t)
	u.sees("desk  2 nodes")
	if strings.Contains(u.m.View(), "this is old") {
		t.Error("it is still called old")
	}
}

func TestAgentThatHangsIsNoticed(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	hang := make(chan struct{})
	a.mu.Lock()
	a.hang = hang
	a.mu.Unlock()
	u.sees("this is old: it does not answer")
	a.mu.Lock()
	a.hang = nil
	a.mu.Unlock()
	close(hang)
	u.sees("desk  3 nodes")
}

func TestCopyAModelFromTheScreen(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("4", "down", "C")
	u.sees("gamma has 200 GB free on disk")
	u.sees("checked: 60 MB to send in 1 file, 38 MB are there already")
	u.press("up", "enter")
	u.sees("enter: beta: has it")
	u.press("down", "enter")
	u.sees("copying smol to gamma")
	rs := requests[*pb.StartTransferRequest](a)
	var dry, real []*pb.StartTransferRequest
	for _, r := range rs {
		if r.GetDryRun() {
			dry = append(dry, r)
		} else {
			real = append(real, r)
		}
	}
	if len(dry) == 0 || len(real) != 1 {
		t.Fatalf("%d dry runs, %d copies", len(dry), len(real))
	}
	if r := real[0]; r.GetModel() != "m2" || r.GetModelNode() != "ncccc" || r.GetRequestId() == "" || slices.ContainsFunc(dry, func(d *pb.StartTransferRequest) bool { return d.GetRequestId() == r.GetRequestId() }) {
		t.Errorf("asked for %v", r)
	}
	if u.m.focus != 3 {
		t.Error("the keys do not go to the transfers afterwards")
	}
}

func TestCopyThatIsRefusedSaysWhyAndStaysOpen(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	a.answer("StartTransferRequest", fault.New(fault.DiskFull, "copy smol to gamma", errors.New("no space \x1b[31mleft"), "free 59 MB there").At("gamma:/home/ada"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("4", "down", "C")
	u.sees("no space")
	u.press("enter")
	u.sees("where        gamma:/home/ada")
	u.sees("to do        free 59 MB there")
	u.sees(`no space \x1b[31mleft`)
	if u.m.form == nil {
		t.Error("the form is closed")
	}
}

func TestPlaceAnInstanceFromTheScreen(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("4", "P")
	u.press("down", " ") // beta
	u.sees("[x] beta")
	u.sees("● beta  llamacpp")
	u.sees("rank 0 server on beta: 286 MiB of 84 GiB, 30 layers")
	u.sees("✕ gamma  llamacpp: needs 119 GB, gamma may use 48 GB")
	a.answer("PlaceRequest", fault.Newf(fault.PlanStale, "look at the new plan", "place qwen-235b"))
	u.press("enter")
	u.sees("to do        look at the new plan")
	a.answer("PlaceRequest", nil)
	u.until("a new plan", func() bool { f, ok := u.m.form.(*placeForm); return ok && f.answer != nil })
	u.press("enter")
	u.sees("placing qwen-235b as smol-2")
	plans, places := requests[*pb.PlanRequest](a), requests[*pb.PlaceRequest](a)
	if len(places) != 2 {
		t.Fatalf("%d placements", len(places))
	}
	p := places[1]
	if !proto.Equal(p.GetPlacement(), plans[len(plans)-1].GetPlacement()) || p.GetPlanId() != "plan-1" {
		t.Errorf("placed %v, planned %v", p, plans[len(plans)-1])
	}
	if w := (&pb.Placement{Model: "m1", Nodes: []string{"nbbbb"}, CopyMissing: true}); !proto.Equal(p.GetPlacement(), w) {
		t.Errorf("placed %v, chosen was %v", p.GetPlacement(), w)
	}
	if places[0].GetRequestId() == "" || places[0].GetRequestId() == places[1].GetRequestId() {
		t.Error("a new plan is not a new request")
	}
}

func TestStopAsksFirst(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("2", "s")
	u.sees("Stop the instance qwen-235b?")
	u.sees("rank 1 (rpc) on beta, pid 4201 ends")
	u.press("n")
	u.press("down", "s")
	u.sees("Stop the instance smol?")
	u.press("y")
	u.sees("smol is being stopped")
	if rs := requests[*pb.StopInstanceRequest](a); len(rs) != 1 || rs[0].GetInstance() != "i1" || rs[0].GetRemove() {
		t.Errorf("asked to stop %v", rs)
	}
	u.press("3", "s")
	u.sees("Cancel the copy of qwen-235b → gamma?")
	u.press("y")
	u.sees("what arrived is kept")
	if rs := requests[*pb.CancelTransferRequest](a); len(rs) != 1 || rs[0].GetId() != "t1" {
		t.Errorf("asked to cancel %v", rs)
	}
}

func TestOtherKeysAskTheAgent(t *testing.T) {
	a := newAgent(t, load(t, "broken"))
	u := sit(t, a, Options{})
	u.sees("1/3 nodes")
	u.press("r")
	u.sees("looked again: 3 cables, 2 models on this node")
	u.press("3", " ")
	u.sees("paused; space goes on")
	u.press("down", " ")
	u.sees("it goes on")
	if p, r := requests[*pb.PauseTransferRequest](a), requests[*pb.ResumeTransferRequest](a); len(p) != 1 || p[0].GetId() != "t3" || len(r) != 1 || r[0].GetId() != "t2" {
		t.Errorf("paused %v, resumed %v", p, r)
	}
	u.press("1", "right")
	u.until("beta", func() bool { u.press("right"); return u.m.chosenItem().id == "nbbbb" || u.m.focus != 1 })
	u.press("d", "y")
	u.sees("beta is forgotten")
	if rs := requests[*pb.ForgetRequest](a); len(rs) != 1 || rs[0].GetNode() != "nbbbb" {
		t.Errorf("forgot %v", rs)
	}
	u.press("2", "d")
	u.sees("Remove the record of smol?")
	u.press("y")
	u.sees("smol is removed")
	if rs := requests[*pb.StopInstanceRequest](a); len(rs) != 1 || !rs[0].GetRemove() {
		t.Errorf("removed %v", rs)
	}
}

func TestBenchACable(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("b")
	u.sees("b: choose a cable first, in the drawing (1) or in the list (6)")
	u.press("6", "down", "down", "down", "b") // the first after three nodes
	u.sees("4.8 GB/s al\\x1bpha → beta, 4.7 GB/s back, 0.09 ms")
	if rs := requests[*pb.BenchRequest](a); len(rs) != 1 || rs[0].GetLink() != "l1" || rs[0].GetEvenIfUsed() {
		t.Fatalf("asked to measure %v", rs)
	}
	// One that is used is measured only when the person says so.
	a.answer("BenchRequest", fault.Newf(fault.StillRunning, "wait", "the cable is used").With("link", "l1"))
	u.press("b")
	u.sees("Measure the cable alpha 0-2 – beta 0-1 all the same?")
	u.sees("what it leaves")
	u.press("n", "b")
	u.sees("Are you sure?")
	u.press("y")
	u.sees("4.8 GB/s")
	rs := requests[*pb.BenchRequest](a)
	if len(rs) != 4 || !rs[3].GetEvenIfUsed() || rs[2].GetEvenIfUsed() {
		t.Errorf("asked to measure %v", rs)
	}
	// Of one that carries something now it is known without asking.
	u.press("6", "end", "up", "up", "b")
	u.sees("it carries 1.6 GB/s now")
	if n := len(requests[*pb.BenchRequest](a)); n != 4 {
		t.Errorf("it was measured without being asked: %d requests", n)
	}
}

func TestDeleteACopyOfAModel(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("4", "down", "d")
	u.sees("Delete a copy of a model")
	u.press("down", "enter")
	u.sees("Delete smol on beta?")
	u.press("n")
	if rs := requests[*pb.RemoveRequest](a); len(rs) != 0 {
		t.Fatalf("deleted %v", rs)
	}
	u.press("d", "down", "enter", "y")
	u.sees("smol is deleted on beta")
	if rs := requests[*pb.RemoveRequest](a); len(rs) != 1 || rs[0].GetModel() != "m2" || rs[0].GetNode() != "nbbbb" {
		t.Errorf("deleted %v", rs)
	}
}

func TestTheLogOnTheWholeScreen(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("2", "down", "l")
	u.sees("╭ instance smol: log ─")
	u.sees("server is listening")
	u.press("l")
	u.sees("╭ instance smol ─")
	u.press("esc")
	u.sees("1 Cluster")
	// In the drawing l goes to the right, L is the log of this node's agent.
	u.press("1", "l")
	if it := u.m.chosenItem(); it.kind != linkKind {
		t.Errorf("l went to %v", it)
	}
	u.press("L")
	u.sees("L: only an instance (2) and this node have a log")
	u.press("h", "L")
	u.sees("agent is up")
}

// clipboards are what a terminal was told to put into its clipboard.
var clipboards = regexp.MustCompile(`\x1b\]52;c;([A-Za-z0-9+/=]*)(?:\x07|\x1b\\)`)

func TestCopyToTheClipboard(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	var out bytes.Buffer
	env := map[string]string{"TERM": "xterm-256color"}
	u.m.out, u.m.getenv = &out, func(k string) string { return env[k] }
	copied := func() string {
		t.Helper()
		m := clipboards.FindStringSubmatch(out.String())
		out.Reset()
		if m == nil {
			t.Fatal("nothing was copied")
		}
		b, err := base64.StdEncoding.DecodeString(m[1])
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, c := range []struct {
		keys []string
		says string
		want string
	}{
		{[]string{"1"}, "copied the ID of alpha to the clipboard", "naaaa"},
		{[]string{"2", "down"}, "copied the name of the instance", "smol"},
		{[]string{"3"}, "copied the destination", "gamma:/home/ada/models"},
		{[]string{"4"}, "copied the name of the model", "qwen-235b"},
		{[]string{"6", "end"}, "copied the ID of the cable", "l4"},
	} {
		u.press(c.keys...)
		u.press("y")
		u.sees(c.says)
		if got := copied(); !strings.HasPrefix(got, c.want) {
			t.Errorf("after %v: %q", c.keys, got)
		}
	}
	u.press("5", "enter", "y")
	u.sees("copied this page")
	if got := copied(); !strings.Contains(got, "the cable beta–gamma runs at 20 of 40 Gb/s") || strings.Contains(got, "│") || strings.Contains(got, "\x1b") {
		t.Errorf("a page: %q", got)
	}
	u.press("Y")
	u.sees("mark it with the mouse")
	if v := u.m.View(); strings.Contains(v, "│") || !strings.Contains(v, "runs at 20 of 40 Gb/s") {
		t.Errorf("something stands beside the text:\n%s", v)
	}
	u.press("esc", "esc")
	for k, v := range map[string]string{"TERM": "linux", "TERM_PROGRAM": "Apple_Terminal", "STY": "1.pts"} {
		env = map[string]string{k: v}
		u.press("1", "y")
		u.sees("mark it with the mouse")
		if out.Len() > 0 || !strings.Contains(u.m.View(), "naaaa") {
			t.Errorf("%s=%s: wrote %q:\n%s", k, v, out.String(), u.m.View())
		}
		u.press("esc")
	}
}

// What was copied, and the key for where that did not work, stand in one line of
// the smallest terminal.
func TestWhatWasCopiedIsSaidWhole(t *testing.T) {
	s := load(t, "three")
	s.Nodes[0].Name = strings.Repeat("long", 15)
	for _, keys := range [][]string{{"1"}, {"2"}, {"3"}, {"4"}, {"5"}, {"6", "end"}, {"5", "enter"}, {"L"}} {
		m := screen(t, s, 80, 24)
		var out bytes.Buffer
		m.out, m.getenv = &out, func(string) string { return "" }
		press(m, keys...)
		m.Update(m.yank()())
		v := m.View()
		if last := v[strings.LastIndex(v, "\n")+1:]; !strings.Contains(last, "copied ") || !strings.Contains(last, "Y shows it") {
			t.Errorf("after %v: %q", keys, last)
		}
	}
}

func TestTheCommandOfAFindingIsWhatIsCopied(t *testing.T) {
	for fix, want := range map[string]string{
		"Run `sudo modprobe thunderbolt_net`. If that fails, install `linux-modules-extra`.": "sudo modprobe thunderbolt_net",
		"Run `tbcluster pair` here and `tbcluster pair CODE` there.":                         "tbcluster pair\ntbcluster pair CODE",
		"Plug it in again, or leave it.":                                                     "",
		"an odd ` quote":                                                                     "",
	} {
		if got := strings.Join(quoted(fix), "\n"); got != want {
			t.Errorf("%q: %q, want %q", fix, got, want)
		}
	}
}

func TestAnErrorIsShownInFull(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	a.answer("RescanRequest", fault.New(fault.Denied, "look for cables", errors.New("you are not an owner"), "ask ada to run `tbcluster config`"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("r")
	u.sees("That did not work")
	u.sees("you are not an owner")
	u.sees("ask ada to run")
	u.press("esc")
	u.sees("1 Cluster")
}

func TestKeysThatDoNotApplySayWhy(t *testing.T) {
	for _, c := range []struct {
		state string
		keys  []string
		says  string
	}{
		{"alone", []string{"C"}, "C: no node has a model yet"},
		{"alone-cabled", []string{"C"}, "C: there is no other node to copy to; p pairs one"},
		{"three", []string{"s"}, "s: choose an instance (2) or a transfer (3) first"},
		{"three", []string{"3", "down", "s"}, "s: this transfer is over"},
		{"three", []string{"d"}, "d: alpha is not down"},
		{"broken", []string{"2", "s"}, "s: smol has ended already; d removes its record"},
		{"three", []string{":"}, ": commands cannot be run from here"},
		{"three", []string{"7", "enter"}, "enter: nothing is chosen here"},
		{"three", []string{"3", "down", " "}, "space: only a transfer that is copying or paused"},
		{"three", []string{"enter", "/"}, "/: there is nothing to look through"},
		{"alone-cabled", []string{"6", "end", "b"}, "b: the machine at the other end has not paired; p pairs it"},
		{"broken", []string{"6", "down", "down", "down", "b"}, "b: this cable is down; only one that is proven can be measured"},
		{"three", []string{"3", "d"}, "d: choose a node that is down, an instance that has ended, or a model"},
		{"three", []string{"4", "L"}, "L: only an instance (2) and this node have a log"},
		{"three", []string{"6", "down", "L"}, "L: the log of another node's agent is read there"},
		{"three", []string{"7", "y"}, "y: nothing is chosen here"},
		{"alone", []string{"c"}, "C: no node has a model yet"},
	} {
		m := screen(t, load(t, c.state), 80, 24)
		press(m, c.keys...)
		if v := m.View(); !strings.Contains(v, c.says) {
			t.Errorf("%s after %v does not say %q:\n%s", c.state, c.keys, c.says, v)
		}
	}
}

func TestPairByShowingACode(t *testing.T) {
	a := newAgent(t, load(t, "alone"))
	u := sit(t, a, Options{})
	u.sees("No other node yet")
	u.press("p", "enter")
	u.sees("tbcluster pair 7-K3QX-9M2D")
	a.joined <- &pb.OpenResponse{Event: &pb.OpenResponse_WrongTryFrom{WrongTryFrom: "192.168.5.9"}}
	u.sees("a wrong code was tried from 192.168.5.9")
	a.joined <- &pb.OpenResponse{Event: &pb.OpenResponse_Joined{Joined: &pb.Member{Name: "be\x1b[2Jta", NodeId: "nbbbb"}}}
	u.sees(`● be\x1b[2Jta has joined`)
	u.press("enter")
	u.sees("1 Cluster")
}

func TestClosingThePairFormWithdrawsTheCode(t *testing.T) {
	a := newAgent(t, load(t, "alone"))
	u := sit(t, a, Options{})
	u.sees("1 node")
	u.press("p", "enter")
	u.sees("7-K3QX-9M2D")
	u.press("esc")
	if got := <-a.ended; got != "open" {
		t.Errorf("%q ended", got)
	}
}

func TestPairByTypingACode(t *testing.T) {
	a := newAgent(t, load(t, "alone"))
	a.answer("JoinRequest", fault.Newf(fault.PairingFailed, "ask for a new code there", "pair by this code"))
	u := sit(t, a, Options{})
	u.sees("1 node")
	u.press("p", "7", "-", "A", "enter")
	u.sees("to do: ask for a new code there")
	a.answer("JoinRequest", nil)
	u.press("B", "enter")
	u.sees("paired with omega")
	if rs := requests[*pb.JoinRequest](a); len(rs) != 2 || rs[1].GetCode() != "7-AB" {
		t.Errorf("joined by %v", rs)
	}
}

func TestPairAsRootAsksAsWhomOthersAct(t *testing.T) {
	a := newAgent(t, load(t, "alone"))
	a.answer("OpenRequest", fault.Newf(fault.Usage, "name the user: --as NAME", "root pairs").With("field", "local_user"))
	u := sit(t, a, Options{})
	u.sees("1 node")
	u.press("p", "enter")
	u.sees("act here as the user:")
	u.press("enter")
	u.sees("type the name of a user of this machine first")
	a.answer("OpenRequest", nil)
	u.press("a", "d", "a", "enter")
	u.sees("tbcluster pair 7-K3QX-9M2D")
	if rs := requests[*pb.OpenRequest](a); len(rs) != 2 || rs[1].GetLocalUser() != "ada" {
		t.Errorf("opened by %v", rs)
	}
}

func TestInstancePageFollowsItsLogAndEscComesBack(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("2", "down", "enter")
	u.sees("instance smol")
	u.sees(`\x1b[31mserver is listening`)
	u.press("esc")
	if got := <-a.ended; got != "instance log" {
		t.Errorf("%q ended", got)
	}
	if it := u.m.chosenItem(); it.id != "i1" || u.m.focus != 2 {
		t.Errorf("came back to %v in panel %d", it, u.m.focus)
	}
	u.press("1", "enter")
	u.sees("agent is up")
	u.press("q")
	u.until("the screen to end", func() bool { return u.left })
	if got := <-a.ended; got != "node log" {
		t.Errorf("%q ended", got)
	}
}

func TestTheCursorStaysOnItsThing(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	u := sit(t, a, Options{})
	u.sees("3 nodes")
	u.press("2", "down")
	i := load(t, "three").GetInstances()[0]
	i.Id, i.Name = "i0", "aaa"
	a.change(&pb.ClusterDelta{Instances: []*pb.Instance{i}})
	u.sees("aaa")
	if got := u.m.chosenItem().id; got != "i1" {
		t.Errorf("a new line above moved the cursor to %s", got)
	}
	a.change(&pb.ClusterDelta{RemovedInstanceIds: []string{"i1"}})
	u.until("smol to go", func() bool { return u.m.snap.instance("i1") == nil })
	if got := u.m.chosenItem().id; got != "i2" {
		t.Errorf("after its thing went away the cursor is on %s", got)
	}
}

func TestCommandsRunFromTheScreen(t *testing.T) {
	a := newAgent(t, load(t, "three"))
	begun := make(chan []string, 1)
	u := sit(t, a, Options{
		Command: func(ctx context.Context, args []string, out io.Writer) error {
			begun <- args
			if _, err := out.Write([]byte("line one\n\x1b[31mred\x1b[0m \x07bell\npart")); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		},
		Complete: func(_ context.Context, args []string) []string {
			if slices.Equal(args, []string{"logs", "qw"}) {
				return []string{"smol", "qwen-235b"}
			}
			return nil
		},
	})
	u.sees("3 nodes")
	u.press(":", "l", "o", "g", "s", " ", "q", "w", "tab")
	u.sees(":logs qwen-235b ")
	u.press("'", "a", " ", "b", "'", "enter")
	if got := <-begun; !slices.Equal(got, []string{"logs", "qwen-235b", "a b"}) {
		t.Errorf("ran %q", got)
	}
	u.sees("line one")
	u.sees(`red \x07bell`)
	u.press("esc")
	u.sees("1 Cluster")
}
