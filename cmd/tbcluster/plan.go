package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// placementOptions are the flags that plan and place share.
type placementOptions struct {
	model      string
	nodes      []string
	engine     string
	ranks      uint32
	context    uint32
	name       string
	insecure   bool
	copy       bool
	engineArgs []string
}

// addFlags declares the flags on cmd.
func (p *placementOptions) addFlags(g *globals, cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&p.nodes, "node", nil, "use only these nodes (may be given several times, or a,b)")
	f.StringVar(&p.engine, "engine", "", "use this engine, else the first that fits")
	f.Uint32Var(&p.ranks, "ranks", 0, "spread over at least this many nodes, else as few as fit")
	f.Uint32Var(&p.context, "context", 0, "context length in tokens (not given: the model's own, but no more than 4096)")
	f.StringVar(&p.name, "name", "", "name of the instance, else one made from the model's")
	f.BoolVar(&p.copy, "copy", false, "copy the model to the nodes that lack it")
	f.BoolVar(&p.insecure, "insecure-ranks", false, "start several ranks though their ports cannot be closed to the LAN")
	f.StringArrayVar(&p.engineArgs, "engine-arg", nil, "a further argument for the engine, as it takes it (may be given several times)")
	completeFlag(cmd, "node", complete(g, -1, nodeNames))
	completeFlag(cmd, "engine", cobra.FixedCompletions([]string{"llamacpp"}, cobra.ShellCompDirectiveNoFileComp))
}

// placement returns what is asked for as the API has it.
func (p *placementOptions) placement() *tbv1.Placement {
	return &tbv1.Placement{
		Model: p.model, Nodes: p.nodes, Engine: p.engine, MinRanks: p.ranks, ContextTokens: p.context,
		Name: p.name, InsecureRanks: p.insecure, EngineArgs: p.engineArgs, CopyMissing: p.copy,
	}
}

// placementFaults are the reasons for which plan and place end.
var placementFaults = []fault.Reason{
	fault.ModelUnknown, fault.ModelAmbiguous, fault.ModelBroken, fault.ModelIncomplete, fault.NodeUnknown,
	fault.NodeDown, fault.EngineMissing, fault.EngineMismatch, fault.DoesNotFit, fault.RanksInsecure,
}

type planOptions struct {
	g *globals
	placementOptions
}

func newPlanCommand(g *globals) *cobra.Command {
	o := &planOptions{g: g}
	cmd := &cobra.Command{
		Use:     "plan MODEL",
		Short:   "Say where a model fits, and why",
		GroupID: groupModels,
		Long: `Says what "tbcluster place" with the same words would do, and why: every way to
place the model that was looked at, with the numbers behind the answer. Nothing
is started. NEEDS is what the rank would take of the node's memory, MAY USE what
the node has for it now; COPY says that the model would be copied there first.` + exitHelp(placementFaults...),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: complete(g, 1, modelNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.model = args[0]
			return runPlan(cmd.Context(), o)
		},
	}
	o.addFlags(g, cmd)
	return cmd
}

func runPlan(ctx context.Context, o *planOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	resp, err := c.instance.Plan(ctx, &tbv1.PlanRequest{Placement: o.placement()})
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, toPlanJSON(resp))
	} else {
		writePlan(o.g.out, resp)
	}
	if resp.GetChoice() == nil {
		return planFault(o.model, resp)
	}
	return nil
}

// planFault says that nothing fits, with the reason of every alternative.
func planFault(model string, p *tbv1.PlanResponse) *fault.Fault {
	var why []string
	for _, o := range p.GetAlternatives() {
		why = append(why, rankNodes(o)+": "+o.GetReason())
	}
	return &fault.Fault{
		Reason: fault.DoesNotFit, What: model + " fits nowhere that is allowed", Why: strings.Join(why, "\n"),
		Fix: "stop an instance, allow more nodes, or take a smaller quantisation or --context",
	}
}

// rankNodes names the nodes of an option by rank: "alpha+beta".
func rankNodes(o *tbv1.PlanOption) string {
	var names []string
	for _, r := range o.GetRanks() {
		names = append(names, r.GetNodeName())
	}
	if len(names) == 0 {
		return orDash(o.GetEngine())
	}
	return strings.Join(names, "+")
}

// writePlan prints the model, the choice and every alternative.
func writePlan(w io.Writer, p *tbv1.PlanResponse) {
	m := p.GetModel()
	facts := []string{bytesText(m.GetSizeBytes())}
	for _, f := range []string{m.GetArchitecture(), m.GetQuant()} {
		if f != "" {
			facts = append(facts, f)
		}
	}
	if m.GetLayers() > 0 {
		facts = append(facts, count(int(m.GetLayers()), "layer"))
	}
	fmt.Fprintf(w, "%s (%s)\n", plain(m.GetName()), plain(strings.Join(facts, ", ")))
	if c := p.GetChoice(); c != nil {
		fmt.Fprintf(w, "would run on %s with %s: %s\n", plain(rankNodes(c)), plain(c.GetEngine()), plain(c.GetReason()))
	} else {
		fmt.Fprintln(w, "fits nowhere")
	}
	if len(p.GetAlternatives()) == 0 && p.GetChoice() == nil {
		return
	}
	fmt.Fprintln(w)
	t := newTable("", "ENGINE", "RANK>", "NODE", "ROLE", "LAYERS>", "NEEDS>", "MAY USE>", "COPY", "WHY")
	row := func(mark string, o *tbv1.PlanOption) {
		first := []string{mark, o.GetEngine(), "-", "-", "-", "-", "-", "-", "", firstLine(o.GetReason())}
		if len(o.GetRanks()) == 0 {
			t.add(first...)
		}
		for i, r := range o.GetRanks() {
			if i > 0 {
				first = make([]string, len(first))
			}
			must := ""
			if r.GetMustCopy() && o.GetFeasible() {
				must = "yes"
			}
			// What was refused before it was worked out has no layers and no needs.
			layers, needs := "-", "-"
			if r.GetLayers() > 0 {
				layers = fmt.Sprint(r.GetLayers())
			}
			if r.GetNeedBytes() > 0 {
				needs = memoryText(r.GetNeedBytes())
			}
			copy(first[2:9], []string{fmt.Sprint(i), r.GetNodeName(), orDash(r.GetRole()), layers, needs, memoryText(r.GetBudgetBytes()), must})
			t.add(first...)
		}
	}
	if c := p.GetChoice(); c != nil {
		row("->", c)
	}
	for _, o := range p.GetAlternatives() {
		if sameOption(o, p.GetChoice()) {
			continue
		}
		mark := "no"
		if o.GetFeasible() {
			mark = "or"
		}
		row(mark, o)
	}
	t.write(w)
}

// sameOption reports whether two options are the same engine on the same nodes.
func sameOption(a, b *tbv1.PlanOption) bool {
	return b != nil && a.GetEngine() == b.GetEngine() && rankNodes(a) == rankNodes(b) && a.GetFeasible() == b.GetFeasible()
}
