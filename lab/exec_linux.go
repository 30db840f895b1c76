package lab

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// lingering is how long output is still copied after the command ended, if
// something that it started keeps it open.
const lingering = time.Second

// Exec runs a command in a node, or on the LAN's host, and returns its exit
// code (128 + N if signal N ended it). When ctx ends, the command and its
// process group get SIGTERM, two seconds later SIGKILL.
func (l *Lab) Exec(ctx context.Context, node string, o ExecOptions) (int, error) {
	if _, err := l.ask(ctx, request{Op: opCheck, Node: node}); err != nil {
		return 0, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(l.NodeDir(node), "init.sock"))
	if err != nil {
		return 0, failed("reach the init of "+node, err, Command(l.name, "status")+" shows how it stands")
	}
	c := conn.(*net.UnixConn)
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	s := &execSession{ctx: ctx, lab: l.name, node: node, o: o, c: c, conn: frame.New(c)}
	defer s.close()
	code, err := s.run()
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return 0, fault.Newf(fault.Interrupted, "run it again", "the command on %s was interrupted and got SIGTERM", node)
	}
	if err != nil && ctx.Err() != nil {
		return 0, l.interrupted(ctx)
	}
	return code, err
}

// execSession is one command as its client sees it.
type execSession struct {
	ctx     context.Context
	lab     string
	node    string
	o       ExecOptions
	c       *net.UnixConn
	conn    *frame.Conn
	pass    []*os.File // handed to the command
	ours    []*os.File // to be closed when it has them
	inputs  []*os.File // to be closed at the end
	outputs sync.WaitGroup
	drains  []*os.File // what outputs are copied from
	restore func()
}

func (s *execSession) close() {
	closeAll(s.ours)
	closeAll(s.inputs)
	// The caller's writers are not used after Exec returned, whatever came of it.
	closeAll(s.drains)
	s.outputs.Wait()
	if s.restore != nil {
		s.restore()
	}
}

func (s *execSession) run() (int, error) {
	if err := s.plumb(); err != nil {
		return 0, failed("run a command on "+s.node, err, "try again")
	}
	req := execRequest{Argv: s.o.Argv, Env: s.o.Env, Dir: s.o.Dir, User: s.o.User, TTY: s.o.TTY}
	if s.o.TTY {
		req.Rows, req.Cols = s.size()
	}
	err := sendFiles(s.c, s.pass)
	if err == nil {
		err = s.conn.Send(req)
	}
	var files []*os.File
	if err == nil {
		files, err = receiveFiles(s.c)
	}
	var r execReply
	if err == nil {
		err = s.conn.Receive(&r)
	}
	if err != nil {
		closeAll(files)
		return 0, s.lost(err)
	}
	if r.Fault != nil {
		closeAll(files)
		return 0, r.Fault.err()
	}
	closeAll(s.ours)
	s.ours = nil
	if len(files) == 1 {
		master, err := polled(files[0])
		if err != nil {
			return 0, failed("use the terminal on "+s.node, err, "try again")
		}
		s.terminal(master)
	}
	err = s.conn.Receive(&r)
	s.drain()
	if err != nil {
		return 0, s.lost(err)
	}
	return r.Code, nil
}

func (s *execSession) lost(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return fault.Newf(fault.NodeDown, Command(s.lab, "status")+" shows how it stands", "%s went off while a command ran there", s.node)
	}
	return failed("run a command on "+s.node, err, Command(s.lab, "status")+" shows how it stands")
}

// plumb makes the three descriptors of the command.
func (s *execSession) plumb() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	s.ours = append(s.ours, null)
	s.pass = []*os.File{null, null, null}
	if s.o.TTY {
		return nil // they come from the node
	}
	switch in := s.o.Stdin.(type) {
	case nil:
	case *os.File:
		s.pass[0] = in
	default:
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		s.pass[0] = r
		s.ours = append(s.ours, r)
		s.inputs = append(s.inputs, w)
		go func() {
			// The command may end before it has read all.
			_, _ = io.Copy(w, in)
			w.Close()
		}()
	}
	for i, out := range []io.Writer{s.o.Stdout, s.o.Stderr} {
		if i == 1 && out != nil && sameWriter(out, s.o.Stdout) {
			s.pass[2] = s.pass[1]
			continue
		}
		switch out := out.(type) {
		case nil:
		case *os.File:
			s.pass[1+i] = out
		default:
			r, w, err := os.Pipe()
			if err != nil {
				return err
			}
			s.pass[1+i] = w
			s.ours = append(s.ours, w)
			s.copyFrom(r, out)
		}
	}
	return nil
}

// sameWriter reports whether both are one writer, which then gets both streams
// through one pipe, in order and from one goroutine.
func sameWriter(a, b io.Writer) (same bool) {
	// Writers that cannot be compared are not the same.
	defer func() { _ = recover() }()
	return a == b
}

func (s *execSession) copyFrom(r *os.File, to io.Writer) {
	s.drains = append(s.drains, r)
	s.outputs.Go(func() {
		// Ends with EOF, with EIO of a closed terminal, or when drain closes r.
		_, _ = io.Copy(to, r)
		r.Close()
	})
}

// drain waits for the rest of the output.
func (s *execSession) drain() {
	done := make(chan struct{})
	go func() { s.outputs.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(lingering):
	case <-s.ctx.Done():
	}
}

// size is that of the terminal on our side; 0 if there is none.
func (s *execSession) size() (rows, cols uint16) {
	for _, v := range []any{s.o.Stdout, s.o.Stdin} {
		if f, ok := v.(*os.File); ok {
			if w, h, err := term.GetSize(int(f.Fd())); err == nil {
				return uint16(h), uint16(w)
			}
		}
	}
	return 24, 80
}

// polled makes a file that was passed one whose reads end when it is closed.
func polled(f *os.File) (*os.File, error) {
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "terminal"), nil
}

// terminal joins the node's terminal with ours.
func (s *execSession) terminal(master *os.File) {
	if in, ok := s.o.Stdin.(*os.File); ok && term.IsTerminal(int(in.Fd())) {
		if old, err := term.MakeRaw(int(in.Fd())); err == nil {
			s.restore = func() { _ = term.Restore(int(in.Fd()), old) }
		}
	}
	if s.o.Stdin != nil {
		go func() { _, _ = io.Copy(master, s.o.Stdin) }()
	}
	winch := make(chan os.Signal, 1)
	signal.Notify(winch, unix.SIGWINCH)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-winch:
				rows, cols := s.size()
				if raw, err := master.SyscallConn(); err == nil {
					_ = raw.Control(func(fd uintptr) {
						_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
					})
				}
			case <-done:
				signal.Stop(winch)
				return
			}
		}
	}()
	out := s.o.Stdout
	if out == nil {
		out = io.Discard
	}
	s.copyFrom(master, out)
	go func() { s.outputs.Wait(); close(done) }()
}
