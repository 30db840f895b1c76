package guest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/rig/guest/wire"
	"tbcluster/rig/image"
)

const portName = wire.Port

// Guest is a virtual machine. It outlives its power: after Kill or PowerOff,
// PowerOn starts it again with the same disks. Its methods may be called by
// several goroutines.
type Guest struct {
	o      Options
	dir    string
	remove func() error // dir, if it is ours
	initrd string       // the file that QEMU loads

	power sync.Mutex // held while the power is switched

	mu      sync.Mutex
	changed chan struct{} // closed, and made anew, whenever something below changes
	machine *machine      // nil while the power is off
	session *session      // nil while no agent is there
	boots   int           // sessions so far
	ended   string        // how the last machine ended that we did not kill, and what it said
	reports reports
	log     []Record
	console tail
}

// session is the agent of one boot.
type session struct {
	mux      *wire.Mux
	id       uint32
	greeting wire.Greeting
}

// machine is one run of QEMU.
type machine struct {
	cmd     *exec.Cmd
	monitor *monitor
	said    tail          // what QEMU itself printed
	ended   chan struct{} // closed when it is gone, and all of its console was read
	err     error         // why it went
	killed  bool          // by us
}

// Start makes a guest, switches it on and waits for its agent.
func Start(ctx context.Context, o Options) (*Guest, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	g := &Guest{o: o, dir: o.Dir, changed: make(chan struct{})}
	if g.dir == "" {
		var err error
		if g.dir, g.remove, err = TempDir(o.Name); err != nil {
			return nil, err
		}
	} else if err := os.MkdirAll(g.dir, 0o755); err != nil {
		return nil, fault.New(fault.FileIO, "make a directory for guest "+o.Name, err, "").At(g.dir)
	}
	err := g.writeInitrd(ctx)
	if err == nil {
		err = g.PowerOn(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// writeInitrd appends the agent and the caller's files to the base.
func (g *Guest) writeInitrd(ctx context.Context) error {
	agent := g.o.Agent
	if agent == "" {
		var err error
		if agent, err = BuildAgent(ctx); err != nil {
			return err
		}
	}
	g.initrd = filepath.Join(g.dir, "initrd")
	out, err := os.OpenFile(g.initrd, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fault.New(fault.FileIO, "write the initramfs of guest "+g.o.Name, err, "").At(g.dir)
	}
	defer out.Close()
	base, err := os.Open(g.o.Boot.Base)
	if err != nil {
		return fault.New(fault.FileIO, "read the base of an initramfs", err, "")
	}
	defer base.Close()
	_, err = io.Copy(out, base)
	if err == nil {
		files := []image.File{{Path: "/init", Mode: 0o755, Source: agent}}
		for _, f := range g.o.Files {
			if g.o.System {
				f.Path = "/" + wire.Overlay + f.Path
			}
			files = append(files, f)
		}
		err = image.WriteArchive(out, files)
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return fault.New(fault.FileIO, "write the initramfs of guest "+g.o.Name, err, "").At(g.dir)
	}
	return nil
}

// Name returns the guest's name.
func (g *Guest) Name() string { return g.o.Name }

// Dir returns the directory of its logs.
func (g *Guest) Dir() string { return g.dir }

// PowerOn starts QEMU, with a cold memory, and waits for the agent.
func (g *Guest) PowerOn(ctx context.Context) error {
	g.power.Lock()
	defer g.power.Unlock()
	g.mu.Lock()
	running, boots := g.machine != nil, g.boots
	g.mu.Unlock()
	if running {
		return fault.Newf(fault.LabFailed, "", "guest %s is on already", g.o.Name)
	}
	if err := g.startMachine(ctx); err != nil {
		return err
	}
	if err := g.waitBoot(ctx, boots); err != nil {
		return errors.Join(err, g.kill())
	}
	return nil
}

// waitBoot waits until an agent has come after the first boots.
func (g *Guest) waitBoot(ctx context.Context, boots int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, g.o.BootTimeout, fmt.Errorf("its agent did not come within %v", g.o.BootTimeout))
	defer cancel()
	return g.wait(ctx, "boot", func() (bool, error) {
		if g.boots > boots && g.session != nil {
			return true, nil
		}
		if g.machine == nil {
			return false, errors.New("it went down")
		}
		return false, nil
	})
}

// wait waits until done says so; done is called with g.mu held, first at once
// and then after each change. A failure comes with the end of the console.
func (g *Guest) wait(ctx context.Context, what string, done func() (bool, error)) error {
	for {
		g.mu.Lock()
		ok, err := done()
		changed := g.changed
		g.mu.Unlock()
		if ok {
			return nil
		}
		if err == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
		return g.failed(what, err)
	}
}

// failed makes an error that a person can do something with.
func (g *Guest) failed(what string, err error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	why := err.Error()
	// The console of one whose power was cut says nothing of that.
	if end := g.console.String(); end != "" && (g.machine != nil || g.ended != "" || g.boots == 0) {
		why += "\nthe end of its console:\n" + end
	}
	return &fault.Fault{Reason: fault.LabFailed, What: what + " guest " + g.o.Name, Where: filepath.Join(g.dir, "console.log"), Why: why, Err: err}
}

// change runs f with g.mu held and wakes those who wait.
func (g *Guest) change(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
	close(g.changed)
	g.changed = make(chan struct{})
}

// pair returns two connected sockets: ours, and one for QEMU to inherit.
func pair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "guest"), os.NewFile(uintptr(fds[1]), "qemu")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return conn, theirs, nil
}

// startMachine starts QEMU and all that listens to it.
func (g *Guest) startMachine(ctx context.Context) error {
	var conns []net.Conn
	var files []*os.File
	// QEMU has its own copies then, or was not started. While ours are open, no
	// reader sees QEMU's end.
	release := func() {
		for _, f := range files[:min(len(files), 3)] {
			f.Close()
		}
	}
	fail := func(err error) error {
		release()
		for _, c := range conns {
			err = errors.Join(err, c.Close())
		}
		return fault.New(fault.LabFailed, "start QEMU for guest "+g.o.Name, err, "").At(g.dir)
	}
	for range 3 {
		conn, file, err := pair()
		if err != nil {
			return fail(err)
		}
		conns, files = append(conns, conn), append(files, file)
	}
	for _, n := range g.o.NICs {
		files = append(files, n.Wire)
	}
	console, err := os.OpenFile(filepath.Join(g.dir, "console.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fail(err)
	}
	m := &machine{ended: make(chan struct{})}
	// Its own context: it ends when it is told to, not with the call that
	// started it.
	m.cmd = g.o.Tools.QEMU(context.Background(), g.o.arguments(g.initrd, time.Now())...)
	m.cmd.ExtraFiles = files
	m.cmd.Stdout, m.cmd.Stderr = &m.said, &m.said
	// A group of its own, so that ^C is for us alone; and gone when we are.
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if ctx.Err() != nil {
		console.Close()
		return fail(context.Cause(ctx))
	}
	started := make(chan error)
	exited := make(chan error, 1)
	go func() {
		// The signal of death comes when the thread ends that started it: it has
		// to live as long as QEMU.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := m.cmd.Start()
		started <- err
		if err == nil {
			exited <- m.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		console.Close()
		return fail(err)
	}
	release()
	var readers sync.WaitGroup
	readers.Go(func() { g.readConsole(conns[consoleFD-agentFD], console) })
	readers.Go(func() { g.readAgent(conns[0]) })
	m.monitor = newMonitor(conns[monitorFD-agentFD], func(string) {})
	g.change(func() { g.machine, g.ended = m, "" })
	go func() {
		err := <-exited
		readers.Wait() // their ends close with QEMU
		m.monitor.Close()
		g.change(func() {
			m.err = err
			if said := m.said.String(); said != "" && !m.killed {
				m.err = errors.Join(err, errors.New(said))
			}
			g.machine = nil
			g.ended = ""
			if !m.killed {
				g.ended = ending(m.cmd.ProcessState, m.said.String())
			}
		})
		close(m.ended)
	}()
	if _, err := m.monitor.do(ctx, "qmp_capabilities", nil); err != nil {
		return errors.Join(g.failed("start", fmt.Errorf("%w\n%s", err, m.said.String())), g.kill())
	}
	return nil
}

// ending says how QEMU has ended, in a line. It may have said more, but only of what
// ended it where that was itself.
func ending(s *os.ProcessState, said string) string {
	if said == "" || s.ExitCode() <= 0 {
		return s.String()
	}
	return s.String() + ": " + said[strings.LastIndexByte(said, '\n')+1:]
}

// maxLine is how long a line of a console may be; a longer one is cut into
// several.
const maxLine = 4 << 10

// readConsole keeps the console and looks for reports in it.
func (g *Guest) readConsole(conn net.Conn, file *os.File) {
	defer conn.Close()
	defer file.Close()
	r := bufio.NewReaderSize(conn, maxLine)
	for {
		line, err := r.ReadSlice('\n')
		if len(line) > 0 {
			text := strings.ToValidUTF8(strings.TrimRight(string(line), "\r\n"), "\uFFFD")
			if _, err := fmt.Fprintln(file, text); err != nil {
				text += " [not written to console.log: " + err.Error() + "]"
			}
			g.change(func() {
				g.reports.line(text)
				g.console.line(text)
			})
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// readAgent takes what agents send, one after the other: each boot has one.
func (g *Guest) readAgent(conn net.Conn) {
	defer conn.Close()
	w, r := wire.NewWriter(conn), wire.NewReader(conn)
	end := func(err error) {
		var s *session
		g.change(func() { s, g.session = g.session, nil })
		if s != nil {
			s.mux.Close(err)
		}
	}
	for {
		f, err := r.Read()
		if err != nil {
			end(errors.New("guest " + g.o.Name + " is off"))
			return
		}
		if f.Type == wire.Hello {
			end(errors.New("guest " + g.o.Name + " has started anew"))
			greeting, err := wire.DecodeGreeting(f.Payload)
			if err != nil {
				g.complain(err)
				continue
			}
			s := &session{mux: wire.NewMux(w, f.Session, nil), id: f.Session, greeting: greeting}
			g.change(func() { g.session = s; g.boots++; g.log = nil })
			go g.followLog(s)
			continue
		}
		g.mu.Lock()
		s := g.session
		g.mu.Unlock()
		if s == nil || s.id != f.Session {
			continue
		}
		if err := s.mux.Handle(f); err != nil {
			g.complain(err)
			end(err)
		}
	}
}

// complain notes in the console that the agent broke the protocol.
func (g *Guest) complain(err error) {
	g.change(func() { g.console.line("rig: the agent: " + err.Error()) })
}

// maxRecords is how much of the kernel's log is kept.
const maxRecords = 200_000

// followLog keeps the kernel's log of one boot.
func (g *Guest) followLog(s *session) {
	stream, err := s.mux.Open(wire.Request{Kind: wire.Log})
	if err != nil {
		return // the session is over already
	}
	r := bufio.NewReaderSize(stream.Reader(wire.Output), 32<<10)
	for {
		line, err := r.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
		if len(line) == 0 || line[0] == ' ' {
			continue
		}
		record, err := ParseRecord(strings.ToValidUTF8(string(line), "\uFFFD"))
		if err != nil {
			g.complain(err)
			continue
		}
		g.change(func() {
			if g.session == s && len(g.log) < maxRecords {
				g.log = append(g.log, record)
			}
		})
	}
}

// Kill cuts the power: QEMU is killed, with everything that the guest had in
// memory. Killing a guest that is off does nothing.
func (g *Guest) Kill() error {
	g.power.Lock()
	defer g.power.Unlock()
	return g.kill()
}

func (g *Guest) kill() error {
	g.mu.Lock()
	m := g.machine
	if m != nil {
		m.killed = true
	}
	g.mu.Unlock()
	if m == nil {
		return nil
	}
	if err := m.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fault.New(fault.LabFailed, "kill guest "+g.o.Name, err, "")
	}
	<-m.ended
	return nil
}

// PowerOff lets the guest end in good order and waits for it.
func (g *Guest) PowerOff(ctx context.Context) error {
	g.power.Lock()
	defer g.power.Unlock()
	return g.end(ctx, wire.Off, "switch off", func() (bool, error) { return g.machine == nil, nil })
}

// Reboot lets the guest restart in good order, as a machine does whose power
// stays on, and waits for the agent.
func (g *Guest) Reboot(ctx context.Context) error {
	g.power.Lock()
	defer g.power.Unlock()
	g.mu.Lock()
	m, boots := g.machine, g.boots
	g.mu.Unlock()
	if m == nil {
		return fault.Newf(fault.LabFailed, "", "reboot guest %s: it is off", g.o.Name)
	}
	// A reset that nobody asked for is a crash and ends QEMU; this one does not.
	if _, err := m.monitor.do(ctx, "set-action", map[string]any{"reboot": "reset"}); err != nil {
		return g.failed("reboot", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, g.o.BootTimeout, fmt.Errorf("it was not back within %v", g.o.BootTimeout))
	defer cancel()
	if err := g.end(ctx, wire.Reboot, "reboot", func() (bool, error) {
		if g.machine == nil {
			return false, errors.New("it went down")
		}
		return g.boots > boots && g.session != nil, nil
	}); err != nil {
		return err
	}
	if _, err := m.monitor.do(ctx, "set-action", map[string]any{"reboot": "shutdown"}); err != nil {
		return g.failed("reboot", err)
	}
	return nil
}

func (g *Guest) end(ctx context.Context, kind, what string, done func() (bool, error)) error {
	g.mu.Lock()
	s := g.session
	g.mu.Unlock()
	if s == nil {
		return fault.Newf(fault.LabFailed, "", "%s guest %s: its agent is not there", what, g.o.Name)
	}
	stream, err := s.mux.Open(wire.Request{Kind: kind})
	if err != nil {
		return g.failed(what, err)
	}
	select {
	case <-stream.Done():
	case <-ctx.Done():
		return g.failed(what, context.Cause(ctx))
	}
	// Its answer may be lost with the guest; a refusal is not.
	if r, err := stream.Result(); err == nil && r.Error != "" {
		return g.failed(what, errors.New(r.Error))
	}
	return g.wait(ctx, what, done)
}

// Pause stops the virtual CPUs: the machine hangs, but its power is on and its
// devices are there. Resume lets it go on.
func (g *Guest) Pause(ctx context.Context) error { return g.command(ctx, "stop") }

// Resume undoes Pause.
func (g *Guest) Resume(ctx context.Context) error { return g.command(ctx, "cont") }

func (g *Guest) command(ctx context.Context, name string) error {
	g.mu.Lock()
	m := g.machine
	g.mu.Unlock()
	if m == nil {
		return fault.Newf(fault.LabFailed, "", "%s guest %s: it is off", name, g.o.Name)
	}
	if _, err := m.monitor.do(ctx, name, nil); err != nil {
		return g.failed(name, err)
	}
	return nil
}

// Wait waits until the guest goes off, for whatever reason.
func (g *Guest) Wait(ctx context.Context) error {
	return g.wait(ctx, "wait for the end of", func() (bool, error) { return g.machine == nil, nil })
}

// Ended says how QEMU has ended where that was not by us, "signal: killed", and what
// it has said; "" while it runs, or after Kill.
func (g *Guest) Ended() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ended
}

// BootTime returns the time from the kernel's start to its agent's, in this boot;
// 0 while no agent is there.
func (g *Guest) BootTime() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.session == nil {
		return 0
	}
	return g.session.greeting.Uptime
}

// Close kills the guest and removes its directory, if that was made for it. What
// its kernel reported stays to be asked for.
func (g *Guest) Close() error {
	err := g.Kill()
	for _, n := range g.o.NICs {
		// A wire that QEMU had too; closing ours a second time is no matter.
		_ = n.Wire.Close()
	}
	if g.initrd != "" {
		if e := os.Remove(g.initrd); e != nil && !errors.Is(e, os.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	if g.remove != nil {
		err = errors.Join(err, g.remove())
	}
	return err
}

// tail keeps the end of a text.
type tail struct {
	mu    sync.Mutex
	lines []string
}

const tailLines = 60

func (t *tail) line(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == tailLines {
		t.lines = append(t.lines[:0], t.lines[1:]...)
	}
	t.lines = append(t.lines, s)
}

// Write takes text of a program, whole lines or not.
func (t *tail) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		t.line(strings.TrimRight(line, "\n"))
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}
