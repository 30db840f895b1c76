package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/guest"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// Options say how a rig is brought up.
type Options struct {
	// Dir is where logs, sockets and the trace are kept; it is made, but not what is
	// above it. "" is a temporary directory that Close removes, or the next rig if this process is killed.
	Dir string
	// Images says where kernels and tools are kept.
	Images image.Options
	// Log hears one line of progress now and then; nil is silence.
	Log func(line string)
	// Files are laid over the root of every host.
	Files []image.File
	// Trace, if not nil, gets what happens on the fabric, in lines for people.
	Trace  io.Writer
	Filter usb4.TraceFilter
	// Together is how many guests boot at once; 0 is one for each processor, and
	// at least two.
	Together int
}

// Rig is hosts and cables that are up.
type Rig struct {
	topology Topology
	options  Options
	dir      string
	remove   func() error // dir, if it is temporary
	fabric   *usb4.Fabric
	trace    *usb4.Trace
	lan      *lan
	hosts    []*Host
	cables   []*Cable
	links    []*link            // who sees whom
	hubs     []hubAt            // who shows which
	cancel   context.CancelFunc // of everything that serves
	ctx      context.Context
	serving  sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed, and made anew, at every change of what a host shows
	failure error         // of a host router: nothing works any more
	closed  bool
}

// Up builds what is missing, boots all hosts, loads their drivers, and returns
// when all of them run. What their drivers find of each other comes later:
// Settle waits for it. ctx bounds the bringing up; the rig lives until Close.
func Up(ctx context.Context, t Topology, o Options) (*Rig, error) {
	t, err := t.complete()
	if err != nil {
		return nil, err
	}
	if err := t.checkDrivers(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = func(string) {}
	}
	if o.Images.Log == nil {
		o.Images.Log = o.Log
	}
	r := &Rig{topology: t, options: o, changed: make(chan struct{})}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	if err := r.up(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Rig) up(ctx context.Context) error {
	if err := r.makeDir(); err != nil {
		return err
	}
	images, err := r.images(ctx)
	if err != nil {
		return err
	}
	if err := r.wire(); err != nil {
		return err
	}
	if r.topology.LAN {
		r.lan = newLAN()
	}
	together := r.options.Together
	if together <= 0 {
		together = max(2, runtime.NumCPU())
	}
	turn := make(chan struct{}, together)
	r.options.Log(fmt.Sprintf("booting %d hosts", len(r.hosts)))
	return r.each(func(h *Host) error {
		select {
		case turn <- struct{}{}:
			defer func() { <-turn }()
		case <-ctx.Done():
			return fault.New(fault.Interrupted, "boot host "+h.Name(), context.Cause(ctx), "")
		}
		return h.start(ctx, images)
	})
}

func (r *Rig) makeDir() error {
	if r.dir = r.options.Dir; r.dir == "" {
		var err error
		r.dir, r.remove, err = guest.TempDir("")
		return err
	}
	dir, err := filepath.Abs(r.dir)
	if err == nil {
		r.dir = dir
		err = os.Mkdir(dir, 0o755)
	}
	if err != nil && !isDir(dir) {
		return fault.New(fault.FileIO, "make a directory for the logs of the rig", err, "the directory above it has to be there").At(r.dir)
	}
	return nil
}

func isDir(name string) bool {
	st, err := os.Stat(name)
	return err == nil && st.IsDir()
}

// images are what guests are made of.
type images struct {
	tools  *image.Tools
	boots  map[image.Kernel]image.Boot
	probe  string
	agents string
	system string // the disk; "" where no host has one
}

// images builds what is missing.
func (r *Rig) images(ctx context.Context) (*images, error) {
	store, err := image.Open(r.options.Images)
	if err != nil {
		return nil, err
	}
	i := &images{boots: map[image.Kernel]image.Boot{}}
	if i.tools, err = store.Tools(ctx); err != nil {
		return nil, err
	}
	for _, h := range r.topology.Hosts {
		if h.System && i.system == "" {
			if i.system, err = store.System(ctx); err != nil {
				return nil, err
			}
		}
		if _, ok := i.boots[h.Kernel]; !ok {
			if i.boots[h.Kernel], err = store.Boot(ctx, h.Kernel); err != nil {
				return nil, err
			}
		}
		if err := h.fits(i.boots[h.Kernel].Release); err != nil {
			return nil, err
		}
	}
	if i.agents, err = guest.BuildAgent(ctx); err != nil {
		return nil, err
	}
	i.probe, err = guest.BuildProgram(ctx, "tbcluster/rig/probe")
	return i, err
}

// wire makes the fabric.
func (r *Rig) wire() error {
	odd := slog.New(slog.NewTextHandler(logWriter(r.options.Log), &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	var err error
	if r.fabric, err = usb4.New(usb4.Options{Seed: r.topology.Seed, Log: odd}); err != nil {
		return err
	}
	if r.options.Trace != nil {
		r.trace = r.fabric.Trace(r.options.Trace, r.options.Filter)
	}
	for i, spec := range r.topology.Hosts {
		router, err := r.fabric.AddHost(usb4.HostOptions{Name: spec.Name, Ports: spec.Ports, Lanes: spec.Lanes, Version: spec.Version, Speed: spec.Speed})
		if err != nil {
			return err
		}
		h := &Host{rig: r, spec: spec, index: i, router: router, stale: map[string]uint64{}}
		r.hosts = append(r.hosts, h)
		done, err := router.Start(r.ctx, h.socket())
		if err != nil {
			return fault.New(fault.LabFailed, "serve the host router of "+spec.Name, err, "").At(h.socket())
		}
		r.serving.Go(func() {
			if err := <-done; err != nil && r.ctx.Err() == nil {
				r.change(func() { r.failure = fmt.Errorf("the host router of %s has ended: %w", spec.Name, err) })
			}
		})
	}
	for _, spec := range r.topology.Hubs {
		if _, err := r.fabric.AddHub(usb4.HubOptions{Name: spec.Name, Ports: spec.Ports, Lanes: spec.Lanes, Speed: spec.Speed}); err != nil {
			return err
		}
	}
	for i, spec := range r.topology.Cables {
		a, err := r.port(spec.A)
		if err != nil {
			return err
		}
		b, err := r.port(spec.B)
		if err != nil {
			return err
		}
		c, err := r.fabric.Connect(a, b, spec.Options)
		if err != nil {
			return err
		}
		cable := &Cable{rig: r, Cable: c, index: i, spec: spec}
		cable.trained()
		r.cables = append(r.cables, cable)
	}
	return r.findLinks()
}

// logWriter passes lines on.
type logWriter func(string)

func (w logWriter) Write(b []byte) (int, error) {
	w(strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

func (r *Rig) port(name string) (*usb4.Port, error) {
	host, port, err := parsePort(name)
	if err != nil {
		return nil, err
	}
	var p *usb4.Port
	if h := r.fabric.Host(host); h != nil {
		p = h.Port(port)
	} else if h := r.fabric.Hub(host); h != nil {
		p = h.Port(port)
	}
	if p != nil {
		return p, nil
	}
	return nil, fault.Newf(fault.Usage, "", "the rig has no port %s", name)
}

// each runs f for all hosts at the same time.
func (r *Rig) each(f func(*Host) error) error {
	errs := make([]error, len(r.hosts))
	var all sync.WaitGroup
	for i, h := range r.hosts {
		all.Go(func() { errs[i] = f(h) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// Dir returns the directory of the logs.
func (r *Rig) Dir() string { return r.dir }

// Fabric returns what is behind the ports.
func (r *Rig) Fabric() *usb4.Fabric { return r.fabric }

// Topology returns what the rig is made of, with all defaults filled in.
func (r *Rig) Topology() Topology { return r.topology }

// Hosts returns the hosts.
func (r *Rig) Hosts() []*Host { return slices.Clone(r.hosts) }

// Host returns the host of that name; it panics if there is none, for that is a
// mistake in a test. Find is for names from outside.
func (r *Rig) Host(name string) *Host {
	h, err := r.FindHost(name)
	if err != nil {
		panic(err)
	}
	return h
}

// FindHost returns the host of that name.
func (r *Rig) FindHost(name string) (*Host, error) {
	var names []string
	for _, h := range r.hosts {
		if h.Name() == name {
			return h, nil
		}
		names = append(names, h.Name())
	}
	return nil, fault.Newf(fault.NodeUnknown, "the hosts are "+strings.Join(names, ", "), "the rig has no host %q", name)
}

// Cables returns the cables.
func (r *Rig) Cables() []*Cable { return slices.Clone(r.cables) }

// Cable returns the cable that has an end in that port ("a.0"); it panics if
// there is none. FindCable is for names from outside.
func (r *Rig) Cable(port string) *Cable {
	c, err := r.FindCable(port)
	if err != nil {
		panic(err)
	}
	return c
}

// FindCable returns the cable that has an end in that port.
func (r *Rig) FindCable(port string) (*Cable, error) {
	var names []string
	for _, c := range r.cables {
		if c.spec.A == port || c.spec.B == port {
			return c, nil
		}
		names = append(names, c.String())
	}
	return nil, fault.Newf(fault.Usage, "the cables are "+strings.Join(names, ", "), "no cable of the rig ends in %q", port)
}

// Counters returns all counters of the fabric.
func (r *Rig) Counters() usb4.Counters { return r.fabric.Counters() }

// Verify returns an error with what the kernels have reported of themselves, if
// they have.
func (r *Rig) Verify(ctx context.Context) error {
	return r.each(func(h *Host) error { return h.guest.Verify(ctx) })
}

// reported is Verify for those who are in a hurry: what has arrived so far.
func (r *Rig) reported() error {
	for _, h := range r.hosts {
		r.mu.Lock()
		g := h.guest // others may be on their way yet
		r.mu.Unlock()
		if g == nil {
			continue
		}
		if list := g.Reports(); len(list) > 0 {
			return &fault.Fault{Reason: fault.LabFailed, What: fmt.Sprintf("the kernel of host %s reported a fault of its own", h.Name()), Where: h.Console(), Why: list[0].Text}
		}
	}
	return nil
}

// change runs f with the lock and wakes those who wait.
func (r *Rig) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

// look is how often a wait looks for kernel reports, which announce nothing.
const look = 250 * time.Millisecond

// Await waits until missing returns "". It is called at once and at every change
// of the fabric or of what a host shows, and says what is missing. A kernel
// report ends the wait.
func (r *Rig) Await(ctx context.Context, what string, missing func() string) error {
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		r.mu.Lock()
		changed, failure, closed := r.changed, r.failure, r.closed
		r.mu.Unlock()
		fabric := r.fabric.Changed()
		lack := missing()
		if err := r.reported(); err != nil {
			return err
		}
		switch {
		case closed: // and so nothing is missing
			return fault.New(fault.LabFailed, what, errors.New("the rig has been taken down"), "")
		case lack == "":
			return nil
		case failure != nil:
			return fault.New(fault.LabFailed, what, failure, "")
		}
		select {
		case <-changed:
		case <-fabric:
		case <-tick.C:
		case <-ctx.Done():
			return &fault.Fault{Reason: fault.Timeout, What: what, Why: fmt.Sprintf("%v; %s", context.Cause(ctx), lack), Err: ctx.Err()}
		}
	}
}

// Close takes everything down. It may be called more than once.
func (r *Rig) Close() error {
	r.mu.Lock()
	closed := r.closed
	r.mu.Unlock()
	if closed {
		return nil
	}
	r.change(func() { r.closed = true })
	err := r.each(func(h *Host) error {
		if h.guest == nil {
			return nil
		}
		return h.guest.Close()
	})
	r.cancel()
	r.serving.Wait()
	if r.trace != nil {
		err = errors.Join(err, r.trace.Close())
	}
	if r.fabric != nil {
		err = errors.Join(err, r.fabric.Close())
	}
	if r.lan != nil {
		err = errors.Join(err, r.lan.close())
	}
	if r.remove != nil {
		err = errors.Join(err, r.remove())
	}
	return err
}
