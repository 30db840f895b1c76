package rig

import (
	"context"
	"errors"
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

// Behaviour says in words how the cable treats what one of its ports sends:
// "perfect", or what it does.
func (c *Cable) Behaviour(from *usb4.Port) string {
	o := c.Options()
	o.WireOptions = c.Wire(from)
	inject := func(i usb4.Injection) Injection { return Injection{Every: i.Every, Probability: i.Probability} }
	return CableOptions{
		Rate: Rate(o.Rate), Latency: Duration(o.Latency),
		Loss: inject(o.Loss), Corrupt: inject(o.Corrupt), CorruptFlagged: inject(o.CorruptFlagged), Overrun: inject(o.Overrun),
		TrainedLanes: o.Lanes, TrainedGen: int(o.Speed), Training: Duration(o.Training),
	}.String()
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

// silently takes network interfaces down while cables lose all frames, but not the
// packets by which hosts log out from each other. A frame that arrives meanwhile
// brings out a fault of Linux (seen in 7.3): tbnet_stop() disables NAPI before it
// logs out; an interrupt in between has __ring_interrupt() mask the ring's
// interrupt for a poll that never comes to unmask it, and tb_ring_stop() warns that
// it "is already disabled".
func (r *Rig) silently(ctx context.Context, cables []*Cable, f func() error) error {
	type direction struct {
		cable *Cable
		from  *usb4.Port
		was   usb4.WireOptions
	}
	var all []direction
	var errs []error
	for _, c := range cables {
		a, b := c.Cable.Ends()
		for _, p := range []*usb4.Port{a, b} {
			d := direction{cable: c, from: p, was: c.Cable.Wire(p)}
			o := d.was
			o.Loss = usb4.Injection{Every: 1}
			errs = append(errs, c.Cable.SetWire(p, o))
			all = append(all, d)
		}
	}
	err := r.Await(ctx, "wait for the frames that are under way", func() string {
		for _, c := range cables {
			if n := c.Counters(); n.AtoB.InFlight+n.BtoA.InFlight > 0 {
				return c.String() + " has some"
			}
		}
		return ""
	})
	if err == nil {
		err = f()
	}
	errs = append(errs, err)
	for i := len(all) - 1; i >= 0; i-- { // a cable may be there more than once
		errs = append(errs, all[i].cable.Cable.SetWire(all[i].from, all[i].was))
	}
	return errors.Join(errs...)
}
