package lab

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
)

// portsPerDomain is how many ports one Thunderbolt controller has here, as on
// the integrated ones: lanes 1+2 and 3+4, so ports 1 and 3.
const portsPerDomain = 2

// port is a Thunderbolt port of a node.
type port struct {
	domain int
	number int // 1 or 3: the first lane adapter, and the route of a peer there
	// hub is the lane adapter of the hub on the port to which the cable leads; 0
	// without a hub.
	hub int
}

// String returns the name that the kernel gives to an XDomain on the port.
func (p port) String() string { return fmt.Sprintf("%d-%x", p.domain, p.number|p.hub<<8) }

// upstream is the port of the machine itself: where the hub is, if there is one.
func (p port) upstream() port { return port{domain: p.domain, number: p.number} }

// phy is the number of the physical port, as thunderbolt_net uses it for MACs.
func (p port) phy() int { return (p.number - 1) / 2 }

// nthPort is the port that the nth cable (from 0) of a node goes into.
func nthPort(n int) port {
	return port{domain: n / portsPerDomain, number: 1 + 2*(n%portsPerDomain)}
}

// perHub is how many peers are behind one hub.
const perHub = 3

// nthBehindHub is the port for the nth cable of a node with hubs.
func nthBehindHub(n int) port {
	p := nthPort(n / perHub)
	p.hub = 3 + 2*(n%perHub) // its first lanes lead to the machine
	return p
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
				nth := used[node] + i
				if end == 1 && o.has(Crossed) {
					nth = used[node] + o.Cables - 1 - i
				}
				c.port[end] = nthPort(nth)
				if node == 0 && o.has(Hub) {
					c.port[end] = nthBehindHub(nth)
				}
			}
			cables = append(cables, c)
		}
		for _, node := range p {
			used[node] += o.Cables
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

// foreign is a device on a node's bus that is no other machine.
type foreign struct {
	dir   string // in its sysfs
	attrs map[string]string
}

// foreigners are the devices on a node's bus besides its cables; more is how
// many domains they take.
func foreigners(o Options, cables []planned, node int) (list []foreign, more int) {
	router := func(p port, uuid any, attrs map[string]string) foreign {
		f := foreign{dir: routerDir(p.domain) + "/" + p.String(), attrs: map[string]string{
			"generation": "4", "rx_speed": "20.0 Gb/s", "tx_speed": "20.0 Gb/s", "rx_lanes": "2", "tx_lanes": "2",
			"unique_id": deriveUUID("device", node, uuid), "uevent": "DEVTYPE=thunderbolt_device\nUSB4_VERSION=1.0\nUSB4_TYPE=hub",
		}}
		for k, v := range attrs {
			f.attrs[k] = v
		}
		return f
	}
	hubs := map[port]bool{}
	for _, c := range cables {
		for end := range c.node {
			if p := c.port[end]; c.node[end] == node && p.hub != 0 && !hubs[p.upstream()] {
				hubs[p.upstream()] = true
				list = append(list, router(p.upstream(), p.upstream(), map[string]string{
					"authorized": "1", "vendor": "0x8087", "vendor_name": "HubCo", "device": "0x1", "device_name": "USB4 hub",
				}))
			}
		}
	}
	if o.has(Devices) {
		d := domains(cables, node)
		list = append(list,
			router(port{domain: d, number: 1}, "dock", map[string]string{
				"authorized": "1", "vendor": "0x1", "vendor_name": "DockCo", "device": "0x2", "device_name": "Dock with two displays"}),
			router(port{domain: d, number: 3}, "disk", map[string]string{
				"authorized": "0", "vendor": "0x2", "vendor_name": "DiskCo", "device": "0x3", "device_name": "NVMe disk", "uevent": "DEVTYPE=thunderbolt_device"}),
			foreign{dir: fmt.Sprintf("%s/usb4_port1/%d-0:1.1", routerDir(d), d), attrs: map[string]string{
				"vendor": "0x1da0", "device": "0x8833", "nvm_version": "1.23", "uevent": "DEVTYPE=thunderbolt_retimer"}})
		more = 1
	}
	return list, more
}

// swapWords writes a UUID with the bytes of each 32-bit word reversed, in
// capitals.
func swapWords(uuid string) string {
	hex := strings.ToUpper(strings.ReplaceAll(uuid, "-", ""))
	var b strings.Builder
	for i := 0; i < len(hex); i += 8 {
		for j := 6; j >= 0; j -= 2 {
			b.WriteString(hex[i+j : i+j+2])
		}
	}
	s := b.String()
	return fmt.Sprintf("%s-%s-%s-%s-%s", s[:8], s[8:12], s[12:16], s[16:20], s[20:])
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

// controller is the PCI function of a domain: that of Intel's integrated ones
// for the first two, then slots behind a bridge.
func controller(domain int) string {
	if domain < 2 {
		return fmt.Sprintf("devices/pci0000:00/0000:00:0d.%d", domain+2)
	}
	return fmt.Sprintf("devices/pci0000:00/0000:00:%02x.0/0000:%02x:00.0", 0x10+domain, domain)
}

func domainDir(d int) string { return filepath.Join(controller(d), fmt.Sprintf("domain%d", d)) }

func routerName(d int) string { return fmt.Sprintf("%d-0", d) }

func routerDir(d int) string { return filepath.Join(domainDir(d), routerName(d)) }

// xdomainDir is below the hub on the port, if there is one.
func xdomainDir(p port) string {
	if p.hub != 0 {
		return filepath.Join(routerDir(p.domain), p.upstream().String(), p.String())
	}
	return filepath.Join(routerDir(p.domain), p.String())
}
