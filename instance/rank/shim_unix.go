//go:build unix

package rank

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// strayGrace is how long what the engine started may live on after it.
	strayGrace = 2 * time.Second
	// drainFor is how long the log is still read once every process is gone:
	// only something outside the subtree could still hold it open.
	drainFor = time.Second
)

// Main is `tbcluster rank DIR`. It returns the exit code of the shim: 0 when it
// did its work, however the engine ended.
func Main(dir string) int {
	// The kernel ends the engine when the thread that started it ends.
	runtime.LockOSThread()
	if err := run(dir); err != nil {
		fmt.Fprintf(os.Stderr, "tbcluster rank %s: %v\n", dir, err)
		return 1
	}
	return 0
}

type shim struct {
	dir, tmp string
	p        Process
	log      *logWriter
	status   Status
}

// end is how a child ended.
type end struct {
	pid int
	ws  syscall.WaitStatus
}

func run(dir string) (err error) {
	dir, err = filepath.Abs(dir)
	if err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	p, err := ReadProcess(dir)
	if err != nil {
		return err
	}
	// Being the leader of a session already is fine.
	if _, err := syscall.Setsid(); err != nil && !errors.Is(err, syscall.EPERM) {
		return err
	}
	if err := becomeSubreaper(); err != nil {
		return err
	}
	asked := make(chan os.Signal, 4)
	signal.Notify(asked, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT)
	// Caught, not ignored: what is ignored stays so in the engine.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGPIPE)

	if err := killMarked(p.mark(), os.Getuid()); err != nil {
		return fmt.Errorf("end what an earlier run left: %w", err)
	}
	s := &shim{dir: dir, tmp: filepath.Join(dir, "tmp"), p: p}
	s.log, err = newLogWriter(dir, p, time.Now)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.log.close()) }()
	s.status = Status{InstanceID: p.InstanceID, Index: p.Index, Phase: Starting, Shim: Self(), Started: time.Now()}
	if err := s.save(); err != nil {
		return err
	}
	return s.supervise(asked)
}

func (s *shim) supervise(asked <-chan os.Signal) error {
	lines, pid, err := s.start()
	if err != nil {
		s.log.line("tbcluster: cannot start " + s.p.Program + ": " + err.Error())
		s.status.Error = err.Error()
		s.status.ExitCode = -1
		return s.finish()
	}
	ends := make(chan end)
	go reap(ends)
	s.status.Phase = Running
	s.status.Engine = identOf(pid)
	if err := s.save(); err != nil {
		// Whoever reads the status must not believe that nothing runs.
		s.log.line("tbcluster: cannot write the status: " + err.Error())
	}

	var deadline <-chan time.Time
	open, engine, children := lines, true, true
	for children {
		select {
		case l, ok := <-open:
			if !ok {
				open = nil
				continue
			}
			s.log.line(l)
		case sig := <-asked:
			deadline = s.stop(pid, sig, deadline)
		case <-deadline:
			deadline = nil
			if engine {
				s.status.Killed = true
				s.log.line(fmt.Sprintf("tbcluster: the engine did not end within %s; it is killed", s.p.Grace))
			}
			if err := killSubtree(pid); err != nil {
				s.log.line("tbcluster: " + err.Error())
			}
			deadline = time.After(strayGrace) // again, for what was born meanwhile
		case e, ok := <-ends:
			if !ok {
				children = false
				continue
			}
			if e.pid != pid {
				continue
			}
			engine = false
			s.record(e.ws)
			if err := termSubtree(pid); err != nil {
				s.log.line("tbcluster: " + err.Error())
			}
			deadline = time.After(strayGrace)
		}
	}
	s.drain(open)
	return s.finish()
}

// start starts the engine and returns the lines of its log.
func (s *shim) start() (<-chan string, int, error) {
	if err := os.RemoveAll(s.tmp); err != nil {
		return nil, 0, err
	}
	if err := os.Mkdir(s.tmp, 0o700); err != nil {
		return nil, 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, 0, err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, 0, err
	}
	defer w.Close()
	pid, err := syscall.ForkExec(s.p.Program, append([]string{s.p.Program}, s.p.Args...), &syscall.ProcAttr{
		Dir:   s.tmp,
		Env:   s.p.environ(s.tmp),
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
		Sys:   engineAttr(),
	})
	if err != nil {
		return nil, 0, errors.Join(err, r.Close())
	}
	lines := make(chan string, 64)
	go func() {
		defer close(lines)
		defer r.Close()
		if err := copyLines(r, func(l string) { lines <- l }); err != nil {
			lines <- "tbcluster: the log of the engine broke off: " + err.Error()
		}
	}()
	return lines, pid, nil
}

// stop asks the engine to end: SIGQUIT does not wait for it.
func (s *shim) stop(pid int, sig os.Signal, deadline <-chan time.Time) <-chan time.Time {
	now := sig == syscall.SIGQUIT
	if s.status.Phase != Stopping {
		s.status.Phase = Stopping
		s.log.line("tbcluster: asked to stop")
		if err := s.save(); err != nil {
			s.log.line("tbcluster: cannot write the status: " + err.Error())
		}
		// Its whole group, but leave what the engine itself ends to the engine.
		if err := syscall.Kill(-pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			s.log.line("tbcluster: " + err.Error())
		}
		deadline = time.After(s.p.Grace)
	}
	if now {
		s.status.Killed = true
		if err := killSubtree(pid); err != nil {
			s.log.line("tbcluster: " + err.Error())
		}
		deadline = time.After(strayGrace)
	}
	return deadline
}

func (s *shim) record(ws syscall.WaitStatus) {
	s.status.Ended = time.Now()
	if ws.Signaled() {
		s.status.ExitCode, s.status.Signal = -1, int(ws.Signal())
		return
	}
	s.status.ExitCode = ws.ExitStatus()
}

// drain reads what is left in the pipe once every process is gone.
func (s *shim) drain(lines <-chan string) {
	if lines == nil {
		return
	}
	limit := time.After(drainFor)
	for {
		select {
		case l, ok := <-lines:
			if !ok {
				return
			}
			s.log.line(l)
		case <-limit:
			return
		}
	}
}

func (s *shim) finish() error {
	if s.log.lost > 0 {
		s.log.line(fmt.Sprintf("tbcluster: %d lines could not be written: %v", s.log.lost, s.log.failed))
	}
	s.status.Phase = Ended
	if s.status.Ended.IsZero() {
		s.status.Ended = time.Now()
	}
	s.status.LastLines = s.log.tail()
	err := s.save()
	return errors.Join(err, os.RemoveAll(s.tmp))
}

func (s *shim) save() error { return writeJSON(filepath.Join(s.dir, StatusFile), s.status) }

// reap waits for every child, adopted ones too, until there is none.
func reap(ends chan<- end) {
	defer close(ends)
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // ECHILD: nobody is left
			return
		case ws.Exited() || ws.Signaled():
			ends <- end{pid, ws}
		}
	}
}

// errHeld is returned where a shim is at work in the directory.
var errHeld = errors.New("another shim runs this rank")

func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o640)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errHeld
		}
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
