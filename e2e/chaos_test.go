//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// lookEvery is how many steps of harm there are between two looks.
const lookEvery = 20

// TestChaos does to a cluster at work what comes to its mind, and looks again
// and again whether what every node shows is what is. TBCLUSTER_SEED repeats a
// run.
func TestChaos(t *testing.T) {
	if os.Getenv("TBCLUSTER_LONG") == "" {
		t.Skip("takes minutes: TBCLUSTER_LONG=1")
	}
	steps := 200
	if s := os.Getenv("TBCLUSTER_STEPS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		steps = n
	}
	m := newChaos(t, uint64(time.Now().UnixNano()))
	for _, n := range m.names {
		m.model = strings.TrimSuffix(m.giveModel(n), ".gguf")
	}
	for _, n := range m.names {
		m.until(n, "the model", func(s *v1.ClusterState) bool { return len(s.Models) == 1 })
	}
	for step := 1; step <= steps; step++ {
		m.step()
		if step%lookEvery == 0 {
			m.look()
		}
	}
	m.end()
}

// TestAFewStepsOfChaos is the beginning of such a run, always the same one, on a
// cluster without models.
func TestAFewStepsOfChaos(t *testing.T) {
	t.Parallel()
	m := newChaos(t, 460)
	for range lookEvery {
		m.step()
	}
	m.look()
	m.end()
}

// newChaos makes a cluster of three with something to copy.
func newChaos(t *testing.T, seed uint64) *chaos {
	if s := os.Getenv("TBCLUSTER_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TBCLUSTER_SEED=%d", seed)
	m := &chaos{rnd: rand.New(rand.NewPCG(seed, 0))}
	t.Cleanup(m.work.Wait) // after the lab is down: what still runs then ends, and may log no later
	c := newCluster(t, lab.Options{Nodes: 3, Boot: rememberingBoot()})
	m.cluster, m.begin = c, time.Now()
	for _, n := range c.names {
		c.run(n, "sh", "-c", "mkdir -p src dst; head -c 8000000 /dev/urandom > src/"+n+"; sync")
	}
	for _, n := range c.names {
		c.until(n, "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
	return m
}

// chaos is a cluster that is done harm to.
type chaos struct {
	*cluster
	rnd   *rand.Rand
	begin time.Time
	model string
	// work are the commands that still run; what they say does not matter, that
	// they end does.
	work sync.WaitGroup
}

// harm is something that can be done.
type harm struct {
	name   string
	weight int
	do     func(m *chaos, ctx context.Context, n string, pair [2]string) error
}

var harms = []harm{
	{"cut", 4, func(m *chaos, ctx context.Context, _ string, p [2]string) error {
		return m.lab.Cut(ctx, p[0], p[1], lab.CutOptions{})
	}},
	{"silence", 2, func(m *chaos, ctx context.Context, _ string, p [2]string) error {
		return m.lab.Cut(ctx, p[0], p[1], lab.CutOptions{Silent: true})
	}},
	{"mend", 6, func(m *chaos, ctx context.Context, _ string, p [2]string) error {
		return m.lab.Mend(ctx, p[0], p[1], lab.MendOptions{})
	}},
	{"rename", 3, func(m *chaos, ctx context.Context, _ string, p [2]string) error {
		return m.lab.Mend(ctx, p[0], p[1], lab.MendOptions{Rename: true})
	}},
	{"kill", 1, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.lab.Kill(ctx, n, false) }},
	{"kill agent", 2, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.lab.Kill(ctx, n, true) }},
	{"start", 4, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.start(ctx, n) }},
	{"pause", 1, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.lab.Pause(ctx, n, false) }},
	{"pause agent", 1, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.lab.Pause(ctx, n, true) }},
	{"resume", 3, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.start(ctx, n) }},
	{"cut LAN", 1, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.lab.CutLAN(ctx, n) }},
	{"mend LAN", 3, func(m *chaos, ctx context.Context, n string, _ [2]string) error { return m.lab.MendLAN(ctx, n) }},
	{"part", 2, func(m *chaos, ctx context.Context, n string, _ [2]string) error {
		// One is alone: the LAN falls apart, and so do its cables.
		err := m.lab.Part(ctx, []string{n})
		for _, o := range m.names {
			if o != n && err == nil {
				err = m.lab.Cut(ctx, n, o, lab.CutOptions{})
			}
		}
		return err
	}},
	{"heal", 3, func(m *chaos, ctx context.Context, _ string, _ [2]string) error { return m.lab.Part(ctx) }},
	{"copy", 4, func(m *chaos, _ context.Context, n string, p [2]string) error {
		m.command(n, "tbcluster", "cp", "--bwlimit", "4M", p[0]+":src/"+p[0], p[1]+":dst/")
		return nil
	}},
	{"place", 2, func(m *chaos, _ context.Context, n string, _ [2]string) error {
		if m.model == "" {
			return nil
		}
		m.command(n, "tbcluster", "place", m.model, "--node", n, "--name", "on-"+n)
		return nil
	}},
	{"stop", 1, func(m *chaos, _ context.Context, n string, _ [2]string) error {
		m.command(n, "tbcluster", "stop", "--rm", "on-"+n)
		return nil
	}},
	{"wait", 4, func(m *chaos, _ context.Context, _ string, _ [2]string) error {
		time.Sleep(time.Duration(m.rnd.IntN(2500)) * time.Millisecond)
		return nil
	}},
}

// start makes a node run with its agent, whatever it does now.
func (m *chaos) start(ctx context.Context, n string) error {
	x := m.nodeStatus(n)
	var err error
	if x.State != lab.Running {
		err = m.lab.Start(ctx, n, false)
	}
	if x = m.nodeStatus(n); err == nil && x.Agent != lab.Running {
		err = m.lab.Start(ctx, n, true)
	}
	return err
}

// command runs something on a node beside everything else, if it can.
func (m *chaos) command(n string, argv ...string) {
	if m.nodeStatus(n).State != lab.Running {
		return
	}
	m.work.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		var out strings.Builder
		code, err := m.lab.Exec(ctx, n, lab.ExecOptions{Argv: argv, Stdout: &out, Stderr: &out})
		m.t.Logf("%s: %s: exit %d, %v: %s", n, strings.Join(argv, " "), code, err, out.String())
		if errors.Is(ctx.Err(), context.DeadlineExceeded) && m.nodeStatus(n).State == lab.Running {
			m.t.Errorf("%s: %s did not end", n, strings.Join(argv, " "))
		}
	})
}

func (m *chaos) status() lab.Status {
	s, err := m.lab.Status(context.Background())
	if err != nil {
		m.t.Fatal(err)
	}
	return s
}

func (m *chaos) nodeStatus(n string) lab.NodeStatus {
	s := m.status()
	return s.Nodes[slices.IndexFunc(s.Nodes, func(x lab.NodeStatus) bool { return x.Name == n })]
}

func (m *chaos) step() {
	sum := 0
	for _, h := range harms {
		sum += h.weight
	}
	at := m.rnd.IntN(sum)
	for _, h := range harms {
		if at -= h.weight; at >= 0 {
			continue
		}
		p := m.rnd.Perm(len(m.names))
		n, pair := m.names[m.rnd.IntN(len(m.names))], [2]string{m.names[p[0]], m.names[p[1]]}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		// That something is not possible now (a cable of a node that is off) is
		// no news.
		err := h.do(m, ctx, n, pair)
		m.t.Logf("%6.1fs %s %s %v: %v", time.Since(m.begin).Seconds(), h.name, n, pair, err)
		if ctx.Err() != nil {
			m.t.Fatalf("%s did not end", h.name)
		}
		return
	}
}

// look waits until every node shows what is.
func (m *chaos) look() {
	s := m.status()
	m.t.Logf("%6.1fs look: %s", time.Since(m.begin).Seconds(), truth(s))
	for _, n := range s.Nodes {
		if n.State != lab.Running || n.Agent != lab.Running {
			continue
		}
		var wrong string
		state, err := m.wait(n.Name, patience, func(st *v1.ClusterState) bool {
			wrong = m.wrong(s, n.Name, st)
			return wrong == ""
		})
		if err != nil {
			for _, o := range m.names {
				out, err := m.tryRun(o, "sh", "-c", "ip -br addr; ip route; ss -tnp | grep -v 127.0; for n in "+strings.Join(m.names, " ")+"; do tbcluster ping $n; done")
				m.t.Logf("--- network of %s (%v)\n%s", o, err, out)
			}
			m.t.Fatalf("%s shows what is not: %s\ntruth: %s\nstate: %s", n.Name, wrong, truth(s), brief(state))
		}
	}
}

func truth(s lab.Status) string {
	var b strings.Builder
	for _, n := range s.Nodes {
		fmt.Fprintf(&b, "%s %s, agent %s, LAN cut %t, side %d; ", n.Name, n.State, n.Agent, n.LANCut, n.LANSide)
	}
	for _, c := range s.Cables {
		fmt.Fprintf(&b, "%s:%s %s; ", c.A.Node, c.B.Node, c.State)
	}
	return b.String()
}

// wrong says what a node's picture has that is not so; "" for nothing.
func (m *chaos) wrong(s lab.Status, viewer string, st *v1.ClusterState) string {
	runs := map[string]lab.NodeStatus{}
	for _, n := range s.Nodes {
		if n.State == lab.Running && n.Agent == lab.Running {
			runs[n.Name] = n
		}
	}
	plugged := func(a, b string) bool {
		return slices.ContainsFunc(s.Cables, func(c lab.CableStatus) bool {
			return (c.A.Node == a && c.B.Node == b || c.A.Node == b && c.B.Node == a) && c.State == lab.Plugged
		})
	}
	reaches := func(a, b string) bool {
		x, okA := runs[a]
		y, okB := runs[b]
		return okA && okB && (a == b || !x.LANCut && !y.LANCut && x.LANSide == y.LANSide || plugged(a, b))
	}
	for _, n := range s.Nodes {
		got := node(st, n.Name).GetState()
		if up := got == v1.NodeState_NODE_STATE_UP; up != reaches(viewer, n.Name) {
			return fmt.Sprintf("%s is %s", n.Name, got)
		}
		i := instance(st, "on-"+n.Name)
		if !reaches(viewer, n.Name) {
			if i.GetState() == v1.InstanceState_INSTANCE_STATE_READY {
				return fmt.Sprintf("%s is ready on a node that nobody hears of", i.Name)
			}
			continue
		}
		if i == nil {
			continue
		}
		switch i.State {
		case v1.InstanceState_INSTANCE_STATE_READY:
			out, err := m.tryRun(n.Name, "kill", "-0", fmt.Sprint(i.Ranks[0].Pid))
			if err != nil {
				return fmt.Sprintf("%s is ready, and its engine is not there: %s", i.Name, out)
			}
		case v1.InstanceState_INSTANCE_STATE_FAILED, v1.InstanceState_INSTANCE_STATE_STOPPED:
		default:
			return fmt.Sprintf("%s is still %s", i.Name, i.State)
		}
	}
	for _, c := range s.Cables {
		a, b := c.A.Node, c.B.Node
		if !reaches(viewer, a) || !reaches(viewer, b) {
			// What is known of it is old; of its own cable a node knows.
			if a != viewer && b != viewer {
				continue
			}
		}
		_, okA := runs[a]
		_, okB := runs[b]
		l := between(st, a, b)
		if (l.GetState() == v1.LinkState_LINK_STATE_PROVEN) != (okA && okB && c.State == lab.Plugged) {
			return fmt.Sprintf("the cable %s:%s is %s and the link %s (%s)", a, b, c.State, l.GetState(), l.GetReason())
		}
	}
	return ""
}

// end makes everything whole again, looks at it, and takes it down: nothing may
// be left.
func (m *chaos) end() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	for _, n := range m.names {
		m.must(m.start(ctx, n))
		m.must(m.lab.MendLAN(ctx, n))
	}
	m.must(m.lab.Part(ctx))
	for _, c := range m.status().Cables {
		m.must(m.lab.Mend(ctx, c.A.Node, c.B.Node, lab.MendOptions{}))
	}
	m.look()
	m.work.Wait()
	m.look()
	for _, n := range m.names {
		for _, f := range strings.Fields(m.run(n, "ls", "dst")) {
			if want, got := m.run(f, "sh", "-c", "sha256sum < src/"+f), m.run(n, "sh", "-c", "sha256sum < dst/"+f); want != got {
				m.t.Errorf("%s of %s arrived on %s as something else", f, f, n)
			}
		}
		m.t.Logf("%s: %s", n, m.run(n, "sh", "-c", "for p in $(pidof tbcluster); do echo $p: $(ls /proc/$p/fd | wc -l) descriptors, $(grep -i threads /proc/$p/status), $(grep RSS /proc/$p/status), $(tr '\\0' ' ' < /proc/$p/cmdline); done"))
	}
	for _, n := range m.names {
		m.t.Logf("%s: %s", n, m.run(n, "tbcluster", "down", "--stop"))
	}
	m.noEngines()
	for _, n := range m.names {
		m.asBefore(n)
		// A worker ends a moment after the agent that it worked for.
		left := m.processes(n, "tbcluster agent", "tbcluster worker")
		for end := time.Now().Add(endsWithin); len(left) > 0 && time.Now().Before(end); left = m.processes(n, "tbcluster agent", "tbcluster worker") {
			time.Sleep(100 * time.Millisecond)
		}
		if len(left) > 0 {
			m.t.Errorf("%s: still running: %v", n, left)
		}
	}
}
