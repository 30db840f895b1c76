package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host/schema"
	"tbcluster/transfer"
)

// transfers owns the transfers that were asked for on this node. The list is on
// disk, so that an agent that was killed says afterwards which transfers that
// ended; what they had copied is used by the next run of the same cp.
type transfers struct {
	path    string
	changed func() // something that others should see
	now     func() time.Time

	mu   sync.Mutex
	list map[string]*running
}

// running is one transfer and whoever waits for its changes.
type running struct {
	// dry is set for a dry run: it is watched by who asked for it, and is no
	// transfer to anybody else.
	dry       bool
	requestID string
	begun     time.Time // with the monotonic clock: the other may be set meanwhile
	best      uint64    // bytes that had arrived when a connection was lost
	// total and sent are of the runs before this one, where there were several:
	// bytes to send at first, and what each path carried.
	total   uint64
	sent    []transfer.LinkProgress
	view    *v1.Transfer // replaced, never changed
	lines   []string     // of a dry run
	changed chan struct{}
	t       *transfer.Transfer // nil once it ended
	cancel  context.CancelFunc
}

// keepTransfers is how long one that ended stays listed.
const keepTransfers = time.Hour

func ended(s v1.TransferState) bool {
	return s == v1.TransferState_TRANSFER_STATE_DONE || s == v1.TransferState_TRANSFER_STATE_FAILED || s == v1.TransferState_TRANSFER_STATE_CANCELLED
}

// transfersFile is the content of the file of transfers.
type transfersFile struct {
	Schema    int               `json:"schema"`
	Transfers []json.RawMessage `json:"transfers"`
}

const transfersSchema = 1

func openTransfers(path string, now func() time.Time, changed func()) (*transfers, error) {
	m := &transfers{path: path, now: now, changed: changed, list: map[string]*running{}}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return nil, fault.New(fault.FileIO, "read the list of transfers", err, "make it readable for the agent").At(path)
	}
	if err := schema.Check(data, transfersSchema, path); err != nil {
		return nil, err
	}
	var file transfersFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fault.New(fault.FileIO, "read the list of transfers", err, "remove the file: no data is in it").At(path)
	}
	for _, raw := range file.Transfers {
		v := &v1.Transfer{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, v); err != nil {
			return nil, fault.New(fault.FileIO, "read the list of transfers", err, "remove the file: no data is in it").At(path)
		}
		if !ended(v.State) {
			v.State = v1.TransferState_TRANSFER_STATE_FAILED
			v.FinishedAt = timestamppb.New(now())
			v.BytesPerSecond, v.Eta, v.Links = 0, nil, nil
			v.Error = failureOf(fault.Newf(fault.Interrupted, "run the same command again: it goes on where this one stopped",
				"the agent that owned the copy ended"))
		}
		m.list[v.Id] = &running{view: v, changed: make(chan struct{})}
	}
	return m, m.save()
}

// save writes the list; mu is held or nobody else knows m yet.
func (m *transfers) save() error {
	file := transfersFile{Schema: transfersSchema}
	for _, r := range m.list {
		if r.dry {
			continue
		}
		raw, err := protojson.Marshal(r.view)
		if err != nil {
			return err
		}
		file.Transfers = append(file.Transfers, raw)
	}
	data, err := json.Marshal(file)
	if err != nil {
		return err
	}
	return renameio.WriteFile(m.path, data, 0o600)
}

// views returns every transfer listed, and forgets those that ended long ago.
func (m *transfers) views() []*v1.Transfer {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*v1.Transfer
	for id, r := range m.list {
		if ended(r.view.State) && m.now().Sub(r.view.FinishedAt.AsTime()) > keepTransfers {
			delete(m.list, id)
			continue
		}
		if !r.dry {
			out = append(out, r.view)
		}
	}
	return out
}

func (m *transfers) get(id string) (view *v1.Transfer, lines []string, changed <-chan struct{}, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.list[id]
	if !ok {
		return nil, nil, nil, fault.Newf(fault.TransferUnknown, "`tbcluster status` lists the transfers", "no transfer has the ID %q here", id)
	}
	return r.view, r.lines, r.changed, nil
}

// active returns those that still run.
func (m *transfers) active() []*v1.Transfer {
	return slices.DeleteFunc(m.views(), func(t *v1.Transfer) bool { return ended(t.State) })
}

// newID returns a random ID with that prefix.
func newID(prefix string) string {
	b := make([]byte, 6)
	if _, err := rand.Read(b); err != nil {
		panic(err) // documented never to fail
	}
	return prefix + "-" + hex.EncodeToString(b)
}

// start begins a transfer, or returns the one that the same request began.
// ended is called once it has.
func (m *transfers) start(ctx context.Context, requestID string, job transfer.Job, deps transfer.Deps, base *v1.Transfer, done func(*v1.Transfer)) (*v1.Transfer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.list {
		if requestID != "" && r.requestID == requestID {
			done(r.view)
			return r.view, nil
		}
	}
	job.ID = newID("cp")
	base = proto.CloneOf(base)
	base.Id = job.ID
	base.State = v1.TransferState_TRANSFER_STATE_SCANNING
	begun := m.now()
	base.StartedAt = timestamppb.New(begun)
	ctx, cancel := context.WithCancel(ctx)
	r := &running{dry: job.Options.DryRun, requestID: requestID, begun: begun, view: base, changed: make(chan struct{}), cancel: cancel}
	r.t = transfer.New(job, deps, func(p transfer.Progress) { m.update(r, p, nil) })
	m.list[job.ID] = r
	if err := m.save(); err != nil {
		delete(m.list, job.ID)
		cancel()
		return nil, fault.New(fault.FileIO, "write the list of transfers", err, "free some space").At(m.path)
	}
	go func() {
		defer cancel()
		res, err := r.t.Run(ctx)
		var tries patience
		for tries.again(ctx, err, res.Progress.DoneBytes+r.best > 0) {
			// The control stream of a worker went with the cable under it. What
			// arrived is on disk, and there may be another way.
			m.mu.Lock()
			p := r.whole(res.Progress)
			r.total, r.sent = max(r.total, p.TotalBytes), p.Links
			m.mu.Unlock()
			if p.DoneBytes > r.best {
				r.best = p.DoneBytes
				tries.progress()
			}
			t := transfer.New(job, deps, func(p transfer.Progress) { m.update(r, p, nil) })
			m.mu.Lock()
			paused := r.view.State == v1.TransferState_TRANSFER_STATE_PAUSED
			r.t = t
			m.mu.Unlock()
			if paused {
				t.Pause()
			}
			select {
			case <-ctx.Done():
			case <-time.After(tries.pause()):
			}
			res, err = t.Run(ctx)
		}
		m.finish(r, res, err)
		m.mu.Lock()
		v := r.view
		m.mu.Unlock()
		done(v)
	}()
	return base, nil
}

// nothing lists a transfer that has nothing to copy, or returns the one that the
// same request made; lines are those of a dry run, else nil.
func (m *transfers) nothing(requestID string, base *v1.Transfer, lines []string) (*v1.Transfer, error) {
	defer m.changed()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.list {
		if requestID != "" && r.requestID == requestID {
			return r.view, nil
		}
	}
	base.Id, base.State = newID("cp"), v1.TransferState_TRANSFER_STATE_DONE
	now := m.now()
	base.StartedAt, base.FinishedAt = timestamppb.New(now), timestamppb.New(now)
	m.list[base.Id] = &running{dry: lines != nil, requestID: requestID, begun: now, view: base, lines: lines, changed: make(chan struct{})}
	if err := m.save(); err != nil {
		delete(m.list, base.Id)
		return nil, fault.New(fault.FileIO, "write the list of transfers", err, "free some space").At(m.path)
	}
	return base, nil
}

const (
	// retries is how often a connection may be lost without a byte of progress
	// before the transfer fails: an agent that is being renewed is back within the
	// ten seconds that the pauses between take together.
	retries = 8
	// busyRetries is how often it is tried while the worker of a run whose
	// connection was lost has the file still: it may take as long to notice as a
	// dead connection does.
	busyRetries = 25
	retryAfter  = 300 * time.Millisecond
	retryMost   = 2 * time.Second
)

// patience counts what ended the runs of a transfer since its last progress,
// each kind for itself.
type patience struct {
	lost, busy int
	// held is set once a connection was lost: a worker at its other end may have
	// the file still.
	held bool
}

// again reports whether what ended a run may be over by the next one, and counts
// it. That a node is down may be so once bytes have moved: then it was there
// before. That somebody writes the file may be so once a connection was lost:
// then it is the worker at its other end.
func (p *patience) again(ctx context.Context, err error, moved bool) bool {
	if err == nil || ctx.Err() != nil {
		return false
	}
	switch {
	case fault.Is(err, fault.Connection), moved && fault.Is(err, fault.NodeDown):
		p.lost++
		p.busy, p.held = 0, p.held || fault.Is(err, fault.Connection)
		return p.lost <= retries
	case p.held && fault.Is(err, fault.StillRunning):
		p.busy++
		return p.busy <= busyRetries
	}
	return false
}

// progress begins to count anew: bytes have moved.
func (p *patience) progress() { p.lost, p.busy = 0, 0 }

// pause is how long to wait before the next run.
func (p *patience) pause() time.Duration {
	return min(time.Duration(max(p.lost, p.busy, 1))*retryAfter, retryMost)
}

// whole is the progress of a transfer over all its runs; the list's lock is
// held.
func (r *running) whole(p transfer.Progress) transfer.Progress {
	switch {
	case p.TotalBytes == 0: // this run did not come as far as to know it
		p.TotalBytes, p.DoneBytes = r.total, r.best
	case r.total > p.TotalBytes:
		before := r.total - p.TotalBytes
		p.TotalBytes += before
		p.DoneBytes += before
	}
	links := slices.Clone(r.sent)
	for i := range links {
		links[i].BytesPerSecond, links[i].Up = 0, false
	}
	for _, l := range p.Links {
		i := slices.IndexFunc(links, func(have transfer.LinkProgress) bool {
			return have.LinkID == l.LinkID && have.Interface == l.Interface && have.Kind == l.Kind
		})
		if i < 0 {
			links = append(links, l)
			continue
		}
		l.Bytes += links[i].Bytes
		links[i] = l
	}
	p.Links = links
	return p
}

// update shows progress to everybody who watches.
func (m *transfers) update(r *running, p transfer.Progress, lines []string) {
	if p.State.Ended() {
		return // finish says so, once it is certain
	}
	m.mu.Lock()
	r.set(transferView(r.view, r.whole(p)), lines)
	m.mu.Unlock()
	m.changed()
}

func (m *transfers) finish(r *running, res transfer.Result, err error) {
	m.mu.Lock()
	v := transferView(r.view, r.whole(res.Progress))
	if err != nil {
		f := fault.As(err)
		if f == nil {
			f = fault.New(fault.Internal, "copy", err, "this is a bug: `tbcluster bugreport` collects what we need")
		}
		v.Error = failureOf(f)
		if !ended(v.State) {
			v.State = v1.TransferState_TRANSFER_STATE_FAILED
		}
		for _, p := range res.Problems {
			if p != f {
				v.Warnings = append(v.Warnings, p.Error())
			}
		}
	}
	finished := res.Progress.FinishedAt
	if finished.IsZero() {
		finished = m.now()
		v.FinishedAt = timestamppb.New(finished)
	}
	// Of a transfer that has ended the rate is that of the whole, with every run
	// and all that came before the first byte: what `cp` says.
	v.BytesPerSecond = 0
	if took := finished.Sub(r.begun); took > 0 {
		v.BytesPerSecond = uint64(float64(v.DoneBytes) / took.Seconds())
	}
	r.set(v, res.Lines)
	r.t = nil
	if serr := m.save(); serr != nil {
		v.Warnings = append(v.Warnings, "the list of transfers could not be written: "+serr.Error())
	}
	m.mu.Unlock()
	m.changed()
}

// set replaces the view; the list's lock is held.
func (r *running) set(v *v1.Transfer, lines []string) {
	r.view = v
	if lines != nil {
		r.lines = lines
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

func (m *transfers) act(id string, f func(*running)) (*v1.Transfer, error) {
	m.mu.Lock()
	r, ok := m.list[id]
	m.mu.Unlock()
	if !ok {
		_, _, _, err := m.get(id)
		return nil, err
	}
	if r.cancel != nil {
		f(r)
	}
	v, _, _, err := m.get(id)
	return v, err
}

func (m *transfers) cancelOne(id string) (*v1.Transfer, error) {
	return m.act(id, func(r *running) { r.cancel() })
}

// pause stops or goes on.
func (m *transfers) pause(id string, on bool) (*v1.Transfer, error) {
	return m.act(id, func(r *running) {
		m.mu.Lock()
		t := r.t
		m.mu.Unlock()
		switch {
		case t == nil:
		case on:
			t.Pause()
		default:
			t.Resume()
		}
	})
}

// transferStates maps the package's states to the API's.
var transferStates = map[transfer.State]v1.TransferState{
	transfer.Scanning:   v1.TransferState_TRANSFER_STATE_SCANNING,
	transfer.Connecting: v1.TransferState_TRANSFER_STATE_CONNECTING,
	transfer.Copying:    v1.TransferState_TRANSFER_STATE_COPYING,
	transfer.Syncing:    v1.TransferState_TRANSFER_STATE_SYNCING,
	transfer.Done:       v1.TransferState_TRANSFER_STATE_DONE,
	transfer.Failed:     v1.TransferState_TRANSFER_STATE_FAILED,
	transfer.Cancelled:  v1.TransferState_TRANSFER_STATE_CANCELLED,
	transfer.Paused:     v1.TransferState_TRANSFER_STATE_PAUSED,
}

// transferView returns the API's form of p; who asked and what for is kept
// from was.
func transferView(was *v1.Transfer, p transfer.Progress) *v1.Transfer {
	v := &v1.Transfer{
		Id: was.Id, Sources: was.Sources, Destination: p.Destination, State: transferStates[p.State],
		TotalBytes: p.TotalBytes, DoneBytes: p.DoneBytes, TotalFiles: p.TotalFiles, DoneFiles: p.DoneFiles,
		SkippedBytes: p.SkippedBytes, SkippedFiles: p.SkippedFiles, BytesPerSecond: p.BytesPerSecond,
		StartedAt: was.StartedAt, SourceNodeId: was.SourceNodeId, DestinationNodeId: was.DestinationNodeId,
		User: was.User, OwnerNodeId: was.OwnerNodeId, Warnings: slices.Clone(p.Warnings), Phase: p.Phase,
	}
	if p.ETA >= 0 && p.State == transfer.Copying {
		v.Eta = durationpb.New(p.ETA)
	}
	if !p.FinishedAt.IsZero() {
		v.FinishedAt = timestamppb.New(p.FinishedAt)
	}
	for _, l := range p.Links {
		v.Links = append(v.Links, &v1.LinkProgress{LinkId: l.LinkID, Interface: l.Interface, Bytes: l.Bytes, BytesPerSecond: l.BytesPerSecond,
			Transport: l.Transport, Kind: string(l.Kind)})
	}
	if p.Fault != nil {
		v.Error = failureOf(p.Fault)
	}
	return v
}

// failureOf returns the API's form of a fault.
func failureOf(f *fault.Fault) *v1.Failure {
	return &v1.Failure{Reason: string(f.Reason), What: f.What, Where: f.Where, Why: f.Why, Fix: f.Fix, ExitCode: uint32(f.Exit())}
}

// faultOf is the way back.
func faultOf(f *v1.Failure) *fault.Fault {
	if f == nil {
		return nil
	}
	return &fault.Fault{Reason: fault.Reason(f.Reason), What: f.What, Where: f.Where, Why: f.Why, Fix: f.Fix}
}
