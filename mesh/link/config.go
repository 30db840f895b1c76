package link

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"time"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host"
)

// ALPN is the protocol under which probes travel.
const ALPN = "tbcluster-link/1"

// Dialer connects to a node over one link.
type Dialer interface {
	// DialLink connects to the node under ALPN, with both sides authenticated,
	// bound to the interface and to local (whose port is 0). remote's port is
	// Peer.LinkPort; where that is 0 the dialer knows better or fails.
	DialLink(ctx context.Context, nodeID, iface string, local, remote netip.AddrPort) (net.Conn, error)
}

// Listener accepts probes on one link address, bound to its interface, and
// hands each to Tracker.Serve. Closing what it returned ends that.
type Listener interface {
	ListenLink(iface string, addr netip.Addr) (io.Closer, error)
}

// Timing of the probes. The zero value of a field means its default.
type Timing struct {
	PingEvery   time.Duration // between pings; default 1 s
	SilentAfter time.Duration // without an answer: no longer proven; default 2.5 s
	RetryFirst  time.Duration // after the first failed dial; doubles; default 100 ms
	RetryMost   time.Duration // between dials; default 500 ms
	DialTimeout time.Duration // of one dial; default 700 ms
	RotateAfter time.Duration // before other ports are tried where UUIDs do not tell; default 3 s
}

// The defaults of Timing. SilentAfter leaves room for one lost ping and keeps
// a silent cable's end of proven within 3 s. RetryMost and DialTimeout
// together stay below the 2 s from mended to proven.
const (
	PingEvery   = time.Second
	SilentAfter = 2500 * time.Millisecond
	RetryFirst  = 100 * time.Millisecond
	RetryMost   = 500 * time.Millisecond
	DialTimeout = 700 * time.Millisecond
	RotateAfter = 3 * time.Second
)

func (t Timing) withDefaults() Timing {
	for _, f := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&t.PingEvery, PingEvery},
		{&t.SilentAfter, SilentAfter},
		{&t.RetryFirst, RetryFirst},
		{&t.RetryMost, RetryMost},
		{&t.DialTimeout, DialTimeout},
		{&t.RotateAfter, RotateAfter},
	} {
		if *f.field <= 0 {
			*f.field = f.value
		}
	}
	return t
}

// Config is what a Tracker needs.
type Config struct {
	Self     string   // own node ID
	Dialer   Dialer   // required
	Listener Listener // nil where the agent accepts probes by other means
	// Acked reports whether the far machine has acknowledged everything that was
	// sent on a probe's connection; nil where that cannot be known. It tells an
	// agent that stands still from a silent cable.
	Acked func(net.Conn) bool
	// History remembers over restarts; nil remembers nothing.
	History *History
	Clock   host.Clock // for timestamps; nil means the system's
	Timing  Timing
	Log     *slog.Logger // nil means none
	// Changed is called, with no lock held and never twice at once, after
	// something of Reports other than counters changed, or something of Ends.
	// It may be nil.
	Changed func()
}

// Peer is a node that has paired, as far as links concern it.
type Peer struct {
	NodeID string
	Name   string
	// Up is whether the node is heard from.
	Up bool
	// LinkPort is the TCP port on which it answers probes at its link
	// addresses; 0 if unknown.
	LinkPort uint16
	// Reports are its own ends as it last said; nil if it never did.
	Reports []*peerv1.LinkReport
}

// Address is the link address of one own end, as package mesh/address applied
// it or why it did not.
type Address struct {
	// Interface that has the address; an end that has moved to another since is
	// not addressed by it.
	Interface string
	// Prefix is the own address with its length; invalid until applied.
	Prefix netip.Prefix
	// Remote is the far end's address.
	Remote netip.Addr
	// Reason says why there is no address, for people.
	Reason string
	// NoneFree is set where that is because no subnet is free at both ends.
	NoneFree bool
}

// End is one own end with what is known of its far end; what mesh/address
// needs to know.
type End struct {
	Port      string
	Interface string // "" if none
	// Present is whether the Thunderbolt layer sees a peer there now.
	Present bool
	// PeerID is the node at the far end; "" while unknown or not paired.
	PeerID string
	// PeerPort is the port there as far as known: told by a probe, by UUIDs, or
	// the best guess where two ports have the same UUID; "" while unknown.
	PeerPort string
	Proven   bool
	// NegotiatedGbps orders links to one peer; 0 if unknown.
	NegotiatedGbps float64
	RTT            time.Duration // 0 if unknown
}
