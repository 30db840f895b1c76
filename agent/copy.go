package agent

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"path"
	"strings"

	"google.golang.org/grpc"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/host/frame"
	"tbcluster/transfer"
)

// WorkerHello is the first message on a worker's control stream: what it is to
// do.
type WorkerHello struct {
	Kind string `json:"kind"`
	// EngineDirs are further directories to look for engines in.
	EngineDirs []string `json:"engine_dirs,omitempty"`
}

// The kinds of work.
const (
	WorkTransfer  = "transfer"
	WorkCatalogue = "catalogue"
)

// openWorker starts a worker on a node for a person and tells it what to do.
func (a *Agent) openWorker(ctx context.Context, node string, who host.Asker, user *peerv1.User, kind, id string) (io.ReadWriteCloser, error) {
	var c io.ReadWriteCloser
	var err error
	if node == a.id() {
		paired := who.Node != "" && a.isPairedUser(who.Node, user)
		conn, _, werr := a.root.Worker(ctx, who, paired)
		if werr != nil {
			return nil, a.unmapped(werr, who)
		}
		c = conn
	} else if c, err = a.remoteWorker(ctx, node, user, id); err != nil {
		return nil, err
	}
	if err := frame.New(c).Send(WorkerHello{Kind: kind}); err != nil {
		_ = c.Close() // the worker is gone, as the error says
		return nil, fault.New(fault.Internal, "tell a worker what to do", err, "try again")
	}
	return c, nil
}

// linkPaths lists the proven cables between two nodes, and the LAN behind them.
func (a *Agent) linkPaths(src, dst string) []transfer.Path {
	s, _ := a.board.get()
	var out []transfer.Path
	for _, l := range s.Links {
		if l.State != v1.LinkState_LINK_STATE_PROVEN || l.A == nil || l.B == nil {
			continue
		}
		from, to := l.A, l.B
		if from.NodeId != src {
			from, to = to, from
		}
		if from.NodeId != src || to.NodeId != dst {
			continue
		}
		p := transfer.Path{LinkID: l.Id, SrcInterface: from.Interface, DstInterface: to.Interface, Transport: "tcp", Kind: transfer.Cable}
		p.SrcAddr, p.DstAddr = prefixAddr(from.Address), prefixAddr(to.Address)
		if p.SrcAddr.IsValid() && p.DstAddr.IsValid() {
			out = append(out, p)
		}
	}
	if src == dst {
		return out
	}
	known := a.knownNow()
	if p, ok := lanPath(known[src].node, known[dst].node); ok {
		out = append(out, p)
	}
	return out
}

// lanPath is the way between two nodes without a cable, as they describe
// themselves.
func lanPath(src, dst *peerv1.NodeSection) (transfer.Path, bool) {
	for i, d := range dst.GetLanAddresses() {
		for k, f := range src.GetLanAddresses() {
			da, derr := netip.ParseAddr(d)
			fa, ferr := netip.ParseAddr(f)
			if derr == nil && ferr == nil && da.Is4() == fa.Is4() {
				return transfer.Path{SrcAddr: fa, DstAddr: da, SrcInterface: lanInterface(src, k), DstInterface: lanInterface(dst, i),
					Transport: "tcp", Kind: transfer.LAN}, true
			}
		}
	}
	return transfer.Path{}, false
}

// lanInterface is the interface of a node's LAN address; "" where its agent is
// of a version that does not say.
func lanInterface(n *peerv1.NodeSection, address int) string {
	if names := n.GetLanInterfaces(); address < len(names) {
		return names[address]
	}
	return ""
}

func prefixAddr(s string) netip.Addr {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Addr{}
	}
	return p.Addr()
}

// knownNow is what every node last said, as last read.
func (a *Agent) knownNow() map[string]nodeSections {
	if k := a.known.Load(); k != nil {
		return *k
	}
	return nil
}

// pairedUserOf is who paired on a node, as it says; nil if it does not.
func (a *Agent) pairedUserOf(node string) *peerv1.User {
	return a.knownNow()[node].node.GetPairedUser()
}

// transferServer copies files between nodes.
type transferServer struct {
	v1.UnimplementedTransferServiceServer
	a *Agent
}

// endpoint turns what a person wrote into a place on a node that is up.
func (a *Agent) endpoint(s, wd string) (transfer.Endpoint, *v1.Node, error) {
	e, err := transfer.ParseEndpoint(s)
	if err != nil {
		return e, nil, err
	}
	name := e.Node
	if name == "" {
		name = a.id()
		e.Dir = wd
	}
	n, err := a.upNode(name)
	if err != nil {
		return e, nil, err
	}
	e.Node = n.Id
	return e, n, nil
}

// Start begins a transfer and returns at once.
func (s *transferServer) Start(ctx context.Context, q *v1.StartTransferRequest) (*v1.StartTransferResponse, error) {
	job := transfer.Job{Options: transfer.Options{
		DryRun: q.DryRun, Filters: q.Filters, LimitBytesPerSecond: q.LimitBytesPerSecond, CopyLinks: q.CopyLinks,
		Checksum: q.Checksum, MaxCables: int(q.MaxCables), Transport: q.Transport, Xattrs: q.Xattrs, Delete: q.Delete,
	}}
	if q.WorkingDirectory != "" && !path.IsAbs(q.WorkingDirectory) {
		return nil, fault.Newf(fault.Usage, "", "%q is no absolute path", q.WorkingDirectory).With("field", "working_directory")
	}
	base := &v1.Transfer{OwnerNodeId: s.a.id()}
	if q.Model != "" {
		if len(q.Sources) > 0 || q.Destination != "" {
			return nil, fault.Newf(fault.Usage, "name a model and a node, or sources and a destination", "both a model and paths are named").With("field", "model")
		}
		n, err := s.a.upNode(q.ModelNode)
		if err != nil {
			return nil, err
		}
		m, err := s.a.findModel(q.Model)
		if err != nil {
			return nil, err
		}
		if at, ok := copyOn(m, n.Id); ok {
			t, err := s.a.thereAlready(ctx, q, m, n, at)
			return &v1.StartTransferResponse{Transfer: t}, err
		}
		src, err := s.a.sourceFor(m, n.Id)
		if err != nil {
			return nil, err
		}
		from, to := transfer.Endpoint{Node: src.NodeId, Path: src.Path}, transfer.Endpoint{Node: n.Id, Path: modelHome + "/"}
		job.Sources, job.Destination, job.Options.MakePath = []transfer.Endpoint{from}, to, true
		base.Sources = []string{s.a.endpointName(from)}
	} else {
		if len(q.Sources) == 0 || q.Destination == "" {
			return nil, fault.Newf(fault.Usage, "write: tbcluster cp SRC... DST", "no source or no destination is named").With("field", "sources")
		}
		for _, src := range q.Sources {
			e, _, err := s.a.endpoint(src, q.WorkingDirectory)
			if err != nil {
				return nil, err
			}
			job.Sources = append(job.Sources, e)
			base.Sources = append(base.Sources, s.a.endpointName(e))
		}
		var err error
		if job.Destination, _, err = s.a.endpoint(q.Destination, q.WorkingDirectory); err != nil {
			return nil, err
		}
	}
	t, err := s.a.startTransfer(ctx, q.RequestId, job, base, nil)
	if err != nil {
		return nil, err
	}
	return &v1.StartTransferResponse{Transfer: t}, nil
}

func (a *Agent) endpointName(e transfer.Endpoint) string {
	return a.nodeName(e.Node) + ":" + e.Path
}

// startTransfer begins a transfer for who makes the call of ctx; done, which
// may be nil, is called when it has ended.
func (a *Agent) startTransfer(ctx context.Context, requestID string, job transfer.Job, base *v1.Transfer, done func(*v1.Transfer)) (*v1.Transfer, error) {
	user, err := a.askingUser(ctx)
	if err != nil {
		return nil, err
	}
	who, release, err := callerOf(ctx).hold()
	if err != nil {
		return nil, err
	}
	base.User, base.Destination = user.Name, a.endpointName(job.Destination)
	base.SourceNodeId, base.DestinationNodeId = job.Sources[0].Node, job.Destination.Node
	// The transfer outlives the call, not the agent.
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	news := make(chan struct{}, 1)
	go func() {
		_, changed := a.board.get()
		for {
			select {
			case <-life.Done():
				return
			case <-changed:
			}
			_, changed = a.board.get()
			select {
			case news <- struct{}{}:
			default:
			}
		}
	}()
	deps := transfer.Deps{
		OpenWorker: func(ctx context.Context, node string) (io.ReadWriteCloser, error) {
			return a.openWorker(ctx, node, who, user, WorkTransfer, base.Id)
		},
		Paths: a.linkPaths, PathsChanged: news,
		NodeName: a.nodeName,
	}
	a.tasks.Add(1)
	t, err := a.moves.start(life, requestID, job, deps, base, func(t *v1.Transfer) {
		cancel()
		release()
		if done != nil {
			done(t)
		}
		if t.DestinationNodeId == a.id() {
			a.models.rescan()
		}
		a.tasks.Done()
	})
	if err != nil {
		cancel()
		release()
		a.tasks.Done()
		return nil, a.onThisNode(err)
	}
	return t, nil
}

// onThisNode puts this node's name before the path at which something failed.
func (a *Agent) onThisNode(err error) error {
	if f := fault.As(err); f != nil && f.Where != "" {
		return f.At(a.name() + ":" + f.Where)
	}
	return err
}

// Get returns one transfer of any node.
func (s *transferServer) Get(_ context.Context, q *v1.GetTransferRequest) (*v1.GetTransferResponse, error) {
	t, err := s.a.findTransfer(q.Id)
	return &v1.GetTransferResponse{Transfer: t}, err
}

// findTransfer returns a transfer of any node.
func (a *Agent) findTransfer(id string) (*v1.Transfer, error) {
	if t, _, _, err := a.moves.get(id); err == nil {
		return t, nil
	}
	s, _ := a.board.get()
	for _, t := range s.Transfers {
		if t.Id == id {
			return t, nil
		}
	}
	_, _, _, err := a.moves.get(id)
	return nil, err
}

// List returns the transfers of all nodes.
func (s *transferServer) List(context.Context, *v1.ListTransfersRequest) (*v1.ListTransfersResponse, error) {
	st, _ := s.a.board.get()
	return &v1.ListTransfersResponse{Transfers: st.Transfers}, nil
}

// Watch streams one transfer until it has ended.
func (s *transferServer) Watch(q *v1.WatchTransferRequest, out grpc.ServerStreamingServer[v1.WatchTransferResponse]) error {
	t, err := s.a.findTransfer(q.Id)
	if err != nil {
		return err
	}
	if t.OwnerNodeId != s.a.id() {
		return s.watchRemote(q.Id, out)
	}
	for {
		t, lines, changed, err := s.a.moves.get(q.Id)
		if err != nil {
			return err
		}
		r := &v1.WatchTransferResponse{Transfer: t}
		if ended(t.State) {
			r.DryRunLines = lines
		}
		if err := out.Send(r); err != nil || ended(t.State) {
			return err
		}
		select {
		case <-out.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// watchRemote follows a transfer of another node in the cluster's state.
func (s *transferServer) watchRemote(id string, out grpc.ServerStreamingServer[v1.WatchTransferResponse]) error {
	var last *v1.Transfer
	for {
		st, changed := s.a.board.get()
		var t *v1.Transfer
		for _, have := range st.Transfers {
			if have.Id == id {
				t = have
			}
		}
		if t == nil {
			return fault.Newf(fault.TransferUnknown, "", "transfer %s is listed no more", id)
		}
		if t != last {
			if err := out.Send(&v1.WatchTransferResponse{Transfer: t}); err != nil || ended(t.State) {
				return err
			}
			last = t
		}
		select {
		case <-out.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// Cancel ends a transfer; what arrived is kept.
func (s *transferServer) Cancel(ctx context.Context, q *v1.CancelTransferRequest) (*v1.CancelTransferResponse, error) {
	t, err := s.a.findTransfer(q.Id)
	if err != nil || t.OwnerNodeId == s.a.id() {
		return s.cancelHere(ctx, q)
	}
	r := &v1.CancelTransferResponse{}
	return r, s.a.ask(ctx, t.OwnerNodeId, "/tbcluster.v1.TransferService/Cancel", q, r)
}

func (s *transferServer) cancelHere(_ context.Context, q *v1.CancelTransferRequest) (*v1.CancelTransferResponse, error) {
	t, err := s.a.moves.cancelOne(q.Id)
	return &v1.CancelTransferResponse{Transfer: t}, err
}

// Pause stops sending.
func (s *transferServer) Pause(ctx context.Context, q *v1.PauseTransferRequest) (*v1.PauseTransferResponse, error) {
	t, err := s.a.findTransfer(q.Id)
	if err != nil || t.OwnerNodeId == s.a.id() {
		return s.pauseHere(ctx, q)
	}
	r := &v1.PauseTransferResponse{}
	return r, s.a.ask(ctx, t.OwnerNodeId, "/tbcluster.v1.TransferService/Pause", q, r)
}

func (s *transferServer) pauseHere(_ context.Context, q *v1.PauseTransferRequest) (*v1.PauseTransferResponse, error) {
	t, err := s.a.moves.pause(q.Id, true)
	return &v1.PauseTransferResponse{Transfer: t}, err
}

// Resume goes on after Pause.
func (s *transferServer) Resume(ctx context.Context, q *v1.ResumeTransferRequest) (*v1.ResumeTransferResponse, error) {
	t, err := s.a.findTransfer(q.Id)
	if err != nil || t.OwnerNodeId == s.a.id() {
		return s.resumeHere(ctx, q)
	}
	r := &v1.ResumeTransferResponse{}
	return r, s.a.ask(ctx, t.OwnerNodeId, "/tbcluster.v1.TransferService/Resume", q, r)
}

func (s *transferServer) resumeHere(_ context.Context, q *v1.ResumeTransferRequest) (*v1.ResumeTransferResponse, error) {
	t, err := s.a.moves.pause(q.Id, false)
	return &v1.ResumeTransferResponse{Transfer: t}, err
}

// thereAlready is the transfer of a model to a node that has it: one that has
// ended, with nothing to copy.
func (a *Agent) thereAlready(ctx context.Context, q *v1.StartTransferRequest, m *v1.Model, n *v1.Node, at string) (*v1.Transfer, error) {
	user, err := a.askingUser(ctx)
	if err != nil {
		return nil, err
	}
	files := 1
	if s, err := a.specOf(m); err == nil && len(s.Files) > 0 {
		files = len(s.Files)
	}
	place := n.Name + ":" + at
	base := &v1.Transfer{OwnerNodeId: a.id(), User: user.Name, Sources: []string{place}, Destination: place, SourceNodeId: n.Id, DestinationNodeId: n.Id,
		SkippedBytes: m.SizeBytes, SkippedFiles: uint64(files)}
	var lines []string
	if q.DryRun {
		lines = []string{fmt.Sprintf("have %d bytes %s", m.SizeBytes, at)}
	}
	t, err := a.moves.nothing(q.RequestId, base, lines)
	return t, a.onThisNode(err)
}

// modelHome is where models go that nobody said a place for.
const modelHome = "~/models"

// sourceFor chooses the copy from which a model is best copied to a node: one
// with a proven cable there, else any that is up.
func (a *Agent) sourceFor(m *v1.Model, node string) (*v1.ModelCopy, error) {
	var best *v1.ModelCopy
	bestScore := -1
	var why []string
	for _, c := range m.Copies {
		if !c.Complete {
			why = append(why, fmt.Sprintf("%s: %s", c.NodeName, c.Reason))
			continue
		}
		score := 0
		for _, p := range a.linkPaths(c.NodeId, node) {
			if p.Kind == transfer.Cable {
				score++
			}
		}
		if score > bestScore {
			best, bestScore = c, score
		}
	}
	if best == nil {
		return nil, fault.Newf(fault.ModelIncomplete, "", "no node has a complete copy of %s: %s", m.Name, strings.Join(why, "; "))
	}
	return best, nil
}
