package lab

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper is the part of process 1 that starts processes and learns of the end
// of every child, its own and orphans. Package os/exec cannot be used beside
// it: both would wait for the same children.
type reaper struct {
	mu      sync.Mutex
	waiting map[int]chan syscall.WaitStatus
	signals chan os.Signal
}

func newReaper() *reaper {
	r := &reaper{waiting: map[int]chan syscall.WaitStatus{}, signals: make(chan os.Signal, 1)}
	signal.Notify(r.signals, unix.SIGCHLD)
	go func() {
		for range r.signals {
			r.reap()
		}
	}()
	return r
}

// start starts a process; its end arrives on the channel.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	ended := make(chan syscall.WaitStatus, 1)
	// The lock keeps the reaper from meeting a child before it is known.
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, nil, err
	}
	r.waiting[pid] = ended
	return pid, ended, nil
}

func (r *reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if ended, ok := r.waiting[pid]; ok {
			delete(r.waiting, pid)
			ended <- status
		}
	}
}
