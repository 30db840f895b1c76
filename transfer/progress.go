package transfer

import (
	"context"
	"slices"
	"time"
)

// meterSpan is the time over which a rate is taken.
const meterSpan = time.Second

// meter turns a growing count into a rate.
type meter struct{ samples []sample }

type sample struct {
	at time.Time
	n  uint64
}

func (m *meter) add(at time.Time, n uint64) {
	m.samples = append(m.samples, sample{at, n})
	for len(m.samples) > 2 && at.Sub(m.samples[1].at) >= meterSpan {
		m.samples = m.samples[1:]
	}
}

// rate returns units per second over the last second or so.
func (m *meter) rate() uint64 {
	if len(m.samples) < 2 {
		return 0
	}
	return perSecond(m.samples[0], m.samples[len(m.samples)-1])
}

func perSecond(a, b sample) uint64 {
	d := b.at.Sub(a.at).Seconds()
	if d <= 0 || b.n <= a.n {
		return 0
	}
	return uint64(float64(b.n-a.n) / d)
}

// linkMeter is the progress over one link; paths that come and go over the same
// link add up.
type linkMeter struct {
	now   LinkProgress
	bytes map[pathKey]uint64
	meter meter
}

// pathKey is a path's number at one source.
type pathKey struct {
	src *peer
	id  int
}

// set changes state and phase.
func (c *coordinator) set(s State, phase string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.before, c.phase = s, phase
	if !c.paused {
		c.now.State, c.now.Phase = s, phase
	}
}

func (c *coordinator) setPaused(p bool) {
	c.mu.Lock()
	if c.paused == p || c.now.State.Ended() {
		c.mu.Unlock()
		return
	}
	c.paused = p
	if p {
		c.now.State, c.now.Phase = Paused, "paused"
	} else if c.before != "" {
		c.now.State, c.now.Phase = c.before, c.phase
	}
	srcs := c.running
	c.mu.Unlock()
	for _, s := range srcs {
		_ = s.ctl.tell(kPause, pauseNote{p}) // where it cannot be told the transfer has ended
	}
}

// count takes what a worker says that it has done.
func (c *coordinator) count(p *peer, n countNote) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p == c.dst {
		c.now.DoneBytes, c.now.DoneFiles = n.Bytes, n.Files
		return
	}
	for id, sent := range n.Sent {
		for _, l := range c.links {
			if _, ok := l.bytes[pathKey{p, id}]; ok {
				l.bytes[pathKey{p, id}] = sent
			}
		}
	}
}

// linkUp notes that a path is in use; linkDown that it is not.
func (c *coordinator) linkUp(key pathKey, path Path) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.links {
		if l.now.LinkID == path.LinkID && l.now.Interface == path.SrcInterface && l.now.Transport == path.Transport && l.now.Kind == path.Kind {
			l.bytes[key] = 0
			l.now.Up = true
			return
		}
	}
	c.links = append(c.links, &linkMeter{now: LinkProgress{LinkID: path.LinkID, Interface: path.SrcInterface, Transport: path.Transport, Kind: path.Kind, Up: true},
		bytes: map[pathKey]uint64{key: 0}})
}

func (c *coordinator) linkDown(path Path) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.links {
		if l.now.LinkID == path.LinkID && l.now.Interface == path.SrcInterface && l.now.Transport == path.Transport && l.now.Kind == path.Kind {
			l.now.Up = false
		}
	}
}

// warn adds a warning, once.
func (c *coordinator) warn(s string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.now.Warnings, s) {
		c.now.Warnings = append(c.now.Warnings, s)
	}
}

// publish tells progress until ctx ends.
func (c *coordinator) publish(ctx context.Context) {
	tick := time.NewTicker(publishEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case at := <-tick.C:
			c.mu.Lock()
			c.measure(at)
			p := c.snapshot()
			c.mu.Unlock()
			c.events(p)
		}
	}
}

// measure works out rates and the time left; call it with mu held.
func (c *coordinator) measure(at time.Time) {
	// The rate is that of what is sent: what is verified grows by whole chunks.
	var sent uint64
	for _, l := range c.links {
		l.sum()
		l.meter.add(at, l.now.Bytes)
		l.now.BytesPerSecond = l.meter.rate()
		sent += l.now.Bytes
	}
	c.meter.add(at, sent)
	c.now.BytesPerSecond = c.meter.rate()
	c.now.ETA = -1
	if r := c.now.BytesPerSecond; r > 0 && c.now.TotalBytes >= c.now.DoneBytes && !c.paused {
		c.now.ETA = time.Duration(float64(c.now.TotalBytes-c.now.DoneBytes) / float64(r) * float64(time.Second))
	}
}

func (l *linkMeter) sum() {
	l.now.Bytes = 0
	for _, n := range l.bytes {
		l.now.Bytes += n
	}
}

// snapshot copies the progress; call it with mu held.
func (c *coordinator) snapshot() Progress {
	p := c.now
	p.Sources = slices.Clone(p.Sources)
	p.Warnings = slices.Clone(p.Warnings)
	p.Links = nil
	for _, l := range c.links {
		l.sum()
		p.Links = append(p.Links, l.now)
	}
	return p
}

func (c *coordinator) progress() Progress {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.snapshot()
}
