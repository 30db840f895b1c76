package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// labReport says what `up --lab` did; it is what -o json prints.
type labReport struct {
	Lab   string   `json:"lab"`
	Nodes []string `json:"nodes"`
	// ProvenSeconds is from the making of the lab to the last cable proven; 0
	// when the lab was there already.
	ProvenSeconds float64     `json:"proven_seconds"`
	Demo          *demoReport `json:"demo"`
}

// bootPatience, pairPatience and provePatience are how long a lab may take with
// each step before it is a failure. They are far from what is usual (a second),
// for machines that are busy.
const (
	bootPatience  = 30 * time.Second
	pairPatience  = 60 * time.Second
	provePatience = 60 * time.Second
)

// upLab makes or takes the default lab, pairs its nodes and waits for its
// cables. It returns a client of its first node.
func upLab(ctx context.Context, o *upOptions) (*client, *labReport, error) {
	if o.lab < 1 || o.lab > lab.MaxNodes {
		return nil, nil, fault.Newf(fault.Usage, fmt.Sprintf("choose 1 to %d", lab.MaxNodes), "a lab cannot have %d nodes", o.lab)
	}
	if o.demo && o.lab < 2 {
		return nil, nil, fault.Newf(fault.Usage, "use --lab 2 or more", "--demo copies from one node to another")
	}
	modelFile, err := o.install(ctx, func(s string) { o.step("%s", s) })
	if err != nil {
		return nil, nil, err
	}
	began := time.Now()
	machine, status, fresh, err := labHere(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	report := &labReport{Lab: machine.Name()}
	for _, n := range status.Nodes {
		report.Nodes = append(report.Nodes, n.Name)
	}
	clients, err := bootLab(ctx, machine, status)
	if err != nil {
		return nil, nil, err
	}
	first := clients[0]
	defer func() {
		for _, c := range clients[1:] {
			c.close()
		}
	}()
	o.step("the agents of %s answer", strings.Join(report.Nodes, ", "))
	if err := pairLab(ctx, o, report.Nodes, clients); err != nil {
		first.close()
		return nil, nil, err
	}
	state, err := proveLab(ctx, first, status)
	if err != nil {
		first.close()
		return nil, nil, err
	}
	if fresh {
		report.ProvenSeconds = time.Since(began).Seconds()
		o.step("every cable is proven, %.1f s after the lab was begun", report.ProvenSeconds)
	} else {
		o.step("every cable is proven")
	}
	if err := giveModel(ctx, o, machine, clients[0], report.Nodes[0], modelFile); err != nil {
		first.close()
		return nil, nil, err
	}
	if o.demo {
		d := &demo{o: o, machine: machine, clients: clients, nodes: report.Nodes, state: state, model: filepath.Base(modelFile)}
		if report.Demo, err = d.run(ctx); err != nil {
			first.close()
			return nil, nil, err
		}
	}
	o.g.chosen = first.endpoint
	return first, report, nil
}

// lines returns the report for people: what came out, last.
func (r *labReport) lines() []string {
	if r.Demo != nil {
		return r.Demo.lines()
	}
	return []string{fmt.Sprintf("lab %s is ready; try: tbcluster status, tbcluster lab cut %s", r.Lab, strings.Join(r.Nodes[:min(2, len(r.Nodes))], ":"))}
}

// labHere returns the default lab, made if it is not there.
func labHere(ctx context.Context, o *upOptions) (virtualCluster, lab.Status, bool, error) {
	m, err := o.machines.open(lab.DefaultName)
	if err == nil {
		status, err := m.Status(ctx)
		if err != nil {
			return nil, lab.Status{}, false, err
		}
		if status.State == lab.Running {
			if len(status.Nodes) != o.lab {
				return nil, lab.Status{}, false, fault.Newf(fault.LabFailed, "`tbcluster lab down` ends it; then try again",
					"the lab %q runs already, with %s instead of %d", m.Name(), count(len(status.Nodes), "node"), o.lab)
			}
			o.step("taking the lab %q, which runs already", m.Name())
			status, err = startStopped(ctx, o, m, status)
			return m, status, false, err
		}
	} else if !fault.Is(err, fault.LabFailed) {
		return nil, lab.Status{}, false, err
	}
	if m, err = o.machines.make(ctx, lab.Options{Name: lab.DefaultName, Nodes: o.lab}); err != nil {
		return nil, lab.Status{}, false, err
	}
	status, err := m.Status(ctx)
	if err != nil {
		return nil, lab.Status{}, false, err
	}
	for _, n := range status.Notes {
		o.g.notef("%s", plain(n))
	}
	o.step("the lab %q is made: %s, %s", m.Name(), count(len(status.Nodes), "node"), count(len(status.Cables), "cable"))
	return m, status, true, nil
}

// startStopped boots the nodes of a lab that are off and starts the agents that
// have ended.
func startStopped(ctx context.Context, o *upOptions, m virtualCluster, status lab.Status) (lab.Status, error) {
	var started []string
	for _, n := range status.Nodes {
		if n.State == lab.Running && n.Agent == lab.Running {
			continue
		}
		if err := m.Start(ctx, n.Name, n.State == lab.Running); err != nil {
			return status, err
		}
		started = append(started, n.Name)
	}
	if len(started) == 0 {
		return status, nil
	}
	o.step("%s started again", strings.Join(started, ", "))
	return m.Status(ctx)
}

// bootLab returns a client of each node, once its agent answers.
func bootLab(ctx context.Context, m virtualCluster, status lab.Status) (clients []*client, err error) {
	wait, cancel := context.WithTimeout(ctx, bootPatience)
	defer cancel()
	defer func() {
		if err != nil {
			for _, c := range clients {
				c.close()
			}
		}
	}()
	for _, n := range status.Nodes {
		c, err := dial(&endpoint{path: m.SocketPath(n.Name), from: "lab node " + n.Name, foreign: true, in: &labNode{m.Name(), n.Name}})
		if err != nil {
			return clients, err
		}
		clients = append(clients, c)
		if err := waitAnswer(wait, c, func() error { return agentEnded(wait, m, n.Name) }); err != nil {
			if ctx.Err() != nil {
				return clients, fault.FromStatus(ctx.Err())
			}
			why := err.Error()
			if f := fault.As(err); f != nil && f.Why != "" {
				why = f.Why
			}
			return clients, fault.New(fault.NoAgent, "the agent of lab node "+n.Name+" does not answer", errors.New(why),
				lab.Command(m.Name(), "down")+" and try again; `tbcluster bugreport` collects what we need").At(n.Name)
		}
	}
	return clients, nil
}

// waitAnswer waits until the agent answers. It asks ended twice a second, and
// returns its error. When ctx ends first, it returns what the last try came to.
func waitAnswer(ctx context.Context, c *client, ended func() error) error {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	var last error
	for n := 1; ; n++ {
		err := answers(ctx, c)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		if n%20 == 0 {
			if err := ended(); err != nil {
				return err
			}
		}
		c.conn.ResetConnectBackoff()
		select {
		case <-ctx.Done():
			return last
		case <-tick.C:
		}
	}
}

// agentEnded returns an error with the agent's last words when the agent of a
// lab node has ended.
func agentEnded(ctx context.Context, m virtualCluster, node string) error {
	status, err := m.Status(ctx)
	if err != nil {
		return err
	}
	for _, n := range status.Nodes {
		if n.Name != node || n.Agent != lab.Stopped || n.AgentExit == "" {
			continue
		}
		console := filepath.Join(m.NodeDir(node), "console.log")
		f, err := os.Open(console)
		if err != nil {
			return fmt.Errorf("it ended: %s", n.AgentExit)
		}
		defer f.Close()
		return fmt.Errorf("it ended: %s; the end of %s is\n%s", n.AgentExit, console, startWords(f, nil))
	}
	return nil
}

// pairLab lets the first node invite every other one that is not in its
// cluster yet, by the same exchange of a code as between real machines.
func pairLab(ctx context.Context, o *upOptions, names []string, clients []*client) error {
	ctx, cancel := context.WithTimeout(ctx, pairPatience)
	defer cancel()
	list, err := clients[0].pairing.List(ctx, &tbv1.PairingServiceListRequest{})
	if err != nil {
		return err
	}
	var paired []string
	for i := 1; i < len(clients); i++ {
		state, err := clients[i].state(ctx)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(list.GetMembers(), func(m *tbv1.Member) bool {
			return m.GetNodeId() == state.GetSelfNodeId() && !m.GetRevoked()
		}) {
			continue
		}
		if err := pairTwo(ctx, clients[0], clients[i]); err != nil {
			if f := fault.As(err); f != nil && f.Where == "" {
				f.Where = names[0] + " and " + names[i]
			}
			return err
		}
		paired = append(paired, names[i])
	}
	if len(paired) > 0 {
		o.step("%s paired with %s", strings.Join(paired, ", "), names[0])
	}
	return nil
}

// labUser is the user of a lab's nodes who does everything there: the only one
// that a lab of an ordinary user has.
const labUser = "root"

// pairTwo shows a code on one node and uses it on the other. When one of the
// two fails the other is ended too, and what is returned is the first cause.
func pairTwo(ctx context.Context, inviter, joiner *client) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	joined := make(chan error, 1)
	asked := false
	_, err := openCode(ctx, inviter, tbv1.Role_ROLE_ADMIN, labUser, func(ev *tbv1.OpenResponse) {
		code := ev.GetCode().GetCode()
		if code == "" || asked {
			return
		}
		asked = true
		go func() {
			_, err := joiner.pairing.Join(ctx, &tbv1.JoinRequest{Code: code, LocalUser: labUser})
			if err != nil {
				cancel(err)
			}
			joined <- err
		}()
	})
	if err != nil {
		cancel(err)
	}
	if asked {
		err = errors.Join(err, <-joined)
	}
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); fault.As(cause) != nil {
		return cause
	}
	return err
}

// proveLab waits until every node is up and every plugged cable proven, as the
// node behind c sees it.
func proveLab(ctx context.Context, c *client, status lab.Status) (*tbv1.ClusterState, error) {
	cables := 0
	for _, cable := range status.Cables {
		if cable.State == lab.Plugged {
			cables++
		}
	}
	wait, cancel := context.WithTimeout(ctx, provePatience)
	defer cancel()
	var last *tbv1.ClusterState
	err := watchState(wait, c, func(s *tbv1.ClusterState) bool {
		last = s
		return len(s.GetNodes()) >= len(status.Nodes) && notReady(s) == "" && provenLinks(s) >= cables
	})
	if err == nil {
		return last, nil
	}
	if ctx.Err() != nil || wait.Err() == nil {
		return nil, err
	}
	why := fmt.Sprintf("%d of %s proven", provenLinks(last), count(cables, "cable"))
	if n := notReady(last); n != "" {
		why += "; " + n
	}
	return nil, fault.New(fault.Timeout, "the cables of the lab did not come up", errors.New(why), "`tbcluster doctor` says what is wrong; `tbcluster lab down` ends the lab")
}

func provenLinks(s *tbv1.ClusterState) int {
	n := 0
	for _, l := range s.GetLinks() {
		if l.GetState() == tbv1.LinkState_LINK_STATE_PROVEN {
			n++
		}
	}
	return n
}

// giveModel puts the model onto the disk of a node, into ~/models, where the
// agent finds it.
func giveModel(ctx context.Context, o *upOptions, m virtualCluster, c *client, node, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return fault.New(fault.FileIO, "read the model for the lab", err, "remove it and try again: it is then fetched anew").At(file)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fault.New(fault.FileIO, "read the model for the lab", err, "").At(file)
	}
	// $1 is the name, $2 the size. A model that is there already is left alone.
	const script = `set -e; mkdir -p "$HOME/models"; cd "$HOME/models"
[ "$(stat -c %s "$1" 2>/dev/null)" = "$2" ] && exit 0
cat > ".$1.part"; mv ".$1.part" "$1"`
	var said strings.Builder
	code, err := m.Exec(ctx, node, lab.ExecOptions{
		Argv:  []string{"/bin/sh", "-c", script, "sh", filepath.Base(file), fmt.Sprint(info.Size())},
		Stdin: f, Stdout: &said, Stderr: &said,
	})
	if err == nil && code != 0 {
		err = errors.New(strings.TrimSpace(said.String()))
	}
	if err != nil {
		return fault.New(fault.LabFailed, "put the model onto the disk of "+node, err, "`tbcluster lab down` and try again").At(node)
	}
	if _, err := c.model.Scan(ctx, &tbv1.ScanRequest{}); err != nil {
		return err
	}
	o.step("%s has the model %s (%s)", node, filepath.Base(file), bytesText(uint64(info.Size())))
	return nil
}
