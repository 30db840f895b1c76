//go:build linux

package e2e

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// The limits are what people are promised; they hold on an idle machine, with
// the release build. A busy machine may take up to twice as long before the
// test fails: what it prints is the measurement.
type limit struct {
	what   string
	most   time.Duration
	values []time.Duration
	// difference: each value is the difference of two runs, whose noise adds up:
	// the median is judged, else the worst.
	difference bool
}

var report []string

func (l *limit) add(d time.Duration) { l.values = append(l.values, d) }

// check prints limit beside measured, and fails at twice the limit.
func (l *limit) check(t *testing.T) {
	t.Helper()
	if len(l.values) == 0 {
		t.Errorf("%s: nothing was measured", l.what)
		return
	}
	slices.Sort(l.values)
	median, worst := l.values[len(l.values)/2], l.values[len(l.values)-1]
	line(t, l.what, fmt.Sprint(l.most), fmt.Sprint(median.Round(time.Millisecond)), fmt.Sprint(worst.Round(time.Millisecond)), len(l.values))
	judged, which := worst, "worst"
	if l.difference {
		judged, which = median, "median"
	}
	if judged > 2*l.most {
		t.Errorf("%s: %s %v is more than twice the limit of %v", l.what, which, judged, l.most)
	}
}

func line(t *testing.T, what, most, median, worst string, n int) {
	t.Helper()
	s := fmt.Sprintf("%-58s limit %-8s median %-8s worst %-8s (%d)", what, most, median, worst, n)
	report = append(report, s)
	t.Log(s)
}

// limits skips a test that measures unless it is asked for, with the build that
// people get.
func limits(t *testing.T) {
	t.Helper()
	if os.Getenv("TBCLUSTER_LIMITS") == "" {
		t.Skip("measured by `make test-limits` alone, with the release build")
	}
}

const (
	proven = v1.LinkState_LINK_STATE_PROVEN
	down   = v1.LinkState_LINK_STATE_DOWN
)

func TestLimitStart(t *testing.T) {
	limits(t)
	l := &limit{what: "lab up, three nodes paired, every link proven", most: 5 * time.Second}
	for range 3 {
		begin := time.Now()
		c := newCluster(t, lab.Options{Nodes: 3})
		for _, n := range c.names {
			c.until(n, "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
		}
		l.add(time.Since(begin))
	}
	l.check(t)
}

func TestLimitLinks(t *testing.T) {
	limits(t)
	c := newCluster(t, lab.Options{Nodes: 3})
	all := func(s *v1.ClusterState) bool { return links(s, proven) == 3 }
	for _, n := range c.names {
		c.until(n, "links", all)
	}
	cut := &limit{what: "cable cut, shown down", most: 1500 * time.Millisecond}
	mend := &limit{what: "cable mended, proven", most: 2 * time.Second}
	silent := &limit{what: "cable silent, proven no more", most: 3 * time.Second}
	ab := func(state v1.LinkState) func(*v1.ClusterState) bool {
		return func(s *v1.ClusterState) bool { return between(s, "alpha", "beta").GetState() == state }
	}
	for i := range 8 {
		o := lab.CutOptions{Silent: i%4 == 3}
		begin := time.Now()
		if err := c.lab.Cut(t.Context(), "alpha", "beta", o); err != nil {
			t.Fatal(err)
		}
		for _, n := range []string{"gamma", "alpha", "beta"} {
			c.until(n, "down", func(s *v1.ClusterState) bool { return !ab(proven)(s) })
		}
		if o.Silent {
			silent.add(time.Since(begin))
		} else {
			cut.add(time.Since(begin))
			c.until("gamma", "down", ab(down))
		}
		begin = time.Now()
		if err := c.lab.Mend(t.Context(), "alpha", "beta", lab.MendOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, n := range []string{"gamma", "alpha", "beta"} {
			c.until(n, "proven", ab(proven))
		}
		mend.add(time.Since(begin))
	}
	cut.check(t)
	mend.check(t)
	silent.check(t)
}

// TestLimitPlugs plugs one cable in fifty times, now and then into interfaces of
// other names, and looks from its ends and from a node that it does not touch.
func TestLimitPlugs(t *testing.T) {
	limits(t)
	c := newCluster(t, lab.Options{Nodes: 3})
	for _, n := range c.names {
		c.until(n, "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
	plug := &limit{what: "cable in, proven for all (50 plugs)", most: 2 * time.Second}
	ctx := t.Context()
	for i := range 50 {
		if err := c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, n := range c.names {
			c.until(n, "down", func(s *v1.ClusterState) bool { return between(s, "alpha", "beta").GetState() == down })
		}
		begin := time.Now() // the interface appears later than that
		if err := c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{Rename: i%5 == 4}); err != nil {
			t.Fatal(err)
		}
		for _, n := range c.names {
			c.until(n, "proven", func(s *v1.ClusterState) bool { return between(s, "alpha", "beta").GetState() == proven })
		}
		plug.add(time.Since(begin))
	}
	plug.check(t)
}

func TestLimitIdle(t *testing.T) {
	limits(t)
	c := newCluster(t, lab.Options{Nodes: 3})
	c.until("alpha", "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	c.run("alpha", "sleep", "5") // what a start leaves to do
	const over = 20 * time.Second
	before := map[string]usage{}
	for _, n := range c.names {
		before[n] = c.usage(n)
	}
	c.run("alpha", "sleep", strconv.Itoa(int(over.Seconds())))
	var rss, cpu []float64
	for _, n := range c.names {
		now := c.usage(n)
		rss = append(rss, float64(now.rss)/(1<<20))
		cpu = append(cpu, 100*(now.cpu-before[n].cpu).Seconds()/over.Seconds())
	}
	for _, x := range []struct {
		what, unit string
		most       float64
		values     []float64
	}{{"idle agent, both halves: resident memory", "MB", 60, rss}, {"idle agent, both halves: share of a core", "%", 1, cpu}} {
		slices.Sort(x.values)
		f := func(v float64) string { return fmt.Sprintf("%.2f %s", v, x.unit) }
		worst := x.values[len(x.values)-1]
		line(t, x.what, f(x.most), f(x.values[len(x.values)/2]), f(worst), len(x.values))
		if worst > 2*x.most {
			t.Errorf("%s: %s is more than twice the limit of %s", x.what, f(worst), f(x.most))
		}
	}
}

type usage struct {
	rss uint64
	cpu time.Duration
}

// usage is what the processes of a node's agent have used.
func (c *cluster) usage(node string) (u usage) {
	c.t.Helper()
	out := c.run(node, "sh", "-c", `for p in /proc/[0-9]*; do c=$(tr '\0' ' ' <$p/cmdline 2>/dev/null); case "$c" in tbcluster*agent*) s=$(cat $p/stat 2>/dev/null) && echo "$s";; esac; done; true`)
	const tick = 10 * time.Millisecond // CLK_TCK is 100 on every Linux that matters here
	for l := range strings.Lines(out) {
		f := strings.Fields(l[strings.LastIndex(l, ")")+1:])
		num := func(i int) uint64 {
			n, err := strconv.ParseUint(f[i], 10, 64)
			if err != nil {
				c.t.Fatalf("stat %q: %v", l, err)
			}
			return n
		}
		u.cpu += time.Duration(num(11)+num(12)) * tick
		u.rss += num(21) * uint64(os.Getpagesize())
	}
	if u.rss == 0 {
		c.t.Fatalf("no agent found on %s", node)
	}
	return u
}

func TestLimitNodes(t *testing.T) {
	limits(t)
	c := newCluster(t, lab.Options{Nodes: 3})
	c.until("alpha", "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	beta := func(states ...v1.NodeState) func(*v1.ClusterState) bool {
		return func(s *v1.ClusterState) bool { return slices.Contains(states, node(s, "beta").GetState()) }
	}
	const up, suspect, gone = v1.NodeState_NODE_STATE_UP, v1.NodeState_NODE_STATE_SUSPECT, v1.NodeState_NODE_STATE_DOWN
	killed := &limit{what: "agent killed, suspect", most: time.Second}
	dead := &limit{what: "agent killed, down", most: 11 * time.Second}
	back := &limit{what: "agent started again, up", most: 3 * time.Second}
	paused := &limit{what: "node paused, suspect", most: 4 * time.Second}
	for i := range 3 {
		begin := time.Now()
		if err := c.lab.Kill(t.Context(), "beta", true); err != nil {
			t.Fatal(err)
		}
		c.until("alpha", "suspect", beta(suspect, gone))
		killed.add(time.Since(begin))
		if i == 0 {
			c.until("alpha", "down", beta(gone))
			dead.add(time.Since(begin))
		}
		begin = time.Now()
		if err := c.lab.Start(t.Context(), "beta", true); err != nil {
			t.Fatal(err)
		}
		c.until("alpha", "up", beta(up))
		back.add(time.Since(begin))
		c.until("alpha", "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
	for range 2 {
		begin := time.Now()
		if err := c.lab.Pause(t.Context(), "beta", true); err != nil {
			t.Fatal(err)
		}
		c.until("alpha", "suspect", beta(suspect, gone))
		paused.add(time.Since(begin))
		if err := c.lab.Resume(t.Context(), "beta", true); err != nil {
			t.Fatal(err)
		}
		c.until("alpha", "up", beta(up))
	}
	for _, l := range []*limit{killed, dead, back, paused} {
		l.check(t)
	}
}

func TestLimitInstances(t *testing.T) {
	limits(t)
	c := newCluster(t, lab.Options{Nodes: 3})
	name := c.giveModel("alpha")
	model := strings.TrimSuffix(name, ".gguf")
	c.until("alpha", "links and model", func(s *v1.ClusterState) bool { return links(s, proven) == 3 && len(s.Models) == 1 })
	added := &limit{what: "place, beyond the engine's own start", most: time.Second, difference: true}
	for i := range 3 {
		own := c.startByHand("alpha", name)
		begin := time.Now()
		inst := fmt.Sprint("i", i)
		c.run("alpha", "tbcluster", "place", model, "--node", "alpha", "--name", inst)
		c.until("alpha", "ready", ready(inst))
		added.add(max(0, time.Since(begin)-own))
		c.run("alpha", "tbcluster", "stop", "--rm", inst)
	}
	added.check(t)

	notReady := &limit{what: "a rank or cable gone, instance not ready", most: 5 * time.Second}
	for i, fail := range []struct {
		what       string
		do, mended func() error
	}{
		{"rank killed", func() error { c.run("alpha", "pkill", "-9", "llama-server"); return nil }, func() error { return nil }},
		{"RPC server gone", func() error { c.run("beta", "pkill", "-9", "rpc-server"); return nil }, func() error { return nil }},
		{"silent cable", func() error { return c.lab.Cut(t.Context(), "alpha", "beta", lab.CutOptions{Silent: true}) },
			func() error { return c.lab.Mend(t.Context(), "alpha", "beta", lab.MendOptions{}) }},
	} {
		inst := fmt.Sprint("g", i)
		c.run("alpha", "tbcluster", "place", model, "--node", "alpha,beta", "--ranks", "2", "--name", inst)
		c.until("gamma", "ready", ready(inst))
		begin := time.Now()
		if err := fail.do(); err != nil {
			t.Fatal(err)
		}
		c.until("gamma", "not ready", func(s *v1.ClusterState) bool { return !ready(inst)(s) })
		notReady.add(time.Since(begin))
		s := c.until("gamma", "failed", func(s *v1.ClusterState) bool {
			return instance(s, inst).GetState() == v1.InstanceState_INSTANCE_STATE_FAILED
		})
		t.Logf("%s: %s", fail.what, instance(s, inst).Reason)
		if r := instance(s, inst).Reason; !strings.Contains(r, "alpha") && !strings.Contains(r, "beta") {
			t.Errorf("%s: the reason names no node: %s", fail.what, r)
		}
		if err := fail.mended(); err != nil {
			t.Fatal(err)
		}
		c.until("gamma", "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
	notReady.check(t)
}

// startByHand starts the engine as a person would and returns how long it is
// until its first completion has come back.
func (c *cluster) startByHand(node, model string) time.Duration {
	c.t.Helper()
	out := c.run(node, "sh", "-c", `
		s=$(find /opt/tbcluster/engines/llamacpp -name llama-server | head -1)
		exec python3 -c '
import subprocess, sys, time, urllib.request
begin = time.monotonic()
log = open("/tmp/hand.log", "wb")
engine = subprocess.Popen([sys.argv[1], "-m", sys.argv[2], "--host", "127.0.0.1", "--port", "9999", "-c", "2048", "-np", "1"], stdout=log, stderr=log)
try:
    while time.monotonic() - begin < 60 and engine.poll() is None:
        try:
            urllib.request.urlopen("http://127.0.0.1:9999/completion", b"{\"prompt\":\"a\",\"n_predict\":1}", timeout=10).read()
            print(time.monotonic() - begin)
            break
        except Exception:
            time.sleep(0.02)
    else:
        raise SystemExit("it never answered: " + open("/tmp/hand.log", errors="replace").read()[-2000:])
finally:
    engine.kill()
    engine.wait()
' "$s" "$HOME/models/`+model+`"`)
	seconds, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
	if err != nil {
		c.t.Fatal(err)
	}
	return time.Duration(seconds * float64(time.Second))
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "agent", "worker", "rank":
			evilMain(os.Args[1])
		case "connect":
			connectMain(os.Args[2])
		}
	}
	code := m.Run()
	if len(report) > 0 {
		fmt.Println("\nLimits, beside what was measured:")
		for _, l := range report {
			fmt.Println("  " + l)
		}
	}
	if dir, err := buildDir(); err == nil {
		_ = os.RemoveAll(dir) // at worst a leftover in the temporary directory
	}
	os.Exit(code)
}
