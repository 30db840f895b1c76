package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/protobuf/proto"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/gateway"
	"tbcluster/host/sock"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

// maxLocalMessage bounds a message on the API socket, bytes.
const maxLocalMessage = 32 << 20

// PeerUID reads who is at the other end of a client's socket.
func PeerUID(f *os.File) (uint32, error) {
	c, err := sock.FileCred(f)
	return c.UID, err
}

// newLocalServer serves the API to this machine's people.
func (a *Agent) newLocalServer() *grpc.Server {
	return a.newAPIServer(grpc.Creds(unixCredentials{PeerUID}), grpc.MaxRecvMsgSize(maxLocalMessage),
		grpc.UnaryInterceptor(a.localUnary), grpc.StreamInterceptor(a.localStream))
}

// newAPIServer serves the API to whom the options let in.
func (a *Agent) newAPIServer(opts ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append(opts, grpc.MaxSendMsgSize(maxLocalMessage))...)
	v1.RegisterClusterServiceServer(s, &clusterServer{a: a})
	v1.RegisterNodeServiceServer(s, &nodeServer{a: a})
	v1.RegisterLinkServiceServer(s, &linkServer{a: a})
	v1.RegisterPairingServiceServer(s, &pairingServer{a: a})
	v1.RegisterModelServiceServer(s, &modelServer{a: a})
	v1.RegisterTransferServiceServer(s, &transferServer{a: a})
	v1.RegisterInstanceServiceServer(s, &instanceServer{a: a})
	v1.RegisterDoctorServiceServer(s, &doctorServer{a: a})
	h := health.NewServer()
	for name := range s.GetServiceInfo() {
		h.SetServingStatus(name, grpc_health_v1.HealthCheckResponse_SERVING)
	}
	grpc_health_v1.RegisterHealthServer(s, h)
	reflection.Register(s)
	return s
}

// newGateway makes the OpenAI-compatible front of this node.
func (a *Agent) newGateway() *gateway.Gateway {
	return gateway.New(gateway.Options{
		Self:      a.id(),
		Instances: a.ranks.served,
		DialPeer: func(ctx context.Context, node string) (net.Conn, error) {
			return a.channel.Dial(ctx, identity.NodeID(node), channel.HTTP)
		},
		LocalNames: a.localNames,
		APIKeys:    func() []string { return a.opt.Config.GatewayKeys },
		Activity:   a.ranks.activity.note,
		Log:        a.log.With("part", "gateway"),
	})
}

// localNames are names by which a client may call this machine.
func (a *Agent) localNames() []string {
	names := []string{a.facts.Load().machine.Hostname, a.name()}
	return append(names, lanAddresses(a.facts.Load().net)...)
}

// servePeerGateway answers another node's gateway, which asks for people there:
// a node that may not place may not have models answer either.
func (a *Agent) servePeerGateway(ctx context.Context, c *channel.Conn) {
	m, ok := a.store.Member(c.Peer())
	if !ok || m.Revoked {
		return // its connection is being closed
	}
	h := a.gateway.PeerHandler()
	if m.Role < identity.Operator {
		a.log.Info("refused the gateway of another node", "node", m.Name, "role", m.Role)
		h = gateway.RefusePeer(fmt.Sprintf("%s has the role %s and may only look: models on %s answer nodes that are operator or admin; "+
			"an admin can revoke it (tbcluster pair --revoke %s) and let it in again with another role", m.Name, m.Role, a.name(), m.Name))
	}
	if err := a.gateway.ServeConn(ctx, c, h); err != nil {
		a.log.Debug("the gateway of another node", "node", a.nameOf(c.Peer()), "error", err)
	}
}

// serveGateway listens on the loopback, the gateway's socket, and what else
// the configuration names.
func (a *Agent) serveGateway(ctx context.Context) error {
	loopback, address, err := gateway.ListenLoopback(a.opt.Config.GatewayPort)
	if err != nil {
		return err
	}
	a.gatewayAddr.Store(&address)
	a.poke()
	unix, err := a.listenUnix(ctx, root.SocketGateway, a.opt.Paths.GatewaySocket())
	if err != nil {
		return err
	}
	type served struct {
		l net.Listener
		h http.Handler
	}
	all := []served{{unix, a.gateway.SocketHandler()}}
	for _, l := range loopback {
		all = append(all, served{l, a.gateway.LoopbackHandler()})
	}
	for _, addr := range a.opt.Config.GatewayListen {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			for _, s := range all {
				err = errors.Join(err, s.l.Close())
			}
			return fault.New(fault.PortInUse, "listen for the gateway on "+addr, err, "correct gateway_listen in "+a.opt.Paths.Config)
		}
		all = append(all, served{l, a.gateway.OpenHandler()})
	}
	errs := make(chan error, len(all))
	for _, s := range all {
		go func() { errs <- a.gateway.Serve(ctx, s.l, s.h) }()
	}
	for range all {
		err = errors.Join(err, <-errs)
	}
	return err
}

// clusterServer answers for the whole cluster.
type clusterServer struct {
	v1.UnimplementedClusterServiceServer
	a *Agent
}

// GetState returns the state as it is now.
func (s *clusterServer) GetState(context.Context, *v1.GetStateRequest) (*v1.GetStateResponse, error) {
	st, _ := s.a.board.get()
	return &v1.GetStateResponse{State: st}, nil
}

// watchEvery is how often one watcher hears of news at most.
const watchEvery = 50 * time.Millisecond

// Watch sends a snapshot, then what changed since what was sent last. However
// slowly a client reads, it costs one state and misses nothing.
func (s *clusterServer) Watch(_ *v1.WatchRequest, out grpc.ServerStreamingServer[v1.WatchResponse]) error {
	sent, changed := s.a.board.get()
	if err := out.Send(&v1.WatchResponse{Revision: sent.Revision, Event: &v1.WatchResponse_Snapshot{Snapshot: sent}}); err != nil {
		return err
	}
	for {
		select {
		case <-out.Context().Done():
			return nil
		case <-changed:
		}
		select {
		case <-out.Context().Done():
			return nil
		case <-time.After(watchEvery):
		}
		var now *v1.ClusterState
		now, changed = s.a.board.get()
		// diff puts old objects in place of equal new ones, so it gets a copy:
		// others read the state at the same time.
		d := diff(sent, shallow(now))
		sent = now
		if d == nil {
			continue
		}
		if err := out.Send(&v1.WatchResponse{Revision: now.Revision, Event: &v1.WatchResponse_Delta{Delta: d}}); err != nil {
			return err
		}
	}
}

// shallow returns a state with lists of its own.
func shallow(s *v1.ClusterState) *v1.ClusterState {
	return &v1.ClusterState{Revision: s.Revision, SelfNodeId: s.SelfNodeId, ClusterName: s.ClusterName,
		Nodes: slices.Clone(s.Nodes), Links: slices.Clone(s.Links), Transfers: slices.Clone(s.Transfers),
		Instances: slices.Clone(s.Instances), Models: slices.Clone(s.Models), Findings: slices.Clone(s.Findings)}
}

// findNode returns the node that a person means by a name, an ID or the
// beginning of an ID.
func (a *Agent) findNode(name string) (*v1.Node, error) {
	s, _ := a.board.get()
	var fit []*v1.Node
	for _, n := range s.Nodes {
		if n.Name == name || n.Id == name {
			return n, nil
		}
		if len(name) >= 4 && strings.HasPrefix(n.Id, strings.ToUpper(name)) {
			fit = append(fit, n)
		}
	}
	switch len(fit) {
	case 1:
		return fit[0], nil
	case 0:
		var names []string
		for _, n := range s.Nodes {
			names = append(names, n.Name)
		}
		return nil, fault.Newf(fault.NodeUnknown, "the nodes are "+strings.Join(names, ", ")+"; a new one pairs by `tbcluster pair`", "no node is called %q", name).With("node", name)
	}
	var ids []string
	for _, n := range fit {
		ids = append(ids, n.Name+" "+n.Id)
	}
	return nil, fault.Newf(fault.NodeAmbiguous, "name one of: "+strings.Join(ids, ", "), "several nodes have an ID that begins with %q", name).With("node", name)
}

// upNode is findNode for a node that has to be there.
func (a *Agent) upNode(name string) (*v1.Node, error) {
	n, err := a.findNode(name)
	if err != nil {
		return nil, err
	}
	if n.State == v1.NodeState_NODE_STATE_DOWN || n.State == v1.NodeState_NODE_STATE_UNKNOWN {
		f := fault.Newf(fault.NodeDown, "start it and see that the agent runs there: `tbcluster up`", "node %s is down", n.Name).With("node", n.Name)
		f.Why = n.Reason
		return nil, f
	}
	return n, nil
}

// nodeServer acts on nodes.
type nodeServer struct {
	v1.UnimplementedNodeServiceServer
	a *Agent
}

// Forget lists a node that is down no more.
func (s *nodeServer) Forget(_ context.Context, q *v1.ForgetRequest) (*v1.ForgetResponse, error) {
	n, err := s.a.findNode(q.Node)
	if err != nil {
		return nil, err
	}
	if n.Self {
		return nil, fault.Newf(fault.NodeInUse, "`tbcluster pair --new-identity` makes a new node of it", "this node cannot forget itself")
	}
	if n.State == v1.NodeState_NODE_STATE_UP || n.State == v1.NodeState_NODE_STATE_SUSPECT {
		return nil, fault.Newf(fault.NodeInUse, "`tbcluster pair --revoke "+n.Name+"` puts it out", "node %s is up, and would be back at once", n.Name)
	}
	id := identity.NodeID(n.Id)
	if err := s.a.member.Forget(id); err != nil {
		return nil, err
	}
	if err := s.a.store.Forget(id); err != nil {
		return nil, err
	}
	s.a.finder.Forget(id)
	s.a.address.Forget(n.Id)
	s.a.tracker.Forget(n.Id)
	s.a.poke()
	return &v1.ForgetResponse{}, nil
}

// Rename gives a node another name.
func (s *nodeServer) Rename(_ context.Context, q *v1.RenameRequest) (*v1.RenameResponse, error) {
	n, err := s.a.findNode(q.Node)
	if err != nil {
		return nil, err
	}
	m, err := s.a.store.Rename(identity.NodeID(n.Id), q.Name)
	if err != nil {
		return nil, err
	}
	s.a.announce()
	s.a.poke()
	n = proto.CloneOf(n)
	n.Name = m.Name
	return &v1.RenameResponse{Node: n}, nil
}

// Ping tries each way to a node in turn.
func (s *nodeServer) Ping(ctx context.Context, q *v1.PingRequest) (*v1.PingResponse, error) {
	n, err := s.a.findNode(q.Node)
	if err != nil {
		return nil, err
	}
	if n.Self {
		return nil, fault.Newf(fault.Usage, "name another node", "%s is this node", n.Name)
	}
	count := int(q.Count)
	switch {
	case count == 0:
		count = 3
	case count > 100:
		return nil, fault.Newf(fault.Usage, "ask for at most 100", "%d round trips are too many", count).With("field", "count")
	}
	id := identity.NodeID(n.Id)
	ways := s.a.channel.Ways(id)
	all := make([]*v1.PingWay, len(ways))
	var wg sync.WaitGroup
	for i, w := range ways {
		wg.Go(func() {
			p := &v1.PingWay{Kind: w.Kind, Interface: w.Interface, Address: w.Addr.String(), LinkId: w.LinkID,
				Used: usedWay(n.ControlPath, w)}
			rtt, err := s.a.pingWay(ctx, id, w, count)
			if err != nil {
				p.Error = why(err)
			} else {
				p.RttUs = max(1, uint64(rtt.Microseconds()))
			}
			all[i] = p
		})
	}
	wg.Wait()
	out := &v1.PingResponse{}
	markUsed(n.ControlPath, all)
	for i, p := range all {
		if p.Interface == "" && slices.ContainsFunc(all, func(o *v1.PingWay) bool { return o.Interface != "" && o.Address == p.Address }) {
			continue // the same address, without saying by which interface
		}
		// Where a link-local address is, is found by trying: that it is not
		// everywhere is no news.
		if p.Error == "" || !ways[i].Addr.Addr().IsLinkLocalUnicast() {
			out.Ways = append(out.Ways, p)
		}
	}
	return out, nil
}

// markUsed marks a way over the interface of the control channel where none has
// its address: the other side made it, from an address that it does not tell.
func markUsed(path string, all []*v1.PingWay) {
	iface, _, ok := strings.Cut(path, " ")
	if !ok || slices.ContainsFunc(all, func(p *v1.PingWay) bool { return p.Used }) {
		return
	}
	for _, p := range all {
		if p.Interface == iface && p.Error == "" {
			p.Used = true
			return
		}
	}
}

// usedWay reports whether the control channel ("interface address:port") takes
// a way. Of a connection that the other side made, the port is another.
func usedWay(path string, w channel.Way) bool {
	iface, addr, ok := strings.Cut(path, " ")
	if !ok {
		iface, addr = "", path
	}
	at, err := netip.ParseAddrPort(addr)
	return err == nil && at.Addr().Unmap().WithZone("") == w.Addr.Addr().Unmap().WithZone("") &&
		(iface == "" || w.Interface == "" || iface == w.Interface)
}

// why returns an error's cause in few words.
func why(err error) string {
	if f := fault.As(err); f != nil && f.Why != "" {
		return f.Why
	}
	return err.Error()
}

// Changes lists what is changed, and what would be.
func (s *nodeServer) Changes(ctx context.Context, _ *v1.ChangesRequest) (*v1.ChangesResponse, error) {
	applied, err := s.a.root.Applied(ctx)
	if err != nil {
		return nil, err
	}
	out := &v1.ChangesResponse{}
	for _, c := range applied {
		out.Applied = append(out.Applied, c.String())
	}
	for _, c := range s.a.address.Wanted() {
		out.Commands = append(out.Commands, s.a.opt.Host.Commands(c)...)
	}
	return out, nil
}

// Logs streams the agent's log.
func (s *nodeServer) Logs(q *v1.NodeServiceLogsRequest, out grpc.ServerStreamingServer[v1.NodeServiceLogsResponse]) error {
	if s.a.opt.LogFile == "" {
		return fault.Newf(fault.Unsupported, "look where its standard error goes", "this agent keeps no log file")
	}
	var since time.Time
	if q.Since != nil {
		since = q.Since.AsTime()
	}
	return followLog(out.Context(), s.a.opt.LogFile, since, q.Follow, func(at time.Time, text string) error {
		return out.Send(&v1.NodeServiceLogsResponse{Line: logLine(at, 0, s.a.name(), withoutTime(text))})
	})
}

// Shutdown undoes what was changed and ends the agent and its root half.
func (s *nodeServer) Shutdown(ctx context.Context, q *v1.ShutdownRequest) (*v1.ShutdownResponse, error) {
	a := s.a
	moving := a.moves.active()
	if q.Mode == v1.ShutdownMode_SHUTDOWN_MODE_UNSPECIFIED || q.Mode == v1.ShutdownMode_SHUTDOWN_MODE_REFUSE {
		if err := a.idle("`tbcluster down --stop` stops them first, `--leave` leaves them running"); err != nil {
			return nil, err
		}
	}
	out := &v1.ShutdownResponse{}
	if q.Mode == v1.ShutdownMode_SHUTDOWN_MODE_STOP {
		for _, t := range moving {
			if _, err := a.moves.cancelOne(t.Id); err != nil {
				return nil, err
			}
			out.Undone = append(out.Undone, "cancelled transfer "+t.Id)
		}
		stopped, err := a.ranks.stopAllHere(ctx)
		if err != nil {
			return nil, err
		}
		for _, i := range stopped {
			out.Undone = append(out.Undone, "stopped instance "+i)
		}
	}
	keep := q.Mode == v1.ShutdownMode_SHUTDOWN_MODE_LEAVE && a.ranks.overCables()
	if !keep {
		applied, err := a.root.Applied(ctx)
		if err != nil {
			return nil, err
		}
		if err := a.address.Down(ctx); err != nil {
			return nil, err
		}
		for _, c := range applied {
			out.Undone = append(out.Undone, "undone: "+c.String())
		}
	} else {
		out.Undone = append(out.Undone, "left the addresses, which running instances use")
	}
	out.Pids = []uint32{uint32(os.Getpid())}
	if a.opt.RootPID > 0 {
		out.Pids = append(out.Pids, uint32(a.opt.RootPID))
	}
	a.leaveSoon(leaveRequest{undo: true})
	return out, nil
}

// idle refuses while something of this node runs; fix says what to do about it.
func (a *Agent) idle(fix string) error {
	var names []string
	for _, i := range a.ranks.runningHere() {
		names = append(names, "instance "+i)
	}
	for _, t := range a.moves.active() {
		names = append(names, "transfer "+t.Id)
	}
	if len(names) == 0 {
		return nil
	}
	return fault.Newf(fault.StillRunning, fix, "something is still running: %s", strings.Join(names, ", ")).With("running", strings.Join(names, ","))
}

// leaveSoon ends Run once the answer to who asked for it is out.
func (a *Agent) leaveSoon(q leaveRequest) {
	time.AfterFunc(100*time.Millisecond, func() {
		select {
		case a.leaving <- q:
		default:
		}
	})
}

// linkServer acts on links.
type linkServer struct {
	v1.UnimplementedLinkServiceServer
	a *Agent
}

// Rescan looks at the machine now.
func (s *linkServer) Rescan(ctx context.Context, _ *v1.RescanRequest) (*v1.RescanResponse, error) {
	if err := s.a.lookAgain(ctx); err != nil {
		return nil, err
	}
	s.a.finder.Ask()
	st, _ := s.a.board.get()
	out := &v1.RescanResponse{}
	for _, l := range st.Links {
		if l.A.GetNodeId() == s.a.id() || l.B.GetNodeId() == s.a.id() {
			out.Links = append(out.Links, l)
		}
	}
	return out, nil
}

// localUser is the local user as whom people of other nodes are to act: the
// one named, or the one who asks unless that is root.
func (a *Agent) localUser(ctx context.Context, named string, client bool) (string, error) {
	if named != "" {
		return named, nil
	}
	c := callerOf(ctx)
	if c.local == nil {
		u, _, err := a.clientUser(ctx, c.asker)
		return u.Name, err
	}
	u, _, err := c.local.who(ctx, a.root)
	if err != nil {
		return "", err
	}
	if u.UID == 0 && a.opt.Privileged && !a.soleUser() {
		if client {
			return "", fault.Newf(fault.Usage, "name the user as whom the client copies, places and stops here: --as NAME (\"--as root\" if you mean it)",
				"root makes the client, and no program on another machine is root by accident").With("field", "local_user")
		}
		return "", fault.Newf(fault.Usage, "name the user as whom people of the other nodes act here: --as NAME (\"--as root\" if you mean it)",
			"root pairs, and nobody is root on another machine by accident").With("field", "local_user")
	}
	return u.Name, nil
}

// soleUser reports whether root is the only user that there can be, as in a
// virtual cluster of an ordinary user.
func (a *Agent) soleUser() bool {
	data, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return false
	}
	f := strings.Fields(string(data))
	return len(f) == 3 && f[2] == "1"
}
