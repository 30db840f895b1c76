package member

import (
	"fmt"
	"time"
)

// State is what this node knows of another node's life.
type State string

// The states.
const (
	Up      State = "up"
	Suspect State = "suspect" // late, or its stream broke and found no other way
	Down    State = "down"
	Unknown State = "unknown" // not heard from since this agent started
)

const (
	// replaceWithin is how long a broken stream may take to be replaced over
	// another way before the node is suspect.
	replaceWithin = 700 * time.Millisecond
	// lateBeats and downBeats are how many intervals without a word make a node
	// suspect and down; downLeast is how long that takes at least.
	lateBeats = 3
	downBeats = 4
	downLeast = 10 * time.Second
)

// life is what the state of a node is judged by.
type life struct {
	watched   time.Time     // since when this node listens for it
	lastHeard time.Time     // zero if never, else maybe of an earlier run
	met       bool          // heard from in this run
	heartbeat time.Duration // what it promised
	connected bool          // there is a stream
	broken    time.Time     // when the last stream broke
	unplugged bool          // with the interface of this node that it went over
	refused   string        // why no other way replaced it; "" while that is tried
	farewell  string        // it said goodbye, and why
}

// downAfter is how long after its last word a node is down.
func downAfter(heartbeat time.Duration) time.Duration {
	return max(downLeast, downBeats*heartbeat)
}

// spareAfter is how long after its last word another way is tried beside a
// stream that is silent: early enough for that to work before it is late.
func spareAfter(heartbeat time.Duration) time.Duration { return heartbeat * 18 / 10 }

// judge says what state a node is in, why, and when to look again (zero: only
// when something happens).
func judge(now time.Time, l life) (s State, reason string, next time.Time) {
	down, late := downAfter(l.heartbeat), lateBeats*l.heartbeat
	if !l.met {
		if end := l.watched.Add(down); now.Before(end) {
			return Unknown, "not heard from yet" + because(l.refused), end
		}
		if l.lastHeard.IsZero() {
			return Down, "never heard from" + because(l.refused), time.Time{}
		}
		return Down, "not heard from since this agent started" + because(l.refused), time.Time{}
	}
	silent := now.Sub(l.lastHeard)
	switch {
	case l.farewell != "" && !l.connected:
		return Down, l.farewell, time.Time{}
	case silent >= down:
		return Down, "not heard from any more" + because(l.refused), time.Time{}
	case l.connected && silent < late:
		return Up, "", l.lastHeard.Add(late)
	case l.connected:
		return Suspect, fmt.Sprintf("%d heartbeats of %v are missing", lateBeats, l.heartbeat), l.lastHeard.Add(down)
	case l.refused != "":
		return Suspect, "its connection broke" + because(l.refused), l.lastHeard.Add(down)
	case l.unplugged && silent < late:
		// That says nothing of the other node: it is given as long as one that
		// is silent.
		return Up, "", l.lastHeard.Add(late)
	case now.Sub(l.broken) < replaceWithin && silent < late:
		return Up, "", l.broken.Add(replaceWithin)
	}
	return Suspect, "its connection broke, and no other way reached it in time", l.lastHeard.Add(down)
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}
