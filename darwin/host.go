package darwin

import (
	"cmp"
	"context"
	"sync"
	"time"

	"tbcluster/host"
)

// Runner runs a program and returns what it printed. An error of a program
// that ended with a status other than 0 names the program and holds what it
// printed to its standard error.
type Runner interface {
	Run(ctx context.Context, name string, args ...string) ([]byte, error)
}

// Options of New. The zero value is a real Mac.
type Options struct {
	// Runner runs programs; Exec if nil.
	Runner Runner
	// Interval is the time between two looks of Watch; 2 s if 0.
	Interval time.Duration
	// Clock is the time; the system's if nil.
	Clock host.Clock
}

// New returns the Mac that Runner runs programs on.
func New(o Options) host.Host {
	m := &mac{run: o.Runner, interval: cmp.Or(o.Interval, 2*time.Second), clock: o.Clock}
	if m.run == nil {
		m.run = Exec{}
	}
	if m.clock == nil {
		m.clock = host.SystemClock{}
	}
	return m
}

// mac is host.Host over a Runner.
type mac struct {
	run      Runner
	interval time.Duration
	clock    host.Clock

	// changing is held while something is changed: a change looks first.
	changing sync.Mutex

	// profile is the last answer of system_profiler, which takes about a second
	// of CPU: it is asked again when an interface's state differs or it is old.
	mu      sync.Mutex
	profile []byte
	asked   time.Time
	state   string

	// health is what Diagnose found last, the ways left out.
	health    host.Diagnosis
	diagnosed time.Time
}

// profileAge is how long an answer of system_profiler holds.
const profileAge = 15 * time.Second
