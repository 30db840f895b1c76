package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func newModelsCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "models",
		Short:   "List models; add or remove one",
		GroupID: groupModels,
		Long: `Without a further word: the same as "tbcluster models list".

Models are found by themselves in the caches of Hugging Face, Exo, LM Studio and
llama.cpp, in ~/models, and in the directories that the setting model_dirs
names.` + exitHelp(),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runModelsList(cmd.Context(), &modelsListOptions{g: g})
		},
	}
	cmd.AddCommand(newModelsListCommand(g), newModelsAddCommand(g), newModelsRmCommand(g))
	return cmd
}

type modelsListOptions struct {
	g    *globals
	scan bool
}

func newModelsListCommand(g *globals) *cobra.Command {
	o := &modelsListOptions{g: g}
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the models that any node has, and where",
		Long: `Lists every model of the cluster with the nodes that have it.

A node in brackets has only part of the model: "tbcluster models list -o json"
says what is missing.` + exitHelp(),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runModelsList(cmd.Context(), o) },
	}
	cmd.Flags().BoolVar(&o.scan, "scan", false, "look through this node's directories anew first")
	return cmd
}

// modelsJSON is `tbcluster models list -o json`.
type modelsJSON struct {
	Models []modelJSON `json:"models"`
}

func runModelsList(ctx context.Context, o *modelsListOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	if o.scan {
		if _, err := c.model.Scan(ctx, &tbv1.ScanRequest{}); err != nil {
			return err
		}
	}
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, modelsJSON{mapped(state.GetModels(), toModelJSON)})
		return nil
	}
	if len(state.GetModels()) == 0 {
		o.g.printf("no node has a model; put one into ~/models of a node, or `tbcluster models add PATH` there\n")
		return nil
	}
	writeModels(o.g.out, state.GetModels())
	return nil
}

// writeModels prints models and who has them.
func writeModels(w io.Writer, models []*tbv1.Model) {
	t := newTable("MODEL", "SIZE>", "FORMAT", "QUANT", "NODES")
	for _, m := range models {
		var nodes []string
		for _, c := range m.GetCopies() {
			name := c.GetNodeName()
			if !c.GetComplete() {
				name = "(" + name + ")"
			}
			nodes = append(nodes, name)
		}
		t.add(m.GetName(), bytesText(m.GetSizeBytes()), orDash(m.GetFormat()), orDash(m.GetQuant()), strings.Join(nodes, " "))
	}
	t.write(w)
}

type modelsAddOptions struct {
	g    *globals
	path string
}

func newModelsAddCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "add PATH",
		Short: "Make a model file or directory known that lies elsewhere",
		Long: `Makes a GGUF file or a directory with safetensors known as a model on the node
that answers. Nothing is copied; the files stay where they are.` + exitHelp(fault.FileMissing, fault.FileDenied, fault.ModelBroken, fault.ModelIncomplete, fault.Denied),
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runModelsAdd(cmd.Context(), &modelsAddOptions{g: g, path: args[0]})
		},
	}
}

func runModelsAdd(ctx context.Context, o *modelsAddOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	path := o.path
	if !filepath.IsAbs(path) {
		if c.endpoint.foreign {
			return fault.Newf(fault.Usage, "give the whole path as the node sees it, from /", "%s is a path of this machine, but node alpha of the lab is asked", path)
		}
		if path, err = filepath.Abs(path); err != nil {
			return fault.New(fault.FileIO, "find the working directory", err, "give the whole path, from /")
		}
	}
	resp, err := c.model.Add(ctx, &tbv1.AddRequest{Path: path})
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, toModelJSON(resp.GetModel()))
		return nil
	}
	o.g.printf("%s is known now (%s)\n", plain(resp.GetModel().GetName()), bytesText(resp.GetModel().GetSizeBytes()))
	return nil
}

type modelsRmOptions struct {
	g           *globals
	model, node string
	dryRun, yes bool
}

func newModelsRmCommand(g *globals) *cobra.Command {
	o := &modelsRmOptions{g: g}
	cmd := &cobra.Command{
		Use:   "rm MODEL",
		Short: "Delete a model's files on one node",
		Long: `Names the files of the model on one node (the one that answers, or --node),
asks, and deletes them. Copies on other nodes stay. A model that was made known
with "models add" is only forgotten; its files stay.` + exitHelp(fault.ModelUnknown, fault.ModelAmbiguous, fault.ModelInUse, fault.NodeUnknown, fault.NodeDown, fault.Denied, fault.FileIO, fault.Interrupted),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: complete(g, 1, modelNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.model = args[0]
			return runModelsRm(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.node, "node", "", "the node to delete it on")
	f.BoolVarP(&o.dryRun, "dry-run", "n", false, "only say what would be deleted")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	completeFlag(cmd, "node", complete(g, -1, nodeNames))
	return cmd
}

// removedJSON is `tbcluster models rm -o json`.
type removedJSON struct {
	Paths      []string `json:"paths"`
	FreedBytes uint64   `json:"freed_bytes"`
	DryRun     bool     `json:"dry_run"`
}

func runModelsRm(ctx context.Context, o *modelsRmOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	resp, err := c.model.Remove(ctx, &tbv1.RemoveRequest{Model: o.model, Node: o.node, ValidateOnly: true})
	if err != nil {
		return err
	}
	if !o.dryRun {
		if !o.yes {
			if !o.g.json() { // where an error is one document
				for _, p := range resp.GetPaths() {
					fmt.Fprintf(o.g.errOut, "  %s\n", plain(p))
				}
			}
			if err := confirm(ctx, o.g, fmt.Sprintf("delete %s (%s)?", count(len(resp.GetPaths()), "path"), bytesText(resp.GetFreedBytes())), "--yes"); err != nil {
				return err
			}
		}
		if resp, err = c.model.Remove(ctx, &tbv1.RemoveRequest{Model: o.model, Node: o.node}); err != nil {
			return err
		}
	}
	if o.g.json() {
		writeJSON(o.g.out, removedJSON{texts(resp.GetPaths()), resp.GetFreedBytes(), o.dryRun})
		return nil
	}
	verb := "deleted"
	if o.dryRun {
		verb = "would delete"
	}
	for _, p := range resp.GetPaths() {
		o.g.printf("%s %s\n", verb, plain(p))
	}
	o.g.printf("%s %s\n", verb, bytesText(resp.GetFreedBytes()))
	return nil
}

// completeFlag makes the tab key complete the value of a flag.
func completeFlag(cmd *cobra.Command, flag string, f completer) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // the flag was not declared before: a mistake of ours that every start would show
	}
}
