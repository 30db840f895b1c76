package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// playAgent is what the test's own program does when `up` starts it as the
// agent: it serves at socket until it is told to end. "broken" ends at once.
func playAgent(socket string) int {
	if socket == "broken" {
		fmt.Fprintln(os.Stderr, "tbcluster: no room on the disk")
		return 11
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	d := &agentDouble{state: deskState(), socket: socket}
	d.state.Nodes, d.state.Links = d.state.Nodes[:1], nil
	d.events = []*tbv1.WatchResponse{{Event: &tbv1.WatchResponse_Snapshot{Snapshot: d.state}}}
	d.server = grpc.NewServer()
	tbv1.RegisterClusterServiceServer(d.server, d)
	tbv1.RegisterNodeServiceServer(d.server, d)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, d.server.Stop)
	if err := d.server.Serve(l); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// upAt runs `up` with the agent's place in dir.
func upAt(t *testing.T, dir, agent string, args ...string) result {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"TMPDIR": dir, "HOME": dir}
	var out, errOut strings.Builder
	g := &globals{in: eof{}, out: &out, errOut: &errOut, output: "text", run: dir, getenv: func(k string) string { return env[k] }}
	t.Setenv("TB_TEST_AGENT", agent)
	o := &upOptions{g: g, program: exe, machines: realMachines}
	err = runUp(t.Context(), o)
	g.entered = true
	return result{report(g, err), out.String(), errOut.String()}
}

func TestUpStartsTheAgentAndSaysHowToPair(t *testing.T) {
	dir := shortDir(t)
	list, _ := candidates(&globals{run: dir, getenv: func(k string) string { return map[string]string{"TMPDIR": dir}[k] }})
	e := list[0]
	if !isRoot() {
		e = list[1]
	}
	t.Cleanup(func() {
		c, err := dial(&e)
		if err != nil {
			t.Fatal(err)
		}
		defer c.close()
		if _, err := c.node.Shutdown(context.Background(), &tbv1.ShutdownRequest{}); err != nil {
			t.Errorf("the agent that was started is left behind: %v", err)
		}
	})
	r := upAt(t, dir, e.path)
	r.wantCode(t, 0)
	for _, w := range []string{"the agent is started", "ready: desk: 1 of 1 node up", "tbcluster pair CODE"} {
		if !strings.Contains(r.out, w) {
			t.Errorf("lacks %q:\n%s", w, r.out)
		}
	}
	r = upAt(t, dir, "broken") // it runs already, so nothing is started
	r.wantCode(t, 0)
	if strings.Contains(r.out, "is started") {
		t.Errorf("a second agent was started:\n%s", r.out)
	}
}

func TestUpQuotesAnAgentThatEndsAtOnce(t *testing.T) {
	r := upAt(t, shortDir(t), "broken")
	r.wantCode(t, fault.ExitNoAgent)
	for _, w := range []string{"the agent ended as soon as it was started", "no room on the disk", "exit status 11"} {
		if !strings.Contains(r.err, w) {
			t.Errorf("lacks %q:\n%s", w, r.err)
		}
	}
}

func TestNotReady(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*tbv1.ClusterState)
		want   string
	}{
		{"as it is: one down, one cable to a stranger", func(*tbv1.ClusterState) {}, ""},
		{"a node not heard of yet", func(s *tbv1.ClusterState) { s.Nodes[1].State = tbv1.NodeState_NODE_STATE_UNKNOWN }, "beta is unknown"},
		{"a cable on the way", func(s *tbv1.ClusterState) {
			s.Nodes[1].State = tbv1.NodeState_NODE_STATE_UP
			s.Links[0].State = tbv1.LinkState_LINK_STATE_ADDRESSED
		}, "the cable alpha 0-1 – beta 0-2 is addressed"},
		{"a cable that is cut", func(s *tbv1.ClusterState) {
			s.Nodes[1].State = tbv1.NodeState_NODE_STATE_UP
			s.Links[0].State = tbv1.LinkState_LINK_STATE_DOWN
		}, ""},
	} {
		s := deskState()
		c.change(s)
		if got := notReady(s); got == "" != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: waits for %q, want %q", c.name, got, c.want)
		}
	}
}

func TestUpWaitsForWhatMayOnlyBeLate(t *testing.T) {
	up := func(s *tbv1.ClusterState, ago time.Duration) {
		s.Nodes[1].State, s.Nodes[1].StateSince = tbv1.NodeState_NODE_STATE_UP, timestamppb.New(noon.AsTime().Add(-ago))
	}
	down := func(s *tbv1.ClusterState) { s.Links[0].State = tbv1.LinkState_LINK_STATE_DOWN }
	started := func(s *tbv1.ClusterState, ago time.Duration) {
		s.Nodes[0].StartedAt = timestamppb.New(noon.AsTime().Add(-ago))
	}
	for _, c := range []struct {
		name   string
		change func(*tbv1.ClusterState)
		want   string
	}{
		{"no state yet", func(s *tbv1.ClusterState) { s.Nodes, s.Links = nil, nil }, "only just started"},
		{"the other is down, one cable to a stranger", func(*tbv1.ClusterState) {}, ""},
		{"it just came, and has told of no cable", func(s *tbv1.ClusterState) { up(s, time.Second/2); s.Links = nil }, "beta has only just come"},
		{"it came before the clock was set back", func(s *tbv1.ClusterState) { up(s, -48*time.Hour); s.Links = nil }, ""},
		{"it came a while ago and has none", func(s *tbv1.ClusterState) { up(s, 2*time.Second); s.Links = nil }, ""},
		{"listed as down from before it came", func(s *tbv1.ClusterState) { started(s, time.Hour); up(s, 2*time.Second); down(s) }, "is down"},
		{"listed as down from before this one came", func(s *tbv1.ClusterState) { started(s, 2*time.Second); up(s, time.Hour); down(s) }, "is down"},
		{"down for good", func(s *tbv1.ClusterState) {
			started(s, time.Hour)
			up(s, 6*time.Second)
			down(s)
		}, ""},
		{"a far end that the other one has yet to tell of", func(s *tbv1.ClusterState) { started(s, time.Hour); up(s, 2*time.Second) }, "the cable alpha 0-3"},
		{"a stranger's", func(s *tbv1.ClusterState) { started(s, time.Hour); up(s, time.Hour) }, ""},
		{"a stranger's on a node that is alone", func(s *tbv1.ClusterState) { started(s, 0); s.Nodes, s.Links = s.Nodes[:1], s.Links[1:] }, ""},
		{"proven is proven", func(s *tbv1.ClusterState) { started(s, 0); up(s, 2*time.Second); s.Links = s.Links[:1] }, ""},
	} {
		s := deskState()
		started(s, time.Hour)
		c.change(s)
		if got := unsettled(s, noon.AsTime()); got == "" != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: waits for %q, want %q", c.name, got, c.want)
		}
	}
}

func TestUpIsNotReadyByWhatAnAgentSaysThatKnowsNothingYet(t *testing.T) {
	state := deskState()
	state.Nodes[1].State, state.Nodes[1].Reason = tbv1.NodeState_NODE_STATE_UP, ""
	came := timestamppb.Now()
	state.Nodes[0].StartedAt, state.Nodes[1].StateSince = came, came
	state.Links = state.Links[:1]
	for _, format := range []string{"text", "json"} {
		d := startDouble(t, &agentDouble{state: &tbv1.ClusterState{}, events: []*tbv1.WatchResponse{
			{Event: &tbv1.WatchResponse_Snapshot{Snapshot: &tbv1.ClusterState{}}},
			{Revision: 1, Event: &tbv1.WatchResponse_Delta{Delta: &tbv1.ClusterDelta{Nodes: state.Nodes, Links: state.Links}}},
		}})
		r := tb(t, d, "up", "-o", format)
		r.wantCode(t, 0)
		if format == "text" && !strings.Contains(r.out, "2 of 2 nodes up, 1 of 1 cable proven") || strings.Contains(r.out, "no other node is in the cluster") {
			t.Errorf("printed\n%s", r.out)
		}
		if took := time.Since(came.AsTime()); took < tellsWithin {
			t.Errorf("ready %v after the other node came", took)
		}
		if format == "json" && !strings.Contains(r.out, `"beta"`) {
			t.Errorf("printed\n%s", r.out)
		}
	}
}

func TestUpRefusesABrokenConfigurationAndLabsOfNoNodes(t *testing.T) {
	if isRoot() { // whose file is that of the machine
		asOrdinaryUser(t)
		return
	}
	dir := shortDir(t)
	file := filepath.Join(dir, ".config", "tbcluster", "config.toml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte("name = \"desk\"\nforward = 1\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	r := upAt(t, dir, "broken")
	r.wantCode(t, fault.Table[fault.ConfigInvalid].Exit)
	if !strings.Contains(r.err, file+" line 2") || strings.Contains(r.err, "exit status") {
		t.Errorf("says\n%s", r.err)
	}
	r = tb(t, startDouble(t, &agentDouble{}), "up", "--lab", "0")
	r.wantCode(t, fault.ExitUsage)
	if !strings.Contains(r.err, "--lab needs a number") {
		t.Errorf("says\n%s", r.err)
	}
}

func TestCommandsTypedIntoTheScreen(t *testing.T) {
	d := startDouble(t, &agentDouble{state: deskState()})
	g := &globals{in: os.Stdin, out: os.Stdout, errOut: os.Stderr, getenv: os.Getenv, run: "/nonexistent"}
	e := &endpoint{path: d.socket}
	var out strings.Builder
	if err := runInside(t.Context(), g, e, []string{"models"}, &out); err != nil || !strings.Contains(out.String(), "smollm2") {
		t.Errorf("printed %q, %v", out.String(), err)
	}
	if err := runInside(t.Context(), g, e, []string{"frob"}, io.Discard); !fault.Is(err, fault.Usage) {
		t.Errorf("a word that is no command ends with %v", err)
	}
	if got := completeInside(t.Context(), g, e, []string{"stop", ""}); strings.Join(got, " ") != "smol" {
		t.Errorf("completes to %q", got)
	}
}

// labDouble is a lab of which only what is asked here is there.
type labDouble struct {
	virtualCluster
	status lab.Status
}

func (l labDouble) Name() string                               { return l.status.Name }
func (l labDouble) Status(context.Context) (lab.Status, error) { return l.status, nil }

func TestUpLabRefusesALabOfAnotherSize(t *testing.T) {
	var out strings.Builder
	o := &upOptions{g: &globals{in: eof{}, out: &out, errOut: &out, output: "text"}, lab: 3,
		install: func(context.Context, func(string)) (string, error) { return "model.gguf", nil },
		machines: machines{open: func(string) (virtualCluster, error) {
			return labDouble{status: lab.Status{Name: "default", State: lab.Running, Nodes: make([]lab.NodeStatus, 2)}}, nil
		}}}
	err := runUp(t.Context(), o)
	if !fault.Is(err, fault.LabFailed) || !strings.Contains(err.Error(), "with 2 nodes instead of 3") {
		t.Errorf("ended with %v", err)
	}
	o.lab = 65
	if err := runUp(t.Context(), o); !fault.Is(err, fault.Usage) {
		t.Errorf("65 nodes end with %v", err)
	}
	o.lab, o.demo = 0, true
	if err := runUp(t.Context(), o); !fault.Is(err, fault.Usage) {
		t.Errorf("a demonstration without a lab ends with %v", err)
	}
	o.lab, o.machines.open = 3, func(string) (virtualCluster, error) { return nil, errors.New("a bug") }
	if err := runUp(t.Context(), o); err == nil || fault.Is(err, fault.LabFailed) {
		t.Errorf("an unexpected error ends with %v", err)
	}
}

const netDev = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  eth0: 5000 10 0 0 0 0 0 0 7000 10 0 0 0 0 0 0
thunderbolt0:99 1 0 0 0 0 0 0 98500000 10 0 0 0 0 0 0
`

func TestCarriedTellsCableFromLAN(t *testing.T) {
	after, err := parseNetDev(netDev)
	if err != nil {
		t.Fatal(err)
	}
	d := &demo{state: deskState()}
	r := &demoReport{Answer: " Paris. ", Asked: "gamma", Ran: "beta", From: "alpha", CopiedBytes: 98_362_432, CopySeconds: .3, BytesPerSecond: 327_874_773,
		Carried: d.carried("alpha", map[string]uint64{"eth0": 2000, "thunderbolt0": 1000}, after)}
	golden(t, "demo.txt", strings.Join(r.lines(), "\n")+"\n")
	if err := wrongWay(r); err != nil {
		t.Errorf("bytes over the cable are refused: %v", err)
	}
	r.Carried[0].Kind, r.Carried[1].Kind = "lan", "cable"
	if err := wrongWay(r); !fault.Is(err, fault.Connection) {
		t.Errorf("bytes over the LAN end with %v", err)
	}
}

func FuzzParseNetDev(f *testing.F) {
	f.Add(netDev)
	f.Add("")
	f.Add("a\nb\nc: 1")
	f.Add("a\nb\neth0: 1 2 3 4 5 6 7 8 99999999999999999999999")
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := parseNetDev(s); err != nil && fault.As(err) == nil {
			t.Errorf("%q: %v is no fault", s, err)
		}
	})
}

// asOrdinaryUser runs the test again in a process that is not root's.
func asOrdinaryUser(t *testing.T) {
	t.Helper()
	const user = 54321 // nobody's
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	dir := shortDir(t)
	own := filepath.Join(dir, "own")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "tests"), program, 0o755), os.Mkdir(own, 0o700), os.Chown(own, user, user)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "tests"), "-test.v", "-test.run=^"+t.Name()+"$")
	cmd.Dir, cmd.Env = own, []string{"HOME=" + own, "TMPDIR=" + own, "PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("as an ordinary user: %v\n%s", err, out)
	}
}

func TestStartLogIsNotFollowedThroughALink(t *testing.T) {
	if isRoot() { // the directory of root's agent is only root's to write
		asOrdinaryUser(t)
		return
	}
	dir := shortDir(t)
	own := filepath.Join(dir, fmt.Sprintf("tbcluster-%d", os.Getuid()))
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	precious := filepath.Join(dir, "precious")
	if err := os.WriteFile(precious, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(precious, filepath.Join(own, "start.log")); err != nil {
		t.Fatal(err)
	}
	upAt(t, dir, "broken").wantCode(t, fault.ExitFileIO)
	if b, err := os.ReadFile(precious); err != nil || string(b) != "x" {
		t.Errorf("the file behind the link is %q, %v", b, err)
	}
}
