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
	if err != nil {
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

// reap waits for a program. How it ended is in its ProcessState.
func reap(cmd *exec.Cmd) error {
	err := cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
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
	var readers, writers []*os.File
	defer func() {
		for _, f := range writers {
			f.Close() // the program has its own
		}
		if err != nil {
			for _, f := range readers {
				f.Close()
			}
		}
	}()
	for range 2 {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		readers, writers = append(readers, r), append(writers, w)
	}
	cmd.Stdout, cmd.Stderr = writers[0], writers[1]
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
	copied := make(chan error, 2)
	go func() { copied <- copyOutput(s.Writer(wire.Output), readers[0]) }()
	go func() { copied <- copyOutput(s.Writer(wire.Errors), readers[1]) }()
	return func() error {
		err := reap(cmd)
		for _, f := range readers {
			// From now on only what is in the pipe already: a child may hold it for
			// ever.
			err = errors.Join(err, f.SetReadDeadline(time.Now().Add(lastWords)))
		}
		err = errors.Join(err, <-copied, <-copied)
		for _, f := range readers {
			err = errors.Join(err, f.Close())
		}
		return err
	}, nil
}

// copyOutput copies a pipe until its end, or until its deadline has passed and
// it is empty; nothing that was in it by then is lost.
func copyOutput(to io.WriteCloser, from *os.File) error {
	_, err := io.Copy(to, from)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = drain(to, from)
	}
	if errors.Is(err, wire.ErrClosed) {
		return nil // nobody listens any more
	}
	return errors.Join(err, to.Close())
}

// drain copies what is in a pipe, without waiting for more.
func drain(to io.Writer, from *os.File) error {
	if err := from.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	conn, err := from.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for {
		var n int
		var failed error
		err := conn.Read(func(fd uintptr) bool {
			n, failed = unix.Read(int(fd), buf)
			return true
		})
		switch {
		case err != nil:
			return err
		case errors.Is(failed, unix.EINTR):
			continue
		case errors.Is(failed, unix.EAGAIN), failed == nil && n == 0:
			return nil
		case failed != nil:
			return failed
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return err
		}
	}
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
		err := reap(cmd)
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
