package rank

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"tbcluster/host/proc"
)

func becomeSubreaper() error { return proc.SetSubreaper() }

func engineAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// Effort returns a number that grows while a process gets on with anything:
// processor time and resident memory. 0 when it is gone.
func (i Ident) Effort() uint64 {
	u, err := proc.Use(i.ID)
	if err != nil {
		return 0
	}
	return uint64(u.CPU) + u.RSS
}

// signalIdent signals that very process, if it belongs to uid.
func signalIdent(i Ident, uid int, sig syscall.Signal) error {
	h, err := proc.Open(i.ID)
	if errors.Is(err, proc.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	if owner, err := uidOf(i.PID); err != nil || owner != uid {
		return errors.Join(fmt.Errorf("process %d does not belong to user %d", i.PID, uid), h.Close())
	}
	err = h.Signal(sig)
	if errors.Is(err, proc.ErrGone) {
		err = nil
	}
	return errors.Join(err, h.Close())
}

func uidOf(pid int) (int, error) {
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &st); err != nil {
		return 0, err
	}
	return int(st.Uid), nil
}

// killGroupOf does nothing here: killMarked finds the engine by its mark.
func killGroupOf(Ident, int) error { return nil }

// killMarked kills the processes of uid whose environment holds mark, until a
// look finds none.
func killMarked(mark string, uid int) error {
	for range 100 {
		pids, err := marked(mark, uid)
		if err != nil || len(pids) == 0 {
			return err
		}
		if err := killAll(pids, syscall.SIGKILL); err != nil {
			return err
		}
		for _, id := range pids {
			if err := id.Wait(context.Background()); err != nil {
				return err
			}
		}
	}
	return errors.New("processes come back faster than they can be killed")
}

func marked(mark string, uid int) ([]Ident, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var out []Ident
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || pid == os.Getpid() {
			continue
		}
		id := identOf(pid)
		if owner, err := uidOf(pid); err != nil || owner != uid {
			continue
		}
		env, err := os.ReadFile(d + "/environ")
		if err != nil {
			continue // gone, or not ours to look at
		}
		for _, v := range bytes.Split(env, []byte{0}) {
			if string(v) == mark && id.Alive() {
				out = append(out, id)
			}
		}
	}
	return out, nil
}

// subtree returns every living descendant of this process. Orphans among them
// are its children: it is their subreaper.
func subtree() ([]Ident, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	children := map[int][]Ident{}
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil {
			continue
		}
		if s, err := proc.Stat(pid); err == nil && !s.Zombie {
			children[s.Parent] = append(children[s.Parent], Ident{s.ID})
		}
	}
	var out []Ident
	for todo := []int{os.Getpid()}; len(todo) > 0; todo = todo[1:] {
		for _, c := range children[todo[0]] {
			out = append(out, c)
			todo = append(todo, c.PID)
		}
	}
	return out, nil
}

func termSubtree(int) error { return signalSubtree(syscall.SIGTERM) }
func killSubtree(int) error { return signalSubtree(syscall.SIGKILL) }

func signalSubtree(sig syscall.Signal) error {
	ids, err := subtree()
	if err != nil {
		return err
	}
	return killAll(ids, sig)
}

func killAll(ids []Ident, sig syscall.Signal) error {
	var errs []error
	for _, id := range ids {
		if err := syscall.Kill(id.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, fmt.Errorf("signal process %d: %w", id.PID, err))
		}
	}
	return errors.Join(errs...)
}
