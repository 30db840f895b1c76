package agent

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"tbcluster/api/fault"
)

func TestWhatMayBeOverIsTriedAgain(t *testing.T) {
	of := func(r fault.Reason) error { return fmt.Errorf("a run: %w", fault.Newf(r, "", "it")) }
	for _, x := range []struct {
		err         error
		tries       int
		moved, lost bool
		again       bool
	}{
		{nil, 1, true, true, false},
		{errors.New("something else"), 1, true, true, false},
		{of(fault.Connection), 1, false, false, true},
		{of(fault.Connection), retries, false, true, true},
		{of(fault.Connection), retries + 1, true, true, false},
		{of(fault.NodeDown), 1, false, false, false},
		{of(fault.NodeDown), 1, true, false, true},
		// Another transfer has the file: so it is from the beginning.
		{of(fault.StillRunning), 1, true, false, false},
		// The worker of the run before has it.
		{of(fault.StillRunning), retries + 1, true, true, true},
		{of(fault.StillRunning), busyRetries + 1, true, true, false},
	} {
		if got := again(t.Context(), x.err, x.tries, x.moved, x.lost); got != x.again {
			t.Errorf("%v, try %d, moved %v, lost %v: again %v", x.err, x.tries, x.moved, x.lost, got)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if again(ended, x.err, x.tries, x.moved, x.lost) {
			t.Errorf("%v: again after the end", x.err)
		}
	}
}
