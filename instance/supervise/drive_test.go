package supervise

import (
	"testing"
	"time"

	"tbcluster/instance/spec"
)

// A machine with much to do makes an engine slow; it is given more and more time
// to answer, but not more than an instance may go without an answer.
func TestASlowEngineIsNotOneThatHangs(t *testing.T) {
	d := &driver{t: Times{}.withDefaults(), i: &instance{rec: record{Ranks: make([]spec.Rank, 1)}}}
	near := func(what string, want time.Duration) {
		t.Helper()
		if got := d.limit(); got > want || got < want-time.Second {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	near("one that answers", 2*time.Second)
	d.typical = 3 * time.Second
	near("one that takes 3 s for a token", 12*time.Second)
	d.typical, d.missed = 500*time.Millisecond, time.Now()
	near("one of which an agent knows only that it ran before", 2*time.Second)
	d.misses = 3
	near("three times late", 16*time.Second)
	d.misses = 40
	near("late again and again", time.Minute)
	d.i.rec.Ranks = make([]spec.Rank, 2)
	near("one that is split", 20*time.Second)
	d.missed = time.Now().Add(-19 * time.Second)
	near("one whose time is over", 2*time.Second)
}
