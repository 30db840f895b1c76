package agent

import (
	"testing"
	"time"

	"tbcluster/mesh/discover"
)

// TestWhoIsInReachIsSaidInTime: otherwise that nobody hears a node is never found.
func TestWhoIsInReachIsSaidInTime(t *testing.T) {
	for n := range 1000 {
		if every := ownEvery(n); every >= discover.ReachedGap {
			t.Fatalf("%d nodes: every %v, and it holds %v", n, every, discover.ReachedGap)
		}
	}
}

func TestNewsOfManyIsGathered(t *testing.T) {
	for n, want := range map[int]time.Duration{0: gather, 2: gather, 31: gather, 32: 64 * time.Millisecond, 63: 126 * time.Millisecond, 1000: gatherMost} {
		if got := gatherAmong(n); got != want {
			t.Errorf("among %d others news waits %v, not %v", n, got, want)
		}
	}
}
