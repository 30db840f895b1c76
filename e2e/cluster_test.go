//go:build linux

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// patience bounds every wait for an event: a test that needs longer has found
// something. The deadlines that people are promised are measured by
// `make test-limits`, with the release build.
const patience = 60 * time.Second

// cluster is a virtual cluster whose nodes have paired.
type cluster struct {
	t     *testing.T
	lab   *lab.Lab
	names []string
	conns map[string]*grpc.ClientConn
}

// randomName lets any number of tests run side by side.
func randomName() string {
	b := make([]byte, 4)
	if _, err := rand.Read(b); err != nil {
		panic(err) // documented never to fail
	}
	return "t" + hex.EncodeToString(b)
}

// newCluster makes a lab and pairs its nodes.
func newCluster(t *testing.T, o lab.Options) *cluster {
	t.Helper()
	c := newLab(t, o)
	c.pairAll()
	return c
}

func newLab(t *testing.T, o lab.Options) *cluster {
	t.Helper()
	o.Name = randomName()
	if o.Program == "" {
		o.Program = binary(t)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := lab.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, lab: l, conns: map[string]*grpc.ClientConn{}}
	t.Cleanup(func() {
		c.noPanics()
		if t.Failed() {
			c.dump()
		}
		for _, conn := range c.conns {
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := l.Down(context.Background()); err != nil {
			t.Errorf("lab down: %v", err)
		}
	})
	n := o.Nodes
	if n == 0 {
		n = 3
	}
	c.names = lab.NodeNames(n)
	if !o.NoBoot {
		for _, n := range c.names {
			c.until(n, "the agents answer", func(*v1.ClusterState) bool { return true })
		}
	}
	return c
}

// noPanics fails the test if a program of ours panicked on a node or the race
// detector spoke there, however well everything went on.
func (c *cluster) noPanics() {
	c.t.Helper()
	for _, n := range c.names {
		text, err := os.ReadFile(filepath.Join(c.lab.NodeDir(n), "console.log"))
		if err != nil {
			c.t.Errorf("read the console of %s: %v", n, err)
			continue
		}
		text = libraryRace.ReplaceAll(text, nil)
		for _, bad := range []string{"DATA RACE", "panic:", "fatal error:", "something does not end"} {
			if _, after, found := strings.Cut(string(text), bad); found {
				c.t.Errorf("%s: %s%s", n, bad, after[:min(len(after), 8000)])
			}
		}
	}
}

// libraryRace is the one report that is not about our code: the mDNS library's
// Shutdown waits for goroutines that its own start may still be counting
// (grandcat/zeroconf 1.0.0, server.go). We wait a while before we call it, which
// the detector cannot see.
var libraryRace = regexp.MustCompile(`(?s)WARNING: DATA RACE\nRead at [^=]*?zeroconf\.\(\*Server\)\.mainloop\.gowrap\d\(\)\n[^=]*?zeroconf\.\(\*Server\)\.Shutdown\(\)\n[^=]*?==================`)

// dump shows what the nodes say of themselves, for a failed test.
func (c *cluster) dump() {
	for _, n := range c.names {
		out, err := c.tryRun(n, "tbcluster", "status")
		c.t.Logf("--- status of %s (%v)\n%s", n, err, out)
		out, err = c.tryRun(n, "sh", "-c", "tail -n 60 /var/lib/tbcluster/agent/agent.log; tail -n 20 /var/lib/tbcluster/root/root.log; tail -n 40 /lab/console.log")
		c.t.Logf("--- log of %s (%v)\n%s", n, err, out)
	}
}

// api is a connection to a node's agent; it waits for the agent.
func (c *cluster) api(node string) *grpc.ClientConn {
	c.t.Helper()
	if conn := c.conns[node]; conn != nil {
		return conn
	}
	conn, err := grpc.NewClient("unix:"+c.lab.SocketPath(node), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(32<<20)),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second, Backoff: quick}))
	if err != nil {
		c.t.Fatal(err)
	}
	c.conns[node] = conn
	return conn
}

// pairAll pairs every node with alpha, by the exchange that people use.
func (c *cluster) pairAll() {
	c.t.Helper()
	for _, n := range c.names[1:] {
		c.pair(c.names[0], n)
	}
	for _, n := range c.names {
		c.until(n, "all nodes up", func(s *v1.ClusterState) bool {
			up := 0
			for _, x := range s.Nodes {
				if x.State == v1.NodeState_NODE_STATE_UP {
					up++
				}
			}
			return up == len(c.names)
		})
	}
}

func (c *cluster) pair(inviter, joiner string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	open, err := v1.NewPairingServiceClient(c.api(inviter)).Open(ctx, &v1.OpenRequest{LocalUser: "root"})
	if err != nil {
		c.t.Fatal(err)
	}
	e, err := open.Recv()
	if err != nil {
		c.t.Fatalf("open a code on %s: %v", inviter, err)
	}
	if _, err := v1.NewPairingServiceClient(c.api(joiner)).Join(ctx, &v1.JoinRequest{Code: e.GetCode().GetCode(), LocalUser: "root"}); err != nil {
		c.t.Fatalf("join %s: %v", joiner, err)
	}
	if e, err = open.Recv(); err != nil || e.GetJoined().GetName() == "" {
		c.t.Fatalf("the inviting node says %v, %v", e, err)
	}
}

// until waits until the state that a node sees fits, by its own watch, and
// returns it.
func (c *cluster) until(node, what string, fits func(*v1.ClusterState) bool) *v1.ClusterState {
	c.t.Helper()
	s, err := c.wait(node, patience, fits)
	if err != nil {
		c.t.Fatalf("%s: waiting for %s: %v\nstate: %s", node, what, err, brief(s))
	}
	return s
}

func (c *cluster) wait(node string, most time.Duration, fits func(*v1.ClusterState) bool) (*v1.ClusterState, error) {
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	var last *v1.ClusterState
	for ctx.Err() == nil {
		w, err := v1.NewClusterServiceClient(c.api(node)).Watch(ctx, &v1.WatchRequest{})
		if status.Code(err) == codes.Unavailable {
			time.Sleep(20 * time.Millisecond) // its agent ends just now, and the next one is waited for
			continue
		}
		if err != nil {
			return last, err
		}
		for {
			if _, err := w.Recv(); err != nil {
				break
			}
			r, err := v1.NewClusterServiceClient(c.api(node)).GetState(ctx, &v1.GetStateRequest{})
			if err != nil {
				break
			}
			if last = r.State; fits(last) {
				return last, nil
			}
		}
	}
	return last, ctx.Err()
}

// brief is a state in a few lines.
func brief(s *v1.ClusterState) string {
	var b strings.Builder
	for _, n := range s.GetNodes() {
		fmt.Fprintf(&b, "\n  node %s %s %s", n.Name, n.State, n.Reason)
	}
	for _, l := range s.GetLinks() {
		fmt.Fprintf(&b, "\n  link %s/%s-%s/%s %s %s %s (%s)", l.A.GetNodeName(), l.A.GetPort(), l.B.GetNodeName(), l.B.GetPort(), l.State, l.A.GetAddress(), l.Evidence, l.Reason)
		if l.Flaps > 0 || len(l.FlapHistory) > 0 {
			fmt.Fprintf(&b, ", %d flaps", l.Flaps)
		}
		for _, f := range l.FlapHistory {
			fmt.Fprintf(&b, "\n    went down %s, back %s, seen by %s: %s", f.DownAt.AsTime().Format(time.TimeOnly+".000"), f.BackAt.AsTime().Format(time.TimeOnly+".000"), f.SeenBy, f.Reason)
		}
	}
	for _, t := range s.GetTransfers() {
		fmt.Fprintf(&b, "\n  transfer %s %s %s %v", t.Id, t.State, t.Destination, t.Error)
	}
	for _, i := range s.GetInstances() {
		fmt.Fprintf(&b, "\n  instance %s %s %s", i.Name, i.State, i.Reason)
	}
	for _, m := range s.GetModels() {
		fmt.Fprintf(&b, "\n  model %s %d copies", m.Name, len(m.Copies))
	}
	return b.String()
}

// links counts the links in a state.
func links(s *v1.ClusterState, state v1.LinkState) int {
	n := 0
	for _, l := range s.Links {
		if l.State == state {
			n++
		}
	}
	return n
}

// between returns the link between two nodes.
func between(s *v1.ClusterState, a, b string) *v1.Link {
	for _, l := range s.Links {
		if l.A.GetNodeName() == a && l.B.GetNodeName() == b || l.A.GetNodeName() == b && l.B.GetNodeName() == a {
			return l
		}
	}
	return nil
}

func node(s *v1.ClusterState, name string) *v1.Node {
	for _, n := range s.Nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

func instance(s *v1.ClusterState, name string) *v1.Instance {
	for _, i := range s.Instances {
		if i.Name == name {
			return i
		}
	}
	return nil
}

func ready(name string) func(*v1.ClusterState) bool {
	return func(s *v1.ClusterState) bool {
		return instance(s, name).GetState() == v1.InstanceState_INSTANCE_STATE_READY
	}
}

// run runs a command on a node and returns what it printed; it has to succeed.
func (c *cluster) run(node string, argv ...string) string {
	c.t.Helper()
	out, err := c.tryRun(node, argv...)
	if err != nil {
		c.t.Fatalf("%s: %s: %v\n%s", node, strings.Join(argv, " "), err, out)
	}
	return out
}

// noLinger has a program with the race detector end at once: else it waits for
// a second.
const noLinger = "GORACE=atexit_sleep_ms=0"

// exitError is a command that ended with another code than 0.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit %d", int(e)) }

func (c *cluster) tryRun(node string, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	var out bytes.Buffer
	code, err := c.lab.Exec(ctx, node, lab.ExecOptions{Argv: argv, Env: []string{noLinger}, Stdout: &out, Stderr: &out})
	if err == nil && code != 0 {
		err = exitError(code)
	}
	return out.String(), err
}

// fails runs a command that has to end with that code and returns what it
// printed.
func (c *cluster) fails(code int, node string, argv ...string) string {
	c.t.Helper()
	out, err := c.tryRun(node, argv...)
	var e exitError
	if !errors.As(err, &e) || int(e) != code {
		c.t.Fatalf("%s: %s: %v, want exit %d\n%s", node, strings.Join(argv, " "), err, code, out)
	}
	return out
}

// giveModel puts the model on a node's disk, as a download would.
func (c *cluster) giveModel(node string) string {
	c.t.Helper()
	f, err := os.Open(modelFile(c.t))
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	name := filepath.Base(f.Name())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	code, err := c.lab.Exec(ctx, node, lab.ExecOptions{Argv: []string{"sh", "-c", "mkdir -p ~/models && cat > ~/models/" + name}, Stdin: f, Stderr: os.Stderr})
	if err != nil || code != 0 {
		c.t.Fatalf("put the model on %s: exit %d, %v", node, code, err)
	}
	c.run(node, "tbcluster", "models")
	c.scan(node)
	return name
}

// scan has a node look at its disk for models.
func (c *cluster) scan(node string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := v1.NewModelServiceClient(c.api(node)).Scan(ctx, &v1.ScanRequest{}); err != nil {
		c.t.Fatal(err)
	}
}
