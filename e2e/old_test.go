//go:build linux

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// older is this program without what the previous minor version lacked.
var older = sync.OnceValues(func() (string, error) {
	dir, err := buildDir()
	if err != nil {
		return "", err
	}
	p := filepath.Join(dir, "tbcluster-older")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-X main.version="+olderVersion+" -X tbcluster/agent.features=", "-o", p, "tbcluster/cmd/tbcluster")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	return p, cmd.Run()
})

const olderVersion = "0.0.9"

// A node of the previous minor version takes part in everything that it knows,
// and what it does not is said with its name and the version to install.
func TestANodeOfTheVersionBeforeWorks(t *testing.T) {
	t.Parallel()
	old, err := older()
	if err != nil {
		t.Fatalf("build the older program: %v", err)
	}
	c := newCluster(t, lab.Options{Nodes: 3, Binds: []lab.Bind{{Source: old, Target: "/opt/older"}},
		Config: map[string]any{"forward": true},
		Boot:   []string{"sh", "-c", "[ $(hostname) != beta ] || exec /opt/older agent --root; exec tbcluster agent --root"}})
	for _, n := range c.names {
		s := c.until(n, "every link, by what each knows", func(s *v1.ClusterState) bool {
			return links(s, proven) == 3 && !slices.ContainsFunc(s.Nodes, func(x *v1.Node) bool { return x.NodeAddress == "" }) &&
				!slices.ContainsFunc(s.Links, func(l *v1.Link) bool { return l.A.Mtu != l.B.Mtu || l.A.Mtu < 9000 })
		})
		if v := node(s, "beta").Version; v != olderVersion {
			t.Fatalf("%s: beta runs %s", n, v)
		}
	}
	for _, p := range [][2]string{{"alpha", "beta"}, {"beta", "gamma"}} {
		c.run(p[0], "sh", "-c", "head -c 3000000 /dev/urandom > /root/of-"+p[0])
		c.run(p[0], "tbcluster", "cp", "/root/of-"+p[0], p[1]+":/root/")
		if a, b := c.run(p[0], "sha256sum", "/root/of-"+p[0]), c.run(p[1], "sha256sum", "/root/of-"+p[0]); a != b {
			t.Errorf("%s and %s", a, b)
		}
	}
	// What one says, all hear, both ways.
	for _, n := range []string{"alpha", "beta"} {
		for _, o := range c.names {
			c.until(o, "the copy from "+n, func(s *v1.ClusterState) bool {
				return slices.ContainsFunc(s.Transfers, func(x *v1.Transfer) bool {
					return slices.ContainsFunc(x.Sources, func(f string) bool { return strings.HasSuffix(f, "/of-"+n) })
				})
			})
			if out := c.run(o, "tbcluster", "status", "-o", "json"); !strings.Contains(out, "of-"+n) {
				t.Errorf("%s does not tell of the copy from %s:\n%s", o, n, out)
			}
		}
	}
	if out := c.run("gamma", "tbcluster", "doctor"); !strings.Contains(out, olderVersion) {
		t.Errorf("nothing is said of the version:\n%s", out)
	}
	out, err := c.tryRun("gamma", "tbcluster", "links", "bench", "alpha:beta")
	if err == nil || !strings.Contains(out, "beta") || !strings.Contains(out, "install tbcluster") {
		t.Errorf("what beta cannot do: %v\n%s", err, out)
	}
	c.run("gamma", "tbcluster", "down", "--stop")
	c.until("beta", "gamma down, and told so", func(s *v1.ClusterState) bool { return node(s, "gamma").GetState() == v1.NodeState_NODE_STATE_DOWN })
}
