package rig

import (
	"context"
	"slices"
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
	link  *link // nil where it leads to a hub of the host at its other end
	// With the lock of the rig: what the lanes came up with, or will.
	lanes int
	speed usb4.Generation
}

// Spec returns the ports and the options that it began with.
func (c *Cable) Spec() CableSpec { return c.spec }

// Plug puts the cable in.
func (c *Cable) Plug() {
	c.trained()
	for _, l := range c.rig.links { // what is behind a hub trains with it
		if slices.Contains(l.cables, c) {
			l.last().trained()
		}
	}
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
	lanes, speed := c.Trains()
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

// ends returns both ends as hosts show them; without hosts where a hub has none,
// or is at one end itself.
func (c *Cable) ends() [2]end {
	if c.link == nil {
		return [2]end{}
	}
	return c.link.ends
}
