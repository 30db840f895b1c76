package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type psOptions struct {
	g   *globals
	all bool
}

func newPsCommand(g *globals) *cobra.Command {
	o := &psOptions{g: g}
	cmd := &cobra.Command{
		Use:     "ps",
		Short:   "List instances and their ranks",
		GroupID: groupModels,
		Long: `Lists the instances of the cluster, and under each its ranks: one process on
one node each.

"ready" means that a completion came back from it just now, not that a process
runs. "degraded" means that it was ready and the last check did not come back in
time. Instances that have ended are listed with --all; "tbcluster logs" has their
last lines.` + exitHelp(),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runPs(cmd.Context(), o) },
	}
	cmd.Flags().BoolVarP(&o.all, "all", "a", false, "also those that have ended")
	return cmd
}

// instancesJSON is `tbcluster ps -o json`.
type instancesJSON struct {
	Instances []instanceJSON `json:"instances"`
}

func runPs(ctx context.Context, o *psOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	resp, err := c.instance.List(ctx, &tbv1.ListInstancesRequest{})
	if err != nil {
		return err
	}
	var shown []*tbv1.Instance
	ended := 0
	for _, i := range resp.GetInstances() {
		if instanceEnded(i) {
			ended++
			if !o.all {
				continue
			}
		}
		shown = append(shown, i)
	}
	if o.g.json() {
		writeJSON(o.g.out, instancesJSON{mapped(shown, toInstanceJSON)})
		return nil
	}
	if len(shown) == 0 {
		if ended > 0 {
			o.g.printf("no instance runs; %s ended (tbcluster ps --all)\n", count(ended, "instance"))
		} else {
			o.g.printf("no instance runs; `tbcluster place MODEL` starts one\n")
		}
		return nil
	}
	writeInstances(o.g.out, shown, time.Now())
	return nil
}

// instanceEnded reports whether nothing of it runs any more.
func instanceEnded(i *tbv1.Instance) bool {
	switch i.GetState() {
	case tbv1.InstanceState_INSTANCE_STATE_STOPPED, tbv1.InstanceState_INSTANCE_STATE_FAILED:
		return true
	}
	return false
}

// writeInstances prints instances with their ranks.
func writeInstances(w io.Writer, list []*tbv1.Instance, now time.Time) {
	t := newTable("INSTANCE", "STATE", "MODEL", "ENGINE", "RANK>", "NODE", "PID>", "RANK STATE", "SINCE>", "TOKENS/S>", "WHY")
	for _, i := range list {
		state := instanceStateWord(i.GetState())
		if i.GetState() == tbv1.InstanceState_INSTANCE_STATE_LOADING && i.GetStepsTotal() > 0 {
			state += fmt.Sprintf(" %d/%d", i.GetStepsDone(), i.GetStepsTotal())
		}
		speed := "-"
		if i.GetTokensPerSecond() > 0 {
			speed = fmt.Sprintf("%.0f", i.GetTokensPerSecond())
		}
		row := []string{i.GetName(), state, i.GetModel(), i.GetEngine(), "-", "-", "-", "-", agoText(now, i.GetStateSince().AsTime()), speed, firstLine(i.GetReason())}
		if len(i.GetRanks()) == 0 {
			t.add(row...)
		}
		for n, r := range i.GetRanks() {
			if n > 0 {
				row = make([]string, len(row))
			}
			pid := "-"
			if r.GetPid() != 0 {
				pid = fmt.Sprint(r.GetPid())
			}
			rankState := rankStateWord(r.GetState())
			if r.GetExitStatus() != "" {
				rankState += " (" + r.GetExitStatus() + ")"
			}
			copy(row[4:8], []string{fmt.Sprint(r.GetIndex()), r.GetNodeName(), pid, rankState})
			t.add(row...)
		}
	}
	t.write(w)
}

// firstLine returns s up to its first line break.
func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// instanceFault says that an instance is not what was hoped for, in the words
// of the engine and of the ranks that ended.
func instanceFault(i *tbv1.Instance) *fault.Fault {
	why := []string{}
	if i.GetReason() != "" {
		why = append(why, i.GetReason())
	}
	for _, r := range i.GetRanks() {
		if r.GetExitStatus() == "" {
			continue
		}
		why = append(why, fmt.Sprintf("rank %d on %s ended: %s", r.GetIndex(), r.GetNodeName(), r.GetExitStatus()))
		for _, l := range r.GetLastLines() {
			why = append(why, "  "+l)
		}
	}
	f := &fault.Fault{
		Reason: fault.EngineFailed,
		What:   fmt.Sprintf("instance %s did not get ready: it is %s", i.GetName(), instanceStateWord(i.GetState())),
		Why:    strings.Join(why, "\n"),
		Fix:    fmt.Sprintf("`tbcluster logs %s` has all it said", i.GetName()),
	}
	if e := i.GetError(); e != nil {
		f.Reason = failureFault(e).Reason
		if e.GetFix() != "" {
			f.Fix = e.GetFix()
		}
	}
	return f
}
