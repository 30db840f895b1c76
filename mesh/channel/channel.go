package channel

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"tbcluster/mesh/identity"
)

// The protocols of the control port. The number is the protocol's major version.
const (
	Control = "tbcluster/1"      // gRPC between paired agents
	Link    = "tbcluster-link/1" // probes of one link
	HTTP    = "tbcluster-http/1" // gateway to gateway
	Pair    = "tbcluster-pair/1" // pairing; keys not yet trusted
)

// MaxMessage is the largest gRPC message either side accepts, bytes.
const MaxMessage = 5 << 20

// maxPerPeer bounds the connections of one node.
const maxPerPeer = 1024

// Trust says who is in the cluster; *identity.Store is one.
type Trust interface {
	Trusted(pub ed25519.PublicKey) (identity.Member, bool)
	OnChange(f func()) (cancel func())
}

// BindDialer dials addr ("host:port") bound to interface iface ("" for none)
// and, where it is valid, to source address src.
type BindDialer func(ctx context.Context, network, addr, iface string, src netip.Addr) (net.Conn, error)

// Options are the settings of a Channel. The zero value works.
type Options struct {
	// Dialer dials; nil is a plain net.Dialer, which can bind to an interface
	// only by the zone of an address and refuses other bound ways.
	Dialer BindDialer
	// InterfaceOf names the interface that has a local address, and whether it
	// is a cable; nil asks the system and takes thunderboltN for cables.
	InterfaceOf func(local netip.Addr) (name string, cable bool)
	// HandshakeTimeout bounds a handshake; 0 is 10 s.
	HandshakeTimeout time.Duration
	// MaxHandshakes and MaxHandshakesPerSource bound unfinished handshakes; 0 is
	// 256 and 32. At the bound the oldest unfinished one makes room.
	MaxHandshakes, MaxHandshakesPerSource int
	// NameOf names a node in messages; nil is NodeID.Short.
	NameOf func(identity.NodeID) string
	// Log; nil discards.
	Log *slog.Logger
}

func (o Options) filled() Options {
	if o.Dialer == nil {
		o.Dialer = plainDialer
	}
	if o.InterfaceOf == nil {
		o.InterfaceOf = interfaceOf
	}
	if o.HandshakeTimeout == 0 {
		o.HandshakeTimeout = 10 * time.Second
	}
	if o.MaxHandshakes == 0 {
		o.MaxHandshakes = 256
	}
	if o.MaxHandshakesPerSource == 0 {
		o.MaxHandshakesPerSource = 32
	}
	if o.NameOf == nil {
		o.NameOf = identity.NodeID.Short
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Channel is the control port of one node.
type Channel struct {
	key   *identity.Key
	trust Trust
	o     Options

	serverConfig atomic.Pointer[tls.Config]
	handshakes   handshakes
	untrust      func() // ends the call-backs of trust
	ctx          context.Context
	cancel       context.CancelFunc

	mu        sync.Mutex
	closed    bool
	protocols map[string]*protocol
	listeners map[net.Listener]bool
	conns     map[*Conn]bool
	ways      map[identity.NodeID][]Way
	failed    map[wayKey]time.Time
	others    map[identity.NodeID]identity.NodeID // who answers at an address of a node
	clients   map[identity.NodeID]*grpc.ClientConn
}

type wayKey struct {
	node identity.NodeID
	way  Way
}

type protocol struct {
	handle   func(*Conn)
	unpaired bool
	clients  *ClientServer // set for API alone
}

// New returns a Channel that speaks as key to whom trust trusts.
func New(key *identity.Key, trust Trust, o Options) *Channel {
	c := &Channel{
		key: key, trust: trust, o: o.filled(),
		protocols: map[string]*protocol{}, listeners: map[net.Listener]bool{}, conns: map[*Conn]bool{},
		ways: map[identity.NodeID][]Way{}, failed: map[wayKey]time.Time{}, others: map[identity.NodeID]identity.NodeID{}, clients: map[identity.NodeID]*grpc.ClientConn{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.handshakes = handshakes{total: c.o.MaxHandshakes, perSource: c.o.MaxHandshakesPerSource}
	c.serverConfig.Store(c.acceptConfig(nil))
	c.untrust = trust.OnChange(c.checkTrust)
	return c
}

// Close ends everything.
func (c *Channel) Close() error {
	c.untrust()
	c.cancel()
	c.mu.Lock()
	c.closed = true
	conns, listeners, clients := keys(c.conns), keys(c.listeners), c.clients
	c.clients = map[identity.NodeID]*grpc.ClientConn{}
	c.mu.Unlock()
	for _, cc := range clients {
		_ = cc.Close() // its error is that it is closed
	}
	for _, ln := range listeners {
		_ = ln.Close() // Serve reports what matters
	}
	for _, conn := range conns {
		conn.abort()
	}
	return nil
}

func keys[K comparable, V any](m map[K]V) []K {
	ks := make([]K, 0, len(m))
	for k := range m {
		ks = append(ks, k)
	}
	return ks
}

// Handle gives connections of protocol alpn to h, one goroutine each; the
// connection is closed when h returns. remove ends that for connections to come.
func (c *Channel) Handle(alpn string, h func(*Conn)) (remove func()) {
	return c.handle(alpn, &protocol{handle: h})
}

// HandleUnpaired is Handle for peers whose key nobody has vouched for yet.
// Package pair uses it while a code is open.
func (c *Channel) HandleUnpaired(alpn string, h func(*Conn)) (remove func()) {
	return c.handle(alpn, &protocol{handle: h, unpaired: true})
}

func (c *Channel) handle(alpn string, p *protocol) (remove func()) {
	c.setProtocol(alpn, nil, p)
	return func() { c.setProtocol(alpn, p, nil) }
}

// setProtocol replaces what serves alpn by p, unless that is no longer old.
func (c *Channel) setProtocol(alpn string, old, p *protocol) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old != nil && c.protocols[alpn] != old {
		return
	}
	if p == nil {
		delete(c.protocols, alpn)
	} else {
		c.protocols[alpn] = p
	}
	var alpns []string
	for alpn, p := range c.protocols {
		if p.clients == nil {
			alpns = append(alpns, alpn)
		}
	}
	slices.Sort(alpns)
	c.serverConfig.Store(c.acceptConfig(alpns))
}

func (c *Channel) protocol(alpn string) *protocol {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.protocols[alpn]
}

// checkTrust closes the connections of those who are in the cluster no more.
func (c *Channel) checkTrust() {
	c.mu.Lock()
	conns := keys(c.conns)
	clients := map[identity.NodeID]bool{}
	c.mu.Unlock()
	for _, conn := range conns {
		if !c.trusted(conn) {
			c.o.Log.Info("closing the connection of one that was put out", "node", conn.peer)
			conn.abort()
			clients[conn.peer] = true
		}
	}
	for node := range clients {
		c.dropClient(node)
	}
}

// register makes conn one of ours, or closes it.
func (c *Channel) register(conn *Conn) bool {
	c.mu.Lock()
	of := 0
	for other := range c.conns {
		if other.peer == conn.peer {
			of++
		}
	}
	ok := !c.closed && of < maxPerPeer
	if ok {
		c.conns[conn] = true
		delete(c.others, conn.peer)
	}
	c.mu.Unlock()
	if !ok {
		conn.abort()
		return false
	}
	// Revoked between the handshake and now?
	if !c.trusted(conn) {
		conn.abort()
		return false
	}
	return true
}

func (c *Channel) unregister(conn *Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.conns, conn)
}

// WayGone closes all connections over an interface that is no more, or that
// carries nothing any more.
func (c *Channel) WayGone(iface string) {
	c.mu.Lock()
	conns := keys(c.conns)
	c.mu.Unlock()
	for _, conn := range conns {
		if iface != "" && conn.via.Interface == iface {
			conn.abort()
		}
	}
}

// Peers returns the nodes to which there are connections now, with how many.
func (c *Channel) Peers() map[identity.NodeID]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	peers := map[identity.NodeID]int{}
	for conn := range c.conns {
		if conn.client == nil {
			peers[conn.peer]++
		}
	}
	return peers
}

// interfaceOf asks the system which interface has a local address.
func interfaceOf(local netip.Addr) (name string, cable bool) {
	defer func() { cable = strings.HasPrefix(name, "thunderbolt") }()
	if zone := local.Zone(); zone != "" {
		return zone, false
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return "", false
	}
	for _, i := range interfaces {
		addrs, err := i.Addrs()
		if err != nil {
			continue // it has just gone
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == local.Unmap() {
				return i.Name, false
			}
		}
	}
	return "", false
}
