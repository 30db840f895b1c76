package transfer

import "context"

// Transfer is one Job on its way. Make it with New; Run it once.
type Transfer struct {
	*coordinator
}

// New returns a Transfer that has not begun. Events may be nil.
func New(job Job, deps Deps, events func(Progress)) *Transfer {
	return &Transfer{newCoordinator(job, deps, events)}
}

// Run is what the function Run does.
func (t *Transfer) Run(ctx context.Context) (Result, error) { return t.run(ctx) }

// Pause stops sending and keeps everything open. It may be called before and
// during Run, more than once.
func (t *Transfer) Pause() { t.setPaused(true) }

// Resume goes on after Pause.
func (t *Transfer) Resume() { t.setPaused(false) }

// Progress returns how far it is; it may be called at any time.
func (t *Transfer) Progress() Progress { return t.progress() }
