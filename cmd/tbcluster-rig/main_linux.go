package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tbcluster/api/fault"
)

// defaultName is that of a rig that was given none.
const defaultName = "default"

// globals are the edges of the process.
type globals struct {
	in          *os.File
	out, errOut io.Writer
	name        string // of the rig that is meant (--name)
	entered     bool   // a command's own code runs
}

// exitStatus ends the program with that code and without a message.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// notef writes a remark to standard error, where progress goes.
func (g *globals) notef(format string, args ...any) {
	fmt.Fprintf(g.errOut, "rig: "+format+"\n", args...)
}

// command is a command line for a person to type, on the rig that is meant.
func (g *globals) command(words ...string) string {
	if g.name != defaultName {
		words = append([]string{"--name", g.name}, words...)
	}
	return "`tbcluster-rig " + strings.Join(words, " ") + "`"
}

// terminal reports whether a person sits at both ends.
func (g *globals) terminal() bool {
	out, ok := g.out.(*os.File)
	return ok && term.IsTerminal(int(g.in.Fd())) && term.IsTerminal(int(out.Fd()))
}

func main() {
	g := &globals{in: os.Stdin, out: os.Stdout, errOut: os.Stderr}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	// The first signal cancels; a second one has its usual effect.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, g, os.Args[1:]))
}

// run carries out one command line and returns the exit code.
func run(ctx context.Context, g *globals, args []string) int {
	root := &cobra.Command{
		Use:   "tbcluster-rig",
		Short: "Virtual machines joined by emulated USB4 cables",
		Long: `Boots virtual machines with real Debian kernels whose real thunderbolt driver
finds a USB4 host router that is emulated, and the cables between them. They are
emulated in software and need no hardware, no KVM and no network.

The first run builds Debian, kernels and tools into the cache, as root; that
takes a few minutes and 2 GB.`,
		SilenceUsage: true, SilenceErrors: true, Args: cobra.NoArgs,
		PersistentPreRun: func(*cobra.Command, []string) { g.entered = true },
		RunE:             func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.PersistentFlags().StringVar(&g.name, "name", defaultName, "name of the rig; any number stand side by side")
	root.SetIn(g.in)
	root.SetOut(g.out)
	root.SetErr(g.errOut)
	root.AddCommand(newUpCommand(g), newRunCommand(g), newWalkCommand(g), newBuildCommand(g), newModuleCommand(g))
	root.AddCommand(newRemoteCommands(g)...)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	return g.report(err, cmd)
}

// report prints an error and returns the exit code for it.
func (g *globals) report(err error, cmd *cobra.Command) int {
	if err == nil {
		return fault.ExitOK
	}
	var status exitStatus
	if errors.As(err, &status) {
		return int(status)
	}
	f := fault.As(err)
	if f == nil {
		fmt.Fprintf(g.errOut, "tbcluster-rig: %v\n", err)
		if !g.entered {
			how := "write: " + cmd.UseLine()
			if cmd.HasSubCommands() {
				how = "`" + cmd.CommandPath() + " --help` lists the commands"
			}
			fmt.Fprintf(g.errOut, "  %s\n", how)
			return fault.ExitUsage
		}
		return fault.ExitInternal
	}
	text := err.Error()
	if f.Fix != "" && !strings.Contains(text, f.Fix) {
		text += "\n  " + f.Fix
	}
	fmt.Fprintf(g.errOut, "tbcluster-rig: %s\n", text)
	return f.Exit()
}
