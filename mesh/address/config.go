package address

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host"
)

// DefaultBlock is where addresses come from unless configured.
var DefaultBlock = netip.MustParsePrefix("10.77.0.0/16")

// Peer asks another node.
type Peer interface {
	Propose(ctx context.Context, nodeID string, req *peerv1.ProposeAddressRequest) (*peerv1.ProposeAddressResponse, error)
}

// Applier carries out changes through the root half, which keeps the journal.
type Applier interface {
	// Apply carries out one change and records it; it is idempotent. Its error
	// wraps host.ErrPermission where there is no right to do so.
	Apply(ctx context.Context, c host.Change) error
	// Revert undoes one change and strikes it from the journal; what is already
	// gone is no error.
	Revert(ctx context.Context, c host.Change) error
	// Lacks tells what of the packet filter that was set is not there any more;
	// "" if nothing.
	Lacks(ctx context.Context, filter host.Change) (string, error)
	// Applied returns the journal, oldest first.
	Applied(ctx context.Context) ([]host.Change, error)
}

// Config is what a Manager needs.
type Config struct {
	Self  string       // own node ID
	Block netip.Prefix // zero means DefaultBlock; IPv4, /8 to /26
	// Spares are blocks to go on with where the one before is taken as a whole
	// on a node.
	Spares    []netip.Prefix
	StateFile string // where what was agreed is remembered
	// Old leaves out what versions before 0.2 do not say: the range that is in the
	// way of a proposal, what the own network has, and the largest MTU of an end.
	Old bool
	// MTU is the largest that is set; 0 means what both ends can do.
	MTU int
	// Forward passes packets on from one cable of this node to another, and
	// nowhere else.
	Forward bool
	Peer    Peer
	Applier Applier
	Clock   host.Clock // nil means the system's
	// InUse tells whether an instance or transfer uses an own prefix now; such
	// an address is not moved. It is called with a lock held and must not call
	// the Manager. nil means none is.
	InUse func(netip.Prefix) bool
	Log   *slog.Logger // nil means none
	// Changed is called, with no lock held and never twice at once, after
	// Links (or the interface of one), Claims, NodeAddress, Conflicts, Wanted or
	// FilterActive changed. It may be nil.
	Changed func()
	// Retry is how long to wait before a peer that could not be asked or a
	// change that failed is tried again; it doubles up to 10 s. 0 means 250 ms.
	Retry time.Duration
}

// End is one own link end: the data of link.End.
type End struct {
	Port      string
	Interface string // "" if none
	Present   bool
	PeerID    string // "" while unknown
	PeerPort  string // "" while unknown
	Proven    bool
	// NegotiatedGbps orders links to one peer; 0 if unknown.
	NegotiatedGbps float64
}

// Reach is what another node says of what it is joined to by cables.
type Reach struct {
	// Forwards is set where it passes packets on between its cables.
	Forwards bool
	// Neighbours are the nodes to which it has a proven link.
	Neighbours []string
}

// Link is the link address of one own end.
type Link struct {
	Port, PeerID, Interface string
	// Prefix is the own address with its length; invalid until it is on the
	// interface.
	Prefix netip.Prefix
	// Remote is the far end's address.
	Remote netip.Addr
	// Reason says why there is no address; "" if there is.
	Reason string
	// NoneFree is set where that is because no subnet is free at both ends.
	NoneFree bool
}

// Conflict is an address that clashes and cannot be moved now; a finding.
type Conflict struct {
	Prefix netip.Prefix
	Port   string // "" for the node address
	Node   string // whose node address it is; "" for an own address
	With   string // what it clashes with, for people
}
