package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	"tbcluster/rig"
)

type runOptions struct {
	g             *globals
	record, trace string
	dir           string
}

func newRunCommand(g *globals) *cobra.Command {
	o := &runOptions{g: g}
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Play a scenario file on a rig of its own",
		Long: `Brings up what the file describes, plays its steps, and takes everything down. It
ends at the first step that fails, and when a kernel reports a fault of its own.

--record writes the scenario as it was played: when each step began, how long it
took, what it came to. That file is a scenario again, with the same times; it has
no comments.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runScenario(cmd.Context(), o, args[0]) },
	}
	cmd.Flags().StringVar(&o.record, "record", "", "file for the scenario as it was played")
	cmd.Flags().StringVar(&o.trace, "trace", "", `file for what happens on the cables ("-" is standard error)`)
	cmd.Flags().StringVar(&o.dir, "dir", "", "directory for consoles and logs (default a temporary one)")
	return cmd
}

func runScenario(ctx context.Context, o *runOptions, name string) (err error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return fault.New(fault.FileMissing, "read a scenario", err, "").At(name)
	}
	s, err := rig.ParseScenario(name, b)
	if err != nil {
		return err
	}
	if len(s.Steps) == 0 {
		return fault.New(fault.ConfigInvalid, "read a scenario", errors.New("it has no steps"), "docs/rig.md describes [[step]]; `tbcluster-rig up` brings up a rig and does nothing to it").At(name)
	}
	tracer, done, err := openTrace(o.g, o.trace)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	played, err := rig.Run(ctx, s, rig.Options{Dir: o.dir, Trace: tracer, Log: func(line string) { o.g.notef("%s", line) }})
	return errors.Join(err, record(o.record, played))
}

func record(name string, s rig.Scenario) error {
	if name == "" {
		return nil
	}
	b, err := s.Encode()
	if err == nil {
		if err = os.WriteFile(name, b, 0o644); err != nil {
			err = fault.New(fault.FileIO, "write the scenario as it was played", err, "").At(name)
		}
	}
	return err
}

type walkOptions struct {
	g           *globals
	t           topologyFlags
	steps, runs int
	record      string
}

func newWalkCommand(g *globals) *cobra.Command {
	o := &walkOptions{g: g}
	cmd := &cobra.Command{
		Use:   "walk",
		Short: "Do random things to a rig, and check after each that all is well",
		Long: `Plugs, pulls, flaps, reloads, crashes, boots, and sends bytes, as a seed decides.
After each step every host has to show what is plugged, bytes have to arrive as
they were sent, and no kernel may have reported a fault of its own.

--runs N makes N runs with the seeds from --seed on, each on a fresh rig and with
a line that sums it up: a run that failed, or one more, is one seed.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runWalk(cmd.Context(), o) },
	}
	o.t.add(cmd.Flags())
	cmd.Flags().IntVar(&o.steps, "steps", 100, "steps of one run")
	cmd.Flags().IntVar(&o.runs, "runs", 1, "how many runs")
	cmd.Flags().StringVar(&o.record, "record", "", "file for the last run as a scenario")
	return cmd
}

func runWalk(ctx context.Context, o *walkOptions) error {
	for i := range o.runs {
		topology, err := o.t.topology()
		if err != nil {
			return err
		}
		topology.Seed += uint64(i)
		if err := o.run(ctx, topology); err != nil {
			return err
		}
	}
	return nil
}

func (o *walkOptions) run(ctx context.Context, topology rig.Topology) (err error) {
	begun := time.Now()
	r, err := rig.Up(ctx, topology, rig.Options{Log: func(line string) { o.g.notef("%s", line) }})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := r.Settle(ctx); err != nil {
		return err
	}
	o.g.notef("up after %.1f s", time.Since(begun).Seconds())
	played, sum, err := r.Walk(ctx, topology.Seed, o.steps)
	fmt.Fprintln(o.g.out, sum)
	if err != nil {
		fmt.Fprint(o.g.errOut, r.Describe())
	}
	return errors.Join(err, record(o.record, played))
}
