package host

import (
	"context"
	"net/netip"
	"time"
)

// Host reads facts of one machine and carries out changes on it. All methods
// may be called at once from several goroutines.
type Host interface {
	// Machine tells what machine this is and how its memory stands.
	Machine(ctx context.Context) (Machine, error)
	// Thunderbolt tells what the Thunderbolt layer sees. A machine without one
	// has no domains and no error.
	Thunderbolt(ctx context.Context) (Thunderbolt, error)
	// Network lists interfaces, addresses and routes.
	Network(ctx context.Context) (Network, error)
	// Diagnose tells what else may be wrong with the machine.
	Diagnose(ctx context.Context, q Query) (Diagnosis, error)
	// Firewalls lists what may drop what other machines send to this one, our
	// own packet filter left out. On Linux it needs root: its error wraps
	// ErrPermission else.
	Firewalls(ctx context.Context) ([]Firewall, error)
	// Watch sends a value soon after something that Thunderbolt or Network
	// report may have changed, and every few seconds in any case (sysfs tells
	// nobody of its changes). It coalesces; the channel has room for one. It is
	// closed when ctx ends.
	Watch(ctx context.Context) <-chan struct{}
	// Apply carries out one change, or fails and leaves nothing of it. It is
	// idempotent. Without the right to do so its error wraps ErrPermission.
	Apply(ctx context.Context, c Change) error
	// Revert undoes one change that Apply made; what is already gone is no error.
	Revert(ctx context.Context, c Change) error
	// Lacks tells in words what is not there any more, or not as it was set, of a
	// ChangeFilter that Apply made; "" if nothing. Of other kinds it says nothing.
	Lacks(ctx context.Context, c Change) (string, error)
	// Commands returns the commands with which a person makes the change.
	Commands(c Change) []string
}

// Machine is a machine at one moment.
type Machine struct {
	Hostname  string // short name, no domain
	OS        string // "linux", "darwin"
	OSVersion string // for people
	Kernel    string
	Arch      string // as Go names it
	MachineID string // stable over reboots; "" if the system has none
	BootID    string // new with every boot
	CPUs      int    // logical
	Memory    Memory
}

// Memory of a machine in bytes.
type Memory struct {
	Total     uint64
	Available uint64
}

// Thunderbolt is what the Thunderbolt layer sees.
type Thunderbolt struct {
	// DriverLoaded is false where the kernel has no Thunderbolt driver at work.
	DriverLoaded bool
	Domains      []Domain
}

// Domain is one Thunderbolt domain: a controller on Linux, a port on macOS.
type Domain struct {
	ID       string // "0"
	UUID     string // own UUID, lower case with dashes
	Security string // "none", "user", …; "" if unknown
	IOMMU    bool   // DMA protection by IOMMU
	// Generation is the USB4/Thunderbolt generation of the host router, 0 if unknown.
	Generation int
	Peers      []XDomain
	// Others are devices that are no peers: docks, displays, disks, hubs.
	Others []Device
}

// Device is something on a port that is no peer.
type Device struct {
	Port, Vendor, Name string
	Authorized         bool
}

// XDomain is another machine seen through a cable.
type XDomain struct {
	Port       string // domain and route ("0-2"); on macOS the receptacle
	RemoteUUID string // lower case
	Vendor     string
	Device     string
	// RxGbps and TxGbps are for all lanes together; 0 if unknown.
	RxGbps, TxGbps   float64
	RxLanes, TxLanes int
	// CapableGbps is what this end could do; 0 if unknown.
	CapableGbps float64
	// BehindHub is set where the peer is not on a port of the machine itself.
	BehindHub bool
	// Hops is how many cables lie between the two machines: 1 without hubs; 0 if
	// unknown.
	Hops int
	// Services are the protocol IDs that the peer announces by key
	// ("network" → 1).
	Services map[string]uint32
	// Interface is the network interface of this XDomain, "" if none.
	Interface string
}

// Network is a machine's network configuration.
type Network struct {
	Interfaces []Interface
	Routes     []Route
}

// Interface is one network interface.
type Interface struct {
	Name     string
	Index    int
	Up       bool // administratively
	Carrier  bool
	Loopback bool
	MTU      int
	MaxMTU   int // 0 if unknown
	MAC      string
	// Addresses with their prefix lengths. A netip.Prefix holds no zone: that of
	// a link-local one is Name.
	Addresses []netip.Prefix
	// Cable is true for interfaces of the Thunderbolt layer.
	Cable bool
	// Bridge is the name of the bridge that it is a member of, "" if none.
	Bridge string
	// ManagedBy names a manager that would fight over the interface
	// ("NetworkManager", "systemd-networkd"); "" if none or told to leave it.
	ManagedBy string
	// Forwarding is set where what arrives by it is passed on (IPv4); it is
	// looked up for cables.
	Forwarding bool
	// Counters since the interface appeared.
	RxBytes, TxBytes, RxErrors, TxErrors, RxDropped, TxDropped uint64
}

// Route is one route of any table.
type Route struct {
	Destination netip.Prefix // 0.0.0.0/0 or ::/0 for a default route
	Gateway     netip.Addr   // invalid if none
	Source      netip.Addr   // preferred source; invalid if none
	Interface   string
	Table       int
	Metric      int
	// DHCP is set where a lease brought it.
	DHCP bool
}

// Interface returns the interface of that name.
func (n Network) Interface(name string) (Interface, bool) {
	for _, i := range n.Interfaces {
		if i.Name == name {
			return i, true
		}
	}
	return Interface{}, false
}

// Clock is the time as a part of the program sees it; handed in so that tests
// can turn it.
type Clock interface {
	Now() time.Time
}

// SystemClock is the real clock.
type SystemClock struct{}

// Now returns time.Now.
func (SystemClock) Now() time.Time { return time.Now() }
