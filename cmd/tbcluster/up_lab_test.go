package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// deskLab is a lab whose agents are doubles: the order of the steps, and what
// is said about them, is tested here; the real thing is in package e2e.
type deskLab struct {
	labDouble
	agents map[string]*agentDouble

	mu      sync.Mutex
	ran     []string // commands, "node: argv"
	models  map[string]string
	reads   int // of /proc/net/dev
	started []string
}

func (l *deskLab) SocketPath(node string) string { return l.agents[node].socket }
func (l *deskLab) NodeDir(string) string         { return "/nonexistent" }

func (l *deskLab) Start(_ context.Context, node string, agentOnly bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started = append(l.started, fmt.Sprint(node, " ", agentOnly))
	return nil
}

func (l *deskLab) Exec(_ context.Context, node string, o lab.ExecOptions) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ran = append(l.ran, node+": "+strings.Join(o.Argv, " "))
	switch {
	case o.Stdin != nil:
		b, err := io.ReadAll(o.Stdin)
		l.models[node] = string(b)
		return 0, err
	case o.Argv[0] == "cat":
		l.reads++
		fmt.Fprintf(o.Stdout, "h\nh\n  lo: 0 0 0 0 0 0 0 0 1\n eth0: 0 0 0 0 0 0 0 0 %d\nthunderbolt0: 0 0 0 0 0 0 0 0 %d\n", l.reads*5000, l.reads*2_000_100_000)
	case o.Argv[0] == "tbcluster":
		fmt.Fprintln(o.Stdout, "The capital of France\nis Paris.")
	}
	return 0, nil
}

// newDeskLab returns a lab of three, in which beta is paired already.
func newDeskLab(t *testing.T) *deskLab {
	t.Helper()
	l := &deskLab{agents: map[string]*agentDouble{}, models: map[string]string{}}
	l.status = lab.Status{Name: "default", State: lab.Running, Cables: []lab.CableStatus{{State: lab.Plugged}, {State: lab.Cut}}}
	names := []string{"alpha", "beta", "gamma"}
	state := deskState()
	state.Nodes, state.Links, state.Instances = nil, state.Links[:1], nil
	for i, n := range names {
		id := strings.Repeat(string(rune('A'+i)), 4) + fmt.Sprint("-", i+1)
		state.Nodes = append(state.Nodes, &tbv1.Node{Id: id, Name: n, State: tbv1.NodeState_NODE_STATE_UP})
		l.status.Nodes = append(l.status.Nodes, lab.NodeStatus{Name: n, State: lab.Running, Agent: lab.Running})
	}
	state.Models[0].Copies[1].Complete = true
	for _, n := range state.Nodes {
		own := &tbv1.ClusterState{SelfNodeId: n.GetId(), Models: state.Models}
		l.agents[n.GetName()] = startDouble(t, &agentDouble{
			state: own, members: members()[:2], open: opened(), transfers: events(copied()),
			events:    []*tbv1.WatchResponse{{Event: &tbv1.WatchResponse_Snapshot{Snapshot: state}}},
			instances: instances(instance(tbv1.InstanceState_INSTANCE_STATE_READY)),
			joined:    func(*tbv1.JoinRequest) (*tbv1.JoinResponse, error) { return &tbv1.JoinResponse{}, nil },
		})
	}
	return l
}

// upDesk runs `up --lab 3 --demo` on l.
func upDesk(t *testing.T, l *deskLab, output string, open func(string) (virtualCluster, error)) result {
	t.Helper()
	file := filepath.Join(t.TempDir(), "smol.gguf")
	if err := os.WriteFile(file, []byte("GGUF"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errOut strings.Builder
	g := &globals{in: eof{}, out: &out, errOut: &errOut, output: output, entered: true, run: "/nonexistent", getenv: func(string) string { return "" }}
	o := &upOptions{g: g, lab: 3, demo: true,
		install:  func(_ context.Context, say func(string)) (string, error) { say("installed"); return file, nil },
		machines: machines{open: open, make: func(context.Context, lab.Options) (virtualCluster, error) { return l, nil }}}
	return result{report(g, runUp(t.Context(), o)), out.String(), errOut.String()}
}

func TestTheDemonstrationOnALab(t *testing.T) {
	l := newDeskLab(t)
	none := func(string) (virtualCluster, error) { return nil, fault.Newf(fault.LabFailed, "", "no lab") }
	r := upDesk(t, l, "text", none)
	r.wantCode(t, 0)
	for _, w := range []string{
		`the lab "default" is made: 3 nodes, 2 cables`, "the agents of alpha, beta, gamma answer", "  gamma paired with alpha", "every cable is proven, ",
		"alpha has the model smol.gguf (4 B)", "tbcluster cp alpha:models/smol.gguf beta:models/", "copied 2.00 GB in 5 files",
		"tbcluster place smollm2 --node beta --name smol", "smol answered through gamma",
	} {
		if !strings.Contains(r.out, w) {
			t.Errorf("lacks %q", w)
		}
	}
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	last := strings.Join(lines[max(0, len(lines)-4):], "\n") + "\n"
	golden(t, "demo-end.txt", last)
	if t.Failed() {
		t.Logf("printed\n%s\nsaid\n%s", r.out, r.err)
	}
	if l.models["alpha"] != "GGUF" {
		t.Errorf("the model on alpha is %q", l.models["alpha"])
	}
	if got := request[*tbv1.JoinRequest](t, l.agents["gamma"]); got.GetCode() != "7-ABCD-EFGH" {
		t.Errorf("gamma joined with %v", got)
	}
	if !slices.ContainsFunc(l.ran, func(c string) bool { return strings.HasPrefix(c, "gamma: tbcluster chat ") }) {
		t.Errorf("gamma was not asked; ran %q", l.ran)
	}
}

func TestTheDemonstrationAsJSON(t *testing.T) {
	l := newDeskLab(t)
	l.status.Nodes[1].State, l.status.Nodes[1].Agent = lab.Off, lab.Stopped
	l.status.Nodes[2].Agent = lab.Stopped
	r := upDesk(t, l, "json", func(string) (virtualCluster, error) { return l, nil })
	r.wantCode(t, 0)
	var doc labReport
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil {
		t.Fatalf("%v in %s", err, r.out)
	}
	if doc.Lab != "default" || len(doc.Nodes) != 3 || doc.ProvenSeconds != 0 || doc.Demo.Answer != "The capital of France\nis Paris." || doc.Demo.CopiedBytes != 2_000_000_000 || doc.Demo.BytesPerSecond != 2_500_000_000 {
		t.Errorf("printed %s", r.out)
	}
	if want := []string{"beta false", "gamma true"}; !slices.Equal(l.started, want) {
		t.Errorf("started %q of what had stopped, want %q", l.started, want)
	}
}

func TestTheDemonstrationFailsWhenTheLANCarriesTheCopy(t *testing.T) {
	l := newDeskLab(t)
	for _, a := range l.agents {
		a.events[0].GetSnapshot().Links[0].A.Interface = "thunderbolt7"
	}
	r := upDesk(t, l, "text", func(string) (virtualCluster, error) { return l, nil })
	r.wantCode(t, fault.ExitSocket)
	if !strings.Contains(r.err, "the copy did not go over the cables") {
		t.Errorf("said\n%s", r.err)
	}
}

func TestUpLabNamesThePairThatFailed(t *testing.T) {
	l := newDeskLab(t)
	l.agents["alpha"].open = opened()[:1]
	l.agents["gamma"].joined = func(*tbv1.JoinRequest) (*tbv1.JoinResponse, error) {
		return nil, fault.New(fault.PairingFailed, "pair by the code", errors.New("nobody shows the code 7"), "try again")
	}
	r := upDesk(t, l, "text", func(string) (virtualCluster, error) { return l, nil })
	r.wantCode(t, fault.ExitDenied)
	if !strings.Contains(r.err, "where: alpha and gamma") || !strings.Contains(r.err, "nobody shows the code 7") {
		t.Errorf("said\n%s", r.err)
	}
}
