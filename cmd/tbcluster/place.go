package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type placeOptions struct {
	g *globals
	placementOptions
	planID string
	detach bool
	start  time.Time // that the steps are timed from
}

func newPlaceCommand(g *globals) *cobra.Command {
	o := &placeOptions{g: g}
	cmd := &cobra.Command{
		Use:     "place MODEL",
		Short:   "Run a model where it fits",
		GroupID: groupModels,
		Long: `Starts an instance of the model where it fits ("tbcluster plan MODEL" says where
and why) and follows it until it is ready: until a completion came back from it.

Ctrl-C stops following, not the instance; "tbcluster stop NAME" ends it. An
instance that fails takes all its ranks along, and the command ends with the
engine's own words.` + exitHelp(append([]fault.Reason{fault.EngineFailed, fault.InstanceExists, fault.PlanStale, fault.PortInUse, fault.Denied, fault.UserUnmapped, fault.Interrupted}, placementFaults...)...),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: complete(g, 1, modelNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.model = args[0]
			return runPlace(cmd.Context(), o)
		},
	}
	o.addFlags(g, cmd)
	cmd.Flags().StringVar(&o.planID, "plan", "", "place exactly this plan, by its ID (tbcluster plan -o json tells it); fails when the world has changed since")
	cmd.Flags().BoolVarP(&o.detach, "detach", "d", false, "return at once instead of following it until it is ready")
	return cmd
}

func runPlace(ctx context.Context, o *placeOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	inst, err := place(ctx, o.g, c, o)
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, toInstanceJSON(inst))
		return nil
	}
	if o.detach {
		o.g.printf("%s is %s; `tbcluster ps` says how far it is\n", plain(inst.GetName()), instanceStateWord(inst.GetState()))
		return nil
	}
	o.g.printf("%s is ready; try: tbcluster chat %s \"Hello\"\n", plain(inst.GetName()), plain(inst.GetName()))
	return nil
}

// place starts an instance and, unless detached, follows it until it is ready.
// With -o json the steps on the way are not printed.
func place(ctx context.Context, g *globals, c *client, o *placeOptions) (*tbv1.Instance, error) {
	if o.start.IsZero() {
		o.start = time.Now()
	}
	resp, err := c.instance.Place(ctx, &tbv1.PlaceRequest{RequestId: newRequestID(), Placement: o.placement(), PlanId: o.planID})
	if err != nil {
		return nil, err
	}
	inst := resp.GetInstance()
	if o.detach {
		return inst, nil
	}
	out := g.out
	if g.json() {
		out = io.Discard
	}
	inst, err = followInstance(ctx, c, inst, o.start, out)
	if fault.Is(err, fault.Interrupted) && ctx.Err() != nil {
		return nil, fault.New(fault.Interrupted, "stopped following "+inst.GetName()+", which goes on", nil,
			fmt.Sprintf("`tbcluster ps` says how far it is; `tbcluster stop %s` ends it", inst.GetName()))
	}
	return inst, err
}

// followInstance prints each step of an instance until it is ready. An
// instance that ends before that is a fault.
func followInstance(ctx context.Context, c *client, inst *tbv1.Instance, start time.Time, out io.Writer) (*tbv1.Instance, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.instance.Watch(ctx, &tbv1.WatchInstanceRequest{Instance: inst.GetId()})
	if err != nil {
		return inst, err
	}
	last := ""
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return inst, instanceFault(inst)
		}
		if err != nil {
			return inst, err
		}
		inst = resp.GetInstance()
		if line := stepText(inst); line != last {
			fmt.Fprintf(out, "%6.1f s  %s\n", time.Since(start).Seconds(), line)
			last = line
		}
		switch {
		case inst.GetState() == tbv1.InstanceState_INSTANCE_STATE_READY:
			return inst, nil
		case instanceEnded(inst):
			return inst, instanceFault(inst)
		}
	}
}

// stepText says how far an instance has come.
func stepText(i *tbv1.Instance) string {
	s := instanceStateWord(i.GetState())
	if i.GetStepsTotal() > 0 && i.GetState() == tbv1.InstanceState_INSTANCE_STATE_LOADING {
		s += fmt.Sprintf(" %d of %d", i.GetStepsDone(), i.GetStepsTotal())
	}
	nodes := ""
	for n, r := range i.GetRanks() {
		if n > 0 {
			nodes += "+"
		}
		nodes += r.GetNodeName()
	}
	if nodes != "" {
		s += " on " + nodes
	}
	if i.GetReason() != "" && i.GetState() != tbv1.InstanceState_INSTANCE_STATE_READY {
		s += ": " + firstLine(i.GetReason())
	}
	return plain(s)
}
