package tcp

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"net/netip"
	"testing"
	"time"

	"tbcluster/transfer/transport"
	"tbcluster/transfer/wire"
)

var loopback = netip.MustParseAddr("127.0.0.1")

func certificate(t *testing.T) (tls.Certificate, transport.Hash) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, sha256.Sum256(der)
}

func only(want transport.Hash) func(transport.Hash) bool {
	return func(h transport.Hash) bool { return h == want }
}

// pair returns two ends that know each other, and who listens.
func pair(t *testing.T) (dialled, accepted transport.Conn, l transport.Listener) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	a, ah := certificate(t)
	b, bh := certificate(t)
	tr := New(nil, nil)
	l, err := tr.Listen(ctx, transport.ListenRequest{Local: loopback, Identity: transport.Identity{Certificate: b, Peer: only(ah)}})
	if err != nil {
		t.Fatal(err)
	}
	dialled, err = tr.Dial(ctx, transport.DialRequest{Remote: loopback, Port: l.Port(), Identity: transport.Identity{Certificate: a, Peer: only(bh)}})
	if err != nil {
		t.Fatal(err)
	}
	accepted, err = l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dialled.Close(); _ = accepted.Close(); _ = l.Close() })
	return dialled, accepted, l
}

func TestFramesArriveInOrderBothWays(t *testing.T) {
	a, b, _ := pair(t)
	big := make([]byte, wire.MaxPayload)
	if _, err := rand.Read(big); err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		for i, p := range [][]byte{nil, {1}, big} {
			if err := a.Send(wire.Header{Kind: wire.Pack, Stream: uint64(i)}, p); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	buf := make([]byte, wire.MaxPayload)
	for i, want := range [][]byte{nil, {1}, big} {
		h, p, err := b.Receive(buf)
		if err != nil || h.Stream != uint64(i) || !bytes.Equal(p, want) {
			t.Fatalf("frame %d: %+v, %d bytes, %v", i, h, len(p), err)
		}
		if err := b.Send(wire.Header{Kind: wire.Ack, Stream: h.Stream}, nil); err != nil {
			t.Fatal(err)
		}
		if h, _, err := a.Receive(nil); err != nil || h.Kind != wire.Ack || h.Stream != uint64(i) {
			t.Fatalf("answer %d: %+v, %v", i, h, err)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

func TestAFrameThatDoesNotFitIsAnError(t *testing.T) {
	a, b, _ := pair(t)
	if err := a.Send(wire.Header{Kind: wire.Chunk}, []byte("too long")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Receive(make([]byte, 3)); !errors.Is(err, wire.ErrMalformed) {
		t.Fatalf("%v", err)
	}
}

func TestStrangersAreRefusedByBothSides(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	a, ah := certificate(t)
	b, bh := certificate(t)
	evil, _ := certificate(t)
	tr := New(nil, nil)
	l, err := tr.Listen(ctx, transport.ListenRequest{Local: loopback, Identity: transport.Identity{Certificate: b, Peer: only(ah)}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial := func(c tls.Certificate, peer transport.Hash) (transport.Conn, error) {
		return tr.Dial(ctx, transport.DialRequest{Remote: loopback, Port: l.Port(), Identity: transport.Identity{Certificate: c, Peer: only(peer)}})
	}
	// The dialling side refuses a listener that is not the one named.
	if _, err := dial(a, ah); !errors.Is(err, errStranger) {
		t.Errorf("a stranger listened: %v", err)
	}
	// The listening side refuses who is not named: it is told on first use.
	c, err := dial(evil, bh)
	if err == nil {
		_, _, err = c.Receive(nil)
		_ = c.Close()
	}
	if err == nil {
		t.Error("a stranger was let in")
	}
	// Somebody without a certificate, and somebody who says nothing, do not
	// keep the right one out.
	silent, err := net.Dial("tcp", netip.AddrPortFrom(loopback, l.Port()).String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if plain, err := tls.Dial("tcp", silent.RemoteAddr().String(), &tls.Config{InsecureSkipVerify: true}); err == nil {
		if _, err := plain.Read(make([]byte, 1)); err == nil {
			t.Error("somebody without a certificate was let in")
		}
		_ = plain.Close()
	}
	good, err := dial(a, bh)
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	got, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	if err := good.Send(wire.Header{Kind: wire.Hello, Object: 7}, nil); err != nil {
		t.Fatal(err)
	}
	if h, _, err := got.Receive(nil); err != nil || h.Object != 7 {
		t.Fatalf("the one accepted is not the one who was let in: %+v, %v", h, err)
	}
}

func TestOnlyTLS13IsSpoken(t *testing.T) {
	a, _, l := pair(t)
	if v := a.(*conn).tls.ConnectionState(); v.Version != tls.VersionTLS13 {
		t.Errorf("version %x", v.Version)
	}
	c, err := tls.Dial("tcp", netip.AddrPortFrom(loopback, l.Port()).String(), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
	if err == nil {
		_ = c.Close()
		t.Error("TLS 1.2 was accepted")
	}
}

func TestClosingEndsWhoWaits(t *testing.T) {
	a, b, l := pair(t)
	got := make(chan error, 2)
	go func() { _, _, err := b.Receive(nil); got <- err }()
	go func() { _, err := l.Accept(context.Background()); got <- err }()
	_ = a.Close()
	_ = l.Close()
	for range 2 {
		select {
		case err := <-got:
			if err == nil {
				t.Error("no error")
			}
		case <-time.After(time.Minute):
			t.Fatal("still waiting")
		}
	}
}
