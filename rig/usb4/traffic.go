//go:build linux

package usb4

import (
	"fmt"
	"time"
)

// transmit sends what a transmit ring has, as far as it can go now.
func (f *Fabric) transmit(r *ring) {
	if !r.enabled() || r.cons == r.prod || !r.host.mastering() {
		return
	}
	if r.number == 0 {
		r.host.transmitControl()
		return
	}
	if r.lining != nil { // it sends when its turn comes
		f.serve(r.lining, f.clock.Now())
		return
	}
	rt := f.routeOf(r)
	if w := rt.wire; w != nil && rt.slow() {
		now := f.clock.Now()
		w.join(r, now)
		r.counters.Paced++
		f.serve(w, now)
		return
	}
	f.carry(r, rt, 1<<16, 0)
}

// buffers is called when the driver has given buffers to a receive ring.
func (f *Fabric) buffers(r *ring) {
	if r.number == 0 {
		r.host.deliverControl()
		return
	}
	if len(r.holds) == 0 || !r.enabled() {
		return
	}
	waiting := r.holds
	r.holds = nil
	for _, tx := range waiting {
		tx.heldBy = nil
	}
	for _, tx := range waiting {
		f.transmit(tx)
	}
	if r.holds == nil {
		r.holds = waiting[:0]
	}
}

// carry sends up to limit frames of a ring by a route, and returns how many
// bytes. It stops early when the receiver has no buffer and the ring is to wait
// for one, or when there is something wrong with the ring.
func (f *Fabric) carry(r *ring, rt *route, limit int, arrival time.Duration) (bytes int) {
	table := r.descriptors()
	if table == nil {
		r.host.starve()
		f.fault(r, r.base, int(r.size)*descriptorSize)
		return 0
	}
	mem := r.host.client.Memory
	asked := uint32(0)
	to := rt.to
	for ; limit > 0 && r.cons != r.prod; limit-- {
		d := at(table, r.cons)
		word := d.word()
		n := sizeOf(word)
		why := rt.why
		if to != nil {
			if r.e2e() {
				if why == causeRingOff || !to.e2e() || to.free() <= 0 {
					to.holdBack(r)
					break
				}
			}
			if why == arrives && rt.lossy() {
				// Once for each frame, also where the memory for one that is not
				// lost has to be waited for.
				if r.verdict == undecided {
					r.verdict = rt.lose()
				}
				if r.verdict >= lostOn {
					why = causeInjected
				}
			}
		}
		var source []byte
		if why == arrives {
			if source = mem.At(d.address(), n, false); source == nil {
				if source = f.scratch[:n]; !mem.Read(d.address(), source) {
					if r.host.starve() {
						break
					}
					f.fault(r, d.address(), n)
					source, why = nil, causeDMA
				}
			}
		}
		var flags uint32
		direct := why == arrives && !rt.delayed()
		if direct {
			if flags, why = f.place(to, rt, source, word); why == causeDMA && to.host.starve() {
				break
			}
		}
		if rt.wire != nil {
			if why == causeInjected {
				rt.lost(n, r.verdict)
			} else {
				rt.sent(n)
			}
			r.host.ports[rt.first().from].sent(n)
		}
		if rt.out != nil {
			rt.out.count(n, why != arrives && rt.wire == nil)
		}
		switch {
		case direct:
			f.delivered(rt, to, n, word, r, flags, why)
		case why != arrives:
			r.counters.Dropped.add(why)
			if rt.wire != nil && why != causeInjected {
				rt.arrived(n) // and was lost on the other side
			}
			if f.traceFrames {
				f.traceFrame(r, rt, nil, word, n, why, 0)
			}
		default:
			f.launch(r, rt, source, word, arrival)
		}
		d.finish(word | descCompleted)
		asked |= word
		r.cons = r.next(r.cons)
		r.verdict = undecided
		r.counters.Frames++
		r.counters.Bytes += uint64(n)
		bytes += n
	}
	if asked&descInterrupt != 0 {
		r.host.complete(r)
	}
	return bytes
}

// delivered counts a frame that has crossed the cable, whatever became of it
// there.
func (f *Fabric) delivered(rt *route, to *ring, n int, word uint32, from *ring, flags uint32, why cause) {
	rt.arrived(n)
	to.host.ports[rt.last().to].received(n)
	if rt.in != nil {
		rt.in.count(n, false)
	}
	if why != arrives {
		to.counters.Dropped.add(why)
	}
	if f.traceFrames {
		f.traceFrame(from, rt, to, word, n, why, flags)
	}
}

// place copies a frame into the next buffer of a receive ring.
func (f *Fabric) place(to *ring, rt *route, source []byte, word uint32) (flags uint32, why cause) {
	if !to.enabled() || !to.host.mastering() {
		return 0, causeRingOff
	}
	eof, sof := word>>descEOFShift&0xf, word>>descSOFShift&0xf
	if !to.raw() && (to.mask>>eof&1 == 0 || to.mask>>16>>sof&1 == 0) {
		return 0, causePDF
	}
	if to.free() <= 0 {
		to.host.notify |= 1 << (2*len(to.host.tx) + to.number) // receive overflow
		return 0, causeNoBuffer
	}
	table := to.descriptors()
	if table == nil {
		f.fault(to, to.base, int(to.size)*descriptorSize)
		return 0, causeDMA
	}
	d := at(table, to.prod)
	size := int(to.frameSize)
	if size == 0 || size > maxFrame {
		size = maxFrame
	}
	if len(source) > size { // it does not fit: what fits arrives, and a flag
		source = source[:size]
		flags |= descOverrun
	}
	mem := to.host.client.Memory
	buffer := mem.At(d.address(), len(source), true)
	inPlace := buffer != nil
	if !inPlace { // in several pieces, or not there at all
		if buffer = f.scattered[:len(source)]; !mem.Read(d.address(), buffer) || !mem.Write(d.address(), buffer) {
			f.fault(to, d.address(), len(source))
			return 0, causeDMA
		}
	}
	copy(buffer, source)
	flags |= rt.spoil(buffer)
	if !inPlace {
		mem.Write(d.address(), buffer) // it could be written just now, and the memory is held
	}
	asked := d.word()
	d.finish(uint32(len(source))&descLength | eof<<descEOFShift | sof<<descSOFShift | descCompleted | flags&^flipped)
	to.prod = to.next(to.prod)
	to.counters.Frames++
	to.counters.Bytes += uint64(len(source))
	if flags&flipped != 0 {
		to.counters.Corrupted++
	}
	if flags&descCRCError != 0 {
		to.counters.CRCErrors++
	}
	if flags&descOverrun != 0 {
		to.counters.Overruns++
	}
	if asked&descInterrupt != 0 {
		to.host.complete(to)
	}
	return flags, arrives
}

// fault says once for each ring that its memory cannot be reached.
func (f *Fabric) fault(r *ring, addr uint64, n int) {
	if r.faulty {
		return
	}
	r.faulty = true
	kind := "receive"
	if r.transmits {
		kind = "transmit"
	}
	f.log.Warn("a descriptor or buffer is not in the guest's memory", "host", r.host.name, "ring", r.number, "kind", kind, "address", fmt.Sprintf("%#x", addr), "bytes", n)
}
