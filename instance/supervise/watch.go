package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"tbcluster/api/fault"
	"tbcluster/instance/rank"
	"tbcluster/instance/spec"
)

// watch follows one rank until its process is gone; l.mu is held.
func (l *LocalRanks) watch(h *holding, r *heldRank) {
	ctx, cancel := context.WithCancel(l.ctx)
	if r.gone == nil {
		r.gone = make(chan struct{})
	}
	gone := r.gone
	l.wg.Go(func() {
		defer cancel()
		w := watcher{l: l, h: h, r: r, dir: l.c.Spawner.RankDir(h.rec.InstanceID, r.Rank.Index), a: l.adapter(h.rec.Engine.Name)}
		if w.run(ctx) {
			close(gone)
		}
	})
}

// watcher follows one rank.
type watcher struct {
	l   *LocalRanks
	h   *holding
	r   *heldRank
	dir string
	a   spec.Adapter
}

// run returns true once the process is gone, false when ctx ended before.
func (w *watcher) run(ctx context.Context) bool {
	st, err := w.first(ctx)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		w.l.update(w.h, w.r, func(s *RankStatus) { s.State, s.Exit = RankExited, "not started: "+err.Error() })
		return true
	}
	if st.Phase != rank.Ended {
		w.l.update(w.h, w.r, func(s *RankStatus) { s.PID = st.Engine.PID })
		// The shim goes last, once everything is written.
		gone := make(chan error, 1)
		go func() { gone <- st.Shim.Wait(ctx) }()
		w.starting(ctx, st, gone)
		if err := <-gone; err != nil && ctx.Err() == nil {
			w.l.c.Log.Error("cannot watch a rank", "dir", w.dir, "error", err)
		}
		if ctx.Err() != nil {
			return false
		}
	}
	return w.ended(ctx)
}

// shimWrites is how long the shim may take to write its first status.
const shimWrites = 10 * time.Second

// first waits for a status with an engine.
func (w *watcher) first(ctx context.Context) (rank.Status, error) {
	for end := time.Now().Add(shimWrites); ; {
		st, err := rank.Observe(w.dir)
		switch {
		case err == nil && st.Phase != rank.Starting:
			return st, nil
		case err != nil && !errors.Is(err, os.ErrNotExist):
			return st, err
		case time.Now().After(end):
			return st, fmt.Errorf("its shim wrote no status within %s", shimWrites)
		}
		if !sleep(ctx, 10*time.Millisecond) {
			return st, ctx.Err()
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// starting follows the log and the rank's own check until it is ready or gone.
// What it finds fatal is told at once: the owner ends the group.
func (w *watcher) starting(ctx context.Context, st rank.Status, gone chan error) {
	tail := rank.NewTail(w.dir)
	defer tail.Close()
	t := w.l.c.Times
	began, moved := time.Now(), time.Now()
	var effort uint64
	phase := ""
	ended := func() bool {
		select {
		case err := <-gone:
			gone <- err // run looks too
			return true
		default:
			return false
		}
	}
	for !ended() {
		fatal := w.read(tail)
		ctx1, cancel := context.WithTimeout(ctx, 2*time.Second)
		ready, now, err := w.a.RankReady(ctx1, w.r.Rank)
		cancel()
		if ctx.Err() != nil {
			return
		}
		switch {
		case fatal:
		case err != nil:
			f := fault.FromStatus(err)
			w.fatal(f.Error(), f.Reason)
		case ready && !ended(): // else it was somebody else who answered
			w.l.update(w.h, w.r, func(s *RankStatus) {
				if s.State == RankStarting {
					s.State, s.Phase = RankReady, ""
				}
				w.r.settled = true
			})
			return
		case now != phase:
			phase = now
			w.l.update(w.h, w.r, func(s *RankStatus) { s.Phase = phase })
		}
		if e := st.Engine.Effort(); e != effort {
			effort, moved = e, time.Now()
		}
		switch {
		case fatal:
		case phase == "starting" && time.Since(began) > t.Listen:
			w.fatal(fmt.Sprintf("it does not listen after %s", t.Listen), fault.Timeout)
		case time.Since(moved) > t.Stall:
			w.fatal(fmt.Sprintf("it has not got on with anything for %s while loading", t.Stall), fault.Timeout)
		}
		select {
		case <-ctx.Done():
			return
		case err := <-gone:
			gone <- err
			return
		case <-time.After(max(t.Poll, min(time.Since(began)/50, slowest))):
		}
	}
}

// slowest is the pace at which a rank is looked at that has been loading for
// long.
const slowest = 500 * time.Millisecond

// read interprets what is new in the log, and reports whether it was fatal.
func (w *watcher) read(tail *rank.Tail) bool {
	err := tail.Read(func(line rank.Line) {
		e := w.a.ReadLog(w.r.Rank, line.Text)
		switch {
		case e.Fatal != "":
			w.fatal(e.Fatal, fault.Reason(e.Reason))
		case e.Total > 0:
			w.l.update(w.h, w.r, func(s *RankStatus) { s.Done, s.Total = e.Done, e.Total })
		}
	})
	if err != nil {
		w.l.c.Log.Warn("cannot read the log of a rank", "dir", w.dir, "error", err)
	}
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	return w.r.Status.Fatal != ""
}

// fatal keeps the first thing that was wrong.
func (w *watcher) fatal(words string, reason fault.Reason) {
	w.l.update(w.h, w.r, func(s *RankStatus) {
		if s.Fatal == "" {
			s.Fatal, s.Reason = words, reason
		}
	})
}

// ended reads how the rank ended.
func (w *watcher) ended(ctx context.Context) bool {
	st, err := rank.Observe(w.dir)
	if err != nil {
		st = rank.Status{Phase: rank.Ended, Error: err.Error()}
	}
	if st.Phase != rank.Ended { // another shim of ours at work in it: not our doing
		return false
	}
	// What a killed shim left: the engine dies with it, its children may not.
	if err := w.l.c.Spawner.EndRank(ctx, w.h.rec.InstanceID, w.r.Rank.Index, true); err != nil {
		w.l.c.Log.Error("cannot end what is left of a rank", "dir", w.dir, "error", err)
	}
	fatal, reason := "", fault.Reason("")
	for _, line := range slices.Backward(st.LastLines) {
		if e := w.a.ReadLog(w.r.Rank, line); e.Fatal != "" {
			fatal, reason = e.Fatal, fault.Reason(e.Reason) // the first of the lines in the end
		}
	}
	if fatal == "" {
		fatal, reason = w.portTaken()
	}
	w.l.update(w.h, w.r, func(s *RankStatus) {
		s.State, s.PID, s.Exit, s.LastLines, s.Phase = RankExited, 0, st.Exit(), st.LastLines, ""
		if s.Fatal == "" {
			s.Fatal, s.Reason = fatal, reason
		}
	})
	return true
}

// portTaken says which port of a rank that never was ready is somebody else's.
// Engines lose their last words at times: llama-server one time in twenty.
func (w *watcher) portTaken() (string, fault.Reason) {
	w.l.mu.Lock()
	was := w.r.settled
	w.l.mu.Unlock()
	if was {
		return "", ""
	}
	for _, p := range w.r.Rank.Ports {
		if err := probe(p.AddrPort()); errors.Is(err, syscall.EADDRINUSE) {
			return "port " + p.AddrPort().String() + " is in use by something else", fault.PortInUse
		}
	}
	return "", ""
}

// keepLogs is how long the logs of ranks of other nodes are kept after their
// end: as a rule their owner removes them.
const keepLogs = 24 * time.Hour

// askOwner is the pace at which the owner of unowned ranks is asked.
const askOwner = 5 * time.Second

// lookAfter takes back grants that were not used and ends ranks that nobody
// owns any more.
func (l *LocalRanks) lookAfter() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-tick.C:
		}
		l.mu.Lock()
		for id, h := range l.held {
			if !h.expires.IsZero() && time.Now().After(h.expires) && len(h.subs) == 0 {
				l.ports.release(id)
				delete(l.held, id)
				continue
			}
			switch {
			case len(h.subs) > 0 || h.ending || h.asking:
			case h.alive():
				l.unowned(h)
			case h.rec.Owner != l.c.NodeID && time.Since(h.unowned) > keepLogs:
				l.endOrphan(h, "its logs are old", true)
			}
		}
		l.mu.Unlock()
	}
}

// unowned decides about ranks of which no owner follows the events; l.mu is
// held.
func (l *LocalRanks) unowned(h *holding) {
	since := time.Since(h.unowned)
	severed := slices.ContainsFunc(h.rec.Links, func(id string) bool { return l.down[id] })
	switch {
	case since > l.c.Times.Orphan:
		l.endOrphan(h, fmt.Sprintf("its owner could not be asked for %s", l.c.Times.Orphan), false)
	case severed && since > l.c.Times.Severed:
		l.endOrphan(h, "its owner cannot be asked and the cable to it is down", false)
	case since > l.c.Times.Silence:
		h.asking = true
		l.wg.Go(func() {
			ctx, cancel := context.WithTimeout(l.ctx, askOwner)
			defer cancel()
			claimed, err := l.c.Nodes.RankService(h.rec.Owner, h.rec.Person.asker()).Claims(ctx, h.rec.InstanceID)
			if err == nil && claimed || err != nil {
				sleep(ctx, askOwner) // ask again, not at once
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			h.asking = false
			if err == nil && !claimed && len(h.subs) == 0 {
				l.endOrphan(h, "its owner does not know it any more", false)
			}
		})
	}
}

// setClaims tells who knows what this node owns, and ends what is not among it.
func (l *LocalRanks) setClaims(claims func(id string) bool, known func(id string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims = claims
	for id, h := range l.held {
		if h.rec.Owner == l.c.NodeID && h.expires.IsZero() && !known(id) {
			l.endOrphan(h, "its record is lost", true)
		}
	}
}

// endOrphan ends all ranks of a holding, and with remove its logs; l.mu is held.
func (l *LocalRanks) endOrphan(h *holding, why string, remove bool) {
	h.ending = true
	l.c.Log.Warn("ending what nobody owns", "instance", h.rec.InstanceID, "reason", why)
	l.wg.Go(func() {
		err := l.stop(l.ctx, h, nil, 0)
		if err == nil {
			err = l.release(l.ctx, h, remove)
		}
		if err != nil && l.ctx.Err() == nil {
			l.c.Log.Error("cannot end ranks that nobody owns", "instance", h.rec.InstanceID, "error", err)
		}
		l.mu.Lock()
		h.ending = false
		l.mu.Unlock()
	})
}
