package proc

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// szomb is SZOMB of <sys/proc.h>.
const szomb = 5

// BootID returns what names this boot of the system.
func BootID() (string, error) {
	s, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return "", fmt.Errorf("boot ID: %w", err)
	}
	return s, nil
}

// Stat returns what the system tells of the process with that number, a zombie
// too, or an error that wraps ErrGone.
func Stat(pid int) (State, error) {
	if pid <= 0 {
		return State{}, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	k, err := unix.SysctlKinfoProc("kern.proc.pid", pid)
	// The call answers with nothing, which x/sys makes EIO, for no process.
	if errors.Is(err, unix.EIO) || errors.Is(err, unix.ESRCH) {
		return State{}, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	if err != nil {
		return State{}, fmt.Errorf("read the state of pid %d: %w", pid, err)
	}
	boot, err := BootID()
	if err != nil {
		return State{}, err
	}
	return stateOf(k, boot), nil
}

func stateOf(k *unix.KinfoProc, boot string) State {
	return State{
		ID: ID{
			PID:       int(k.Proc.P_pid),
			StartTime: uint64(k.Proc.P_starttime.Sec)*1e6 + uint64(k.Proc.P_starttime.Usec),
			BootID:    boot,
		},
		Parent: int(k.Eproc.Ppid),
		Group:  int(k.Eproc.Pgid),
		Zombie: k.Proc.P_stat == szomb,
		Name:   unix.ByteSliceToString(k.Proc.P_comm[:]),
	}
}

// Use returns what the running process id has used.
func Use(id ID) (Usage, error) {
	if err := check(id); err != nil {
		return Usage{}, err
	}
	out, err := exec.Command("/bin/ps", "-o", "rss=,time=", "-p", strconv.Itoa(id.PID)).Output()
	if err != nil {
		if gone := check(id); gone != nil {
			return Usage{}, gone
		}
		return Usage{}, fmt.Errorf("use of %s: ps: %w", id, err)
	}
	return parsePS(string(out))
}

// Group returns the running processes of that process group, zombies left out.
func Group(group int) ([]State, error) {
	boot, err := BootID()
	if err != nil {
		return nil, err
	}
	ks, err := unix.SysctlKinfoProcSlice("kern.proc.pgrp", group)
	if err != nil {
		return nil, fmt.Errorf("list process group %d: %w", group, err)
	}
	var members []State
	for i := range ks {
		if s := stateOf(&ks[i], boot); !s.Zombie {
			members = append(members, s)
		}
	}
	return members, nil
}

// handle is a kqueue that is told of the process's end.
type handle struct {
	id ID
	kq int
}

func open(id ID) (*Handle, error) {
	kq, err := unix.Kqueue()
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", id, err)
	}
	unix.CloseOnExec(kq)
	h := &Handle{id: id, handle: handle{id: id, kq: kq}}
	var ev unix.Kevent_t
	unix.SetKevent(&ev, id.PID, unix.EVFILT_PROC, unix.EV_ADD)
	ev.Fflags = unix.NOTE_EXIT
	if _, err := unix.Kevent(kq, []unix.Kevent_t{ev}, nil, nil); err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = fmt.Errorf("%s: %w", id, ErrGone)
		}
		return nil, errors.Join(err, h.Close())
	}
	if err := check(id); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// wait asks with a timeout, so that ctx is heard: kqueues of processes cannot
// be put into Go's poller.
func (h handle) wait(ctx context.Context) error {
	events := make([]unix.Kevent_t, 1)
	timeout := unix.NsecToTimespec(int64(250 * time.Millisecond))
	for {
		n, err := unix.Kevent(h.kq, nil, events, &timeout)
		switch {
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("wait for %s: %w", h.id, err)
		case err == nil && n > 0:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}

func (h handle) signal(sig syscall.Signal) error {
	if err := check(h.id); err != nil {
		return err
	}
	if err := syscall.Kill(h.id.PID, sig); err != nil {
		if errors.Is(err, syscall.ESRCH) {
			return ErrGone
		}
		return fmt.Errorf("send signal %d: %w", int(sig), err)
	}
	return nil
}

func (h handle) close() error { return unix.Close(h.kq) }
