//go:build linux

package usb4

import "time"

// Clock is time as a fabric sees it. SystemClock is that of the machine; tests
// bring one that they move by hand.
type Clock interface {
	// Now returns the time since some fixed point. It never goes back.
	Now() time.Duration
	// NewAlarm returns an alarm that calls f, on a goroutine of its own and
	// never twice at the same time, when the time that was set has come.
	NewAlarm(f func()) (Alarm, error)
}

// Alarm is a timer that can be set again and again.
type Alarm interface {
	// Set has the alarm go off at a time, or at once if it has passed. What was
	// set before is forgotten.
	Set(at time.Duration)
	// Close ends the alarm. A call of f that is under way may still finish.
	Close() error
}
