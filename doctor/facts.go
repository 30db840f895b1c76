package doctor

import (
	"time"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

// Facts is what this node knows about itself and the cluster. Zero values mean
// unknown, and an unknown fact provokes no finding.
type Facts struct {
	Now  time.Time // own clock; Since of new findings
	Self string    // own node ID
	Name string    // own node name

	Machine     host.Machine
	Thunderbolt host.Thunderbolt
	Network     host.Network
	// Nodes and Links as this node sees the cluster.
	Nodes []*tbclusterv1.Node
	Links []*tbclusterv1.Link

	// Wanted are network changes that are not permitted, Commands the same as
	// commands for a person.
	Wanted   []host.Change
	Commands []string
	// Released are interfaces that a manager of the system was told to leave
	// alone.
	Released []Released
	// Conflicts are addresses that clash and cannot be moved now.
	Conflicts []Conflict
	// FilterReason says why the packet filter is not in force; "" if it is or
	// is not needed.
	FilterReason string

	Disks   []Disk
	Engines []Engine
	// ClockOffsets are other nodes' clocks minus own, by node ID.
	ClockOffsets map[string]time.Duration
	// Version of this agent.
	Version string
	// Multicast says why mDNS cannot be sent; "" if it can.
	Multicast string
	// Unheard are nodes that are in reach and whose announcements are not heard, by
	// ID, sorted; Hears says that those of some other are.
	Unheard []string
	Hears   bool
	// DataInterface is the interface by which a copy of this node reaches another
	// node now, where that is no cable, by node ID.
	DataInterface map[string]string
	// Diagnosis is what else the machine tells of itself.
	Diagnosis host.Diagnosis
	// Firewalls are what may drop what others send to this machine; asked for
	// only where a cable is silent.
	Firewalls []host.Firewall
	// Renewed are nodes in whose place another one answers, by ID.
	Renewed map[string]Renewed
	// Heard are nodes that announce themselves and are not connected, by ID.
	Heard map[string]Heard
	// Untrusting are nodes that do not let this one in, by ID.
	Untrusting map[string]bool
	Config     Config
}

// Released is an interface that a manager was told to leave alone.
type Released struct {
	Manager, Interface string
	// Did are the commands that do the same: what was written, and where.
	Did []string
}

// Renewed is the node that answers in place of one that does not.
type Renewed struct {
	Node   string // its name, or the beginning of its ID
	Member bool   // it was let in
	Where  string // for people
}

// Heard is how a node announces itself.
type Heard struct {
	Address string    // where, with its control port
	Port    int       // the control port
	Since   time.Time // for how long, while it was not connected
}

// Conflict is an address that clashes.
type Conflict struct {
	Prefix, Port, With string
	// Node is the ID of the node whose node address it is; "" for an own address.
	Node string
}

// Disk is a file system that tbcluster writes to. Sizes in bytes.
type Disk struct {
	Path        string
	Free, Total uint64
}

// Engine is an engine looked for on this node.
type Engine struct {
	Name      string
	Available bool
	Reason    string
	// Installable is set where `tbcluster engine install NAME` can install it.
	Installable bool
}

// Config is what of the configuration doctor judges by.
type Config struct {
	MemoryLimitBytes uint64 // memory the node was told to report; 0 means the machine's own
}
