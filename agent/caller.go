package agent

import (
	"context"
	"net"
	"os"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

// access is what a local person needs for a call.
type access int

const (
	read   access = iota // any local user
	change               // root or an owner
)

// rule says who may make a call.
type rule struct {
	local access
	// remote is the least role of a node on which somebody asks; none means
	// that the call is not taken from other nodes.
	remote v1.Role
	// client is the least role of a client over the network; none means that it
	// is not served to clients.
	client v1.Role
}

const none = v1.Role_ROLE_UNSPECIFIED

// rules has a row for every call that is served, public or between agents. A
// call without one is refused, and a test fails for it.
var rules = map[string]rule{
	"/tbcluster.v1.ClusterService/GetState":    {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.ClusterService/Watch":       {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.NodeService/Ping":           {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.NodeService/Forget":         {change, none, v1.Role_ROLE_ADMIN},
	"/tbcluster.v1.NodeService/Rename":         {change, v1.Role_ROLE_ADMIN, v1.Role_ROLE_ADMIN},
	"/tbcluster.v1.NodeService/Shutdown":       {change, none, v1.Role_ROLE_ADMIN},
	"/tbcluster.v1.NodeService/Logs":           {read, none, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.NodeService/Changes":        {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.LinkService/Rescan":         {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.LinkService/Bench":          {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.PairingService/Open":        {change, none, v1.Role_ROLE_ADMIN},
	"/tbcluster.v1.PairingService/Join":        {change, none, none},
	"/tbcluster.v1.PairingService/List":        {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.PairingService/Revoke":      {change, none, v1.Role_ROLE_ADMIN},
	"/tbcluster.v1.PairingService/Map":         {change, none, none},
	"/tbcluster.v1.PairingService/AddClient":   {change, none, none},
	"/tbcluster.v1.PairingService/NewIdentity": {change, none, none},
	"/tbcluster.v1.ModelService/Add":           {change, none, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.ModelService/Remove":        {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.ModelService/Scan":          {read, v1.Role_ROLE_VIEWER, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.TransferService/Start":      {change, none, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.TransferService/Get":        {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.TransferService/List":       {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.TransferService/Watch":      {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.TransferService/Cancel":     {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.TransferService/Pause":      {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.TransferService/Resume":     {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.InstanceService/Plan":       {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.InstanceService/Place":      {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.InstanceService/Get":        {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.InstanceService/List":       {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.InstanceService/Watch":      {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.v1.InstanceService/Stop":       {change, v1.Role_ROLE_OPERATOR, v1.Role_ROLE_OPERATOR},
	// An engine may log what people ask of it.
	"/tbcluster.v1.InstanceService/Logs":            {change, none, v1.Role_ROLE_OPERATOR},
	"/tbcluster.v1.DoctorService/Check":             {read, v1.Role_ROLE_VIEWER, v1.Role_ROLE_VIEWER},
	"/grpc.health.v1.Health/Check":                  {read, none, v1.Role_ROLE_VIEWER},
	"/grpc.health.v1.Health/List":                   {read, none, v1.Role_ROLE_VIEWER},
	"/grpc.health.v1.Health/Watch":                  {read, none, v1.Role_ROLE_VIEWER},
	reflectionV1:                                    {read, none, v1.Role_ROLE_VIEWER},
	reflectionV1Alpha:                               {read, none, v1.Role_ROLE_VIEWER},
	"/tbcluster.peer.v1.PeerService/Sync":           {change, v1.Role_ROLE_VIEWER, none},
	"/tbcluster.peer.v1.PeerService/ProposeAddress": {change, v1.Role_ROLE_VIEWER, none},
	"/tbcluster.peer.v1.PeerService/Worker":         {change, v1.Role_ROLE_OPERATOR, none},
	"/tbcluster.peer.v1.PeerService/Rank":           {change, v1.Role_ROLE_OPERATOR, none},
	"/tbcluster.peer.v1.PeerService/RankEvents":     {change, v1.Role_ROLE_OPERATOR, none},
	"/tbcluster.peer.v1.PeerService/Forward":        {change, v1.Role_ROLE_VIEWER, none}, // and the row of what is forwarded
	"/tbcluster.peer.v1.PeerService/Logs":           {change, v1.Role_ROLE_OPERATOR, none},
	"/tbcluster.peer.v1.PeerService/Echo":           {change, v1.Role_ROLE_VIEWER, none},
	"/tbcluster.peer.v1.PeerService/BenchLink":      {change, v1.Role_ROLE_OPERATOR, none},
}

const (
	reflectionV1      = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	reflectionV1Alpha = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
)

// caller is who makes a call: a person at this machine's socket, or a person
// of another node whose agent asks for him.
type caller struct {
	asker host.Asker
	// paired says of a remote person that he is the one who paired there.
	paired bool
	// role is that of the remote node; admin for a local person.
	role v1.Role
	// local is the connection of a local person; nil for a remote one.
	local *localConn
	// client says that it is a client of this node that asks.
	client bool
}

type callerKey struct{}

func withCaller(ctx context.Context, c caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// callerOf returns who makes the call.
func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c
}

// hold returns the asker with a client socket of its own, which outlives the
// call; release closes it.
func (c caller) hold() (host.Asker, func(), error) {
	a := c.asker
	if c.local == nil {
		return a, func() {}, nil
	}
	f, err := c.local.conn.File()
	if err != nil {
		return a, nil, fault.New(fault.Interrupted, "the client is gone", err, "")
	}
	a.Socket = f
	return a, func() { _ = f.Close() }, nil
}

// localConn is one client's connection to the API socket.
type localConn struct {
	conn *net.UnixConn
	uid  uint32

	once  sync.Once
	user  root.User
	owner bool
	err   error
}

// AuthType names our credentials.
func (*localConn) AuthType() string { return "unix" }

// who asks the root half once for each connection who is at its other end.
func (l *localConn) who(ctx context.Context, rc *root.Client) (root.User, bool, error) {
	l.once.Do(func() {
		f, err := l.conn.File()
		if err != nil {
			l.err = err
			return
		}
		l.user, l.owner, l.err = rc.Who(ctx, host.Asker{UID: l.uid, Socket: f}, false)
		if err := f.Close(); l.err == nil {
			l.err = err
		}
	})
	return l.user, l.owner, l.err
}

// unixCredentials attach to each connection who is at its other end.
type unixCredentials struct {
	peerUID func(*os.File) (uint32, error)
}

func (u unixCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return nil, nil, fault.Newf(fault.Denied, "", "what was passed on is no Unix socket")
	}
	f, err := uc.File()
	if err != nil {
		return nil, nil, err
	}
	uid, err := u.peerUID(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, nil, err
	}
	return c, &localConn{conn: uc, uid: uid}, nil
}

func (unixCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fault.Newf(fault.Unsupported, "", "these credentials are a server's")
}

func (unixCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}

func (u unixCredentials) Clone() credentials.TransportCredentials { return u }

func (unixCredentials) OverrideServerName(string) error { return nil }

// authorizeLocal checks a local call against its rule and returns a context
// that knows the caller.
func (a *Agent) authorizeLocal(ctx context.Context, method string) (context.Context, error) {
	r, ok := rules[method]
	if !ok || strings.HasPrefix(method, "/tbcluster.peer.") {
		return nil, fault.Newf(fault.Denied, "", "%s is not served here", method)
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, fault.Newf(fault.Denied, "", "the call has no connection")
	}
	l, ok := p.AuthInfo.(*localConn)
	if !ok {
		return nil, fault.Newf(fault.Denied, "", "the call does not come by the local socket")
	}
	c := caller{asker: host.Asker{UID: l.uid}, role: v1.Role_ROLE_ADMIN, local: l}
	if r.local == change {
		u, owner, err := l.who(ctx, a.root)
		if err != nil {
			return nil, err
		}
		if !owner {
			return nil, fault.Newf(fault.Denied, "ask root, or have root put you there: owners = [\""+u.Name+"\"] in "+a.opt.Paths.Config+", and start the agent again",
				"%s may look, but not change anything on %s", u.Name, a.name())
		}
		c.asker.Name = u.Name
	}
	return withCaller(ctx, c), nil
}

func (a *Agent) localUnary(ctx context.Context, q any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	ctx, err := a.authorizeLocal(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return h(ctx, q)
}

func (a *Agent) localStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	ctx, err := a.authorizeLocal(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return h(srv, &streamWithContext{ss, ctx})
}

// streamWithContext is a stream whose context knows the caller.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

// Context returns the context that knows the caller.
func (s *streamWithContext) Context() context.Context { return s.ctx }
