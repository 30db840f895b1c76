//go:build linux

package usb4

import (
	"fmt"
	"time"
)

// eventRepeat is how often a hotplug event is sent until the driver has
// acknowledged it: the notification time-out that the driver sets
// (switch.c, tb_switch_configure).
const eventRepeat = 255 * time.Millisecond

// Port is a USB4 port of a host or a hub: two lane adapters and the receptacle.
type Port struct {
	node  *node
	index int
	lanes [2]*adapter
	cable *Cable
	end   int // of the cable

	resetting bool   // downstream port reset is asserted
	up        bool   // the lanes are up
	trained   *event // when they will be

	// Events that the driver has not acknowledged, the first of them sent or to
	// be sent; told is what it knows after them.
	events []bool // true: plugged
	told   bool
	repeat *event

	counters PortCounters
}

func newPort(n *node, index int) *Port {
	p := &Port{node: n, index: index}
	for i := range p.lanes {
		p.lanes[i] = n.router.adapters[2*index+1+i]
		p.lanes[i].port = p
		p.lanes[i].reset()
	}
	p.trained = newEvent(func(time.Duration) { p.linkUp() })
	p.repeat = newEvent(func(time.Duration) { p.sendEvent() })
	return p
}

// Host returns the host, or nil if it is a port of a hub.
func (p *Port) Host() *Host { return p.node.host }

// Hub returns the hub, or nil if it is a port of a host.
func (p *Port) Hub() *Hub { return p.node.hub }

// Index returns the number of the port, from 0.
func (p *Port) Index() int { return p.index }

// Adapter returns the number of the port's first lane adapter: what the driver
// calls the port, and the route to what is behind it.
func (p *Port) Adapter() int { return p.lanes[0].number }

// Cable returns the cable in the port, plugged or not, or nil.
func (p *Port) Cable() *Cable {
	p.node.fabric.mu.Lock()
	defer p.node.fabric.mu.Unlock()
	return p.cable
}

// String returns "host.0".
func (p *Port) String() string { return fmt.Sprintf("%s.%d", p.node.name, p.index) }

func (p *Port) peer() *Port { return p.cable.ends[1-p.end] }
func (p *Port) wire() *wire { return &p.cable.wires[p.end] }

func (p *Port) sent(n int) {
	p.counters.OutFrames++
	p.counters.OutBytes += uint64(n)
}

func (p *Port) received(n int) {
	p.counters.InFrames++
	p.counters.InBytes += uint64(n)
}

// ready reports whether this end lets the lanes come up.
func (p *Port) ready() bool {
	return p.node.powered(p) && !p.resetting && p.lanes[0].config[laneState]&laneDisable == 0
}

// train has the lanes come up after a while, if both ends let them.
func (p *Port) train(now time.Duration) {
	if p.up || p.cable == nil || !p.cable.in || !p.ready() || !p.peer().ready() {
		return
	}
	first := p.cable.ends[0] // one of the two waits for both
	t := now + p.cable.training()
	for _, e := range p.cable.ends {
		e.lanes[0].showLane(stateTraining, widthSingle, Gen2)
	}
	p.node.fabric.schedule.at(first.trained, t)
}

// linkUp is the end of training.
func (p *Port) linkUp() {
	c := p.cable
	if p.up || !c.in || !p.ready() || !p.peer().ready() {
		return
	}
	lanes, speed := c.lanes()
	p.node.fabric.note(p.node, p, "link to %s up, %d lanes of %d Gb/s", p.peer(), lanes, speed.Gbps())
	for _, e := range c.ends {
		e.up = true
		e.showLanes(lanes, speed, speed == Gen4)
		e.tell(true)
	}
	p.node.fabric.rewired()
	p.node.fabric.tell()
	for _, e := range c.ends {
		if e.leadsUp() {
			e.node.hub.plugged()
		}
	}
}

// showLanes sets what the lane adapters say while the link is up.
func (p *Port) showLanes(lanes int, speed Generation, bonded bool) {
	width := uint32(widthSingle)
	info := uint32(portPlugged)
	if bonded {
		width = widthDual
		info |= portBonded
	}
	p.lanes[0].showLane(stateUp, width, speed)
	p.lanes[0].config[portInfo] = info
	second := uint32(stateUnplugged)
	if lanes == 2 {
		second = stateUp
	}
	for _, e := range p.cable.ends {
		if e.lanes[1].config[laneState]&laneDisable != 0 && lanes == 2 {
			second = stateUnplugged // the other end has switched it off
		}
	}
	if p.lanes[1].config[laneState]&laneDisable != 0 {
		second = stateDisabled
	}
	p.lanes[1].showLane(second, width, speed)
}

// bonded reports whether the two lanes are one.
func (p *Port) bonded() bool { return p.lanes[0].config[laneState]>>laneWidthShift&0x3f == widthDual }

// down takes the link down at both ends, and tells both drivers.
func (p *Port) down() {
	f := p.node.fabric
	c := p.cable
	if c == nil {
		return
	}
	f.schedule.cancel(c.ends[0].trained)
	was := p.up
	for _, e := range c.ends {
		e.up = false
		e.showDown()
	}
	if !was {
		return
	}
	f.note(p.node, p, "link to %s down", p.peer())
	for i := range c.wires {
		f.cut(&c.wires[i])
	}
	for _, e := range c.ends {
		e.tell(false)
	}
	f.rewired()
	f.tell()
	for _, e := range c.ends {
		if e.leadsUp() {
			e.node.hub.unplugged()
		}
	}
}

// leadsUp reports whether it is the upstream port of a hub.
func (p *Port) leadsUp() bool { return p.node.hub != nil && p.index == 0 }

func (p *Port) showDown() {
	for i, a := range p.lanes {
		state := uint32(stateUnplugged)
		if a.config[laneState]&laneDisable != 0 {
			state = stateDisabled
		}
		a.showLane(state, widthSingle, min(p.node.options.Speed, Gen3))
		a.config[adapterBuffers] |= adapterLocked
		if i == 0 {
			a.config[portInfo] = 0
		}
	}
}

// reset is that of the whole router.
func (p *Port) reset(now time.Duration) {
	p.forget()
	p.down()
	p.resetting = false
	if p.cable != nil {
		p.train(now)
	}
}

// laneWritten is called when the driver has written the state of a lane.
func (p *Port) laneWritten(a *adapter, was uint32) {
	now := a.config[laneState]
	if (was^now)&laneDisable != 0 && !a.second {
		if now&laneDisable != 0 {
			p.down()
			p.showDown()
		} else {
			p.showDown()
			p.train(p.node.fabric.clock.Now())
		}
		return
	}
	if !p.up {
		if p.cable == nil || p.cable.ends[0].trained.index < 0 {
			p.showDown()
		}
		return
	}
	lanes, speed := p.cable.lanes()
	bonded := p.bonded() || p.bonds(lanes)
	for _, e := range p.cable.ends {
		if bonded {
			e.lanes[0].config[laneState] &^= laneBond
		}
		e.showLanes(lanes, speed, bonded)
	}
}

// bonds reports whether one end has asked for the lanes to be bonded and all
// four lane adapters are set to it (USB4 specification, 4.2.2.2).
func (p *Port) bonds(lanes int) bool {
	asked := false
	for _, e := range p.cable.ends {
		asked = asked || e.lanes[0].config[laneState]&laneBond != 0
		for _, a := range e.lanes {
			if s := a.config[laneState]; s&laneTargetMask != laneTargetDual || s&laneDisable != 0 {
				return false
			}
		}
	}
	if asked && lanes == 2 {
		p.node.fabric.note(p.node, p, "lanes bonded with %s", p.peer())
		return true
	}
	return false
}

// portWritten is called when the driver has written the port's control.
func (p *Port) portWritten(was, now uint32) {
	if was&portReset == 0 && now&portReset != 0 {
		p.node.fabric.note(p.node, p, "downstream port reset")
		p.resetting = true
		p.forget() // the driver that resets a port knows that nothing is there
		p.down()
	}
	if was&portReset != 0 && now&portReset == 0 {
		p.resetting = false
		p.train(p.node.fabric.clock.Now())
	}
}

// tell queues an event for the driver. A plug that was not sent yet and is not
// true any more is not told.
func (p *Port) tell(plugged bool) {
	if p.told == plugged || p.leadsUp() { // of its own upstream port, a hub says nothing
		return
	}
	p.told = plugged
	n := len(p.events)
	if sending := n == 1 && p.repeat.index >= 0; !plugged && n > 0 && p.events[n-1] && !sending {
		p.events = p.events[:n-1]
		return
	}
	p.events = append(p.events, plugged)
	bit := uint32(portWakePlug)
	if !plugged {
		bit = portWakeUnplug
	}
	if p.lanes[0].config[portCtl]&bit != 0 && p.node.wake() {
		p.node.fabric.note(p.node, p, "wake")
	}
	if len(p.events) == 1 {
		p.sendEvent()
	}
}

// listen is called when the driver wants to hear of the port from now on: what
// is there already is news to it.
func (p *Port) listen() {
	p.forget()
	if p.up {
		p.tell(true)
	}
}

// forget drops what was to be told.
func (p *Port) forget() {
	p.events, p.told = nil, false
	p.node.fabric.schedule.cancel(p.repeat)
}

// hears reports whether the driver takes events of this port.
func (p *Port) hears() bool {
	return p.node.listening() && p.node.router.enumerated() && p.lanes[0].config[adapterHops]&adapterNoEvent == 0
}

// sendEvent sends the first event, and again after a while.
func (p *Port) sendEvent() {
	if len(p.events) == 0 || !p.hears() {
		return // portsListen comes back to it
	}
	if p.events[0] {
		p.counters.Plugs++
	} else {
		p.counters.Unplugs++
	}
	p.node.sendEvent(p.lanes[0].number, !p.events[0])
	f := p.node.fabric
	f.schedule.at(p.repeat, f.clock.Now()+eventRepeat)
}

// acknowledged is called when the driver has acknowledged an event.
func (p *Port) acknowledged(unplug bool) {
	if len(p.events) == 0 || p.events[0] == unplug || p.repeat.index < 0 {
		return
	}
	p.node.fabric.schedule.cancel(p.repeat)
	p.events = p.events[1:]
	p.sendEvent()
}

// portsListen has the ports send what they have not, now that the driver may
// hear it.
func (n *node) portsListen() {
	for _, p := range n.ports {
		if len(p.events) > 0 && p.repeat.index < 0 {
			p.sendEvent()
		}
	}
}
