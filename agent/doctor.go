package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/doctor"
	"tbcluster/host"
	"tbcluster/mesh/address"
)

// doctorEvery is how often a node among n others looks for what is wrong with it
// unasked. Soon after a node or own cable got into another state it looks too: most
// findings are about that, one that is gone should not stand there any longer,
// and one that has come is wanted.
func doctorEvery(n int) time.Duration {
	return max(10*time.Second, time.Duration(n)*time.Second/2)
}

// doctorSoon is how soon after a change a node looks, and how long apart two
// looks are for that.
const doctorSoon = time.Second

// doctorLoop keeps this node's findings true.
func (a *Agent) doctorLoop(ctx context.Context) {
	var known uint64
	var due time.Time
	for pause(ctx, doctorSoon) {
		s, news := a.board.get()
		now := standing(s)
		if now == known && time.Now().Before(due) {
			unasked := time.NewTimer(time.Until(due))
			select {
			case <-ctx.Done():
			case <-news:
			case <-unasked.C:
			}
			unasked.Stop()
			continue
		}
		a.examine(ctx)
		known, due = now, time.Now().Add(doctorEvery(int(a.others.Load())))
	}
}

// pause waits, and reports whether ctx is still good then.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// standing is another number when a node or a cable of this one came, went or got
// into another state: no check is about the cables of others.
func standing(s *v1.ClusterState) uint64 {
	h := fnv.New64a()
	put := func(id string, state int32) {
		var b [4]byte
		binary.LittleEndian.PutUint32(b[:], uint32(state))
		// A hash takes everything.
		_, _ = h.Write([]byte(id))
		_, _ = h.Write(b[:])
	}
	for _, n := range s.Nodes {
		put(n.Id, int32(n.State))
	}
	for _, l := range s.Links {
		if a, b := l.A.GetNodeId(), l.B.GetNodeId(); a == s.SelfNodeId || b == s.SelfNodeId {
			put(l.Id+b, int32(l.State))
		}
	}
	return h.Sum64()
}

// examine runs every check on this node and publishes what it found.
func (a *Agent) examine(ctx context.Context) []*v1.Finding {
	found := doctor.Check(a.doctorFacts(ctx))
	if a.models.setFindings(found) {
		a.poke()
	}
	return found
}

// maxTowards bounds for how many addresses the way is looked up.
const maxTowards = 64

// diagnose asks the machine what else is wrong with it, for what d tells.
func (a *Agent) diagnose(ctx context.Context, d *doctor.Facts) {
	q := host.Query{}
	for _, far := range slices.SortedFunc(maps.Keys(d.Towards()), netip.Addr.Compare) {
		if len(q.Towards) < maxTowards {
			q.Towards = append(q.Towards, far)
		}
	}
	var err error
	if d.Diagnosis, err = a.opt.Host.Diagnose(ctx, q); err != nil && ctx.Err() == nil {
		a.log.Warn("look for what is wrong with the machine", "error", err) // what was found counts all the same
	}
	if !slices.ContainsFunc(d.Links, d.Suspicious) {
		return
	}
	if d.Firewalls, err = a.root.Firewalls(ctx); err != nil && !errors.Is(err, host.ErrPermission) && ctx.Err() == nil {
		a.log.Warn("look for firewalls", "error", err)
	}
}

// heard are the nodes that announce themselves and are not connected, with
// since when both are so.
func (a *Agent) heard(now time.Time, nodes []*v1.Node) map[string]doctor.Heard {
	apart := map[string]*v1.Node{}
	for _, n := range nodes {
		if n.State == v1.NodeState_NODE_STATE_DOWN || n.State == v1.NodeState_NODE_STATE_UNKNOWN {
			apart[n.Id] = n
		}
	}
	out := map[string]doctor.Heard{}
	for _, c := range a.finder.Candidates() {
		n := apart[string(c.Node)]
		if n == nil || len(c.Addresses) == 0 {
			continue
		}
		// An announcement of before it went down, or of long ago, says nothing. One
		// that is later than now is of before the clock was set back.
		if down := n.StateSince.AsTime(); now.Sub(c.Seen) > a.finder.AskedWithin() || c.Seen.Before(down) && !down.After(now) {
			continue
		}
		at := c.Addresses[0].Addr
		h := doctor.Heard{Address: at.String(), Port: int(at.Port()), Since: now}
		if was, ok := a.heardSince[n.Id]; ok {
			h.Since = was
		}
		out[n.Id] = h
	}
	a.heardSince = map[string]time.Time{}
	for id, h := range out {
		a.heardSince[id] = h.Since
	}
	return out
}

func (a *Agent) doctorFacts(ctx context.Context) doctor.Facts {
	a.examining.Lock()
	defer a.examining.Unlock()
	f := a.facts.Load()
	s, _ := a.board.get()
	d := doctor.Facts{Now: time.Now(), Self: a.id(), Name: a.name(), Machine: f.machine, Thunderbolt: f.tb, Network: f.net,
		Nodes: s.Nodes, Links: s.Links, Wanted: a.address.Wanted(), Version: a.opt.Version,
		ClockOffsets: map[string]time.Duration{}, Untrusting: map[string]bool{}, DataInterface: map[string]string{},
		Config: doctor.Config{MemoryLimitBytes: uint64(a.opt.Config.MemoryBytes)}}
	for _, c := range d.Wanted {
		d.Commands = append(d.Commands, a.opt.Host.Commands(c)...)
	}
	for _, c := range a.address.Applied() {
		if c.Kind == host.ChangeUnmanage {
			d.Released = append(d.Released, doctor.Released{Manager: c.Manager, Interface: c.Interface, Did: a.opt.Host.Commands(c)})
		}
	}
	for _, c := range a.address.Conflicts() {
		d.Conflicts = append(d.Conflicts, a.conflict(c))
	}
	if active, reason := a.address.FilterActive(); !active {
		d.FilterReason = reason
	}
	for _, p := range []string{a.opt.Paths.State, a.models.home()} {
		var st syscall.Statfs_t
		if p == "" || syscall.Statfs(p, &st) != nil {
			continue // nothing is known of it, which is no finding
		}
		d.Disks = append(d.Disks, doctor.Disk{Path: p, Free: st.Bavail * uint64(st.Bsize), Total: st.Blocks * uint64(st.Bsize)})
	}
	for _, e := range a.models.engines() {
		d.Engines = append(d.Engines, doctor.Engine{Name: e.Name, Available: e.Available, Reason: e.Reason, Installable: e.Name == "llamacpp"})
	}
	for _, v := range a.member.Snapshot() {
		d.ClockOffsets[string(v.ID)] = v.ClockSkew
		d.Untrusting[string(v.ID)] = v.Untrusting
	}
	for _, t := range a.moves.active() {
		for _, l := range t.Links {
			if l.LinkId == "" && l.BytesPerSecond > 0 && t.SourceNodeId == a.id() {
				d.DataInterface[t.DestinationNodeId] = l.Interface
			}
		}
	}
	d.Multicast = a.multicast()
	unheard, hears := a.finder.Unheard()
	d.Hears = hears
	for _, id := range unheard {
		if _, ok := a.store.Member(id); ok {
			d.Unheard = append(d.Unheard, string(id))
		}
	}
	d.Renewed = a.replaced(s)
	d.Heard = a.heard(d.Now, d.Nodes)
	a.diagnose(ctx, &d)
	return d
}

// conflict is a clash of addresses with nodes by their names.
func (a *Agent) conflict(c address.Conflict) doctor.Conflict {
	out := doctor.Conflict{Prefix: c.Prefix.String(), Port: c.Port, Node: c.Node, With: c.With}
	if c.Node != "" {
		out.With += " of " + a.name()
	}
	out.With = a.named(out.With)
	return out
}

// named is a text with the names of nodes in place of their IDs.
func (a *Agent) named(text string) string {
	if text == "" {
		return ""
	}
	for _, m := range a.store.Members() {
		text = strings.ReplaceAll(text, string(m.ID), a.nameOf(m.ID))
	}
	return strings.ReplaceAll(text, a.id(), a.name())
}

// multicast says why announcements cannot be sent; "" if they can.
func (a *Agent) multicast() string {
	var out []string
	for _, t := range a.finder.Troubles() {
		if t.Blocked() {
			out = append(out, t.String())
		}
	}
	return strings.Join(out, "; ")
}

// doctorServer looks for what is wrong.
type doctorServer struct {
	v1.UnimplementedDoctorServiceServer
	a *Agent
}

func (s *doctorServer) checkHere(ctx context.Context, _ *v1.CheckRequest) (*v1.CheckResponse, error) {
	return &v1.CheckResponse{Findings: s.a.examine(ctx)}, nil
}

// Check runs every check on the named nodes, or on all.
func (s *doctorServer) Check(ctx context.Context, q *v1.CheckRequest) (*v1.CheckResponse, error) {
	st, _ := s.a.board.get()
	nodes := st.Nodes
	if len(q.Nodes) > 0 {
		nodes = nil
		for _, name := range q.Nodes {
			n, err := s.a.findNode(name)
			if err != nil {
				return nil, err
			}
			nodes = append(nodes, n)
		}
	}
	out := &v1.CheckResponse{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() {
			r, err := &v1.CheckResponse{}, error(nil)
			switch {
			case n.Self:
				r, err = s.checkHere(ctx, q)
			case n.State == v1.NodeState_NODE_STATE_UP || n.State == v1.NodeState_NODE_STATE_SUSPECT:
				ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
				defer cancel()
				err = s.a.ask(ctx, n.Id, "/tbcluster.v1.DoctorService/Check", &v1.CheckRequest{}, r)
			default:
				f := fault.Newf(fault.NodeDown, "start it: `tbcluster up` there", "look at %s", n.Name)
				f.Why = "it is down: " + n.Reason
				err = f
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Failures = append(out.Failures, failureOf(fault.FromStatus(err)))
				return
			}
			for _, f := range r.Findings {
				f = proto.CloneOf(f) // own ones are being published
				f.NodeId, f.NodeName = n.Id, n.Name
				out.Findings = append(out.Findings, f)
			}
		})
	}
	wg.Wait()
	st, _ = s.a.board.get() // as it is now that they have looked
	sorted := &v1.ClusterState{Findings: out.Findings}
	order(sorted)
	out.Findings = doctor.Standing(st, sorted.Findings)
	return out, nil
}
