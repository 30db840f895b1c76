package channel

import (
	"crypto/ed25519"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"tbcluster/mesh/identity"
)

// Kinds of way.
const (
	Cable = "cable"
	LAN   = "lan"
)

// Way is one way to a node.
type Way struct {
	Kind      string // Cable or LAN
	Interface string // own interface to bind to; "" leaves it to the routes
	Addr      netip.AddrPort
	LinkID    string // of a cable, where known
}

// String returns "interface address" for people.
func (w Way) String() string {
	if w.Interface == "" {
		return w.Addr.String()
	}
	return fmt.Sprintf("%s %s", w.Interface, w.Addr)
}

// Conn is one connection to a node, its handshake done and its key checked.
type Conn struct {
	*tls.Conn
	raw      net.Conn
	channel  *Channel
	peer     identity.NodeID
	key      ed25519.PublicKey
	via      Way
	unpaired bool // its key was not asked for
	// client and spki are set for a client's connection: who has that key.
	client func(spki []byte) (identity.Member, bool)
	spki   []byte

	closing sync.Once
	done    chan struct{}
}

// Peer returns the node at the other end.
func (c *Conn) Peer() identity.NodeID { return c.peer }

// PeerKey returns its public key.
func (c *Conn) PeerKey() ed25519.PublicKey { return c.key }

// Via returns the way that the connection takes. Of an accepted one the
// interface is the one that has the local address.
func (c *Conn) Via() Way { return c.via }

// Protocol returns the ALPN of the connection.
func (c *Conn) Protocol() string { return c.ConnectionState().NegotiatedProtocol }

// Done is closed when the connection was closed at this end, by whomever.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Close ends the connection in an orderly way.
func (c *Conn) Close() error {
	err := c.Conn.Close()
	c.end()
	return err
}

// abort ends the connection at once, whatever is in flight.
func (c *Conn) abort() {
	_ = c.raw.Close() // there is nobody to tell
	c.end()
}

func (c *Conn) end() {
	c.closing.Do(func() {
		close(c.done)
		c.channel.unregister(c)
	})
}
