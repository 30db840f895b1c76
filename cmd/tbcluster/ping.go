package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type pingOptions struct {
	g     *globals
	node  string
	count uint32
}

func newPingCommand(g *globals) *cobra.Command {
	o := &pingOptions{g: g}
	cmd := &cobra.Command{
		Use:     "ping NODE",
		Short:   "Try each way to a node and say which one is used",
		GroupID: groupHelp,
		Long: `Tries every way to a node in turn, each cable and the LAN, bound to that very
interface, and prints the median round trip of each.

The star below CONTROL marks the way that the agents use now for their own talk.
Models always go over cables that are proven, whatever is marked here. A way that
fails says why; if every way fails, the command ends with 7.` + exitHelp(fault.NodeUnknown, fault.NodeAmbiguous, fault.NodeDown),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: complete(g, 1, nodeNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.node = args[0]
			return runPing(cmd.Context(), o)
		},
	}
	cmd.Flags().Uint32VarP(&o.count, "count", "c", 3, "round trips for each way")
	return cmd
}

// pingJSON is `tbcluster ping -o json`.
type pingJSON struct {
	Node string        `json:"node"`
	Ways []pingWayJSON `json:"ways"`
}

func runPing(ctx context.Context, o *pingOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	resp, err := c.node.Ping(ctx, &tbv1.PingRequest{Node: o.node, Count: o.count})
	if err != nil {
		return err
	}
	works, failures := false, []string{}
	for _, w := range resp.GetWays() {
		works = works || w.GetError() == ""
		if w.GetError() != "" {
			failures = append(failures, strings.Join(slices.DeleteFunc([]string{w.GetKind(), w.GetInterface(), w.GetAddress()}, func(s string) bool { return s == "" }), " ")+": "+w.GetError())
		}
	}
	if o.g.json() {
		writeJSON(o.g.out, pingJSON{o.node, mapped(resp.GetWays(), toPingWayJSON)})
	} else if len(resp.GetWays()) > 0 {
		t := newTable("WAY", "INTERFACE", "ADDRESS", "ROUND TRIP>", "CONTROL", "WHY")
		for _, w := range resp.GetWays() {
			used := ""
			if w.GetUsed() {
				used = "*"
			}
			t.add(w.GetKind(), orDash(w.GetInterface()), orDash(w.GetAddress()), rttText(w.GetRttUs()), used, w.GetError())
		}
		t.write(o.g.out)
	}
	if !works {
		why := "no way to it is known"
		if len(failures) > 0 {
			why = strings.Join(failures, "\n")
		}
		return fault.New(fault.NodeDown, "no way to "+o.node+" works", errors.New(why), "see whether it is on and its agent runs; `tbcluster status` says since when it is gone").At(o.node)
	}
	return nil
}
