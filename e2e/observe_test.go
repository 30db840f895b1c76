//go:build linux

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	v1 "tbcluster/api/tbcluster/v1"
)

// in is the cluster as a subtest uses it.
func (c *cluster) in(t *testing.T) *cluster {
	d := *c
	d.t = t
	return &d
}

// observer sees every state that a node shows from when it was made.
type observer struct {
	c     *cluster
	node  string
	watch v1.ClusterService_WatchClient
	state *v1.ClusterState
	late  *time.Timer // ends the watch
}

// observe begins to look, before something is done.
func (c *cluster) observe(node string) *observer {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c.t.Cleanup(cancel)
	late := time.AfterFunc(patience, cancel)
	w, err := v1.NewClusterServiceClient(c.api(node)).Watch(ctx, &v1.WatchRequest{})
	if err != nil {
		c.t.Fatal(err)
	}
	o := &observer{c: c, node: node, watch: w, late: late}
	o.next("the first state")
	return o
}

// next waits for the next state.
func (o *observer) next(what string) {
	o.c.t.Helper()
	r, err := o.watch.Recv()
	if err != nil {
		o.c.t.Fatalf("%s: waiting for %s: %v\nstate: %s", o.node, what, err, brief(o.state))
	}
	o.take(r)
}

// tryNext is next for a goroutine beside the test's own: an error fails the
// test and does not end it.
func (o *observer) tryNext() bool {
	r, err := o.watch.Recv()
	if err != nil {
		o.c.t.Errorf("%s: %v\nstate: %s", o.node, err, brief(o.state))
		return false
	}
	o.take(r)
	return true
}

// take notes what a node said.
func (o *observer) take(r *v1.WatchResponse) {
	if s := r.GetSnapshot(); s != nil {
		o.state = s
		return
	}
	d, s := r.GetDelta(), &v1.ClusterState{Revision: r.Revision, SelfNodeId: o.state.SelfNodeId, ClusterName: o.state.ClusterName}
	s.Nodes = apply(o.state.Nodes, d.Nodes, d.RemovedNodeIds)
	s.Links = apply(o.state.Links, d.Links, d.RemovedLinkIds)
	s.Transfers = apply(o.state.Transfers, d.Transfers, d.RemovedTransferIds)
	s.Instances = apply(o.state.Instances, d.Instances, d.RemovedInstanceIds)
	s.Models = apply(o.state.Models, d.Models, d.RemovedModelIds)
	s.Findings = o.state.Findings
	if d.FindingsChanged {
		s.Findings = d.Findings
	}
	o.state = s
}

func apply[T interface {
	proto.Message
	GetId() string
}](have, now []T, gone []string) []T {
	out := slices.DeleteFunc(slices.Clone(have), func(x T) bool {
		return slices.Contains(gone, x.GetId()) || slices.ContainsFunc(now, func(y T) bool { return y.GetId() == x.GetId() })
	})
	return append(out, now...)
}

// until goes on from state to state until one fits; each on the way, that one
// included, has to hold. Patience is for each such wait, however many there were.
func (o *observer) until(what string, fits func(*v1.ClusterState) bool, holds func(*v1.ClusterState) error) *v1.ClusterState {
	o.c.t.Helper()
	o.late.Reset(patience)
	for {
		if err := holds(o.state); err != nil {
			o.c.t.Fatalf("%s, on the way to %s: %v\nstate: %s", o.node, what, err, brief(o.state))
		}
		if fits(o.state) {
			return o.state
		}
		o.next(what)
	}
}

// stays is a condition that a node is up.
func stays(name string) func(*v1.ClusterState) error {
	return func(s *v1.ClusterState) error {
		if n := node(s, name); n.GetState() != v1.NodeState_NODE_STATE_UP {
			return fmt.Errorf("%s is %s: %s", name, n.GetState(), n.GetReason())
		}
		return nil
	}
}

// process is one of a node.
type process struct {
	pid  int
	user string
	args string
}

// processes lists those of a node whose command line holds one of the words.
func (c *cluster) processes(node string, words ...string) (out []process) {
	c.t.Helper()
	for l := range strings.Lines(c.run(node, "ps", "-e", "-o", "pid=,user=,args=")) {
		f := strings.Fields(l)
		if len(f) < 3 || f[2] == "[tbcluster]" || f[2] == "ps" {
			continue
		}
		args := strings.Join(f[2:], " ")
		if !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(args, w) }) {
			continue
		}
		pid, err := strconv.Atoi(f[0])
		if err != nil {
			c.t.Fatalf("ps: %q", l)
		}
		out = append(out, process{pid, f[1], args})
	}
	return out
}

// noEngines fails if a rank, an engine or one of its servers runs anywhere.
func (c *cluster) noEngines() {
	c.t.Helper()
	for _, n := range c.names {
		// A shim writes down how its engine ended, and ends a moment after that
		// can be read.
		left := c.enginesOn(n)
		for end := time.Now().Add(endsWithin); len(left) > 0 && time.Now().Before(end); left = c.enginesOn(n) {
			time.Sleep(100 * time.Millisecond)
		}
		for _, p := range left {
			c.t.Errorf("left on %s: pid %d: %s", n, p.pid, p.args)
		}
	}
}

// endsWithin is how long the last process of a group may take to end.
const endsWithin = 10 * time.Second

// enginesOn are the ranks, engines and servers that run on a node.
func (c *cluster) enginesOn(node string) []process {
	c.t.Helper()
	return slices.DeleteFunc(c.processes(node, "llama-server", "rpc-server", "tbcluster rank"), func(p process) bool {
		// It is only being asked what it is.
		return slices.ContainsFunc([]string{"--help", "--version", "--list-devices"}, func(q string) bool { return strings.HasSuffix(p.args, q) })
	})
}

// chats asks an instance something on a node until there is an answer: on a
// loaded machine it is not ready now and then.
func (c *cluster) chats(node, name string) {
	c.t.Helper()
	out, err := "", error(nil)
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		out, err = c.tryRun(node, "tbcluster", "chat", "--max-tokens", "16", name, "The capital of France is")
		if err == nil && strings.TrimSpace(out) != "" {
			return
		}
	}
	c.t.Errorf("no answer of %s came to %s: %v\n%s", name, node, err, out)
}

// says fails unless a text holds all words.
func (c *cluster) says(text string, words ...string) {
	c.t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			c.t.Errorf("it does not say %q:\n%s", w, text)
		}
	}
}

func failed(name string) func(*v1.ClusterState) bool {
	return func(s *v1.ClusterState) bool {
		return instance(s, name).GetState() == v1.InstanceState_INSTANCE_STATE_FAILED
	}
}

func not(f func(*v1.ClusterState) bool) func(*v1.ClusterState) bool {
	return func(s *v1.ClusterState) bool { return !f(s) }
}
