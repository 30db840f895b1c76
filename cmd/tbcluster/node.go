package main

import (
	"context"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func newNodeCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "node",
		Short:   "List, forget or rename nodes",
		GroupID: groupCluster,
		Long:    `Without a further word: the same as "tbcluster node list".` + exitHelp(),
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runNodeList(cmd.Context(), g) },
	}
	cmd.AddCommand(
		&cobra.Command{
			Use:     "list",
			Aliases: []string{"ls"},
			Short:   "List the nodes of the cluster",
			Long: `Lists every node that has paired, those that are down included. The star marks
the one that answers; the ID is what two people compare to be sure.` + exitHelp(),
			Args:              cobra.NoArgs,
			ValidArgsFunction: cobra.NoFileCompletions,
			RunE:              func(cmd *cobra.Command, _ []string) error { return runNodeList(cmd.Context(), g) },
		},
		&cobra.Command{
			Use:   "forget NODE",
			Short: "Drop a node that is down from the lists",
			Long: `Drops a node that is down from the cluster's lists. It stays paired: when it
comes back it is listed again. For one that is not to come back, because it was
given away or installed anew, "tbcluster pair --revoke NODE" puts it out.` + exitHelp(fault.NodeUnknown, fault.NodeAmbiguous, fault.NodeInUse, fault.Denied),
			Args:              cobra.ExactArgs(1),
			ValidArgsFunction: complete(g, 1, nodeNames),
			RunE: func(cmd *cobra.Command, args []string) error {
				return runNodeForget(cmd.Context(), g, args[0])
			},
		},
		&cobra.Command{
			Use:   "rename NODE NAME",
			Short: "Give a node another short name",
			Long: `Gives a node another name, which all nodes learn. The machine's host name stays
as it is. A name has 1 to 63 of a-z, 0-9 and "-".` + exitHelpAnd(map[int]string{fault.ExitPrecondition: "another node has that name"}, fault.NoAgent, fault.Interrupted, fault.NodeUnknown, fault.NodeAmbiguous, fault.NodeDown, fault.NodeInUse, fault.Denied),
			Args:              cobra.ExactArgs(2),
			ValidArgsFunction: complete(g, 1, nodeNames),
			RunE: func(cmd *cobra.Command, args []string) error {
				return runNodeRename(cmd.Context(), g, args[0], args[1])
			},
		},
	)
	return cmd
}

// nodesJSON is `tbcluster node list -o json`.
type nodesJSON struct {
	Nodes []nodeJSON `json:"nodes"`
}

func runNodeList(ctx context.Context, g *globals) error {
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
		writeJSON(g.out, nodesJSON{mapped(state.GetNodes(), toNodeJSON)})
		return nil
	}
	t := newTable("NODE", "STATE", "ROLE", "MEMORY>", "ADDRESS", "ID")
	for _, n := range state.GetNodes() {
		name := n.GetName()
		if n.GetSelf() {
			name += "*"
		}
		t.add(name, nodeStateWord(n.GetState()), roleWord(n.GetRole()), memoryText(n.GetMemory().GetTotalBytes()), orDash(n.GetNodeAddress()), n.GetId())
	}
	t.write(g.out)
	return nil
}

func runNodeForget(ctx context.Context, g *globals, node string) error {
	c, err := connect(ctx, g)
	if err != nil {
		return err
	}
	defer c.close()
	if _, err := c.node.Forget(ctx, &tbv1.ForgetRequest{Node: node}); err != nil {
		return err
	}
	return said(g, "%s is no longer listed", node)
}

func runNodeRename(ctx context.Context, g *globals, node, name string) error {
	c, err := connect(ctx, g)
	if err != nil {
		return err
	}
	defer c.close()
	resp, err := c.node.Rename(ctx, &tbv1.RenameRequest{Node: node, Name: name})
	if err != nil {
		return err
	}
	if g.json() {
		writeJSON(g.out, toNodeJSON(resp.GetNode()))
		return nil
	}
	g.printf("%s is called %s now\n", plain(node), plain(resp.GetNode().GetName()))
	return nil
}

// doneJSON is what commands print with -o json that have nothing else to tell.
type doneJSON struct {
	Done string `json:"done"`
}

// said prints what was done to name.
func said(g *globals, format, name string) error {
	if g.json() {
		writeJSON(g.out, doneJSON{name})
		return nil
	}
	g.printf(format+"\n", plain(name))
	return nil
}
