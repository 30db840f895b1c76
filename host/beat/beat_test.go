package beat

import (
	"testing"
	"time"
)

func TestUntil(t *testing.T) {
	for _, every := range []time.Duration{time.Nanosecond, time.Millisecond, 500 * time.Millisecond, 4 * time.Second} {
		before := time.Since(began)
		wait := Until(every)
		after := time.Since(began)
		if wait <= 0 || wait > every {
			t.Errorf("%v: wait %v", every, wait)
		}
		// A multiple lies between the earliest and the latest time that this ends.
		if (after+wait)/every < 1 || (after+wait)%every > after-before {
			t.Errorf("%v: wait %v from between %v and %v", every, wait, before, after)
		}
	}
	// What ends at the beat begins the next one anew.
	time.Sleep(Until(20 * time.Millisecond))
	if wait := Until(time.Hour); wait > time.Hour {
		t.Error(wait)
	}
}
