//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestDesk is a desk as real ones are: two cables between each pair of machines,
// in ports that have one UUID, not as the ports are numbered; hubs, a dock, a
// disk that nobody has allowed; a machine that writes UUIDs in its own way.
func TestDesk(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Options{Nodes: 3, Cables: 2, Quirks: lab.Quirks})
	for _, n := range c.names {
		c.until(n, "all cables", func(s *v1.ClusterState) bool { return links(s, proven) == 6 })
	}
	for _, sub := range []struct {
		name string
		run  func(c *cluster)
	}{
		{"each link is a cable that there is", linksAreCables},
		{"what is no machine is no link", noMachines},
		{"a cable is measured, and both ends remember it", measured},
		{"a cable that is used is not measured unless asked to", usedCable},
		{"a cable that one end does not see is not proven", halfCable},
		{"a cable that went down is remembered", flapsRemembered},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(c.in(t)) })
	}
}

// cables are the lab's cables in words, as the truth of links.
func (c *cluster) cables() []string {
	c.t.Helper()
	s, err := c.lab.Status(context.Background())
	if err != nil {
		c.t.Fatal(err)
	}
	var out []string
	for _, k := range s.Cables {
		out = append(out, cableWords(k.A.Node+" "+k.A.Port, k.B.Node+" "+k.B.Port))
	}
	slices.Sort(out)
	return out
}

func cableWords(a, b string) string { return min(a, b) + " – " + max(a, b) }

func linksAreCables(c *cluster) {
	want := c.cables()
	for _, n := range c.names {
		s := c.until(n, "links", func(s *v1.ClusterState) bool { return links(s, proven) == 6 })
		var got []string
		for _, l := range s.Links {
			got = append(got, cableWords(l.A.NodeName+" "+l.A.Port, l.B.NodeName+" "+l.B.Port))
			hops := uint32(1)
			if l.A.NodeName == "alpha" || l.B.NodeName == "alpha" {
				hops = 2
			}
			if l.Hops != hops || l.Lanes != 2 || l.NegotiatedGbps != 40 || l.CapableGbps != 40 {
				c.t.Errorf("%s shows %v", n, l)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			c.t.Errorf("%s shows\n%s\nplugged in are\n%s", n, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

func noMachines(c *cluster) {
	s := c.until("alpha", "what is to be said of them", func(s *v1.ClusterState) bool {
		have := map[string]bool{}
		for _, f := range s.Findings {
			have[f.NodeName+" "+f.Code] = true
		}
		return have["alpha thunderbolt-not-authorised"] && have["beta thunderbolt-not-authorised"] && have["alpha peer-behind-hub"]
	})
	for _, f := range s.Findings {
		if f.Code == "thunderbolt-not-authorised" && !strings.Contains(f.Title+f.Evidence, "DiskCo") {
			c.t.Errorf("not the disk: %v", f)
		}
	}
	for _, l := range s.Links {
		if strings.Contains(l.B.GetNodeName(), "Co") {
			c.t.Errorf("a device is a link: %v", l)
		}
	}
}

// linksOf is `tbcluster links -o json` on a node.
func (c *cluster) linksOf(node string, args ...string) []map[string]any {
	c.t.Helper()
	var doc struct{ Links []map[string]any }
	out := c.run(node, append([]string{"tbcluster", "links", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		c.t.Fatalf("%v in %s", err, out)
	}
	return doc.Links
}

func measured(c *cluster) {
	out := c.run("gamma", "tbcluster", "links", "bench", "alpha:beta", "--seconds", "0.3") // not one of gamma's own
	if strings.Count(out, "round trip") != 2 {
		c.t.Errorf("two cables join them:\n%s", out)
	}
	for _, n := range c.names {
		c.until(n, "the measured rate", func(s *v1.ClusterState) bool {
			have := 0
			for _, l := range s.Links {
				m := l.Measurement
				if m != nil && l.MeasuredBytesPerSecond == min(m.AToBBytesPerSecond, m.BToABytesPerSecond) && l.MeasuredBytesPerSecond > 0 && m.RttUs > 0 && !m.Shared {
					have++
				}
			}
			return have == 2
		})
	}
	if !strings.Contains(c.run("gamma", "tbcluster", "status"), "B/s") {
		c.t.Error("status does not show what was measured")
	}
	if d := c.run("gamma", "tbcluster", "links", "alpha:beta"); strings.Count(d, "measured   ") != 2 {
		c.t.Errorf("links does not show what was measured:\n%s", d)
	}
	// A node that may not change anything may not load a cable either, and a
	// request that is none starts nothing.
	c.fails(3, "alpha", "tbcluster", "links", "bench", "alpha:nobody")
	c.fails(1, "alpha", "tbcluster", "links", "bench", "--seconds", "99")
}

func usedCable(c *cluster) {
	c.run("alpha", "sh", "-c", "head -c 64M /dev/urandom > big")
	id := fmt.Sprint(c.linksOf("alpha", "alpha:beta")[0]["id"])
	done := make(chan string, 1)
	go func() {
		out, err := c.tryRun("alpha", "tbcluster", "cp", "--bwlimit", "2M", "big", "beta:")
		done <- fmt.Sprint(out, err)
	}()
	// The limit gives it one connection to a path, and both cables are paths.
	s := c.until("alpha", "the copy under way", func(s *v1.ClusterState) bool {
		return slices.ContainsFunc(s.Transfers, func(t *v1.Transfer) bool {
			return t.State == v1.TransferState_TRANSFER_STATE_COPYING && slices.ContainsFunc(t.Links, func(p *v1.LinkProgress) bool { return p.LinkId != "" })
		})
	})
	for _, p := range s.Transfers[0].Links {
		if p.LinkId != "" {
			id = p.LinkId
		}
	}
	if out := c.fails(5, "gamma", "tbcluster", "links", "bench", id, "--seconds", "0.2"); !strings.Contains(out, "transfer "+s.Transfers[0].Id) || !strings.Contains(out, "--force") {
		c.t.Errorf("it does not say what uses it:\n%s", out)
	}
	// Whoever measures says that it is shared, as far as it has heard.
	c.until("beta", "the copy on that cable", func(o *v1.ClusterState) bool {
		return slices.ContainsFunc(transfer(o, s.Transfers[0].Id).GetLinks(), func(p *v1.LinkProgress) bool { return p.LinkId == id })
	})
	c.run("beta", "tbcluster", "links", "bench", id, "--seconds", "0.2", "--force")
	c.until("gamma", "a measurement that says so", func(s *v1.ClusterState) bool {
		return slices.ContainsFunc(s.Links, func(l *v1.Link) bool { return l.Id == id && l.Measurement.GetShared() })
	})
	if _, err := v1.NewTransferServiceClient(c.api("alpha")).Cancel(context.Background(), &v1.CancelTransferRequest{Id: s.Transfers[0].Id}); err != nil {
		c.t.Error(err)
	}
	c.t.Logf("the copy that was in its way: %s", <-done)
}

func halfCable(c *cluster) {
	ctx := context.Background()
	c.must(c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{Cable: 1, Half: true}))
	for _, n := range c.names {
		c.until(n, "a cable less, and why", func(s *v1.ClusterState) bool {
			return links(s, proven) == 5 && slices.ContainsFunc(s.Links, func(l *v1.Link) bool {
				return l.State != proven && (strings.Contains(l.Reason, "alpha") || strings.Contains(l.Reason, "beta"))
			})
		})
	}
	c.must(c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{Cable: 1}))
	for _, n := range c.names {
		c.until(n, "the cable again", func(s *v1.ClusterState) bool { return links(s, proven) == 6 })
	}
	linksAreCables(c)
}

func flapsRemembered(c *cluster) {
	ctx := context.Background()
	var id string
	for range 2 {
		c.must(c.lab.Cut(ctx, "beta", "gamma", lab.CutOptions{Cable: 2}))
		s := c.until("alpha", "a cable less", func(s *v1.ClusterState) bool { return links(s, proven) == 5 })
		for _, l := range s.Links {
			if l.State != proven {
				id = l.Id
			}
		}
		c.must(c.lab.Mend(ctx, "beta", "gamma", lab.MendOptions{Cable: 2, Rename: true}))
		for _, n := range c.names {
			c.until(n, "the cable again", func(s *v1.ClusterState) bool { return links(s, proven) == 6 })
		}
	}
	remembered := func(s *v1.ClusterState) bool {
		return slices.ContainsFunc(s.Links, func(l *v1.Link) bool {
			back := 0
			for _, f := range l.FlapHistory {
				if f.BackAt != nil && f.Reason != "" && len(f.SeenBy) == 2 {
					back++
				}
			}
			return l.Id == id && l.State == proven && back == 2
		})
	}
	c.until("alpha", "two times down", remembered)
	// Both ends' agents begin anew; what was measured and what happened stays.
	for _, n := range []string{"beta", "gamma"} {
		// It is on disk after two seconds at most.
		c.run(n, "sh", "-c", "for i in $(seq 600); do grep -Eq '\"flaps\":\\[[^]]*\"back\"[^]]*\"back\"' /var/lib/tbcluster/agent/link-history.json && exit; sleep 0.1; done; exit 1")
		c.must(c.lab.Kill(ctx, n, true))
	}
	for _, n := range []string{"beta", "gamma"} {
		c.must(c.lab.Start(ctx, n, true))
	}
	anew := func(s *v1.ClusterState) bool { // flaps count since the agents started
		return slices.ContainsFunc(s.Links, func(l *v1.Link) bool { return l.Id == id && l.Flaps == 0 })
	}
	s := c.until("alpha", "all again", func(s *v1.ClusterState) bool {
		return allUp(s) == nil && links(s, proven) == 6 && anew(s) && remembered(s)
	})
	for _, l := range s.Links {
		if ab := l.A.NodeName + l.B.NodeName; strings.Contains(ab, "alpha") && strings.Contains(ab, "beta") && l.MeasuredBytesPerSecond == 0 {
			c.t.Errorf("what was measured is forgotten: %v", l)
		}
	}
	c.until("gamma", "two times down", remembered) // as alpha shows it: it comes from both ends
	if out := c.run("gamma", "tbcluster", "links", id); strings.Count(out, "seen by beta and gamma")+strings.Count(out, "seen by gamma and beta") != 2 {
		c.t.Errorf("links does not tell of it:\n%s", out)
	}
}
