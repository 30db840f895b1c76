//go:build linux

package usb4

import "time"

// Counters are all counters of a fabric, at one moment: nothing moves between
// the first and the last of them. They count from New on, over reboots of the
// guests.
type Counters struct {
	Hosts  []HostCounters
	Hubs   []HubCounters
	Cables []CableCounters
}

// HubCounters are those of one hub.
type HubCounters struct {
	Name string
	// Paths are by hop of each path through it, as those of hosts.
	Paths []PathCounters
}

// HostCounters are those of one host.
type HostCounters struct {
	Name string
	// TX and RX are by ring; ring 0 is control.
	TX, RX []RingCounters
	// Ports are by port: what went out to its cable and came in from it.
	Ports []PortCounters
	// Paths are the enabled entries of the path configuration spaces, and those
	// that have been: one for each hop of each path through this router.
	Paths []PathCounters
	// Interrupts are by MSI-X vector: those that were sent.
	Interrupts [numVectors]uint64
	// Throttled counts the interrupts that were put off by throttling; those
	// that came together count once each.
	Throttled uint64
	Control   ControlCounters
	// Attached counts the clients (virtual machines) that have come, Resets the
	// resets of the host router and of the PCI function.
	Attached, Resets uint64
}

// RingCounters are those of one ring.
type RingCounters struct {
	// Frames and Bytes are those of descriptors that were completed: sent, for
	// a transmit ring, whatever became of them on the way; received, for a
	// receive ring.
	Frames, Bytes uint64
	// Interrupts counts how often the ring raised its interrupt.
	Interrupts uint64
	// Held counts how often a transmit ring stopped for want of the receiver's
	// buffers (end to end flow control); Paced how often for the cable's rate.
	Held, Paced uint64
	// CRCErrors and Overruns count frames that were received with these flags,
	// Corrupted those in which a bit was flipped and no flag says so.
	CRCErrors, Overruns, Corrupted uint64
	// Dropped are frames that did not arrive: counted with the ring that sent
	// them when there was no ring to receive them, else with that one.
	Dropped Drops
}

// Drops are lost frames by cause.
type Drops struct {
	NoPath   uint64 // no enabled path leads on from there
	LinkDown uint64 // the cable is unplugged, the peer is off, the lanes train
	RingOff  uint64 // the path ends at a ring that is not enabled
	NoBuffer uint64 // the receive ring had no buffer, and no flow control
	PDF      uint64 // start or end of frame is none that the receive ring takes
	DMA      uint64 // descriptor or buffer is not in the guest's memory
	Injected uint64 // WireOptions.Loss
}

// Total returns all of them.
func (d Drops) Total() uint64 {
	return d.NoPath + d.LinkDown + d.RingOff + d.NoBuffer + d.PDF + d.DMA + d.Injected
}

// PortCounters are those of one port.
type PortCounters struct {
	OutFrames, OutBytes uint64
	InFrames, InBytes   uint64
	OutPackets          uint64 // control packets
	InPackets           uint64
	Plugs, Unplugs      uint64 // events that were sent to the driver
}

// PathCounters are those of one entry of a path configuration space.
type PathCounters struct {
	Adapter, Hop   int // where frames come in
	OutAdapter     int // where they go to
	OutHop         int
	Enabled        bool
	Frames, Bytes  uint64
	DroppedFrames  uint64
	InitialCredits int
}

// ControlCounters are those of a host's control channel.
type ControlCounters struct {
	Requests  uint64 // READ and WRITE of the driver that were answered
	Errors    uint64 // errors that were answered
	Events    uint64 // plug and unplug events sent, repeats included
	Acks      uint64 // of events
	XDomain   uint64 // packets that were sent on to another domain
	BadCRC    uint64
	Malformed uint64
	Dropped   uint64 // the driver did not take them in time
}

// CableCounters are those of one cable.
type CableCounters struct {
	A, B string // the ports it joins, "host.0"
	Up   bool   // plugged, and the lanes of both ends are up
	// AtoB and BtoA are the directions.
	AtoB, BtoA WireCounters
	Flaps      uint64 // how often it was unplugged
}

// WireCounters are those of one direction of a cable. Sent is the sum of
// Delivered, Lost, DroppedAfter and InFlight.
type WireCounters struct {
	Sent, SentBytes uint64
	// Delivered frames came out at the other end, injected faults and all;
	// what became of them there, the rings know.
	Delivered, DeliveredBytes uint64
	// What was injected, and how many frames it was decided for. Of Injection's
	// Every it is exactly the Every-th part, rounded down, of what was judged
	// since it was set.
	Lost, Corrupted, CorruptedFlagged, Overrun uint64
	Judged                                     Judged
	// DroppedAfter were under way when the cable was cut.
	DroppedAfter uint64
	InFlight     uint64
	Control      uint64 // control packets
	// How a rate was kept: a wire with a rate that has sent n bits since the first
	// has taken n/rate, Idle and Missed for it, and as much as it is late now.
	Idle   time.Duration // between frames, with nothing to send or no buffer to send it to
	Missed time.Duration // never made up for: the machine did not let us run for too long, or nothing was left to send
	Late   time.Duration // the most that it was behind its rate since the rate was set
}

// Judged counts, for each injection, the frames that it was decided for while it
// was on: those that set out, for Loss; those that have arrived in a buffer, for
// the others. An injection that is off judges none, so the difference between
// before it was set and after it was taken back is exact, whatever else crosses
// the cable.
type Judged struct{ Loss, Corrupt, CorruptFlagged, Overrun uint64 }
