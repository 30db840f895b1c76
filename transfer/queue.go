package transfer

import "sync"

// unit is what one frame carries: a chunk of a file, or several small files.
type unit struct {
	id    uint64
	file  int // of a chunk
	chunk int
	pack  []int // file indexes of a pack; nil for a chunk
	tries int   // how often it arrived damaged
}

// queue holds the units that are still to be sent. All connections of all
// paths pull from it, so each takes what it can carry.
type queue struct {
	mu     sync.Mutex
	units  []*unit // fresh ones, from next on
	next   int
	again  []*unit // came back from a connection that died, or damaged
	out    int     // taken and not yet done
	sealed bool    // no more will be added
	paused bool
	wake   chan struct{} // closed and replaced when something has changed
	done   chan struct{} // closed when sealed and everything is done
}

func newQueue() *queue { return &queue{wake: make(chan struct{}), done: make(chan struct{})} }

// changed wakes those who wait; call it with mu held.
func (q *queue) changed() {
	close(q.wake)
	q.wake = make(chan struct{})
	if q.sealed && q.out == 0 && q.next == len(q.units) && len(q.again) == 0 {
		select {
		case <-q.done:
		default:
			close(q.done)
		}
	}
}

func (q *queue) add(us ...*unit) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, u := range us {
		u.id = uint64(len(q.units))
		q.units = append(q.units, u)
	}
	q.changed()
}

func (q *queue) seal() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sealed = true
	q.changed()
}

func (q *queue) pause(p bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.paused = p
	q.changed()
}

// take returns the next unit, or nil when stop is closed or nothing will come.
func (q *queue) take(stop <-chan struct{}) *unit {
	for {
		q.mu.Lock()
		wake := q.wake
		var u *unit
		switch {
		case q.paused:
		case len(q.again) > 0:
			u = q.again[len(q.again)-1]
			q.again = q.again[:len(q.again)-1]
		case q.next < len(q.units):
			u = q.units[q.next]
			q.units[q.next] = nil // it lives on only where it is used
			q.next++
		}
		if u != nil {
			q.out++
			q.mu.Unlock()
			return u
		}
		q.mu.Unlock()
		select {
		case <-wake:
		case <-stop:
			return nil
		case <-q.done:
			return nil
		}
	}
}

// finish says that a unit needs nothing more.
func (q *queue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.out--
	q.changed()
}

// retry puts a unit back, before all others.
func (q *queue) retry(u *unit) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.out--
	q.again = append(q.again, u)
	q.changed()
}
