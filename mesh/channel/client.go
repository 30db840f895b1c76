package channel

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"

	"google.golang.org/grpc/credentials"

	"tbcluster/mesh/identity"
)

// API is the ALPN of gRPC with any client: HTTP/2. Programs on machines that are
// no nodes come by it, with a certificate that this node gave them.
const API = "h2"

// ClientServer says who is served under API.
type ClientServer struct {
	// Certificate is what clients know this node by. Its key is of a kind that
	// every TLS library takes, which Ed25519 is not.
	Certificate tls.Certificate
	// Trusted returns the client with a public key (SubjectPublicKeyInfo, DER).
	Trusted func(spki []byte) (identity.Member, bool)
}

// ClientListener returns a listener of connections of clients, all *Conn.
func (c *Channel) ClientListener(s ClientServer) net.Listener {
	l := &listener{conns: make(chan *Conn), closed: make(chan struct{}), channel: c}
	l.remove = c.handle(API, &protocol{handle: l.deliver, clients: &s})
	return l
}

// configFor picks the side of a handshake: nodes and clients are told apart by
// the protocols that they offer.
func (c *Channel) configFor(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	if !slices.Contains(hello.SupportedProtos, API) {
		return nil, nil // that of nodes
	}
	p := c.protocol(API)
	if p == nil || p.clients == nil {
		return nil, errProtocol
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		Certificates:           []tls.Certificate{p.clients.Certificate},
		ClientAuth:             tls.RequireAnyClientCert,
		NextProtos:             []string{API},
		SessionTicketsDisabled: true, // a resumed session would not show the key again
		VerifyConnection: func(cs tls.ConnectionState) error {
			spki, err := clientKey(cs)
			if err != nil {
				return err
			}
			if _, ok := p.clients.Trusted(spki); !ok {
				return untrustedError{identity.ClientID(spki)}
			}
			return nil
		},
	}, nil
}

// clientKey returns the public key of a client. A client sends as a chain what it
// was given in one file; only the first certificate is its own.
func clientKey(cs tls.ConnectionState) ([]byte, error) {
	if cs.Version != tls.VersionTLS13 {
		return nil, errors.New("not TLS 1.3")
	}
	if cs.NegotiatedProtocol != API {
		return nil, errProtocol
	}
	if len(cs.PeerCertificates) == 0 {
		return nil, errors.New("no certificate")
	}
	return cs.PeerCertificates[0].RawSubjectPublicKeyInfo, nil
}

// trusted says whether the other end may still be here.
func (c *Channel) trusted(conn *Conn) bool {
	if conn.unpaired {
		return true
	}
	if conn.client != nil {
		_, ok := conn.client(conn.spki)
		return ok
	}
	_, ok := c.trust.Trusted(conn.key)
	return ok
}

// Client returns the client at the other end as it is now; false where that is a
// node, or was put out.
func (c *Conn) Client() (identity.Member, bool) {
	if c.client == nil {
		return identity.Member{}, false
	}
	return c.client(c.spki)
}

// ClientCredentials are gRPC's credentials of a server on ClientListener.
func ClientCredentials() credentials.TransportCredentials { return clientCredentials{} }

type clientCredentials struct{ channelCredentials }

func (clientCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, ok := raw.(*Conn)
	if !ok || conn.client == nil {
		_ = raw.Close() // it is nobody's
		return nil, nil, errors.New("no connection of a client")
	}
	return conn, AuthInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		Conn:           conn,
	}, nil
}

func (clientCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are a server's")
}

func (c clientCredentials) Clone() credentials.TransportCredentials { return c }
