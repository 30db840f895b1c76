package lab

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
)

// portsPerDomain is how many ports one Thunderbolt controller has here, as on
// the integrated ones: lanes 1+2 and 3+4, so ports 1 and 3.
const portsPerDomain = 2

// port is a Thunderbolt port of a node.
type port struct {
	domain int
	number int // 1 or 3: the first lane adapter, and the route of a peer there
}

// String returns the name that the kernel gives to an XDomain on the port.
func (p port) String() string { return fmt.Sprintf("%d-%x", p.domain, p.number) }

// phy is the number of the physical port, as thunderbolt_net uses it for MACs.
func (p port) phy() int { return (p.number - 1) / 2 }

// nthPort is the port that the nth cable (from 0) of a node goes into.
func nthPort(n int) port {
	return port{domain: n / portsPerDomain, number: 1 + 2*(n%portsPerDomain)}
}

// planned is a cable before it is laid.
type planned struct {
	index int // of the pair, from 1
	node  [2]int
	port  [2]port
}

// plan lays out the cables of a lab. Options must be complete.
func plan(o Options) []planned {
	var pairs [][2]int
	switch o.Topology {
	case Mesh:
		for a := range o.Nodes {
			for b := a + 1; b < o.Nodes; b++ {
				pairs = append(pairs, [2]int{a, b})
			}
		}
	case Ring, Chain, Pair:
		for a := 0; a+1 < o.Nodes; a++ {
			pairs = append(pairs, [2]int{a, a + 1})
		}
		// Two nodes are no ring: the cable back would be a second one of the pair.
		if o.Topology == Ring && o.Nodes > 2 {
			pairs = append(pairs, [2]int{0, o.Nodes - 1})
		}
	}
	used := make([]int, o.Nodes)
	var cables []planned
	for _, p := range pairs {
		for i := range o.Cables {
			c := planned{index: i + 1, node: p}
			for end, node := range p {
				c.port[end] = nthPort(used[node])
				used[node]++
			}
			cables = append(cables, c)
		}
	}
	return cables
}

// domains is how many Thunderbolt controllers a node has; one at least.
func domains(cables []planned, node int) int {
	n := 1
	for _, c := range cables {
		for end := range c.node {
			if c.node[end] == node {
				n = max(n, c.port[end].domain+1)
			}
		}
	}
	return n
}

// The LAN of every lab. Labs do not see each other, so they share it.
var (
	lanPrefix = netip.MustParsePrefix("172.31.77.0/24")
	lanHost   = netip.MustParseAddr("172.31.77.250")
)

// lanAddress is that of the nth node, from 0.
func lanAddress(n int) netip.Addr {
	a := lanPrefix.Addr().As4()
	a[3] = byte(10 + n)
	return netip.AddrFrom4(a)
}

// deriveUUID makes a UUID that stays the same for the same seed.
func deriveUUID(seed ...any) string {
	sum := sha256.Sum256([]byte(fmt.Sprint(seed...)))
	b := sum[:16]
	b[6] = b[6]&0x0f | 0x80 // version 8: made by rules of our own
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// cableMAC is the MAC of the interface on a port: as in thunderbolt_net it
// follows from the node's own UUID and the port, and so survives a replug.
func cableMAC(domainUUID string, p port) [6]byte {
	sum := sha256.Sum256([]byte(domainUUID))
	mac := [6]byte{byte(p.phy()<<4 | 0x02)}
	copy(mac[1:], sum[:5])
	return mac
}
