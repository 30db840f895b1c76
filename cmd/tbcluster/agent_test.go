package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// agentDouble is an agent at the other end of a real socket: real gRPC, real
// messages, canned answers. Calls that have no answer are Unimplemented.
type agentDouble struct {
	tbv1.UnimplementedClusterServiceServer
	tbv1.UnimplementedNodeServiceServer
	tbv1.UnimplementedLinkServiceServer
	tbv1.UnimplementedPairingServiceServer
	tbv1.UnimplementedModelServiceServer
	tbv1.UnimplementedTransferServiceServer
	tbv1.UnimplementedInstanceServiceServer
	tbv1.UnimplementedDoctorServiceServer

	socket string
	server *grpc.Server

	mu    sync.Mutex
	calls []any // requests in the order in which they came

	state     *tbv1.ClusterState
	events    []*tbv1.WatchResponse
	transfers []*tbv1.WatchTransferResponse // of Watch; after them it waits for Cancel unless the last has ended
	cancelled chan struct{}
	instances chan *tbv1.Instance // of Watch
	fault     map[string]error    // by method
	plan      *tbv1.PlanResponse
	check     *tbv1.CheckResponse
	ping      *tbv1.PingResponse
	bench     map[string]*tbv1.BenchResponse // by link; those that are missing fail
	lines     []*tbv1.LogLine
	open      []*tbv1.OpenResponse
	joined    func(*tbv1.JoinRequest) (*tbv1.JoinResponse, error)
	members   []*tbv1.Member
}

// startDouble serves d on a socket until the test ends.
func startDouble(t *testing.T, d *agentDouble) *agentDouble {
	t.Helper()
	dir, err := os.MkdirTemp("", "tb") // short: socket paths have 107 characters
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d.socket = filepath.Join(dir, "agent.sock")
	d.serve(t)
	return d
}

func (d *agentDouble) serve(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", d.socket)
	if err != nil {
		t.Fatal(err)
	}
	if d.cancelled == nil {
		d.cancelled = make(chan struct{})
	}
	s := grpc.NewServer(
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			if err := d.called(filepath.Base(info.FullMethod), req); err != nil {
				return nil, err
			}
			return h(ctx, req)
		}),
	)
	tbv1.RegisterClusterServiceServer(s, d)
	tbv1.RegisterNodeServiceServer(s, d)
	tbv1.RegisterLinkServiceServer(s, d)
	tbv1.RegisterPairingServiceServer(s, pairingDouble{d: d})
	tbv1.RegisterModelServiceServer(s, d)
	tbv1.RegisterTransferServiceServer(s, transferDouble{d: d})
	tbv1.RegisterInstanceServiceServer(s, instanceDouble{d: d})
	tbv1.RegisterDoctorServiceServer(s, d)
	d.server = s
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
}

// called notes a request and returns the error that it is to get.
func (d *agentDouble) called(method string, req any) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, req)
	return d.fault[method]
}

// request returns the last request of type T.
func request[T any](t *testing.T, d *agentDouble) T {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := len(d.calls) - 1; i >= 0; i-- {
		if r, ok := d.calls[i].(T); ok {
			return r
		}
	}
	var none T
	t.Fatalf("no %T was asked; the calls were %v", none, d.calls)
	return none
}

func (d *agentDouble) GetState(context.Context, *tbv1.GetStateRequest) (*tbv1.GetStateResponse, error) {
	return &tbv1.GetStateResponse{State: d.state}, nil
}

func (d *agentDouble) Watch(_ *tbv1.WatchRequest, s grpc.ServerStreamingServer[tbv1.WatchResponse]) error {
	for _, e := range d.events {
		if err := s.Send(e); err != nil {
			return err
		}
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (d *agentDouble) Ping(context.Context, *tbv1.PingRequest) (*tbv1.PingResponse, error) {
	return d.ping, nil
}

func (d *agentDouble) Bench(_ context.Context, q *tbv1.BenchRequest) (*tbv1.BenchResponse, error) {
	if r := d.bench[q.GetLink()]; r != nil {
		return r, nil
	}
	return nil, fault.Newf(fault.StillRunning, "wait", "the cable %s is used", q.GetLink())
}

func (d *agentDouble) Forget(context.Context, *tbv1.ForgetRequest) (*tbv1.ForgetResponse, error) {
	return &tbv1.ForgetResponse{}, nil
}

func (d *agentDouble) Rename(_ context.Context, r *tbv1.RenameRequest) (*tbv1.RenameResponse, error) {
	return &tbv1.RenameResponse{Node: &tbv1.Node{Name: r.GetName()}}, nil
}

func (d *agentDouble) Changes(context.Context, *tbv1.ChangesRequest) (*tbv1.ChangesResponse, error) {
	return &tbv1.ChangesResponse{Applied: []string{"ip address add 10.77.3.1/30 dev thunderbolt0"}}, nil
}

// Shutdown ends the server, as the real agent does, once the answer is sent.
func (d *agentDouble) Shutdown(context.Context, *tbv1.ShutdownRequest) (*tbv1.ShutdownResponse, error) {
	go d.server.GracefulStop()
	return &tbv1.ShutdownResponse{Undone: []string{"address 10.77.3.1/30 on thunderbolt0"}, Pids: []uint32{7}}, nil
}

func (d *agentDouble) Logs(r *tbv1.NodeServiceLogsRequest, s grpc.ServerStreamingServer[tbv1.NodeServiceLogsResponse]) error {
	if err := d.called("Logs", r); err != nil {
		return err
	}
	for _, l := range d.lines {
		if err := s.Send(&tbv1.NodeServiceLogsResponse{Line: l}); err != nil {
			return err
		}
	}
	return nil
}

func (d *agentDouble) Add(_ context.Context, r *tbv1.AddRequest) (*tbv1.AddResponse, error) {
	return &tbv1.AddResponse{Model: &tbv1.Model{Name: filepath.Base(r.GetPath()), SizeBytes: 98_362_432}}, nil
}

func (d *agentDouble) Remove(context.Context, *tbv1.RemoveRequest) (*tbv1.RemoveResponse, error) {
	return &tbv1.RemoveResponse{Paths: []string{"/home/ada/models/smol.gguf"}, FreedBytes: 98_362_432}, nil
}

func (d *agentDouble) Scan(context.Context, *tbv1.ScanRequest) (*tbv1.ScanResponse, error) {
	return &tbv1.ScanResponse{Models: d.state.GetModels()}, nil
}

func (d *agentDouble) Check(context.Context, *tbv1.CheckRequest) (*tbv1.CheckResponse, error) {
	return d.check, nil
}

// The methods of these have names that other services use too.
type (
	transferDouble struct {
		tbv1.UnimplementedTransferServiceServer
		d *agentDouble
	}
	instanceDouble struct {
		tbv1.UnimplementedInstanceServiceServer
		d *agentDouble
	}
	pairingDouble struct {
		tbv1.UnimplementedPairingServiceServer
		d *agentDouble
	}
)

func (x transferDouble) Start(context.Context, *tbv1.StartTransferRequest) (*tbv1.StartTransferResponse, error) {
	return &tbv1.StartTransferResponse{Transfer: &tbv1.Transfer{Id: "cp-1", State: tbv1.TransferState_TRANSFER_STATE_SCANNING}}, nil
}

func (x transferDouble) Watch(r *tbv1.WatchTransferRequest, s grpc.ServerStreamingServer[tbv1.WatchTransferResponse]) error {
	var last *tbv1.Transfer
	for _, e := range x.d.transfers {
		last = e.GetTransfer()
		if err := s.Send(e); err != nil {
			return err
		}
	}
	if transferEnded(last) {
		return nil
	}
	select {
	case <-x.d.cancelled:
		return s.Send(&tbv1.WatchTransferResponse{Transfer: &tbv1.Transfer{
			Id: r.GetId(), State: tbv1.TransferState_TRANSFER_STATE_CANCELLED, DoneBytes: last.GetDoneBytes(), TotalBytes: last.GetTotalBytes(),
		}})
	case <-s.Context().Done():
		return s.Context().Err()
	}
}

func (x transferDouble) Cancel(context.Context, *tbv1.CancelTransferRequest) (*tbv1.CancelTransferResponse, error) {
	close(x.d.cancelled)
	return &tbv1.CancelTransferResponse{}, nil
}

func (x instanceDouble) Plan(context.Context, *tbv1.PlanRequest) (*tbv1.PlanResponse, error) {
	return x.d.plan, nil
}

func (x instanceDouble) Place(_ context.Context, r *tbv1.PlaceRequest) (*tbv1.PlaceResponse, error) {
	return &tbv1.PlaceResponse{Instance: &tbv1.Instance{Id: "i-1", Name: "smol", State: tbv1.InstanceState_INSTANCE_STATE_PLANNED}}, nil
}

func (x instanceDouble) List(context.Context, *tbv1.ListInstancesRequest) (*tbv1.ListInstancesResponse, error) {
	return &tbv1.ListInstancesResponse{Instances: x.d.state.GetInstances()}, nil
}

func (x instanceDouble) Watch(_ *tbv1.WatchInstanceRequest, s grpc.ServerStreamingServer[tbv1.WatchInstanceResponse]) error {
	for {
		select {
		case i, ok := <-x.d.instances:
			if !ok {
				return nil
			}
			if err := s.Send(&tbv1.WatchInstanceResponse{Instance: i}); err != nil {
				return err
			}
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

func (x instanceDouble) Stop(_ context.Context, r *tbv1.StopInstanceRequest) (*tbv1.StopInstanceResponse, error) {
	return &tbv1.StopInstanceResponse{Instance: &tbv1.Instance{Id: "i-1", Name: r.GetInstance(), State: tbv1.InstanceState_INSTANCE_STATE_STOPPING}}, nil
}

func (x instanceDouble) Logs(r *tbv1.InstanceLogsRequest, s grpc.ServerStreamingServer[tbv1.InstanceLogsResponse]) error {
	if err := x.d.called("InstanceLogs", r); err != nil {
		return err
	}
	for _, l := range x.d.lines {
		if err := s.Send(&tbv1.InstanceLogsResponse{Line: l}); err != nil {
			return err
		}
	}
	return nil
}

func (x pairingDouble) Open(r *tbv1.OpenRequest, s grpc.ServerStreamingServer[tbv1.OpenResponse]) error {
	if err := x.d.called("Open", r); err != nil {
		return err
	}
	for _, e := range x.d.open {
		if err := s.Send(e); err != nil {
			return err
		}
		if e.GetJoined() != nil {
			return nil
		}
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (x pairingDouble) Join(_ context.Context, r *tbv1.JoinRequest) (*tbv1.JoinResponse, error) {
	return x.d.joined(r)
}

func (x pairingDouble) List(context.Context, *tbv1.PairingServiceListRequest) (*tbv1.PairingServiceListResponse, error) {
	return &tbv1.PairingServiceListResponse{Members: x.d.members}, nil
}

func (x pairingDouble) Map(_ context.Context, r *tbv1.MapRequest) (*tbv1.MapResponse, error) {
	if r.GetLocalUser() == "" {
		return &tbv1.MapResponse{}, nil
	}
	return &tbv1.MapResponse{Mappings: []string{r.GetNode() + "/" + r.GetUser() + "=" + r.GetLocalUser()}}, nil
}

func (x pairingDouble) Revoke(_ context.Context, q *tbv1.RevokeRequest) (*tbv1.RevokeResponse, error) {
	if q.GetNode() == x.d.members[2].GetName() { // it is out
		return &tbv1.RevokeResponse{}, nil
	}
	return &tbv1.RevokeResponse{Revoked: x.d.members[1:2], Introduced: x.d.members[2:3]}, nil
}

// result is what one run of the program did.
type result struct {
	code     int
	out, err string
}

// tb runs one command line against d.
func tb(t *testing.T, d *agentDouble, args ...string) result {
	t.Helper()
	return tbIn(t.Context(), d, "", args...)
}

func tbIn(ctx context.Context, d *agentDouble, stdin string, args ...string) result {
	var out, errOut bytes.Buffer
	g := &globals{in: bytes.NewBufferString(stdin), out: &out, errOut: &errOut, run: "/nonexistent", getenv: func(string) string { return "" }}
	if d != nil {
		args = append(args[:len(args):len(args)], "--socket", d.socket)
	}
	code := run(ctx, g, args)
	return result{code, out.String(), errOut.String()}
}

// wantCode fails the test with everything that was printed when the exit code
// is another one.
func (r result) wantCode(t *testing.T, code int) {
	t.Helper()
	if r.code != code {
		t.Fatalf("exit code is %d, want %d\nstdout:\n%s\nstderr:\n%s", r.code, code, r.out, r.err)
	}
}

// golden compares got with a file in testdata; UPDATE_GOLDEN=1 writes it.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what was printed (UPDATE_GOLDEN=1 takes it over):\n%s", file, got)
	}
}

// noon is the time at which everything in deskState happened.
var noon = timestamppb.New(time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC))

// deskState is a cluster with one of everything.
func deskState() *tbv1.ClusterState {
	return &tbv1.ClusterState{
		Revision: 42, SelfNodeId: "AAAA-1", ClusterName: "desk",
		Nodes: []*tbv1.Node{
			{Id: "AAAA-1", Name: "alpha", State: tbv1.NodeState_NODE_STATE_UP, StateSince: noon, Os: "linux", OsVersion: "Debian GNU/Linux 12", Arch: "amd64", Version: "0.1.0",
				Memory: &tbv1.Memory{TotalBytes: 128 << 30, AvailableBytes: 100 << 30}, DiskFreeBytes: 512_000_000_000, CpuCount: 32, Self: true, Role: tbv1.Role_ROLE_ADMIN,
				NodeAddress: "10.77.0.1", GatewayAddress: "127.0.0.1:8555", MetricsAddress: "127.0.0.1:7880", Privileged: true, BootId: "b-1", StartedAt: noon,
				Engines: []*tbv1.Engine{{Name: "llamacpp", Available: true, Version: "b10068", Path: "/opt/tbcluster/engines/llamacpp/bin/llama-server"}}},
			{Id: "BBBB-2", Name: "beta", State: tbv1.NodeState_NODE_STATE_DOWN, Reason: "nothing heard for 11 s", StateSince: noon, Os: "darwin", OsVersion: "macOS 26.2",
				Version: "0.1.0", Memory: &tbv1.Memory{TotalBytes: 512 << 30}, Role: tbv1.Role_ROLE_ADMIN},
		},
		Links: []*tbv1.Link{
			{Id: "l-1", A: &tbv1.LinkEnd{NodeId: "AAAA-1", NodeName: "alpha", Port: "0-1", Interface: "thunderbolt0", Address: "10.77.3.1/30", Mtu: 65520},
				B:     &tbv1.LinkEnd{NodeId: "BBBB-2", NodeName: "beta", Port: "0-2", Interface: "en5", Address: "10.77.3.2/30", Mtu: 65520},
				State: tbv1.LinkState_LINK_STATE_PROVEN, Evidence: "UUIDs match both ways; probe 0.2 s ago", StateSince: noon, NegotiatedGbps: 20, CapableGbps: 40, Lanes: 2,
				Paths: []*tbv1.Path{{Transport: "tcp", Interface: "thunderbolt0", Address: "10.77.3.1", PeerAddress: "10.77.3.2"}}, RttUs: 210, ATxBytes: 99, ARxBytes: 7},
			{Id: "l-2", A: &tbv1.LinkEnd{NodeId: "AAAA-1", NodeName: "alpha", Port: "0-3"}, State: tbv1.LinkState_LINK_STATE_CABLED, Reason: "the machine there has not paired", StateSince: noon},
		},
		Transfers: []*tbv1.Transfer{{Id: "cp-0123456789ab", Sources: []string{"alpha:models/x.gguf"}, Destination: "beta:/home/ada/models/x.gguf",
			State: tbv1.TransferState_TRANSFER_STATE_COPYING, TotalBytes: 1000, DoneBytes: 610, TotalFiles: 3, DoneFiles: 1, BytesPerSecond: 3_100_000_000,
			Eta: durationpb.New(41 * time.Second), Links: []*tbv1.LinkProgress{{LinkId: "l-1", Interface: "thunderbolt0", Bytes: 610, BytesPerSecond: 3_100_000_000, Transport: "tcp", Kind: "cable"}},
			StartedAt: noon, User: "ada"}},
		Instances: []*tbv1.Instance{{Id: "i-1", Name: "smol", Model: "smollm2", ModelId: "ffff", Engine: "llamacpp", State: tbv1.InstanceState_INSTANCE_STATE_FAILED,
			Reason: "rank 1 on beta ended: signal 9", StateSince: noon, CreatedAt: noon, OwnerNodeId: "AAAA-1", User: "ada",
			Ranks: []*tbv1.Rank{
				{Index: 0, NodeId: "AAAA-1", NodeName: "alpha", Pid: 4711, State: tbv1.RankState_RANK_STATE_EXITED, Role: "server", ExitStatus: "exit 0"},
				{Index: 1, NodeId: "BBBB-2", NodeName: "beta", State: tbv1.RankState_RANK_STATE_EXITED, Role: "rpc", ExitStatus: "signal 9", LastLines: []string{"Remote RPC server crashed"}},
			}}},
		Models: []*tbv1.Model{{Id: "ffff", Name: "smollm2", Format: "gguf", Quant: "Q4_1", SizeBytes: 98_362_432, Architecture: "llama", Layers: 30, ContextTokens: 8192,
			Copies: []*tbv1.ModelCopy{{NodeId: "AAAA-1", NodeName: "alpha", Path: "/home/ada/models/smol.gguf", Tree: "dir", Complete: true},
				{NodeId: "BBBB-2", NodeName: "beta", Path: "/home/ada/models/smol.gguf", Tree: "dir", Reason: "truncated"}}}},
		Findings: []*tbv1.Finding{{Code: "link-below-capability", Severity: tbv1.Severity_SEVERITY_WARNING, Title: "alpha–beta runs at 20 of 40 Gb/s", Meaning: "The cable was trained at half its rate.",
			Fix: "Unplug it and plug it in again.", Evidence: "negotiated 20, capable 40", NodeId: "AAAA-1", NodeName: "alpha", Subject: "l-1", Since: noon}},
	}
}

// denied is an error as the agent gives it.
func denied() error {
	return fault.New(fault.Denied, "change the cluster", errors.New("user ada is no owner"), "add ada to owners").At("alpha")
}

func (x pairingDouble) AddClient(_ context.Context, r *tbv1.AddClientRequest) (*tbv1.AddClientResponse, error) {
	return &tbv1.AddClientResponse{Client: &tbv1.Member{NodeId: "LLLL-9", Name: r.GetName(), Role: r.GetRole(), Client: true}, Bundle: []byte("a bundle\n")}, nil
}

func (x pairingDouble) NewIdentity(context.Context, *tbv1.NewIdentityRequest) (*tbv1.NewIdentityResponse, error) {
	old := x.d.state.GetSelfNodeId()
	x.d.state = &tbv1.ClusterState{SelfNodeId: "NEW-1"}
	return &tbv1.NewIdentityResponse{OldNodeId: old, Others: []string{"beta"}}, nil
}
