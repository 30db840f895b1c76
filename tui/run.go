package tui

import (
	"context"
	"errors"
	"io"
	"os"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

	"tbcluster/api/fault"
)

// Options say what Run shows and where.
type Options struct {
	// Conn is a connection to an agent. A *grpc.ClientConn reconnects by
	// itself, which is all that is needed as long as the address stays.
	Conn grpc.ClientConnInterface
	// Redial returns another connection after Conn has failed; nil means that
	// Conn is used again. A connection that it returned is not closed by Run.
	Redial func(context.Context) (grpc.ClientConnInterface, error)
	// Title is shown while the cluster has no name; empty means "tbcluster".
	Title string
	// As is the local user as whom people of other nodes act on this one when
	// it pairs; empty means whoever the agent takes the caller to be.
	As string
	// Start says what starts the agent, a whole clause; empty means `tbcluster up`.
	Start string
	// Notice is one line shown until the first key: what `up` has just done.
	Notice string
	// NoColor leaves colours out; emphasis stays. NO_COLOR does the same.
	NoColor bool
	// Input and Output are the terminal; nil means standard input and output.
	Input  io.Reader
	Output io.Writer
	// Command runs one command of the command line, written after `:`, and
	// writes what it prints to out. Nil leaves `:` dim.
	Command func(ctx context.Context, args []string, out io.Writer) error
	// Complete returns what may stand in place of the last of args; nil means
	// no completion.
	Complete func(ctx context.Context, args []string) []string
}

// Run shows the full screen until the person leaves it or ctx ends. It leaves
// the agent and everything else running. Its error is a *fault.Fault.
func Run(ctx context.Context, o Options) error {
	return run(ctx, o)
}

func run(ctx context.Context, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in, out := o.Input, o.Output
	if in == nil {
		in = os.Stdin
	}
	if out == nil {
		out = os.Stdout
	}
	m := NewModel(ctx, o)
	if f, ok := out.(*os.File); ok {
		out = &screenWriter{File: f}
	}
	m.out = out
	p := tea.NewProgram(newPaced(m), tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out), tea.WithAltScreen())
	_, err := p.Run()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, tea.ErrInterrupted), errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil:
		return fault.New(fault.Interrupted, "the screen was ended", nil, "")
	}
	return fault.New(fault.Internal, "show the screen", err, "`tbcluster up --plain` prints plain lines instead")
}
