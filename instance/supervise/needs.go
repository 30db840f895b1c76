package supervise

import (
	"context"
	"net/netip"
	"time"

	"tbcluster/host"
	"tbcluster/instance/rank"
	"tbcluster/instance/spec"
)

// Spawner starts and ends the process of a rank on this node. The agent
// implements it over the root half, or in itself where there is none. The
// directory of a rank is instances/ID/rank-N under the state directory, owned
// by the person's user and readable by the agent: 0750 (setgid) with the agent's
// group; the shim keeps its files readable for the group.
type Spawner interface {
	// StartRank makes the directory of the rank, writes p to rank.json in it
	// (rank.WriteProcess) and runs `tbcluster rank DIR` detached, with the
	// person's identity. Where the directory exists already for the same
	// person, who may lack its Socket. It returns once the shim runs.
	StartRank(ctx context.Context, who host.Asker, instanceID string, index int, p rank.Process) error
	// EndRank does rank.End on the directory, with the right to do so. It does
	// not wait for the engine to end. A rank that is gone is no error.
	EndRank(ctx context.Context, instanceID string, index int, kill bool) error
	// RemoveRank removes the directory of a rank whose process is gone.
	RemoveRank(ctx context.Context, instanceID string, index int) error
	// RankDir is the directory of a rank, whether it exists or not.
	RankDir(instanceID string, index int) string
}

// Files does what needs the identity of the person whose files they are. The
// agent implements it over a worker and catalogue.Client.
type Files interface {
	// CheckFiles compares files, relative to the directory of path (path itself
	// where that is a file), with sizes and, where both are known, digests.
	CheckFiles(ctx context.Context, who host.Asker, path string, files []spec.File) error
	// DetectEngine looks for an engine as that person would find it.
	DetectEngine(ctx context.Context, who host.Asker, engine string) (spec.Engine, error)
}

// Machine answers for this node.
type Machine interface {
	// Memory returns total and available memory in bytes.
	Memory(ctx context.Context) (total, available uint64, err error)
	// AddressTo returns this node's own address on a proven cable to a node,
	// and the cable's link ID. A rank binds to it. It must be usable from that
	// node alone.
	AddressTo(ctx context.Context, nodeID string) (addr netip.Addr, linkID string, err error)
	// CloseToLAN makes sure that only our cables reach the rank ports on addr,
	// or returns a RanksInsecure fault; insecure allows it to go on without.
	CloseToLAN(ctx context.Context, addr netip.Addr, insecure bool) error
}

// Nodes reaches the ranks of every node of the cluster.
type Nodes interface {
	// RankService returns the service of a node: the LocalRanks of this one, a
	// RemoteRanks of another. It does not block; calls on it fail with NodeDown
	// while the node cannot be reached.
	RankService(nodeID string, who host.Asker) RankService
	// Name returns the name of a node for people. It does not block.
	Name(nodeID string) string
}

// Copier brings a model to a node and returns its path there, or a fault.
type Copier interface {
	CopyModel(ctx context.Context, who host.Asker, instanceID string, m spec.Model, toNode string, progress func(done, total uint64)) (path string, err error)
}

// Activity tells what the gateway knows of an instance: requests in flight and
// when last a byte of an answer passed. known is false where no gateway looks.
type Activity func(instanceID string) (inFlight int, lastByte time.Time, known bool)

// RankService is what an owner asks of a node about the ranks of its
// instances. Every error is a fault, with the node in Where.
type RankService interface {
	// Reserve grants ports and memory for all ranks of the request, or nothing.
	// A grant that is not used expires.
	Reserve(ctx context.Context, r ReserveRequest) (Grant, error)
	// CheckFiles checks the files of ranks before launch.
	CheckFiles(ctx context.Context, r CheckFilesRequest) error
	// Start starts one rank for which there is a grant. Starting it again is no
	// error while it runs.
	Start(ctx context.Context, r StartRequest) error
	// Stop ends ranks and returns when their processes are gone.
	Stop(ctx context.Context, r StopRequest) error
	// Release ends whatever still runs of an instance, gives back its grants
	// and, with Remove, deletes records and logs. Unknown instances are no error.
	Release(ctx context.Context, r ReleaseRequest) error
	// Status tells how the ranks of an instance fare there.
	Status(ctx context.Context, instanceID string) ([]RankStatus, error)
	// Claims tells whether that node owns the instance and has not ended it.
	Claims(ctx context.Context, instanceID string) (bool, error)
	// Events sends the status of every rank at once and at each change, and
	// heartbeats in between, until ctx ends or the connection breaks. While it
	// is open, the node knows that somebody owns the instance. The first event
	// has the ranks, none when nothing is known of the instance.
	Events(ctx context.Context, instanceID string, emit func(Event) error) error
}
