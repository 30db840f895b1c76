package channel

import (
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"fmt"
	"net"

	"tbcluster/mesh/identity"
)

// What a handshake can end with, besides errors of the network.
var (
	errSelf     = errors.New("this node itself answers there")
	errRefused  = errors.New("it does not trust this node")
	errProtocol = errors.New("it does not speak this protocol now")
)

// untrustedError is a peer whose key this node does not trust.
type untrustedError struct{ id identity.NodeID }

func (e untrustedError) Error() string {
	return fmt.Sprintf("node %s has not paired with this one, or was revoked", e.id.Short())
}

// otherNodeError is a peer that is not the one that was dialled.
type otherNodeError struct{ id identity.NodeID }

func (e otherNodeError) Error() string {
	return fmt.Sprintf("another node (%s) answers there", e.id.Short())
}

// peerKey returns the key of the other end. Nothing else in its certificate
// counts: the handshake has shown that the peer holds the key.
func peerKey(cs tls.ConnectionState) (ed25519.PublicKey, error) {
	if cs.Version != tls.VersionTLS13 {
		return nil, errors.New("not TLS 1.3")
	}
	if cs.NegotiatedProtocol == "" {
		return nil, errProtocol
	}
	if len(cs.PeerCertificates) != 1 {
		return nil, fmt.Errorf("%d certificates instead of one", len(cs.PeerCertificates))
	}
	pub, ok := cs.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("a certificate with a %T", cs.PeerCertificates[0].PublicKey)
	}
	return pub, nil
}

// verify checks the other end: want is the node expected there, or "".
func (c *Channel) verify(cs tls.ConnectionState, want identity.NodeID, unpaired bool) error {
	pub, err := peerKey(cs)
	if err != nil {
		return err
	}
	id := identity.IDOf(pub)
	switch {
	case id == c.key.ID():
		return errSelf
	case want != "" && id != want:
		return otherNodeError{id}
	case unpaired:
		return nil
	}
	if _, ok := c.trust.Trusted(pub); !ok {
		return untrustedError{id}
	}
	return nil
}

func (c *Channel) acceptConfig(alpns []string) *tls.Config {
	if len(alpns) == 0 {
		// Without any, TLS would let a client go on without a protocol.
		alpns = []string{"tbcluster-none"}
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{c.key.Certificate()},
		ClientAuth:   tls.RequireAnyClientCert,
		NextProtos:   alpns,
		// Clients know this node by another certificate.
		GetConfigForClient: c.configFor,
		// A resumed session would not show the key again.
		SessionTicketsDisabled: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			p := c.protocol(cs.NegotiatedProtocol)
			if p == nil || p.clients != nil {
				return errProtocol
			}
			return c.verify(cs, "", p.unpaired)
		},
	}
}

func (c *Channel) dialConfig(alpn string, want identity.NodeID, unpaired bool) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{c.key.Certificate()},
		NextProtos:   []string{alpn},
		// There is no name and no authority to check; VerifyConnection checks
		// the key, which is all there is.
		InsecureSkipVerify:     true,
		SessionTicketsDisabled: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			return c.verify(cs, want, unpaired)
		},
	}
}

// remoteAlert turns the alerts of a refusing peer into what they mean.
func remoteAlert(err error) error {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "remote error" {
		return err
	}
	// crypto/tls keeps the type of alerts to itself; their words are those of
	// the standard.
	switch op.Err.Error() {
	case "tls: bad certificate":
		return errRefused
	case "tls: no application protocol":
		return errProtocol
	}
	return err
}
