package supervise

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/instance/spec"
)

// instance is one instance at work. One goroutine (launch or resume) drives it;
// what others tell it comes over channels.
type instance struct {
	m *Manager

	// telling keeps the order of what Change is told.
	telling sync.Mutex

	mu    sync.Mutex
	rec   record
	done  int // steps while loading
	total int

	stop   chan struct{} // closed when asked to stop
	events chan event
	links  chan event // a cable is down: one is enough
}

// event is news for the goroutine of an instance.
type event struct {
	node     string
	ranks    []RankStatus
	lost     bool   // the stream of the node broke
	link     string // a cable is down
	why      string
	snapshot bool // ranks is all that the node knows
}

func newInstance(m *Manager, rec record) *instance {
	i := &instance{m: m, rec: rec, stop: make(chan struct{}), events: make(chan event, 64), links: make(chan event, 1)}
	if rec.StopAsked {
		close(i.stop)
	}
	return i
}

// view returns what people see.
func (i *instance) view() Instance {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := &i.rec
	v := Instance{
		ID: r.ID, Name: r.Request.Name, Model: r.Request.Model.Name, ModelID: r.Request.Model.ID, Engine: r.Request.Engine,
		State: r.State, Reason: r.Reason, FailReason: r.FailReason, Fix: r.Fix, StepsDone: i.done, StepsTotal: i.total,
		OwnerNodeID: i.m.c.NodeID, CreatedAt: r.Created, StateSince: r.Since, TokensPerSecond: r.TokensPerS,
		User: r.Person.asker().String(), ContextTokens: r.Request.Context, ServedNames: slices.Clone(r.Request.ServedNames),
		Secret: r.Secret, RequestID: r.Request.RequestID,
	}
	for k, p := range r.Request.Ranks {
		v.PlannedBytes += p.NeedBytes
		out := InstanceRank{Index: k, NodeID: p.NodeID, NodeName: i.m.c.Nodes.Name(p.NodeID), State: RankWaiting}
		if k < len(r.Ranks) {
			out.Role = r.Ranks[k].Role
			for _, port := range r.Ranks[k].Ports {
				if port.Number > 0 {
					out.Listens = append(out.Listens, port.AddrPort().String())
				}
				if k == 0 && port.Name == "http" {
					v.HTTP = port.AddrPort()
				}
			}
		}
		if k < len(r.Statuses) {
			s := r.Statuses[k]
			out.State, out.PID, out.ExitStatus, out.LastLines = s.State, s.PID, s.Exit, s.LastLines
		}
		v.Ranks = append(v.Ranks, out)
	}
	return v
}

// change changes the record, keeps it and tells about it.
func (i *instance) change(f func(r *record)) {
	i.mu.Lock()
	before := i.rec.State
	f(&i.rec)
	if i.rec.State != before {
		i.rec.Since = time.Now()
	}
	if i.rec.State != Loading {
		i.done, i.total = 0, 0
	}
	err := i.m.store.save(i.rec.ID, i.rec)
	i.mu.Unlock()
	if err != nil {
		i.m.c.Log.Error("cannot keep the record of an instance", "instance", i.rec.ID, "error", err)
	}
	i.notify()
}

func (i *instance) notify() {
	i.telling.Lock()
	defer i.telling.Unlock()
	i.m.c.Change(i.view())
}

func (i *instance) state(s State, reason string) {
	i.change(func(r *record) { r.State, r.Reason = s, reason })
}

// askStop returns false when the instance is over already.
func (i *instance) askStop(remove bool) bool {
	i.mu.Lock()
	if i.rec.State.Over() {
		i.mu.Unlock()
		return false
	}
	asked := i.rec.StopAsked
	i.mu.Unlock()
	i.change(func(r *record) {
		r.StopAsked = true
		r.RemoveAsked = r.RemoveAsked || remove
		if !r.State.Over() {
			r.State = Stopping
		}
	})
	if !asked {
		close(i.stop)
	}
	return true
}

// tellLink hands on that a cable is down, if a rank is reached by it.
func (i *instance) tellLink(link, why string) {
	i.mu.Lock()
	over := i.rec.State.Over()
	hit := false
	for _, links := range i.rec.Links {
		hit = hit || slices.Contains(links, link)
	}
	i.mu.Unlock()
	if over || !hit {
		return
	}
	select {
	case i.links <- event{link: link, why: why}:
	default: // another one has ended it already
	}
}

func (i *instance) adapter() spec.Adapter { return i.m.adapter(i.rec.Request.Engine) }

func (i *instance) ranksOn(node string, who host.Asker) RankService {
	return i.m.c.Nodes.RankService(node, who)
}

// nodes are the nodes of the ranks, each once, that of rank 0 first.
func (i *instance) nodes() []string {
	var out []string
	for _, p := range i.rec.Request.Ranks {
		if !slices.Contains(out, p.NodeID) {
			out = append(out, p.NodeID)
		}
	}
	return out
}

// specRequest is the placement as adapters know it.
func (i *instance) specRequest() spec.Request {
	q := &i.rec.Request
	r := spec.Request{
		InstanceID: i.rec.ID, InstanceName: q.Name, Model: q.Model, ModelPaths: map[string]string{}, Context: q.Context,
		ExtraArgs: q.EngineArgs, Secret: i.rec.Secret, Engines: map[string]spec.Engine{},
	}
	if len(q.ServedNames) > 0 {
		r.ServedName = q.ServedNames[0]
	}
	for _, p := range q.Ranks {
		r.Nodes = append(r.Nodes, p.NodeID)
		r.Layers = append(r.Layers, p.Layers)
		if p.ModelPath != "" {
			r.ModelPaths[p.NodeID] = p.ModelPath
		}
	}
	return r
}

// prepare takes ports and memory on every node, checks engines and files, and
// fills the ranks. When it fails nothing is held anywhere.
func (i *instance) prepare(ctx context.Context, who host.Asker) (err error) {
	ctx, cancel := context.WithTimeout(ctx, i.m.c.Times.Request)
	defer cancel()
	q := i.specRequest()
	ranks, err := i.adapter().Describe(q)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			// Even where the answer never came: the grant may be there.
			if e := i.releaseAll(context.WithoutCancel(ctx), false); e != nil {
				i.m.c.Log.Warn("grants are left to expire", "instance", i.rec.ID, "error", e)
			}
		}
	}()
	grants, err := i.reserve(ctx, who, ranks)
	if err != nil {
		return err
	}
	links := map[int][]string{}
	for k := range ranks {
		g := grants[ranks[k].NodeID]
		q.Engines[ranks[k].NodeID] = g.Engine
		if len(g.Ports[k]) != len(ranks[k].Ports) {
			return fault.Newf(fault.Protocol, "run the same version of tbcluster on every node", "the grant lacks ports of rank %d", k).At(i.m.c.Nodes.Name(ranks[k].NodeID))
		}
		ranks[k].Ports = g.Ports[k]
		if k > 0 {
			links[k] = g.Links
		}
	}
	if err := i.sameBuild(q.Engines); err != nil {
		return err
	}
	if err := i.adapter().Finish(q, ranks); err != nil {
		return err
	}
	if err := i.checkFiles(ctx, who, ranks, q.ModelPaths); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.rec.Ranks, i.rec.Links = ranks, links
	i.rec.Statuses = make([]RankStatus, len(ranks))
	for k := range ranks {
		i.rec.Statuses[k] = RankStatus{Index: k, State: RankWaiting}
	}
	return nil
}

// reserve asks all nodes at once.
func (i *instance) reserve(ctx context.Context, who host.Asker, ranks []spec.Rank) (map[string]Grant, error) {
	grants := map[string]Grant{}
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for _, node := range i.nodes() {
		q := ReserveRequest{InstanceID: i.rec.ID, InstanceName: i.rec.Request.Name, Engine: i.rec.Request.Engine, Insecure: i.rec.Request.Insecure}
		for k, r := range ranks {
			if r.NodeID != node {
				continue
			}
			q.Ranks = append(q.Ranks, r)
			p := i.rec.Request.Ranks[k]
			q.NeedBytes += p.NeedBytes
			q.HeadroomBytes = max(q.HeadroomBytes, p.HeadroomBytes)
		}
		q.Peers = i.peers(node)
		wg.Go(func() {
			g, err := i.ranksOn(node, who).Reserve(ctx, q)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, i.fromNode(node, err))
				return
			}
			grants[node] = g
		})
	}
	wg.Wait()
	if len(errs) > 0 {
		return nil, errs[0]
	}
	return grants, nil
}

// peers are the nodes that must reach the rank ports of a node.
func (i *instance) peers(node string) []string {
	all := i.nodes()
	if i.adapter().Traits().Star {
		if node == all[0] {
			return nil
		}
		return all[:1]
	}
	return slices.DeleteFunc(all, func(n string) bool { return n == node })
}

// fromNode says where an error comes from.
func (i *instance) fromNode(node string, err error) error {
	f := fault.FromStatus(err)
	if f.Where == "" {
		f.Where = i.m.c.Nodes.Name(node)
	}
	if f.Reason == fault.Timeout || f.Reason == fault.NoAgent {
		g := *f
		g.Reason, g.What, g.Fix = fault.NodeDown, "node "+i.m.c.Nodes.Name(node)+" does not answer", "see that it runs: `tbcluster status`"
		f = &g
	}
	return f
}

func (i *instance) sameBuild(engines map[string]spec.Engine) error {
	if !i.adapter().Traits().SameBuild {
		return nil
	}
	head := i.nodes()[0]
	for _, node := range i.nodes() {
		if a, b := engines[head].Version, engines[node].Version; a != b {
			name := i.m.c.Nodes.Name
			return &fault.Fault{Reason: fault.EngineMismatch, What: fmt.Sprintf("the builds of %s differ", i.rec.Request.Engine), Where: name(node),
				Why: fmt.Sprintf("%s has %s, %s has %s", name(head), a, name(node), b), Fix: "install the same build on every node"}
		}
	}
	return nil
}

func (i *instance) checkFiles(ctx context.Context, who host.Asker, ranks []spec.Rank, paths map[string]string) error {
	for _, r := range ranks {
		if len(r.Files) == 0 {
			continue
		}
		err := i.ranksOn(r.NodeID, who).CheckFiles(ctx, CheckFilesRequest{InstanceID: i.rec.ID, Path: paths[r.NodeID], Files: r.Files})
		if err != nil {
			return i.fromNode(r.NodeID, err)
		}
	}
	return nil
}

// copyMissing brings the model to where it must be.
func (i *instance) copyMissing(ctx context.Context, who host.Asker) error {
	for k, p := range i.rec.Request.Ranks {
		if !p.MustCopy {
			continue
		}
		if i.m.c.Copier == nil {
			return fault.Newf(fault.Unsupported, "copy it with `tbcluster cp`", "the model cannot be copied from here")
		}
		name := i.m.c.Nodes.Name(p.NodeID)
		i.state(Copying, "copying the model to "+name)
		var last time.Time
		path, err := i.m.c.Copier.CopyModel(ctx, who, i.rec.ID, i.rec.Request.Model, p.NodeID, func(done, total uint64) {
			if total == 0 || time.Since(last) < time.Second && done < total {
				return // how much it is turns out once both sides were looked at
			}
			last = time.Now()
			i.mu.Lock()
			i.rec.Reason = fmt.Sprintf("copying the model to %s: %d of %d MiB", name, done>>20, total>>20)
			i.mu.Unlock()
			i.notify()
		})
		if err != nil {
			return i.fromNode(p.NodeID, err)
		}
		i.change(func(r *record) { r.Request.Ranks[k].ModelPath, r.Request.Ranks[k].MustCopy = path, false })
	}
	return nil
}

// launch copies, prepares where that was not done, and drives the instance.
func (i *instance) launch(ctx context.Context, who keptAsker) {
	stopped, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-i.stop:
			cancel()
		case <-stopped.Done():
		}
	}()
	if len(i.rec.Ranks) == 0 {
		err := i.copyMissing(stopped, who.asker)
		if err == nil {
			err = i.prepare(stopped, who.asker)
		}
		if ctx.Err() != nil {
			return // the next agent says that it was interrupted
		}
		if err != nil {
			if i.stopping() {
				err = nil
			}
			i.end(ctx, who.asker, err)
			return
		}
	}
	i.drive(ctx, who.asker)
}

func (i *instance) stopping() bool {
	select {
	case <-i.stop:
		return true
	default:
		return false
	}
}

// resume takes up an instance from its record.
func (i *instance) resume(ctx context.Context) {
	i.mu.Lock()
	rec := i.rec
	i.mu.Unlock()
	who := rec.Person.asker()
	switch {
	case rec.State.Over():
		i.releaseRest(ctx)
	case rec.State == Stopping && rec.FailReason != "":
		i.end(ctx, who, &fault.Fault{Reason: rec.FailReason, What: rec.Reason, Fix: rec.Fix})
	case len(i.rec.Ranks) == 0:
		i.end(ctx, who, fault.Newf(fault.Interrupted, "place it again", "the agent of %s was started again while instance %s was being prepared", i.m.c.Nodes.Name(i.m.c.NodeID), i.rec.Request.Name))
	default:
		i.drive(ctx, who)
	}
}

// releaseAll gives back what the instance holds on every node.
func (i *instance) releaseAll(ctx context.Context, remove bool) error {
	ctx, cancel := context.WithTimeout(ctx, i.m.c.Times.Request)
	defer cancel()
	var mu sync.Mutex
	var errs []error
	var left []string
	var wg sync.WaitGroup
	for _, node := range i.nodes() {
		wg.Go(func() {
			err := i.ranksOn(node, i.rec.Person.asker()).Release(ctx, ReleaseRequest{InstanceID: i.rec.ID, Remove: remove})
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				left = append(left, node)
				errs = append(errs, i.fromNode(node, err))
			}
		})
	}
	wg.Wait()
	i.mu.Lock()
	i.rec.Unreleased = left
	i.mu.Unlock()
	return errors.Join(errs...)
}

// end ends the group and says why: err is nil when it was asked to stop.
func (i *instance) end(ctx context.Context, who host.Asker, err error) {
	f := fault.FromStatus(err)
	if err != nil {
		why := describeFault(f)
		i.change(func(r *record) { r.State, r.Reason, r.FailReason, r.Fix = Stopping, why, f.Reason, f.Fix })
	} else {
		i.state(Stopping, "")
	}
	i.endRanks(ctx, who, err != nil)
	if ctx.Err() != nil {
		return // the next agent goes on
	}
	if e := i.releaseAll(ctx, false); e != nil {
		i.m.c.Log.Warn("ranks are not released yet", "instance", i.rec.ID, "error", e)
	}
	remove := false
	i.change(func(r *record) {
		remove = r.RemoveAsked
		if len(r.Unreleased) == 0 {
			r.settle()
		}
		if r.State = Stopped; err != nil {
			r.State = Failed
		}
	})
	if remove {
		if e := i.m.remove(i.rec.ID); e != nil {
			i.m.c.Log.Warn("cannot remove an instance", "instance", i.rec.ID, "error", e)
		}
		return
	}
	i.releaseRest(ctx)
}

// describeFault is the reason of an instance: where, what and why.
func describeFault(f *fault.Fault) string {
	if f.Where != "" && !strings.Contains(f.What, f.Where) {
		return f.Error()
	}
	g := *f
	g.Where = ""
	return g.Error()
}

// endRanks ends the ranks in reverse order of their start, and waits.
func (i *instance) endRanks(ctx context.Context, who host.Asker, failed bool) {
	grace := time.Duration(0)
	if failed {
		grace = i.m.c.Times.FailGrace
	}
	for _, level := range levels(i.rec.Ranks) {
		var wg sync.WaitGroup
		byNode := map[string][]int{}
		for _, k := range level {
			byNode[i.rec.Ranks[k].NodeID] = append(byNode[i.rec.Ranks[k].NodeID], k)
		}
		for node, indexes := range byNode {
			wg.Go(func() {
				limit := grace + afterKill + i.m.c.Times.Request
				if grace == 0 {
					limit += stopLimit
				}
				ctx, cancel := context.WithTimeout(ctx, limit)
				defer cancel()
				err := i.ranksOn(node, who).Stop(ctx, StopRequest{InstanceID: i.rec.ID, Indexes: indexes, Grace: grace})
				if err != nil && ctx.Err() == nil {
					i.m.c.Log.Warn("cannot end ranks", "instance", i.rec.ID, "node", node, "ranks", indexes, "error", err)
				}
				if st, err := i.ranksOn(node, who).Status(ctx, i.rec.ID); err == nil {
					i.mu.Lock()
					i.take(st)
					i.mu.Unlock()
				}
			})
		}
		wg.Wait()
	}
}

// stopLimit is above the grace that shims give.
const stopLimit = 2 * time.Minute

// levels orders ranks for their end: those that others wait for come last.
func levels(ranks []spec.Rank) [][]int {
	depth := make([]int, len(ranks))
	for range ranks { // enough for any chain
		for k, r := range ranks {
			for _, a := range r.After {
				if a >= 0 && a < len(ranks) && depth[a] <= depth[k] && depth[k] < len(ranks) {
					depth[a] = depth[k] + 1
				}
			}
		}
	}
	var out [][]int
	for d := range len(ranks) + 1 {
		var level []int
		for k := range ranks {
			if depth[k] == d {
				level = append(level, k)
			}
		}
		if level != nil {
			out = append(out, level)
		}
	}
	return out
}

// releaseRest goes on asking the nodes that could not be asked, and learns from
// them how their ranks ended.
func (i *instance) releaseRest(ctx context.Context) {
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		i.mu.Lock()
		left := slices.Clone(i.rec.Unreleased)
		i.mu.Unlock()
		if len(left) == 0 || !sleep(ctx, wait) {
			return
		}
		err := i.releaseAll(ctx, false)
		for _, node := range left {
			i.mu.Lock()
			still := slices.Contains(i.rec.Unreleased, node)
			i.mu.Unlock()
			if still {
				continue
			}
			ask, cancel := context.WithTimeout(ctx, i.m.c.Times.Request)
			st, err := i.ranksOn(node, i.rec.Person.asker()).Status(ask, i.rec.ID)
			cancel()
			if err != nil {
				i.m.c.Log.Warn("cannot ask how ranks ended", "instance", i.rec.ID, "node", node, "error", err)
				continue
			}
			i.mu.Lock()
			i.take(st)
			i.mu.Unlock()
		}
		i.change(func(r *record) {
			if err == nil {
				r.settle()
			}
		})
	}
}

// take fills statuses in; i.mu is held.
func (i *instance) take(all []RankStatus) {
	for _, s := range all {
		if s.Index >= 0 && s.Index < len(i.rec.Statuses) {
			i.rec.Statuses[s.Index] = s
		}
	}
}
