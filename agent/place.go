package agent

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/instance/plan"
	"tbcluster/instance/rank"
	"tbcluster/instance/supervise"
	"tbcluster/mesh/identity"
)

// Place starts an instance: the node of rank 0 owns it and does it.
func (s *instanceServer) Place(ctx context.Context, q *v1.PlaceRequest) (*v1.PlaceResponse, error) {
	p, err := s.a.planNow(ctx, q.Placement)
	if err != nil {
		return nil, err
	}
	if i := s.a.placedBefore(q.RequestId); i != nil {
		return &v1.PlaceResponse{Instance: i}, nil
	}
	if q.PlanId != "" {
		if err := plan.Changed(q.PlanId, p.plan); err != nil {
			return nil, err
		}
	}
	if p.plan.Choice == nil {
		return nil, p.plan.Fault(p.model.Name)
	}
	owner := p.plan.Choice.Ranks[0].NodeID
	if owner == s.a.id() {
		return s.place(ctx, q, p)
	}
	// What was chosen is what the owner does, whatever it would choose itself.
	there := &v1.PlaceRequest{RequestId: q.RequestId, Placement: narrowed(q.Placement, *p.plan.Choice)}
	r := &v1.PlaceResponse{}
	if err := s.a.ask(ctx, owner, "/tbcluster.v1.InstanceService/Place", there, r); err != nil {
		return nil, err
	}
	s.a.ranks.remember(r.Instance)
	return r, nil
}

// placedBefore is the instance of an earlier call with the same request ID.
func (a *Agent) placedBefore(request string) *v1.Instance {
	if request == "" {
		return nil
	}
	for _, i := range a.ranks.manager.List() {
		if i.RequestID == request {
			return a.ranks.view(i)
		}
	}
	return nil
}

// narrowed asks for exactly what an option is.
func narrowed(p *v1.Placement, o plan.Option) *v1.Placement {
	out := &v1.Placement{Model: p.Model, Engine: o.Engine, MinRanks: uint32(len(o.Ranks)), ContextTokens: p.ContextTokens, Name: p.Name,
		InsecureRanks: p.InsecureRanks, EngineArgs: p.EngineArgs, CopyMissing: p.CopyMissing}
	for _, r := range o.Ranks {
		if !slices.Contains(out.Nodes, r.NodeID) {
			out.Nodes = append(out.Nodes, r.NodeID)
		}
	}
	return out
}

// placeHere places an instance that another node chose this one to own.
func (s *instanceServer) placeHere(ctx context.Context, q *v1.PlaceRequest) (*v1.PlaceResponse, error) {
	p, err := s.a.makePlan(q.Placement)
	if err != nil {
		return nil, err
	}
	if p.plan.Choice == nil {
		return nil, p.plan.Fault(p.model.Name)
	}
	if p.plan.Choice.Ranks[0].NodeID != s.a.id() {
		return nil, fault.Newf(fault.PlanStale, "place it again", "%s would not own that placement now", s.a.name())
	}
	return s.place(ctx, q, p)
}

func (s *instanceServer) place(ctx context.Context, q *v1.PlaceRequest, p planned) (*v1.PlaceResponse, error) {
	who := callerOf(ctx).asker
	if l := callerOf(ctx).local; l != nil {
		held, release, err := callerOf(ctx).hold()
		if err != nil {
			return nil, err
		}
		defer release()
		who = held
		u, _, err := l.who(ctx, s.a.root)
		if err != nil {
			return nil, err
		}
		who.UID, who.Name = u.UID, u.Name
	}
	c := *p.plan.Choice
	r := supervise.PlaceRequest{RequestID: q.RequestId, Name: q.Placement.Name, Engine: c.Engine, Model: p.spec, ServedNames: servedNames(p.model),
		Context: p.plan.Context, EngineArgs: q.Placement.EngineArgs, Insecure: q.Placement.InsecureRanks}
	for _, k := range c.Ranks {
		r.Ranks = append(r.Ranks, supervise.PlacedRank{NodeID: k.NodeID, Layers: k.Layers, NeedBytes: k.NeedBytes, HeadroomBytes: k.HeadroomBytes,
			MustCopy: k.MustCopy, ModelPath: k.ModelPath})
	}
	i, err := s.a.ranks.manager.Place(ctx, who, r)
	if err != nil {
		return nil, err
	}
	s.a.poke()
	return &v1.PlaceResponse{Instance: s.a.ranks.view(i)}, nil
}

// findInstance returns the instance that a person means: by name, else by ID.
// One that is over gives way to one of the same name that is not.
func (a *Agent) findInstance(name string) (*v1.Instance, error) {
	var fit []*v1.Instance
	s, _ := a.board.get()
	list := slices.DeleteFunc(slices.Clone(s.Instances), func(i *v1.Instance) bool { return i.OwnerNodeId == a.id() })
	// Own instances are asked for where they are: the state is a moment behind.
	list = append(list, a.ranks.views()...)
	list = append(list, a.ranks.unseen(s)...)
	for _, i := range list {
		if i.Id == name {
			return i, nil
		}
		if i.Name == name {
			fit = append(fit, i)
		}
	}
	if running := slices.DeleteFunc(slices.Clone(fit), func(i *v1.Instance) bool { return over(i.State) }); len(running) > 0 {
		fit = running
	}
	switch len(fit) {
	case 0:
		var names []string
		for _, i := range list {
			names = append(names, i.Name)
		}
		fix := "`tbcluster place MODEL` starts one"
		if len(names) > 0 {
			slices.Sort(names)
			fix = "the instances are " + strings.Join(slices.Compact(names), ", ")
		}
		return nil, fault.Newf(fault.InstanceUnknown, fix, "no instance is called %q", name).With("instance", name)
	case 1:
		return fit[0], nil
	}
	var ids []string
	for _, i := range fit {
		ids = append(ids, i.Id+" on "+a.nodeName(i.OwnerNodeId))
	}
	return nil, fault.Newf(fault.InstanceAmbiguous, "name one by its ID: "+strings.Join(ids, ", "), "several instances are called %q", name).With("instance", name)
}

// Get returns one instance.
func (s *instanceServer) Get(_ context.Context, q *v1.GetInstanceRequest) (*v1.GetInstanceResponse, error) {
	i, err := s.a.findInstance(q.Instance)
	return &v1.GetInstanceResponse{Instance: i}, err
}

// List returns every instance of the cluster.
func (s *instanceServer) List(context.Context, *v1.ListInstancesRequest) (*v1.ListInstancesResponse, error) {
	st, _ := s.a.board.get()
	return &v1.ListInstancesResponse{Instances: st.Instances}, nil
}

// Watch streams one instance until it has ended or is gone.
func (s *instanceServer) Watch(q *v1.WatchInstanceRequest, out grpc.ServerStreamingServer[v1.WatchInstanceResponse]) error {
	i, err := s.a.findInstance(q.Instance)
	if err != nil {
		return err
	}
	id := i.Id
	if err := out.Send(&v1.WatchInstanceResponse{Instance: i}); err != nil || over(i.State) {
		return err
	}
	seen := false
	for {
		st, changed := s.a.board.get()
		n := slices.IndexFunc(st.Instances, func(i *v1.Instance) bool { return i.Id == id })
		switch {
		case n < 0 && seen:
			return fault.Newf(fault.InstanceUnknown, "", "instance %s is listed no more", q.Instance)
		case n >= 0 && st.Instances[n] != i:
			i, seen = st.Instances[n], true
			if err := out.Send(&v1.WatchInstanceResponse{Instance: i}); err != nil || over(i.State) {
				return err
			}
		}
		select {
		case <-out.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// Stop ends an instance.
func (s *instanceServer) Stop(ctx context.Context, q *v1.StopInstanceRequest) (*v1.StopInstanceResponse, error) {
	i, err := s.a.findInstance(q.Instance)
	if err != nil {
		return nil, err
	}
	q = &v1.StopInstanceRequest{Instance: i.Id, Remove: q.Remove}
	if i.OwnerNodeId == s.a.id() {
		return s.stopHere(ctx, q)
	}
	if _, err := s.a.upNode(i.OwnerNodeId); err != nil {
		return nil, err
	}
	r := &v1.StopInstanceResponse{}
	return r, s.a.ask(ctx, i.OwnerNodeId, "/tbcluster.v1.InstanceService/Stop", q, r)
}

func (s *instanceServer) stopHere(ctx context.Context, q *v1.StopInstanceRequest) (*v1.StopInstanceResponse, error) {
	i, err := s.a.ranks.manager.Stop(ctx, q.Instance, q.Remove)
	if err != nil {
		return nil, err
	}
	s.a.poke()
	return &v1.StopInstanceResponse{Instance: s.a.ranks.view(i)}, nil
}

// Logs streams the logs of an instance's ranks, wherever they are.
func (s *instanceServer) Logs(q *v1.InstanceLogsRequest, out grpc.ServerStreamingServer[v1.InstanceLogsResponse]) error {
	i, err := s.a.findInstance(q.Instance)
	if err != nil {
		return err
	}
	var ranks []*v1.Rank
	for _, k := range i.Ranks {
		if q.Rank == nil || k.Index == *q.Rank {
			ranks = append(ranks, k)
		}
	}
	if len(ranks) == 0 {
		return fault.Newf(fault.InstanceUnknown, "`tbcluster ps` lists its ranks", "instance %s has no rank %d", i.Name, q.GetRank())
	}
	ctx, cancel := context.WithCancel(out.Context())
	defer cancel()
	lines := make(chan *v1.LogLine)
	errs := make(chan error, len(ranks))
	for _, k := range ranks {
		go func() {
			errs <- s.a.rankLog(ctx, i.Id, k, q, func(l *v1.LogLine) error {
				select {
				case lines <- l:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		}()
	}
	for left := len(ranks); left > 0; {
		select {
		case l := <-lines:
			if err := out.Send(&v1.InstanceLogsResponse{Line: l}); err != nil {
				return err
			}
		case err := <-errs:
			if err != nil && out.Context().Err() == nil {
				return err
			}
			left--
		}
	}
	return nil
}

// rankLog reads the log of one rank where it is.
func (a *Agent) rankLog(ctx context.Context, id string, k *v1.Rank, q *v1.InstanceLogsRequest, emit func(*v1.LogLine) error) error {
	if k.NodeId == a.id() {
		var since time.Time
		if q.Since != nil {
			since = q.Since.AsTime()
		}
		return a.ranks.local.Logs(ctx, id, int(k.Index), since, q.Follow, func(l rank.Line) error {
			return emit(logLine(l.Time, k.Index, a.name(), l.Text))
		})
	}
	c, err := a.channel.Client(identity.NodeID(k.NodeId))
	if err != nil {
		return err
	}
	far, err := peerv1.NewPeerServiceClient(c).Logs(ctx, &peerv1.LogsRequest{InstanceId: id, Rank: k.Index, Follow: q.Follow, Since: q.Since})
	if err != nil {
		return a.farFault(k.NodeId, err)
	}
	for {
		r, err := far.Recv()
		if err != nil {
			return endOfStream(a.farFault(k.NodeId, err), err)
		}
		r.Line.NodeName = k.NodeName
		if err := emit(r.Line); err != nil {
			return err
		}
	}
}

// Rank acts on ranks of this node for an instance owned elsewhere.
func (s *peerServer) Rank(ctx context.Context, q *peerv1.RankRequest) (*peerv1.RankResponse, error) {
	c := s.a.remoteCaller(ctx, q.User)
	body, err := s.a.ranks.local.Dispatch(ctx, c.asker, q.Kind, q.Body)
	return &peerv1.RankResponse{Body: body}, err
}

// RankEvents streams what becomes of an instance's ranks here.
func (s *peerServer) RankEvents(q *peerv1.RankEventsRequest, out grpc.ServerStreamingServer[peerv1.RankEventsResponse]) error {
	who := host.Asker{Node: callerOf(out.Context()).asker.Node}
	return s.a.ranks.local.ServeEvents(out.Context(), who, q.InstanceId, func(body []byte) error {
		return out.Send(&peerv1.RankEventsResponse{Body: body})
	})
}

// Logs streams a rank's log.
func (s *peerServer) Logs(q *peerv1.LogsRequest, out grpc.ServerStreamingServer[peerv1.LogsResponse]) error {
	return s.a.rankLog(out.Context(), q.InstanceId, &v1.Rank{Index: q.Rank, NodeId: s.a.id()}, &v1.InstanceLogsRequest{Follow: q.Follow, Since: q.Since},
		func(l *v1.LogLine) error { return out.Send(&peerv1.LogsResponse{Line: l}) })
}
