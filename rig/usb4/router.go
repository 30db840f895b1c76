//go:build linux

package usb4

import (
	"time"
)

// Router configuration space (drivers/thunderbolt/tb_regs.h, ROUTER_CS_*;
// USB4 specification, 8.2.1).
const (
	routerSize      = 0x80
	routerIDs       = 0
	routerPorts     = 1
	routerRoute     = 2 // and 3
	routerEnable    = 3
	routerVersion   = 4
	routerControl   = 5
	routerStatus    = 6
	routerUID       = 7 // and 8
	routerData      = 9 // to 24
	routerMeta      = 25
	routerOp        = 26
	routerTMU       = 0x20 // where our TMU capability is
	routerTMUTime   = routerTMU + 1
	routerTMUPost   = routerTMU + 0x18
	routerValid     = 1 << 31 // of routerEnable
	routerSleep     = 1 << 0  // of routerControl
	routerSlept     = 1 << 0  // of routerStatus
	routerReady     = 1 << 24
	routerConfReady = 1 << 25
	routerOpValid   = 1 << 31 // of routerOp
	routerOpNone    = 1 << 30

	version1 = 0x20 << 24 // of routerVersion
	version2 = 0x40 << 24
)

// opBufferAllocation is the router operation that the driver needs (usb4.c,
// USB4_SWITCH_OP_BUFFER_ALLOC): how many buffers which tunnel may have.
const opBufferAllocation = 0x33

// bufferAllocation are its answers: kind, and number of buffers. Those for
// DisplayPort must be there when there are several ports; that for the host
// interface always (usb4_switch_credits_init). There are no tunnels but those to
// host interfaces, and so no buffers are kept for others: the driver would leave
// enough for two hosts behind a hub only (tunnel.c, tb_available_credits).
var bufferAllocation = []uint32{
	1 | 0<<16,  // USB 3
	2 | 0<<16,  // DisplayPort AUX, least
	3 | 0<<16,  // DisplayPort main, least
	4 | 0<<16,  // PCIe
	5 | 14<<16, // host interface
}

// router is a router of a host or a hub: its configuration space and its adapters.
type router struct {
	node     *node
	config   [routerSize]uint32
	adapters []*adapter // by number; 0 is the control adapter and nil
}

func newRouter(on *node) router {
	lanes := 2 * on.options.Ports
	r := router{node: on, adapters: make([]*adapter, lanes+1, lanes+2)}
	for i := range lanes {
		r.adapters[i+1] = newAdapter(on, i+1, lanePaths)
		r.adapters[i+1].second = i%2 == 1
	}
	if on.host != nil {
		r.adapters = append(r.adapters, newAdapter(on, lanes+1, on.options.Hops))
		r.nhi().reset()
	}
	r.resetConfig()
	return r
}

// nhi returns the adapter of the host interface of a host, the last one.
func (r *router) nhi() *adapter { return r.adapters[len(r.adapters)-1] }

// upstream returns the adapter that leads towards the driver: that of the host
// interface, or the first of a hub.
func (r *router) upstream() *adapter {
	if r.node.host != nil {
		return r.nhi()
	}
	return r.adapters[1]
}

// adapter returns the adapter of a number, or nil.
func (r *router) adapter(n int) *adapter {
	if n < 1 || n >= len(r.adapters) {
		return nil
	}
	return r.adapters[n]
}

func (r *router) reset() {
	r.resetConfig()
	for _, a := range r.adapters[1:] {
		a.reset()
	}
}

func (r *router) resetConfig() {
	o := r.node.options
	last := uint32(len(r.adapters) - 1)
	c := &r.config
	*c = [routerSize]uint32{}
	c[routerIDs] = uint32(o.Vendor) | uint32(o.Device)<<16
	c[routerPorts] = routerTMU | uint32(r.upstream().number)<<8 | last<<14 // first capability; upstream and last adapter
	c[routerVersion] = version1
	if o.Version == 2 {
		c[routerVersion] = version2
	}
	c[routerStatus] = routerReady | routerConfReady
	c[routerUID], c[routerUID+1] = uint32(o.UID), uint32(o.UID>>32)
	c[routerTMU] = 3<<8 | 1<<30 // the only capability; it can do unidirectional
}

// enumerated reports whether the driver has taken the router.
func (r *router) enumerated() bool { return r.config[routerEnable]&routerValid != 0 }

func (r *router) read(offset uint32) uint32 {
	if offset >= routerTMUTime && offset < routerTMUTime+3 {
		return localTime(r.node.fabric.clock.Now(), offset-routerTMUTime)
	}
	return r.config[offset]
}

// localTime is the time of the time management unit: nanoseconds from bit 16 on
// (TMU_RTR_CS_1 to 3).
func localTime(t time.Duration, dword uint32) uint32 {
	switch dword {
	case 0:
		return uint32(t) << 16
	case 1:
		return uint32(t >> 16)
	default:
		return uint32(uint64(t)>>48) & 0xffff
	}
}

func (r *router) write(offset, v uint32) {
	c := &r.config
	switch offset {
	case routerIDs, routerStatus, routerUID, routerUID + 1:
		return
	case routerPorts:
		return // what of it can be written is the depth, 0 for a host
	case routerVersion:
		c[offset] = c[offset]&0xff000000 | v&0x00ffffff
		return
	case routerEnable:
		c[offset] = v
		c[routerStatus] &^= routerSlept
		r.node.portsListen()
		return
	case routerControl:
		if v&routerSleep != 0 {
			c[routerStatus] |= routerSlept
		} else {
			c[routerStatus] &^= routerSlept
		}
	case routerOp:
		if v&routerOpValid != 0 {
			v = v&0xffff | r.operate(uint16(v))
		}
	case routerTMUPost, routerTMUPost + 1:
		v = 0 // the time has been taken over at once
	}
	c[offset] = v
}

// operate does a router operation and returns its status bits.
func (r *router) operate(op uint16) uint32 {
	switch {
	case op == opBufferAllocation:
		r.config[routerMeta] = uint32(len(bufferAllocation))
		copy(r.config[routerData:], bufferAllocation)
		return 0
	case op == opReadDROM && r.node.hub != nil:
		return r.readDROM()
	}
	return routerOpNone
}

func (r *router) pathCounters() []PathCounters {
	var all []PathCounters
	for _, a := range r.adapters[1:] {
		for i := range a.paths {
			p := &a.paths[i]
			if !p.used {
				continue
			}
			all = append(all, PathCounters{
				Adapter: a.number, Hop: i, OutAdapter: p.outAdapter(), OutHop: int(p.outHop()), Enabled: p.enabled(),
				Frames: p.frames, Bytes: p.bytes, DroppedFrames: p.dropped, InitialCredits: int(p.words[0] >> pathCreditShift & 0x7f),
			})
		}
	}
	return all
}
