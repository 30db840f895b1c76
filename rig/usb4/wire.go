//go:build linux

package usb4

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// ahead is how far before its time a frame may start on a wire with a rate:
	// it makes one wake-up serve several frames. The rate over any longer time
	// is exact.
	ahead = 100 * time.Microsecond
	// behind is for how long a wire makes up for time that was lost because we
	// were late, while there was something to send all the time.
	behind = time.Second
	// maxFlying is how many frames may be under way in one direction. The next
	// one waits in its ring.
	maxFlying = 16384
)

// wire is one direction of a cable.
type wire struct {
	fabric   *Fabric
	from, to int // ports of the hosts at both ends
	options  WireOptions
	random   *rand.Rand
	counters WireCounters

	lost, corrupted, flagged, overrun injector

	free time.Duration // when the last bit of the last frame is on the wire
	line []*ring       // rings with something to send, taking turns
	busy bool          // line has not been empty since free was set
	turn *event        // when the next in line may send

	flights []flight // under way, by arrival
	first   int      // in flights
	landing *event   // when the first arrives
}

func (w *wire) set(o WireOptions) {
	was := w.options
	w.options = o
	for _, i := range []struct {
		in       *injector
		was, now Injection
	}{
		{&w.lost, was.Loss, o.Loss}, {&w.corrupted, was.Corrupt, o.Corrupt},
		{&w.flagged, was.CorruptFlagged, o.CorruptFlagged}, {&w.overrun, was.Overrun, o.Overrun},
	} {
		if i.was != i.now {
			*i.in = injector{Injection: i.now, on: i.now.on()}
		}
	}
}

// slow reports whether frames have to wait for their turn.
func (w *wire) slow() bool { return w.options.Rate != 0 || w.delayed() }

// delayed reports whether frames take time to arrive, or come after some that
// do.
func (w *wire) delayed() bool { return w.options.Latency != 0 || w.flying() > 0 }

func (w *wire) flying() int { return len(w.flights) - w.first }

func (w *wire) sent(n int) {
	w.counters.Sent++
	w.counters.SentBytes += uint64(n)
}

func (w *wire) arrived(n int) {
	w.counters.Delivered++
	w.counters.DeliveredBytes += uint64(n)
}

// lose decides whether a frame is lost, and counts it.
func (w *wire) lose() bool {
	if !w.lost.on || !w.lost.strikes(w.random) {
		return false
	}
	w.counters.Lost++
	return true
}

// spoil does to a frame in the receiver's buffer what is to be done, counts it,
// and returns the flags of the descriptor.
func (w *wire) spoil(b []byte) (flags uint32) {
	if w.corrupted.on && w.corrupted.strikes(w.random) {
		w.flip(b)
		w.counters.Corrupted++
	}
	if w.flagged.on && w.flagged.strikes(w.random) {
		w.flip(b)
		w.counters.CorruptedFlagged++
		flags |= descCRCError
	}
	if w.overrun.on && w.overrun.strikes(w.random) {
		w.counters.Overrun++
		flags |= descOverrun
	}
	return flags
}

func (w *wire) flip(b []byte) {
	bit := w.random.Uint64N(uint64(len(b)) * 8)
	b[bit/8] ^= 1 << (bit % 8)
}

// injector decides which frames something is done to.
type injector struct {
	Injection
	on bool
	n  uint64
}

func (i *injector) strikes(r *rand.Rand) bool {
	i.n++
	if i.Every != 0 && i.n%i.Every == 0 {
		return true
	}
	return i.Probability != 0 && r.Float64() < i.Probability
}

// join puts a transmit ring in the line.
func (w *wire) join(r *ring) {
	r.lining = w
	w.line = append(w.line, r)
}

// leave takes a transmit ring out of the line.
func (w *wire) leave(r *ring) {
	r.lining = nil
	if i := slices.Index(w.line, r); i >= 0 {
		w.line = slices.Delete(w.line, i, i+1)
	}
	if len(w.line) == 0 {
		w.busy = false
	}
}

// serve lets those in line send whose time has come, a frame each in turn.
func (f *Fabric) serve(w *wire, now time.Duration) {
	for len(w.line) > 0 {
		r := w.line[0]
		rt := f.routeOf(r)
		if rt.wire != w || !w.slow() || !r.enabled() || r.cons == r.prod || !r.host.mastering() {
			w.leave(r)
			f.transmit(r) // it may go on by another way
			continue
		}
		if w.flying() >= maxFlying {
			return // landing serves again
		}
		start := now
		if rate := w.options.Rate; rate != 0 {
			start = max(w.free, now)
			if w.busy {
				start = max(w.free, now-behind)
			}
			if start > now+ahead {
				w.busy = true
				f.schedule.at(w.turn, start)
				return
			}
		}
		// Going to the end of the line first: carry may have the ring wait for
		// buffers, which takes it out.
		copy(w.line, w.line[1:])
		w.line[len(w.line)-1] = r
		n := f.carry(r, rt, 1, start+w.options.Latency+w.duration(f.next(r)))
		if n > 0 {
			w.free = start + w.duration(n)
			w.busy = true
		}
		if n == 0 || r.cons == r.prod {
			w.leave(r)
		}
	}
	w.busy = false
}

// next returns the size of a ring's next frame, 0 if it cannot be seen.
func (f *Fabric) next(r *ring) int {
	if table := r.descriptors(); table != nil {
		return sizeOf(at(table, r.cons).word())
	}
	return 0
}

// duration returns how long n bytes are on the wire.
func (w *wire) duration(n int) time.Duration {
	rate := uint64(w.options.Rate)
	if rate == 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(n)*8, uint64(time.Second))
	q, _ := bits.Div64(hi%rate, lo, rate)
	return time.Duration(q)
}

// flight is a frame under way.
type flight struct {
	at         time.Duration
	frame      *[maxFrame]byte
	size       int
	word       uint32
	from, to   *ring
	generation uint32 // of to, when it was sent
	in         *path
	reserved   bool
}

// launch sends a frame on a wire with latency. This copies it once more than
// the others: the sender may use its buffer again at once.
func (f *Fabric) launch(r *ring, rt *route, source []byte, word uint32, at time.Duration) {
	w := rt.wire
	fl := flight{at: at, frame: f.flight.get(), size: len(source), word: word, from: r, to: rt.to, generation: rt.to.generation, in: rt.in}
	if last := len(w.flights) - 1; last >= w.first {
		fl.at = max(fl.at, w.flights[last].at) // no frame overtakes another
	}
	copy(fl.frame[:], source)
	if r.e2e() {
		fl.reserved = true
		rt.to.reserved++
	}
	w.flights = append(w.flights, fl)
	if w.flying() == 1 {
		f.schedule.at(w.landing, fl.at)
	}
}

// land delivers the frames whose time has come.
func (f *Fabric) land(w *wire, now time.Duration) {
	for w.first < len(w.flights) && w.flights[w.first].at <= now {
		fl := w.flights[w.first]
		w.flights[w.first] = flight{}
		w.first++
		if fl.reserved && fl.generation == fl.to.generation {
			fl.to.reserved--
		}
		rt := route{wire: w, in: fl.in, to: fl.to}
		if fl.generation != fl.to.generation { // the ring was stopped meanwhile
			w.arrived(fl.size)
			fl.to.counters.Dropped.add(causeRingOff)
			if f.traceFrames {
				f.traceFrame(fl.from, &rt, fl.to, fl.word, fl.size, causeRingOff, 0)
			}
		} else {
			flags, why := f.place(fl.to, w, fl.frame[:fl.size], fl.word)
			f.delivered(&rt, fl.to, fl.size, fl.word, fl.from, flags, why)
		}
		f.flight.put(fl.frame)
	}
	switch {
	case w.first == len(w.flights):
		w.flights, w.first = w.flights[:0], 0
	case w.first > 1024 && w.first > len(w.flights)/2:
		n := copy(w.flights, w.flights[w.first:])
		clear(w.flights[n:])
		w.flights, w.first = w.flights[:n], 0
	}
	if w.flying() > 0 {
		f.schedule.at(w.landing, w.flights[w.first].at)
	}
	f.serve(w, now)
}

// cut loses everything that is under way.
func (f *Fabric) cut(w *wire) {
	for _, fl := range w.flights[w.first:] {
		if fl.reserved && fl.generation == fl.to.generation {
			fl.to.reserved--
		}
		w.counters.DroppedAfter++
		fl.from.counters.Dropped.add(causeLinkDown)
		f.flight.put(fl.frame)
	}
	clear(w.flights)
	w.flights, w.first = w.flights[:0], 0
	f.schedule.cancel(w.landing)
	f.schedule.cancel(w.turn)
	w.free = 0
}

// flightPool keeps the frames of flights that are over.
type flightPool struct{ frames []*[maxFrame]byte }

func (p *flightPool) get() *[maxFrame]byte {
	if n := len(p.frames); n > 0 {
		f := p.frames[n-1]
		p.frames = p.frames[:n-1]
		return f
	}
	return new([maxFrame]byte)
}

func (p *flightPool) put(f *[maxFrame]byte) { p.frames = append(p.frames, f) }
