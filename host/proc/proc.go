package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// ErrGone is wrapped where the process that was meant no longer exists; a
// zombie, of which only the exit status is left, counts as gone.
var ErrGone = errors.New("process has ended")

// ID names one process for good.
type ID struct {
	PID int `json:"pid"`
	// StartTime is when it started, in the system's own count: clock ticks
	// after boot on Linux, microseconds since 1970 on macOS.
	StartTime uint64 `json:"start_time"`
	BootID    string `json:"boot_id"`
}

// String returns "pid N".
func (id ID) String() string { return fmt.Sprintf("pid %d", id.PID) }

// Usage is what a process has used.
type Usage struct {
	RSS uint64        // resident memory, bytes
	CPU time.Duration // user and system time since its start
}

// State is what the system tells of one process.
type State struct {
	ID
	Parent int
	Group  int // process group
	Zombie bool
	Name   string // short name, as the kernel has it
	Usage  Usage  // on macOS only filled by Use
}

// Self returns the ID of this process.
func Self() (ID, error) { return Of(os.Getpid()) }

// Of returns the ID of the process that has the number pid now.
func Of(pid int) (ID, error) {
	s, err := Stat(pid)
	if err != nil {
		return ID{}, err
	}
	return s.ID, nil
}

// Alive reports whether the process is still running. Where the system cannot
// tell, it is taken for alive.
func Alive(id ID) bool { return !errors.Is(check(id), ErrGone) }

// check returns nil if id runs, an error that wraps ErrGone if not.
func check(id ID) error {
	s, err := Stat(id.PID)
	if err != nil {
		return err
	}
	return s.same(id)
}

// same returns an error that wraps ErrGone unless s is the running process id.
func (s State) same(id ID) error {
	switch {
	case s.ID != id:
		return fmt.Errorf("%s: the number belongs to another process now: %w", id, ErrGone)
	case s.Zombie:
		return fmt.Errorf("%s: %w", id, ErrGone)
	}
	return nil
}

// Signal sends sig to the process id and no other.
func Signal(id ID, sig syscall.Signal) error {
	h, err := Open(id)
	if err != nil {
		return err
	}
	return errors.Join(h.Signal(sig), h.Close())
}

// SignalGroup sends sig to all processes of the group that leader leads or
// led: its number stays taken while the group has members. It returns an error
// that wraps ErrGone where there is no such group any more.
func SignalGroup(leader ID, sig syscall.Signal) error {
	if leader.PID <= 1 {
		return fmt.Errorf("signal the group of %s: refused", leader)
	}
	boot, err := BootID()
	if err != nil {
		return err
	}
	if boot != leader.BootID {
		return fmt.Errorf("group of %s: of an earlier boot: %w", leader, ErrGone)
	}
	s, err := Stat(leader.PID)
	switch {
	case err == nil && s.ID != leader:
		return fmt.Errorf("group of %s: the number belongs to another process now: %w", leader, ErrGone)
	case err != nil && !errors.Is(err, ErrGone):
		return err
	}
	if err := syscall.Kill(-leader.PID, sig); err != nil {
		if errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("group of %s: %w", leader, ErrGone)
		}
		return fmt.Errorf("signal the group of %s: %w", leader, err)
	}
	return nil
}

// Handle holds on to one process.
type Handle struct {
	id ID
	handle
}

// ID returns the process that h holds.
func (h *Handle) ID() ID { return h.id }

// Open returns a handle to the running process id, or an error that wraps
// ErrGone. A handle is a descriptor: close it.
func Open(id ID) (*Handle, error) { return open(id) }

// Wait returns nil when the process has ended, or ctx's error. It sleeps until
// the system tells it. It does not collect the exit status: its parent does.
// One goroutine may wait on one handle at a time.
func (h *Handle) Wait(ctx context.Context) error { return h.wait(ctx) }

// Signal sends sig to the process, or returns an error that wraps ErrGone.
func (h *Handle) Signal(sig syscall.Signal) error { return h.signal(sig) }

// Close lets go of the process.
func (h *Handle) Close() error { return h.close() }
