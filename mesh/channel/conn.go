package channel

import (
	"crypto/ed25519"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

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

	cut     atomic.Bool // a write failed: what went out may end within a record
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

// Write writes b. After an error, a time-out too, nothing can be written any
// more.
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil {
		c.cut.Store(true)
	}
	return n, err
}

// Close ends the connection in an orderly way, if nothing that was written got
// lost. Otherwise it ends without a farewell: crypto/tls would send one even
// behind a record that never went out, and the other end, which counts records,
// would take it for a forgery ("bad record MAC").
func (c *Conn) Close() error {
	if c.cut.Load() {
		err := c.raw.Close()
		c.end()
		return err
	}
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
