package channel

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/mesh/identity"
)

const echo = "echo/1"

type node struct {
	*Channel
	key   *identity.Key
	store *identity.Store
	addr  netip.AddrPort
}

func (n *node) id() identity.NodeID { return n.key.ID() }

func newNode(t *testing.T, name string, o Options) *node {
	t.Helper()
	dir := t.TempDir()
	key, _, err := identity.OpenKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	store, err := identity.OpenStore(dir, key, identity.StoreOptions{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{New(key, store, o), key, store, netip.AddrPort{}}
	n.serve(t, "127.0.0.1:0")
	n.Handle(echo, func(c *Conn) { _, _ = io.Copy(c, c) })
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *node) serve(t *testing.T, addr string) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- n.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		_ = n.Close()
		if err := <-done; err != nil {
			t.Error("Serve:", err)
		}
	})
	a := ln.Addr().(*net.TCPAddr).AddrPort()
	if !n.addr.IsValid() {
		n.addr = a
	}
	return a
}

func pairUp(t *testing.T, a, b *node) {
	t.Helper()
	if _, err := a.store.Introduce(b.key.Public(), "node", identity.Admin); err != nil {
		t.Fatal(err)
	}
	rs, err := identity.ParseRecords(a.store.Export())
	if err != nil {
		t.Fatal(err)
	}
	if err := b.store.Adopt(rs, a.key.Public()); err != nil {
		t.Fatal(err)
	}
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func lan(a netip.AddrPort) Way { return Way{Kind: LAN, Addr: a} }

func wantEcho(t *testing.T, c *Conn) {
	t.Helper()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 5)
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "hello" {
		t.Fatalf("echo: %q, %v", buf, err)
	}
}

// wantEnd waits until the connection is over at the other end.
func wantEnd(t *testing.T, c *Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	_, err := c.Read(make([]byte, 1))
	var ne net.Error
	if err == nil || errors.As(err, &ne) && ne.Timeout() {
		t.Fatalf("the connection goes on: %v", err)
	}
}

func TestPairedNodesTalk(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	a.SetWays(b.id(), []Way{lan(b.addr)})
	got := make(chan *Conn, 1)
	b.Handle("who/1", func(c *Conn) { got <- c; <-c.Done() })
	c, err := a.Dial(ctx(t), b.id(), "who/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	far := <-got
	if c.Peer() != b.id() || far.Peer() != a.id() || !far.PeerKey().Equal(a.key.Public()) {
		t.Fatalf("peers %s and %s", c.Peer(), far.Peer())
	}
	if c.Via().Interface != "lo" || far.Via().Interface != "lo" || c.Via().Addr != b.addr {
		t.Fatalf("ways %v and %v", c.Via(), far.Via())
	}
	e, err := a.Dial(ctx(t), b.id(), echo)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	wantEcho(t, e)
}

func TestNobodyGetsInWhoWasNotLetIn(t *testing.T) {
	a, b, stranger := newNode(t, "a", Options{}), newNode(t, "b", Options{}), newNode(t, "s", Options{})
	pairUp(t, a, b)
	// The stranger knows and trusts b; b does not know it.
	if _, err := stranger.store.Introduce(b.key.Public(), "b", identity.Admin); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{}, 1)
	b.Handle(echo, func(*Conn) { served <- struct{}{} })
	_, err := stranger.DialWay(ctx(t), b.id(), echo, lan(b.addr))
	f := fault.As(err)
	if f == nil || f.Reason != fault.NotPaired || !strings.Contains(f.Fix, "tbcluster pair") {
		t.Fatalf("stranger: %v", err)
	}
	// And b dials the stranger, whom it does not trust.
	if _, err := b.DialWay(ctx(t), stranger.id(), echo, lan(stranger.addr)); !fault.Is(err, fault.NotPaired) {
		t.Fatalf("to the stranger: %v", err)
	}
	// A node that is trusted, but another than was dialled.
	c := newNode(t, "c", Options{})
	if _, err := a.store.Introduce(c.key.Public(), "c", identity.Admin); err != nil {
		t.Fatal(err)
	}
	if _, err := a.DialWay(ctx(t), b.id(), echo, lan(c.addr)); !fault.Is(err, fault.NodeDown) || !strings.Contains(err.Error(), "another node") {
		t.Fatalf("another node: %v", err)
	}
	if _, err := a.DialWay(ctx(t), b.id(), echo, lan(a.addr)); !fault.Is(err, fault.NodeDown) || !strings.Contains(err.Error(), "itself") {
		t.Fatalf("itself: %v", err)
	}
	select {
	case <-served:
		t.Fatal("a handler ran for a stranger")
	default:
	}
	if n := len(b.Peers()); n != 0 {
		t.Fatalf("%d connections are left", n)
	}
}

func TestRawTLSIsHeldToTheRules(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	ecKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, ecKey.Public(), ecKey)
	if err != nil {
		t.Fatal(err)
	}
	good := a.key.Certificate()
	// The certificate of another node, which everybody who talks to it sees, with a
	// key of its own.
	_, mine, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	borrowed := tls.Certificate{Certificate: good.Certificate, PrivateKey: mine}
	two := good
	two.Certificate = append([][]byte{good.Certificate[0]}, der)
	for name, c := range map[string]*tls.Config{
		"TLS 1.2":                         {MaxVersion: tls.VersionTLS12, Certificates: []tls.Certificate{good}, NextProtos: []string{echo}},
		"no protocol":                     {Certificates: []tls.Certificate{good}},
		"unknown protocol":                {Certificates: []tls.Certificate{good}, NextProtos: []string{"h2", "tbcluster/9"}},
		"no certificate":                  {NextProtos: []string{echo}},
		"another key type":                {Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: ecKey}}, NextProtos: []string{echo}},
		"the certificate of another node": {Certificates: []tls.Certificate{borrowed}, NextProtos: []string{echo}},
		"two certificates":                {Certificates: []tls.Certificate{two}, NextProtos: []string{echo}},
		"pairing, closed":                 {Certificates: []tls.Certificate{good}, NextProtos: []string{Pair}},
	} {
		t.Run(name, func(t *testing.T) {
			c.InsecureSkipVerify = true
			conn, err := (&tls.Dialer{Config: c}).DialContext(ctx(t), "tcp", b.addr.String())
			if err != nil {
				return
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Fatalf("let in: %d bytes, %v", n, err)
			}
		})
	}
	// The same with everything right is let in.
	conn, err := (&tls.Dialer{Config: &tls.Config{
		InsecureSkipVerify: true, Certificates: []tls.Certificate{good}, NextProtos: []string{echo},
	}}).DialContext(ctx(t), "tcp", b.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	one := make([]byte, 1)
	if _, err := io.ReadFull(conn, one); err != nil || one[0] != accepted {
		t.Fatalf("not let in: %v", err)
	}
}

func TestUnpairedProtocolIsServedOnlyWhileOpen(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	if _, err := a.DialUnpaired(ctx(t), Pair, lan(b.addr)); !fault.Is(err, fault.Protocol) {
		t.Fatalf("before it is open: %v", err)
	}
	remove := b.HandleUnpaired(Pair, func(c *Conn) { _, _ = io.Copy(c, c) })
	c, err := a.DialUnpaired(ctx(t), Pair, lan(b.addr))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	wantEcho(t, c)
	// It opens no other protocol.
	if _, err := a.DialUnpaired(ctx(t), echo, lan(b.addr)); !fault.Is(err, fault.NotPaired) {
		t.Fatalf("another protocol: %v", err)
	}
	if _, _, err := Credentials().ServerHandshake(c); err == nil {
		t.Fatal("gRPC takes an unpaired connection")
	}
	remove()
	if _, err := a.DialUnpaired(ctx(t), Pair, lan(b.addr)); !fault.Is(err, fault.Protocol) {
		t.Fatalf("after it was closed: %v", err)
	}
}

func TestRevokedNodeIsCutOffAtOnce(t *testing.T) {
	a, b, c := newNode(t, "a", Options{}), newNode(t, "b", Options{}), newNode(t, "c", Options{})
	pairUp(t, a, b)
	pairUp(t, a, c)
	fromB, err := b.DialWay(ctx(t), a.id(), echo, lan(a.addr))
	if err != nil {
		t.Fatal(err)
	}
	toB, err := a.DialWay(ctx(t), b.id(), echo, lan(b.addr))
	if err != nil {
		t.Fatal(err)
	}
	fromC, err := c.DialWay(ctx(t), a.id(), echo, lan(a.addr))
	if err != nil {
		t.Fatal(err)
	}
	defer fromC.Close()
	if _, _, err := a.store.Revoke(b.id(), false, false); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, fromB)
	wantEnd(t, toB)
	wantEcho(t, fromC)
	if _, err := b.DialWay(ctx(t), a.id(), echo, lan(a.addr)); !fault.Is(err, fault.NotPaired) {
		t.Fatalf("it comes back: %v", err)
	}
}

func TestWayGoneClosesWhatWentThatWay(t *testing.T) {
	name := func(addr netip.Addr) (string, bool) {
		if addr.Is6() {
			return "lan0", false
		}
		return "thunderbolt0", true
	}
	a, b := newNode(t, "a", Options{InterfaceOf: name}), newNode(t, "b", Options{InterfaceOf: name})
	pairUp(t, a, b)
	six := b.serve(t, "[::1]:0")
	cable, err := a.DialWay(ctx(t), b.id(), echo, Way{Kind: Cable, Addr: b.addr})
	if err != nil {
		t.Fatal(err)
	}
	lan, err := a.DialWay(ctx(t), b.id(), echo, lan(six))
	if err != nil {
		t.Fatal(err)
	}
	defer lan.Close()
	wantEcho(t, cable)
	b.WayGone("thunderbolt0") // at the accepting end
	wantEnd(t, cable)
	wantEcho(t, lan)
	cable, err = a.DialWay(ctx(t), b.id(), echo, Way{Kind: Cable, Addr: b.addr})
	if err != nil {
		t.Fatal(err)
	}
	a.WayGone("thunderbolt0") // at the dialling end
	<-cable.Done()
	wantEnd(t, cable)
	wantEcho(t, lan)
}

func TestBestWayFirstAndTheNextOneSoon(t *testing.T) {
	b := newNode(t, "b", Options{})
	six := b.serve(t, "[::1]:0")
	// However long the cable takes on a machine with much to do, the LAN takes
	// longer.
	ready := make(chan struct{})
	a := newNode(t, "a", Options{Dialer: func(ctx context.Context, network, addr, iface string, src netip.Addr) (net.Conn, error) {
		if addr == six.String() {
			select {
			case <-ready:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		return plainDialer(ctx, network, addr, iface, src)
	}})
	pairUp(t, a, b)
	both := []Way{lan(six), {Kind: Cable, Addr: b.addr}}
	a.SetWays(b.id(), both)
	c, err := a.Dial(ctx(t), b.id(), echo)
	if err != nil {
		t.Fatal(err)
	}
	close(ready)
	if c.Via().Kind != Cable {
		t.Fatalf("went by %v", c.Via())
	}
	_ = c.Close()

	// A way that takes the connection and says nothing: the next soon.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	dumb := Way{Kind: Cable, Addr: silent.Addr().(*net.TCPAddr).AddrPort()}
	a.SetWays(b.id(), []Way{dumb, lan(six)})
	c, err = a.Dial(ctx(t), b.id(), echo)
	if err != nil {
		t.Fatal(err)
	}
	if c.Via().Addr != six {
		t.Fatalf("went by %v", c.Via())
	}
	_ = c.Close()

	// A way that refuses: the next at once, and first the next time.
	if err := silent.Close(); err != nil {
		t.Fatal(err)
	}
	a.SetWays(b.id(), []Way{dumb, lan(six)})
	c, err = a.Dial(ctx(t), b.id(), echo)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if ways := a.order(b.id()); ways[0].Addr != six {
		t.Fatalf("order after a failure: %v", ways)
	}
	// Set anew it has its place again.
	a.SetWays(b.id(), []Way{lan(six)})
	a.SetWays(b.id(), []Way{dumb, lan(six)})
	if ways := a.order(b.id()); ways[0].Addr != dumb.Addr {
		t.Fatalf("order after it came anew: %v", ways)
	}
}

func TestDialSaysWhatIsWrongWithEachWay(t *testing.T) {
	a, b := newNode(t, "a", Options{NameOf: func(identity.NodeID) string { return "beta" }}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	if _, err := a.Dial(ctx(t), b.id(), echo); !fault.Is(err, fault.NodeDown) || !strings.Contains(err.Error(), "connect to beta") {
		t.Fatalf("no way: %v", err)
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := closed.Addr().(*net.TCPAddr).AddrPort()
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	a.SetWays(b.id(), []Way{lan(gone), {Kind: Cable, Interface: "thunderbolt7", Addr: b.addr}})
	_, err = a.Dial(ctx(t), b.id(), echo)
	if !fault.Is(err, fault.NodeDown) || !strings.Contains(err.Error(), "refused") || !strings.Contains(err.Error(), "thunderbolt7") {
		t.Fatalf("two bad ways: %v", err)
	}
	if _, err := a.DialWay(ctx(t), b.id(), "other/1", lan(b.addr)); !fault.Is(err, fault.Protocol) {
		t.Fatalf("unknown protocol: %v", err)
	}
	if other, ok := a.Other(b.id()); ok {
		t.Fatalf("%s answers as %s", b.id(), other)
	}
	renewed := newNode(t, "c", Options{})
	if _, err := a.DialWay(ctx(t), b.id(), echo, lan(renewed.addr)); !fault.Is(err, fault.NodeDown) {
		t.Fatalf("another node: %v", err)
	}
	if other, ok := a.Other(b.id()); !ok || other != renewed.id() {
		t.Fatalf("it answers as %s, %v", other, ok)
	}
	stopped, cancel := context.WithCancel(ctx(t))
	cancel()
	if _, err := a.DialWay(stopped, b.id(), echo, lan(b.addr)); !fault.Is(err, fault.Interrupted) {
		t.Fatalf("cancelled: %v", err)
	}
	got, err := a.DialAddress(ctx(t), echo, lan(b.addr))
	if err != nil || got.Peer() != b.id() {
		t.Fatalf("DialAddress: %v", err)
	}
	if other, ok := a.Other(b.id()); ok {
		t.Fatalf("it is back, and answers as %s", other)
	}
	_ = got.Close()
	for what, dial := range map[string]func() error{
		"cannot connect to " + gone.String(): func() error { _, err := a.DialUnpaired(ctx(t), Pair, lan(gone)); return err },
		"cannot connect to beta":             func() error { _, err := a.Dial(ctx(t), b.id(), echo); return err },
	} {
		if f := fault.As(dial()); f == nil || f.What != what {
			t.Errorf("it says %+v, want %q", f, what)
		}
	}
}

func TestHalfOpenConnectionsExhaustNothing(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	var held []net.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close()
		}
	}()
	for i := range 500 {
		c, err := net.Dial("tcp", b.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
		if i%2 == 0 { // half of them begin a record and never end it
			if _, err := c.Write([]byte{22, 3, 1, 2, 0, 1}); err != nil && i < 16 {
				t.Fatal(err)
			}
		}
	}
	// Before any of the others is given up.
	c, err := a.DialWay(ctx(t), b.id(), echo, lan(b.addr))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	wantEcho(t, c)
	b.handshakes.mu.Lock()
	n := b.handshakes.pending.Len()
	b.handshakes.mu.Unlock()
	if n > 32 {
		t.Errorf("%d handshakes are pending", n)
	}
}

func TestSlowHandshakeEnds(t *testing.T) {
	b := newNode(t, "b", Options{HandshakeTimeout: 100 * time.Millisecond})
	c, err := net.Dial("tcp", b.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("read: %v", err)
	}
	var ne net.Error
	if _, err := c.Read(make([]byte, 1)); errors.As(err, &ne) && ne.Timeout() {
		t.Fatal("the connection is still open")
	}
}

func TestSourcesAreTold(t *testing.T) {
	of := func(s string) netip.Addr {
		return sourceOf(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)))
	}
	if of("10.0.0.1:1") == of("10.0.0.2:1") || of("10.0.0.1:1") != of("[::ffff:10.0.0.1]:2") {
		t.Error("IPv4")
	}
	if of("[2001:db8::1]:1") != of("[2001:db8::2]:1") || of("[2001:db8::1]:1") == of("[2001:db8:0:1::1]:1") {
		t.Error("IPv6")
	}
	if of("[fe80::1%a]:1") == of("[fe80::2%a]:1") || of("[fe80::1%a]:1") == of("[fe80::1%b]:1") {
		t.Error("link-local")
	}
}

type echoServer struct {
	peerv1.UnimplementedPeerServiceServer
	from atomic.Pointer[identity.NodeID]
}

func (s *echoServer) Echo(ctx context.Context, _ *peerv1.EchoRequest) (*peerv1.EchoResponse, error) {
	id, ok := PeerFromContext(ctx)
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "nobody")
	}
	s.from.Store(&id)
	return &peerv1.EchoResponse{}, nil
}

func TestGRPC(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	srv, es := grpc.NewServer(ServerOptions()...), &echoServer{}
	peerv1.RegisterPeerServiceServer(srv, es)
	served := make(chan error, 1)
	ln := b.Listener(Control) // from here on the protocol is spoken
	go func() { served <- srv.Serve(ln) }()
	t.Cleanup(func() {
		srv.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	a.SetWays(b.id(), []Way{lan(b.addr)})
	s, err := a.Session(ctx(t), b.id())
	if err != nil {
		t.Fatal(err)
	}
	call := func(cc grpc.ClientConnInterface) error {
		_, err := peerv1.NewPeerServiceClient(cc).Echo(ctx(t), &peerv1.EchoRequest{})
		return err
	}
	if err := call(s); err != nil || *es.from.Load() != a.id() {
		t.Fatalf("session: %v", err)
	}
	if s.Via() != "lo "+b.addr.String() {
		t.Fatalf("via %q", s.Via())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := call(s); err == nil {
		t.Fatal("a closed session goes on")
	}
	cc, err := a.Client(b.id())
	if err != nil {
		t.Fatal(err)
	}
	if err := call(cc); err != nil {
		t.Fatal(err)
	}
	b.WayGone("lo") // it dials again by itself
	deadline := time.Now().Add(time.Minute)
	for err = call(cc); status.Code(err) == codes.Unavailable && time.Now().Before(deadline); err = call(cc) {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	if again, err := a.Client(b.id()); err != nil || again != cc {
		t.Fatalf("Client is not shared: %v", err)
	}
	if _, _, err := a.store.Revoke(b.id(), false, false); err != nil {
		t.Fatal(err)
	}
	if err := call(cc); err == nil {
		t.Fatal("a revoked node is called")
	}
}
