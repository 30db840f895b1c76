package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// process names a process so that another with the same number is not meant.
type process struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"` // ticks since boot
	BootID string `json:"boot_id"`
}

// stat is what /proc/PID/stat says, as far as it matters here.
type stat struct {
	state  byte // R, S, D, T, t, Z, X
	parent int
	start  uint64
}

// parseStat parses /proc/PID/stat; the name in it may hold anything.
func parseStat(s string) (stat, error) {
	end := strings.LastIndexByte(s, ')')
	if end < 0 {
		return stat{}, errors.New("no name in stat")
	}
	f := strings.Fields(s[end+1:])
	if len(f) < 20 || len(f[0]) != 1 {
		return stat{}, errors.New("stat is too short")
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return stat{}, fmt.Errorf("parent in stat: %w", err)
	}
	start, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("start time in stat: %w", err)
	}
	return stat{state: f[0][0], parent: parent, start: start}, nil
}

func readStat(pid int) (stat, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	return parseStat(string(b))
}

// identify names a process that lives.
func identify(pid int) (process, error) {
	st, err := readStat(pid)
	if err != nil {
		return process{}, err
	}
	boot, err := hostBootID()
	return process{PID: pid, Start: st.start, BootID: boot}, err
}

func hostBootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// open returns a pidfd of p, or an error if it is gone.
func (p process) open() (int, error) {
	if p.PID <= 1 {
		return -1, unix.ESRCH
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return -1, err
	}
	// The number is p's only if it was p's when the descriptor was made.
	now, err := identify(p.PID)
	if err != nil || now != p {
		unix.Close(fd)
		return -1, unix.ESRCH
	}
	return fd, nil
}

// alive reports whether p is there and no zombie.
func (p process) alive() bool {
	fd, err := p.open()
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return !exited(fd, 0)
}

// exited waits for the end of the process of a pidfd, for some milliseconds.
func exited(pidfd, ms int) bool {
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, ms)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err == nil && n == 1
	}
}

// descendants returns what was started, directly or not, by the process.
func descendants(root int) (map[int]stat, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	all := map[int]stat{}
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil {
			continue
		}
		if st, err := readStat(pid); err == nil {
			all[pid] = st
		}
	}
	within := map[int]bool{root: true}
	var under func(pid, depth int) bool
	under = func(pid, depth int) bool {
		if in, ok := within[pid]; ok {
			return in
		}
		st, ok := all[pid]
		in := ok && depth < 1<<12 && under(st.parent, depth+1)
		within[pid] = in
		return in
	}
	found := map[int]stat{}
	for pid, st := range all {
		if pid != root && under(pid, 0) {
			found[pid] = st
		}
	}
	return found, nil
}
