package tui

import (
	"maps"
	"slices"
	"time"

	pb "tbcluster/api/tbcluster/v1"
)

// rateSeconds is how much of the past a sparkline shows.
const rateSeconds = 30

// rates is what bytes did in the last half minute: bytes a second, newest
// last, by link and by transfer.
type rates struct {
	link     map[string][]uint64
	transfer map[string][]uint64
	// at is the second that the newest value belongs to.
	at time.Time
	// sent and got are the counters of each link when at began.
	count map[string][2]uint64
}

// next returns the rates after c was seen at now. Values of one second replace
// each other; seconds in which nothing was heard repeat what was known, since
// the agent tells of changes only.
func (r rates) next(c *pb.ClusterState, now time.Time) rates {
	n := rates{link: map[string][]uint64{}, transfer: map[string][]uint64{}, at: now.Truncate(time.Second), count: r.count}
	steps := 1
	fresh := r.at.IsZero() || !n.at.Equal(r.at)
	if !r.at.IsZero() {
		steps = int(n.at.Sub(r.at) / time.Second)
		steps = min(max(steps, 0), rateSeconds)
	}
	push := func(old []uint64, v uint64) []uint64 {
		old = slices.Clone(old)
		if !fresh && len(old) > 0 {
			old[len(old)-1] = v
			return old
		}
		for range steps - 1 {
			last := uint64(0)
			if len(old) > 0 {
				last = old[len(old)-1]
			}
			old = append(old, last)
		}
		old = append(old, v)
		if len(old) > rateSeconds {
			old = old[len(old)-rateSeconds:]
		}
		return old
	}
	moving := map[string]uint64{}
	for _, t := range c.GetTransfers() {
		if isOver(t.GetState()) {
			if old, ok := r.transfer[t.GetId()]; ok {
				n.transfer[t.GetId()] = old
			}
			continue
		}
		v := uint64(0)
		if t.GetState() == pb.TransferState_TRANSFER_STATE_COPYING {
			v = t.GetBytesPerSecond()
		}
		n.transfer[t.GetId()] = push(r.transfer[t.GetId()], v)
		if t.GetState() == pb.TransferState_TRANSFER_STATE_COPYING {
			for _, l := range t.GetLinks() {
				moving[l.GetLinkId()] += l.GetBytesPerSecond()
			}
		}
	}
	if fresh {
		n.count = map[string][2]uint64{}
	} else {
		n.count = maps.Clone(r.count)
	}
	for _, l := range c.GetLinks() {
		v := moving[l.GetId()]
		if fresh {
			n.count[l.GetId()] = [2]uint64{l.GetATxBytes(), l.GetARxBytes()}
		}
		// What engines send shows in the interface's own counters only.
		if was, ok := r.count[l.GetId()]; ok && steps > 0 && l.GetATxBytes() >= was[0] && l.GetARxBytes() >= was[1] {
			v = max(v, (l.GetATxBytes()-was[0]+l.GetARxBytes()-was[1])/uint64(steps))
		}
		n.link[l.GetId()] = push(r.link[l.GetId()], v)
	}
	return n
}

// busy is the rate below which a link is called idle: probes and heartbeats
// are no traffic that a person means.
const busy = 1_000_000

// now is the newest rate of a link, 0 when it is idle.
func (r rates) now(link string) uint64 {
	if l := r.link[link]; len(l) > 0 && l[len(l)-1] >= busy {
		return l[len(l)-1]
	}
	return 0
}
