package proc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is USER_HZ: 100 on every architecture that Linux and Go share.
const ticksPerSecond = 100

// BootID returns what names this boot of the system.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Stat returns what the system tells of the process with that number, a zombie
// too, or an error that wraps ErrGone.
func Stat(pid int) (State, error) {
	if pid <= 0 {
		return State{}, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		// ESRCH: it ended between open and read.
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			return State{}, fmt.Errorf("pid %d: %w", pid, ErrGone)
		}
		return State{}, fmt.Errorf("read the state of pid %d: %w", pid, err)
	}
	s, err := parseStat(string(b), uint64(os.Getpagesize()))
	if err != nil {
		return State{}, fmt.Errorf("pid %d: %w", pid, err)
	}
	if s.PID != pid {
		return State{}, fmt.Errorf("pid %d: /proc shows the state of pid %d: it belongs to another PID namespace", pid, s.PID)
	}
	s.BootID, err = BootID()
	return s, err
}

// Use returns what the running process id has used.
func Use(id ID) (Usage, error) {
	s, err := Stat(id.PID)
	if err != nil {
		return Usage{}, err
	}
	return s.Usage, s.same(id)
}

// Group returns the running processes of that process group, zombies left out.
func Group(group int) ([]State, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var members []State
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		s, err := Stat(pid)
		switch {
		case errors.Is(err, ErrGone):
		case err != nil:
			return nil, err
		case s.Group == group && !s.Zombie:
			members = append(members, s)
		}
	}
	return members, nil
}

// parseStat parses /proc/PID/stat (proc_pid_stat(5)). The name is in
// parentheses and may hold anything, parentheses, spaces and newlines too: it
// ends at the last ")".
func parseStat(text string, pageSize uint64) (State, error) {
	open, shut := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || shut < open {
		return State{}, errors.New("state of a process: no name in it")
	}
	pid, err := strconv.Atoi(strings.TrimSpace(text[:open]))
	if err != nil || pid <= 0 {
		return State{}, fmt.Errorf("state of a process: bad number %q", text[:open])
	}
	// fields[0] is field 3 of the manual page.
	fields := strings.Fields(text[shut+1:])
	const last = 24
	if len(fields) < last-2 {
		return State{}, fmt.Errorf("state of a process: %d fields, want %d", len(fields)+2, last)
	}
	var parseErr error
	number := func(field int) uint64 {
		n, err := strconv.ParseUint(fields[field-3], 10, 64)
		if err != nil && parseErr == nil {
			parseErr = fmt.Errorf("state of a process: field %d: %w", field, err)
		}
		return n
	}
	signed := func(field int) int {
		n, err := strconv.Atoi(fields[field-3])
		if err != nil && parseErr == nil {
			parseErr = fmt.Errorf("state of a process: field %d: %w", field, err)
		}
		return n
	}
	s := State{
		ID:     ID{PID: pid, StartTime: number(22)},
		Parent: signed(4),
		Group:  signed(5),
		Zombie: fields[0] == "Z" || fields[0] == "X",
		Name:   text[open+1 : shut],
		Usage: Usage{
			CPU: time.Duration(number(14)+number(15)) * (time.Second / ticksPerSecond),
			RSS: number(24) * pageSize,
		},
	}
	return s, parseErr
}

// handle is a pidfd in the runtime's poller.
type handle struct {
	f *os.File
}

func open(id ID) (*Handle, error) {
	fd, err := unix.PidfdOpen(id.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) && id.PID <= 0 {
			return nil, fmt.Errorf("%s: %w", id, ErrGone)
		}
		return nil, fmt.Errorf("open %s: %w", id, err)
	}
	h := &Handle{id: id, handle: handle{f: os.NewFile(uintptr(fd), "pidfd")}}
	// Only now: the number cannot change hands under an open descriptor without
	// the descriptor's process having ended, which the start time shows.
	if err := check(id); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

func (h handle) wait(ctx context.Context) error {
	raw, err := h.f.SyscallConn()
	if err != nil {
		return err
	}
	if err := h.f.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("wait for a process: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		// It can only fail where the descriptor is closed, which ends the wait.
		_ = h.f.SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()
	var pollErr error
	err = raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		var n int
		for {
			n, pollErr = unix.Poll(p, 0)
			if !errors.Is(pollErr, unix.EINTR) {
				break
			}
		}
		return pollErr != nil || n > 0
	})
	switch {
	case err == nil:
		return pollErr
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("wait for a process: %w", err)
}

func (h handle) signal(sig syscall.Signal) error {
	raw, err := h.f.SyscallConn()
	if err != nil {
		return err
	}
	var sigErr error
	if err := raw.Control(func(fd uintptr) { sigErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	if errors.Is(sigErr, unix.ESRCH) {
		return ErrGone
	}
	if sigErr != nil {
		return fmt.Errorf("send signal %d: %w", int(sig), sigErr)
	}
	return nil
}

func (h handle) close() error { return h.f.Close() }
