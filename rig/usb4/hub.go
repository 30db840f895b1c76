//go:build linux

package usb4

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"

	"tbcluster/api/fault"
)

// maxDepth is how many hubs may lie between a host and what is behind them
// (tb.h, USB4_SWITCH_MAX_DEPTH).
const maxDepth = 5

// node is what hosts and hubs have in common: a router with ports. One of host
// and hub is set.
type node struct {
	fabric  *Fabric
	name    string
	options HostOptions
	ports   []*Port
	router  router
	host    *Host
	hub     *Hub
}

// build makes router and ports.
func (n *node) build() {
	n.router = newRouter(n)
	for i := range n.options.Ports {
		n.ports = append(n.ports, newPort(n, i))
	}
}

// Name returns the name.
func (n *node) Name() string { return n.name }

// Ports returns how many ports there are.
func (n *node) Ports() int { return len(n.ports) }

// Port returns a port, from 0, or nil if there is none of that number.
func (n *node) Port(i int) *Port {
	if i < 0 || i >= len(n.ports) {
		return nil
	}
	return n.ports[i]
}

// powered reports whether the lanes of a port may come up: those of a host when
// its driver is there, those of a hub when it is plugged in itself.
func (n *node) powered(p *Port) bool {
	if n.host != nil {
		return n.host.attached && n.host.awake
	}
	return p.leadsUp() || n.ports[0].up
}

// manager returns the host whose driver manages the router, and the route from
// there to the router: 0 for its own.
func (n *node) manager() (h *Host, route uint64) {
	for range maxDepth + 1 {
		if n.host != nil {
			return n.host, route
		}
		up := n.ports[0]
		if !up.up || up.peer().leadsUp() {
			return nil, 0
		}
		route = route<<8 | uint64(up.peer().lanes[0].number)
		n = up.peer().node
	}
	return nil, 0
}

func (n *node) listening() bool {
	h, _ := n.manager()
	return h != nil && h.listening()
}

func (n *node) wake() bool {
	h, _ := n.manager()
	return h != nil && h.pci.wake()
}

// towards finds the port that the first hop of a route leads out of. code is
// the error if there is no way.
func (n *node) towards(route uint64) (p *Port, adapter int, code uint32) {
	nr := int(route & 0xff)
	a := n.router.adapter(nr)
	if a == nil || a.port == nil || a.second {
		return nil, nr, errorNoPort
	}
	if !a.port.up {
		return a.port, nr, errorNotConnected
	}
	return a.port, nr, noError
}

// follow finds the router of a route, which has to be one that this domain may
// configure: its own, or a hub. What else is there is the host of another domain,
// and says so; the driver then looks for it by XDomain packets (tb.c,
// tb_scan_port).
func (n *node) follow(route uint64) (to *node, adapter int, code uint32) {
	for ; route != 0; route >>= 8 {
		port, nr, code := n.towards(route)
		switch {
		case code != noError:
			return nil, nr, code
		case port.lanes[0].config[adapterBuffers]&adapterLocked != 0:
			return nil, nr, errorLocked
		case !port.peer().leadsUp():
			return nil, nr, errorNoPort
		}
		n = port.peer().node
	}
	return n, 0, noError
}

// outOf finds the port that the last hop of a route leads out of.
func (n *node) outOf(route uint64) (p *Port, code uint32) {
	for {
		port, _, code := n.towards(route)
		if code != noError {
			return nil, code
		}
		if route >>= 8; route == 0 {
			return port, noError
		}
		if !port.peer().leadsUp() { // hosts pass nothing on for others
			return nil, errorNoPort
		}
		n = port.peer().node
	}
}

// beyond returns whose driver hears what comes in at a port from another domain,
// and by which route it knows the sender: the host itself, or the one that has the
// hub. nil is nobody.
func (p *Port) beyond() (h *Host, route uint64) {
	if p.node.host != nil {
		return p.node.host, uint64(p.lanes[0].number)
	}
	if p.leadsUp() || !p.node.router.enumerated() {
		return nil, 0
	}
	if h, route = p.node.manager(); h == nil {
		return nil, 0
	}
	depth := (bits.Len64(route) + 7) / 8
	return h, route | uint64(p.lanes[0].number)<<(8*depth)
}

// HubOptions are those of a hub. Zero values stand for what is said with each.
type HubOptions struct {
	// Name is how trace, log and counters call the hub, and its model name for the
	// driver. It is required, and unique in the fabric.
	Name string
	// UID is unique in the fabric; 0 is made from the seed and the name.
	UID uint64
	// Ports is the number of ports, the upstream one included: 2 to 15; 0 is 3.
	Ports int
	// Lanes, Speed, Vendor and Device are as those of hosts.
	Lanes          int
	Speed          Generation
	Vendor, Device uint16
}

// Hub is a device router without tunnels of its own: port 0 is its upstream port,
// behind which the host lies whose driver takes it, and the others lead to hosts
// of other domains, or to hubs. To the driver it is 0-1 behind port 0 of a host,
// and the host behind its port 1 is 0-301. Hosts behind a hub see the host that
// has it, and not each other. When its upstream port is down, all are.
type Hub struct {
	node
	drom []byte
}

// vendorName is what a hub's DROM says of who has made it.
const vendorName = "tbcluster rig"

// AddHub adds a hub, which has power of its own.
func (f *Fabric) AddHub(o HubOptions) (*Hub, error) {
	if o.Ports == 0 {
		o.Ports = 3
	}
	if o.Ports < 2 {
		return nil, fault.Newf(fault.Usage, "give it 2 ports or more, of which one goes up", "hub %s cannot have %d ports", o.Name, o.Ports)
	}
	if o.Device == 0 {
		o.Device = 0x4002
	}
	// Version 1: generation 4 would come up bonded, which a driver has to know of a
	// hub in other ways than of a host.
	h := HostOptions{Name: o.Name, UID: o.UID, Ports: o.Ports, Lanes: o.Lanes, Speed: o.Speed, Vendor: o.Vendor, Device: o.Device}
	if err := h.complete(f.seed); err != nil {
		return nil, err
	}
	f.lock()
	defer f.unlock()
	if err := f.unique(h); err != nil {
		return nil, err
	}
	hub := &Hub{node: node{fabric: f, name: o.Name, options: h}}
	hub.hub = hub
	hub.drom = makeDROM(h)
	hub.build()
	f.hubs = append(f.hubs, hub)
	return hub, nil
}

// String returns the name.
func (h *Hub) String() string { return fmt.Sprintf("hub %s", h.name) }

// plugged has the downstream ports come up.
func (h *Hub) plugged() {
	now := h.fabric.clock.Now()
	for _, p := range h.ports[1:] {
		p.train(now)
	}
}

// unplugged brings the hub to where it is after power-on.
func (h *Hub) unplugged() {
	for _, p := range h.ports[1:] {
		p.forget()
		p.down()
	}
	h.router.reset()
	h.fabric.rewired()
}

// Operation to read the DROM (usb4.c, USB4_SWITCH_OP_DROM_READ): its metadata has
// the address and the number of dwords.
const (
	opReadDROM       = 0x24
	dromAddressShift = 2
	dromAddressMask  = 0x1fff
	dromSizeShift    = 15
	dromSizeMask     = 0x1f
)

// readDROM puts what is asked for of the DROM into the data of the operation.
func (r *router) readDROM() uint32 {
	meta := r.config[routerMeta]
	at, n := meta>>dromAddressShift&dromAddressMask*4, min(meta>>dromSizeShift&dromSizeMask, 16)
	for i := range n {
		var word [4]byte
		if from := int(at + 4*i); from < len(r.node.hub.drom) {
			copy(word[:], r.node.hub.drom[from:])
		}
		r.config[routerData+i] = binary.LittleEndian.Uint32(word[:])
	}
	return 0
}

// makeDROM makes the DROM of a device router (eeprom.c, struct tb_drom_header and
// tb_drom_parse_entry_generic; revision 3, that of USB4): the header, and entries
// of length and index for the names of vendor and model and for the IDs.
func makeDROM(o HostOptions) []byte {
	const header, crcFrom, revision = 16, 13, 3
	b := make([]byte, header)
	entry := func(index byte, data []byte) {
		b = append(b, byte(len(data)+2), index)
		b = append(b, data...)
	}
	entry(1, append([]byte(vendorName), 0))
	entry(2, append([]byte(o.Name), 0))
	ids := le.AppendUint16(nil, 0x0100) // version of USB4
	ids = le.AppendUint16(ids, o.Vendor)
	ids = le.AppendUint16(ids, o.Device)
	entry(9, append(ids, make([]byte, 8)...)) // revisions and test ID
	le.PutUint64(b[1:], o.UID)
	b[0] = crc8(b[1:9])
	b[crcFrom] = revision
	le.PutUint16(b[14:], uint16(len(b)-crcFrom))
	le.PutUint32(b[9:], crc32.Checksum(b[crcFrom:], castagnoli))
	return b
}

// crc8 is the checksum of the UID in a DROM (eeprom.c, tb_crc8).
func crc8(b []byte) byte {
	crc := byte(0xff)
	for _, v := range b {
		crc ^= v
		for range 8 {
			if crc&0x80 != 0 {
				crc = crc<<1 ^ 7
			} else {
				crc <<= 1
			}
		}
	}
	return crc
}
