//go:build linux

package usb4

import (
	"container/heap"
	"time"
)

// schedule is what has to happen at a time, under the fabric's lock.
type schedule struct {
	events []*event
	set    time.Duration // what the alarm was last set to; 0: nothing
}

// event is something that happens later. It may be put off or called off.
type event struct {
	at    time.Duration
	index int // in the heap, -1: not due
	do    func(now time.Duration)
}

func newEvent(do func(now time.Duration)) *event { return &event{index: -1, do: do} }

func (s *schedule) Len() int           { return len(s.events) }
func (s *schedule) Less(i, j int) bool { return s.events[i].at < s.events[j].at }
func (s *schedule) Swap(i, j int) {
	s.events[i], s.events[j] = s.events[j], s.events[i]
	s.events[i].index, s.events[j].index = i, j
}

// Push and Pop are for package heap.
func (s *schedule) Push(x any) {
	e := x.(*event)
	e.index = len(s.events)
	s.events = append(s.events, e)
}

// Pop is for package heap.
func (s *schedule) Pop() any {
	last := len(s.events) - 1
	e := s.events[last]
	s.events[last] = nil
	s.events = s.events[:last]
	e.index = -1
	return e
}

// at has an event happen at a time, and forgets when else it was to happen.
func (s *schedule) at(e *event, t time.Duration) {
	e.at = t
	if e.index >= 0 {
		heap.Fix(s, e.index)
		return
	}
	heap.Push(s, e)
}

// cancel has an event not happen.
func (s *schedule) cancel(e *event) {
	if e.index >= 0 {
		heap.Remove(s, e.index)
	}
}

// run does what is due.
func (s *schedule) run(now time.Duration) {
	for len(s.events) > 0 && s.events[0].at <= now {
		e := heap.Pop(s).(*event)
		e.do(now)
	}
}

// arm sets the alarm to the next event, if it is not.
func (s *schedule) arm(a Alarm) {
	var next time.Duration
	if len(s.events) > 0 {
		next = max(s.events[0].at, 1)
	}
	if next == s.set || next == 0 {
		return
	}
	s.set = next
	a.Set(next)
}
