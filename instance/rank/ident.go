package rank

import (
	"context"
	"errors"
	"os"

	"tbcluster/host/proc"
)

// Ident names a process for good: a process ID alone is used again.
type Ident struct{ proc.ID }

// Self returns the identity of this process.
func Self() Ident { return identOf(os.Getpid()) }

// identOf returns the identity of a process, without a start when it is gone.
func identOf(pid int) Ident {
	id, err := proc.Of(pid)
	if err != nil {
		id = proc.ID{PID: pid}
	}
	return Ident{id}
}

// Alive reports whether that very process still runs; a zombie does not.
func (i Ident) Alive() bool { return i.PID > 0 && proc.Alive(i.ID) }

// Wait returns when the process is gone, or with the error of ctx. It need not
// be a child nor belong to the same user.
func (i Ident) Wait(ctx context.Context) error {
	h, err := proc.Open(i.ID)
	if errors.Is(err, proc.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(h.Wait(ctx), h.Close())
}

// earlierBoot reports whether the process was of an earlier boot.
func (i Ident) earlierBoot() bool {
	now, err := proc.BootID()
	return err == nil && now != i.BootID
}
