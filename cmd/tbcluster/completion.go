package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// completionDeadline is how long a press of the tab key may take.
const completionDeadline = 700 * time.Millisecond

func newCompletionCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "completion bash|zsh|fish|powershell",
		Short:   "Print the completion script for a shell",
		GroupID: groupOther,
		Long: `Prints a script that makes the tab key complete commands and flags, and, by
asking the running agent, names of nodes, models, instances and transfers.

  bash        source <(tbcluster completion bash)
  zsh         tbcluster completion zsh > "${fpath[1]}/_tbcluster"
  fish        tbcluster completion fish | source` + exitHelpAlone(),
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			var err error
			switch args[0] {
			case "bash":
				err = root.GenBashCompletionV2(g.out, true)
			case "zsh":
				err = root.GenZshCompletion(g.out)
			case "fish":
				err = root.GenFishCompletion(g.out, true)
			case "powershell":
				err = root.GenPowerShellCompletionWithDesc(g.out)
			}
			if err != nil {
				return fault.New(fault.FileIO, "write the completion script", err, "check where the output goes")
			}
			return nil
		},
	}
}

// completer is what cobra calls on a press of the tab key.
type completer = func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective)

// complete returns a completer that asks the running agent. It offers names
// for the first max arguments (max < 0: all) and stays silent when no agent
// answers in time: a press of the tab key is no place for errors.
func complete(g *globals, max int, names func(*tbv1.ClusterState) []cobra.Completion) completer {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if max >= 0 && len(args) >= max {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names(completionState(cmd.Context(), g)), cobra.ShellCompDirectiveNoFileComp
	}
}

// completionState returns the state of the cluster, or an empty one when it
// cannot be had quickly.
func completionState(ctx context.Context, g *globals) *tbv1.ClusterState {
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionDeadline)
	defer cancel()
	quiet := *g
	quiet.errOut = discard{}
	c, err := connect(ctx, &quiet)
	if err != nil {
		return &tbv1.ClusterState{}
	}
	defer c.close()
	resp, err := c.cluster.GetState(ctx, &tbv1.GetStateRequest{})
	if err != nil {
		return &tbv1.ClusterState{}
	}
	return resp.GetState()
}

// discard swallows what is written to it.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func nodeNames(s *tbv1.ClusterState) []cobra.Completion {
	var out []cobra.Completion
	for _, n := range s.GetNodes() {
		out = append(out, cobra.CompletionWithDesc(n.GetName(), nodeStateWord(n.GetState())))
	}
	return out
}

func modelNames(s *tbv1.ClusterState) []cobra.Completion {
	var out []cobra.Completion
	for _, m := range s.GetModels() {
		out = append(out, cobra.CompletionWithDesc(m.GetName(), bytesText(m.GetSizeBytes())))
	}
	return out
}

func instanceNames(s *tbv1.ClusterState) []cobra.Completion {
	var out []cobra.Completion
	for _, i := range s.GetInstances() {
		out = append(out, cobra.CompletionWithDesc(i.GetName(), instanceStateWord(i.GetState())))
	}
	return out
}
