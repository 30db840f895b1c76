//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestFaults lets machines and programs die while the cluster is at work: what
// is shown stays true, nothing of a group lives on, and nothing is lost.
func TestFaults(t *testing.T) {
	t.Parallel()
	modelFile(t)
	c := newCluster(t, lab.Options{Nodes: 3})
	model := strings.TrimSuffix(c.giveModel("alpha"), ".gguf")
	c.until("gamma", "links and the model", func(s *v1.ClusterState) bool { return links(s, proven) == 3 && len(s.Models) == 1 })
	for _, sub := range []struct {
		name string
		run  func(c *cluster, model string)
	}{
		{"a group that loses something ends whole", groupEnds},
		{"a group outlives agents that die or stand still", outlives},
		{"an engine ends while its agent is away", endsUnseen},
		{"a copy that is cut off goes on", copyGoesOn},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(c.in(t), model) })
	}
}

// TestNodeFaults is about what nodes show of each other. It runs beside no
// other test: on a machine that is busy enough a way that is there is not found
// in the time that a node has before it is suspect.
func TestNodeFaults(t *testing.T) {
	c := newCluster(t, lab.Options{Nodes: 3})
	for _, n := range c.names {
		c.until(n, "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
	for _, sub := range []struct {
		name string
		run  func(c *cluster)
	}{
		{"a node is paused", nodePaused},
		{"a cable is cut and the LAN is there", cableCut},
		{"the LAN is cut and the cables are there", lanCut},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(c.in(t)) })
	}
}

// kill ends a process of a node as kill -9 does.
func (c *cluster) kill(node string, pid uint32) {
	c.t.Helper()
	if pid == 0 {
		c.t.Fatalf("a process of %s without a number", node)
	}
	c.run(node, "kill", "-9", fmt.Sprint(pid))
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// placeOn places the model, waits until everybody sees it ready, and returns it.
func (c *cluster) placeOn(name, model string, nodes ...string) *v1.Instance {
	c.t.Helper()
	// One thread: two that wait for each other on a busy machine take seconds for
	// what takes one a moment.
	c.run(nodes[0], "tbcluster", "place", model, "--node", strings.Join(nodes, ","), "--ranks", fmt.Sprint(len(nodes)), "--name", name,
		"--context", "512", "--engine-arg=-t", "--engine-arg=1")
	for _, n := range c.names {
		c.until(n, name+" ready", ready(name))
	}
	i := instance(c.until(nodes[0], "the instance", ready(name)), name)
	if len(i.Ranks) != len(nodes) {
		c.t.Fatalf("%d ranks, want %d: %v", len(i.Ranks), len(nodes), i)
	}
	for k, n := range nodes {
		if i.Ranks[k].NodeName != n || i.Ranks[k].Pid == 0 {
			c.t.Fatalf("rank %d is %v, want it on %s", k, i.Ranks[k], n)
		}
	}
	return i
}

// groupEnds: whatever a group loses, it is ready no more, says why, and is gone
// everywhere.
func groupEnds(c *cluster, model string) {
	for _, x := range []struct {
		name  string
		nodes []string
		do    func(c *cluster, i *v1.Instance)
		after func(c *cluster)
		// says is what the reason holds; exit is what the rank of that number
		// says of its end.
		says []string
		rank int
		exit string
	}{
		{"its only rank", []string{"alpha"}, func(c *cluster, i *v1.Instance) { c.kill("alpha", i.Ranks[0].Pid) }, nil,
			[]string{"rank 0", "alpha", "signal 9"}, 0, "signal 9"},
		{"its head", []string{"alpha", "beta"}, func(c *cluster, i *v1.Instance) { c.kill("alpha", i.Ranks[0].Pid) }, nil,
			[]string{"rank 0", "alpha", "signal 9"}, 0, "signal 9"},
		{"an RPC server", []string{"alpha", "beta"}, func(c *cluster, i *v1.Instance) { c.kill("beta", i.Ranks[1].Pid) }, nil,
			[]string{"rank 1", "beta", "signal 9"}, 1, "signal 9"},
		{"its cable, silently", []string{"alpha", "beta"}, func(c *cluster, i *v1.Instance) {
			c.must(c.lab.Cut(context.Background(), "alpha", "beta", lab.CutOptions{Silent: true}))
		}, mendAB, []string{"rank 1", "beta", "cable"}, 1, ""},
		{"its cable", []string{"alpha", "beta"}, func(c *cluster, i *v1.Instance) {
			c.must(c.lab.Cut(context.Background(), "alpha", "beta", lab.CutOptions{}))
		}, mendAB, []string{"rank 1", "beta", "cable"}, 1, ""},
	} {
		c.t.Run(x.name, func(t *testing.T) {
			c := c.in(t)
			if x.after != nil {
				defer x.after(c)
			}
			i := c.placeOn("group", model, x.nodes...)
			x.do(c, i)
			c.until("gamma", "not ready", not(ready("group")))
			i = instance(c.until("gamma", "failed", failed("group")), "group")
			// No patience here: failed means that it is gone.
			c.noEngines()
			t.Log(i.Reason)
			c.says(i.Reason, x.says...)
			if k := i.Ranks[x.rank]; x.exit != "" && (!strings.HasPrefix(k.ExitStatus, x.exit) || len(k.LastLines) == 0) {
				t.Errorf("rank %d says of its end: %q, %q; want %q and the engine's last lines", x.rank, k.ExitStatus, k.LastLines, x.exit)
			} else if x.exit != "" && !slices.ContainsFunc(k.LastLines, func(l string) bool { return strings.Contains(i.Reason, strings.TrimSpace(l)) }) {
				t.Errorf("the reason holds none of the engine's own words: %q, %q", i.Reason, k.LastLines)
			}
			c.run("alpha", "tbcluster", "stop", "--rm", "group")
		})
	}
}

func mendAB(c *cluster) {
	c.must(c.lab.Mend(context.Background(), "alpha", "beta", lab.MendOptions{}))
	for _, n := range c.names {
		c.until(n, "the cable proven", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
}

// outlives: agents come and go, and a group that works is left alone.
func outlives(c *cluster, model string) {
	ctx := context.Background()
	i := c.placeOn("lives", model, "alpha", "beta")
	works := func(s *v1.ClusterState) error {
		switch got := instance(s, "lives"); {
		case got == nil: // its owner has just come back
		case got.State != v1.InstanceState_INSTANCE_STATE_READY && got.State != v1.InstanceState_INSTANCE_STATE_DEGRADED:
			return fmt.Errorf("the instance is %s: %s", got.State, got.Reason)
		}
		return nil
	}
	whole := func(s *v1.ClusterState) bool {
		return allUp(s) == nil && ready("lives")(s) && links(s, proven) == 3 &&
			!slices.ContainsFunc(instance(s, "lives").Ranks, func(k *v1.Rank) bool { return k.State != v1.RankState_RANK_STATE_READY })
	}
	o := c.observe("gamma")
	for _, x := range []struct {
		node     string
		end, get func(ctx context.Context, node string, agentOnly bool) error
	}{{"beta", c.lab.Kill, c.lab.Start}, {"beta", c.lab.Pause, c.lab.Resume}, {"alpha", c.lab.Kill, c.lab.Start}} {
		c.must(x.end(ctx, x.node, true))
		o.until("its agent away", func(s *v1.ClusterState) bool { return stays(x.node)(s) != nil }, works)
		c.must(x.get(ctx, x.node, true))
		o.until("all as before", whole, works)
	}
	now := instance(c.until("alpha", "all as before", whole), "lives")
	for k, r := range now.Ranks {
		if r.Pid != i.Ranks[k].Pid {
			c.t.Errorf("rank %d was process %d and is %d", k, i.Ranks[k].Pid, r.Pid)
		}
	}
	c.chats("gamma", "lives")
	c.run("alpha", "tbcluster", "stop", "--rm", "lives")
}

// endsUnseen: what outlived an agent and ended while it was away is told by the
// next one.
func endsUnseen(c *cluster, model string) {
	for _, x := range []struct {
		name  string
		nodes []string
		away  string // whose agent
		rank  int    // which ends
		says  []string
	}{
		{"alone", []string{"alpha"}, "alpha", 0, []string{"rank 0", "alpha", "signal 9"}},
		{"the owner's agent, an RPC server", []string{"alpha", "beta"}, "alpha", 1, []string{"rank 1", "beta", "signal 9"}},
		// Its head may go before anybody can be asked how the other ended.
		{"the agent beside an RPC server", []string{"alpha", "beta"}, "beta", 1, []string{"rank 1", "beta"}},
	} {
		c.t.Run(x.name, func(t *testing.T) {
			c, ctx := c.in(t), context.Background()
			i := c.placeOn("unseen", model, x.nodes...)
			c.must(c.lab.Kill(ctx, x.away, true))
			k := i.Ranks[x.rank]
			if len(c.processes(k.NodeName, "llama-server", "rpc-server")) == 0 {
				t.Fatalf("the engine on %s did not outlive the agent of %s", k.NodeName, x.away)
			}
			c.kill(k.NodeName, k.Pid)
			c.must(c.lab.Start(ctx, x.away, true))
			i = instance(c.until("gamma", "failed, and how the rank ended", func(s *v1.ClusterState) bool {
				return allUp(s) == nil && failed("unseen")(s) && instance(s, "unseen").Ranks[x.rank].ExitStatus != ""
			}), "unseen")
			t.Log(i.Reason)
			c.says(i.Reason, x.says...)
			if k := i.Ranks[x.rank]; !strings.HasPrefix(k.ExitStatus, "signal 9") || len(k.LastLines) == 0 {
				t.Errorf("rank %d says of its end: %q, %q", x.rank, k.ExitStatus, k.LastLines)
			}
			c.noEngines()
			c.until("alpha", "all nodes and links", func(s *v1.ClusterState) bool { return allUp(s) == nil && links(s, proven) == 3 })
			c.run("alpha", "tbcluster", "stop", "--rm", "unseen")
		})
	}
}

// copyGoesOn: whoever dies while a copy runs, there is never half a file under
// a final name, and what has arrived is not sent again: the copy goes on by
// itself, or, where the agent died that owned it, by the same command.
func copyGoesOn(c *cluster, _ string) {
	const (
		size = 24 << 20
		rate = "6M" // far slower than any cable: it does not end before it is cut off
		some = 8 << 20
	)
	for _, n := range []string{"alpha", "beta"} {
		c.run(n, "sh", "-c", fmt.Sprintf("mkdir -p src dst; head -c %d /dev/urandom > src/big; sync", size))
	}
	for _, x := range []struct {
		name     string
		from, to string // alpha asks, and its agent owns it
		kill     string
		power    bool // its power, not only its agent
	}{
		{"the agent that receives", "alpha", "beta", "beta", false},
		{"the agent that sends and owns it", "alpha", "beta", "alpha", false},
		{"the agent that receives and owns it", "beta", "alpha", "alpha", false},
		{"the power of the one that receives", "alpha", "beta", "beta", true},
	} {
		c.t.Run(x.name, func(t *testing.T) {
			c, ctx := c.in(t), context.Background()
			src, dst := "src/big", "beta:dst/"
			if x.from == "beta" {
				src, dst = "beta:src/big", "dst/"
			}
			c.run(x.to, "sh", "-c", "rm -rf dst; mkdir dst; sync")
			// Gamma hears of the end of the last one a moment later.
			copying := func(m *v1.Transfer) bool { return m.State == v1.TransferState_TRANSFER_STATE_COPYING }
			c.until("gamma", "no copy", func(s *v1.ClusterState) bool { return !slices.ContainsFunc(s.Transfers, copying) })
			out, end := "", make(chan error, 1)
			go func() {
				var err error
				out, err = c.tryRun("alpha", "tbcluster", "cp", "--bwlimit", rate, src, dst)
				end <- err
			}()
			var part *v1.Transfer
			c.until("gamma", "some of it", func(s *v1.ClusterState) bool {
				i := slices.IndexFunc(s.Transfers, func(m *v1.Transfer) bool { return copying(m) && m.DoneBytes >= some })
				if i >= 0 {
					part = s.Transfers[i]
				}
				return i >= 0
			})
			c.must(c.lab.Kill(ctx, x.kill, !x.power))
			if !x.power {
				if out := c.run(x.to, "ls", "dst"); out != "" {
					t.Errorf("under a final name while only a part has arrived: %s", out)
				}
			}
			c.must(c.lab.Start(ctx, x.kill, !x.power))
			err := <-end
			whole := transfer(c.until("alpha", "its end", func(s *v1.ClusterState) bool {
				switch transfer(s, part.Id).GetState() {
				case v1.TransferState_TRANSFER_STATE_DONE, v1.TransferState_TRANSFER_STATE_FAILED:
					return true
				}
				return false
			}), part.Id)
			t.Logf("it was cut off after %d bytes: %v\n%s", part.DoneBytes, err, out)
			if x.kill == "beta" && !x.power && err != nil {
				t.Errorf("it did not go on by itself: %v", whole)
			}
			if err == nil {
				if whole.State != v1.TransferState_TRANSFER_STATE_DONE {
					t.Errorf("a copy that has ended is shown as %v", whole)
				}
				sent := uint64(0)
				for _, l := range whole.Links {
					sent += l.Bytes
				}
				if most := size + part.DoneBytes*3/4; sent > most {
					t.Errorf("%d bytes were sent of %d, of which %d had arrived before", sent, size, part.DoneBytes)
				}
			} else {
				if whole.State != v1.TransferState_TRANSFER_STATE_FAILED || whole.Error.GetFix() == "" {
					t.Errorf("a copy that was cut off is shown as %v", whole)
				}
				if out := c.run(x.to, "ls", "dst"); out != "" {
					t.Errorf("under a final name though it was cut off: %s", out)
				}
				c.until("alpha", "the node and its links", func(s *v1.ClusterState) bool { return allUp(s) == nil && links(s, proven) == 3 })
				l := between(c.until(x.from, "the cable", func(s *v1.ClusterState) bool { return links(s, proven) == 3 }), "alpha", "beta")
				cable := l.A.Interface
				if l.B.NodeName == x.from {
					cable = l.B.Interface
				}
				before := c.bytesSent(x.from)
				out := c.run("alpha", "tbcluster", "cp", src, dst)
				sent := c.bytesSent(x.from)[cable] - before[cable]
				if most := size - part.DoneBytes/2; sent > most {
					t.Errorf("%d of %d bytes were sent, of which %d had arrived before:\n%s", sent, size, part.DoneBytes, out)
				}
			}
			sum := func(node, file string) string { return strings.Fields(c.run(node, "sha256sum", file))[0] }
			if sum(x.from, "src/big") != sum(x.to, "dst/big") {
				t.Error("what arrived is not what was sent")
			}
			if out := strings.Fields(c.run(x.to, "ls", "-A", "dst")); !slices.Equal(out, []string{"big"}) {
				t.Errorf("left beside it: %q", out)
			}
		})
	}
	c.until("gamma", "all as before", func(s *v1.ClusterState) bool { return allUp(s) == nil && links(s, proven) == 3 })
}

func transfer(s *v1.ClusterState, id string) *v1.Transfer {
	for _, m := range s.Transfers {
		if m.Id == id {
			return m
		}
	}
	return nil
}

// nodePaused: a node that answers nothing is suspect, and up once it does.
func nodePaused(c *cluster) {
	ctx := context.Background()
	beta := func(state v1.NodeState) func(*v1.ClusterState) bool {
		return func(s *v1.ClusterState) bool { return node(s, "beta").GetState() == state }
	}
	o := c.observe("alpha")
	c.must(c.lab.Pause(ctx, "beta", false))
	s := o.until("beta suspect", beta(v1.NodeState_NODE_STATE_SUSPECT), stays("gamma"))
	if node(s, "beta").Reason == "" {
		c.t.Error("it does not say why it is suspect")
	}
	c.must(c.lab.Resume(ctx, "beta", false))
	o.until("beta up", beta(v1.NodeState_NODE_STATE_UP), stays("gamma"))
	for _, n := range c.names {
		c.until(n, "everything as before", func(s *v1.ClusterState) bool {
			return stays("beta")(s) == nil && links(s, proven) == 3
		})
	}
}

// cableCut: a node that the LAN still reaches is up, however the control
// channel went before.
func cableCut(c *cluster) {
	ctx := context.Background()
	for _, silent := range []bool{false, true} {
		var on []*observer
		for _, n := range c.names {
			on = append(on, c.observe(n))
		}
		c.must(c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{Silent: silent}))
		// Both cables of beta, so that only the LAN is left.
		c.must(c.lab.Cut(ctx, "beta", "gamma", lab.CutOptions{Silent: silent}))
		for _, o := range on {
			o.until("two cables less", func(s *v1.ClusterState) bool { return links(s, proven) == 1 }, allUp)
		}
		c.must(c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{}))
		c.must(c.lab.Mend(ctx, "beta", "gamma", lab.MendOptions{}))
		for _, o := range on {
			o.until("the cables again", func(s *v1.ClusterState) bool { return links(s, proven) == 3 }, allUp)
		}
	}
}

func allUp(s *v1.ClusterState) error {
	for _, n := range s.Nodes {
		if err := stays(n.Name)(s); err != nil {
			return err
		}
	}
	return nil
}

// lanCut: a node without LAN is up over its cables.
func lanCut(c *cluster) {
	ctx := context.Background()
	var on []*observer
	for _, n := range c.names {
		on = append(on, c.observe(n))
	}
	c.must(c.lab.CutLAN(ctx, "beta"))
	overCable := func(s *v1.ClusterState) bool {
		// Between two channels there is none for a moment.
		path := node(s, "beta").GetControlPath()
		return path != "" && !strings.HasPrefix(path, "eth0 ")
	}
	for _, o := range on {
		if o.node != "beta" {
			o.until("beta over a cable", overCable, allUp)
		}
	}
	// Something that needs an answer of beta.
	if out := c.run("alpha", "tbcluster", "ping", "beta"); !strings.Contains(out, "cable") {
		c.t.Errorf("ping names no cable:\n%s", out)
	} else if !strings.Contains(out, "*") || strings.Contains(out, "lan    -") {
		c.t.Errorf("ping marks no way, or has one twice:\n%s", out)
	}
	c.must(c.lab.MendLAN(ctx, "beta"))
	if at := netip.AddrPortFrom(c.addresses("beta", "eth0")[0], 7871); !c.reaches("alpha", at, open) { // its carrier comes a moment later
		c.t.Errorf("alpha does not reach %s over the LAN that is mended", at)
	}
	// And a cable cut under the channel that went over to it.
	c.must(c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{}))
	for _, o := range on {
		o.until("a cable less", func(s *v1.ClusterState) bool { return links(s, proven) == 2 }, allUp)
	}
	c.must(c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{}))
	for _, o := range on {
		o.until("the cable again", func(s *v1.ClusterState) bool { return links(s, proven) == 3 }, allUp)
	}
}
