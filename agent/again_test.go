package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"tbcluster/api/fault"
)

func TestWhatMayBeOverIsTriedAgain(t *testing.T) {
	of := func(r fault.Reason) error { return fmt.Errorf("a run: %w", fault.Newf(r, "", "it")) }
	lost, busy, down := of(fault.Connection), of(fault.StillRunning), of(fault.NodeDown)
	for name, x := range map[string]struct {
		ends  []error // of runs, one after the other
		moved bool
		runs  int // how many of them are followed by another
	}{
		"it is done":                          {[]error{nil}, true, 0},
		"an error that stays":                 {[]error{errors.New("something else")}, true, 0},
		"a connection lost again and again":   {slices.Repeat([]error{lost}, 10), false, retries},
		"down from the beginning":             {[]error{down}, false, 0},
		"down after bytes have moved":         {slices.Repeat([]error{down}, 10), true, retries},
		"another transfer has the file":       {[]error{busy}, true, 0},
		"the worker of the run before has it": {append([]error{lost}, slices.Repeat([]error{busy}, 40)...), true, 1 + busyRetries},
		"lost again after a long wait": {
			slices.Concat([]error{lost}, slices.Repeat([]error{busy}, busyRetries), []error{lost}, slices.Repeat([]error{busy}, busyRetries), []error{lost, nil}),
			true, 3 + 2*busyRetries,
		},
		"lost for ever, with waits between": {
			slices.Repeat(append([]error{lost}, slices.Repeat([]error{busy}, 10)...), 10), true, retries * 11,
		},
	} {
		var p patience
		runs := 0
		for _, err := range x.ends {
			if !p.again(t.Context(), err, x.moved) {
				break
			}
			if pause := p.pause(); pause < retryAfter || pause > retryMost {
				t.Errorf("%s: a pause of %v", name, pause)
			}
			runs++
		}
		if runs != x.runs {
			t.Errorf("%s: %d more runs, not %d", name, runs, x.runs)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if p.again(ended, lost, x.moved) {
			t.Errorf("%s: again after the end", name)
		}
	}
	p := patience{}
	for range 3 * retries {
		if !p.again(t.Context(), lost, true) {
			t.Fatal("given up though bytes move")
		}
		p.progress()
	}
}
