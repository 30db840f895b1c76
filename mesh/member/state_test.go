package member

import (
	"testing"
	"time"
)

func TestHeartbeatGrowsWithTheCluster(t *testing.T) {
	for n, want := range map[int]time.Duration{
		0: time.Second, 1: time.Second, 16: time.Second, 17: 2 * time.Second, 32: 2 * time.Second,
		33: 3 * time.Second, 48: 3 * time.Second, 49: 4 * time.Second, 64: 4 * time.Second,
	} {
		if got := Heartbeat(n); got != want {
			t.Errorf("Heartbeat(%d) = %v, want %v", n, got, want)
		}
	}
	if downAfter(time.Second) != 10*time.Second || downAfter(4*time.Second) != 16*time.Second {
		t.Error("a node is down after max(10 s, 4 h)")
	}
}

func TestJudge(t *testing.T) {
	t0 := time.Unix(1_000_000, 0)
	after := func(d time.Duration) time.Time { return t0.Add(d) }
	ms := time.Millisecond
	up := life{watched: t0.Add(-time.Hour), met: true, lastHeard: t0, heartbeat: time.Second, connected: true}
	broken := up
	broken.connected, broken.broken = false, after(500*ms)
	refused := broken
	refused.refused = "no agent listens there"
	unplugged := broken
	unplugged.unplugged = true
	left := broken
	left.farewell = "its agent was stopped"
	fresh := life{watched: t0, heartbeat: time.Second}
	restarted := life{watched: t0, lastHeard: t0.Add(-time.Hour), heartbeat: time.Second}
	big := up
	big.heartbeat = 4 * time.Second
	for name, c := range map[string]struct {
		l    life
		at   time.Duration
		want State
		next time.Duration // 0 for never
	}{
		"heard just now":                    {up, 0, Up, 3 * time.Second},
		"two beats missing":                 {up, 2900 * ms, Up, 3 * time.Second},
		"three beats missing":               {up, 3 * time.Second, Suspect, 10 * time.Second},
		"silent for ten seconds":            {up, 10 * time.Second, Down, 0},
		"64 nodes, 11 s":                    {big, 11 * time.Second, Up, 12 * time.Second},
		"64 nodes, 12 s":                    {big, 12 * time.Second, Suspect, 16 * time.Second},
		"64 nodes, 16 s":                    {big, 16 * time.Second, Down, 0},
		"broken, another way is tried":      {broken, 600 * ms, Up, 1200 * ms},
		"broken, no other way in time":      {broken, 1200 * ms, Suspect, 10 * time.Second},
		"unplugged, another way is tried":   {unplugged, 1200 * ms, Up, 3 * time.Second},
		"unplugged, no other way in time":   {unplugged, 3 * time.Second, Suspect, 10 * time.Second},
		"broken, every way refuses":         {refused, 501 * ms, Suspect, 10 * time.Second},
		"broken and down":                   {refused, 10 * time.Second, Down, 0},
		"said goodbye":                      {left, 501 * ms, Down, 0},
		"never heard, just started":         {fresh, time.Second, Unknown, 10 * time.Second},
		"never heard":                       {fresh, 10 * time.Second, Down, 0},
		"heard by an earlier run":           {restarted, time.Second, Unknown, 10 * time.Second},
		"heard by an earlier run, not this": {restarted, 10 * time.Second, Down, 0},
	} {
		got, reason, next := judge(after(c.at), c.l)
		if got != c.want {
			t.Errorf("%s: %s (%s), want %s", name, got, reason, c.want)
		}
		if (reason == "") != (got == Up) {
			t.Errorf("%s: %s with reason %q", name, got, reason)
		}
		var want time.Time
		if c.next != 0 {
			want = after(c.next)
		}
		if !next.Equal(want) {
			t.Errorf("%s: next %v, want %v", name, next.Sub(t0), c.next)
		}
	}
}
