package agent

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/engine/llamacpp"
	"tbcluster/gateway"
	"tbcluster/host"
	"tbcluster/instance/catalogue"
	"tbcluster/instance/rank"
	"tbcluster/instance/spec"
	"tbcluster/instance/supervise"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/transfer"
)

// Adapters returns the engines of this program, in order of preference, that
// look in dirs first.
func Adapters(dirs []string) []spec.Adapter {
	return []spec.Adapter{llamacpp.New(llamacpp.Options{Dirs: dirs})}
}

// askerUser is an asker as other nodes are told of him.
func (a *Agent) askerUser(who host.Asker) *peerv1.User {
	u, ok, err := a.clientUser(context.Background(), who)
	switch {
	case err != nil:
		a.log.Warn("look up as whom a client acts", "client", who.Name, "error", err)
	case ok:
		return &peerv1.User{Uid: u.UID, Name: u.Name}
	}
	return &peerv1.User{Uid: who.UID, Name: who.Name}
}

// pairedAsker reports whether an asker of another node is who paired there.
func (a *Agent) pairedAsker(who host.Asker) bool {
	return who.Node != "" && (who.Node == a.id() || a.isPairedUser(who.Node, a.askerUser(who)))
}

// spawner starts and ends the processes of ranks by the root half.
type spawner struct{ a *Agent }

// StartRank starts the shim of a rank.
func (s spawner) StartRank(ctx context.Context, who host.Asker, instance string, index int, p rank.Process) error {
	_, err := s.a.root.StartRank(ctx, who, s.a.pairedAsker(who), instance, index, p)
	return s.a.unmapped(err, who)
}

// EndRank asks the shim to end its engine, or kills it.
func (s spawner) EndRank(ctx context.Context, instance string, index int, kill bool) error {
	return s.a.root.EndRank(ctx, instance, index, kill)
}

// RemoveRank removes what a rank left.
func (s spawner) RemoveRank(ctx context.Context, instance string, index int) error {
	return s.a.root.CleanRank(ctx, instance, index)
}

// RankDir is the directory of a rank.
func (s spawner) RankDir(instance string, index int) string {
	return filepath.Join(s.a.opt.Paths.State, "instances", instance, "rank-"+strconv.Itoa(index))
}

// rankFiles looks at files as the person who asked.
type rankFiles struct{ a *Agent }

func (f rankFiles) client(ctx context.Context, who host.Asker) (*catalogue.Client, error) {
	conn, _, err := f.a.root.Worker(ctx, who, f.a.pairedAsker(who))
	if err != nil {
		return nil, f.a.unmapped(err, who)
	}
	return f.a.catalogueClient(conn)
}

// CheckFiles compares a model's files with what is expected.
func (f rankFiles) CheckFiles(ctx context.Context, who host.Asker, path string, files []spec.File) error {
	c, err := f.client(ctx, who)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // ends the worker, whose work is done
	return c.Check(ctx, f.a.models.options(), path, files)
}

// DetectEngine looks for an engine as that person would find it.
func (f rankFiles) DetectEngine(ctx context.Context, who host.Asker, engine string) (spec.Engine, error) {
	c, err := f.client(ctx, who)
	if err != nil {
		return spec.Engine{}, err
	}
	defer func() { _ = c.Close() }() // ends the worker, whose work is done
	list, err := c.Engines(ctx, f.a.models.options(), engine)
	if err != nil {
		return spec.Engine{}, err
	}
	return list[0], nil
}

// rankMachine answers for this node.
type rankMachine struct{ a *Agent }

// Memory returns total and available memory.
func (m rankMachine) Memory(ctx context.Context) (total, available uint64, err error) {
	now, err := m.a.opt.Host.Machine(ctx)
	return now.Memory.Total, now.Memory.Available, err
}

// AddressTo returns the own address on a proven cable to a node.
func (m rankMachine) AddressTo(_ context.Context, node string) (netip.Addr, string, error) {
	for _, p := range m.a.linkPaths(m.a.id(), node) {
		if p.Kind == transfer.Cable {
			return p.SrcAddr, p.LinkID, nil
		}
	}
	name := m.a.nodeName(node)
	return netip.Addr{}, "", fault.Newf(fault.Connection, "join them with a cable, and see `tbcluster status`", "no proven cable joins %s and %s", m.a.name(), name).With("node", name)
}

// CloseToLAN makes sure that only our cables reach an address.
func (m rankMachine) CloseToLAN(ctx context.Context, addr netip.Addr, insecure bool) error {
	active, why := m.a.address.CheckFilter(ctx)
	if active || insecure {
		return nil
	}
	f := fault.Newf(fault.RanksInsecure, "run the agent as root (sudo tbcluster up), or accept it: --insecure-ranks",
		"the ports of the ranks on %s (%s) cannot be closed to the LAN", m.a.name(), addr)
	f.Why = why
	return f
}

// copier brings models to nodes.
type copier struct{ a *Agent }

// CopyModel copies a model to a node and returns its path there.
func (c copier) CopyModel(ctx context.Context, who host.Asker, _ string, m spec.Model, node string, progress func(done, total uint64)) (string, error) {
	a := c.a
	model, err := a.findModel(m.ID)
	if err != nil {
		return "", err
	}
	if at, ok := copyOn(model, node); ok {
		return at, nil
	}
	src, err := a.sourceFor(model, node)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call := withCaller(ctx, caller{asker: who, role: v1.Role_ROLE_ADMIN, paired: a.pairedAsker(who)})
	done := make(chan *v1.Transfer, 1)
	job := transfer.Job{Sources: []transfer.Endpoint{{Node: src.NodeId, Path: src.Path}},
		Destination: transfer.Endpoint{Node: node, Path: modelHome + "/"}, Options: transfer.Options{MakePath: true}}
	base := &v1.Transfer{OwnerNodeId: a.id(), Sources: []string{src.NodeName + ":" + src.Path}}
	t, err := a.startTransfer(call, "", job, base, func(t *v1.Transfer) { done <- t })
	if err != nil {
		return "", err
	}
	for {
		view, _, changed, err := a.moves.get(t.Id)
		if err != nil {
			return "", err
		}
		progress(view.DoneBytes, view.TotalBytes)
		select {
		case <-ctx.Done():
			if _, err := a.moves.cancelOne(t.Id); err != nil {
				return "", err
			}
			return "", fault.FromStatus(ctx.Err())
		case <-changed:
		case end := <-done:
			if end.Error != nil {
				return "", faultOf(end.Error)
			}
			return a.awaitCopy(ctx, m, node)
		}
	}
}

// awaitCopy waits until a node says that it has a model.
func (a *Agent) awaitCopy(ctx context.Context, m spec.Model, node string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		s, changed := a.board.get()
		for _, have := range s.Models {
			if have.Name == m.Name && have.SizeBytes == m.SizeBytes {
				if at, ok := copyOn(have, node); ok {
					return at, nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return "", fault.Newf(fault.ModelIncomplete, "`tbcluster models` says what is there", "%s was copied to %s and is not found there", m.Name, a.nodeName(node))
		case <-changed:
		}
	}
}

// copyOn is where a complete copy of a model lies on a node.
func copyOn(m *v1.Model, node string) (string, bool) {
	for _, c := range m.Copies {
		if c.NodeId == node && c.Complete {
			return c.Path, true
		}
	}
	return "", false
}

// activity is how many requests the gateway has in flight for each instance
// here.
type activity struct {
	mu   sync.Mutex
	have map[string]int
}

// note counts: delta is 1 when a request begins, -1 when its answer has ended.
func (n *activity) note(instance string, delta int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.have == nil {
		n.have = map[string]int{}
	}
	if n.have[instance] += delta; n.have[instance] <= 0 {
		delete(n.have, instance)
	}
}

// of returns what is known of an instance. The gateway does not tell when a
// byte passed, so whether a busy one gets on is asked of its engine.
func (n *activity) of(instance string) (inFlight int, last time.Time, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.have[instance], time.Time{}, true
}

// instances wires the supervisor of instances to the rest of the agent.
type instances struct {
	a        *Agent
	adapters []spec.Adapter
	local    *supervise.LocalRanks
	manager  *supervise.Manager
	activity activity

	mu    sync.Mutex
	links map[string]linkSeen
	// placed are instances that another node took on for somebody here, until
	// the state shows them.
	placed map[string]placedElsewhere
}

// placedElsewhere is an instance that this node's state may not show yet.
type placedElsewhere struct {
	view *v1.Instance
	at   time.Time
}

// placedFor is how long a node's word that it took on an instance is good
// without a sign of it: its state arrives within moments or not at all.
const placedFor = 10 * time.Second

// remember keeps an instance that another node has just taken on.
func (r *instances) remember(i *v1.Instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, p := range r.placed {
		if time.Since(p.at) > placedFor {
			delete(r.placed, id)
		}
	}
	r.placed[i.Id] = placedElsewhere{i, time.Now()}
}

// unseen are the instances that other nodes took on and the state does not
// show yet.
func (r *instances) unseen(s *v1.ClusterState) []*v1.Instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*v1.Instance
	for id, p := range r.placed {
		if time.Since(p.at) <= placedFor && !slices.ContainsFunc(s.Instances, func(i *v1.Instance) bool { return i.Id == id }) {
			out = append(out, p.view)
		}
	}
	return out
}

func (a *Agent) openInstances() (*instances, error) {
	r := &instances{a: a, adapters: Adapters(a.opt.Config.EngineDirs), links: map[string]linkSeen{}, placed: map[string]placedElsewhere{}}
	log := a.log.With("part", "instances")
	var err error
	r.local, err = supervise.NewLocalRanks(supervise.LocalConfig{
		NodeID: a.id(), Dir: a.opt.Paths.Own(), Adapters: r.adapters, Spawner: spawner{a}, Files: rankFiles{a},
		Machine: rankMachine{a}, Nodes: r, Log: log,
	})
	if r.local == nil {
		return nil, err
	}
	if fault.Is(err, fault.StateTooNew) {
		r.local.Close()
		return nil, err
	}
	if err != nil {
		// Records that cannot be read do not keep the others from being adopted.
		log.Error("read the records of ranks", "error", err)
	}
	r.manager, err = supervise.NewManager(supervise.Config{
		NodeID: a.id(), Dir: a.opt.Paths.Own(), Adapters: r.adapters, Local: r.local, Nodes: r, Copier: copier{a},
		Activity: r.activity.of, NameTaken: r.nameTaken,
		Change: func(supervise.Instance) { a.poke() }, Removed: func(string) { a.poke() }, Log: log,
	})
	if r.manager == nil {
		r.local.Close()
		return nil, err
	}
	if fault.Is(err, fault.StateTooNew) {
		r.manager.Close()
		r.local.Close()
		return nil, err
	}
	if err != nil {
		log.Error("read the records of instances", "error", err)
	}
	return r, nil
}

// run keeps the supervisor going until ctx ends; instances live on.
func (r *instances) run(ctx context.Context) error {
	<-ctx.Done()
	r.manager.Close()
	r.local.Close()
	return nil
}

// RankService reaches the ranks of a node.
func (r *instances) RankService(node string, who host.Asker) supervise.RankService {
	if node == r.a.id() {
		return r.local.Ranks(who)
	}
	id, user := identity.NodeID(node), r.a.askerUser(who)
	return &supervise.RemoteRanks{
		Node: r.a.nodeName(node),
		Call: func(ctx context.Context, kind string, body []byte) ([]byte, error) {
			c, err := r.a.channel.Client(id)
			if err != nil {
				return nil, err
			}
			out, err := peerv1.NewPeerServiceClient(c).Rank(ctx, &peerv1.RankRequest{User: user, Kind: kind, Body: body})
			if err != nil {
				return nil, r.a.farFault(node, err)
			}
			return out.Body, nil
		},
		Stream: func(ctx context.Context, instance string, emit func([]byte) error) error {
			c, err := r.a.channel.Client(id)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			events, err := peerv1.NewPeerServiceClient(c).RankEvents(ctx, &peerv1.RankEventsRequest{InstanceId: instance})
			if err != nil {
				return r.a.farFault(node, err)
			}
			for {
				e, err := events.Recv()
				if err != nil {
					return r.a.farFault(node, err)
				}
				if err := emit(e.Body); err != nil {
					return err
				}
			}
		},
	}
}

// Name returns the name of a node.
func (r *instances) Name(node string) string { return r.a.nodeName(node) }

// nameTaken tells whether another node owns an instance of that name that is
// not over.
func (r *instances) nameTaken(name string) bool {
	s, _ := r.a.board.get()
	return slices.ContainsFunc(s.Instances, func(i *v1.Instance) bool {
		return i.Name == name && i.OwnerNodeId != r.a.id() && !over(i.State)
	})
}

// uses tells whether a rank of this node listens on an address.
func (r *instances) uses(addr netip.Addr) bool {
	s, _ := r.a.board.get()
	for _, i := range s.Instances {
		if over(i.State) {
			continue
		}
		for _, k := range i.Ranks {
			for _, l := range k.Listens {
				if at, err := netip.ParseAddrPort(l); err == nil && at.Addr() == addr && k.NodeId == r.a.id() {
					return true
				}
			}
		}
	}
	return false
}

// stateChanged tells the supervisor which cables carry. Of its own cables this
// node believes what it sees itself: that the agent at the other end is away
// says nothing of the cable, and whether the engines get through their
// completions tell.
func (r *instances) stateChanged(s *v1.ClusterState) {
	ends := map[string]*peerv1.LinkReport{} // own, by port
	for _, e := range r.a.knownNow()[r.a.id()].links.GetLinks() {
		ends[e.Port] = e
	}
	up := map[string]bool{}
	for _, n := range s.Nodes {
		up[n.Id] = n.State == v1.NodeState_NODE_STATE_UP
	}
	now := map[string]linkSeen{}
	for _, l := range s.Links {
		seen := linkSeen{port: ownPort(l, r.a.id())}
		if e := ends[seen.port]; e != nil {
			seen.carries, seen.why = !link.Severed(e), e.Reason
		} else {
			seen.carries = l.State != v1.LinkState_LINK_STATE_DOWN || !up[l.A.GetNodeId()] || !up[l.B.GetNodeId()]
			seen.why = l.Reason
		}
		seen.why = fmt.Sprintf("the cable between %s and %s is down: %s", l.A.GetNodeName(), l.B.GetNodeName(), seen.why)
		now[l.Id] = seen
	}
	r.mu.Lock()
	was := r.links
	for id, w := range was {
		if _, listed := now[id]; listed || !w.carries {
			continue
		}
		// What is listed under another name, as its far end is not known for a
		// moment, is not gone.
		if e := ends[w.port]; e == nil || link.Severed(e) {
			w.carries, w.why = false, "the cable is gone"
		}
		now[id] = w
	}
	r.links = now
	r.mu.Unlock()
	for id, l := range now {
		switch {
		case l.carries && !was[id].carries:
			r.manager.LinkUp(id)
		case !l.carries && was[id].carries:
			r.manager.LinkDown(id, l.why)
		}
	}
}

// linkSeen is what was last seen of a cable.
type linkSeen struct {
	carries bool
	why     string // it does not
	port    string // own end; "" where both are of other nodes
}

// ownPort is the port of a link on a node; "" where it has none there.
func ownPort(l *v1.Link, node string) string {
	for _, e := range []*v1.LinkEnd{l.A, l.B} {
		if e.GetNodeId() == node {
			return e.GetPort()
		}
	}
	return ""
}

var instanceStates = map[supervise.State]v1.InstanceState{
	supervise.Planned:  v1.InstanceState_INSTANCE_STATE_PLANNED,
	supervise.Copying:  v1.InstanceState_INSTANCE_STATE_COPYING,
	supervise.Starting: v1.InstanceState_INSTANCE_STATE_STARTING,
	supervise.Loading:  v1.InstanceState_INSTANCE_STATE_LOADING,
	supervise.Warming:  v1.InstanceState_INSTANCE_STATE_WARMING,
	supervise.Ready:    v1.InstanceState_INSTANCE_STATE_READY,
	supervise.Degraded: v1.InstanceState_INSTANCE_STATE_DEGRADED,
	supervise.Stopping: v1.InstanceState_INSTANCE_STATE_STOPPING,
	supervise.Stopped:  v1.InstanceState_INSTANCE_STATE_STOPPED,
	supervise.Failed:   v1.InstanceState_INSTANCE_STATE_FAILED,
}

var rankStates = map[supervise.RankState]v1.RankState{
	supervise.RankWaiting:  v1.RankState_RANK_STATE_WAITING,
	supervise.RankStarting: v1.RankState_RANK_STATE_STARTING,
	supervise.RankReady:    v1.RankState_RANK_STATE_READY,
	supervise.RankStopping: v1.RankState_RANK_STATE_STOPPING,
	supervise.RankExited:   v1.RankState_RANK_STATE_EXITED,
	supervise.RankUnknown:  v1.RankState_RANK_STATE_UNKNOWN,
}

func (r *instances) view(i supervise.Instance) *v1.Instance {
	out := &v1.Instance{Id: i.ID, Name: i.Name, Model: i.Model, ModelId: i.ModelID, Engine: i.Engine, State: instanceStates[i.State],
		Reason: i.Reason, StepsDone: uint32(i.StepsDone), StepsTotal: uint32(i.StepsTotal), OwnerNodeId: i.OwnerNodeID,
		CreatedAt: timestamppb.New(i.CreatedAt), StateSince: timestamppb.New(i.StateSince), TokensPerSecond: i.TokensPerSecond,
		User: i.User, Restarts: uint32(i.Restarts), ContextTokens: uint32(i.ContextTokens), PlannedBytes: i.PlannedBytes, ServedNames: i.ServedNames}
	if f := i.Fault(); f != nil {
		out.Error = failureOf(f)
	}
	for _, k := range i.Ranks {
		out.Ranks = append(out.Ranks, &v1.Rank{Index: uint32(k.Index), NodeId: k.NodeID, NodeName: r.a.nodeName(k.NodeID), Pid: uint32(k.PID),
			State: rankStates[k.State], Role: k.Role, ExitStatus: k.ExitStatus, LastLines: k.LastLines, Listens: k.Listens})
	}
	return out
}

// views are the instances that this node owns.
func (r *instances) views() []*v1.Instance {
	var out []*v1.Instance
	for _, i := range r.manager.List() {
		out = append(out, r.view(i))
	}
	return out
}

// served are all instances of the cluster, for the gateway.
func (r *instances) served() []gateway.Instance {
	own := map[string]supervise.Instance{}
	for _, i := range r.manager.List() {
		own[i.ID] = i
	}
	s, _ := r.a.board.get()
	var out []gateway.Instance
	for _, i := range s.Instances {
		g := gateway.Instance{ID: i.Id, Name: i.Name, ServedNames: i.ServedNames, ModelID: i.ModelId, Engine: i.Engine,
			State: stateWord(i.State), Ready: i.State == v1.InstanceState_INSTANCE_STATE_READY, Reason: i.Reason,
			OwnerNode: i.OwnerNodeId, OwnerName: r.a.nodeName(i.OwnerNodeId), Created: i.CreatedAt.AsTime()}
		if mine, ok := own[i.Id]; ok {
			g.State, g.Ready, g.Reason = string(mine.State), mine.State == supervise.Ready, mine.Reason
			g.HeadAddr, g.Secret = mine.HTTP.String(), mine.Secret
		}
		out = append(out, g)
	}
	return out
}

func stateWord(s v1.InstanceState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "INSTANCE_STATE_"))
}

// runningHere names the instances that have something running on this node.
func (r *instances) runningHere() []string {
	names := map[string]bool{}
	s, _ := r.a.board.get()
	for _, id := range r.local.Running() {
		name := id
		for _, i := range s.Instances {
			if i.Id == id {
				name = i.Name
			}
		}
		names[name] = true
	}
	for _, i := range r.manager.List() {
		if !i.State.Over() {
			names[i.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// stopAllHere stops every instance that this node owns or serves, and waits
// until they have ended.
func (r *instances) stopAllHere(ctx context.Context) ([]string, error) {
	names := r.runningHere()
	for _, i := range r.manager.List() {
		if !i.State.Over() {
			if _, err := r.manager.Stop(ctx, i.ID, false); err != nil {
				return nil, err
			}
		}
	}
	s := &instanceServer{a: r.a}
	for _, id := range r.local.Running() {
		st, _ := r.a.board.get()
		for _, i := range st.Instances {
			if i.Id == id && i.OwnerNodeId != r.a.id() {
				if _, err := s.Stop(ctx, &v1.StopInstanceRequest{Instance: id}); err != nil {
					return nil, err
				}
			}
		}
	}
	for len(r.runningHere()) > 0 {
		_, changed := r.a.board.get()
		select {
		case <-ctx.Done():
			return nil, fault.Newf(fault.Timeout, "ask again, or `tbcluster down --leave`", "what was asked to end is still ending: %s", strings.Join(r.runningHere(), ", "))
		case <-changed:
		case <-time.After(time.Second):
		}
	}
	return names, nil
}

// overCables tells whether a rank of this node talks over a cable.
func (r *instances) overCables() bool {
	for _, l := range r.a.address.Links() {
		if l.Prefix.IsValid() && r.uses(l.Prefix.Addr()) {
			return true
		}
	}
	// The head of a group dials, and listens on no cable itself.
	return slices.ContainsFunc(r.manager.List(), func(i supervise.Instance) bool { return !i.State.Over() && len(i.Ranks) > 1 })
}
