package host

import (
	"errors"
	"fmt"
	"net/netip"
)

// ErrPermission is wrapped by errors of Apply and Revert where the process has
// not the right to change the machine.
var ErrPermission = errors.New("no permission to change the network configuration")

// ErrNoInterface is wrapped where the interface of a change does not exist.
var ErrNoInterface = errors.New("no such interface")

// ChangeKind is a kind of change. The list is closed: the root half accepts
// nothing else.
type ChangeKind string

// The kinds of change.
const (
	// ChangeLinkUp sets Interface up.
	ChangeLinkUp ChangeKind = "link-up"
	// ChangeMTU sets the MTU of Interface from OldMTU to MTU.
	ChangeMTU ChangeKind = "mtu"
	// ChangeAddress adds Prefix to Interface, with its subnet route.
	ChangeAddress ChangeKind = "address"
	// ChangeRoute adds a route to Prefix through Interface: by Gateway where it
	// is valid, from Source.
	ChangeRoute ChangeKind = "route"
	// ChangeFilter keeps a packet-filter table of our own that drops what is
	// addressed to one of Addresses and did not arrive on one of Interfaces or
	// the loopback, and what arrived on one of Forwarders and would leave by
	// something else than one of Interfaces. Applied again it replaces the table.
	ChangeFilter ChangeKind = "filter"
	// ChangeForward passes on what arrives by Interface and is meant for somebody
	// else.
	ChangeForward ChangeKind = "forward"
	// ChangeUnmanage tells the manager named by Manager to leave Interface alone.
	ChangeUnmanage ChangeKind = "unmanage"
)

// Change is one change of the machine's network configuration, as data: it
// travels to the root half and into the journal as JSON.
type Change struct {
	Kind      ChangeKind   `json:"kind"`
	Interface string       `json:"interface,omitempty"`
	Prefix    netip.Prefix `json:"prefix,omitzero"`
	Gateway   netip.Addr   `json:"gateway,omitzero"`
	Source    netip.Addr   `json:"source,omitzero"`
	Metric    int          `json:"metric,omitempty"`
	MTU       int          `json:"mtu,omitempty"`
	OldMTU    int          `json:"old_mtu,omitempty"`
	// WasUp is recorded by ChangeLinkUp, so that Revert leaves alone what was up.
	WasUp bool `json:"was_up,omitempty"`
	// WasOn is recorded by ChangeForward, likewise.
	WasOn bool `json:"was_on,omitempty"`
	// Index is that of Interface when the change was made; one that was made anew
	// under the same name has another, and nothing of the change. 0 if unknown.
	Index      int          `json:"index,omitempty"`
	Addresses  []netip.Addr `json:"addresses,omitempty"`
	Interfaces []string     `json:"interfaces,omitempty"`
	Forwarders []string     `json:"forwarders,omitempty"`
	Manager    string       `json:"manager,omitempty"`
}

// String returns the change in words.
func (c Change) String() string {
	switch c.Kind {
	case ChangeLinkUp:
		return fmt.Sprintf("set %s up", c.Interface)
	case ChangeMTU:
		return fmt.Sprintf("set the MTU of %s from %d to %d", c.Interface, c.OldMTU, c.MTU)
	case ChangeAddress:
		return fmt.Sprintf("address %s on %s", c.Prefix, c.Interface)
	case ChangeRoute:
		if c.Gateway.IsValid() {
			return fmt.Sprintf("route to %s by %s on %s", c.Prefix, c.Gateway, c.Interface)
		}
		return fmt.Sprintf("route to %s on %s", c.Prefix, c.Interface)
	case ChangeFilter:
		return fmt.Sprintf("packet filter for %d addresses, open to %v", len(c.Addresses), c.Interfaces)
	case ChangeForward:
		return fmt.Sprintf("pass on what arrives by %s", c.Interface)
	case ChangeUnmanage:
		return fmt.Sprintf("tell %s to leave %s alone", c.Manager, c.Interface)
	}
	return fmt.Sprintf("unknown change %q", string(c.Kind))
}
