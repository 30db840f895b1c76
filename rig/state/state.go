package state

import (
	"fmt"
	"strings"
)

// State is what one host shows, at one moment or nearly so.
type State struct {
	// Driver reports whether the thunderbolt driver is loaded.
	Driver  bool     `json:"driver"`
	Domains []Domain `json:"domains,omitempty"`
}

// Domain is a host router of the host.
type Domain struct {
	Index    int    `json:"index"`    // of domain0, domain1, …
	UUID     string `json:"uuid"`     // of its host router
	Security string `json:"security"` // "user", "none", …
	IOMMU    bool   `json:"iommu"`    // iommu_dma_protection
	// Generation is that of the host router: 4 for USB4 (of either version).
	Generation int    `json:"generation"`
	Peers      []Peer `json:"peers,omitempty"`
	// Others are routers behind cables, by device name.
	Others []string `json:"others,omitempty"`
}

// Peer is another host at the end of a cable: an XDomain.
type Peer struct {
	// Device is its name: "0-1" is behind adapter 1 of domain 0, "0-3" behind
	// adapter 3.
	Device string `json:"device"`
	// Inode tells one from the one that came before it under the same name.
	Inode  uint64 `json:"inode"`
	UUID   string `json:"uuid"`
	Vendor string `json:"vendor"`
	Name   string `json:"name"` // its host name
	// Lanes and the speed of one lane in Gb/s, each way.
	RxLanes  int       `json:"rx_lanes"`
	TxLanes  int       `json:"tx_lanes"`
	RxGbps   float64   `json:"rx_gbps"`
	TxGbps   float64   `json:"tx_gbps"`
	Services []Service `json:"services,omitempty"`
}

// Service is something that a peer offers.
type Service struct {
	Device string `json:"device"` // "0-1.0"
	Key    string `json:"key"`    // "network"
	Driver string `json:"driver"` // that is bound, "" if none
	// Interface is the network interface of the service, if it has one.
	Interface *Interface `json:"interface,omitempty"`
}

// Interface is a network interface.
type Interface struct {
	Name    string `json:"name"`
	MAC     string `json:"mac"`
	MTU     int    `json:"mtu"`
	Up      bool   `json:"up"`      // by whoever manages it
	Carrier bool   `json:"carrier"` // thunderbolt_net: both ends have logged in
}

// Peer returns the peer of that device name, or nil.
func (s State) Peer(device string) *Peer {
	for i := range s.Domains {
		for j := range s.Domains[i].Peers {
			if p := &s.Domains[i].Peers[j]; p.Device == device {
				return p
			}
		}
	}
	return nil
}

// Peers returns all peers of all domains.
func (s State) Peers() []Peer {
	var all []Peer
	for _, d := range s.Domains {
		all = append(all, d.Peers...)
	}
	return all
}

// Interface returns the network interface towards the peer, or nil.
func (p *Peer) Interface() *Interface {
	if p == nil {
		return nil
	}
	for i := range p.Services {
		if n := p.Services[i].Interface; n != nil {
			return n
		}
	}
	return nil
}

// Equal reports whether two states are the same.
func (s State) Equal(o State) bool { return s.String() == o.String() }

// String is the state as a person reads it, a line for each thing.
func (s State) String() string {
	if !s.Driver {
		return "no driver\n"
	}
	var b strings.Builder
	for _, d := range s.Domains {
		fmt.Fprintf(&b, "domain%d uuid %s security %s generation %d iommu %v\n", d.Index, d.UUID, d.Security, d.Generation, d.IOMMU)
		for _, p := range d.Peers {
			fmt.Fprintf(&b, "  %s #%d peer %s %q %q rx %d x %g Gb/s tx %d x %g Gb/s\n", p.Device, p.Inode, p.UUID, p.Vendor, p.Name, p.RxLanes, p.RxGbps, p.TxLanes, p.TxGbps)
			for _, v := range p.Services {
				fmt.Fprintf(&b, "    %s %s driver %q", v.Device, v.Key, v.Driver)
				if n := v.Interface; n != nil {
					fmt.Fprintf(&b, " %s %s mtu %d up %v carrier %v", n.Name, n.MAC, n.MTU, n.Up, n.Carrier)
				}
				b.WriteByte('\n')
			}
		}
		for _, o := range d.Others {
			fmt.Fprintf(&b, "  %s router\n", o)
		}
	}
	return b.String()
}
