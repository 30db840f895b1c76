package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"tbcluster/agent"
	"tbcluster/api/fault"
)

type agentOptions struct {
	g           *globals
	root        bool
	undo        bool
	rootHalf    int
	agentSocket string
	slice       string
	verbose     bool
	paths       agent.Paths
}

func newAgentCommand(g *globals) *cobra.Command {
	o := &agentOptions{g: g, paths: agent.DefaultPaths(os.Getuid(), g.getenv)}
	cmd := &cobra.Command{
		Use:     "agent",
		Short:   "Run the agent of this node in the foreground",
		GroupID: groupOther,
		Long: `Runs the agent: the daemon that finds other nodes, keeps the links, and answers
every other command. "tbcluster up" starts it for you, in the background.

With --root it runs in two halves: a small root half that sets addresses and
starts work for users, and the agent itself as a user of its own, without
rights. Without root, everything works but addresses: "tbcluster status" then
shows the commands that set them.

With --root --undo it runs no agent: it ends the ranks that an agent which is
gone left running, takes back the addresses, routes and filter rules that it
made, and says so. "tbcluster down" does that while the agent runs.

--agent-socket and --slice are for systemd, whose units are in the packages.` + exitHelp(fault.StillRunning, fault.ConfigInvalid, fault.StateTooNew, fault.NoPermission, fault.FileIO, fault.PortInUse),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runAgent(cmd.Context(), o) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.root, "root", false, "run in two halves, one of them with root's rights")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log more")
	f.StringVar(&o.paths.State, "state-dir", o.paths.State, "directory of keys and state")
	f.StringVar(&o.paths.Run, "run-dir", o.paths.Run, "directory of the sockets")
	f.StringVar(&o.paths.Config, "config", o.paths.Config, "configuration file; need not exist")
	f.BoolVar(&o.undo, "undo", false, "with --root: take back what an agent that is gone left, and end")
	f.StringVar(&o.agentSocket, "agent-socket", "", "with --root: socket at which systemd starts the agent (else the root half starts it)")
	f.StringVar(&o.slice, "slice", "", "with --root: slice of systemd in which each rank gets a scope of its own")
	f.IntVar(&o.rootHalf, "root-half", 0, "descriptor of the root half")
	if err := f.MarkHidden("root-half"); err != nil {
		panic(err) // the flag is declared one line above
	}
	return cmd
}

func runAgent(ctx context.Context, o *agentOptions) error {
	setName("tbcluster")
	p := agent.Process{Paths: o.paths, Version: buildVersion(), Verbose: o.verbose, Stderr: o.g.errOut, RootHalf: o.rootHalf,
		AgentSocket: o.agentSocket, Slice: o.slice}
	if !o.root && (o.undo || o.agentSocket != "" || o.slice != "") {
		return fault.Newf(fault.Usage, "add --root", "--undo, --agent-socket and --slice are for the root half")
	}
	if o.undo {
		undone, err := agent.RunUndo(ctx, p)
		for _, u := range undone {
			o.g.printf("%s\n", plain(u))
		}
		return err
	}
	if !o.root {
		return agent.RunAgent(ctx, p)
	}
	err := agent.RunRoot(ctx, p)
	var code interface{ ExitCode() int }
	if errors.As(err, &code) {
		return exitStatus(code.ExitCode())
	}
	return err
}
