package supervise

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// The kinds of request to another node: the table behind PeerService.Rank.
const (
	KindReserve    = "reserve"
	KindCheckFiles = "check-files"
	KindStart      = "start"
	KindStop       = "stop"
	KindRelease    = "release"
	KindStatus     = "status"
	KindClaims     = "claims"
)

// named is the body of requests that only name an instance.
type named struct {
	InstanceID string `json:"instance_id"`
}

// Call carries one request to another node and brings the answer back:
// PeerService.Rank. Its errors are faults.
type Call func(ctx context.Context, kind string, body []byte) ([]byte, error)

// EventStream carries the events of an instance from another node until ctx
// ends, emit fails or the connection breaks: PeerService.RankEvents.
type EventStream func(ctx context.Context, instanceID string, emit func(body []byte) error) error

// RemoteRanks is the RankService of another node.
type RemoteRanks struct {
	Node   string // name, for people
	Call   Call
	Stream EventStream
}

var _ RankService = (*RemoteRanks)(nil)

func (r *RemoteRanks) call(ctx context.Context, kind string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fault.New(fault.Internal, "ask "+r.Node+" to "+kind, err, "")
	}
	answer, err := r.Call(ctx, kind, body)
	if err != nil {
		f := fault.FromStatus(err)
		if f.Where == "" {
			f.Where = r.Node
		}
		return f
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fault.New(fault.Protocol, "the answer to "+kind+" makes no sense", err, "run the same version of tbcluster on every node").At(r.Node)
	}
	return nil
}

// Reserve implements RankService.
func (r *RemoteRanks) Reserve(ctx context.Context, q ReserveRequest) (Grant, error) {
	var g Grant
	err := r.call(ctx, KindReserve, q, &g)
	return g, err
}

// CheckFiles implements RankService.
func (r *RemoteRanks) CheckFiles(ctx context.Context, q CheckFilesRequest) error {
	return r.call(ctx, KindCheckFiles, q, nil)
}

// Start implements RankService.
func (r *RemoteRanks) Start(ctx context.Context, q StartRequest) error {
	return r.call(ctx, KindStart, q, nil)
}

// Stop implements RankService.
func (r *RemoteRanks) Stop(ctx context.Context, q StopRequest) error {
	return r.call(ctx, KindStop, q, nil)
}

// Release implements RankService.
func (r *RemoteRanks) Release(ctx context.Context, q ReleaseRequest) error {
	return r.call(ctx, KindRelease, q, nil)
}

// Status implements RankService.
func (r *RemoteRanks) Status(ctx context.Context, instanceID string) ([]RankStatus, error) {
	var out []RankStatus
	err := r.call(ctx, KindStatus, named{instanceID}, &out)
	return out, err
}

// Claims implements RankService.
func (r *RemoteRanks) Claims(ctx context.Context, instanceID string) (bool, error) {
	var out bool
	err := r.call(ctx, KindClaims, named{instanceID}, &out)
	return out, err
}

// Events implements RankService.
func (r *RemoteRanks) Events(ctx context.Context, instanceID string, emit func(Event) error) error {
	return r.Stream(ctx, instanceID, func(body []byte) error {
		var e Event
		if err := json.Unmarshal(body, &e); err != nil {
			return fault.New(fault.Protocol, "an event of a rank makes no sense", err, "run the same version of tbcluster on every node").At(r.Node)
		}
		return emit(e)
	})
}

// Dispatch answers a request of another node. who is the remote person, with
// Node set to the node that asks; that node can act on its own instances only.
func (l *LocalRanks) Dispatch(ctx context.Context, who host.Asker, kind string, body []byte) ([]byte, error) {
	if who.Node == "" || who.Node == l.c.NodeID {
		return nil, fault.Newf(fault.Internal, "", "a request of a rank lacks the node that asks")
	}
	s := l.service(who, who.Node)
	switch kind {
	case KindReserve:
		return handle(body, func(q ReserveRequest) (any, error) { return s.Reserve(ctx, q) })
	case KindCheckFiles:
		return handle(body, func(q CheckFilesRequest) (any, error) { return nil, s.CheckFiles(ctx, q) })
	case KindStart:
		return handle(body, func(q StartRequest) (any, error) { return nil, s.Start(ctx, q) })
	case KindStop:
		return handle(body, func(q StopRequest) (any, error) { return nil, s.Stop(ctx, q) })
	case KindRelease:
		return handle(body, func(q ReleaseRequest) (any, error) { return nil, s.Release(ctx, q) })
	case KindStatus:
		return handle(body, func(q named) (any, error) { return s.Status(ctx, q.InstanceID) })
	case KindClaims:
		return handle(body, func(q named) (any, error) { return s.Claims(ctx, q.InstanceID) })
	}
	return nil, fault.Newf(fault.Unsupported, "run the same version of tbcluster on every node", "a rank has no request %q", kind)
}

// handle decodes strictly: what is not understood must not be half done.
func handle[Q any](body []byte, do func(Q) (any, error)) ([]byte, error) {
	var q Q
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		return nil, fault.New(fault.Protocol, "a request of a rank makes no sense", err, "run the same version of tbcluster on every node")
	}
	out, err := do(q)
	if err != nil {
		return nil, err
	}
	return json.Marshal(out)
}

// ServeEvents answers PeerService.RankEvents: it sends events of an instance
// of the node that asks until ctx ends or send fails.
func (l *LocalRanks) ServeEvents(ctx context.Context, who host.Asker, instanceID string, send func(body []byte) error) error {
	return l.service(who, who.Node).Events(ctx, instanceID, func(e Event) error {
		body, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode event: %w", err)
		}
		return send(body)
	})
}
