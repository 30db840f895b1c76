package rig

import (
	"context"
	"time"

	"tbcluster/rig/usb4"
)

// Cable is a cable between two hosts. What usb4.Cable says of it holds; Plug,
// Unplug and Flap have the rig know besides what is to be seen at its ends.
type Cable struct {
	*usb4.Cable
	rig   *Rig
	index int
	spec  CableSpec
	// With the lock of the rig: what the lanes came up with, or will.
	lanes int
	speed usb4.Generation
}

// Spec returns the ports and the options that it began with.
func (c *Cable) Spec() CableSpec { return c.spec }

// Plug puts the cable in.
func (c *Cable) Plug() {
	c.trained()
	c.Cable.Plug()
}

// Unplug pulls it at both ends.
func (c *Cable) Unplug() {
	c.rig.hosts[0].mark(c)
	c.Cable.Unplug()
}

// Flap pulls it and puts it in again after a time.
func (c *Cable) Flap(ctx context.Context, out time.Duration) error {
	c.rig.hosts[0].mark(c)
	return c.Cable.Flap(ctx, out)
}

// Counters returns the counters of the cable.
func (c *Cable) Counters() usb4.CableCounters { return c.rig.fabric.Counters().Cables[c.index] }

// trained notes what the lanes come up with the next time.
func (c *Cable) trained() {
	lanes, speed := c.would()
	c.rig.mu.Lock()
	defer c.rig.mu.Unlock()
	c.lanes, c.speed = lanes, speed
}

// up returns what the lanes came up with.
func (c *Cable) up() (lanes int, speed usb4.Generation) {
	c.rig.mu.Lock()
	defer c.rig.mu.Unlock()
	return c.lanes, c.speed
}

// would returns what the lanes would come up with now.
func (c *Cable) would() (lanes int, speed usb4.Generation) {
	o := c.Cable.Options()
	lanes, speed = 2, usb4.Gen4
	if o.Lanes != 0 {
		lanes = o.Lanes
	}
	if o.Speed != 0 {
		speed = o.Speed
	}
	for _, e := range c.ends() {
		l, s := e.host.spec.Lanes, e.host.spec.Speed
		if l == 0 {
			l = 2
		}
		if s == 0 {
			s = usb4.Gen3
		}
		lanes, speed = min(lanes, l), min(speed, s)
	}
	if speed == usb4.Gen4 && lanes < 2 { // as usb4 has it: there is no such link
		speed = usb4.Gen3
	}
	return lanes, speed
}

// end is a host and its port.
type end struct {
	host *Host
	port int
}

func (e end) device() string { return e.host.Device(e.port) }

// ends returns both ends.
func (c *Cable) ends() [2]end {
	a, b := c.Cable.Ends()
	find := func(p *usb4.Port) end {
		for _, h := range c.rig.hosts {
			if h.router == p.Host() {
				return end{h, p.Index()}
			}
		}
		return end{} // no cable leads out of the rig
	}
	return [2]end{find(a), find(b)}
}

func (c *Cable) has(h *Host) bool {
	e := c.ends()
	return e[0].host == h || e[1].host == h
}
