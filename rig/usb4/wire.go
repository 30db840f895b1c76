//go:build linux

package usb4

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"time"
)

// The pacing of a wire with a rate. Frames have a time on the wire, one after the
// other. Where we are late, for the machine did not let us run, the wire makes up
// for it, so that over any longer time the rate is exact. It does so at no more
// than twice its rate, but for the frames of a burst, so that a receiver sees
// nothing that its buffers would not bear on a wire of twice the rate. A wire that
// has nothing to send saves nothing up; when that lasts longer than a burst, what
// there was to make up for is forgotten.
const (
	// ahead is how far before its time a frame may start: it makes one wake-up
	// serve several frames.
	ahead = 100 * time.Microsecond
	// behind is how much time a wire makes up for.
	behind = time.Second
	// burst is the time whose frames, at hurry times the rate, may go at once: fewer
	// than a ring of 256 has, at 100 Mb/s and 4 KiB.
	burst = 40 * time.Millisecond
	// hurry is how much faster than its rate a wire is while it makes up.
	hurry = 2
	// maxFlying is how many frames may be under way in one direction. The next
	// one waits in its ring.
	maxFlying = 16384
)

// wire is one direction of a cable.
type wire struct {
	fabric   *Fabric
	from, to int    // ports of the hosts at both ends
	number   uint64 // of all wires of the fabric
	options  WireOptions
	counters WireCounters

	lost, corrupted, flagged, overrun injector

	free  time.Duration // when the last bit of the last frame is on the wire; 0: none was since the rate was set
	peak  time.Duration // the same on a wire that is hurry times as fast
	empty time.Duration // since when line has been, if it is
	line  []*ring       // rings with something to send, taking turns
	turn  *event        // when the next in line may send

	flights []flight // under way, by arrival
	first   int      // in flights
	landing *event   // when the first arrives
}

func (w *wire) set(o WireOptions, now time.Duration) {
	was := w.options
	w.options = o
	if was.Rate != o.Rate {
		// What is on the wire takes no longer than it would from now on.
		if w.free = min(w.free, now+w.duration(maxFrame)); w.free <= now {
			w.free = 0
		}
		w.peak = 0
		w.counters.Late = 0
	}
	for i, x := range []struct {
		in       *injector
		was, now Injection
	}{
		{&w.lost, was.Loss, o.Loss}, {&w.corrupted, was.Corrupt, o.Corrupt},
		{&w.flagged, was.CorruptFlagged, o.CorruptFlagged}, {&w.overrun, was.Overrun, o.Overrun},
	} {
		if x.was != x.now {
			*x.in = injector{Injection: x.now, on: x.now.on(), random: rand.NewPCG(w.fabric.seed, w.number<<2|uint64(i))}
		}
	}
}

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
	if !w.lost.strikes(&w.counters.Judged.Loss) {
		return false
	}
	w.counters.Lost++
	return true
}

// flipped is, in the flags of a frame, that a bit of it was flipped and nothing
// says so. Descriptors have their length there.
const flipped = 1

// spoil does to a frame in the receiver's buffer what is to be done, counts it,
// and returns the flags of the descriptor, and flipped.
func (w *wire) spoil(b []byte) (flags uint32) {
	if w.corrupted.strikes(&w.counters.Judged.Corrupt) {
		w.corrupted.flip(b)
		w.counters.Corrupted++
		flags |= flipped
	}
	if w.flagged.strikes(&w.counters.Judged.CorruptFlagged) {
		w.flagged.flip(b)
		w.counters.CorruptedFlagged++
		flags |= descCRCError
	}
	if w.overrun.strikes(&w.counters.Judged.Overrun) {
		w.counters.Overrun++
		flags |= descOverrun
	}
	return flags
}

// injector decides which frames something is done to. It has random numbers of
// its own, from where it was set on: what strikes which frame, counted from
// there, is decided by the seed and the wire and by nothing else.
type injector struct {
	Injection
	on     bool
	n      uint64
	random *rand.PCG
}

func (i *injector) strikes(judged *uint64) bool {
	if !i.on {
		return false
	}
	*judged++
	i.n++
	chance := i.Probability != 0 && float64(i.random.Uint64()>>11)/(1<<53) < i.Probability
	return chance || i.Every != 0 && i.n%i.Every == 0
}

// flip flips a bit. It takes one random number, however long the frame is.
func (i *injector) flip(b []byte) {
	bit, _ := bits.Mul64(i.random.Uint64(), uint64(len(b))*8)
	b[bit/8] ^= 1 << (bit % 8)
}

// join puts a transmit ring in the line.
func (w *wire) join(r *ring, now time.Duration) {
	if len(w.line) == 0 && w.options.Rate != 0 && w.free != 0 {
		if idle := now - max(w.free, w.empty); idle > 0 {
			w.counters.Idle += idle
			w.free += idle
			if owed := now - w.free; idle > burst { // nobody waits for that any more
				w.counters.Missed += owed
				w.free = now
			}
		}
	}
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
		w.empty = w.fabric.clock.Now()
	}
}

// due returns when the next frame is on the wire by the rate, and when we may
// send it, which is later where we make up for being late.
func (w *wire) due(now time.Duration) (start, at time.Duration) {
	if w.options.Rate == 0 {
		return now, now
	}
	if w.free == 0 {
		w.free = now
	}
	if missed := now - behind - w.free; missed > 0 {
		w.counters.Missed += missed
		w.free += missed
	}
	w.counters.Late = max(w.counters.Late, now-w.free)
	w.peak = max(w.peak, now-burst)
	return w.free, max(w.free, w.peak)
}

// serve lets those in line send whose time has come, a frame each in turn.
func (f *Fabric) serve(w *wire, now time.Duration) {
	for len(w.line) > 0 {
		r := w.line[0]
		rt := f.routeOf(r)
		if rt.wire != w || !rt.slow() || !r.enabled() || r.cons == r.prod || !r.host.mastering() {
			w.leave(r)
			f.transmit(r) // it may go on by another way
			continue
		}
		if w.flying() >= maxFlying {
			return // landing serves again
		}
		start, at := w.due(now)
		if at > now+ahead {
			f.schedule.at(w.turn, at)
			return
		}
		// Going to the end of the line first: carry may have the ring wait for
		// buffers, which takes it out.
		copy(w.line, w.line[1:])
		w.line[len(w.line)-1] = r
		n := f.carry(r, rt, 1, start+rt.latency()+w.duration(f.next(r)))
		if d := w.duration(n); d > 0 {
			w.free = start + d
			w.peak += d / hurry
		}
		if n == 0 || r.cons == r.prod {
			w.leave(r)
		}
	}
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
	over       []*wire // as those of its route
	via        []*path
	reserved   bool
}

// launch sends a frame on a wire with latency. This copies it once more than
// the others: the sender may use its buffer again at once.
func (f *Fabric) launch(r *ring, rt *route, source []byte, word uint32, at time.Duration) {
	w := rt.wire
	fl := flight{at: at, frame: f.flight.get(), size: len(source), word: word, from: r, to: rt.to, generation: rt.to.generation, in: rt.in, over: rt.over, via: rt.via}
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
		rt := route{wire: w, in: fl.in, to: fl.to, over: fl.over, via: fl.via}
		if fl.generation != fl.to.generation { // the ring was stopped meanwhile
			rt.arrived(fl.size)
			fl.to.counters.Dropped.add(causeRingOff)
			if f.traceFrames {
				f.traceFrame(fl.from, &rt, fl.to, fl.word, fl.size, causeRingOff, 0)
			}
		} else {
			flags, why := f.place(fl.to, &rt, fl.frame[:fl.size], fl.word)
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

// cut loses everything that is under way on a wire, and on those before or after
// it what was to cross it.
func (f *Fabric) cut(w *wire) {
	if len(f.hubs) > 0 {
		for _, c := range f.cables {
			for i := range c.wires {
				if o := &c.wires[i]; o != w {
					f.loseFlights(o, func(fl *flight) bool { return slices.Contains(fl.over, w) })
				}
			}
		}
	}
	f.loseFlights(w, func(*flight) bool { return true })
	f.schedule.cancel(w.landing)
	f.schedule.cancel(w.turn)
	w.free, w.peak = 0, 0
}

// loseFlights loses the flights of a wire for which it is so.
func (f *Fabric) loseFlights(w *wire, lost func(*flight) bool) {
	stay := w.flights[:0]
	for _, fl := range w.flights[w.first:] {
		if !lost(&fl) {
			stay = append(stay, fl)
			continue
		}
		if fl.reserved && fl.generation == fl.to.generation {
			fl.to.reserved--
		}
		w.counters.DroppedAfter++
		fl.from.counters.Dropped.add(causeLinkDown)
		f.flight.put(fl.frame)
	}
	clear(w.flights[len(stay):])
	w.flights, w.first = stay, 0
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
