package supervise

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/instance/rank"
	"tbcluster/instance/spec"
)

// LocalConfig is what LocalRanks needs.
type LocalConfig struct {
	NodeID string
	// Dir is where records are kept: ranks/ in it.
	Dir      string
	Adapters []spec.Adapter
	Spawner  Spawner
	Files    Files
	Machine  Machine
	Nodes    Nodes
	Ports    PortRange
	Times    Times
	Log      *slog.Logger
}

// Times are the intervals and limits; zero values mean the defaults.
type Times struct {
	// Grant is how long a grant lasts that is not used.
	Grant time.Duration
	// Orphan is how long ranks live on when nobody owns them: their owner
	// cannot be asked, and no stream of events is open.
	Orphan time.Duration
	// Severed is Orphan where the cable to the owner is down too.
	Severed time.Duration
	// Heartbeat is the pace of events, and Silence how long one may be missing.
	Heartbeat, Silence time.Duration
	// Poll is the pace at which a starting rank is looked at.
	Poll time.Duration
	// Listen is how long an engine may take until it listens, Stall how long it
	// may load without getting on with anything.
	Listen, Stall time.Duration
	// Probe is the pace of completions while idle, Answer how long one may take.
	Probe, Answer time.Duration
	// Warm is how long the first completion may take.
	Warm time.Duration
	// Hang is how long an instance may be degraded before its group is ended;
	// HangSplit the same for several ranks, of which one may hang for another.
	Hang, HangSplit time.Duration
	// FailGrace is how long the others have to end when one rank has died.
	FailGrace time.Duration
	// Request is how long a request to a node may take.
	Request time.Duration
}

func (t Times) withDefaults() Times {
	set := func(d *time.Duration, def time.Duration) {
		if *d == 0 {
			*d = def
		}
	}
	set(&t.Grant, time.Minute)
	set(&t.Orphan, 10*time.Minute)
	set(&t.Severed, 10*time.Second)
	set(&t.Heartbeat, time.Second)
	set(&t.Silence, 3*time.Second)
	set(&t.Poll, 50*time.Millisecond)
	set(&t.Listen, time.Minute)
	set(&t.Stall, 2*time.Minute)
	set(&t.Probe, 2*time.Second)
	set(&t.Answer, 2*time.Second)
	set(&t.Warm, 2*time.Minute)
	set(&t.Hang, time.Minute)
	set(&t.HangSplit, 20*time.Second)
	set(&t.FailGrace, failGrace)
	set(&t.Request, 20*time.Second)
	return t
}

// LocalRanks serves the ranks of this node, to its own Manager and to those of
// other nodes. It must be closed; ranks live on.
type LocalRanks struct {
	c      LocalConfig
	store  store
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	reserving sync.Mutex // one reservation looks at memory and ports at a time

	mu     sync.Mutex
	ports  *ports
	held   map[string]*holding // by instance
	down   map[string]bool     // links that are down
	claims func(instanceID string) bool
}

// holding is what an instance holds on this node.
type holding struct {
	rec  holdingRecord
	subs map[chan struct{}]bool // woken at each change
	// expires is set while no rank was started.
	expires time.Time
	// unowned is since when no stream of events is open.
	unowned time.Time
	asking  bool // the owner is being asked whether it owns it
	ending  bool
}

// holdingRecord is the part of a holding that is on disk once a rank starts.
type holdingRecord struct {
	InstanceID    string            `json:"instance_id"`
	InstanceName  string            `json:"instance_name"`
	Engine        spec.Engine       `json:"engine"`
	Owner         string            `json:"owner"` // node ID
	Person        person            `json:"person"`
	Links         []string          `json:"links"`
	NeedBytes     uint64            `json:"need_bytes"` // without headroom
	Ranks         map[int]*heldRank `json:"ranks"`
	HeadroomBytes uint64            `json:"headroom_bytes"`
}

type heldRank struct {
	Rank    spec.Rank  `json:"rank"`
	Started bool       `json:"started"`
	Status  RankStatus `json:"status"`
	gone    chan struct{}
	settled bool // its memory shows in the machine's
}

// NewLocalRanks reads the records in c.Dir and adopts the ranks that still run.
// Records that cannot be read are in the error; the LocalRanks works without
// them.
func NewLocalRanks(c LocalConfig) (*LocalRanks, error) {
	c.Times = c.Times.withDefaults()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	st, err := newStore(filepath.Join(c.Dir, "ranks"))
	if err != nil {
		return nil, err
	}
	l := &LocalRanks{c: c, store: st, ports: newPorts(c.Ports, c.NodeID), held: map[string]*holding{}, down: map[string]bool{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	err = st.load(func(id string, data []byte) error {
		var rec holdingRecord
		if err := json.Unmarshal(data, &rec); err != nil {
			return err
		}
		if rec.InstanceID != id {
			return fmt.Errorf("it is of %q", rec.InstanceID)
		}
		l.adopt(rec)
		return nil
	})
	l.wg.Go(l.lookAfter)
	return l, err
}

// Close stops watching. Ranks are left alone.
func (l *LocalRanks) Close() {
	l.cancel()
	l.wg.Wait()
}

func (l *LocalRanks) adopt(rec holdingRecord) {
	h := &holding{rec: rec, subs: map[chan struct{}]bool{}, unowned: time.Now()}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[rec.InstanceID] = h
	for _, r := range rec.Ranks {
		if !r.Started || r.Status.State == RankExited {
			r.gone = closed()
			continue
		}
		for _, p := range r.Rank.Ports {
			l.ports.held[p.AddrPort()] = rec.InstanceID
		}
		r.Status.State = RankStarting // until its own check says more
		l.watch(h, r)
	}
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func (l *LocalRanks) adapter(name string) spec.Adapter {
	for _, a := range l.c.Adapters {
		if a.Name() == name {
			return a
		}
	}
	return nil
}

// Ranks returns the RankService of this node for a person at this node.
func (l *LocalRanks) Ranks(who host.Asker) RankService { return l.service(who, l.c.NodeID) }

func (l *LocalRanks) service(who host.Asker, owner string) *localService {
	return &localService{l, who, owner}
}

// localService is LocalRanks as one person and owner sees it.
type localService struct {
	l     *LocalRanks
	who   host.Asker
	owner string // node ID
}

// mine returns what an instance of the owner holds; nil when it holds nothing.
func (s *localService) mine(id string) (*holding, error) {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	h := s.l.held[id]
	if h != nil && h.rec.Owner != s.owner {
		return nil, fault.Newf(fault.Denied, "", "instance %s is owned by another node", id)
	}
	return h, nil
}

func (s *localService) at(err error) error {
	if err == nil {
		return nil
	}
	f := fault.FromStatus(err)
	if f.Where == "" {
		f.Where = s.l.name()
	}
	return f
}

func (l *LocalRanks) name() string { return l.c.Nodes.Name(l.c.NodeID) }

// Reserve implements RankService.
func (s *localService) Reserve(ctx context.Context, q ReserveRequest) (Grant, error) {
	g, err := s.reserve(ctx, q)
	return g, s.at(err)
}

func (s *localService) reserve(ctx context.Context, q ReserveRequest) (Grant, error) {
	l := s.l
	if !instanceID.MatchString(q.InstanceID) {
		return Grant{}, fault.Newf(fault.Protocol, "", "%q is no ID of an instance", q.InstanceID)
	}
	if h, err := s.mine(q.InstanceID); err != nil {
		return Grant{}, err
	} else if h != nil {
		return Grant{}, fault.Newf(fault.InstanceExists, "", "instance %s holds something already", q.InstanceID)
	}
	if l.adapter(q.Engine) == nil {
		return Grant{}, fault.Newf(fault.EngineMissing, "run the same version of tbcluster on every node", "engine %q is not known", q.Engine)
	}
	engine, err := l.c.Files.DetectEngine(ctx, s.who, q.Engine)
	if err != nil {
		return Grant{}, err
	}
	if err := usable(engine, q); err != nil {
		return Grant{}, err
	}
	l.reserving.Lock()
	defer l.reserving.Unlock()
	if err := l.checkMemory(ctx, q); err != nil {
		return Grant{}, err
	}
	h, err := s.grant(ctx, q, engine)
	if err != nil {
		l.mu.Lock()
		l.ports.release(q.InstanceID)
		l.mu.Unlock()
		return Grant{}, err
	}
	out := Grant{Ports: map[int][]spec.Port{}, Links: h.rec.Links, Engine: engine, Expires: l.c.Times.Grant}
	for i, r := range h.rec.Ranks {
		out.Ports[i] = slices.Clone(r.Rank.Ports)
	}
	return out, nil
}

// usable says why the ranks of a request cannot run with that engine.
func usable(e spec.Engine, q ReserveRequest) error {
	fix := fmt.Sprintf("install it there: `tbcluster engine install %s`", q.Engine)
	if !e.Available {
		return fault.New(fault.EngineMissing, fmt.Sprintf("engine %s is missing", q.Engine), errors.New(e.Reason), fix)
	}
	for _, r := range q.Ranks {
		if e.Programs[r.Program] == "" {
			return fault.New(fault.EngineMissing, fmt.Sprintf("the program of engine %s for role %s is missing", q.Engine, r.Role), fmt.Errorf("%s has none beside it", e.Path), fix)
		}
	}
	return nil
}

// grant takes addresses and ports, and remembers them.
func (s *localService) grant(ctx context.Context, q ReserveRequest, engine spec.Engine) (*holding, error) {
	l := s.l
	h := &holding{
		rec: holdingRecord{
			InstanceID: q.InstanceID, InstanceName: q.InstanceName, Engine: engine, Owner: s.owner, Person: personOf(s.who),
			NeedBytes: q.NeedBytes - min(q.NeedBytes, q.HeadroomBytes), HeadroomBytes: q.HeadroomBytes, Ranks: map[int]*heldRank{},
		},
		subs: map[chan struct{}]bool{}, expires: time.Now().Add(l.c.Times.Grant), unowned: time.Now(),
	}
	for _, r := range q.Ranks {
		r.Ports = slices.Clone(r.Ports)
		for i := range r.Ports {
			p := &r.Ports[i]
			switch p.Reach {
			case spec.ReachLoopback:
				p.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
			case spec.ReachRanks:
				if err := l.cable(ctx, q, p, h); err != nil {
					return nil, err
				}
			default:
				return nil, fault.Newf(fault.Protocol, "run the same version of tbcluster on every node", "port %s of rank %d must be reached by %q", p.Name, r.Index, p.Reach)
			}
			l.mu.Lock()
			n, err := l.ports.take(p.Address, q.InstanceID)
			l.mu.Unlock()
			if err != nil {
				return nil, err
			}
			p.Number = n
		}
		h.rec.Ranks[r.Index] = &heldRank{Rank: r, Status: RankStatus{Index: r.Index, State: RankWaiting}, gone: closed()}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[q.InstanceID] = h
	return h, nil
}

// cable chooses the address of a port that the peers must reach.
func (l *LocalRanks) cable(ctx context.Context, q ReserveRequest, p *spec.Port, h *holding) error {
	if len(q.Peers) == 0 {
		return fault.Newf(fault.Protocol, "", "a port for other ranks, and no node that must reach it")
	}
	for i, peer := range q.Peers {
		addr, link, err := l.c.Machine.AddressTo(ctx, peer)
		if err != nil {
			return err
		}
		switch {
		case i == 0:
			p.Address = addr
		case addr != p.Address:
			return fault.Newf(fault.Unsupported, "", "rank ports that several nodes reach by different cables")
		}
		if !slices.Contains(h.rec.Links, link) {
			h.rec.Links = append(h.rec.Links, link)
		}
	}
	return l.c.Machine.CloseToLAN(ctx, p.Address, q.Insecure)
}

// Budget returns the memory that a further rank may take here, headroom
// included, in bytes: what is available less what was granted and does not show
// yet, and never more than all memory less all grants.
func (l *LocalRanks) Budget(ctx context.Context) (uint64, error) {
	total, available, err := l.c.Machine.Memory(ctx)
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var all, hidden uint64
	for _, h := range l.held {
		if !h.alive() {
			continue
		}
		all += h.rec.NeedBytes
		if !h.settled() {
			hidden += h.rec.NeedBytes
		}
	}
	return min(total-min(total, all), available-min(available, hidden)), nil
}

func (l *LocalRanks) checkMemory(ctx context.Context, q ReserveRequest) error {
	budget, err := l.Budget(ctx)
	if err != nil {
		return err
	}
	if q.NeedBytes > budget {
		return fault.New(fault.DoesNotFit, "instance "+q.InstanceName+" does not fit",
			fmt.Errorf("it needs %d MiB (%d of it headroom) and %d MiB may be used", q.NeedBytes>>20, q.HeadroomBytes>>20, budget>>20),
			"stop another instance (`tbcluster ps`), or take a smaller context or model")
	}
	return nil
}

// alive reports whether it holds ports and memory.
func (h *holding) alive() bool {
	if !h.expires.IsZero() {
		return true
	}
	for _, r := range h.rec.Ranks {
		if r.Started && r.Status.State != RankExited {
			return true
		}
	}
	return false
}

func (h *holding) settled() bool {
	for _, r := range h.rec.Ranks {
		if !r.settled {
			return false
		}
	}
	return true
}

// CheckFiles implements RankService.
func (s *localService) CheckFiles(ctx context.Context, q CheckFilesRequest) error {
	return s.at(s.l.c.Files.CheckFiles(ctx, s.who, q.Path, q.Files))
}

// Start implements RankService.
func (s *localService) Start(ctx context.Context, q StartRequest) error {
	return s.at(s.start(ctx, q))
}

func (s *localService) start(ctx context.Context, q StartRequest) error {
	l := s.l
	h, err := s.mine(q.InstanceID)
	if err != nil {
		return err
	}
	if h == nil || h.rec.Ranks[q.Rank.Index] == nil {
		return fault.Newf(fault.InstanceNotReady, "place it again", "there is no grant for rank %d of instance %s: it may have expired", q.Rank.Index, q.InstanceID)
	}
	a := l.adapter(q.Engine)
	if a == nil || q.Engine != h.rec.Engine.Name {
		return fault.Newf(fault.Protocol, "", "the grant of instance %s is not for engine %q", q.InstanceID, q.Engine)
	}
	l.mu.Lock()
	r := h.rec.Ranks[q.Rank.Index]
	if err := allowed(a.Traits(), r.Rank, q.Rank); err != nil {
		l.mu.Unlock()
		return err
	}
	if l.held[q.InstanceID] != h || !h.alive() && !r.Started {
		l.mu.Unlock()
		return fault.Newf(fault.InstanceNotReady, "place it again", "the grant of instance %s has expired or was given back", h.rec.InstanceName)
	}
	if r.Started {
		state := r.Status.State
		l.mu.Unlock()
		if state == RankExited {
			return fault.Newf(fault.EngineFailed, "`tbcluster logs` shows what it said", "rank %d of instance %s has ended already", q.Rank.Index, h.rec.InstanceName)
		}
		return nil
	}
	// On disk before there is a process: an agent that is killed in between
	// finds a rank that is gone, never one that it does not know.
	gone := make(chan struct{})
	r.Rank, r.Started, r.gone = q.Rank, true, gone
	r.Status = RankStatus{Index: q.Rank.Index, State: RankStarting}
	h.expires = time.Time{}
	err = l.store.save(h.rec.InstanceID, h.rec)
	l.mu.Unlock()
	if err == nil {
		err = l.c.Spawner.StartRank(ctx, s.who, q.InstanceID, q.Rank.Index, rank.Process{
			InstanceID: q.InstanceID, Index: q.Rank.Index, Program: h.rec.Engine.Programs[q.Rank.Program],
			Args: q.Rank.Args, Env: q.Rank.Env, Grace: q.Grace, Skip: q.Rank.Quiet,
		})
	}
	if err != nil {
		// It may run all the same: the answer may have been lost.
		err = errors.Join(err, l.c.Spawner.EndRank(context.WithoutCancel(ctx), q.InstanceID, q.Rank.Index, true))
		l.update(h, r, func(st *RankStatus) { st.State, st.Exit = RankExited, "not started: "+err.Error() })
		close(gone)
		return err
	}
	l.mu.Lock()
	l.watch(h, r)
	l.mu.Unlock()
	return nil
}

// allowed compares a rank with what was granted for it.
func allowed(t spec.Traits, granted, r spec.Rank) error {
	if r.External {
		return fault.Newf(fault.Unsupported, "", "rank %d is no process of ours", r.Index)
	}
	if !slices.Equal(granted.Ports, r.Ports) || granted.Program != r.Program {
		return fault.Newf(fault.Protocol, "", "rank %d is not what was granted", r.Index)
	}
	for k := range r.Env {
		if !slices.ContainsFunc(t.Env, func(prefix string) bool { return strings.HasPrefix(k, prefix) }) {
			return fault.Newf(fault.Denied, "", "rank %d must not set %s", r.Index, k)
		}
	}
	return nil
}

// Stop implements RankService.
func (s *localService) Stop(ctx context.Context, q StopRequest) error {
	h, err := s.mine(q.InstanceID)
	if err != nil || h == nil {
		return s.at(err)
	}
	return s.at(s.l.stop(ctx, h, q.Indexes, q.Grace))
}

// Release implements RankService.
func (s *localService) Release(ctx context.Context, q ReleaseRequest) error {
	h, err := s.mine(q.InstanceID)
	if err != nil || h == nil {
		return s.at(err)
	}
	return s.at(s.l.release(ctx, h, q.Remove))
}

func (l *LocalRanks) release(ctx context.Context, h *holding, remove bool) error {
	if err := l.stop(ctx, h, nil, l.c.Times.FailGrace); err != nil {
		return err
	}
	id := h.rec.InstanceID
	l.mu.Lock()
	l.ports.release(id)
	h.expires = time.Time{}
	var started []int
	for i, r := range h.rec.Ranks {
		if r.Started {
			started = append(started, i)
		}
	}
	l.mu.Unlock()
	if len(started) > 0 && !remove {
		return nil // its logs stay, and so its record
	}
	for _, i := range started {
		if err := l.c.Spawner.RemoveRank(ctx, id, i); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, id)
	l.wake(h)
	return l.store.remove(id)
}

// stop ends ranks, all when none is named, and waits until they are gone.
func (l *LocalRanks) stop(ctx context.Context, h *holding, indexes []int, grace time.Duration) error {
	var errs []error
	var mu sync.Mutex
	var wg sync.WaitGroup
	l.mu.Lock()
	for i, r := range h.rec.Ranks {
		if len(indexes) > 0 && !slices.Contains(indexes, i) || !r.Started || r.Status.State == RankExited {
			continue
		}
		r.Status.State = RankStopping
		gone := r.gone
		wg.Go(func() {
			if err := l.end(ctx, h.rec.InstanceID, i, gone, grace); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	l.wake(h)
	l.mu.Unlock()
	wg.Wait()
	return errors.Join(errs...)
}

// afterKill is how long a killed process may take to be gone: the kernel may
// have to give back much memory.
const afterKill = 30 * time.Second

func (l *LocalRanks) end(ctx context.Context, id string, index int, gone <-chan struct{}, grace time.Duration) error {
	if err := l.c.Spawner.EndRank(ctx, id, index, false); err != nil {
		return err
	}
	limit := grace
	if limit == 0 {
		limit = rank.DefaultGrace + afterKill // the shim keeps to its own
	}
	for _, wait := range []time.Duration{limit, afterKill} {
		select {
		case <-gone:
			return nil
		case <-ctx.Done():
			return fault.New(fault.Interrupted, fmt.Sprintf("waiting for the end of rank %d of instance %s was interrupted", index, id), ctx.Err(), "")
		case <-time.After(wait):
		}
		if err := l.c.Spawner.EndRank(ctx, id, index, true); err != nil {
			return err
		}
	}
	return fault.Newf(fault.StillRunning, "look at the process; a driver may hold it", "rank %d of instance %s does not end, though it was killed", index, id)
}

// Status implements RankService.
func (s *localService) Status(_ context.Context, id string) ([]RankStatus, error) {
	h, err := s.mine(id)
	if err != nil || h == nil {
		return nil, s.at(err)
	}
	return s.l.statuses(h), nil
}

func (l *LocalRanks) statuses(h *holding) []RankStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []RankStatus
	for _, r := range h.rec.Ranks {
		out = append(out, r.Status)
	}
	slices.SortFunc(out, func(a, b RankStatus) int { return a.Index - b.Index })
	return out
}

// Claims implements RankService: it asks this node as owner.
func (s *localService) Claims(_ context.Context, id string) (bool, error) {
	s.l.mu.Lock()
	claims := s.l.claims
	s.l.mu.Unlock()
	if claims == nil {
		return false, s.at(fault.Newf(fault.NodeDown, "try again", "the agent is still starting"))
	}
	return claims(id), nil
}

// Events implements RankService.
func (s *localService) Events(ctx context.Context, id string, emit func(Event) error) error {
	l := s.l
	h, err := s.mine(id)
	if err != nil {
		return s.at(err)
	}
	if h == nil {
		return emit(Event{})
	}
	wake := make(chan struct{}, 1)
	l.mu.Lock()
	h.subs[wake] = true
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(h.subs, wake)
		if len(h.subs) == 0 {
			h.unowned = time.Now()
		}
		l.mu.Unlock()
	}()
	beat := time.NewTicker(l.c.Times.Heartbeat)
	defer beat.Stop()
	for {
		if err := emit(Event{Ranks: l.statuses(h)}); err != nil {
			return err
		}
	quiet:
		for {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-l.ctx.Done():
				return s.at(fault.Newf(fault.NodeDown, "it is starting again, or start it", "the agent is stopping"))
			case <-wake:
				break quiet
			case <-beat.C:
				if err := emit(Event{Heartbeat: true}); err != nil {
					return err
				}
			}
		}
	}
}

// wake tells the streams of events; l.mu is held.
func (l *LocalRanks) wake(h *holding) {
	for c := range h.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// update changes the status of a rank and tells about it.
func (l *LocalRanks) update(h *holding, r *heldRank, change func(*RankStatus)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := r.Status.State
	change(&r.Status)
	if r.Status.State == RankExited && before != RankExited {
		if !h.alive() {
			l.ports.release(h.rec.InstanceID)
		}
		if err := l.store.save(h.rec.InstanceID, h.rec); err != nil {
			l.c.Log.Error("cannot keep the record of a rank", "instance", h.rec.InstanceID, "error", err)
		}
	}
	l.wake(h)
}

// Logs hands on the log of a rank on this node; see rank.TailLog.
func (l *LocalRanks) Logs(ctx context.Context, id string, index int, since time.Time, follow bool, emit func(rank.Line) error) error {
	l.mu.Lock()
	h := l.held[id]
	known := h != nil && h.rec.Ranks[index] != nil && h.rec.Ranks[index].Started
	l.mu.Unlock()
	if !known {
		return fault.Newf(fault.InstanceUnknown, "`tbcluster ps` shows its ranks and nodes", "instance %s has no rank %d here", id, index).At(l.name())
	}
	return rank.TailLog(ctx, l.c.Spawner.RankDir(id, index), since, follow, emit)
}

// Running lists the instances that hold something here, by ID.
func (l *LocalRanks) Running() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for id, h := range l.held {
		if h.alive() {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// Link tells of a cable: whether it carries now.
func (l *LocalRanks) Link(linkID string, up bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if up {
		delete(l.down, linkID)
	} else {
		l.down[linkID] = true
	}
}
