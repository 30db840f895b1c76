package plan

import (
	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// Input is everything that a plan rests on.
type Input struct {
	Model   spec.Model
	Copies  []spec.Copy
	Engines []spec.Traits // engines of this program, in order of preference
	Nodes   []Node
	Links   []Link
	Request Request
}

// Request is what a person asked for, with names already resolved.
type Request struct {
	// Nodes that may be used, by ID; empty means any.
	Nodes []string
	// Engine by name; "" means the first that fits.
	Engine string
	// MinRanks is how many nodes must compute; 0 means as few as fit.
	MinRanks int
	// Context in tokens; 0 means the model's own, at most 4096.
	Context int
	// Insecure allows several ranks where their ports cannot be closed.
	Insecure bool
	// CopyMissing allows options in which the model must be copied first.
	CopyMissing bool
}

// Node is a node as the plan sees it. Sizes in bytes.
type Node struct {
	ID, Name string
	Up       bool
	Reason   string // why it is not up
	// MemoryBudget is what an engine may take now, never physical memory.
	MemoryBudget uint64
	MemoryTotal  uint64
	Engines      []spec.Engine
	// CanClose is set where the node can close rank ports to the LAN.
	CanClose bool
}

// Link is one cable between two nodes, by node ID.
type Link struct {
	ID     string
	A, B   string
	Proven bool
	Gbps   float64 // negotiated; 0 if unknown
}

// Plan is what a placement would do.
type Plan struct {
	// ID is a digest of the request and of all that the plan rests on.
	ID string
	// Choice is nil when nothing fits.
	Choice *Option
	// Alternatives holds every other option that was looked at, best first.
	Alternatives []Option
	// Context in tokens that was counted with.
	Context int
}

// Option is one way to place a model.
type Option struct {
	Engine   string
	Ranks    []Rank
	Feasible bool
	// Reason says why it was chosen or rejected, with the numbers behind it.
	Reason string
	// Score is for ordering only; higher is better, 0 for what is not feasible.
	Score float64
	// Rejected classifies why it is not feasible; "" when it is.
	Rejected fault.Reason
}

// Rank is one rank of an option. Sizes in bytes.
type Rank struct {
	NodeID, NodeName, Role string
	Layers                 int
	// NeedBytes includes HeadroomBytes.
	NeedBytes     uint64
	HeadroomBytes uint64
	BudgetBytes   uint64
	MustCopy      bool
	// ModelPath is the copy it would load; "" where it loads none or must copy.
	ModelPath string
	// LinkID is the cable to rank 0; "" for rank 0.
	LinkID string
}
