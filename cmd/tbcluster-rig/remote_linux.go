package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/host/sock"
	"tbcluster/rig/usb4"
)

// maxOut is how long a flap may have a cable out: what takes longer is an unplug.
const maxOut = time.Hour

// traceWords are what a trace can be told.
var traceWords = []string{"control", "registers"}

// newRemoteCommands are those on a rig that runs.
func newRemoteCommands(g *globals) []*cobra.Command {
	simple := func(use, short string, args cobra.PositionalArgs) *cobra.Command {
		cmd := &cobra.Command{Use: use, Short: short, Args: args}
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			return ask(cmd.Context(), g, request{Verb: cmd.Name(), Args: args})
		}
		return cmd
	}
	guest := &cobra.Command{
		Use:   "guest HOST [-- COMMAND...]",
		Short: "Run a command in a host, or a shell",
		Long: `Without a command it is a shell. What comes after HOST is the command, word for
word; "--" before it may be left out.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 && args[1] == "--" {
				args = append(args[:1:1], args[2:]...)
			}
			return ask(cmd.Context(), g, request{Verb: "guest", Args: args, Terminal: g.terminal() && len(args) == 1})
		},
	}
	guest.Flags().SetInterspersed(false)
	flap := &cobra.Command{Use: "flap PORT", Short: "Pull a cable and plug it in again", Args: cobra.ExactArgs(1)}
	out := flap.Flags().Duration("out", 200*time.Millisecond, "how long it is out")
	flap.RunE = func(cmd *cobra.Command, args []string) error {
		if *out < 0 || *out > maxOut {
			return fault.Newf(fault.Usage, fmt.Sprintf("choose 0s to %v", maxOut), "--out cannot be %v", *out)
		}
		return ask(cmd.Context(), g, request{Verb: "flap", Args: args, Out: *out})
	}
	wire := newWireCommand(g)
	port := cobra.ExactArgs(1)
	return []*cobra.Command{
		guest, flap, wire,
		simple("plug PORT", `Plug in the cable that ends in a port ("a.0")`, port),
		simple("unplug PORT", "Pull the cable that ends in a port", port),
		simple("counters", "Show the counters of cables, rings and paths", cobra.NoArgs),
		simple("status", "Show cables, hosts, and what their kernels see", cobra.NoArgs),
		simple("trace [control|registers]", "Write what happens on the cables until ^C; control leaves out frames, registers adds those of the host interface", cobra.MatchAll(cobra.MaximumNArgs(2), func(_ *cobra.Command, args []string) error {
			for _, a := range args {
				if !slices.Contains(traceWords, a) {
					return fault.Newf(fault.Usage, "the words are "+strings.Join(traceWords, " and "), "trace %s: there is no such word", a)
				}
			}
			return nil
		})),
		simple("settle", "Wait until all kernels show what is plugged", cobra.NoArgs),
		simple("cut HOST", "Cut the power of a host", port),
		simple("boot HOST", "Switch on a host that is off", port),
		simple("reload HOST", "Unload and load the driver of a host", port),
		simple("dmesg HOST", "Show the kernel's log of a host", port),
		simple("down", "End the rig", cobra.NoArgs),
	}
}

func newWireCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use: "wire PORT", Short: "Show how a cable behaves, or change it", Args: cobra.ExactArgs(1),
		Long: `Without a flag it shows how the cable behaves. With flags the cable behaves from
now on as they say and is perfect in all else.`,
	}
	var flags wireFlags
	flags.add(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		q := request{Verb: "wire", Args: args}
		if flags.given() {
			q.Wire = &usb4.CableOptions{}
			if err := flags.apply(q.Wire); err != nil {
				return err
			}
		}
		return ask(cmd.Context(), g, q)
	}
	return cmd
}

// ask sends a request to the rig and waits for its end. What it prints comes
// straight from there.
func ask(ctx context.Context, g *globals, q request) error {
	path, err := socketPath(g.name)
	if err != nil {
		return err
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fault.Newf(fault.NoAgent, g.command("up")+" makes it anew", "the rig %s was killed", g.name)
	case err != nil:
		return fault.New(fault.NoAgent, "find the rig "+g.name, err, g.command("up")+" makes one; --name says which is meant").At(path)
	}
	defer conn.Close()
	// Our own standard input may be a terminal, of which the rig must not take a
	// key more than it is meant to have: it gets a pipe.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer w.Close()
	out, ok := g.out.(*os.File)
	errOut, ok2 := g.errOut.(*os.File)
	if !ok || !ok2 {
		r.Close()
		return fault.Newf(fault.Internal, "", "output that is no file")
	}
	if q.Terminal {
		restore, err := rawTerminal(g.in, out, &q)
		if err != nil {
			r.Close()
			return err
		}
		defer restore()
	}
	b, err := json.Marshal(q)
	if err == nil {
		err = sock.SendFile(conn, b, r, out, errOut)
	}
	r.Close()
	if err != nil {
		return fault.New(fault.Connection, "ask the rig "+g.name, err, "")
	}
	if q.Verb == "guest" {
		go func() {
			_, _ = io.Copy(w, g.in) // what is read after its end is nobody's
			_ = w.Close()
		}()
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	c := frame.New(conn)
	if q.Terminal {
		defer followSize(out, c)()
	}
	var a answer
	if err := c.Receive(&a); err != nil {
		if ctx.Err() != nil {
			return exitStatus(fault.ExitInterrupted)
		}
		if q.Verb == "down" && errors.Is(err, io.EOF) {
			return nil
		}
		return fault.New(fault.Connection, "hear from the rig "+g.name, err, "it may have been taken down")
	}
	switch {
	case a.Fault != nil && a.Fault.Reason == fault.NodeDown && a.Fault.Meta["node"] != "":
		a.Fault.Fix = g.command("boot", a.Fault.Meta["node"]) + " switches it on"
		return a.Fault
	case a.Fault != nil:
		return a.Fault
	case a.Exit != 0:
		return exitStatus(a.Exit)
	}
	return nil
}

// rawTerminal makes the terminal a way to another one.
func rawTerminal(in, out *os.File, q *request) (restore func(), err error) {
	if q.Columns, q.Rows, err = term.GetSize(int(out.Fd())); err != nil {
		return nil, fault.New(fault.Usage, "use the terminal", err, "")
	}
	if q.Term = os.Getenv("TERM"); q.Term == "" {
		q.Term = "vt100"
	}
	old, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return nil, fault.New(fault.Usage, "use the terminal", err, "")
	}
	return func() { _ = term.Restore(int(in.Fd()), old) }, nil // it was possible before
}

// followSize tells the rig of changes of the terminal's size.
func followSize(out *os.File, c *frame.Conn) (stop func()) {
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			case <-resized:
				if columns, rows, err := term.GetSize(int(out.Fd())); err == nil {
					_ = c.Send(resize{columns, rows}) // or it has just ended
				}
			}
		}
	}()
	return func() { signal.Stop(resized); close(done) }
}
