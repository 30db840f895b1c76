package darwin

import (
	"context"
	"time"
)

// always is the time after which Watch sends a value in any case.
const always = 10 * time.Second

// Watch implements host.Host by looking at `ifconfig -a` again and again: a
// cable that is plugged or pulled changes an interface's status.
func (m *mac) Watch(ctx context.Context) <-chan struct{} {
	out := make(chan struct{}, 1)
	go func() {
		defer close(out)
		tick := time.NewTicker(m.interval)
		defer tick.Stop()
		last, _ := m.look(ctx) // an error is a difference to the next answer
		sent := time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			now, err := m.look(ctx)
			if err == nil && now == last && time.Since(sent) < always {
				continue
			}
			last, sent = now, time.Now()
			select {
			case out <- struct{}{}:
			default: // one is waiting to be read
			}
		}
	}()
	return out
}

func (m *mac) look(ctx context.Context) (string, error) {
	b, err := m.run.Run(ctx, "ifconfig", "-a")
	return string(b), err
}
