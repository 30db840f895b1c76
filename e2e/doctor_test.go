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

// findings asks one node to have another look for what is wrong with it, until
// what it finds fits.
func (c *cluster) findings(ask, of, what string, fits func(codes []string) bool) []*v1.Finding {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var last *v1.CheckResponse
	for ctx.Err() == nil {
		r, err := v1.NewDoctorServiceClient(c.api(ask)).Check(ctx, &v1.CheckRequest{Nodes: []string{of}})
		if err == nil {
			last = r
			var codes []string
			for _, f := range r.Findings {
				codes = append(codes, f.Code)
			}
			if len(r.Failures) == 0 && fits(codes) {
				return r.Findings
			}
		}
		time.Sleep(250 * time.Millisecond) // it is asked for, and tells of nothing by itself
	}
	c.t.Fatalf("%s, asked by %s: waiting for %s: last %v", of, ask, what, last)
	return nil
}

func all(codes ...string) func([]string) bool {
	return func(found []string) bool {
		return !slices.ContainsFunc(codes, func(c string) bool { return !slices.Contains(found, c) })
	}
}

func none(codes ...string) func([]string) bool {
	return func(found []string) bool {
		return !slices.ContainsFunc(codes, func(c string) bool { return slices.Contains(found, c) })
	}
}

func finding(list []*v1.Finding, code string) string {
	for _, f := range list {
		if f.Code == code {
			return strings.Join([]string{f.Title, f.Meaning, f.Fix, f.Evidence}, "\n")
		}
	}
	return ""
}

// TestDoctor makes nodes ill and has them tell, over the mesh, what it is.
func TestDoctor(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Options{Nodes: 2})
	alpha, beta := c.names[0], c.names[1]
	s := c.until(alpha, "the cable", func(s *v1.ClusterState) bool {
		return len(s.Links) > 0 && s.Links[0].State == v1.LinkState_LINK_STATE_PROVEN
	})
	own, far := s.Links[0].A, s.Links[0].B
	if own.NodeName != alpha {
		own, far = far, own
	}
	there, _, _ := strings.Cut(far.Address, "/")
	routes := []string{"wrong-way", "default-route-on-cable", "offload-when-forwarding"}
	c.findings(beta, alpha, "none of them", none(routes...))

	ill := `ip route add default dev eth0 table 52
ip rule add pref 90 to ` + there + ` lookup 52
ip route add default dev ` + own.Interface + ` metric 9999
echo 1 > /proc/sys/net/ipv4/conf/` + own.Interface + `/forwarding`
	c.run(alpha, "sh", "-ec", ill)
	found := c.findings(beta, alpha, "what is wrong with its routes", all(routes...))
	c.says(finding(found, "wrong-way"), "over eth0", "ip route get "+there, "its cable is "+own.Interface)
	c.says(finding(found, "default-route-on-cable"), "sudo ip route del default dev "+own.Interface)
	c.says(finding(found, "offload-when-forwarding"), "ethtool -K "+own.Interface+" tso off")
	// The same stands in the state, for the screen and for whoever watches.
	c.until(beta, "the finding in the state", func(s *v1.ClusterState) bool {
		return slices.ContainsFunc(s.Findings, func(f *v1.Finding) bool { return f.Code == "wrong-way" && f.NodeName == alpha })
	})
	c.run(alpha, "sh", "-ec", `ip rule del pref 90
ip route del default dev `+own.Interface+` metric 9999
echo 0 > /proc/sys/net/ipv4/conf/`+own.Interface+`/forwarding`)
	c.findings(beta, alpha, "none of them any more", none(routes...))

	c.run(beta, "nft", "add table inet closed; add chain inet closed input { type filter hook input priority 0; }; add rule inet closed input iifname != lo meta l4proto tcp drop")
	c.says(finding(c.findings(beta, beta, "its firewall", all("firewall-in-the-way")), "firewall-in-the-way"),
		"a firewall on "+beta, "chain input of the nftables table inet closed", "sudo nft insert rule inet closed input iifname "+far.Interface+" accept")
	if os.Getenv("TBCLUSTER_LONG") != "" { // it takes half a minute
		c.says(finding(c.findings(alpha, alpha, "that it is heard", all("node-blocked")), "node-blocked"), beta+" announces itself", "firewall")
	}
	c.run(beta, "nft", "delete", "table", "inet", "closed")
	c.findings(beta, beta, "no firewall any more", none("firewall-in-the-way"))
	c.findings(alpha, alpha, "beta again", none("node-blocked", "node-down"))
	lostState(c, alpha, beta)
}

// lostState: a machine whose state is gone is another node, and the others say
// so, first while it is a stranger and then while it is in the cluster again,
// until the old node was put out.
func lostState(c *cluster, alpha, beta string) {
	c.run(beta, "sh", "-ec", "tbcluster down; rm -rf /var/lib/tbcluster/*; tbcluster up")
	c.says(finding(c.findings(alpha, alpha, "that a stranger is in place of "+beta, all("node-renewed")), "node-renewed"),
		beta+" came back as another node: node ", "tbcluster pair --revoke "+beta, "pair CODE", "answers at an address of "+beta)
	c.pair(alpha, beta)
	for _, n := range []string{alpha, beta} {
		s := c.until(n, "what became of "+beta, func(s *v1.ClusterState) bool {
			return strings.Contains(finding(s.Findings, "node-renewed"), beta+"-2 is in the cluster already")
		})
		if got := finding(s.Findings, "node-down"); got != "" {
			c.t.Errorf("%s says also: %s", n, got)
		}
	}
	c.run(alpha, "tbcluster", "pair", "--revoke", beta, "--yes")
	c.run(alpha, "tbcluster", "node", "rename", beta+"-2", beta)
	for _, n := range []string{alpha, beta} {
		c.until(n, "two nodes", func(s *v1.ClusterState) bool {
			return len(s.Nodes) == 2 && node(s, beta).GetState() == v1.NodeState_NODE_STATE_UP && finding(s.Findings, "node-renewed") == ""
		})
	}
}
