package guest

import (
	"sync"
	"time"
)

// counter reads the time stamp counter.
func counter() uint64

// measured is for how long the counter is measured.
const measured = 50 * time.Millisecond

// counterKHz returns the frequency of the time stamp counter. Emulated
// processors count as this one does, and a kernel that measures it itself gets
// it wrong by any factor when its processor has to wait during the milliseconds
// that it measures: time then runs wild in the guest.
var counterKHz = sync.OnceValue(func() uint64 {
	begun := time.Now()
	look := func() (at time.Duration, count uint64) {
		best := time.Hour
		for range 64 { // the one that was interrupted least
			before := time.Since(begun)
			c := counter()
			if took := time.Since(begun) - before; took < best {
				best, at, count = took, before+took/2, c
			}
		}
		return at, count
	}
	t0, c0 := look()
	time.Sleep(measured)
	t1, c1 := look()
	return uint64(float64(c1-c0) / float64(t1-t0) * 1e6)
})
