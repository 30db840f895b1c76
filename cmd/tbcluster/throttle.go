package main

import (
	"context"
	"time"
)

// throttle paints the newest of what it is shown, at most once in gap, and
// what was shown last in any case.
type throttle struct {
	gap time.Duration
}

// run calls work, which may call show from its own goroutine as often as it
// likes, and paints until work returns. It returns what work returned.
func (t throttle) run(ctx context.Context, work func(ctx context.Context, show func(paint func())) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// newest holds what is to be painted next; a newer one replaces it.
	newest := make(chan func(), 1)
	done := make(chan error, 1)
	go func() {
		done <- work(ctx, func(paint func()) {
			select {
			case <-newest:
			default:
			}
			newest <- paint
		})
	}()
	var ended error
	for finished := false; !finished; {
		select {
		case paint := <-newest:
			paint()
		case ended = <-done:
			finished = true
			continue
		}
		pause := time.NewTimer(t.gap)
		select {
		case <-pause.C:
		case ended = <-done:
			finished = true
		}
		pause.Stop()
	}
	select {
	case paint := <-newest:
		paint()
	default:
	}
	return ended
}
