package agent

import (
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/transfer"
)

func TestTheRateOfATransferThatEndedIsThatOfTheWhole(t *testing.T) {
	begin := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	m, err := openTransfers(filepath.Join(t.TempDir(), "transfers.json"), func() time.Time { return begin.Add(4 * time.Second) }, func() {})
	if err != nil {
		t.Fatal(err)
	}
	// The clock was an hour behind when it began, and was set.
	for _, c := range []struct {
		finished time.Time // zero: it is left to the list
		want     uint64
	}{{begin.Add(2 * time.Second), 50}, {time.Time{}, 25}, {begin, 0}} {
		r := &running{begun: begin, view: &v1.Transfer{Id: "cp-1", StartedAt: timestamppb.New(begin.Add(-time.Hour))}, changed: make(chan struct{})}
		// Over the cables alone it went faster.
		m.finish(r, transfer.Result{Progress: transfer.Progress{State: transfer.Done, TotalBytes: 100, DoneBytes: 100, BytesPerSecond: 999, FinishedAt: c.finished}}, nil)
		if got := r.view.BytesPerSecond; got != c.want {
			t.Errorf("100 bytes until %v: %d bytes a second, want %d", c.finished, got, c.want)
		}
	}
}
