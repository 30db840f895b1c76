//go:build linux

package usb4

import (
	"hash/fnv"
	"log/slog"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/vfiouser"
)

// Fabric is hosts and cables. All methods, and those of its hosts, ports and
// cables, may be called at any time from any goroutine.
type Fabric struct {
	seed  uint64
	clock Clock
	log   *slog.Logger
	start time.Duration
	alarm Alarm

	mu     sync.Mutex
	hosts  []*Host
	hubs   []*Hub
	cables []*Cable
	closed bool

	schedule schedule
	// wiring changes whenever a path, a link or a ring does: what was resolved
	// before is not right any more.
	wiring uint64
	// stirred asks for every transmit ring to be looked at again.
	stirred bool
	changed chan struct{} // closed at the next change of state, nil: nobody waits
	traces  []*Trace
	// What traces want, so that it costs one look where nobody does.
	traceFrames, traceRegisters, traceInterrupts bool

	held   []*Host // whose memory is held until the lock is released
	firing []*Host // that have interrupts to send when it is
	flight flightPool
	// Where frames are put together that do not lie in one piece of memory.
	scratch, scattered [maxFrame]byte
}

// New returns a fabric with nothing in it.
func New(o Options) (*Fabric, error) {
	f := &Fabric{seed: o.Seed, clock: o.Clock, log: o.Log, wiring: 1}
	if f.clock == nil {
		f.clock = SystemClock{}
	}
	if f.log == nil {
		f.log = slog.New(slog.DiscardHandler)
	}
	f.start = f.clock.Now()
	a, err := f.clock.NewAlarm(f.ring)
	if err != nil {
		return nil, err
	}
	f.alarm = a
	return f, nil
}

// AddHost adds a host router, which is off until a virtual machine comes.
func (f *Fabric) AddHost(o HostOptions) (*Host, error) {
	if err := o.complete(f.seed); err != nil {
		return nil, err
	}
	f.lock()
	defer f.unlock()
	if err := f.unique(o); err != nil {
		return nil, err
	}
	h := newHost(f, o)
	f.hosts = append(f.hosts, h)
	return h, nil
}

// unique refuses a second name or UID.
func (f *Fabric) unique(o HostOptions) error {
	var all []*node
	for _, h := range f.hosts {
		all = append(all, &h.node)
	}
	for _, h := range f.hubs {
		all = append(all, &h.node)
	}
	for _, n := range all {
		if n.name == o.Name || n.options.UID == o.UID {
			return fault.Newf(fault.Usage, "give each host and hub a name and a UID of its own", "both %s and %s have the same name or UID", n.name, o.Name)
		}
	}
	return nil
}

// Host returns the host of that name, or nil.
func (f *Fabric) Host(name string) *Host {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.hosts {
		if h.name == name {
			return h
		}
	}
	return nil
}

// Hub returns the hub of that name, or nil.
func (f *Fabric) Hub(name string) *Hub {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.hubs {
		if h.name == name {
			return h
		}
	}
	return nil
}

// Connect puts a cable between two ports, each of which may have one.
func (f *Fabric) Connect(a, b *Port, o CableOptions) (*Cable, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	f.lock()
	defer f.unlock()
	if a == b || a.node.fabric != f || b.node.fabric != f {
		return nil, fault.Newf(fault.Usage, "connect two ports of hosts or hubs of this fabric", "a cable cannot lead from %s to %s", a, b)
	}
	for _, p := range []*Port{a, b} {
		if p.cable != nil {
			return nil, fault.Newf(fault.Usage, "use another port", "port %s has a cable already", p)
		}
	}
	c := newCable(f, a, b, o)
	f.cables = append(f.cables, c)
	if !o.Unplugged {
		c.plug(f.clock.Now())
	}
	return c, nil
}

// Cables returns the cables, in the order in which they were connected.
func (f *Fabric) Cables() []*Cable {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*Cable(nil), f.cables...)
}

// Changed returns a channel that is closed at the next change of state: a host
// attached or gone, its driver awake or not, a link up or down. Look at the
// state after this call, not before, and nothing is missed.
func (f *Fabric) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.changed
}

// tell closes the channel of Changed.
func (f *Fabric) tell() {
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
}

// Close ends traces and timers. Hosts that are being served are not ended:
// that is for the context of Serve.
func (f *Fabric) Close() error {
	f.lock()
	f.closed = true
	traces := f.traces
	f.unlock()
	var first error
	for _, t := range traces {
		if err := t.Close(); err != nil && first == nil {
			first = err
		}
	}
	if err := f.alarm.Close(); err != nil && first == nil {
		first = err
	}
	return first
}

// lock begins a piece of work. Between lock and unlock, memory of guests that
// was asked for is held, and interrupts are kept back.
func (f *Fabric) lock() { f.mu.Lock() }

// unlock ends a piece of work: rings that the work has touched run, the alarm
// is set, memory is let go, and interrupts are sent.
func (f *Fabric) unlock() {
	if f.stirred {
		f.stirred = false
		f.stir()
	}
	var fire [8]firing
	n := 0
	for _, h := range f.firing {
		if vectors := h.interrupt(); vectors != 0 {
			if n == len(fire) { // more hosts than fit: send those now
				send(fire[:n])
				n = 0
			}
			fire[n] = firing{h.client.Interrupts, vectors}
			n++
		}
	}
	f.firing = f.firing[:0]
	f.schedule.arm(f.alarm)
	for _, h := range f.held {
		h.holding = false
		h.client.Memory.Release()
	}
	f.held = f.held[:0]
	f.mu.Unlock()
	send(fire[:n])
}

// firing is a set of vectors to send.
type firing struct {
	to      *vfiouser.Interrupts
	vectors uint32
}

func send(fire []firing) {
	for _, v := range fire {
		for i := range numVectors {
			if v.vectors&(1<<i) != 0 {
				v.to.Fire(vfiouser.InterruptMSIX, i)
			}
		}
	}
}

// ring is what the alarm calls.
func (f *Fabric) ring() {
	f.lock()
	defer f.unlock()
	if f.closed {
		return
	}
	f.schedule.set = 0
	f.schedule.run(f.clock.Now())
}

// rewired says that a path, a link or a ring has changed.
func (f *Fabric) rewired() {
	f.wiring++
	f.stirred = true
}

// stir runs every transmit ring that has something to send.
func (f *Fabric) stir() {
	for _, h := range f.hosts {
		if len(h.control.waiting) > 0 {
			h.deliverControl()
		}
		for i := range h.tx {
			if r := &h.tx[i]; r.cons != r.prod {
				f.transmit(r)
			}
		}
	}
}

// uidOf makes a UID that is the same for the same seed and name.
func uidOf(seed uint64, name string) uint64 {
	h := fnv.New64a()
	for i := range 8 {
		_, _ = h.Write([]byte{byte(seed >> (8 * i))}) // a hash takes everything
	}
	_, _ = h.Write([]byte(name))
	return h.Sum64() | 1
}

// Counters returns all counters, of one moment.
func (f *Fabric) Counters() Counters {
	f.mu.Lock()
	defer f.mu.Unlock()
	var c Counters
	for _, h := range f.hosts {
		c.Hosts = append(c.Hosts, h.counters())
	}
	for _, h := range f.hubs {
		c.Hubs = append(c.Hubs, HubCounters{Name: h.name, Paths: h.router.pathCounters()})
	}
	for _, k := range f.cables {
		c.Cables = append(c.Cables, k.counters())
	}
	return c
}
