package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/rig/guest/wire"
)

// lastWords is how long the output of a program is read on after it has ended,
// should a child of it still hold it.
const lastWords = 250 * time.Millisecond

// execute runs a program to its end. When the session or the stream ends first,
// the program's group is killed.
func execute(s *wire.Stream, r wire.Request) (wire.Result, error) {
	cmd := exec.Command(r.Args[0], r.Args[1:]...)
	cmd.Env = append(os.Environ(), r.Env...)
	cmd.Dir = r.Dir
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	start := startPlain
	if r.Terminal {
		start = startTerminal
	}
	wait, err := start(s, r, cmd)
	if err != nil {
		return wire.Result{}, err
	}
	stopped := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { forward(s, cmd.Process.Pid, stopped) })
	err = wait()
	close(stopped)
	watching.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		return wire.Result{}, err
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok {
		return wire.Result{}, fmt.Errorf("no exit status of %s", r.Args[0])
	}
	if status.Signaled() {
		return wire.Result{Code: -1, Signal: int(status.Signal())}, nil
	}
	return wire.Result{Code: status.ExitStatus()}, nil
}

// forward passes on the machine's signals to the group of a process, until that
// has stopped.
func forward(s *wire.Stream, pid int, stopped <-chan struct{}) {
	done := s.Done()
	for {
		signal := int(unix.SIGKILL)
		select {
		case <-stopped:
			return
		case <-done:
			done = nil
		case signal = <-s.Signals():
		}
		// It may just have ended, which is what is wanted.
		if err := unix.Kill(-pid, unix.Signal(signal)); err != nil && !errors.Is(err, unix.ESRCH) {
			fmt.Fprintf(os.Stderr, "guestd: signal %d to %d: %v\n", signal, pid, err)
		}
	}
}

func startPlain(s *wire.Stream, r wire.Request, cmd *exec.Cmd) (wait func() error, err error) {
	cmd.WaitDelay = lastWords
	out, errs := s.Writer(wire.Output), s.Writer(wire.Errors)
	cmd.Stdout, cmd.Stderr = out, errs
	var in io.WriteCloser
	if !r.NoInput {
		if in, err = cmd.StdinPipe(); err != nil {
			return nil, err
		}
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if in != nil {
		go func() {
			// It may stop reading whenever it likes.
			_, _ = io.Copy(in, s.Reader(wire.Input))
			_ = in.Close()
		}()
	}
	return func() error {
		err := cmd.Wait()
		return errors.Join(err, out.Close(), errs.Close())
	}, nil
}

func startTerminal(s *wire.Stream, r wire.Request, cmd *exec.Cmd) (wait func() error, err error) {
	master, slave, err := openTerminal(r.Columns, r.Rows)
	if err != nil {
		return nil, err
	}
	defer slave.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr.Setctty = true
	if err := cmd.Start(); err != nil {
		master.Close()
		return nil, err
	}
	go func() {
		// Until the terminal is closed, below.
		_, _ = io.Copy(master, s.Reader(wire.Input))
	}()
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			case size := <-s.Sizes():
				// A terminal that has just gone needs no size.
				_ = setSize(master, size[0], size[1])
			}
		}
	}()
	out := s.Writer(wire.Output)
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		// Its end is an EIO, once nobody has the terminal open any more.
		_, _ = io.Copy(out, master)
	}()
	return func() error {
		err := cmd.Wait()
		select {
		case <-copied:
		case <-time.After(lastWords):
		}
		close(stop)
		closed := master.Close()
		<-copied
		return errors.Join(err, closed, out.Close())
	}, nil
}

// openTerminal makes a pseudo terminal, pty(7).
func openTerminal(columns, rows uint16) (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	var number uint32
	control(master, &err, func(fd int) error {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		number, err = unix.IoctlGetUint32(fd, unix.TIOCGPTN)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	if columns > 0 && rows > 0 {
		if err := setSize(master, columns, rows); err != nil {
			return nil, nil, err
		}
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	return master, slave, err
}

func setSize(terminal *os.File, columns, rows uint16) (err error) {
	control(terminal, &err, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows})
	})
	return err
}

// control calls f with the descriptor of a file that stays with the runtime's
// poller, which Fd would take it from.
func control(file *os.File, err *error, f func(fd int) error) {
	c, e := file.SyscallConn()
	if e != nil {
		*err = e
		return
	}
	if e := c.Control(func(fd uintptr) { *err = f(int(fd)) }); e != nil {
		*err = e
	}
}
