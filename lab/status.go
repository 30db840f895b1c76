package lab

// State of a lab or of a part of it.
type State string

// The states.
const (
	Running State = "running" // lab, node, agent
	Dead    State = "dead"    // lab: its keeper is gone, Down cleans up
	Off     State = "off"     // node: killed, or its init has ended
	Paused  State = "paused"  // node, agent: stopped
	Stopped State = "stopped" // agent: ended or never started
	Plugged State = "plugged" // cable
	Cut     State = "cut"     // cable
	Silent  State = "silent"  // cable: plugged, and drops every frame
	Half    State = "half"    // cable: seen by one of its ends only
)

// Status is what a lab is at one moment.
type Status struct {
	Name  string `json:"name"`
	State State  `json:"state"` // Running or Dead
	Dir   string `json:"dir"`
	// Rootless is set for a lab of an ordinary user: it has one user, root.
	Rootless bool `json:"rootless"`
	// Memory says how the memory size of the nodes is enforced: "cgroup v1",
	// "cgroup v2", or "reported only".
	Memory string `json:"memory"`
	// Notes are things a person should know: directories that ordinary users
	// cannot read, and the like.
	Notes  []string      `json:"notes,omitempty"`
	Nodes  []NodeStatus  `json:"nodes"`
	Cables []CableStatus `json:"cables"`
}

// NodeStatus is a node at one moment.
type NodeStatus struct {
	Name  string `json:"name"`
	State State  `json:"state"` // Running, Paused, Off
	Agent State  `json:"agent"` // Running, Paused, Stopped
	// AgentExit says how the boot command ended last; "" while it runs.
	AgentExit string `json:"agent_exit,omitempty"`
	BootID    string `json:"boot_id,omitempty"`
	MachineID string `json:"machine_id"`
	Address   string `json:"lan_address"`
	LANCut    bool   `json:"lan_cut"`
	// LANSide is the part of the LAN that it is on, where that fell apart.
	LANSide int `json:"lan_side,omitempty"`
	// Multicast is "" where it works.
	Multicast Multicast `json:"multicast,omitempty"`
	Socket    string    `json:"socket"`
	Memory    uint64    `json:"memory_bytes"`
	Disk      uint64    `json:"disk_bytes"`
	DiskUsed  uint64    `json:"disk_used_bytes"`
}

// CableStatus is a cable at one moment.
type CableStatus struct {
	// Index counts the cables of the pair from 1.
	Index int      `json:"index"`
	A     CableEnd `json:"a"`
	B     CableEnd `json:"b"`
	State State    `json:"state"` // Plugged, Silent, Half, Cut
	Rate  string   `json:"rate,omitempty"`
}

// CableEnd is one end of a cable.
type CableEnd struct {
	Node string `json:"node"`
	// Port is the XDomain of the other node as the kernel names it: "0-1".
	Port string `json:"port"`
	// Interface is "" while the cable is cut or one of its nodes is off.
	Interface string `json:"interface,omitempty"`
}

// CutOptions say what to cut, and how.
type CutOptions struct {
	// Cable is the index of one cable of the pair, from 1; 0 means all.
	Cable int
	// Silent leaves carrier and XDomain and drops every frame both ways.
	Silent bool
	// Half lets the second node that is named see it no more; the first sees the
	// XDomain and an interface without carrier.
	Half bool
}

// Multicast says how multicast is blocked on a node.
type Multicast string

// The ways.
const (
	// MulticastLost lets it be sent, and nothing arrive, as many access points do.
	MulticastLost Multicast = "lost"
	// MulticastRefused lets sending fail too, as a packet filter does.
	MulticastRefused Multicast = "refused"
)

// MendOptions say what to mend, and how.
type MendOptions struct {
	// Cable is the index of one cable of the pair, from 1; 0 means all.
	Cable int
	// Rename gives the new interfaces names that they did not have before. A
	// cable that is not cut is replugged for it.
	Rename bool
	// Move plugs both ends into other ports.
	Move bool
}
