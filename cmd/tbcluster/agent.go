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
	g        *globals
	root     bool
	rootHalf int
	verbose  bool
	paths    agent.Paths
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
shows the commands that set them.` + exitHelp(fault.StillRunning, fault.ConfigInvalid, fault.StateTooNew, fault.NoPermission, fault.FileIO, fault.PortInUse),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runAgent(cmd.Context(), o) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.root, "root", false, "run in two halves, one of them with root's rights")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log more")
	f.StringVar(&o.paths.State, "state-dir", o.paths.State, "directory of keys and state")
	f.StringVar(&o.paths.Run, "run-dir", o.paths.Run, "directory of the sockets")
	f.StringVar(&o.paths.Config, "config", o.paths.Config, "configuration file; need not exist")
	f.IntVar(&o.rootHalf, "root-half", 0, "descriptor of the root half")
	if err := f.MarkHidden("root-half"); err != nil {
		panic(err) // the flag is declared one line above
	}
	return cmd
}

func runAgent(ctx context.Context, o *agentOptions) error {
	setName("tbcluster")
	p := agent.Process{Paths: o.paths, Version: buildVersion(), Verbose: o.verbose, Stderr: o.g.errOut, RootHalf: o.rootHalf}
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
