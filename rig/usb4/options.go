//go:build linux

package usb4

import (
	"fmt"
	"log/slog"
	"time"

	"tbcluster/api/fault"
)

// Options are those of a fabric. The zero value is a fabric with the machine's
// clock and the seed 0.
type Options struct {
	// Seed decides what every cable loses and corrupts by probability. The same
	// seed, hosts, cables and traffic give the same losses.
	Seed uint64
	// Clock is time; nil is the machine's.
	Clock Clock
	// Log hears of what is odd: memory that is not mapped, packets that make no
	// sense. nil is silence.
	Log *slog.Logger
}

// Generation is a speed of a lane.
type Generation int

// The generations of the lanes of USB4.
const (
	Gen2 Generation = 2 // 10 Gb/s a lane
	Gen3 Generation = 3 // 20 Gb/s a lane
	Gen4 Generation = 4 // 40 Gb/s a lane, USB4 version 2, always two lanes
)

// Gbps returns the speed of one lane in Gb/s.
func (g Generation) Gbps() int {
	switch g {
	case Gen2:
		return 10
	case Gen3:
		return 20
	case Gen4:
		return 40
	}
	return 0
}

// HostOptions are those of a host router. Zero values stand for what is said
// with each.
type HostOptions struct {
	// Name is how trace, log and counters call the host. It is required, and
	// unique in the fabric.
	Name string
	// UID is the 64 bits from which the driver makes the UUID of the host; 0 is
	// made from the fabric's seed and the name.
	UID uint64
	// Ports is the number of USB4 ports, 1 to 15; 0 is 1. Port i has the lane
	// adapters 2i+1 and 2i+2; sysfs calls what is behind it 0-(2i+1).
	Ports int
	// Lanes is 1 or 2 lanes for each port; 0 is 2.
	Lanes int
	// Version is the version of USB4, 1 or 2; 0 is 1. Version 2 has the host
	// reset, and Gen4 if Speed says so.
	Version int
	// Speed is the fastest that a lane can do; 0 is Gen3.
	Speed Generation
	// Hops is the number of transmit rings, and of receive rings, of the host
	// interface, ring 0 for control included: 2 to 21; 0 is 12.
	Hops int
	// Vendor and Device are the PCI IDs; 0 is 1d6b:4001. Intel's vendor ID makes
	// the driver go other ways, and is refused.
	Vendor, Device uint16
}

func (o *HostOptions) complete(seed uint64) error {
	bad := func(format string, args ...any) error {
		return fault.Newf(fault.Usage, "correct it in the topology", "host "+o.Name+" is not set up right: "+format, args...)
	}
	if o.Name == "" {
		return fault.Newf(fault.Usage, "give each host a name", "a host without a name")
	}
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&o.Ports, 1)
	def(&o.Lanes, 2)
	def(&o.Version, 1)
	def(&o.Hops, 12)
	if o.Speed == 0 {
		o.Speed = Gen3
	}
	if o.Vendor == 0 {
		o.Vendor = 0x1d6b
	}
	if o.Device == 0 {
		o.Device = 0x4001
	}
	if o.UID == 0 {
		o.UID = uidOf(seed, o.Name)
	}
	switch {
	case o.Ports < 1 || o.Ports > maxPorts:
		return bad("%d ports, not 1 to %d", o.Ports, maxPorts)
	case o.Lanes != 1 && o.Lanes != 2:
		return bad("%d lanes, not 1 or 2", o.Lanes)
	case o.Version != 1 && o.Version != 2:
		return bad("USB4 version %d, not 1 or 2", o.Version)
	case o.Hops < 2 || o.Hops > maxHops:
		return bad("%d hops, not 2 to %d", o.Hops, maxHops)
	case o.Speed.Gbps() == 0:
		return bad("generation %d, not 2, 3 or 4", o.Speed)
	case o.Speed == Gen4 && (o.Version != 2 || o.Lanes != 2):
		return bad("generation 4 needs version 2 and two lanes")
	case o.Vendor == vendorIntel:
		return bad("the vendor ID of Intel")
	}
	return nil
}

// CableOptions say how a cable behaves. The zero value is a perfect cable: no
// limit, no delay, no loss, all that both ends can do.
type CableOptions struct {
	// WireOptions hold for both directions; Cable.SetWire changes one.
	WireOptions
	// Lanes is how many lanes come up, 1 or 2; 0 is as many as both ends have.
	Lanes int
	// Speed is the generation that the lanes train to; 0 is the fastest that
	// both ends can do.
	Speed Generation
	// Training is how long lanes take to come up after a plug or a reset; 0 is
	// 100 ms, less than nothing is no time at all.
	Training time.Duration
	// Unplugged has Connect leave the cable unplugged.
	Unplugged bool
}

// WireOptions are those of one direction of a cable. Control packets are not
// subject to them.
type WireOptions struct {
	// Rate is the limit in bit/s of what the frames carry; 0 is none. Frames of
	// several rings take turns. The speed of the lanes sets no limit of its own.
	// Where the machine does not let us run in time, up to a second is made up
	// for, at no more than twice the rate but for 80 ms' worth at once: over any longer time the
	// rate is exact while there is something to send. WireCounters say how it was
	// kept.
	Rate int64
	// Latency is the time from a frame's last bit sent to its arrival, at most
	// MaxLatency.
	Latency time.Duration
	// Loss has frames vanish.
	Loss Injection
	// Corrupt flips one bit of a frame, silently: as no hardware should, but as
	// memory and firmware do.
	Corrupt Injection
	// CorruptFlagged flips one bit and has the receiver set the CRC error flag.
	CorruptFlagged Injection
	// Overrun has the receiver set the buffer overrun flag.
	Overrun Injection
}

// MaxLatency is that of a cable: what is on its way is in memory.
const MaxLatency = time.Minute

// Injection says which frames something is done to: every Every-th, and each
// with Probability besides. The zero value is none.
//
// Frames are counted from the moment at which it was set. Which of them are
// struck is decided by the seed of the fabric, the cable and the direction alone:
// the n-th frame fares the same in every run, whatever went before. To be set
// anew it has to be taken back first; setting what is set already changes nothing.
type Injection struct {
	Every       uint64
	Probability float64 // 0 to 1
}

func (i Injection) on() bool { return i.Every != 0 || i.Probability != 0 }

func (o CableOptions) check() error {
	bad := func(format string, args ...any) error {
		return fault.Newf(fault.Usage, "give the cable what there is, or leave it out for the best", "a cable is not set up right: "+format, args...)
	}
	if o.Lanes < 0 || o.Lanes > 2 {
		return bad("%d lanes, not 1 or 2", o.Lanes)
	}
	if o.Speed != 0 && o.Speed.Gbps() == 0 {
		return bad("generation %d, not 2, 3 or 4", o.Speed)
	}
	return o.WireOptions.check()
}

func (o WireOptions) check() error {
	if o.Rate < 0 {
		return fault.Newf(fault.Usage, "give a rate of 1 bit/s or more; 0 is no limit", "a cable cannot have a rate of %d bit/s", o.Rate)
	}
	if o.Latency < 0 || o.Latency > MaxLatency {
		return fault.Newf(fault.Usage, fmt.Sprintf("give a latency from 0 to %v", MaxLatency), "a cable cannot have a latency of %v", o.Latency)
	}
	for name, i := range map[string]Injection{"loss": o.Loss, "corruption": o.Corrupt, "flagged corruption": o.CorruptFlagged, "overrun": o.Overrun} {
		if !(i.Probability >= 0 && i.Probability <= 1) {
			return fault.Newf(fault.Usage, "give a probability from 0 to 1", "a cable cannot have a probability of %v for %s", i.Probability, name)
		}
	}
	return nil
}

// String returns a generation as people say it.
func (g Generation) String() string { return fmt.Sprintf("gen %d (%d Gb/s a lane)", int(g), g.Gbps()) }
