package metrics

import (
	"sync"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
)

// flow counts what transfers asked for on this node have done. A list of what
// there is cannot say that: what ended leaves it after a while.
type flow struct {
	started time.Time

	mu    sync.Mutex
	seen  map[string]progress // by ID, of those that are listed
	bytes uint64
	ended map[string]uint64 // by state
}

// progress is how far a transfer was when it was seen last.
type progress struct {
	sent  uint64
	ended bool
}

func newFlow(started time.Time) flow {
	return flow{started: started, seen: map[string]progress{}, ended: map[string]uint64{}}
}

func ended(s v1.TransferState) bool {
	return s == v1.TransferState_TRANSFER_STATE_DONE || s == v1.TransferState_TRANSFER_STATE_FAILED || s == v1.TransferState_TRANSFER_STATE_CANCELLED
}

func (f *flow) observe(s *v1.ClusterState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	listed := make(map[string]progress, len(f.seen))
	for _, t := range s.GetTransfers() {
		if t.GetOwnerNodeId() != s.GetSelfNodeId() {
			continue
		}
		now := progress{sent: t.GetDoneBytes(), ended: ended(t.GetState())}
		was, known := f.seen[t.GetId()]
		switch {
		case !known && t.GetStartedAt().AsTime().Before(f.started):
			// Of an earlier agent, which has counted it.
		default:
			// One that goes on after a lost connection may begin a little earlier.
			if now.sent > was.sent {
				f.bytes += now.sent - was.sent
			} else {
				now.sent = was.sent
			}
			if now.ended && !was.ended {
				f.ended[word(t.GetState().String(), "TRANSFER_STATE_", transferStates)]++
			}
		}
		listed[t.GetId()] = now
	}
	f.seen = listed
}

func (f *flow) read() (bytes uint64, ended map[string]uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ended = make(map[string]uint64, len(f.ended))
	for k, v := range f.ended {
		ended[k] = v
	}
	return f.bytes, ended
}
