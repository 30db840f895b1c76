package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"tbcluster/agent/config"
	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/tui"
)

type upOptions struct {
	g   *globals
	lab int
	// labGiven is set where --lab stands on the command line, with whatever number.
	labGiven bool
	demo     bool
	plain    bool
	noColor  bool
	start    time.Time
	// machines makes virtual clusters; tests hand in their own.
	machines machines
	// install fetches engine and model for a lab.
	install func(ctx context.Context, say func(string)) (modelFile string, err error)
	// program starts the agent; empty means this very program.
	program string
}

func newUpCommand(g *globals) *cobra.Command {
	o := &upOptions{g: g, machines: realMachines, install: installForLab}
	cmd := &cobra.Command{
		Use:     "up",
		Short:   "Start what is not running and show the cluster",
		GroupID: groupCluster,
		Long: `Starts this machine's agent if it does not run and opens the screen. Run it on
every machine. Leaving the screen ends nothing: the agent stays ("tbcluster down"
ends it). As root the agent can give addresses to the cables; without root it
does everything else and shows the commands that it would need.

Without a terminal it prints lines instead, and returns when the cluster is
ready: when every node that is paired was heard from or is known to be down, and
every cable between nodes that are up is proven, or has been down for five seconds
since they came. With no other node it is ready at once and says how to pair.

--lab N makes a virtual cluster of N nodes on this machine, or takes the one that
is there, with cables, a LAN, an engine and a small model, and pairs its nodes.
"tbcluster lab" can then cut cables and switch nodes off; "tbcluster lab down"
ends it. --demo also copies the model over a cable, runs it there and asks it
something.` + exitHelp(fault.LabFailed, fault.ConfigInvalid, fault.EngineMissing, fault.EngineFailed, fault.NoPermission, fault.Connection, fault.Timeout, fault.Unsupported, fault.Interrupted),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.start, o.labGiven = time.Now(), cmd.Flags().Changed("lab")
			return runUp(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.lab, "lab", 0, "use a virtual cluster of this many nodes")
	f.BoolVar(&o.demo, "demo", false, "with --lab: copy the model, run it, ask it something")
	f.BoolVar(&o.plain, "plain", false, "print changes as lines instead of the screen, until you stop it")
	f.BoolVar(&o.noColor, "no-color", false, "no colours (as NO_COLOR does)")
	return cmd
}

// step prints what was just done and how long after the start.
func (o *upOptions) step(format string, args ...any) {
	w := o.g.out
	if o.g.json() {
		w = o.g.errOut
	}
	fmt.Fprintf(w, "%6.1f s  %s\n", time.Since(o.start).Seconds(), plain(fmt.Sprintf(format, args...)))
}

// screen reports whether there is a terminal to show the screen on.
func (o *upOptions) screen() bool {
	return !o.plain && !o.g.json() && isTerminal(o.g.in) && isTerminal(o.g.out)
}

// calledAs is what runs this program again from where it was run.
func calledAs() string {
	if called := os.Args[0]; filepath.Base(called) == "tbcluster" {
		return called
	}
	return "tbcluster"
}

func runUp(ctx context.Context, o *upOptions) error {
	if o.lab == 0 && o.labGiven {
		return fault.Newf(fault.Usage, "tbcluster up --lab 3, or `tbcluster up` for this machine itself", "--lab needs a number of nodes")
	}
	if o.lab == 0 && o.demo {
		return fault.Newf(fault.Usage, "tbcluster up --lab 3 --demo", "--demo needs a virtual cluster")
	}
	var c *client
	var err error
	notice := ""
	if o.lab != 0 {
		var report *labReport
		if c, report, err = upLab(ctx, o); err != nil {
			return err
		}
		defer c.close()
		notice = fmt.Sprintf("the lab %q runs; `%s lab down` ends it", report.Lab, calledAs())
		if o.g.json() {
			writeJSON(o.g.out, report)
			return nil
		}
		if !o.screen() {
			o.step("%s", notice)
		}
		for _, line := range report.lines() {
			o.g.printf("%s\n", line)
		}
	} else {
		if c, err = upHere(ctx, o); err != nil {
			return err
		}
		defer c.close()
	}
	switch {
	case o.plain:
		return tui.Plain(ctx, c.conn, o.g.out, nil)
	case !o.screen():
		if o.lab != 0 {
			return nil
		}
		return waitReady(ctx, o, c)
	}
	return showScreen(ctx, o, c, notice)
}

// showScreen opens the full screen until the person leaves it.
func showScreen(ctx context.Context, o *upOptions, c *client, notice string) error {
	start := ""
	if c.endpoint.in != nil {
		start = c.endpoint.in.start()
	}
	return tui.Run(ctx, tui.Options{
		Conn:    c.conn,
		Start:   start,
		Notice:  notice,
		As:      sudoUser(o.g),
		NoColor: o.noColor || o.g.getenv("NO_COLOR") != "",
		Command: func(ctx context.Context, args []string, out io.Writer) error {
			return runInside(ctx, o.g, c.endpoint, args, out)
		},
		Complete: func(ctx context.Context, args []string) []string {
			return completeInside(ctx, o.g, c.endpoint, args)
		},
	})
}

// insideGlobals returns the globals of a command that is typed into the screen:
// it talks to the same agent and has no terminal.
func insideGlobals(g *globals, e *endpoint, out io.Writer) *globals {
	return &globals{in: eof{}, out: out, errOut: out, getenv: g.getenv, run: g.run, output: "text", chosen: e}
}

// eof is a reader with nothing in it.
type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

// runInside runs one command line for the screen.
func runInside(ctx context.Context, g *globals, e *endpoint, args []string, out io.Writer) error {
	inside := insideGlobals(g, e, out)
	root := newRootCommand(inside)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var status exitStatus
	if err == nil || errors.As(err, &status) {
		return nil
	}
	if f := fault.As(err); f != nil {
		return f
	}
	if !inside.entered {
		return fault.New(fault.Usage, "the command line is not right", err, "`help` lists the commands")
	}
	return fault.FromStatus(err)
}

// completeInside returns what may stand in place of the last of args.
func completeInside(ctx context.Context, g *globals, e *endpoint, args []string) []string {
	var out textLines
	inside := insideGlobals(g, e, &out)
	inside.errOut = discard{}
	root := newRootCommand(inside)
	root.SetErr(discard{})
	root.SetArgs(append([]string{cobra.ShellCompNoDescRequestCmd}, args...))
	if err := root.ExecuteContext(ctx); err != nil {
		return nil
	}
	return out.completions()
}

// upHere finds or starts this machine's agent.
func upHere(ctx context.Context, o *upOptions) (*client, error) {
	e, err := chooseHere(ctx, o.g)
	switch {
	case err == nil:
		o.g.chosen = e
		return dial(e)
	case !fault.Is(err, fault.NoAgent) || ctx.Err() != nil:
		return nil, err
	}
	list, fixed := candidates(o.g)
	if fixed {
		return nil, err
	}
	// As root the machine's socket, else the first of the user's own.
	e = &list[0]
	if !isRoot() {
		e = &list[1]
	}
	// The agent would end for it, and what it says be somebody else's words.
	if _, err := config.Load(config.Path(os.Getuid(), o.g.getenv)); err != nil {
		return nil, err
	}
	began := time.Now()
	c, err := startAgent(ctx, o, e)
	if err != nil {
		return nil, err
	}
	o.g.chosen = e
	if !o.g.json() {
		o.step("the agent is started (%.1f s)", time.Since(began).Seconds())
	}
	return c, nil
}

// chooseHere is choose without the lab.
func chooseHere(ctx context.Context, g *globals) (*endpoint, error) {
	quiet := *g
	quiet.errOut = discard{}
	e, err := choose(ctx, &quiet)
	if err == nil && e.foreign {
		return nil, fault.Newf(fault.NoAgent, "start it with `tbcluster up`; or is it the lab? `tbcluster lab down` ends that", "no agent runs on this machine itself")
	}
	return e, err
}

// readyPatience is how long `up` without a terminal waits for nodes and cables
// before it says what is not there.
const readyPatience = 15 * time.Second

// waitReady prints what happens until the cluster is ready.
func waitReady(ctx context.Context, o *upOptions, c *client) error {
	wait, cancel := context.WithTimeout(ctx, readyPatience)
	defer cancel()
	// Whether it is ready also changes by the time that passes without news.
	var mu sync.Mutex
	var last *tbv1.ClusterState
	ready := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return last != nil && unsettled(last, time.Now()) == ""
	}
	seen := func(s *tbv1.ClusterState) bool {
		mu.Lock()
		last = proto.CloneOf(s)
		mu.Unlock()
		return ready()
	}
	var looking sync.WaitGroup
	looking.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for !ready() {
			select {
			case <-tick.C:
			case <-wait.Done():
				return
			}
		}
		cancel()
	})
	var err error
	if o.g.json() {
		err = watchState(wait, c, seen)
	} else {
		err = tui.Plain(wait, c.conn, o.g.out, seen)
	}
	failed := err != nil && (ctx.Err() != nil || wait.Err() == nil)
	cancel()
	looking.Wait()
	switch {
	case failed:
		return err
	case last == nil:
		return fault.Newf(fault.Timeout, "`tbcluster logs --agent` shows what it does", "the agent has not told of the cluster within %s", readyPatience)
	}
	if why := notReady(last); why != "" {
		return fault.New(fault.Timeout, "the cluster is not ready", errors.New(why), "`tbcluster doctor` says what is wrong")
	}
	if o.g.json() {
		writeJSON(o.g.out, toStateJSON(last))
		return nil
	}
	o.step("ready: %s", summary(last))
	for _, n := range last.GetNodes() {
		if n.GetSelf() && n.GetMetricsAddress() != "" {
			o.step("metrics: http://%s/metrics", n.GetMetricsAddress())
		}
	}
	if slices.ContainsFunc(last.GetNodes(), func(n *tbv1.Node) bool { return n.GetSelf() && !n.GetPrivileged() }) {
		o.g.printf("the agent does not run as root, so it gives the cables no addresses: `tbcluster down`, then `sudo tbcluster up`\n")
	}
	if len(last.GetNodes()) < 2 {
		o.g.printf("no other node is in the cluster yet: run `tbcluster pair` here and `tbcluster pair CODE` there\n")
	}
	return nil
}

// notReady says what a cluster still waits for; "" when it is ready.
func notReady(s *tbv1.ClusterState) string {
	if len(s.GetNodes()) == 0 {
		return "the agent has only just started" // else it knows of itself at least
	}
	up := map[string]bool{}
	for _, n := range s.GetNodes() {
		switch n.GetState() {
		case tbv1.NodeState_NODE_STATE_UP:
			up[n.GetId()] = true
		case tbv1.NodeState_NODE_STATE_DOWN:
		default:
			return fmt.Sprintf("%s is %s: %s", n.GetName(), nodeStateWord(n.GetState()), n.GetReason())
		}
	}
	for _, l := range s.GetLinks() {
		// A cable to a machine that has not paired is nobody's fault.
		if !up[l.GetA().GetNodeId()] || !up[l.GetB().GetNodeId()] {
			continue
		}
		switch l.GetState() {
		case tbv1.LinkState_LINK_STATE_PROVEN, tbv1.LinkState_LINK_STATE_DOWN:
		default:
			return fmt.Sprintf("the cable %s is %s: %s", cableText(l), linkStateWord(l.GetState()), l.GetReason())
		}
	}
	return ""
}

const (
	// tellsWithin is how soon a node that came up tells of its cables.
	tellsWithin = time.Second
	// provesWithin is how soon a cable between nodes that are up is proven if it is
	// to be: until then that it is listed as down may be from before they came, and
	// that its far end is not known, because that one has not told of it yet.
	provesWithin = 5 * time.Second
)

// unsettled is notReady that also waits for what may only be late: a node that
// came up just now, and what is said of cables until then.
func unsettled(s *tbv1.ClusterState, now time.Time) string {
	if why := notReady(s); why != "" {
		return why
	}
	since := map[string]time.Time{} // nodes that are up
	var came time.Time              // the last of the others
	late := func(t time.Time, within time.Duration) bool {
		d := now.Sub(t)
		return d >= 0 && d < within // what is to come is of before the clock was set back
	}
	for _, n := range s.GetNodes() {
		switch {
		case n.GetSelf():
			since[n.GetId()] = n.GetStartedAt().AsTime()
		case n.GetState() == tbv1.NodeState_NODE_STATE_UP:
			t := n.GetStateSince().AsTime()
			since[n.GetId()] = t
			if t.After(came) {
				came = t
			}
			if late(t, tellsWithin) {
				return n.GetName() + " has only just come"
			}
		}
	}
	for _, l := range s.GetLinks() {
		if l.GetState() == tbv1.LinkState_LINK_STATE_PROVEN {
			continue
		}
		a, aUp := since[l.GetA().GetNodeId()]
		b, bUp := since[l.GetB().GetNodeId()]
		if l.GetB().GetNodeId() == "" {
			b, bUp = came, true // that of any other node
		}
		if aUp && bUp && len(since) > 1 && late(a, provesWithin) || aUp && bUp && late(b, provesWithin) {
			return fmt.Sprintf("the cable %s is %s: %s", cableText(l), linkStateWord(l.GetState()), l.GetReason())
		}
	}
	return ""
}

// answers reports whether an agent answers on c within a second.
func answers(ctx context.Context, c *client) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err := c.cluster.GetState(ctx, &tbv1.GetStateRequest{}, grpc.WaitForReady(false))
	return err
}
