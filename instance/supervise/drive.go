package supervise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/instance/spec"
)

// driver takes an instance from started ranks to its end.
type driver struct {
	i   *instance
	who host.Asker
	a   spec.Adapter
	t   Times

	started  map[int]bool
	unknown  map[string]string    // nodes whose stream is broken: why
	since    map[string]time.Time // since when
	starts   chan startResult
	warmed   chan probeResult
	probes   chan probeResult
	warming  bool
	probing  bool
	warm     bool          // a completion came back
	adopted  bool          // it was ready before this agent was started
	typical  time.Duration // of a completion of one token
	missed   time.Time     // since when checks fail; zero when they do not
	misses   int
	busyMark string
	busyFrom time.Time
}

type startResult struct {
	index int
	err   error
}

type probeResult struct {
	c    spec.Completion
	busy bool
	mark string
	err  error
	// limit is how long the completion could take.
	limit time.Duration
}

// drive follows the events of all ranks, starts them in order, and checks by
// completions, until the group has ended or ctx has.
func (i *instance) drive(ctx context.Context, who host.Asker) {
	d := &driver{
		i: i, who: who, a: i.adapter(), t: i.m.c.Times, started: map[int]bool{}, unknown: map[string]string{}, since: map[string]time.Time{},
		starts: make(chan startResult, len(i.rec.Ranks)), warmed: make(chan probeResult, 1), probes: make(chan probeResult, 1),
	}
	if i.view().State == Degraded { // see NewManager
		d.adopted, d.missed, d.typical = true, time.Now(), cmp.Or(i.rec.Typical, d.t.Answer/4)
	}
	run, cancel := context.WithCancel(ctx)
	for _, node := range i.nodes() {
		i.m.wg.Go(func() { d.follow(run, node) })
	}
	err := d.loop(run)
	cancel()
	if ctx.Err() != nil {
		return // the agent stops, the instance goes on
	}
	i.end(ctx, who, err)
}

// follow keeps a stream of events of one node open.
func (d *driver) follow(ctx context.Context, node string) {
	send := func(e event) {
		e.node = node
		select {
		case d.i.events <- e:
		case <-ctx.Done():
		}
	}
	wait := 200 * time.Millisecond
	for ctx.Err() == nil {
		stream, cancel := context.WithCancel(ctx)
		silence := time.AfterFunc(d.t.Silence, cancel)
		err := d.i.ranksOn(node, d.who).Events(stream, d.i.rec.ID, func(e Event) error {
			silence.Reset(d.t.Silence)
			wait = 200 * time.Millisecond
			if !e.Heartbeat {
				send(event{ranks: e.Ranks, snapshot: true})
			}
			return stream.Err()
		})
		quiet := !silence.Stop()
		cancel()
		why := "the connection ended"
		switch {
		case quiet:
			why = fmt.Sprintf("nothing was heard of it for %s", d.t.Silence)
		case err != nil && !errors.Is(err, context.Canceled) && !fault.Is(err, fault.Interrupted):
			why = err.Error()
		}
		send(event{lost: true, why: why})
		if !sleep(ctx, wait) {
			return
		}
		wait = min(2*wait, 2*time.Second)
	}
}

// gather is how long after a death others are waited for, to find the first;
// gatherMost, where one that others wait for is on a node that cannot be asked.
const (
	gather     = 300 * time.Millisecond
	gatherMost = 2 * time.Second
)

func (d *driver) loop(ctx context.Context) error {
	probe := time.NewTimer(d.t.Probe)
	defer probe.Stop()
	var deaths <-chan time.Time
	var died time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.i.stop:
			return nil
		case e := <-d.i.links:
			return d.severed(e)
		case e := <-d.i.events:
			if d.take(e) && deaths == nil {
				deaths, died = time.After(gather), time.Now()
			}
			if err := d.outOfReach(); err != nil {
				return err
			}
			d.step(ctx)
			if d.adopted && !d.warm && d.loaded() {
				d.warm = true // as a probe is about to show
				probe.Reset(0)
			}
		case <-deaths:
			if d.unheard() && time.Since(died) < gatherMost {
				deaths = time.After(gather)
				continue
			}
			return d.death()
		case s := <-d.starts:
			if s.err != nil {
				return d.i.fromNode(d.i.rec.Ranks[s.index].NodeID, s.err)
			}
		case p := <-d.warmed:
			d.warming = false
			if deaths != nil {
				continue
			}
			if p.err != nil {
				return d.cold(p.err)
			}
			d.ready(p.c)
			probe.Reset(d.t.Probe)
		case <-probe.C:
			if (d.warm || d.adopted) && !d.probing && deaths == nil {
				d.probing = true
				d.i.m.wg.Go(func() { d.probe(ctx) })
			}
		case p := <-d.probes:
			d.probing = false
			if deaths == nil {
				if err := d.judge(p); err != nil {
					return err
				}
			}
			probe.Reset(d.t.Probe)
		}
	}
}

// take fills in what a node told, and reports whether a rank has died.
func (d *driver) take(e event) bool {
	i := d.i
	i.mu.Lock()
	mine := func(k int) bool { return i.rec.Ranks[k].NodeID == e.node }
	if e.lost {
		if d.unknown[e.node] = e.why; d.since[e.node].IsZero() {
			d.since[e.node] = time.Now()
		}
		for k := range i.rec.Statuses {
			if mine(k) && i.rec.Statuses[k].State != RankExited && i.rec.Statuses[k].State != RankWaiting {
				i.rec.Statuses[k].State = RankUnknown
			}
		}
		i.mu.Unlock()
		i.notify()
		return false
	}
	delete(d.unknown, e.node)
	delete(d.since, e.node)
	told := map[int]bool{}
	for _, s := range e.ranks {
		if s.Index < 0 || s.Index >= len(i.rec.Statuses) || !mine(s.Index) {
			continue
		}
		told[s.Index] = true
		i.rec.Statuses[s.Index] = s
		if s.Index == 0 && s.Total > 0 {
			i.done, i.total = s.Done, s.Total
		}
		if s.State != RankWaiting {
			d.started[s.Index] = true
		}
	}
	dead := false
	for k := range i.rec.Statuses {
		s := &i.rec.Statuses[k]
		if mine(k) && !told[k] { // its node knows nothing of it
			s.State, s.PID = RankExited, 0
			if s.Exit == "" {
				s.Exit = "gone: its node knows nothing of it"
			}
		}
		dead = dead || s.State == RankExited || s.Fatal != ""
	}
	i.mu.Unlock()
	i.notify()
	return dead
}

// loaded reports whether rank 0 is ready by its own check.
func (d *driver) loaded() bool {
	d.i.mu.Lock()
	defer d.i.mu.Unlock()
	return d.i.rec.Statuses[0].State == RankReady
}

// outOfReach gives up an instance that is still being started when one of its
// nodes cannot be asked for long.
func (d *driver) outOfReach() error {
	if d.warm || d.adopted {
		return nil // completions tell whether that matters
	}
	for node, since := range d.since {
		if time.Since(since) > d.t.Request {
			return &fault.Fault{Reason: fault.NodeDown, What: "node " + d.i.m.c.Nodes.Name(node) + " cannot be asked while the instance is started", Why: d.unknown[node], Fix: "see that it runs (`tbcluster status`), then place again"}
		}
	}
	return nil
}

// step starts what can be started and looks whether rank 0 is loaded.
func (d *driver) step(ctx context.Context) {
	i := d.i
	i.mu.Lock()
	statuses := slices.Clone(i.rec.Statuses)
	state := i.rec.State
	i.mu.Unlock()
	head := statuses[0]
	switch {
	case state == Planned || state == Copying:
		i.state(Starting, "")
	case state == Starting && head.State == RankStarting:
		i.state(Loading, "")
	case head.State == RankReady && !d.warm && !d.warming && !d.adopted:
		d.warming = true
		i.state(Warming, "")
		i.m.wg.Go(func() { d.warmUp(ctx) })
	}
	for k, r := range i.rec.Ranks {
		if d.started[k] || statuses[k].State != RankWaiting || d.unknown[r.NodeID] != "" {
			continue
		}
		if slices.ContainsFunc(r.After, func(a int) bool { return statuses[a].State != RankReady }) {
			continue
		}
		d.started[k] = true
		i.m.wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, d.t.Request)
			defer cancel()
			err := i.ranksOn(r.NodeID, d.who).Start(ctx, StartRequest{InstanceID: i.rec.ID, Engine: i.rec.Request.Engine, Rank: r})
			d.starts <- startResult{k, err}
		})
	}
}

const (
	warmTokens  = 8
	probeTokens = 1
)

// warmUp asks for the first completion: only then the instance is ready.
func (d *driver) warmUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, d.t.Warm)
	defer cancel()
	c, err := d.a.Complete(ctx, d.i.rec.Ranks[0], d.i.rec.Request.ServedNames[0], warmTokens)
	d.warmed <- probeResult{c: c, err: err}
}

func (d *driver) ready(c spec.Completion) {
	d.warm = true
	d.typical = c.Took / max(1, time.Duration(c.Tokens))
	d.i.change(func(r *record) {
		r.State, r.Reason, r.Typical = Ready, "", d.typical
		if c.TokensPerSecond > 0 {
			r.TokensPerS = c.TokensPerSecond
		}
	})
}

// cold says that the first completion did not come back.
func (d *driver) cold(err error) error {
	f := fault.FromStatus(err)
	return &fault.Fault{Reason: fault.EngineFailed, What: "rank 0 loaded the model and answers nothing", Where: d.rank(0), Why: f.Error(), Fix: fixLogs(d.i)}
}

// probe checks an instance that runs. One that is at work is judged by its
// progress, so that nobody waits for us.
func (d *driver) probe(ctx context.Context) {
	limit := d.limit()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if act := d.i.m.c.Activity; act != nil {
		if n, last, known := act(d.i.rec.ID); known && n > 0 && time.Since(last) < d.t.Probe {
			d.probes <- probeResult{busy: true, mark: last.String()}
			return
		}
	}
	head := d.i.rec.Ranks[0]
	busy, mark, err := d.a.Progress(ctx, head)
	if err == nil && !busy {
		var c spec.Completion
		c, err = d.a.Complete(ctx, head, d.i.rec.Request.ServedNames[0], probeTokens)
		d.probes <- probeResult{c: c, err: err, limit: limit}
		return
	}
	d.probes <- probeResult{busy: busy, mark: mark, err: err, limit: limit}
}

// limit is how long a check may take. After one that failed it doubles, as long
// as the instance may go without an answer at all: one that has become slow, on
// a machine with much to do, is not one that hangs.
func (d *driver) limit() time.Duration {
	limit := max(d.t.Answer, 4*d.typical)
	if d.missed.IsZero() {
		return limit
	}
	return max(limit, min(limit<<min(d.misses, 16), d.hang()-time.Since(d.missed)))
}

// hang is how long an instance may go without an answer.
func (d *driver) hang() time.Duration {
	if len(d.i.rec.Ranks) > 1 {
		return d.t.HangSplit
	}
	return d.t.Hang
}

// judge draws the conclusion from one check.
func (d *driver) judge(p probeResult) error {
	switch {
	case p.err != nil:
		why := "no completion came back within " + p.limit.Round(100*time.Millisecond).String()
		if !errors.Is(p.err, context.DeadlineExceeded) {
			why += ": " + fault.FromStatus(p.err).Why
		}
		return d.miss(why)
	case p.busy && p.mark == d.busyMark && time.Since(d.busyFrom) > max(d.t.Answer*5, 40*d.typical):
		return d.miss(fmt.Sprintf("it has not got on with its requests for %s", time.Since(d.busyFrom).Round(time.Second)))
	case p.busy:
		first := d.busyMark == ""
		if p.mark != d.busyMark {
			d.busyMark, d.busyFrom = p.mark, time.Now()
		}
		if first { // that it gets on with it the next check shows
			return nil
		}
	default:
		d.busyMark = ""
		d.typical = (3*d.typical + p.c.Took) / 4
		d.remember()
	}
	if !d.missed.IsZero() {
		d.missed, d.misses = time.Time{}, 0
		d.i.state(Ready, "")
	}
	return nil
}

// remember keeps how long an answer takes, where it has changed much, for an agent
// that is started later.
func (d *driver) remember() {
	d.i.mu.Lock()
	kept := d.i.rec.Typical
	d.i.mu.Unlock()
	if d.typical > 2*kept || d.typical < kept/2 {
		d.i.change(func(r *record) { r.Typical = d.typical })
	}
}

// miss makes the instance degraded, and after a while ends it: soon where a
// rank cannot be asked, later where there are several, last where it is alone.
func (d *driver) miss(why string) error {
	d.misses++
	where := d.rank(0)
	lost := ""
	for node, w := range d.unknown {
		lost = fmt.Sprintf("; %s cannot be asked: %s", d.i.m.c.Nodes.Name(node), w)
	}
	if d.missed.IsZero() {
		d.missed = time.Now()
		d.i.state(Degraded, where+": "+why+lost)
	}
	if lost != "" && d.misses > 1 || time.Since(d.missed) > d.hang() {
		return &fault.Fault{Reason: fault.EngineFailed, What: "the engine hangs", Where: where, Why: why + lost, Fix: fixLogs(d.i)}
	}
	return nil
}

// severed says that a cable of the instance is down.
func (d *driver) severed(e event) error {
	for k, links := range d.i.rec.Links {
		if slices.Contains(links, e.link) {
			return &fault.Fault{Reason: fault.EngineFailed, What: fmt.Sprintf("the cable to %s is down", d.rank(k)), Why: e.why,
				Fix: "plug it in again, then place again: `tbcluster status` shows the cables"}
		}
	}
	return fault.Newf(fault.Internal, "", "cable %s is of no rank", e.link)
}

// rank names a rank for people.
func (d *driver) rank(k int) string {
	r := d.i.rec.Ranks[k]
	return fmt.Sprintf("rank %d (%s) on %s", k, r.Role, d.i.m.c.Nodes.Name(r.NodeID))
}

// firstDead is the rank whose end made those of the others, and its level: one
// that others wait for is taken for the cause. It is -1 where none has died. The
// caller holds mu.
func (i *instance) firstDead() (first, deepest int) {
	first = -1
	for depth, level := range levels(i.rec.Ranks) {
		for _, k := range level {
			if s := i.rec.Statuses[k]; (s.State == RankExited || s.Fatal != "") && (first < 0 || depth > deepest) {
				first, deepest = k, depth
			}
		}
	}
	return first, deepest
}

// unheard reports whether the cause of a death may be on a node that cannot be
// asked just now.
func (d *driver) unheard() bool {
	d.i.mu.Lock()
	defer d.i.mu.Unlock()
	_, deepest := d.i.firstDead()
	for depth, level := range levels(d.i.rec.Ranks) {
		for _, k := range level {
			if depth > deepest && d.unknown[d.i.rec.Ranks[k].NodeID] != "" {
				return true
			}
		}
	}
	return false
}

// death tells which rank died first and what it said.
func (d *driver) death() error {
	i := d.i
	i.mu.Lock()
	defer i.mu.Unlock()
	first, _ := i.firstDead()
	if first < 0 {
		return fault.Newf(fault.Internal, "", "no rank of instance %s has died", i.rec.ID)
	}
	s := i.rec.Statuses[first]
	f := &fault.Fault{Reason: fault.EngineFailed, What: d.rank(first) + " ended", Why: s.Exit, Fix: fixLogs(i)}
	if s.Reason != "" {
		f.Reason = s.Reason
	}
	if fix := fixes[f.Reason]; fix != "" {
		f.Fix = fix
	}
	if s.Exit == "" {
		f.What = d.rank(first) + " failed"
	}
	words := s.Fatal
	if words == "" {
		words = lastWords(s.LastLines)
	}
	f.Why = strings.Trim(strings.Join([]string{s.Exit, words}, ": "), ": ")
	// The cause may be where nobody can be asked.
	for k, r := range i.rec.Ranks {
		if why, out := d.unknown[r.NodeID]; out && k != first {
			f.Why += fmt.Sprintf("; %s cannot be asked: %s", d.rank(k), why)
		}
	}
	f = f.With("rank", fmt.Sprint(first)).With("node", i.m.c.Nodes.Name(i.rec.Ranks[first].NodeID))
	return f
}

var complaint = regexp.MustCompile(`(?i)\berror|\bfail|\babort|\bassert|\bterminate|\bcannot\b|\bpanic\b| [EW] `)

// lastWords is the last line of the engine's own that complains, else its last.
func lastWords(lines []string) string {
	last := ""
	for _, l := range slices.Backward(lines) {
		if l = strings.TrimSpace(l); l == "" || strings.HasPrefix(l, "tbcluster: ") {
			continue
		}
		if complaint.MatchString(l) {
			return l
		}
		if last == "" {
			last = l
		}
	}
	return last
}

func fixLogs(i *instance) string {
	return fmt.Sprintf("`tbcluster logs %s` shows what it said; then place again", i.rec.Request.Name)
}

// fixes are what to do about particular reasons of an engine's end.
var fixes = map[fault.Reason]string{
	fault.PortInUse:      "end what listens there, then place again: another port is taken",
	fault.ModelBroken:    "fetch or copy the model again",
	fault.FileMissing:    "fetch or copy the model again",
	fault.EngineMismatch: "install the same build on every node",
	fault.DoesNotFit:     "free memory, or take a smaller context or model",
	fault.Unsupported:    "choose another model, or a newer build of the engine",
	fault.Usage:          "leave out or correct the engine arguments",
}
