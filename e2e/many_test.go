//go:build linux

package e2e

import (
	"fmt"
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

// The promises for many nodes on one machine, beside what is measured.
const (
	manyMemory = 80.0 // MB for each agent, both halves
	manyCPU    = 0.5  // cores for all agents together, with nothing to do
	manySeen   = time.Second
	// manyChanges are made one right after the other.
	manyChanges = 30
)

// TestLimitManyNodes measures what a cluster costs by its number of nodes: all
// of them in a full exchange of state, cabled as a ring. TBCLUSTER_NODES names
// other numbers than 64 ("2,8,64").
func TestLimitManyNodes(t *testing.T) {
	limits(t)
	if os.Getenv("TBCLUSTER_LONG") == "" {
		t.Skip("takes minutes: TBCLUSTER_LONG=1")
	}
	numbers := "64"
	if s := os.Getenv("TBCLUSTER_NODES"); s != "" {
		numbers = s
	}
	for s := range strings.SplitSeq(numbers, ",") {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(s, func(t *testing.T) { many(t, n) })
	}
}

// neighbours makes room for what every node knows of every other: the kernel
// bounds its neighbours once for all network namespaces of the machine, by 1024
// unless set. Machines of their own have no such trouble.
func neighbours(t *testing.T, n int) {
	t.Helper()
	for _, family := range []string{"ipv4", "ipv6"} {
		for _, bound := range []string{"gc_thresh3", "gc_thresh2", "gc_thresh1"} {
			path := "/proc/sys/net/" + family + "/neigh/default/" + bound
			was, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			have, err := strconv.Atoi(strings.TrimSpace(string(was)))
			if err != nil {
				t.Fatal(err)
			}
			if have >= 4*n*n {
				continue
			}
			if err := os.WriteFile(path, []byte(strconv.Itoa(4*n*n)), 0o644); err != nil {
				t.Skipf("%d nodes on one machine need room for their neighbours, which root can make: %v", n, err)
			}
			t.Cleanup(func() {
				if err := os.WriteFile(path, was, 0o644); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func many(t *testing.T, n int) {
	neighbours(t, n)
	begin := time.Now()
	c := newCluster(t, lab.Options{Nodes: n, Topology: lab.Ring, Memory: 1 << 30, Disk: 64 << 20})
	cables := n
	if n == 2 {
		cables = 1
	}
	for _, node := range c.names {
		c.until(node, "every link", func(s *v1.ClusterState) bool { return links(s, proven) == cables })
	}
	t.Logf("%d nodes: paired, and every link proven for all, after %v", n, time.Since(begin).Round(time.Millisecond))

	// What a start leaves to do ends: browses are few again, collectors have run.
	c.run("alpha", "sleep", "30")
	const over = 40 * time.Second
	before := c.costs()
	from := time.Now()
	c.run("alpha", "sleep", strconv.Itoa(int(over.Seconds())))
	after := c.costs()
	took := time.Since(from).Seconds()
	var rss, pss []float64
	cores := 0.0
	for node, a := range after {
		rss, pss = append(rss, a.rss/(1<<20)), append(pss, a.pss/(1<<20))
		cores += (a.cpu - before[node].cpu).Seconds() / took
	}
	slices.Sort(rss)
	slices.Sort(pss)

	seen := &limit{what: fmt.Sprintf("%d nodes: a change seen by all", n), most: manySeen}
	mended := &limit{what: fmt.Sprintf("%d nodes: a cable mended, proven for all", n), most: 2 * time.Second}
	eyes := make([]*observer, n)
	for i, node := range c.names {
		eyes[i] = c.observe(node)
	}
	// everywhere adds how long after from the last node shows the state, and says who
	// that was where it is more than promised.
	everywhere := func(l *limit, from time.Time, state v1.LinkState) {
		var wg sync.WaitGroup
		after := make([]time.Duration, n)
		for i, o := range eyes {
			o.late.Reset(patience)
			wg.Go(func() {
				for between(o.state, c.names[0], c.names[1]).GetState() != state {
					if !o.tryNext() {
						break
					}
				}
				after[i] = time.Since(from)
			})
		}
		wg.Wait()
		last := slices.Max(after)
		if l.add(last); last > l.most {
			t.Logf("%v until %s shows it, the last; at the cable's ends after %v and %v", last.Round(time.Millisecond),
				c.names[slices.Index(after, last)], after[0].Round(time.Millisecond), after[1].Round(time.Millisecond))
		}
	}
	for range manyChanges {
		from := time.Now()
		c.must(c.lab.Cut(t.Context(), c.names[0], c.names[1], lab.CutOptions{}))
		everywhere(seen, from, down)
		from = time.Now()
		c.must(c.lab.Mend(t.Context(), c.names[0], c.names[1], lab.MendOptions{}))
		everywhere(mended, from, proven)
	}
	f := func(v float64) string { return fmt.Sprintf("%.1f MB", v) }
	line(t, fmt.Sprintf("%d nodes: resident memory of an agent, both halves", n), f(manyMemory), f(rss[n/2]), f(rss[n-1]), n)
	line(t, fmt.Sprintf("%d nodes: of it its own (proportional set size)", n), "-", f(pss[n/2]), f(pss[n-1]), n)
	line(t, fmt.Sprintf("%d nodes: all agents with nothing to do", n), fmt.Sprintf("%.2f cores", manyCPU), fmt.Sprintf("%.3f cores", cores), fmt.Sprintf("%.3f cores", cores), 1)
	seen.check(t)
	mended.check(t)
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		t.Logf("load: %s", load)
	}
	if worst := rss[n-1]; worst > 2*manyMemory {
		t.Errorf("an agent has %.1f MB, more than twice %.0f MB", worst, manyMemory)
	}
	if cores > 2*manyCPU {
		t.Errorf("all agents together take %.3f cores, more than twice %.2f", cores, manyCPU)
	}
}

// cost is what the processes of a node's agent hold and have used.
type cost struct {
	rss, pss float64
	cpu      time.Duration
}

// costs reads them for all nodes.
func (c *cluster) costs() map[string]cost {
	c.t.Helper()
	out := map[string]cost{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	gate := make(chan struct{}, 8)
	for _, n := range c.names {
		wg.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			text, err := c.tryRun(n, "sh", "-c", `for p in /proc/[0-9]*; do c=$(tr '\0' ' ' <$p/cmdline 2>/dev/null); case "$c" in tbcluster*agent*) s=$(cat $p/stat 2>/dev/null) && echo "stat $s"; grep -sE '^(Rss|Pss):' $p/smaps_rollup;; esac; done; true`)
			if err != nil {
				c.t.Errorf("%s: %v", n, err)
				return
			}
			var x cost
			for l := range strings.Lines(text) {
				f := strings.Fields(l)
				switch f[0] {
				case "Rss:", "Pss:":
					v, err := strconv.ParseFloat(f[1], 64)
					if err != nil {
						c.t.Errorf("%s: %q: %v", n, l, err)
					}
					if f[0] == "Rss:" {
						x.rss += v * 1024
					} else {
						x.pss += v * 1024
					}
				case "stat":
					f = strings.Fields(l[strings.LastIndex(l, ")")+1:])
					for _, i := range []int{11, 12} {
						v, err := strconv.ParseUint(f[i], 10, 64)
						if err != nil {
							c.t.Errorf("%s: %q: %v", n, l, err)
						}
						x.cpu += time.Duration(v) * 10 * time.Millisecond // CLK_TCK is 100
					}
				}
			}
			if x.rss == 0 {
				c.t.Errorf("no agent found on %s", n)
			}
			mu.Lock()
			defer mu.Unlock()
			out[n] = x
		})
	}
	wg.Wait()
	return out
}
