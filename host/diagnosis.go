package host

import "net/netip"

// Query says of what Diagnose is to tell.
type Query struct {
	// Towards are addresses of other nodes; the way that is taken to each is told.
	Towards []netip.Addr
}

// Diagnosis is what else can be wrong with a machine, as far as it can be read
// without rights. Zero values mean that nothing is known.
type Diagnosis struct {
	// NoNetModule is set where the Thunderbolt driver is at work without the one
	// that makes network interfaces of cables.
	NoNetModule bool
	// HostsOff is set where the Thunderbolt driver was told not to connect to
	// other machines.
	HostsOff bool
	// Offloads are cables' interfaces of the kernel's own network driver that
	// pass on packets for others while segmentation offload is on, with the
	// names of what is on ("tso", "gso").
	Offloads map[string][]string
	// RDMA are the ports of RDMA devices.
	RDMA []RDMAPort
	// Memlock is how much memory a process of this one may lock, in bytes.
	Memlock Limit
	// Ways are the ways taken to the addresses of Query; one that cannot be
	// reached has no interface.
	Ways []Way
	// Leases are interfaces that have an address by DHCP.
	Leases []string
	// Resetters are programs that give cables' interfaces other addresses again
	// and again.
	Resetters []string
}

// RDMAPort is one port of an RDMA device.
type RDMAPort struct {
	Device    string // "rdma_en2", "tbr0"
	Port      int
	State     string // as the system calls it: "DOWN", "ACTIVE"
	Active    bool
	Interface string // network interface of the same cable, "" if none
}

// Limit is a resource limit.
type Limit struct {
	Known     bool
	Unlimited bool
	Bytes     uint64
}

// Way is the way taken to an address.
type Way struct {
	To        netip.Addr
	Interface string
	Gateway   netip.Addr // invalid where it is on the link
}

// Firewall is something that may drop what other machines send to this one.
type Firewall struct {
	// Tool is what a person sets it with: "ufw", "firewalld", "nft", "macOS".
	Tool string `json:"tool"`
	// Name is what was found, for people ("chain input of table inet filter").
	Name string `json:"name"`
	// Family, Table and Chain name a chain of nftables.
	Family string `json:"family,omitempty"`
	Table  string `json:"table,omitempty"`
	Chain  string `json:"chain,omitempty"`
}
