//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/engine/llamacpp"
	"tbcluster/lab"
)

// TestWholeJob is the main job, end to end: three nodes find and trust each
// other, a model is copied over a cable, answers on one node and over two, and
// everything is survived that happens to machines.
func TestWholeJob(t *testing.T) {
	t.Parallel()
	file := modelFile(t)
	c := newCluster(t, lab.Options{Nodes: 3, Program: racing(t)})
	proven := func(n int) func(*v1.ClusterState) bool {
		return func(s *v1.ClusterState) bool { return links(s, v1.LinkState_LINK_STATE_PROVEN) == n }
	}
	for _, n := range c.names {
		c.until(n, "three proven links", proven(3))
	}
	t.Run("status tells it as JSON", c.statusJSON)

	name := c.giveModel("alpha")
	c.until("gamma", "the model on alpha", func(s *v1.ClusterState) bool { return len(s.Models) == 1 && s.Models[0].Copies[0].Complete })
	before := c.bytesSent("alpha")
	out := c.run("alpha", "tbcluster", "cp", "models/"+name, "beta:models/")
	after := c.bytesSent("alpha")
	s := c.until("alpha", "a state", func(*v1.ClusterState) bool { return true })
	cable := between(s, "alpha", "beta").A.Interface
	size := fileSize(t, file)
	if got := after[cable] - before[cable]; got < size {
		t.Errorf("the cable carried %d bytes of %d\n%s", got, size, out)
	}
	if got := after["eth0"] - before["eth0"]; got > size/50 {
		t.Errorf("the LAN carried %d bytes of a copy over a cable", got)
	}
	sum := func(node string) string { return strings.Fields(c.run(node, "sha256sum", "/root/models/"+name))[0] }
	if sum("alpha") != sum("beta") {
		t.Fatal("what arrived is not what was sent")
	}
	if again := c.run("alpha", "tbcluster", "cp", "models/"+name, "beta:models/"); !strings.Contains(again, "already") {
		t.Errorf("a second run does not say that it was there already:\n%s", again)
	}

	model := strings.TrimSuffix(name, ".gguf")
	// At once, as a script would: the copy counts though no node has heard of it.
	c.run("alpha", "tbcluster", "place", model, "--node", "beta", "--name", "one")
	c.until("gamma", "the instance ready", ready("one"))
	c.chats("gamma", model)

	t.Run("the metrics tell of it, and no names", func(t *testing.T) { c.metricsTell(t, model, size) })

	c.until("alpha", "the model on beta", func(s *v1.ClusterState) bool {
		return len(s.Models) == 1 && len(s.Models[0].Copies) == 2 && s.Models[0].Copies[1].Complete
	})
	c.says(c.run("alpha", "tbcluster", "cp", "--model", model, "beta:"), "nothing to copy", "already there", "beta:/root/models/"+name)
	c.says(c.run("alpha", "tbcluster", "cp", "--model", model, "beta:", "-n"), "have "+fmt.Sprint(size)+" bytes", "would copy 0 B", "already there")
	if told := c.run("alpha", "tbcluster", "cp", "--model", model, "beta:", "-o", "json"); !strings.Contains(told, `"state":"done"`) || !strings.Contains(told, fmt.Sprintf(`"skipped_bytes":%d`, size)) {
		t.Errorf("in JSON a copy of what is there is\n%s", told)
	}

	t.Run("an agent that is killed finds its instance again", func(t *testing.T) {
		pid := instance(c.until("alpha", "ready", ready("one")), "one").Ranks[0].Pid
		ctx := t.Context()
		if err := c.lab.Kill(ctx, "beta", true); err != nil {
			t.Fatal(err)
		}
		c.until("alpha", "beta suspect or down", func(s *v1.ClusterState) bool { return node(s, "beta").State != v1.NodeState_NODE_STATE_UP })
		if err := c.lab.Start(ctx, "beta", true); err != nil {
			t.Fatal(err)
		}
		// What beta said of it before is kept until beta says it anew, with its links.
		s := c.until("alpha", "the instance ready again", func(s *v1.ClusterState) bool {
			return node(s, "beta").State == v1.NodeState_NODE_STATE_UP && ready("one")(s) && proven(3)(s)
		})
		if got := instance(s, "one").Ranks[0].Pid; got != pid {
			t.Errorf("the engine's pid was %d and is %d: it did not outlive the agent", pid, got)
		}
	})

	t.Run("a cable is cut and mended", func(t *testing.T) {
		ctx := t.Context()
		c.until("gamma", "all as before", func(s *v1.ClusterState) bool { return allUp(s) == nil && proven(3)(s) })
		if err := c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{}); err != nil {
			t.Fatal(err)
		}
		// That they stay up all the while is for TestNodeFaults, which runs alone.
		c.until("gamma", "the link down, and both nodes up, which the LAN still reaches", func(s *v1.ClusterState) bool {
			return between(s, "alpha", "beta").GetState() == v1.LinkState_LINK_STATE_DOWN && allUp(s) == nil
		})
		if err := c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{}); err != nil {
			t.Fatal(err)
		}
		c.until("gamma", "the link proven", proven(3))
	})

	t.Run("over two nodes", func(t *testing.T) {
		c.run("alpha", "tbcluster", "place", model, "--node", "alpha,beta", "--ranks", "2", "--name", "two")
		s := c.until("gamma", "the instance ready", ready("two"))
		if i := instance(s, "two"); len(i.Ranks) != 2 || i.Ranks[0].NodeId == i.Ranks[1].NodeId {
			t.Errorf("ranks: %v", i.Ranks)
		}
		c.in(t).chats("gamma", "two")
		c.run("gamma", "tbcluster", "stop", "two")
	})

	c.run("gamma", "tbcluster", "stop", "one")
	c.noEngines()
	before2 := c.run("alpha", "ip", "-o", "addr")
	c.run("alpha", "tbcluster", "down")
	if after := c.run("alpha", "ip", "-o", "addr"); strings.Contains(after, "10.77.") {
		t.Errorf("addresses left after down:\n%s\nbefore:\n%s", after, before2)
	}
}

func (c *cluster) statusJSON(t *testing.T) {
	out := c.run("alpha", "tbcluster", "status", "-o", "json")
	var s struct {
		Nodes []struct{ Name, ID, State, OS, Version string }
		Links []struct {
			A, B            *struct{ Node, Port, Interface, Address string }
			State, Evidence string
			NegotiatedGbps  float64 `json:"negotiated_gbps"`
			CapableGbps     float64 `json:"capable_gbps"`
			Paths           []struct{ Transport, Device, Interface, Address string }
		}
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if len(s.Nodes) != 3 || len(s.Links) != 3 {
		t.Fatalf("%d nodes, %d links\n%s", len(s.Nodes), len(s.Links), out)
	}
	for _, n := range s.Nodes {
		if n.Name == "" || n.ID == "" || n.State != "up" || n.OS != "linux" || n.Version == "" {
			t.Errorf("node %+v", n)
		}
	}
	for _, l := range s.Links {
		if l.State != "proven" || l.A == nil || l.B == nil || l.A.Address == "" || l.B.Interface == "" || l.NegotiatedGbps == 0 || l.Evidence == "" || len(l.Paths) == 0 || l.Paths[0].Transport != "tcp" {
			t.Errorf("link %+v", l)
		}
	}
}

// bytesSent are the transmit counters of a node's interfaces.
func (c *cluster) bytesSent(node string) map[string]uint64 {
	c.t.Helper()
	out := map[string]uint64{}
	for line := range strings.Lines(c.run(node, "cat", "/proc/net/dev")) {
		name, rest, ok := strings.Cut(strings.TrimSpace(line), ":")
		f := strings.Fields(rest)
		if !ok || len(f) < 9 {
			continue
		}
		n, err := strconv.ParseUint(f[8], 10, 64)
		if err != nil {
			c.t.Fatal(err)
		}
		out[name] = n
	}
	return out
}

func fileSize(t *testing.T, path string) uint64 {
	t.Helper()
	i, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return uint64(i.Size())
}

// ordinary is a number that is no user's, with as few rights as any.
const ordinary = 54321

// TestWholeJobAsOrdinaryUser runs the main job in a process that is not root.
func TestWholeJobAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this process is an ordinary user already: TestWholeJob was it")
	}
	t.Parallel()
	bin := racing(t)
	model := modelFile(t)
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "tbcluster-user")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	cache := filepath.Join(dir, ".cache/tbcluster")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, cmd := range [][]string{
		{"mkdir", "-p", filepath.Join(cache, "engines"), filepath.Join(cache, "models"), filepath.Join(dir, "run"), filepath.Join(dir, "tmp")},
		{"cp", "-a", llamacpp.UserDir(home), filepath.Join(cache, "engines")},
		{"cp", "-a", model, filepath.Join(cache, "models")},
		{"cp", self, filepath.Join(dir, "test")},
		{"cp", bin, filepath.Join(dir, "tbcluster")},
		{"chown", "-R", strconv.Itoa(ordinary) + ":" + strconv.Itoa(ordinary), dir},
		{"chmod", "755", dir},
		{"chmod", "700", filepath.Join(dir, "run")},
	} {
		if out, err := exec.Command(cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", cmd, err, out)
		}
	}
	cmd := exec.Command(filepath.Join(dir, "test"), "-test.run=^TestWholeJob$", "-test.v", "-test.timeout=5m")
	cmd.Dir = dir
	cmd.Env = []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH"), "XDG_RUNTIME_DIR=" + filepath.Join(dir, "run"), "TMPDIR=" + filepath.Join(dir, "tmp"),
		"TBCLUSTER_TEST_BINARY=" + filepath.Join(dir, "tbcluster")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ordinary, Gid: ordinary, Groups: []uint32{ordinary}}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}
