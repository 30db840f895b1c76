package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tbcluster/api/fault"
)

// globals is what every command gets: the process's edges and the flags that
// all commands share. Tests hand in their own.
type globals struct {
	in          io.Reader
	out, errOut io.Writer
	// getenv reads the environment.
	getenv func(string) string
	// run is the directory of sockets of the whole machine, "/run".
	run string

	// output is "text" or "json" (-o).
	output string
	// socket is the agent's socket as given by --socket; empty means choose.
	socket string

	// entered is set once a command's own code runs: an error before that is
	// one of usage.
	entered bool
	// chosen is the endpoint that was found, so that one command says at most
	// once where it talks to.
	chosen *endpoint
}

// json reports whether output is to be JSON.
func (g *globals) json() bool { return g.output == "json" }

// printf writes to standard output. A broken pipe ends the process by SIGPIPE;
// other write errors have nobody left to tell.
func (g *globals) printf(format string, args ...any) { fmt.Fprintf(g.out, format, args...) }

// notef writes a remark for people to standard error.
func (g *globals) notef(format string, args ...any) {
	fmt.Fprintf(g.errOut, "tbcluster: "+format+"\n", args...)
}

// exitStatus ends the program with that code and without a message: whatever
// there was to say has been said.
type exitStatus int

// Error makes an exitStatus an error.
func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func main() {
	g := &globals{in: os.Stdin, out: os.Stdout, errOut: os.Stderr, getenv: os.Getenv, run: "/run"}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal cancels; a second one has its usual effect.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, g, os.Args[1:]))
}

// run carries out one command line and returns the exit code.
func run(ctx context.Context, g *globals, args []string) int {
	root := newRootCommand(g)
	root.SetArgs(args)
	plainArgs(root)
	err := root.ExecuteContext(ctx)
	if err != nil && !g.entered && wantsJSON(args) {
		g.output = "json"
	}
	return report(g, err)
}

// wantsJSON reports whether a command line that could not be read asks for JSON.
func wantsJSON(args []string) bool {
	for i, a := range args {
		switch a {
		case "--":
			return false
		case "-ojson", "-o=json", "--output=json":
			return true
		case "-o", "--output":
			return i+1 < len(args) && args[i+1] == "json"
		}
	}
	return false
}

// plainArgs has every command say how it is written when arguments are missing
// or too many.
func plainArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			err := check(cmd, args)
			if err == nil || !strings.Contains(err.Error(), "arg(s)") && (cmd.HasSubCommands() || !strings.HasPrefix(err.Error(), "unknown command")) {
				return err
			}
			what := "too much stands after `" + cmd.CommandPath() + "`"
			var want int
			_, exact := fmt.Sscanf(err.Error(), "accepts %d arg(s)", &want)
			if len(args) < want || exact != nil && strings.HasPrefix(err.Error(), "requires at least") {
				what = "something is missing after `" + cmd.CommandPath() + "`"
			}
			return fault.Newf(fault.Usage, "write: "+strings.TrimSuffix(cmd.UseLine(), " [flags]")+"; `"+cmd.CommandPath()+" --help` says more", "%s", what)
		}
	}
	for _, c := range cmd.Commands() {
		plainArgs(c)
	}
}

// newRootCommand returns the command tree.
func newRootCommand(g *globals) *cobra.Command {
	root := &cobra.Command{
		Use:   "tbcluster",
		Short: "Turn machines joined by Thunderbolt cables into one place to run large models",
		Long: `tbcluster finds the machines at the other ends of your Thunderbolt or USB4
cables, copies models over those cables, and runs them where they fit.

Start with "tbcluster up" on every machine, then "tbcluster pair" on one and
"tbcluster pair CODE" on each other. No machine at hand? "tbcluster up --lab 3"
makes three virtual ones.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       buildVersion(),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if g.output != "text" && g.output != "json" {
				bad := g.output
				g.output = "text"
				return fault.Newf(fault.Usage, "use -o text or -o json", "no output format is called %q", bad)
			}
			g.entered = true
			return nil
		},
	}
	root.SetIn(g.in)
	root.SetOut(g.out)
	root.SetErr(g.errOut)
	root.SetFlagErrorFunc(flagFault)
	root.SetVersionTemplate("tbcluster {{.Version}}\n")
	root.CompletionOptions.DisableDefaultCmd = true
	flags := root.PersistentFlags()
	flags.StringVarP(&g.output, "output", "o", "text", `"text" for people, "json" for programs (its shapes are stable: docs/json.md)`)
	flags.StringVar(&g.socket, "socket", "", "socket of the agent to talk to (else TBCLUSTER_SOCKET, else the nearest agent)")
	if err := root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is declared three lines above
	}
	root.AddGroup(
		&cobra.Group{ID: groupCluster, Title: "The cluster"},
		&cobra.Group{ID: groupModels, Title: "Models and instances"},
		&cobra.Group{ID: groupHelp, Title: "When something is wrong"},
		&cobra.Group{ID: groupOther, Title: "Other"},
	)
	root.SetHelpCommandGroupID(groupOther)
	root.AddCommand(
		newStatusCommand(g),
		newPsCommand(g),
		newModelsCommand(g),
		newNodeCommand(g),
		newLinksCommand(g),
		newPingCommand(g),
		newPlanCommand(g),
		newPlaceCommand(g),
		newStopCommand(g),
		newLogsCommand(g),
		newDoctorCommand(g),
		newCpCommand(g),
		newAgentCommand(g),
		newWorkerCommand(g),
		newRankCommand(g),
		newChatCommand(g),
		newPairCommand(g),
		newConfigCommand(g),
		newUpCommand(g),
		newDownCommand(g),
		newEngineCommand(g),
		newBugreportCommand(g),
		newLabCommand(g),
		newLabKeeperCommand(g),
		newLabInitCommand(g),
		newVersionCommand(g),
		newCompletionCommand(g),
		newManCommand(g),
	)
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.RunE = runHelp
		}
	}
	return root
}

// runHelp shows the help of the command that is named.
func runHelp(cmd *cobra.Command, args []string) error {
	about, rest, err := cmd.Root().Find(args)
	if err == nil && len(rest) > 0 {
		about.SuggestionsMinimumDistance = 2 // as cobra has it for a command that is run
		like := ""
		if names := about.SuggestionsFor(rest[0]); len(names) > 0 {
			like = "\n\nDid you mean this?\n\t" + names[0]
		}
		err = fmt.Errorf("unknown command %q for %q%s", rest[0], about.CommandPath(), like)
	}
	if err != nil {
		return usageFault(err)
	}
	about.InitDefaultHelpFlag()
	return about.Help()
}

// flagFault is what is wrong with a flag; for a value it says what is wanted.
func flagFault(cmd *cobra.Command, err error) error {
	list := "`" + cmd.CommandPath() + " --help` lists the flags"
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return fault.Newf(fault.Usage, list, "%s", err)
	}
	f := bad.GetFlag()
	_, usage := pflag.UnquoteUsage(f)
	want := "--" + f.Name + ": " + usage + "; " + list
	kinds := map[string]string{"float64": "a number", "int": "a whole number", "uint32": "a whole number, 0 or more", "bool": "true or false"}
	kind := kinds[f.Value.Type()]
	switch {
	case kind == "":
		return fault.New(fault.Usage, fmt.Sprintf("%q cannot be the value of --%s", bad.GetValue(), f.Name), bad.Unwrap(), want)
	case errors.Is(err, strconv.ErrRange):
		return fault.Newf(fault.Usage, want, "%q is too large or too small for --%s", bad.GetValue(), f.Name)
	}
	return fault.Newf(fault.Usage, want, "--%s wants %s, not %q", f.Name, kind, bad.GetValue())
}

// Groups of commands in the help of the root command.
const (
	groupCluster = "cluster"
	groupModels  = "models"
	groupHelp    = "help"
	groupOther   = "other"
)

// exitHelp returns the EXIT STATUS part of a help text of a command that asks an
// agent.
func exitHelp(reasons ...fault.Reason) string {
	return exitHelpAnd(nil, append(slices.Clip(reasons), fault.NoAgent, fault.Interrupted)...)
}

// exitHelpAlone is exitHelp of a command that needs no agent.
func exitHelpAlone(reasons ...fault.Reason) string {
	return exitHelpAnd(nil, reasons...)
}

// exitHelpAnd is exitHelp with codes that a command gives without an error, or
// that mean something of their own there.
func exitHelpAnd(extra map[int]string, reasons ...fault.Reason) string {
	lines := strings.Split(strings.TrimRight(fault.ExitTable(reasons...), "\n"), "\n")
	lines = slices.DeleteFunc(lines, func(line string) bool {
		var code int
		fmt.Sscan(line, &code)
		return extra[code] != ""
	})
	for code, meaning := range extra {
		lines = append(lines, fmt.Sprintf("  %-4d %s", code, meaning))
	}
	slices.SortFunc(lines, func(a, b string) int {
		var x, y int
		fmt.Sscan(a, &x)
		fmt.Sscan(b, &y)
		return x - y
	})
	return "\n\nEXIT STATUS\n" + strings.Join(lines, "\n")
}

// report prints err and returns the exit code for it: the one place where
// errors become exit codes.
func report(g *globals, err error) int {
	var status exitStatus
	switch {
	case err == nil:
		return fault.ExitOK
	case errors.As(err, &status):
		return int(status)
	}
	f := fault.As(err)
	switch {
	case f != nil:
	case !g.entered:
		f = usageFault(err)
	default:
		f = fault.FromStatus(err)
	}
	if g.json() {
		printFaultJSON(g.errOut, f)
	} else {
		printFault(g.errOut, f)
	}
	return f.Exit()
}

// usageFault is what cobra finds wrong, in our words where they are better.
func usageFault(err error) *fault.Fault {
	what, fix := err.Error(), "`tbcluster help` lists the commands, `tbcluster COMMAND --help` their flags"
	var word, parent string
	if n, _ := fmt.Sscanf(what, "unknown command %q for %q", &word, &parent); n == 2 {
		_, like, found := strings.Cut(what, "Did you mean this?")
		what = "there is no command `" + parent + " " + word + "`"
		if names := strings.Fields(like); found && len(names) > 0 {
			fix = "did you mean `" + parent + " " + names[0] + "`? `" + parent + " --help` lists the commands"
		}
	}
	return fault.Newf(fault.Usage, fix, "%s", what)
}

// printFault prints f for people: what failed, where, why, what to do.
func printFault(w io.Writer, f *fault.Fault) {
	fmt.Fprintf(w, "tbcluster: %s\n", plain(f.What))
	for _, line := range []struct{ label, text string }{
		{"where", f.Where}, {"why", f.Why}, {"do", f.Fix},
	} {
		if line.text == "" {
			continue
		}
		for i, part := range strings.Split(strings.TrimRight(line.text, "\n"), "\n") {
			label := line.label + ":"
			if i > 0 {
				label = ""
			}
			fmt.Fprintf(w, "  %-6s %s\n", label, plain(part))
		}
	}
}

// faultJSON is an error with -o json, on standard error.
type faultJSON struct {
	Reason   string            `json:"reason"`
	What     string            `json:"what"`
	Where    string            `json:"where"`
	Why      string            `json:"why"`
	Fix      string            `json:"fix"`
	ExitCode int               `json:"exit_code"`
	Meta     map[string]string `json:"meta,omitempty"`
}

func printFaultJSON(w io.Writer, f *fault.Fault) {
	writeJSON(w, struct {
		Error faultJSON `json:"error"`
	}{faultJSON{string(f.Reason), f.What, f.Where, f.Why, f.Fix, f.Exit(), f.Meta}})
}

// writeJSON prints v as one indented JSON document.
func writeJSON(w io.Writer, v any) {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		panic(err) // our own structs of strings and numbers
	}
}
