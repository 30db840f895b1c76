package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"tbcluster/api/fault"
	"tbcluster/rig/guest/wire"
)

// Command is a program to run in a guest, as root.
type Command struct {
	Args []string // the program, by path or name, and its arguments
	Env  []string // "NAME=value", besides PATH, HOME and LANG
	Dir  string   // "" is /

	Stdin          io.Reader // nil is /dev/null
	Stdout, Stderr io.Writer // nil is nowhere

	// Terminal gives it a terminal of Columns and Rows; what it writes is all
	// Stdout then.
	Terminal      bool
	Columns, Rows int
}

// ExitError is a program that did not end with 0.
type ExitError struct {
	Guest  string
	Args   []string
	Code   int    // -1 when a signal ended it
	Signal int    // that signal
	Stderr string // its end
}

func (e *ExitError) Error() string {
	how := fmt.Sprintf("exit status %d", e.Code)
	if e.Signal != 0 {
		how = "signal " + syscall.Signal(e.Signal).String()
	}
	s := fmt.Sprintf("%s: %s: %s", e.Guest, strings.Join(e.Args, " "), how)
	if e.Stderr != "" {
		s += ": " + e.Stderr
	}
	return s
}

// Process is a program that runs in a guest.
type Process struct {
	guest  *Guest
	args   []string
	stream *wire.Stream
	ctx    context.Context // that of Start
	copied sync.WaitGroup
	errs   *lastBytes
	mu     sync.Mutex
	err    error // of writing what it printed
}

// Start starts a program. When ctx ends, it is killed with its group.
func (g *Guest) Start(ctx context.Context, c Command) (*Process, error) {
	s, err := g.open("run "+strings.Join(c.Args, " ")+" in", wire.Request{
		Kind: wire.Exec, Args: c.Args, Env: c.Env, Dir: c.Dir, NoInput: c.Stdin == nil && !c.Terminal,
		Terminal: c.Terminal, Columns: uint16(c.Columns), Rows: uint16(c.Rows),
	})
	if err != nil {
		return nil, err
	}
	p := &Process{guest: g, args: c.Args, stream: s, ctx: ctx, errs: &lastBytes{}}
	relay := func(channel int, w io.Writer) {
		p.copied.Go(func() {
			if _, err := io.Copy(w, s.Reader(channel)); err != nil {
				p.mu.Lock()
				p.err = errors.Join(p.err, err)
				p.mu.Unlock()
				// What reads no more must not hold it up.
				_, _ = io.Copy(io.Discard, s.Reader(channel))
			}
		})
	}
	stdout, stderr := c.Stdout, io.Writer(p.errs)
	if stdout == nil {
		stdout = io.Discard
	}
	if c.Stderr != nil {
		stderr = io.MultiWriter(p.errs, c.Stderr)
	}
	relay(wire.Output, stdout)
	relay(wire.Errors, stderr)
	if c.Stdin != nil {
		go func() {
			in := s.Writer(wire.Input)
			// It may end before it has read all.
			_, _ = io.Copy(in, c.Stdin)
			_ = in.Close()
		}()
	}
	stop := context.AfterFunc(ctx, func() {
		// Should it be gone already, all the better.
		_ = s.Signal(int(syscall.SIGKILL))
	})
	go func() {
		<-s.Done()
		stop()
	}()
	return p, nil
}

// killGrace is how long a program that was killed may take to be gone. One that
// is stuck in a broken kernel never is.
const killGrace = 5 * time.Second

// Wait waits for the end of the program and of its output, or for that of
// Start's context. A program that does not end with 0 is an *ExitError.
func (p *Process) Wait() error {
	what := "run " + strings.Join(p.args, " ") + " in"
	select {
	case <-p.stream.Done():
	case <-p.ctx.Done():
		select {
		case <-p.stream.Done():
		case <-time.After(killGrace):
		}
		return p.guest.failed(what, context.Cause(p.ctx))
	}
	r, err := p.stream.Result()
	p.copied.Wait()
	if err != nil {
		return p.guest.failed(what, err)
	}
	if r.Error != "" {
		return fault.New(fault.LabFailed, "run "+strings.Join(p.args, " ")+" in guest "+p.guest.o.Name, errors.New(r.Error), "")
	}
	p.mu.Lock()
	err = p.err
	p.mu.Unlock()
	if r.Code != 0 {
		return errors.Join(&ExitError{Guest: p.guest.o.Name, Args: p.args, Code: r.Code, Signal: r.Signal, Stderr: p.errs.String()}, err)
	}
	return err
}

// Done is closed when the program has ended.
func (p *Process) Done() <-chan struct{} { return p.stream.Done() }

// Signal sends a signal to the program's group.
func (p *Process) Signal(s syscall.Signal) error { return p.stream.Signal(int(s)) }

// Kill ends the program and its group.
func (p *Process) Kill() error { return p.Signal(syscall.SIGKILL) }

// Resize tells a program with a terminal of a new size.
func (p *Process) Resize(columns, rows int) error {
	return p.stream.Resize(uint16(columns), uint16(rows))
}

// Run runs a program to its end and returns what it printed on standard output.
func (g *Guest) Run(ctx context.Context, args ...string) (string, error) {
	var out output
	p, err := g.Start(ctx, Command{Args: args, Stdout: &out})
	if err != nil {
		return "", err
	}
	err = p.Wait()
	return out.String(), err
}

// maxOutput is how much Run and Sh return; Start has no limit.
const maxOutput = 64 << 20

// output is a buffer that may still be written to by a program that is stuck,
// when it is read.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.b.Len()+len(b) > maxOutput {
		return 0, fmt.Errorf("it printed more than %d MB", maxOutput>>20)
	}
	return o.b.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// Sh runs a shell script and returns what it printed on standard output.
func (g *Guest) Sh(ctx context.Context, script string) (string, error) {
	return g.Run(ctx, "sh", "-euc", script)
}

// open begins a stream with the agent that is there.
func (g *Guest) open(what string, r wire.Request) (*wire.Stream, error) {
	g.mu.Lock()
	s := g.session
	g.mu.Unlock()
	if s == nil {
		return nil, g.failed(what, errors.New("its agent is not there"))
	}
	stream, err := s.mux.Open(r)
	if err != nil {
		return nil, g.failed(what, err)
	}
	return stream, nil
}

// File says how a file is to be in a guest.
type File struct {
	Mode os.FileMode // permissions; 0 is 0644
	Sync bool        // only back when it is on the guest's disk
}

// Push writes a file in the guest, whole or not at all, and compares checksums.
func (g *Guest) Push(ctx context.Context, content io.Reader, to string, f File) error {
	what := "write " + to + " in"
	if f.Mode == 0 {
		f.Mode = 0o644
	}
	s, err := g.open(what, wire.Request{Kind: wire.Push, Path: to, Mode: uint32(f.Mode.Perm()), Sync: f.Sync})
	if err != nil {
		return err
	}
	h := sha256.New()
	done := make(chan error, 1)
	go func() {
		in := s.Writer(wire.Input)
		if _, err := io.Copy(in, io.TeeReader(content, h)); err != nil {
			done <- err
			return
		}
		done <- in.Close()
	}()
	var sent error
	select {
	case sent = <-done:
	case <-s.Done(): // it refuses
	case <-ctx.Done():
		return g.failed(what, context.Cause(ctx))
	}
	if sent != nil && !errors.Is(sent, wire.ErrClosed) {
		return g.failed(what, sent)
	}
	return g.compare(ctx, what, s, h.Sum)
}

// PushFile copies a file of the machine into the guest.
func (g *Guest) PushFile(ctx context.Context, from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return fault.New(fault.FileMissing, "copy a file into guest "+g.o.Name, err, "").At(from)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fault.New(fault.FileIO, "copy a file into guest "+g.o.Name, err, "").At(from)
	}
	return g.Push(ctx, f, to, File{Mode: st.Mode()})
}

// Pull reads a file of the guest and compares checksums. What w got is only good
// when there is no error.
func (g *Guest) Pull(ctx context.Context, from string, w io.Writer) error {
	what := "read " + from + " in"
	s, err := g.open(what, wire.Request{Kind: wire.Pull, Path: from})
	if err != nil {
		return err
	}
	h := sha256.New()
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.MultiWriter(w, h), s.Reader(wire.Output))
		done <- err
	}()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return g.failed(what, err)
	}
	return g.compare(ctx, what, s, h.Sum)
}

// PullFile copies a file of the guest to the machine, whole or not at all.
func (g *Guest) PullFile(ctx context.Context, from, to string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(to), ".rig-")
	if err != nil {
		return fault.New(fault.FileIO, "copy a file of guest "+g.o.Name, err, "").At(to)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if err := g.Pull(ctx, from, f); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), to); err != nil {
		return fault.New(fault.FileIO, "copy a file of guest "+g.o.Name, err, "").At(to)
	}
	return f.Close()
}

// compare waits for the end of a copy and compares the two sides' checksums.
func (g *Guest) compare(ctx context.Context, what string, s *wire.Stream, sum func([]byte) []byte) error {
	select {
	case <-s.Done():
	case <-ctx.Done():
		return g.failed(what, context.Cause(ctx))
	}
	r, err := s.Result()
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err != nil {
		return g.failed(what, err)
	}
	if want := hex.EncodeToString(sum(nil)); r.SHA256 != want {
		return fault.Newf(fault.Corrupt, "", "%s guest %s: the checksum is %s there and %s here", what, g.o.Name, r.SHA256, want)
	}
	return nil
}

// Console gives a person a shell in the guest: in and out are a terminal. It
// returns when the shell ends.
func (g *Guest) Console(ctx context.Context, in, out *os.File) error {
	fd := int(in.Fd())
	columns, rows, err := term.GetSize(int(out.Fd()))
	if err != nil {
		return fault.New(fault.Usage, "open a console in guest "+g.o.Name, err, "run it on a terminal")
	}
	old, err := term.MakeRaw(fd)
	if err != nil {
		return fault.New(fault.Usage, "open a console in guest "+g.o.Name, err, "run it on a terminal")
	}
	defer term.Restore(fd, old)
	name := os.Getenv("TERM")
	if name == "" {
		name = "vt100"
	}
	p, err := g.Start(ctx, Command{
		Args: []string{"bash", "--norc"}, Env: []string{"TERM=" + name, "PS1=" + g.o.Name + ":\\w# "}, Dir: "/root",
		Stdin: in, Stdout: out, Terminal: true, Columns: columns, Rows: rows,
	})
	if err != nil {
		return err
	}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	go func() {
		for {
			select {
			case <-p.Done():
				return
			case <-resized:
				if c, r, err := term.GetSize(int(out.Fd())); err == nil {
					_ = p.stream.Resize(uint16(c), uint16(r)) // or it has just ended
				}
			}
		}
	}()
	err = p.Wait()
	var exit *ExitError
	if errors.As(err, &exit) {
		return nil // that of the last command: nobody's failure
	}
	return err
}

// lastBytes keeps the end of what is written to it.
type lastBytes struct {
	mu sync.Mutex
	b  []byte
}

const maxStderr = 4 << 10

func (l *lastBytes) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, b...)
	if over := len(l.b) - maxStderr; over > 0 {
		l.b = append(l.b[:0], l.b[over:]...)
	}
	return len(b), nil
}

func (l *lastBytes) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(l.b), "\uFFFD"))
}
