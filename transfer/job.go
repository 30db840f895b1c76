package transfer

import (
	"context"
	"io"
	"net/netip"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// Job is what to copy.
type Job struct {
	ID string
	// Sources, one or more, with node IDs; they may be on several nodes.
	Sources []Endpoint
	// Destination, with a node ID.
	Destination Endpoint
	Options     Options
}

// Options of a Job. The zero value copies everything over everything.
type Options struct {
	// DryRun only scans and says what would be done (Result.Lines).
	DryRun bool
	// Filters in rsync's order: "+PATTERN" or "-PATTERN"; the first that fits
	// decides. A space after the sign is allowed.
	Filters []string
	// LimitBytesPerSecond bounds the rate from each source node; 0 means no limit.
	LimitBytesPerSecond uint64
	// CopyLinks copies what symlinks point to instead of the links.
	CopyLinks bool
	// Checksum decides by digest, not by size and time, what is already there.
	Checksum bool
	// MaxCables is the most cables to use at once; 0 means all.
	MaxCables int
	// Transport is "auto" (or empty) or the name of one transport.
	Transport string
	// MakePath makes missing directories above the destination. Without it only
	// the last component is made, as rsync does.
	MakePath bool
	// Clear, Delete and Xattrs are not built yet: asking for one is a Fault of
	// reason Unsupported.
	Clear, Delete, Xattrs bool
}

// PathKind is what a path runs over.
type PathKind string

// The kinds of path.
const (
	Cable    PathKind = "cable"
	LAN      PathKind = "lan"
	Loopback PathKind = "loopback"
)

// Path is one way for bytes from a source node to the destination node.
type Path struct {
	// LinkID is empty when the bytes go over no cable.
	LinkID string
	// SrcInterface and DstInterface have the addresses. Sockets of a cable are
	// bound to them.
	SrcInterface string
	SrcAddr      netip.Addr
	DstInterface string
	DstAddr      netip.Addr
	// Transport is the name of a transport: "tcp".
	Transport string
	Kind      PathKind
}

// Deps is what a Transfer needs from the agent.
type Deps struct {
	// OpenWorker starts a worker on a node with the asking user's identity and
	// returns its control stream. Closing the stream ends the worker.
	OpenWorker func(ctx context.Context, nodeID string) (io.ReadWriteCloser, error)
	// Paths lists what could carry bytes now, best first. It is asked again
	// whenever PathsChanged fires and twice a second in any case. Where source
	// and destination are one node and it returns nothing, the loopback is used.
	Paths func(srcNode, dstNode string) []Path
	// PathsChanged may be nil.
	PathsChanged <-chan struct{}
	// NodeName returns what people call a node.
	NodeName func(id string) string
	// Clock stamps StartedAt and FinishedAt; nil means the system's.
	Clock host.Clock
	// LinkWait is how long to wait with no way at all to the other node before
	// failing with reason Connection; 0 means 60 s.
	LinkWait time.Duration
}

// State is what a transfer is doing; the same words as the API's enum.
type State string

// The states.
const (
	Scanning   State = "scanning"
	Connecting State = "connecting"
	Copying    State = "copying"
	Syncing    State = "syncing"
	Done       State = "done"
	Failed     State = "failed"
	Cancelled  State = "cancelled"
	Paused     State = "paused"
)

// Ended reports whether nothing more will happen.
func (s State) Ended() bool { return s == Done || s == Failed || s == Cancelled }

// Progress is a transfer at one moment; each field means what the field of that
// name in the API's Transfer means.
type Progress struct {
	ID      string
	Sources []string
	// Destination as it was resolved ("beta:/home/ada/models/x.gguf"); until
	// then as it was asked for.
	Destination string
	State       State
	// Phase says State in words, with what is waited for.
	Phase                      string
	TotalBytes, DoneBytes      uint64
	TotalFiles, DoneFiles      uint64
	SkippedBytes, SkippedFiles uint64
	BytesPerSecond             uint64
	ETA                        time.Duration // negative when unknown
	Links                      []LinkProgress
	Fault                      *fault.Fault
	StartedAt, FinishedAt      time.Time // FinishedAt is zero until the end
	SourceNodeID               string    // of the first source
	DestinationNodeID          string
	Warnings                   []string
}

// LinkProgress is the progress over one path that is or was in use.
type LinkProgress struct {
	LinkID         string // empty when the bytes go over no cable
	Interface      string // on the sending side
	Bytes          uint64 // sent, retransmissions included
	BytesPerSecond uint64
	Transport      string
	Kind           PathKind
	// Up is false once the path has gone.
	Up bool
}

// Result is how a transfer ended.
type Result struct {
	Progress
	// Lines of a dry run, one for each thing that would be done: "copy 4096 bytes
	// a/b", "have 12 c", "link d -> e", "make f/".
	Lines []string
	// Problems are the files that were not copied and why, the first 100.
	Problems []*fault.Fault
}

// Run copies and returns when it has ended. Events come at most four times a
// second and once at the end, one at a time. When ctx ends the transfer is
// cancelled, what arrived is kept for the next run of the same job, and the
// error is a Fault of reason Interrupted.
//
// Every error is a Fault. Single files that could not be copied do not stop the
// others: the error then is that of the one file, or sums up several.
func Run(ctx context.Context, job Job, deps Deps, events func(Progress)) (Result, error) {
	return New(job, deps, events).Run(ctx)
}
