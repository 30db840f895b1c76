package main

import (
	"context"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// exitFindings is how doctor ends when a finding is an error.
const exitFindings = fault.ExitFailed

type doctorOptions struct {
	g     *globals
	nodes []string
}

func newDoctorCommand(g *globals) *cobra.Command {
	o := &doctorOptions{g: g}
	return &cobra.Command{
		Use:     "doctor [NODE...]",
		Short:   "Look for what is wrong, and say what to do",
		GroupID: groupHelp,
		Long: `Runs every check on the named nodes, or on all, and prints what it finds, worst
first: what it means, what was seen, what to do. "nothing to look at" says that
every check passed on every node that was asked.` + exitHelpAnd(map[int]string{exitFindings: "every check was made, and a finding is an error", fault.ExitPartial: "a node could not be asked"},
			fault.NoAgent, fault.NodeUnknown, fault.NodeAmbiguous, fault.Partial, fault.Interrupted),
		ValidArgsFunction: complete(g, -1, nodeNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.nodes = args
			return runDoctor(cmd.Context(), o)
		},
	}
}

// doctorJSON is `tbcluster doctor -o json`.
type doctorJSON struct {
	Findings []findingJSON `json:"findings"`
	Failures []*faultJSON  `json:"failures"`
}

func runDoctor(ctx context.Context, o *doctorOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	resp, err := c.diagnosis.Check(ctx, &tbv1.CheckRequest{Nodes: o.nodes})
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, doctorJSON{mapped(resp.GetFindings(), toFindingJSON), mapped(resp.GetFailures(), toFailureJSON)})
	} else {
		writeFindings(o.g.out, resp.GetFindings())
		for _, f := range resp.GetFailures() {
			printFault(o.g.errOut, failureFault(f))
		}
		if len(resp.GetFindings()) == 0 && len(resp.GetFailures()) == 0 {
			o.g.printf("nothing to look at\n")
		}
	}
	if len(resp.GetFailures()) > 0 {
		return exitStatus(fault.ExitPartial)
	}
	for _, f := range resp.GetFindings() {
		if f.GetSeverity() == tbv1.Severity_SEVERITY_ERROR {
			return exitStatus(exitFindings)
		}
	}
	return nil
}
