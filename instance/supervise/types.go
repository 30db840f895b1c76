package supervise

import (
	"net/netip"
	"time"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// State is how far an instance has come. The names are those of the API's
// InstanceState in lower case.
type State string

// The states.
const (
	Planned  State = "planned"
	Copying  State = "copying"
	Starting State = "starting"
	Loading  State = "loading"
	Warming  State = "warming"
	Ready    State = "ready"
	Degraded State = "degraded"
	Stopping State = "stopping"
	Stopped  State = "stopped"
	Failed   State = "failed"
)

// Over reports whether nothing happens any more in that state.
func (s State) Over() bool { return s == Stopped || s == Failed }

// RankState is how far one rank has come.
type RankState string

// The states of a rank.
const (
	RankWaiting  RankState = "waiting"
	RankStarting RankState = "starting"
	RankReady    RankState = "ready"
	RankStopping RankState = "stopping"
	RankExited   RankState = "exited"
	RankUnknown  RankState = "unknown"
)

// Instance is what people see of an instance: the fields of the API's Instance.
type Instance struct {
	ID              string
	Name            string
	Model           string
	ModelID         string
	Engine          string
	State           State
	Reason          string       // why it is not ready: rank, node, the engine's own words
	FailReason      fault.Reason // classifies Reason when it failed
	Fix             string
	StepsDone       int
	StepsTotal      int
	Ranks           []InstanceRank
	OwnerNodeID     string
	CreatedAt       time.Time
	StateSince      time.Time
	TokensPerSecond float64
	User            string
	Restarts        int
	ContextTokens   int
	PlannedBytes    uint64
	ServedNames     []string
	// HTTP is rank 0's address on the owner's loopback, and Secret the bearer
	// token that the engine wants; for the gateway there, and nobody else.
	HTTP   netip.AddrPort `json:"-"`
	Secret string         `json:"-"`
	// RequestID is that of the placement.
	RequestID string
}

// Fault returns why the instance failed, or nil.
func (i Instance) Fault() *fault.Fault {
	if i.State != Failed {
		return nil
	}
	r := i.FailReason
	if r == "" {
		r = fault.EngineFailed
	}
	return &fault.Fault{Reason: r, What: "instance " + i.Name + " failed", Why: i.Reason, Fix: i.Fix}
}

// InstanceRank is one rank of an Instance.
type InstanceRank struct {
	Index      int
	NodeID     string
	NodeName   string
	PID        int
	State      RankState
	Role       string
	ExitStatus string
	LastLines  []string
	Listens    []string
}

// PlaceRequest is a placement as the planner chose it.
type PlaceRequest struct {
	RequestID string
	Name      string // "" means one made from the model's
	Engine    string
	Model     spec.Model
	// ServedNames are the names by which the gateway finds it; the first is
	// what the engine is told. Empty means the model's name.
	ServedNames []string
	Ranks       []PlacedRank // [0] is on this node
	Context     int          // tokens; decided by the plan
	EngineArgs  []string
	Insecure    bool
}

// PlacedRank is one node of a placement. Sizes in bytes.
type PlacedRank struct {
	NodeID        string
	Layers        int
	NeedBytes     uint64 // includes HeadroomBytes
	HeadroomBytes uint64
	MustCopy      bool
	ModelPath     string // "" where it must be copied or none is needed
}

// ReserveRequest asks a node for ports and memory.
type ReserveRequest struct {
	InstanceID   string      `json:"instance_id"`
	InstanceName string      `json:"instance_name"`
	Engine       string      `json:"engine"`
	Ranks        []spec.Rank `json:"ranks"`
	// Peers are the nodes that must reach ports of ReachRanks.
	Peers         []string `json:"peers"`
	NeedBytes     uint64   `json:"need_bytes"`
	HeadroomBytes uint64   `json:"headroom_bytes"`
	Insecure      bool     `json:"insecure"`
}

// Grant is what a node gave.
type Grant struct {
	// Ports by rank index, in the order of the rank's own.
	Ports map[int][]spec.Port `json:"ports"`
	// Links are the IDs of the cables that the ports are reached by.
	Links  []string    `json:"links"`
	Engine spec.Engine `json:"engine"`
	// Expires is how long the grant lasts unless a rank is started.
	Expires time.Duration `json:"expires_ns"`
}

// CheckFilesRequest asks a node to check files of a model.
type CheckFilesRequest struct {
	InstanceID string      `json:"instance_id"`
	Path       string      `json:"path"`
	Files      []spec.File `json:"files"`
}

// StartRequest asks a node to start one rank.
type StartRequest struct {
	InstanceID string    `json:"instance_id"`
	Engine     string    `json:"engine"`
	Rank       spec.Rank `json:"rank"`
	// Grace is how long it has to end when stopped; 0 means the default.
	Grace time.Duration `json:"grace_ns"`
}

// StopRequest asks a node to end ranks.
type StopRequest struct {
	InstanceID string `json:"instance_id"`
	Indexes    []int  `json:"indexes"` // empty means all there
	// Grace is how long it may take before the ranks are killed; 0 means as long
	// as each was given when it was started.
	Grace time.Duration `json:"grace_ns"`
}

// ReleaseRequest gives back what an instance holds.
type ReleaseRequest struct {
	InstanceID string `json:"instance_id"`
	Remove     bool   `json:"remove"`
}

// RankStatus is how one rank fares on its node.
type RankStatus struct {
	Index int       `json:"index"`
	State RankState `json:"state"`
	PID   int       `json:"pid"`
	// Exit is the exit status in words, "" while it runs.
	Exit      string   `json:"exit"`
	LastLines []string `json:"last_lines,omitempty"`
	// Fatal is what the engine's log said, in words for people, and Reason
	// classifies it.
	Fatal  string       `json:"fatal,omitempty"`
	Reason fault.Reason `json:"reason,omitempty"`
	// Phase says what it is busy with while it starts.
	Phase string `json:"phase,omitempty"`
	Done  int    `json:"done,omitempty"`
	Total int    `json:"total,omitempty"`
}

// Event is one message of RankService.Events.
type Event struct {
	// Heartbeat is set where nothing has changed.
	Heartbeat bool         `json:"heartbeat,omitempty"`
	Ranks     []RankStatus `json:"ranks,omitempty"`
}
