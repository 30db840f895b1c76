package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"

	"google.golang.org/protobuf/proto"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// watchState calls show with the state after every event until show says
// stop, ctx ends or the agent goes away.
func watchState(ctx context.Context, c *client, show func(*tbv1.ClusterState) (stop bool)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.cluster.Watch(ctx, &tbv1.WatchRequest{})
	if err != nil {
		return err
	}
	var state *tbv1.ClusterState
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fault.New(fault.NoAgent, "the agent ended the watch", nil, "it is going down or being restarted; try again").At(c.endpoint.path)
		}
		if err != nil {
			return err
		}
		if state, err = applyEvent(state, resp); err != nil {
			return err
		}
		if show(state) {
			return nil
		}
	}
}

// applyEvent returns the state after an event. It does not change the messages
// it is given.
func applyEvent(state *tbv1.ClusterState, resp *tbv1.WatchResponse) (*tbv1.ClusterState, error) {
	if s := resp.GetSnapshot(); s != nil {
		return proto.CloneOf(s), nil
	}
	if state == nil {
		return nil, fault.New(fault.Protocol, "follow the cluster's state", errors.New("changes came before the state that they change"), "this is a bug in the agent: `tbcluster bugreport` collects what we need")
	}
	d := resp.GetDelta()
	state.Revision = resp.GetRevision()
	state.Nodes = merge(state.Nodes, d.GetNodes(), d.GetRemovedNodeIds(), (*tbv1.Node).GetId,
		func(a, b *tbv1.Node) int {
			return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetId(), b.GetId()))
		})
	state.Links = merge(state.Links, d.GetLinks(), d.GetRemovedLinkIds(), (*tbv1.Link).GetId,
		func(a, b *tbv1.Link) int { return cmp.Compare(a.GetId(), b.GetId()) })
	state.Transfers = merge(state.Transfers, d.GetTransfers(), d.GetRemovedTransferIds(), (*tbv1.Transfer).GetId,
		func(a, b *tbv1.Transfer) int {
			return cmp.Or(b.GetStartedAt().AsTime().Compare(a.GetStartedAt().AsTime()), cmp.Compare(a.GetId(), b.GetId()))
		})
	state.Instances = merge(state.Instances, d.GetInstances(), d.GetRemovedInstanceIds(), (*tbv1.Instance).GetId,
		func(a, b *tbv1.Instance) int {
			return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetId(), b.GetId()))
		})
	state.Models = merge(state.Models, d.GetModels(), d.GetRemovedModelIds(), (*tbv1.Model).GetId,
		func(a, b *tbv1.Model) int {
			return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetId(), b.GetId()))
		})
	if d.GetFindingsChanged() {
		state.Findings = d.GetFindings()
	}
	return state, nil
}

// merge returns list with the changed elements in it and the removed ones out.
func merge[T any](list, changed []T, removed []string, id func(T) string, order func(a, b T) int) []T {
	if len(changed) == 0 && len(removed) == 0 {
		return list
	}
	gone := make(map[string]bool, len(changed)+len(removed))
	for _, r := range removed {
		gone[r] = true
	}
	for _, c := range changed {
		gone[id(c)] = true
	}
	out := make([]T, 0, len(list)+len(changed))
	for _, v := range list {
		if !gone[id(v)] {
			out = append(out, v)
		}
	}
	out = append(out, changed...)
	slices.SortStableFunc(out, order)
	return out
}
