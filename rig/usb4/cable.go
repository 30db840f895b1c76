//go:build linux

package usb4

import (
	"context"
	"sync"
	"time"
)

// defaultTraining is how long lanes take to come up. It is longer than a driver
// takes from its first packet to the port resets with which it starts, so that
// the other end does not hear of a link that goes at once.
const defaultTraining = 100 * time.Millisecond

// Cable is a cable between two ports.
type Cable struct {
	fabric  *Fabric
	ends    [2]*Port
	options CableOptions
	in      bool
	wires   [2]wire // from ends[0] and from ends[1]
	flaps   uint64

	holding int // calls of Hold that have not ended
	held    []heldPacket
}

func newCable(f *Fabric, a, b *Port, o CableOptions) *Cable {
	c := &Cable{fabric: f, ends: [2]*Port{a, b}, options: o}
	a.cable, a.end = c, 0
	b.cable, b.end = c, 1
	for i := range c.wires {
		w := &c.wires[i]
		w.fabric, w.from, w.to = f, c.ends[i].index, c.ends[1-i].index
		w.number = uint64(len(f.cables))<<1 | uint64(i)
		w.turn = newEvent(func(now time.Duration) { f.serve(w, now) })
		w.landing = newEvent(func(now time.Duration) { f.land(w, now) })
		w.set(o.WireOptions, f.clock.Now())
	}
	return c
}

// Ends returns the two ports.
func (c *Cable) Ends() (a, b *Port) { return c.ends[0], c.ends[1] }

// Plug puts the cable in at both ends. Both drivers hear of it when the lanes
// are up.
func (c *Cable) Plug() {
	c.fabric.lock()
	defer c.fabric.unlock()
	c.plug(c.fabric.clock.Now())
}

func (c *Cable) plug(now time.Duration) {
	if c.in {
		return
	}
	c.in = true
	c.fabric.note(c.ends[0].node, c.ends[0], "cable to %s plugged", c.ends[1])
	c.ends[0].train(now)
}

// Unplug pulls the cable at both ends. What is under way is lost.
func (c *Cable) Unplug() {
	c.fabric.lock()
	defer c.fabric.unlock()
	c.unplug()
}

func (c *Cable) unplug() {
	if !c.in {
		return
	}
	c.in = false
	c.held = nil
	c.flaps++
	c.fabric.note(c.ends[0].node, c.ends[0], "cable to %s unplugged", c.ends[1])
	c.ends[0].down()
}

// Hold keeps back the packets by which two domains talk over the cable until
// release is called; then they go in their order. Hosts wait for answers for half a
// second and longer.
func (c *Cable) Hold() (release func()) {
	c.fabric.lock()
	c.holding++
	c.fabric.unlock()
	var once sync.Once
	return func() {
		once.Do(func() {
			c.fabric.lock()
			defer c.fabric.unlock()
			if c.holding--; c.holding > 0 {
				return
			}
			held := c.held
			c.held = nil
			for _, p := range held {
				p.to.take(p.packet)
			}
		})
	}
}

// Flap pulls the cable and plugs it in again after a time. It returns when it
// is plugged in, or with ctx's error; the cable is in at the end in any case.
func (c *Cable) Flap(ctx context.Context, out time.Duration) error {
	c.Unplug()
	defer c.Plug()
	done := make(chan struct{})
	e := newEvent(func(time.Duration) { close(done) })
	f := c.fabric
	f.lock()
	f.schedule.at(e, f.clock.Now()+out)
	f.unlock()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		f.lock()
		f.schedule.cancel(e)
		f.unlock()
		return ctx.Err()
	}
}

// Plugged reports whether the cable is plugged in.
func (c *Cable) Plugged() bool {
	c.fabric.mu.Lock()
	defer c.fabric.mu.Unlock()
	return c.in
}

// Up reports whether frames can cross: it is plugged in, both hosts are awake,
// and the lanes have trained.
func (c *Cable) Up() bool {
	c.fabric.mu.Lock()
	defer c.fabric.mu.Unlock()
	return c.ends[0].up
}

// Options returns the options, with those of the direction from the first end.
func (c *Cable) Options() CableOptions {
	c.fabric.mu.Lock()
	defer c.fabric.mu.Unlock()
	o := c.options
	o.WireOptions = c.wires[0].options
	return o
}

// SetOptions changes how the cable behaves, in both directions. Lanes, Speed
// and Training count from the next training on: Flap has one happen. Unplugged
// is not looked at. Injections count anew where they have changed.
func (c *Cable) SetOptions(o CableOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	c.fabric.lock()
	defer c.fabric.unlock()
	c.options = o
	for i := range c.wires {
		c.setWire(i, o.WireOptions)
	}
	return nil
}

// SetWire changes one direction: that of what from sends.
func (c *Cable) SetWire(from *Port, o WireOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	c.fabric.lock()
	defer c.fabric.unlock()
	for i, p := range c.ends {
		if p == from {
			c.setWire(i, o)
		}
	}
	return nil
}

// Wire returns the options of one direction: that of what from sends.
func (c *Cable) Wire(from *Port) WireOptions {
	c.fabric.mu.Lock()
	defer c.fabric.mu.Unlock()
	for i, p := range c.ends {
		if p == from {
			return c.wires[i].options
		}
	}
	return WireOptions{}
}

func (c *Cable) setWire(i int, o WireOptions) {
	w := &c.wires[i]
	now := c.fabric.clock.Now()
	w.set(o, now)
	c.fabric.serve(w, now)
	c.fabric.rewired() // of several cables on a way, the slowest sets the pace
}

// Counters returns the counters of the cable.
func (c *Cable) Counters() CableCounters {
	c.fabric.mu.Lock()
	defer c.fabric.mu.Unlock()
	return c.counters()
}

func (c *Cable) counters() CableCounters {
	k := CableCounters{A: c.ends[0].String(), B: c.ends[1].String(), Up: c.ends[0].up, AtoB: c.wires[0].counters, BtoA: c.wires[1].counters, Flaps: c.flaps}
	k.AtoB.InFlight, k.BtoA.InFlight = uint64(c.wires[0].flying()), uint64(c.wires[1].flying())
	return k
}

// String returns "a.0 - b.1".
func (c *Cable) String() string { return c.ends[0].String() + " - " + c.ends[1].String() }

// Trains returns how many lanes come up the next time that they train, and how
// fast.
func (c *Cable) Trains() (lanes int, speed Generation) {
	c.fabric.mu.Lock()
	defer c.fabric.mu.Unlock()
	return c.lanes()
}

// lanes returns how many lanes come up, and how fast.
func (c *Cable) lanes() (n int, speed Generation) {
	a, b := c.ends[0].node.options, c.ends[1].node.options
	n, speed = min(a.Lanes, b.Lanes), min(a.Speed, b.Speed)
	if c.options.Speed != 0 {
		speed = min(speed, c.options.Speed)
	}
	if c.options.Lanes != 0 {
		n = min(n, c.options.Lanes)
	}
	if speed == Gen4 && n < 2 { // there is no such link
		speed = Gen3
	}
	return n, speed
}

func (c *Cable) training() time.Duration {
	switch t := c.options.Training; {
	case t == 0:
		return defaultTraining
	case t < 0:
		return 0
	default:
		return t
	}
}
