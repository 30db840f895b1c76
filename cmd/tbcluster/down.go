package main

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/agent"
	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host/proc"
)

type downOptions struct {
	g           *globals
	stop, leave bool
	// paths are those of root's agent.
	paths agent.Paths
}

func newDownCommand(g *globals) *cobra.Command {
	o := &downOptions{g: g, paths: agent.DefaultPaths(0, g.getenv)}
	cmd := &cobra.Command{
		Use:     "down",
		Short:   "Undo the addresses of the cables and end this node's agent",
		GroupID: groupCluster,
		Long: `Ends the agent of one node, after undoing what it changed on the machine: the
addresses, routes and packet-filter rules of the cables. Other nodes go on and
list it as down; it stays paired.

While instances or transfers run here it does nothing and names them: --stop ends
them first, --leave lets them run on, to be found again by the next agent.

Of an agent that was killed it says what is left: "tbcluster agent --root --undo"
takes that back.` + exitHelp(fault.StillRunning, fault.Denied, fault.Timeout, fault.Interrupted),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runDown(cmd.Context(), o) },
	}
	cmd.Flags().BoolVar(&o.stop, "stop", false, "end instances and transfers first")
	cmd.Flags().BoolVar(&o.leave, "leave", false, "leave instances and transfers running")
	return cmd
}

// downJSON is `tbcluster down -o json`.
type downJSON struct {
	Undone []string `json:"undone"`
	PIDs   []uint32 `json:"pids"`
}

// downPatience is how long an agent may take to end after it has said that it
// does.
const downPatience = 20 * time.Second

func runDown(ctx context.Context, o *downOptions) error {
	if o.stop && o.leave {
		return fault.Newf(fault.Usage, "say one of them", "--stop and --leave do not go together")
	}
	// Whoever means this machine does not mean a node of the lab on it.
	if _, err := chooseHere(ctx, o.g); err != nil {
		return o.nothing(ctx, err)
	}
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	mode := tbv1.ShutdownMode_SHUTDOWN_MODE_REFUSE
	switch {
	case o.stop:
		mode = tbv1.ShutdownMode_SHUTDOWN_MODE_STOP
	case o.leave:
		mode = tbv1.ShutdownMode_SHUTDOWN_MODE_LEAVE
	}
	resp, err := c.node.Shutdown(ctx, &tbv1.ShutdownRequest{Mode: mode})
	if err != nil {
		return err
	}
	if err := waitGone(ctx, c.endpoint, resp.GetPids(), downPatience); err != nil {
		return err
	}
	if o.g.json() {
		pids := resp.GetPids()
		if pids == nil {
			pids = []uint32{}
		}
		writeJSON(o.g.out, downJSON{texts(resp.GetUndone()), pids})
		return nil
	}
	for _, u := range resp.GetUndone() {
		o.g.printf("%s\n", plain(u))
	}
	o.g.printf("the agent has ended\n")
	return nil
}

// nothing says what is there to end where no agent is: nothing, or what one left
// that was killed.
func (o *downOptions) nothing(ctx context.Context, err error) error {
	if _, fixed := candidates(o.g); fixed || !fault.Is(err, fault.NoAgent) {
		return err
	}
	const undo = "sudo tbcluster agent --root --undo"
	left, lerr := agent.Left(ctx, o.paths)
	switch {
	case errors.Is(lerr, fs.ErrPermission):
		return fault.Newf(fault.NoAgent, "nothing, unless one was killed: `"+undo+"` takes back what it left", "no agent runs here, so there is none to end")
	case lerr != nil:
		return lerr
	case len(left) > 0:
		return fault.New(fault.NoAgent, "no agent runs here, but one that was killed has left changes of this machine", errors.New(strings.Join(left, "\n")), "`"+undo+"` takes them back")
	}
	return fault.Newf(fault.NoAgent, "", "no agent runs here, and none has left anything: there is nothing to end")
}

// waitGone waits until nobody listens on the socket any more and the processes
// have ended: who starts an agent right after it finds the state free.
func waitGone(ctx context.Context, e *endpoint, pids []uint32, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", e.path)
		if err == nil {
			c.Close()
		} else if ctx.Err() == nil && (e.foreign || !anyRuns(pids)) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fault.Newf(fault.Timeout, "`tbcluster logs --agent` shows what it waits for", "the agent said that it ends, and has not after %s", patience).At(e.path)
			}
			return fault.FromStatus(ctx.Err())
		}
	}
}

// anyRuns reports whether one of the processes is still there. A number that is
// another program's is of an agent behind a socket of elsewhere.
func anyRuns(pids []uint32) bool {
	return slices.ContainsFunc(pids, func(pid uint32) bool {
		s, err := proc.Stat(int(pid))
		return err == nil && !s.Zombie && s.Name == "tbcluster"
	})
}
