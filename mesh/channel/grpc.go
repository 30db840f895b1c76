package channel

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"tbcluster/mesh/identity"
)

// authType is what our credentials call themselves.
const authType = "tbcluster"

// AuthInfo is what gRPC knows of a connection of ours.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Conn *Conn
}

// AuthType implements credentials.AuthInfo.
func (AuthInfo) AuthType() string { return authType }

// Credentials are gRPC's credentials, both sides, for connections of a Channel:
// those bring their handshake with them. gRPC's own insist on the ALPN h2.
func Credentials() credentials.TransportCredentials { return channelCredentials{} }

type channelCredentials struct{}

func (channelCredentials) ClientHandshake(_ context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return channelCredentials{}.ServerHandshake(raw)
}

func (channelCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, ok := raw.(*Conn)
	if !ok || conn.unpaired || conn.client != nil {
		_ = raw.Close() // it is nobody's
		return nil, nil, fmt.Errorf("a %T is no connection to a paired node", raw)
	}
	return conn, AuthInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		Conn:           conn,
	}, nil
}

func (channelCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: authType}
}

func (c channelCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials; there are no
// server names here.
func (channelCredentials) OverrideServerName(string) error { return nil }

// bufferSize is that of each direction of a connection between agents, bytes.
const bufferSize = 4 << 10

// ServerOptions are the options of a gRPC server on Listener(Control).
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(Credentials()),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.MaxConcurrentStreams(1024),
		grpc.ConnectionTimeout(10 * time.Second),
		// A node has a connection to each other, and most say little.
		grpc.ReadBufferSize(bufferSize),
		grpc.WriteBufferSize(bufferSize),
	}
}

// PeerFromContext returns the node that called, within a gRPC handler.
func PeerFromContext(ctx context.Context) (identity.NodeID, bool) {
	conn, ok := ConnFromContext(ctx)
	if !ok || conn.client != nil {
		return "", false
	}
	return conn.Peer(), true
}

// ConnFromContext returns the connection of a gRPC handler.
func ConnFromContext(ctx context.Context) (*Conn, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Conn, ok && info.Conn != nil
}

func clientOptions(dial func(context.Context, string) (net.Conn, error)) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(Credentials()),
		grpc.WithContextDialer(dial),
		grpc.WithAuthority(authType),
		grpc.WithDisableServiceConfig(),
		grpc.WithReadBufferSize(bufferSize),
		grpc.WithWriteBufferSize(bufferSize),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: attemptTimeout,
		}),
	}
}

// Session is a gRPC connection over one Conn: when that ends it is over.
type Session struct {
	*grpc.ClientConn
	conn *Conn
}

// Via returns the way that it takes, for people ("thunderbolt0 10.77.3.2:7871").
func (s *Session) Via() string { return s.conn.Via().String() }

// Way returns the way that it takes.
func (s *Session) Way() Way { return s.conn.Via() }

// Close ends the session and its connection at once.
func (s *Session) Close() error {
	// First the connection, so that nothing waits for a peer that does not read.
	s.conn.abort()
	return s.ClientConn.Close()
}

// Session dials node for one gRPC connection. Package member uses it. Faults as
// of Dial.
func (c *Channel) Session(ctx context.Context, node identity.NodeID) (*Session, error) {
	conn, err := c.Dial(ctx, node, Control)
	if err != nil {
		return nil, err
	}
	return newSession(node, conn)
}

// SessionWay is Session over one way and no other.
func (c *Channel) SessionWay(ctx context.Context, node identity.NodeID, w Way) (*Session, error) {
	conn, err := c.DialWay(ctx, node, Control, w)
	if err != nil {
		return nil, err
	}
	return newSession(node, conn)
}

func newSession(node identity.NodeID, conn *Conn) (*Session, error) {
	var used atomic.Bool
	cc, err := grpc.NewClient("passthrough:///"+string(node), append(clientOptions(func(context.Context, string) (net.Conn, error) {
		if used.Swap(true) {
			return nil, net.ErrClosed
		}
		return conn, nil
	}), grpc.WithIdleTimeout(0))...)
	if err != nil {
		conn.abort()
		return nil, fmt.Errorf("set up gRPC: %w", err)
	}
	return &Session{ClientConn: cc, conn: conn}, nil
}

// Client returns the shared gRPC connection to node: dialled when it is used,
// again when it broke, over whatever way is best then, closed when it has been
// idle for a minute. It is not to be closed.
func (c *Channel) Client(node identity.NodeID) (*grpc.ClientConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, net.ErrClosed
	}
	if cc := c.clients[node]; cc != nil {
		return cc, nil
	}
	cc, err := grpc.NewClient("passthrough:///"+string(node), append(clientOptions(func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := c.Dial(ctx, node, Control)
		if err != nil {
			return nil, err // not a nil *Conn in a net.Conn
		}
		return conn, nil
	}), grpc.WithIdleTimeout(time.Minute))...)
	if err != nil {
		return nil, fmt.Errorf("set up gRPC: %w", err)
	}
	c.clients[node] = cc
	return cc, nil
}

func (c *Channel) dropClient(node identity.NodeID) {
	c.mu.Lock()
	cc := c.clients[node]
	delete(c.clients, node)
	c.mu.Unlock()
	if cc != nil {
		_ = cc.Close() // its error is that it is closed
	}
}
