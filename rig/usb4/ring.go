//go:build linux

package usb4

import (
	"sync/atomic"
	"unsafe"
)

// Options of a ring, and of a descriptor (drivers/thunderbolt/nhi_regs.h).
const (
	optionEnable   = 1 << 31
	optionRaw      = 1 << 30
	optionE2E      = 1 << 28
	optionHopShift = 12
	optionHopMask  = 0x7ff

	descriptorSize = 16
	descLength     = 0xfff // of its third dword; 0 is 4096
	descEOFShift   = 12
	descSOFShift   = 16
	descFlagShift  = 20
	descCRCError   = 1 << descFlagShift // receive
	descCompleted  = 2 << descFlagShift
	descOverrun    = 4 << descFlagShift // receive
	descInterrupt  = 8 << descFlagShift

	maxFrame      = 4096
	descriptorMax = 1 << 16
)

// ring is a transmit or a receive ring. Indices are in the ring of descriptors:
// of a transmit ring the driver moves prod and the device cons; of a receive
// ring it is the other way round, and the free buffers are from prod to cons.
type ring struct {
	host      *Host
	number    int
	transmits bool
	bit       uint64 // in the interrupt registers

	base       uint64
	size       uint32 // descriptors
	frameSize  uint32 // of a receive ring, 0 is 4096
	prod, cons uint32
	options    uint32
	mask       uint32 // start of frame << 16 | end of frame, that are taken

	table []byte // the descriptors in the guest's memory
	epoch uint64 // of the memory in which table was looked up; 0: not

	generation uint32 // counts resets: what was under way to an older one is lost
	reserved   uint32 // buffers that frames under way will take

	route  route  // of a transmit ring
	wired  uint64 // wiring in which route was resolved
	lining *wire  // the wire whose turn it waits for
	// What was decided of the next frame, while it waits.
	verdict verdict
	heldBy  *ring // the receive ring whose buffers it waits for
	holds   []*ring

	faulty   bool // it was said that its memory is not there
	counters RingCounters
}

// verdict is whether a frame is to be lost: lostOn is on the first cable of its
// way, one more on the next.
type verdict uint8

const (
	undecided verdict = iota
	passes
	lostOn
)

func (r *ring) enabled() bool { return r.options&optionEnable != 0 && r.size != 0 }
func (r *ring) e2e() bool     { return r.options&optionE2E != 0 }
func (r *ring) raw() bool     { return r.options&optionRaw != 0 }

// free returns how many buffers of a receive ring no frame has or will take.
func (r *ring) free() int {
	n := int(r.cons) - int(r.prod)
	if n < 0 {
		n += int(r.size)
	}
	return n - int(r.reserved)
}

func (r *ring) reset() {
	r.stop()
	r.base, r.size, r.frameSize, r.options, r.mask = 0, 0, 0, 0, 0
}

// stop forgets what the ring was doing.
func (r *ring) stop() {
	r.prod, r.cons, r.reserved, r.epoch = 0, 0, 0, 0
	r.verdict = undecided
	r.generation++
	if r.lining != nil {
		r.lining.leave(r)
	}
	if r.heldBy != nil {
		r.heldBy.letGo(r)
	}
}

func (r *ring) readRegister(options bool, place uint32) uint32 {
	if options {
		switch place {
		case ringOptions:
			return r.options
		case ringMask:
			return r.mask
		}
		return 0
	}
	switch place {
	case ringBase:
		return uint32(r.base)
	case ringBaseHi:
		return uint32(r.base >> 32)
	case ringIndices: // the consumer is low, the producer high, for both kinds
		return r.cons | r.prod<<16
	case ringSize:
		return r.size | r.frameSize<<16
	}
	return 0
}

func (r *ring) writeRegister(options bool, place, v uint32) {
	f := r.host.fabric
	if options {
		switch place {
		case ringOptions:
			r.setOptions(v)
		case ringMask:
			r.mask = v
		}
		return
	}
	switch place {
	case ringBase:
		r.base, r.epoch = r.base&^0xffffffff|uint64(v&^(descriptorSize-1)), 0
	case ringBaseHi:
		r.base, r.epoch = r.base&0xffffffff|uint64(v)<<32, 0
	case ringIndices:
		if !r.enabled() {
			return
		}
		if r.transmits {
			r.prod = (v >> 16) % r.size
			r.host.dirtyTX |= 1 << r.number
		} else {
			r.cons = (v & 0xffff) % r.size
			r.host.dirtyRX |= 1 << r.number
		}
	case ringSize:
		was := r.enabled()
		r.size, r.epoch = v&0xffff, 0
		if !r.transmits {
			r.frameSize = v >> 16
		}
		if r.prod, r.cons = 0, 0; was != r.enabled() {
			f.rewired()
		}
	}
}

func (r *ring) setOptions(v uint32) {
	was := r.options
	if r.transmits && r.enabled() && v&optionEnable == 0 {
		// What doorbells have asked for before, which Settle has not come to
		// yet: a device that takes them one by one would have sent it.
		r.host.fabric.transmit(r)
	}
	r.options = v
	if (was^v)&optionEnable != 0 {
		r.stop()
	}
	if was == v {
		return
	}
	f := r.host.fabric
	if r.number == 0 {
		r.host.controlRing()
	}
	f.rewired()
}

// descriptors returns the ring's descriptors, nil if they are not in the
// guest's memory.
func (r *ring) descriptors() []byte {
	m := r.host.hold()
	if e := m.Epoch() + 1; r.epoch != e {
		r.table, r.epoch = m.At(r.base, int(r.size)*descriptorSize, true), e
	}
	return r.table
}

// descriptor is one of a ring, in the guest's memory, which the guest may write
// at the same time.
type descriptor []byte

func (d descriptor) address() uint64 { return le.Uint64(d) }

// word returns the third dword: length, end and start of frame, flags.
func (d descriptor) word() uint32 { return atomic.LoadUint32((*uint32)(unsafe.Pointer(&d[8]))) }

// finish writes the third dword, after everything else that was written.
func (d descriptor) finish(w uint32) { atomic.StoreUint32((*uint32)(unsafe.Pointer(&d[8])), w) }

func at(table []byte, i uint32) descriptor {
	return descriptor(table[i*descriptorSize:][:descriptorSize:descriptorSize])
}

// sizeOf returns the length that a descriptor's third dword gives.
func sizeOf(w uint32) int {
	if n := int(w & descLength); n != 0 {
		return n
	}
	return maxFrame
}

func (r *ring) next(i uint32) uint32 {
	if i++; i == r.size {
		return 0
	}
	return i
}

// letGo takes a transmit ring off the list of those that wait for buffers.
func (r *ring) letGo(tx *ring) {
	for i, w := range r.holds {
		if w == tx {
			r.holds = append(r.holds[:i], r.holds[i+1:]...)
			break
		}
	}
	tx.heldBy = nil
}

// holdBack has a transmit ring wait for buffers of this one.
func (r *ring) holdBack(tx *ring) {
	if tx.heldBy == r {
		return
	}
	if tx.heldBy != nil {
		tx.heldBy.letGo(tx)
	}
	tx.heldBy = r
	tx.counters.Held++
	r.holds = append(r.holds, tx)
}
