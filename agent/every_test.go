package agent

import (
	"testing"

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
