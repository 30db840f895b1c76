package channel

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/mesh/identity"
)

// newClient lets a client of n in and returns the configuration that it dials with.
func newClient(t *testing.T, n *node, name string, server tls.Certificate) (*tls.Config, identity.Member) {
	t.Helper()
	cert, key, err := identity.NewCertificate(name, false)
	if err != nil {
		t.Fatal(err)
	}
	mine, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	m, err := n.store.AddClient(mine.Leaf.RawSubjectPublicKeyInfo, name, identity.Viewer)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate[0]}))
	return &tls.Config{Certificates: []tls.Certificate{mine}, RootCAs: roots, ServerName: identity.ServerName, NextProtos: []string{API}}, m
}

func TestClientsAreServedByTheirNodeUntilTheyArePutOut(t *testing.T) {
	dir := t.TempDir()
	cert, err := identity.OpenAPI(dir)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := identity.OpenAPI(dir); err != nil || string(again.Certificate[0]) != string(cert.Certificate[0]) {
		t.Fatalf("another certificate after a restart: %v", err)
	}
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	for _, n := range []*node{a, b} {
		ln := n.ClientListener(ClientServer{Certificate: cert, Trusted: n.store.TrustedClient})
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c) }()
			}
		}()
	}
	laptop, m := newClient(t, a, "laptop", cert)
	dial := func(c *tls.Config, at *node) (*tls.Conn, error) {
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: time.Minute}, "tcp", at.addr.String(), c)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { _ = conn.Close() })
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err = conn.Write([]byte("x")); err == nil {
			_, err = io.ReadFull(conn, make([]byte, 1))
		}
		return conn, err
	}
	conn, err := dial(laptop, a)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(a.Peers()); n != 0 {
		t.Errorf("a client is counted as %d nodes", n)
	}
	if _, err := dial(laptop, b); err == nil {
		t.Error("another node serves it")
	}
	// A node is no client, and a client no node.
	asNode := laptop.Clone()
	asNode.Certificates = []tls.Certificate{b.key.Certificate()}
	if _, err := dial(asNode, a); err == nil {
		t.Error("a node was taken for a client")
	}
	// Nobody sees the certificate of the node who does not know it.
	wrong := laptop.Clone()
	wrong.RootCAs = x509.NewCertPool()
	if _, err := dial(wrong, a); err == nil {
		t.Error("a client trusts a node that it does not know")
	}
	if _, _, err := a.store.Revoke(m.ID, false, false); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("its connection goes on")
	} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
		t.Error("its connection was not closed")
	}
	if _, err := dial(laptop, a); err == nil {
		t.Error("it is served after it was put out")
	}
}

// A client's connection is nobody's in what nodes say to each other.
func TestNodesProtocolTakesNoClient(t *testing.T) {
	c := &Conn{client: func([]byte) (identity.Member, bool) { return identity.Member{}, true }}
	near, far := net.Pipe()
	defer far.Close()
	c.Conn = tls.Server(near, &tls.Config{})
	c.raw, c.channel, c.done = near, &Channel{conns: map[*Conn]bool{}}, make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, far) }()
	if _, _, err := Credentials().ServerHandshake(c); err == nil {
		t.Error("it was let in")
	}
	if _, _, err := ClientCredentials().ServerHandshake(&Conn{Conn: c.Conn, raw: near, channel: c.channel, done: make(chan struct{})}); err == nil {
		t.Error("a node was let in as a client")
	}
	if _, ok := PeerFromContext(t.Context()); ok {
		t.Error("there is a peer")
	}
}

func TestACertificateThatOthersMayReadIsNotUsed(t *testing.T) {
	dir := t.TempDir()
	if _, err := identity.OpenAPI(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir+"/"+identity.APIFile, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.OpenAPI(dir); !fault.Is(err, fault.FileIO) {
		t.Error(err)
	}
}
