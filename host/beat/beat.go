// Package beat has everything that works again and again do so together: a
// process that wakes once for ten things costs less than one that wakes for each
// of them.
package beat

import "time"

var began = time.Now()

// Until is the time until the next multiple of every since this process began,
// more than 0 and at most every.
func Until(every time.Duration) time.Duration {
	return every - time.Since(began)%every
}
