package main

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type stopOptions struct {
	g              *globals
	names          []string
	remove, detach bool
}

func newStopCommand(g *globals) *cobra.Command {
	o := &stopOptions{g: g}
	cmd := &cobra.Command{
		Use:     "stop INSTANCE...",
		Short:   "End instances: all their ranks on all nodes",
		GroupID: groupModels,
		Long: `Asks every rank of the instance to end, waits for it (up to a minute: an engine
that is killed can leave memory behind), and says so. Its log stays until you
start it anew or stop it with --rm.` + exitHelp(fault.InstanceUnknown, fault.InstanceAmbiguous, fault.NodeDown, fault.Denied, fault.Interrupted),
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: complete(g, -1, instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.names = args
			return runStop(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&o.remove, "rm", false, "also remove its record and logs")
	cmd.Flags().BoolVarP(&o.detach, "detach", "d", false, "return at once instead of waiting until it has ended")
	return cmd
}

func runStop(ctx context.Context, o *stopOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	var ended []*tbv1.Instance
	for _, name := range o.names {
		i, err := stopInstance(ctx, c, name, o)
		if err != nil {
			return err
		}
		ended = append(ended, i)
		if !o.g.json() {
			o.g.printf("%s %s\n", plain(i.GetName()), stoppedText(i, o.remove))
		}
	}
	if o.g.json() {
		writeJSON(o.g.out, instancesJSON{mapped(ended, toInstanceJSON)})
	}
	return nil
}

func stoppedText(i *tbv1.Instance, removed bool) string {
	switch {
	case !instanceEnded(i):
		return "is stopping"
	case removed:
		return "has ended and is removed"
	}
	return "has ended"
}

// stopInstance ends one instance and waits until it has ended.
func stopInstance(ctx context.Context, c *client, name string, o *stopOptions) (*tbv1.Instance, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Watch first: with --rm the instance may be gone before a watch could begin.
	stream, err := c.instance.Watch(ctx, &tbv1.WatchInstanceRequest{Instance: name})
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	resp, err := c.instance.Stop(ctx, &tbv1.StopInstanceRequest{Instance: name, Remove: o.remove})
	if err != nil {
		return nil, err
	}
	inst := resp.GetInstance()
	if inst == nil {
		inst = first.GetInstance()
	}
	if inst == nil {
		inst = &tbv1.Instance{Name: name}
	}
	for !o.detach && !instanceEnded(inst) {
		ev, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF), fault.Is(err, fault.InstanceUnknown):
			// The watch ends when the instance has.
			inst.State = tbv1.InstanceState_INSTANCE_STATE_STOPPED
		case err != nil:
			return nil, err
		default:
			inst = ev.GetInstance()
		}
	}
	return inst, nil
}
