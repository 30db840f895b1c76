//go:build linux

package e2e

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestDiscovery takes away what nodes find each other by: the LAN first, then
// multicast on all interfaces. What is left is enough each time, to pair and
// after everything was forgotten.
func TestDiscovery(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := newLab(t, lab.Options{Nodes: 2, Config: map[string]any{
		// Both are in the list of both: who one is oneself is left out.
		"peers": []string{"172.31.77.10", "172.31.77.11:7871"},
	}})
	together := func(s *v1.ClusterState) bool { return len(s.Nodes) == 2 && allUp(s) == nil && links(s, proven) == 1 }

	t.Log("the LAN is down: a cable alone, without any address of IPv4")
	for _, n := range c.names {
		c.must(c.lab.CutLAN(ctx, n))
	}
	c.pair("alpha", "beta")
	for _, n := range c.names {
		s := c.until(n, "the other one over the cable", func(s *v1.ClusterState) bool {
			// Between two channels there is none for a moment.
			return together(s) && !slices.ContainsFunc(s.Nodes, func(x *v1.Node) bool { return !x.Self && x.ControlPath == "" })
		})
		for _, x := range s.Nodes {
			if !x.Self && !strings.Contains(x.ControlPath, "thunderbolt") {
				t.Errorf("%s reaches %s by %q with the LAN down", n, x.Name, x.ControlPath)
			}
		}
	}
	c.restartAgents(nil)
	for _, n := range c.names {
		c.until(n, "the other one after a start without a LAN", together)
	}

	t.Log("a cable comes back in other ports")
	c.must(c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{}))
	c.until("alpha", "the cable down", func(s *v1.ClusterState) bool { return links(s, proven) == 0 })
	before := c.cables()
	c.must(c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{Move: true}))
	after := c.cables()
	if slices.Equal(before, after) {
		t.Fatalf("it is where it was: %v", after)
	}
	for _, n := range c.names {
		// A node that has not seen it go shows it where it was.
		c.until(n, "the cable as "+after[0]+", and nothing left of the old", func(s *v1.ClusterState) bool {
			if !together(s) || len(s.Links) != 1 {
				return false
			}
			l := s.Links[0]
			return cableWords(l.A.NodeName+" "+l.A.Port, l.B.NodeName+" "+l.B.Port) == after[0]
		})
	}

	t.Log("multicast is refused everywhere, and nobody remembers an address: the list of peers is left")
	for _, n := range c.names {
		c.must(c.lab.MendLAN(ctx, n))
		c.must(c.lab.SetMulticast(ctx, n, lab.MulticastRefused))
	}
	c.restartAgents([]string{"addresses.json", "links.json", "members.json", "link-history.json"})
	for _, n := range c.names {
		c.until(n, "the other one by the list", together)
		s := c.until(n, "the finding", hasFinding(n, "multicast-blocked"))
		for _, f := range s.Findings {
			if f.Code == "multicast-blocked" && !strings.Contains(f.Evidence, "refuse") {
				t.Errorf("%s: the evidence is %q", n, f.Evidence)
			}
		}
	}

	t.Log("it is let through again")
	for _, n := range c.names {
		c.must(c.lab.SetMulticast(ctx, n, ""))
	}
	if os.Getenv("TBCLUSTER_LONG") == "" {
		return
	}
	t.Log("multicast is lost on the way")
	for _, n := range c.names {
		c.until(n, "no finding", func(s *v1.ClusterState) bool { return !hasFinding(n, "multicast-blocked")(s) })
	}
	c.must(c.lab.SetMulticast(ctx, "alpha", lab.MulticastLost))
	s, err := c.wait("alpha", 3*time.Minute, hasFinding("alpha", "multicast-blocked"))
	if err != nil {
		t.Fatalf("%v\n%s", err, brief(s))
	}
	for _, f := range s.Findings {
		if f.Code == "multicast-blocked" && f.NodeName == "alpha" && !strings.Contains(f.Evidence, "beta") {
			t.Errorf("the evidence is %q", f.Evidence)
		}
	}
}

// hasFinding says whether a node has a finding of a code.
func hasFinding(node, code string) func(*v1.ClusterState) bool {
	return func(s *v1.ClusterState) bool {
		return slices.ContainsFunc(s.Findings, func(f *v1.Finding) bool { return f.NodeName == node && f.Code == code })
	}
}

// restartAgents kills all agents, removes files of their state, and starts them.
func (c *cluster) restartAgents(remove []string) {
	c.t.Helper()
	ctx := context.Background()
	for _, n := range c.names {
		c.must(c.lab.Kill(ctx, n, true))
	}
	for _, n := range c.names {
		for _, f := range remove {
			c.run(n, "rm", "-f", "/var/lib/tbcluster/agent/"+f)
		}
	}
	for _, n := range c.names {
		c.must(c.lab.Start(ctx, n, true))
	}
}
