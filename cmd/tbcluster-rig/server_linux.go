package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/host/sock"
	"tbcluster/rig"
	"tbcluster/rig/guest"
	"tbcluster/rig/usb4"
)

// request is what a command asks of a rig that runs. With it come three
// descriptors: standard input (a pipe), output and error of the command.
type request struct {
	Verb string
	Args []string `json:",omitempty"`
	// Out is that of flap.
	Out time.Duration `json:",omitempty"`
	// Wire changes the options of a cable, for wire.
	Wire *usb4.CableOptions `json:",omitempty"`
	// Terminal asks for one in the guest, of that size and kind.
	Terminal      bool   `json:",omitempty"`
	Columns, Rows int    `json:",omitempty"`
	Term          string `json:",omitempty"`
}

// resize is what may follow a request.
type resize struct{ Columns, Rows int }

// answer ends a request.
type answer struct {
	Exit  int
	Fault *fault.Fault `json:",omitempty"`
}

var nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,23}$`)

// socketPath is where a rig of that name listens. The directory belongs to the
// user alone.
func socketPath(name string) (string, error) {
	if !nameRE.MatchString(name) {
		return "", fault.Newf(fault.Usage, `use letters, digits and "-", at most 24`, "a rig cannot be called %q", name)
	}
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		dir = filepath.Join(os.TempDir(), fmt.Sprintf("tbcluster-rig-%d", os.Geteuid()))
	} else {
		dir = filepath.Join(dir, "tbcluster-rig")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fault.New(fault.FileIO, "make the directory of the rigs' sockets", err, "").At(dir)
	}
	st, err := os.Lstat(dir)
	if err != nil || !st.IsDir() || st.Mode().Perm() != 0o700 {
		return "", fault.Newf(fault.FileDenied, "remove it, or set XDG_RUNTIME_DIR", "the directory of the rigs' sockets %s is not ours alone", dir)
	}
	return filepath.Join(dir, name+".sock"), nil
}

// server answers commands on a rig.
type server struct {
	path     string
	listener *net.UnixListener
}

// listen takes the name of a rig. First it removes the sockets of rigs that were
// killed, and returns their names.
func (g *globals) listen() (s *server, killed []string, err error) {
	path, err := socketPath(g.name)
	if err != nil {
		return nil, nil, err
	}
	unlock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	if killed, err = removeKilled(filepath.Dir(path)); err != nil {
		return nil, nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, nil, fault.Newf(fault.NodeInUse, g.command("down")+" ends it; --name makes another", "a rig called %s runs", g.name)
	}
	if err != nil {
		return nil, nil, fault.New(fault.FileIO, "listen to other commands", err, "").At(path)
	}
	return &server{path: path, listener: l}, killed, nil
}

// lockDir keeps others from looking at sockets that do not listen yet.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err == nil {
		for err = syscall.EINTR; errors.Is(err, syscall.EINTR); {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		}
	}
	if err != nil {
		return nil, errors.Join(fault.New(fault.FileIO, "lock the directory of the rigs' sockets", err, "").At(dir), f.Close())
	}
	return func() { f.Close() }, nil
}

// removeKilled removes the sockets that nobody listens to.
func removeKilled(dir string) (names []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.sock"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return names, fault.New(fault.FileIO, "remove the socket of a rig that was killed", err, "").At(path)
		}
		names = append(names, strings.TrimSuffix(filepath.Base(path), ".sock"))
	}
	return names, nil
}

func (s *server) close() error {
	err := s.listener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// serve answers until ctx ends; what it returns is closed when all is over.
func (s *server) serve(ctx context.Context, r *rig.Rig, down func()) <-chan struct{} {
	var all sync.WaitGroup
	context.AfterFunc(ctx, func() { _ = s.close() }) // Accept ends
	all.Go(func() {
		for {
			conn, err := s.listener.AcceptUnix()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close()
				answerRequest(ctx, r, down, conn)
			})
		}
	})
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	return done
}

// call is one request that is being answered.
type call struct {
	request
	rig             *rig.Rig
	down            func()
	in, out, errOut *os.File
	sizes           <-chan resize
}

// answerRequest takes one request. The other side may end whenever it likes.
func answerRequest(ctx context.Context, r *rig.Rig, down func(), conn *net.UnixConn) {
	buf := make([]byte, 64<<10)
	n, files, err := sock.RecvFile(conn, buf)
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if err != nil {
		return
	}
	c := frame.New(conn)
	reply := func(err error) {
		a := answer{}
		if err != nil {
			var exit *guest.ExitError
			if errors.As(err, &exit) && exit.Signal == 0 {
				a.Exit = exit.Code
			} else {
				if a.Fault = fault.As(err); a.Fault == nil {
					a.Fault = fault.New(fault.LabFailed, "do that", err, "")
				}
				a.Fault.Err = nil // an interface: nothing for JSON
				a.Exit = a.Fault.Exit()
			}
		}
		// It may have gone.
		_ = c.Send(a)
	}
	var q request
	if err := json.Unmarshal(buf[:n], &q); err != nil || len(files) != 3 {
		reply(fault.Newf(fault.Protocol, "", "what came to the rig is no request"))
		return
	}
	rigs := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sizes := make(chan resize)
	go func() {
		defer cancel() // it is gone, and so is the wish
		for {
			var s resize
			if err := c.Receive(&s); err != nil {
				return
			}
			select {
			case sizes <- s:
			case <-ctx.Done():
				return
			}
		}
	}()
	err = (&call{request: q, rig: r, down: down, in: files[0], out: files[1], errOut: files[2], sizes: sizes}).do(ctx)
	if err != nil && rigs.Err() != nil {
		err = fault.Newf(fault.NoAgent, "", "the rig was taken down before that was done")
	}
	reply(err)
}

// verbs are what a rig can be asked.
var verbs = map[string]struct {
	args int // at least
	do   func(*call, context.Context) error
}{
	"guest": {1, (*call).guest},
	"plug": {1, func(c *call, _ context.Context) error {
		return c.cable(func(x *rig.Cable) error {
			if x.Plugged() {
				return c.already("the cable %s is plugged in", x)
			}
			x.Plug()
			return nil
		})
	}},
	"unplug": {1, func(c *call, _ context.Context) error {
		return c.cable(func(x *rig.Cable) error {
			if !x.Plugged() {
				return c.already("the cable %s is out", x)
			}
			x.Unplug()
			return nil
		})
	}},
	"flap": {1, func(c *call, ctx context.Context) error {
		return c.cable(func(x *rig.Cable) error { return x.Flap(ctx, c.Out) })
	}},
	"wire":     {1, func(c *call, _ context.Context) error { return c.cable(func(x *rig.Cable) error { return c.wire(x) }) }},
	"counters": {0, func(c *call, _ context.Context) error { return c.print(counters(c.rig)) }},
	"status":   {0, func(c *call, _ context.Context) error { return c.print(status(c.rig)) }},
	"trace":    {0, (*call).trace},
	"settle":   {0, func(c *call, ctx context.Context) error { return c.rig.Settle(ctx) }},
	"cut": {1, func(c *call, _ context.Context) error {
		return c.host(func(h *rig.Host) error {
			if !h.On() {
				return errors.Join(h.Cut(), c.already("host %s is off", h.Name()))
			}
			return h.Cut()
		})
	}},
	"boot": {1, func(c *call, ctx context.Context) error {
		return c.host(func(h *rig.Host) error {
			if h.On() {
				return c.already("host %s is on", h.Name())
			}
			return h.Boot(ctx)
		})
	}},
	"reload": {1, func(c *call, ctx context.Context) error {
		return c.host(func(h *rig.Host) error { return h.ReloadDriver(ctx) })
	}},
	"dmesg": {1, func(c *call, _ context.Context) error {
		return c.host(func(h *rig.Host) error {
			if !h.On() {
				return fault.Newf(fault.NodeDown, "", "host %s is off; its console is in %s", h.Name(), h.Console()).With("node", h.Name())
			}
			return c.print(h.Dmesg())
		})
	}},
	"down": {0, func(c *call, _ context.Context) error { c.down(); return nil }},
}

func (c *call) do(ctx context.Context) error {
	v, ok := verbs[c.Verb]
	if !ok || len(c.Args) < v.args {
		return fault.Newf(fault.Usage, "the rig and this program may be of two versions", "the rig does not understand %q", c.Verb)
	}
	return v.do(c, ctx)
}

func (c *call) print(s string) error {
	if _, err := c.out.WriteString(s); err != nil {
		return fault.New(fault.FileIO, "print", err, "")
	}
	return nil
}

func (c *call) cable(do func(*rig.Cable) error) error {
	x, err := c.rig.FindCable(c.Args[0])
	if err != nil {
		return err
	}
	return do(x)
}

// already says that there is nothing to do, which is no failure.
func (c *call) already(format string, args ...any) error {
	return c.print(fmt.Sprintf(format, args...) + " already\n")
}

func (c *call) host(do func(*rig.Host) error) error {
	h, err := c.rig.FindHost(c.Args[0])
	if err != nil {
		return err
	}
	return do(h)
}

func (c *call) wire(x *rig.Cable) error {
	if c.Wire == nil {
		return c.print(fmt.Sprintf("cable %s: %s\n", x, behaviour(x)))
	}
	return x.SetOptions(*c.Wire)
}

// behaviour says how a cable behaves, each way for itself where they differ.
func behaviour(x *rig.Cable) string {
	a, b := x.Ends()
	both := x.Behaviour(a)
	if back := x.Behaviour(b); back != both {
		return fmt.Sprintf("from %s %s; from %s %s", a, both, b, back)
	}
	return both
}

// guest runs a program in a host, or a shell.
func (c *call) guest(ctx context.Context) error {
	h, err := c.rig.FindHost(c.Args[0])
	if err != nil {
		return err
	}
	command := guest.Command{
		Args: slices.Clone(c.Args[1:]), Dir: "/root", Stdin: c.in, Stdout: c.out, Stderr: c.errOut,
		Terminal: c.Terminal, Columns: c.Columns, Rows: c.Rows,
	}
	if len(command.Args) == 0 {
		command.Args = []string{"sh"}
		if c.Terminal {
			command.Args = []string{"bash", "--norc"} // for people: with history and completion
		}
	}
	if c.Terminal {
		command.Env = []string{"TERM=" + c.Term, "PS1=" + h.Name() + ":\\w# "}
	}
	p, err := h.Start(ctx, command)
	if err != nil {
		return err
	}
	go func() {
		for {
			select {
			case s := <-c.sizes:
				_ = p.Resize(s.Columns, s.Rows) // or it has just ended
			case <-p.Done():
				return
			}
		}
	}()
	return p.Wait()
}

// trace writes what happens on the fabric until the other side ends.
func (c *call) trace(ctx context.Context) error {
	t := c.rig.Fabric().Trace(c.out, usb4.TraceFilter{NoFrames: slices.Contains(c.Args, "control"), Registers: slices.Contains(c.Args, "registers")})
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = t.Close() // nobody is there to read the rest
			return nil
		case <-tick.C:
			if err := t.Flush(); err != nil {
				if errors.Is(err, syscall.EPIPE) { // its reader has seen enough
					_ = t.Close()
					return nil
				}
				return errors.Join(fault.New(fault.FileIO, "write the trace", err, ""), t.Close())
			}
		}
	}
}

// status says how everything stands, for people.
func status(r *rig.Rig) string {
	var b strings.Builder
	for _, c := range r.Cables() {
		n := c.Counters()
		state := "unplugged"
		switch {
		case n.Up:
			state = "up"
		case c.Plugged():
			state = "plugged, down"
		}
		fmt.Fprintf(&b, "cable %-12s %s", c, state)
		if how := behaviour(c); how != "perfect" {
			fmt.Fprintf(&b, ", %s", how)
		}
		fmt.Fprintln(&b)
	}
	for _, h := range r.Hosts() {
		if !h.On() {
			fmt.Fprintf(&b, "host %-13s off", h.Name())
			if how := h.Lost(); how != "" {
				fmt.Fprintf(&b, ": its QEMU ended (%s)", how)
			}
			fmt.Fprintln(&b)
			continue
		}
		fmt.Fprintf(&b, "host %-13s on, kernel %s, console %s\n", h.Name(), h.Spec().Kernel, h.Console())
		for _, d := range h.State().Domains {
			for _, o := range d.Others {
				fmt.Fprintf(&b, "  %-6s a hub\n", o)
			}
		}
		for _, p := range h.State().Peers() {
			name := "no interface"
			if n := p.Interface(); n != nil {
				name = n.Name
			}
			fmt.Fprintf(&b, "  %-6s host %s, %d x %g Gb/s, %s\n", p.Device, p.Name, p.RxLanes, p.RxGbps, name)
		}
	}
	for _, d := range r.Differences() {
		fmt.Fprintf(&b, "not as it should be: %s\n", d)
	}
	return b.String()
}

// counters are those of cables and rings that have counted something.
func counters(r *rig.Rig) string {
	var b strings.Builder
	all := r.Counters()
	for _, c := range all.Cables {
		for _, w := range []struct {
			from, to string
			usb4.WireCounters
		}{{c.A, c.B, c.AtoB}, {c.B, c.A, c.BtoA}} {
			fmt.Fprintf(&b, "%s > %s: %d frames, %d bytes sent; %d, %d delivered; lost %d, corrupted %d, corrupted and said so %d, overrun %d, cut off %d; %d control packets\n",
				w.from, w.to, w.Sent, w.SentBytes, w.Delivered, w.DeliveredBytes, w.Lost, w.Corrupted, w.CorruptedFlagged, w.Overrun, w.DroppedAfter, w.Control)
			if j := w.Judged; j != (usb4.Judged{}) {
				fmt.Fprintf(&b, "  injected: lost %d of %d, corrupted %d of %d, corrupted and said so %d of %d, overrun %d of %d\n",
					w.Lost, j.Loss, w.Corrupted, j.Corrupt, w.CorruptedFlagged, j.CorruptFlagged, w.Overrun, j.Overrun)
			}
			if w.Idle != 0 || w.Missed != 0 || w.Late != 0 {
				fmt.Fprintf(&b, "  its rate: %v with nothing to send, %v never made up for, at most %v late\n",
					w.Idle.Round(time.Microsecond), w.Missed.Round(time.Microsecond), w.Late.Round(time.Microsecond))
			}
		}
	}
	for _, h := range all.Hosts {
		for _, rings := range []struct {
			name string
			list []usb4.RingCounters
		}{{"tx", h.TX}, {"rx", h.RX}} {
			for i, n := range rings.list {
				if n.Frames == 0 && n.Dropped.Total() == 0 {
					continue
				}
				fmt.Fprintf(&b, "%s %s%d: %d frames, %d bytes, %d interrupts, held %d, paced %d, CRC errors %d, overruns %d, corrupted %d, dropped %+v\n",
					h.Name, rings.name, i, n.Frames, n.Bytes, n.Interrupts, n.Held, n.Paced, n.CRCErrors, n.Overruns, n.Corrupted, n.Dropped)
			}
		}
		paths(&b, h.Name, h.Paths)
	}
	for _, h := range all.Hubs {
		paths(&b, h.Name, h.Paths)
	}
	return b.String()
}

func paths(b *strings.Builder, name string, list []usb4.PathCounters) {
	for _, p := range list {
		fmt.Fprintf(b, "%s path adapter %d hop %d > adapter %d hop %d: enabled %v, %d frames, %d bytes, %d dropped\n",
			name, p.Adapter, p.Hop, p.OutAdapter, p.OutHop, p.Enabled, p.Frames, p.Bytes, p.DroppedFrames)
	}
}
