package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host/sock"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
)

// benchFor is how long each direction is loaded where nothing is said.
const benchFor = 2 * time.Second

// benchPath is one own end of a proven link, with what is at the other.
type benchPath struct {
	link     *v1.Link
	own, far *v1.LinkEnd
	local    netip.Addr
	remote   netip.Addr
}

// benchTime is how long each direction is loaded.
func benchTime(d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return benchFor, nil
	}
	load := d.AsDuration()
	if err := d.CheckValid(); err != nil || load < link.BenchLeast || load > link.BenchMost {
		return 0, fault.Newf(fault.Usage, fmt.Sprintf("choose between %v and %v", link.BenchLeast, link.BenchMost),
			"a cable cannot be measured for %v", load).With("field", "duration")
	}
	return load, nil
}

// findLink returns a link by its ID.
func (a *Agent) findLink(id string) (*v1.Link, error) {
	s, _ := a.board.get()
	for _, l := range s.Links {
		if l.Id == id {
			return l, nil
		}
	}
	return nil, fault.Newf(fault.LinkUnknown, "`tbcluster links` lists the cables", "no cable has the ID %q", id).With("link", id)
}

// benchable says whether a link can be measured now.
func benchable(l *v1.Link) error {
	if l.State == v1.LinkState_LINK_STATE_PROVEN {
		return nil
	}
	f := fault.Newf(fault.Connection, "see `tbcluster doctor`; only a proven cable can be measured", "the cable %s is not proven", linkText(l)).With("link", l.Id)
	f.Why = l.Reason
	return f
}

// linkText names a link for people.
func linkText(l *v1.Link) string {
	end := func(e *v1.LinkEnd) string {
		if e.GetNodeName() == "" {
			return "?"
		}
		return e.NodeName + " " + e.Port
	}
	return end(l.A) + " – " + end(l.B)
}

// benchPath returns the own end of a proven link.
func (a *Agent) benchPath(l *v1.Link) (benchPath, error) {
	p := benchPath{link: l, own: l.A, far: l.B}
	if l.B.GetNodeId() == a.id() {
		p.own, p.far = l.B, l.A
	}
	own, errOwn := netip.ParsePrefix(p.own.GetAddress())
	far, errFar := netip.ParsePrefix(p.far.GetAddress())
	if p.own.GetNodeId() != a.id() || p.own.Interface == "" || errOwn != nil || errFar != nil {
		return p, benchable(&v1.Link{Id: l.Id, A: l.A, B: l.B, Reason: "it has no address at both ends now"})
	}
	p.local, p.remote = own.Addr(), far.Addr()
	return p, nil
}

// usedBy names what goes over a link now: copies that have bytes on it, and
// instances with ranks at both its ends.
func usedBy(s *v1.ClusterState, l *v1.Link) []string {
	var out []string
	for _, t := range s.Transfers {
		if ended(t.State) || t.State == v1.TransferState_TRANSFER_STATE_PAUSED {
			continue
		}
		if slices.ContainsFunc(t.Links, func(p *v1.LinkProgress) bool { return p.LinkId == l.Id }) {
			out = append(out, "transfer "+t.Id)
		}
	}
	for _, i := range s.Instances {
		if i.State == v1.InstanceState_INSTANCE_STATE_STOPPED || i.State == v1.InstanceState_INSTANCE_STATE_FAILED {
			continue
		}
		at := func(node string) bool {
			return slices.ContainsFunc(i.Ranks, func(r *v1.Rank) bool { return r.NodeId == node && r.State != v1.RankState_RANK_STATE_EXITED })
		}
		if at(l.A.GetNodeId()) && at(l.B.GetNodeId()) {
			out = append(out, "instance "+i.Name)
		}
	}
	slices.Sort(out)
	return out
}

// mayBench refuses a link that is used, unless it is to be measured all the
// same; it returns what uses it.
func (a *Agent) mayBench(l *v1.Link, even bool) ([]string, error) {
	s, _ := a.board.get()
	used := usedBy(s, l)
	if len(used) == 0 || even {
		return used, nil
	}
	f := fault.Newf(fault.StillRunning, "wait until it is done; or measure what is left beside it: `tbcluster links bench --force`",
		"the cable %s is used", linkText(l)).With("link", l.Id)
	f.Why = fmt.Sprintf("it carries %v", used)
	return used, f
}

// startBench lets one bench at a time use this node: two at once would measure
// each other. The caller calls end.
func (a *Agent) startBench(l *v1.Link) (end func(), err error) {
	if !a.benching.CompareAndSwap(nil, &l.Id) {
		what := "another cable of " + a.name()
		if now := a.benching.Load(); now != nil && *now == l.Id {
			what = "the cable " + linkText(l)
		}
		return nil, fault.Newf(fault.StillRunning, "try again in a few seconds", "%s is being measured", what)
	}
	return func() { a.benching.Store(nil) }, nil
}

// Bench measures a link, here if it is one of this node's, else at one of its
// ends.
func (s *linkServer) Bench(ctx context.Context, q *v1.BenchRequest) (*v1.BenchResponse, error) {
	l, err := s.a.findLink(q.Link)
	if err != nil {
		return nil, err
	}
	if l.A.GetNodeId() == s.a.id() || l.B.GetNodeId() == s.a.id() {
		return s.benchHere(ctx, q)
	}
	if _, err := benchTime(q.Duration); err != nil {
		return nil, err
	}
	if err := benchable(l); err != nil {
		return nil, err
	}
	out := &v1.BenchResponse{}
	return out, s.a.ask(ctx, l.A.NodeId, "/tbcluster.v1.LinkService/Bench", q, out)
}

// benchHere measures a link of this node.
func (s *linkServer) benchHere(ctx context.Context, q *v1.BenchRequest) (*v1.BenchResponse, error) {
	a := s.a
	l, err := a.findLink(q.Link)
	if err != nil {
		return nil, err
	}
	load, err := benchTime(q.Duration)
	if err != nil {
		return nil, err
	}
	if err := benchable(l); err != nil {
		return nil, err
	}
	p, err := a.benchPath(l)
	if err != nil {
		return nil, err
	}
	if err := a.canAnswer(p.far.NodeId, "/tbcluster.v1.LinkService/Bench"); err != nil {
		return nil, err
	}
	used, err := a.mayBench(l, q.EvenIfUsed)
	if err != nil {
		return nil, err
	}
	end, err := a.startBench(l)
	if err != nil {
		return nil, err
	}
	defer end()
	m, err := a.bench(ctx, p, load, q.EvenIfUsed, len(used) > 0)
	if err != nil {
		return nil, err
	}
	// The measurement is in the link that is answered, whoever reads the state next.
	a.settled(ctx)
	if now, err := a.findLink(q.Link); err == nil {
		l = now
	}
	return &v1.BenchResponse{Measurement: m, Link: l, UsedBy: used}, nil
}

// bench measures over own end p and has both ends remember.
func (a *Agent) bench(ctx context.Context, p benchPath, load time.Duration, even, shared bool) (*v1.LinkMeasurement, error) {
	far := p.far.NodeId
	failed := func(err error) error {
		if ctx.Err() != nil {
			return fault.New(fault.Interrupted, "measure the cable "+linkText(p.link), ctx.Err(), "")
		}
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.New("what was sent did not arrive in time")
		}
		return fault.New(fault.Connection, "measure the cable "+linkText(p.link), err, "see `tbcluster links`; try again").With("link", p.link.Id)
	}
	c, err := a.channel.Client(identity.NodeID(far))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := peerv1.NewPeerServiceClient(c).BenchLink(ctx)
	if err != nil {
		return nil, a.farFault(far, err)
	}
	// What Send fails with is told by Recv.
	_ = stream.Send(&peerv1.BenchLinkRequest{Port: p.far.Port, SenderPort: p.own.Port, Duration: durationpb.New(load), EvenIfUsed: even})
	ready, err := stream.Recv()
	if err != nil {
		return nil, a.farFault(far, err)
	}
	if ready.TcpPort == 0 || ready.TcpPort > 65535 || len(ready.Token) != link.BenchToken {
		return nil, fault.Newf(fault.Protocol, "install the same version on all nodes", "%s does not say where it listens", p.far.NodeName)
	}
	to := netip.AddrPortFrom(p.remote, uint16(ready.TcpPort)).String()
	rates, err := link.Bench(ctx, func(ctx context.Context) (net.Conn, error) {
		return sock.DialContext(ctx, "tcp", to, sock.BindOptions{Interface: p.own.Interface, Source: p.local, DeadAfter: deadAfter})
	}, ready.Token, load)
	if err != nil {
		return nil, failed(err)
	}
	m := link.Measurement{RTT: rates.RTT, At: time.Now(), Duration: load, NegotiatedGbps: p.link.NegotiatedGbps, Shared: shared}
	if p.own == p.link.A {
		m.AToB, m.BToA = rates.Out, rates.In
	} else {
		m.AToB, m.BToA = rates.In, rates.Out
	}
	if err := a.tracker.Measured(p.own.Port, far, p.far.Port, m); err != nil {
		return nil, failed(err)
	}
	// The far end remembers it too, so that it is known while this node is away.
	// That it could not does not make the measurement worse.
	err = stream.Send(&peerv1.BenchLinkRequest{Measurement: m.Proto()})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		a.log.Warn("the other end does not remember a measurement", "node", p.far.NodeName, "link", p.link.Id, "error", err)
	}
	a.log.Info("measured a cable", "link", p.link.Id, "with", p.far.NodeName, "out", rates.Out, "in", rates.In, "rtt", rates.RTT)
	return m.Proto(), nil
}

// BenchLink is the far end of a bench.
func (s *peerServer) BenchLink(stream grpc.BidiStreamingServer[peerv1.BenchLinkRequest, peerv1.BenchLinkResponse]) error {
	if !has(featureBench) {
		return s.UnimplementedPeerServiceServer.BenchLink(stream)
	}
	a := s.a
	q, err := stream.Recv()
	if err != nil {
		return err
	}
	caller := callerOf(stream.Context()).asker.Node
	load, err := benchTime(q.Duration)
	if err != nil {
		return err
	}
	l, err := a.linkAt(q.Port, caller, q.SenderPort)
	if err != nil {
		return err
	}
	p, err := a.benchPath(l)
	if err != nil {
		return err
	}
	if _, err := a.mayBench(l, q.EvenIfUsed); err != nil {
		return err
	}
	end, err := a.startBench(l)
	if err != nil {
		return err
	}
	defer end()
	ctx, cancel := context.WithTimeout(stream.Context(), 2*load+benchBeside)
	defer cancel()
	listener, err := sock.Listen(ctx, "tcp", netip.AddrPortFrom(p.local, 0).String(), p.own.Interface)
	if err != nil {
		return fault.New(fault.Connection, "listen on "+p.own.Interface, err, "try again")
	}
	token := link.NewBenchToken()
	served := make(chan error, 1)
	go func() { served <- link.ServeBench(ctx, listener, token, load) }()
	last := &peerv1.BenchLinkRequest{}
	err = stream.Send(&peerv1.BenchLinkResponse{TcpPort: uint32(listener.Addr().(*net.TCPAddr).Port), Token: token})
	if err == nil {
		last, err = recvWithin(ctx, stream)
	}
	cancel()
	if serr := <-served; serr != nil {
		a.log.Debug("the far end of a bench", "link", l.Id, "error", serr)
	}
	if err != nil {
		return endOfStream(err, err)
	}
	m, err := link.MeasurementOf(last.Measurement)
	if err != nil {
		return fault.New(fault.Protocol, "read a measurement", err, "install the same version on all nodes")
	}
	if err := a.tracker.Measured(p.own.Port, caller, p.far.Port, m); err != nil {
		return fault.New(fault.Connection, "remember a measurement", err, "measure it again")
	}
	return stream.Send(&peerv1.BenchLinkResponse{})
}

// benchBeside is what a bench may take beside its loads.
const benchBeside = 30 * time.Second

// recvWithin takes the next message, unless ctx ends before.
func recvWithin(ctx context.Context, stream grpc.BidiStreamingServer[peerv1.BenchLinkRequest, peerv1.BenchLinkResponse]) (*peerv1.BenchLinkRequest, error) {
	type got struct {
		m   *peerv1.BenchLinkRequest
		err error
	}
	c := make(chan got, 1)
	go func() { // it ends with the stream at the latest
		m, err := stream.Recv()
		c <- got{m, err}
	}()
	select {
	case g := <-c:
		return g.m, g.err
	case <-ctx.Done():
		return nil, fault.New(fault.Timeout, "wait for a measurement", ctx.Err(), "try again")
	}
}

// linkAt returns the proven link between an own port and a port of a node.
func (a *Agent) linkAt(port, node, farPort string) (*v1.Link, error) {
	s, _ := a.board.get()
	for _, l := range s.Links {
		own, far := l.A, l.B
		if l.B.GetNodeId() == a.id() {
			own, far = l.B, l.A
		}
		if own.GetNodeId() == a.id() && own.GetPort() == port && far.GetNodeId() == node && far.GetPort() == farPort {
			return proto.CloneOf(l), benchable(l)
		}
	}
	return nil, fault.Newf(fault.LinkUnknown, "`tbcluster links` lists the cables", "no cable leads from port %s of %s to port %s of %s", port, a.name(), farPort, a.nodeName(node))
}
