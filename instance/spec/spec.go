package spec

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Model is what an engine loads, as inspected on disk. Sizes in bytes.
type Model struct {
	ID           string // SHA-256 over sorted (name, size, digest) of its files; "size:…" while digests are unknown
	Name         string // what people write
	Format       string // "gguf", "safetensors"
	Quant        string
	Architecture string
	Layers       int
	Hidden       int // embedding length
	Heads        int
	KVHeads      int
	HeadDim      int
	Vocabulary   int
	Context      int // trained context length in tokens
	SizeBytes    uint64
	// LayerBytes are the weights of each repeating layer; OtherBytes those of
	// embeddings, output head and the rest.
	LayerBytes []uint64
	OtherBytes uint64
	// KVBytes is what one token takes in the cache of one layer, at 16 bits.
	KVBytes uint64
	// Window caps the tokens that most layers keep; 0 means all of the context.
	Window int
	Files  []File
}

// ModelID returns the ID of a model of these files: the hex SHA-256 over
// (name, size, digest) sorted by name; where a digest is not known yet, a
// provisional one over names and sizes that begins with "size:".
func ModelID(files []File) string {
	sorted := slices.Clone(files)
	slices.SortFunc(sorted, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	prefix := ""
	if slices.ContainsFunc(sorted, func(f File) bool { return f.SHA256 == "" }) {
		prefix = "size:"
	}
	h := sha256.New()
	for _, f := range sorted {
		digest := f.SHA256
		if prefix != "" {
			digest = ""
		}
		fmt.Fprintf(h, "%s\x00%d\x00%s\n", f.Name, f.Size, digest)
	}
	return prefix + hex.EncodeToString(h.Sum(nil))
}

// File is one file of a model.
type File struct {
	Name   string // relative to the model's directory
	Size   uint64
	SHA256 string // hex; "" while unknown
}

// Copy is one copy of a model on one node.
type Copy struct {
	NodeID   string
	Path     string // file (gguf) or directory
	Tree     string // "huggingface", "exo", "lmstudio", "llamacpp", "dir"
	Complete bool
	Reason   string // what is missing or wrong
}

// Engine is an engine found (or missed) on this node.
type Engine struct {
	Name      string            `json:"name"`
	Available bool              `json:"available"`
	Version   string            `json:"version"` // builds must be equal across ranks
	Path      string            `json:"path"`    // for people
	Reason    string            `json:"reason"`  // why not, and how to install it
	Programs  map[string]string `json:"programs,omitempty"`
	// Devices are the accelerators by the engine's own names ("Vulkan0"); empty
	// where it computes on the processor.
	Devices []string `json:"devices,omitempty"`
	// Features are optional abilities of this build that arguments depend on.
	Features []string `json:"features,omitempty"`
}

// Has reports whether the engine has a feature.
func (e Engine) Has(feature string) bool { return slices.Contains(e.Features, feature) }

// Traits are what the planner has to know of an engine.
type Traits struct {
	Name    string
	Formats []string // model formats that it loads
	// Split is set where one model may be spread over several ranks.
	Split bool
	// Star is set where rank 0 talks to every other rank and those do not talk
	// to each other, so that only rank 0 needs a cable to each.
	Star bool
	// FilesEverywhere is set where every rank reads the model's files; else
	// rank 0 alone does.
	FilesEverywhere bool
	// SameBuild is set where the builds of all ranks must be equal.
	SameBuild bool
	// Env are the prefixes of the variables that it sets. A node accepts no
	// others from the owner of an instance.
	Env []string
	// Roles are the roles of rank 0 and of the others ("server", "rpc").
	Roles [2]string
}

// Port is a TCP port that a rank listens on. The supervisor fills Address and
// Number from a grant before the rank starts.
type Port struct {
	Name    string     `json:"name"`    // "http", "rpc"
	Reach   Reach      `json:"reach"`   // who must reach it
	Address netip.Addr `json:"address"` // filled from the grant
	Number  uint16     `json:"number"`  // filled from the grant
}

// AddrPort returns the address with its port.
func (p Port) AddrPort() netip.AddrPort { return netip.AddrPortFrom(p.Address, p.Number) }

// Reach says who must reach a port.
type Reach string

// The reaches.
const (
	ReachLoopback Reach = "loopback" // this node only; others through the agents
	ReachRanks    Reach = "ranks"    // the other ranks, over cables
)

// Rank describes one rank before and after ports are granted.
type Rank struct {
	Index  int    `json:"index"`
	NodeID string `json:"node_id"`
	Role   string `json:"role"` // "server", "rpc"
	// Program is a key of Engine.Programs, never a path from another node.
	Program string            `json:"program"`
	Args    []string          `json:"args"`
	Env     map[string]string `json:"env"`
	// Files that must be there, complete and equal, before launch.
	Files []File `json:"files"`
	Ports []Port `json:"ports"`
	// After lists indexes of ranks that must be ready first.
	After []int `json:"after"`
	// NeedBytes is the memory that the plan counted.
	NeedBytes uint64 `json:"need_bytes"`
	Layers    int    `json:"layers"`
	// Quiet are pieces of log lines that only our own checks cause; lines with
	// one are not kept.
	Quiet []string `json:"quiet,omitempty"`
	// External is set for a rank that is no process of ours: nothing is
	// started or ended for it, its adapter alone says how it fares.
	External bool `json:"external,omitempty"`
}

// Port returns the port of that name, or nil.
func (r *Rank) Port(name string) *Port {
	for i := range r.Ports {
		if r.Ports[i].Name == name {
			return &r.Ports[i]
		}
	}
	return nil
}

// Request is a placement as the planner decided it, for an adapter to turn
// into ranks.
type Request struct {
	InstanceID   string
	InstanceName string
	Model        Model
	ModelPaths   map[string]string // node ID → path of the model there
	Nodes        []string          // node IDs of the ranks by index; [0] is the head
	Layers       []int             // layers by rank; nil for one rank
	Context      int
	ExtraArgs    []string
	// ServedName is the name under which the engine lists the model.
	ServedName string
	// Secret must accompany every HTTP request to the engine, where it can ask
	// for one, as a bearer token: its port is open to all of its machine.
	Secret string
	// Engines are the engines found on the nodes, by node ID. They are known
	// when Finish is called, not yet when Describe is.
	Engines map[string]Engine
}

// Adapter is one engine.
type Adapter interface {
	// Name is the engine's name: "llamacpp".
	Name() string
	// Traits tells the planner about it.
	Traits() Traits
	// Detect looks for the engine on this node, for the user whose home is home.
	Detect(ctx context.Context, home string) Engine
	// Supports says why the engine cannot load the model or split it over so
	// many ranks; nil if it can.
	Supports(m Model, ranks int) error
	// Describe returns the ranks of a request, without granted ports: one for
	// each node, more where the engine wants it.
	Describe(r Request) ([]Rank, error)
	// Finish fills arguments and environment once every port of every rank is
	// granted; it changes only Args and Env.
	Finish(r Request, ranks []Rank) error
	// ReadLog interprets one line of a rank's log.
	ReadLog(rank Rank, line string) LogEvent
	// RankReady checks whether one rank can be used by others: its own check,
	// from its own node. Ranks of role "server" are ready when they answer.
	RankReady(ctx context.Context, rank Rank) (ready bool, phase string, err error)
	// Complete sends a short completion of at most so many tokens to rank 0 and
	// returns its text and speed. It runs on rank 0's node and is the proof of
	// readiness. It disturbs no other request more than it must.
	Complete(ctx context.Context, rank Rank, model string, tokens int) (Completion, error)
	// Progress tells, without asking for work, whether rank 0 is busy, and a
	// mark that is another one whenever it got on with its work. An engine that
	// cannot tell returns false and "".
	Progress(ctx context.Context, rank Rank) (busy bool, mark string, err error)
}

// Completion is the proof that an instance answers.
type Completion struct {
	Text            string
	Tokens          int
	TokensPerSecond float64 // 0 where there were too few tokens to tell
	Took            time.Duration
}

// LogEvent is what a line of an engine's log means.
type LogEvent struct {
	// Fatal is set for a line after which the rank cannot become ready, in
	// words for people; "" otherwise.
	Fatal string
	// Reason classifies Fatal: a fault.Reason, "" for the general one.
	Reason string
	// Done of Total steps of loading, where the line tells; 0 otherwise.
	Done, Total int
}
