package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

// authorizePeer checks a call of another agent against its rule.
func (a *Agent) authorizePeer(ctx context.Context, method string) (context.Context, error) {
	r, ok := rules[method]
	if !ok || r.remote == none {
		return nil, fault.Newf(fault.Denied, "", "%s is not served to other nodes", method)
	}
	id, ok := channel.PeerFromContext(ctx)
	if !ok {
		return nil, fault.Newf(fault.NotPaired, "pair the nodes: `tbcluster pair`", "the call comes from nobody who has paired")
	}
	m, ok := a.store.Member(id)
	if !ok || m.Revoked {
		return nil, fault.Newf(fault.NotPaired, "pair the nodes: `tbcluster pair`", "node %s has not paired with %s", id.Short(), a.name())
	}
	role := roles[m.Role]
	if role < r.remote {
		return nil, denyRole(m, r.remote)
	}
	return withCaller(ctx, caller{asker: host.Asker{Node: string(id)}, role: role}), nil
}

func denyRole(m identity.Member, need v1.Role) error {
	return fault.Newf(fault.Denied, "an admin can revoke it and let it in again with another role",
		"node %s has the role %s, and this needs %s", m.Name, roleName(roles[m.Role]), roleName(need))
}

func roleName(r v1.Role) string {
	switch r {
	case v1.Role_ROLE_VIEWER:
		return "viewer"
	case v1.Role_ROLE_OPERATOR:
		return "operator"
	case v1.Role_ROLE_ADMIN:
		return "admin"
	}
	return "none"
}

func (a *Agent) peerUnary(ctx context.Context, q any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	ctx, err := a.authorizePeer(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return h(ctx, q)
}

func (a *Agent) peerStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	ctx, err := a.authorizePeer(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return h(srv, &streamWithContext{ss, ctx})
}

// peerServer is what this agent does for others.
type peerServer struct {
	peerv1.UnimplementedPeerServiceServer
	a *Agent
}

// Sync carries state both ways.
func (s *peerServer) Sync(stream peerv1.PeerService_SyncServer) error {
	return s.a.member.HandleSync(stream)
}

// ProposeAddress answers for this end of a link.
func (s *peerServer) ProposeAddress(ctx context.Context, q *peerv1.ProposeAddressRequest) (*peerv1.ProposeAddressResponse, error) {
	return s.a.address.HandlePropose(ctx, callerOf(ctx).asker.Node, q)
}

// Echo answers at once.
func (s *peerServer) Echo(context.Context, *peerv1.EchoRequest) (*peerv1.EchoResponse, error) {
	return &peerv1.EchoResponse{}, nil
}

// remoteCaller says who asks, as the calling agent tells it.
func (a *Agent) remoteCaller(ctx context.Context, u *peerv1.User) caller {
	c := callerOf(ctx)
	c.asker.UID, c.asker.Name = u.GetUid(), u.GetName()
	a.hearWhoPaired(ctx, c.asker.Node)
	c.paired = a.isPairedUser(c.asker.Node, u)
	return c
}

// hearFor is how long a call from a node that has just paired waits for what
// that node says of itself: the call may come before it.
const hearFor = 10 * time.Second

// hearWhoPaired waits until a node has said who paired there.
func (a *Agent) hearWhoPaired(ctx context.Context, node string) {
	if a.pairedUserOf(node) != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, hearFor)
	defer cancel()
	news, stop := a.member.Subscribe()
	defer stop()
	for {
		a.settled(ctx)
		if a.pairedUserOf(node) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-news:
		}
	}
}

// isPairedUser reports whether u is who paired on that node, as the node says.
func (a *Agent) isPairedUser(node string, u *peerv1.User) bool {
	p := a.pairedUserOf(node)
	return u != nil && p != nil && p.Uid == u.Uid && p.Name == u.Name
}

// Worker starts a worker for a remote person and carries its control stream.
func (s *peerServer) Worker(stream grpc.BidiStreamingServer[peerv1.WorkerMessage, peerv1.WorkerMessage]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	c := s.a.remoteCaller(stream.Context(), first.User)
	conn, user, err := s.a.root.Worker(stream.Context(), c.asker, c.paired)
	if err != nil {
		return s.a.unmapped(err, c.asker)
	}
	s.a.log.Info("worker for a person of another node", "asker", c.asker.String(), "node", s.a.nameOf(identity.NodeID(c.asker.Node)), "as", user.Name, "transfer", first.TransferId)
	defer s.a.models.rescan()
	// An empty message says that the worker runs.
	if err := stream.Send(&peerv1.WorkerMessage{}); err != nil {
		return errors.Join(err, conn.Close())
	}
	return bridge(stream, conn)
}

// unmapped names the command that maps a refused person with the node's name.
func (a *Agent) unmapped(err error, who host.Asker) error {
	if !fault.Is(err, fault.UserUnmapped) {
		return err
	}
	name := a.nameOf(identity.NodeID(who.Node))
	a.log.Info("a person of another node is refused", "asker", who.String(), "paired_there", a.pairedUserOf(who.Node).GetName())
	return fault.Newf(fault.UserUnmapped, "on "+a.name()+" run: tbcluster pair --map "+name+"/"+who.Name+"=LOCALUSER",
		"user %s of %s is mapped to no user on %s", who.Name, name, a.name())
}

// workerStream is either end of a Worker call.
type workerStream interface {
	Send(*peerv1.WorkerMessage) error
	Recv() (*peerv1.WorkerMessage, error)
}

// bridge carries bytes between a call and a worker's control stream until
// either ends. It closes conn.
func bridge(stream workerStream, conn net.Conn) error {
	up := make(chan error, 1)
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := conn.Read(buf)
			if n > 0 {
				if serr := stream.Send(&peerv1.WorkerMessage{Data: slices.Clone(buf[:n])}); serr != nil {
					err = serr
				}
			}
			if err != nil {
				up <- err
				return
			}
		}
	}()
	down := make(chan error, 1)
	go func() {
		for {
			m, err := stream.Recv()
			if err == nil {
				_, err = conn.Write(m.Data)
			}
			if err != nil {
				down <- err
				return
			}
		}
	}()
	var err error
	select {
	case err = <-up:
	case err = <-down:
	}
	cerr := conn.Close()
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(err, cerr)
}

// Forward carries out one call of the public API for a person of another node.
func (s *peerServer) Forward(ctx context.Context, q *peerv1.ForwardRequest) (*peerv1.ForwardResponse, error) {
	r, ok := rules[q.Method]
	if !ok || r.remote == none {
		return nil, fault.Newf(fault.Denied, "", "%s is not forwarded", q.Method)
	}
	c := s.a.remoteCaller(ctx, q.User)
	if c.role < r.remote {
		m, _ := s.a.store.Member(identity.NodeID(c.asker.Node))
		return nil, denyRole(m, r.remote)
	}
	if r.local == change {
		// The person has to be somebody here before he changes anything here.
		if _, _, err := s.a.root.Who(ctx, c.asker, c.paired); err != nil {
			return nil, s.a.unmapped(err, c.asker)
		}
	}
	ctx = withCaller(ctx, c)
	for _, f := range s.a.forwardable() {
		if feature := methodFeatures[q.Method]; f.method == q.Method && (feature == "" || has(feature)) {
			out, err := f.call(ctx, q.Request)
			return &peerv1.ForwardResponse{Response: out}, err
		}
	}
	return nil, fault.Newf(fault.Unsupported, "install the same version on all nodes", "this node's version does not forward %s", q.Method)
}

// forwarded is a unary call that another node may hand on to this one.
type forwarded struct {
	method string
	call   func(ctx context.Context, request []byte) ([]byte, error)
}

// forward makes a forwarded call of a handler.
func forward[Q, R proto.Message](method string, empty func() Q, h func(context.Context, Q) (R, error)) forwarded {
	return forwarded{method, func(ctx context.Context, raw []byte) ([]byte, error) {
		q := empty()
		if err := proto.Unmarshal(raw, q); err != nil {
			return nil, fault.New(fault.Protocol, "read a forwarded request", err, "install the same version on all nodes")
		}
		r, err := h(ctx, q)
		if err != nil {
			return nil, err
		}
		return proto.Marshal(r)
	}}
}

// forwardable lists the calls that are answered for other nodes.
func (a *Agent) forwardable() []forwarded {
	m, t, i, d, n := &modelServer{a: a}, &transferServer{a: a}, &instanceServer{a: a}, &doctorServer{a: a}, &nodeServer{a: a}
	return []forwarded{
		forward("/tbcluster.v1.ModelService/Remove", func() *v1.RemoveRequest { return &v1.RemoveRequest{} }, m.removeHere),
		forward("/tbcluster.v1.ModelService/Scan", func() *v1.ScanRequest { return &v1.ScanRequest{} }, m.Scan),
		forward("/tbcluster.v1.TransferService/Cancel", func() *v1.CancelTransferRequest { return &v1.CancelTransferRequest{} }, t.cancelHere),
		forward("/tbcluster.v1.TransferService/Pause", func() *v1.PauseTransferRequest { return &v1.PauseTransferRequest{} }, t.pauseHere),
		forward("/tbcluster.v1.TransferService/Resume", func() *v1.ResumeTransferRequest { return &v1.ResumeTransferRequest{} }, t.resumeHere),
		forward("/tbcluster.v1.InstanceService/Place", func() *v1.PlaceRequest { return &v1.PlaceRequest{} }, i.placeHere),
		forward("/tbcluster.v1.InstanceService/Stop", func() *v1.StopInstanceRequest { return &v1.StopInstanceRequest{} }, i.stopHere),
		forward("/tbcluster.v1.DoctorService/Check", func() *v1.CheckRequest { return &v1.CheckRequest{} }, d.checkHere),
		forward("/tbcluster.v1.LinkService/Bench", func() *v1.BenchRequest { return &v1.BenchRequest{} }, (&linkServer{a: a}).benchHere),
		forward("/tbcluster.v1.NodeService/Rename", func() *v1.RenameRequest { return &v1.RenameRequest{} }, n.Rename),
	}
}

// ask hands one call on to the node that must answer it.
func (a *Agent) ask(ctx context.Context, node, method string, q, r proto.Message) error {
	if err := a.canAnswer(node, method); err != nil {
		return err
	}
	raw, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	c, err := a.channel.Client(identity.NodeID(node))
	if err != nil {
		return err
	}
	who, err := a.askingUser(ctx)
	if err != nil {
		return err
	}
	p, f := peerv1.NewPeerServiceClient(c), &peerv1.ForwardRequest{User: who, Method: method, Request: raw}
	out, err := p.Forward(ctx, f)
	if status.Code(err) == codes.Unavailable && ctx.Err() == nil {
		// The connection was to an agent that has been started anew since. What is
		// forwarded may be asked twice.
		out, err = p.Forward(ctx, f)
	}
	if err != nil {
		return a.farFault(node, err)
	}
	return proto.Unmarshal(out.Response, r)
}

// farFault names the node in an error that came from it.
func (a *Agent) farFault(node string, err error) error {
	f := fault.FromStatus(err)
	if f.Reason == fault.NoAgent {
		f = fault.New(fault.NodeDown, "ask "+a.nameOf(identity.NodeID(node)), err, "`tbcluster status` says how it fares")
		f.Why = status.Convert(err).Message()
	}
	if f.Where == "" {
		f = f.At(a.nameOf(identity.NodeID(node)))
	}
	return f
}

// endOfStream is nil for the regular end of a stream, else f.
func endOfStream(f, err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return f
}

// askingUser is who asks, as this agent read it from its own socket.
func (a *Agent) askingUser(ctx context.Context) (*peerv1.User, error) {
	c := callerOf(ctx)
	if c.client && c.role < v1.Role_ROLE_OPERATOR {
		return &peerv1.User{}, nil // who only looks is nobody
	}
	if u, ok, err := a.clientUser(ctx, c.asker); ok || err != nil {
		return &peerv1.User{Uid: u.UID, Name: u.Name}, err
	}
	if c.local == nil {
		return &peerv1.User{Uid: c.asker.UID, Name: c.asker.Name}, nil
	}
	u, _, err := c.local.who(ctx, a.root)
	if err != nil {
		return nil, err
	}
	return &peerv1.User{Uid: u.UID, Name: u.Name}, nil
}

// pingWay measures the median round trip over one way.
func (a *Agent) pingWay(ctx context.Context, id identity.NodeID, w channel.Way, count int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	s, err := a.channel.SessionWay(ctx, id, w)
	if err != nil {
		return 0, err
	}
	defer func() { _ = s.Close() }() // it has served its purpose
	c := peerv1.NewPeerServiceClient(s)
	var took []time.Duration
	for range count + 1 {
		begin := time.Now()
		if _, err := c.Echo(ctx, &peerv1.EchoRequest{}); err != nil {
			return 0, err
		}
		took = append(took, time.Since(begin))
	}
	took = took[1:] // the first one pays for the connection
	slices.Sort(took)
	return took[len(took)/2], nil
}

// remoteWorker opens a worker on another node.
func (a *Agent) remoteWorker(ctx context.Context, node string, who *peerv1.User, transferID string) (io.ReadWriteCloser, error) {
	c, err := a.channel.Client(identity.NodeID(node))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := peerv1.NewPeerServiceClient(c).Worker(ctx)
	if err == nil {
		err = stream.Send(&peerv1.WorkerMessage{User: who, TransferId: transferID})
	}
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		cancel()
		return nil, a.farFault(node, err)
	}
	ours, theirs := net.Pipe()
	go func() {
		defer cancel()
		// Whoever holds ours sees the end of the stream as the end of the pipe.
		if err := bridge(stream, theirs); err != nil {
			a.log.Debug("worker stream ended", "node", a.nameOf(identity.NodeID(node)), "error", err)
		}
	}()
	return ours, nil
}
