package discover

import (
	"net"
	"net/netip"
	"slices"
	"strings"
)

// maxInterfaces bounds how many interfaces are looked at.
const maxInterfaces = 64

// Interface is a network interface of this machine, as far as discovery cares.
type Interface struct {
	Name      string
	Index     int
	Cable     bool
	Multicast bool
	Addresses []netip.Prefix // without zones
}

func (i Interface) same(j Interface) bool {
	return i.Name == j.Name && i.Index == j.Index && i.Cable == j.Cable && i.Multicast == j.Multicast &&
		slices.Equal(i.Addresses, j.Addresses)
}

// systemInterfaces is the Interfaces of Options where none is given.
func systemInterfaces() ([]Interface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var list []Interface
	for _, ni := range all {
		if ni.Flags&net.FlagUp == 0 || ni.Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := ni.Addrs()
		if err != nil {
			continue // it has just gone
		}
		i := Interface{
			Name: ni.Name, Index: ni.Index,
			Cable:     strings.HasPrefix(ni.Name, "thunderbolt"),
			Multicast: ni.Flags&net.FlagMulticast != 0,
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				i.Addresses = append(i.Addresses, netip.PrefixFrom(p.Addr().WithZone("").Unmap(), p.Bits()))
			}
		}
		list = append(list, i)
	}
	return list, nil
}
