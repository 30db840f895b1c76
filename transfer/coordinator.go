package transfer

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/frame"
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/transport"
)

const (
	// publishEvery is how often progress is told.
	publishEvery = 250 * time.Millisecond
	// helloWait is how long a worker may take to greet back.
	helloWait = 20 * time.Second
	// stopWait is how long a worker may take to close its files at the end.
	stopWait = 5 * time.Second
	// maxProblems is how many faults of single files are kept.
	maxProblems = 100
)

// coordinator runs one Transfer.
type coordinator struct {
	job    Job
	deps   Deps
	events func(Progress)

	dst     *peer
	srcs    []*peer // one for each source node
	session uint64
	abort   context.CancelCauseFunc

	mu       sync.Mutex
	now      Progress
	paused   bool
	running  []*peer // sources that have begun to send
	before   State   // what Paused hides
	phase    string
	meter    meter
	carryAt  time.Time // when connecting began
	sentAt   time.Time // when the last chunk was answered
	links    []*linkMeter
	problems []*fault.Fault
	more     int // problems that were not kept
}

// peer is a worker as the coordinator sees it.
type peer struct {
	node, name string
	ctl        *control
	served     chan struct{} // closed when its stream has ended
	hash       transport.Hash

	// Of a source.
	places      []place
	first, next int // entries [first, next) are its own
	sent        chan struct{}
	sentOnce    sync.Once
	down        chan pathNote
}

func newCoordinator(job Job, deps Deps, events func(Progress)) *coordinator {
	if deps.Clock == nil {
		deps.Clock = host.SystemClock{}
	}
	if deps.LinkWait == 0 {
		deps.LinkWait = 60 * time.Second
	}
	if deps.NodeName == nil {
		deps.NodeName = func(id string) string { return id }
	}
	if events == nil {
		events = func(Progress) {}
	}
	c := &coordinator{job: job, deps: deps, events: events}
	c.now = Progress{ID: job.ID, State: Scanning, Phase: "starting", ETA: -1, StartedAt: deps.Clock.Now(), DestinationNodeID: job.Destination.Node,
		Destination: deps.NodeName(job.Destination.Node) + ":" + job.Destination.Path}
	for i, s := range job.Sources {
		if i == 0 {
			c.now.SourceNodeID = s.Node
		}
		c.now.Sources = append(c.now.Sources, deps.NodeName(s.Node)+":"+s.Path)
	}
	return c
}

// run does everything, and says how it ended.
func (c *coordinator) run(ctx context.Context) (Result, error) {
	work, abort := context.WithCancelCause(ctx)
	c.abort = abort
	published := make(chan struct{})
	go func() {
		defer close(published)
		c.publish(work)
	}()
	lines, err := c.copy(work)
	if cause := context.Cause(work); err != nil && cause != nil {
		err = cause // what ended it, not what the end made fail
	}
	c.stopWorkers()
	abort(context.Canceled)
	<-published
	return c.conclude(ctx, lines, err)
}

// copy is the course of a transfer.
func (c *coordinator) copy(ctx context.Context) ([]string, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if err := c.openWorkers(ctx); err != nil {
		return nil, err
	}
	roots, here, err := c.scan(ctx)
	if err != nil {
		return nil, err
	}
	plan, err := c.plan(ctx, roots, here)
	if err != nil {
		return nil, err
	}
	if c.job.Options.DryRun {
		lines := make([]string, len(plan.Lines))
		for i, l := range plan.Lines {
			lines[i] = string(l)
		}
		return lines, nil
	}
	if err := c.carry(ctx, plan); err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.sentAt = time.Now()
	c.mu.Unlock()
	c.set(Syncing, "syncing on "+c.dst.name)
	return nil, c.control(c.dst, c.dst.ctl.ask(ctx, kComplete, struct{}{}, nil))
}

// check refuses what cannot be done before anything is started.
func (c *coordinator) check() error {
	o := c.job.Options
	if len(c.job.Sources) == 0 {
		return fault.Newf(fault.Usage, "write SOURCE... DESTINATION", "there is nothing to copy")
	}
	if _, err := manifest.ParseFilter(o.Filters); err != nil {
		return err
	}
	for _, x := range []struct {
		asked bool
		name  string
	}{{o.Clear, "--clear"}, {o.Delete, "--delete"}, {o.Xattrs, "-X"}} {
		if x.asked {
			return fault.Newf(fault.Unsupported, "leave it out", "this version has no %s", x.name)
		}
	}
	switch o.Transport {
	case "", "auto", "tcp":
		return nil
	}
	return fault.Newf(fault.Unsupported, "choose --transport auto", "this version has no transport %q", o.Transport)
}

// openWorkers starts a worker at the destination and one for each source node.
func (c *coordinator) openWorkers(ctx context.Context) error {
	c.set(Scanning, "starting")
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return fault.New(fault.Internal, "make a session number", err, "")
	}
	c.session = binary.BigEndian.Uint64(b[:])
	byNode := map[string]*peer{}
	for _, s := range c.job.Sources {
		p := byNode[s.Node]
		if p == nil {
			p = &peer{node: s.Node, sent: make(chan struct{}), down: make(chan pathNote, 64)}
			byNode[s.Node] = p
			c.srcs = append(c.srcs, p)
		}
		p.places = append(p.places, place{[]byte(s.Path), []byte(s.Dir)})
	}
	c.dst = &peer{node: c.job.Destination.Node}
	peers := append([]*peer{c.dst}, c.srcs...)
	errs := make(chan error, len(peers))
	for _, p := range peers {
		p.name = c.deps.NodeName(p.node)
		go func() { errs <- c.open(ctx, p) }()
	}
	var first error
	for range peers {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (c *coordinator) open(ctx context.Context, p *peer) error {
	stream, err := c.deps.OpenWorker(ctx, p.node)
	if err != nil {
		if fault.As(err) != nil || ctx.Err() != nil {
			return err
		}
		return fault.New(fault.Connection, "start a worker", err, "look whether the agent there is up: tbcluster status").At(p.name)
	}
	ctl := newControl(frame.New(stream))
	ctl.note = func(k kind, body json.RawMessage) error { return c.note(p, k, body) }
	p.served = make(chan struct{})
	p.ctl = ctl
	go func() {
		defer close(p.served)
		// The stream lives until stopWorkers closes it, not until ctx ends: a
		// worker is asked to stop first.
		err := ctl.serve(context.WithoutCancel(ctx))
		c.abort(c.lost(p, err))
	}()
	var out helloOut
	in := helloIn{Version: protocolVersion, Transfer: c.job.ID, Session: c.session, NodeID: p.node, NodeName: p.name}
	try, cancel := context.WithTimeout(ctx, helloWait)
	defer cancel()
	if err := p.ctl.ask(try, kHello, in, &out); err != nil {
		if try.Err() != nil && ctx.Err() == nil {
			return fault.Newf(fault.Timeout, "look at the agent's log there: tbcluster logs", "the worker on %s does not answer", p.name).At(p.name)
		}
		return c.control(p, err)
	}
	p.hash = out.Hash
	return nil
}

// lost is the fault of a worker whose stream has ended.
func (c *coordinator) lost(p *peer, err error) error {
	if f := fault.As(err); f != nil {
		return f
	}
	if err == nil {
		err = errors.New("it ended, or its node did")
	}
	return fault.New(fault.Connection, "the worker on "+p.name+" is gone", err, "run the same command again: it goes on where this one ended").At(p.name)
}

// control makes a Fault of an error of ask.
func (c *coordinator) control(p *peer, err error) error {
	if errors.Is(err, errEnded) {
		return c.lost(p, err)
	}
	return err
}

// note handles what a worker says.
func (c *coordinator) note(p *peer, k kind, body json.RawMessage) error {
	switch k {
	case kEntries, kFinish, kDrop:
		// Handed on as it is; the destination checks it.
		if err := c.dst.ctl.conn.Send(packet{Kind: k, Body: body}); err != nil {
			return c.lost(c.dst, err)
		}
	case kWant:
		n, err := decode[wantNote](body)
		if err != nil {
			return err
		}
		return c.route(n.Want)
	case kProblem, kFatal:
		n, err := decode[problemNote](body)
		if err != nil {
			return err
		}
		if n.Fault == nil {
			return fault.Newf(fault.Protocol, "", "%s says nothing of its problem", p.name)
		}
		if k == kFatal {
			c.abort(n.Fault.fault())
			return nil
		}
		c.problem(n.Fault.fault())
	case kSent:
		if p.sent != nil {
			p.sentOnce.Do(func() { close(p.sent) })
		}
	case kPathDown:
		n, err := decode[pathNote](body)
		if err != nil {
			return err
		}
		if p.down != nil {
			select {
			case p.down <- n:
			default: // the next connection there fails and says it again
			}
		}
	case kCount:
		n, err := decode[countNote](body)
		if err != nil {
			return err
		}
		c.count(p, n)
	}
	return nil
}

// route hands the destination's wishes to the sources that have the files.
func (c *coordinator) route(ws []want) error {
	pages := map[*peer][]want{}
	for _, w := range ws {
		var owner *peer
		for _, s := range c.srcs {
			if w.File >= s.first && w.File < s.next {
				owner = s
			}
		}
		if owner == nil {
			return fault.Newf(fault.Protocol, "", "%s wants file %d, which nobody has", c.dst.name, w.File)
		}
		pages[owner] = append(pages[owner], w)
	}
	for s, page := range pages {
		if err := s.ctl.tell(kWant, wantNote{page}); err != nil {
			return c.lost(s, err)
		}
	}
	return nil
}

// scan has every source list its files, which go to the destination meanwhile.
func (c *coordinator) scan(ctx context.Context) (roots []manifest.Root, here []bool, err error) {
	next := 0
	for _, s := range c.srcs {
		c.set(Scanning, "scanning "+s.name)
		s.first = next
		var out scanOut
		in := scanIn{Places: s.places, First: next, FirstRoot: len(roots), Filters: c.job.Options.Filters, CopyLinks: c.job.Options.CopyLinks}
		if err := s.ctl.ask(ctx, kScan, in, &out); err != nil {
			return nil, nil, c.control(s, err)
		}
		if out.Next < next || len(out.Roots) != len(s.places) {
			return nil, nil, fault.Newf(fault.Protocol, "use the same version of tbcluster on both nodes", "%s listed its files wrongly", s.name)
		}
		next = out.Next
		s.next = next
		roots = append(roots, out.Roots...)
		for range out.Roots {
			here = append(here, s.node == c.dst.node)
		}
	}
	return roots, here, nil
}

// plan has the destination find out what it needs.
func (c *coordinator) plan(ctx context.Context, roots []manifest.Root, here []bool) (decideOut, error) {
	c.set(Scanning, "looking at what "+c.dst.name+" has")
	o := c.job.Options
	in := prepareIn{Place: place{[]byte(c.job.Destination.Path), []byte(c.job.Destination.Dir)}, Roots: roots, Here: here,
		DryRun: o.DryRun, Checksum: o.Checksum, MakePath: o.MakePath}
	var prepared prepareOut
	if err := c.dst.ctl.ask(ctx, kPrepare, in, &prepared); err != nil {
		return decideOut{}, c.control(c.dst, err)
	}
	c.mu.Lock()
	c.now.Destination = c.dst.name + ":" + string(prepared.Resolved)
	c.mu.Unlock()
	same, err := c.compare(ctx, prepared.Compare)
	if err != nil {
		return decideOut{}, err
	}
	c.set(Scanning, "looking at what "+c.dst.name+" has")
	var out decideOut
	if err := c.dst.ctl.ask(ctx, kDecide, filesNote{same}, &out); err != nil {
		return decideOut{}, c.control(c.dst, err)
	}
	c.mu.Lock()
	c.now.TotalBytes, c.now.TotalFiles = out.TotalBytes, out.TotalFiles
	c.now.SkippedBytes, c.now.SkippedFiles = out.SkippedBytes, out.SkippedFiles
	c.mu.Unlock()
	return out, nil
}

// compare finds out by digest which files both sides have alike. Each side
// reads its own at the same time.
func (c *coordinator) compare(ctx context.Context, files []int) ([]int, error) {
	same := []int{}
	for _, s := range c.srcs {
		var mine []int
		for _, f := range files {
			if f >= s.first && f < s.next {
				mine = append(mine, f)
			}
		}
		if len(mine) == 0 {
			continue
		}
		c.set(Scanning, fmt.Sprintf("comparing %d files on %s and %s", len(mine), s.name, c.dst.name))
		var a, b digestOut
		errs := make(chan error, 1)
		go func() { errs <- c.control(s, s.ctl.ask(ctx, kDigest, filesNote{mine}, &a)) }()
		err := c.control(c.dst, c.dst.ctl.ask(ctx, kDigest, filesNote{mine}, &b))
		if err := errors.Join(<-errs, err); err != nil {
			return nil, err
		}
		for i, f := range mine {
			if i < len(a.Digests) && i < len(b.Digests) && len(a.Digests[i]) > 0 && string(a.Digests[i]) == string(b.Digests[i]) {
				same = append(same, f)
			}
		}
	}
	return same, nil
}

// carry has the sources send what is wanted, over whatever paths there are.
func (c *coordinator) carry(ctx context.Context, plan decideOut) error {
	for _, s := range c.srcs {
		c.mu.Lock()
		paused := c.paused
		c.running = append(c.running, s)
		c.mu.Unlock()
		if paused {
			if err := s.ctl.tell(kPause, pauseNote{true}); err != nil {
				return c.lost(s, err)
			}
		}
		if err := s.ctl.ask(ctx, kStart, startIn{c.job.Options.LimitBytesPerSecond}, nil); err != nil {
			return c.control(s, err)
		}
	}
	if plan.TotalBytes > 0 {
		c.mu.Lock()
		c.carryAt = time.Now()
		c.mu.Unlock()
		c.set(Connecting, "connecting to "+c.dst.name)
		paths := newPathManager(c)
		life, cancel := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := paths.run(life); err != nil {
				c.abort(err)
			}
		}()
		defer func() {
			cancel()
			<-ended
		}()
	}
	for _, s := range c.srcs {
		select {
		case <-s.sent:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// stopWorkers has each worker close its files and then ends its stream.
func (c *coordinator) stopWorkers() {
	ctx, cancel := context.WithTimeout(context.Background(), stopWait)
	defer cancel()
	var wg sync.WaitGroup
	for _, p := range append([]*peer{c.dst}, c.srcs...) {
		if p == nil || p.ctl == nil {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			// One that does not answer ends when its stream does.
			_ = p.ctl.ask(ctx, kStop, struct{}{}, nil)
			_ = p.ctl.conn.Close()
			<-p.served
		}()
	}
	wg.Wait()
}

// conclude sums up.
func (c *coordinator) conclude(ctx context.Context, lines []string, err error) (Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var f *fault.Fault
	state := Done
	switch {
	case err != nil && ctx.Err() != nil:
		state = Cancelled
		f = fault.Newf(fault.Interrupted, "run the same command again: it goes on where this one ended", "the copy was interrupted")
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			f.Reason, state = fault.Timeout, Failed
		}
	case err != nil:
		f, state = asFault(err), Failed
	case len(c.problems) > 0:
		f, state = c.sum(), Failed
	}
	c.paused = false
	c.now.State, c.now.Phase, c.now.Fault = state, string(state), f
	c.now.FinishedAt = c.deps.Clock.Now()
	c.now.BytesPerSecond, c.now.ETA = 0, -1
	for _, l := range c.links {
		l.now.Up = false
		l.now.BytesPerSecond = 0
	}
	if !c.carryAt.IsZero() && !c.sentAt.IsZero() {
		// At the end, the rate of the whole: from the first connection to the
		// last chunk's answer.
		c.now.BytesPerSecond = perSecond(sample{c.carryAt, 0}, sample{c.sentAt, c.now.DoneBytes})
	}
	p := c.snapshot()
	r := Result{Progress: p, Lines: lines, Problems: c.problems}
	c.events(p)
	if f != nil {
		return r, f
	}
	return r, nil
}

// problem keeps the fault of a single file.
func (c *coordinator) problem(f *fault.Fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.problems) == maxProblems {
		c.more++
		return
	}
	c.problems = append(c.problems, f)
}

// sum makes one fault of those of single files; call it with mu held.
func (c *coordinator) sum() *fault.Fault {
	if len(c.problems) == 1 {
		return c.problems[0]
	}
	reason := c.problems[0].Reason
	for _, p := range c.problems {
		if p.Reason != reason {
			reason = fault.Partial
		}
	}
	const shown = 5
	why := ""
	for i, p := range c.problems {
		if i == shown {
			break
		}
		if i > 0 {
			why += "; "
		}
		why += p.Error()
	}
	n := len(c.problems) + c.more
	if n > shown {
		why += fmt.Sprintf("; and %d more", n-shown)
	}
	f := fault.Newf(reason, c.problems[0].Fix, "%d things were not copied", n)
	f.Why = why
	return f.At(c.now.Destination)
}
