//go:build linux

package e2e

import (
	"slices"
	"strings"
	"testing"

	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestRefusals asks for what cannot be done: each answer names the thing, the
// node and the way out, ends with its exit code, and leaves nothing behind.
func TestRefusals(t *testing.T) {
	t.Parallel()
	modelFile(t)
	c := newCluster(t, lab.Options{Nodes: 2, Disk: 400 << 20})
	name := c.giveModel("alpha")
	stem := strings.TrimSuffix(name, ".gguf")
	c.run("alpha", "sh", "-c", "cd models && head -c 50000000 "+name+" > cut.gguf && cp "+name+" other.gguf && printf x >> other.gguf")
	c.run("beta", "sh", "-c", "head -c 350000000 /dev/zero > filler")
	c.run("alpha", "sh", "-c", "mkdir -p models/more && mv models/other.gguf models/more/"+strings.Replace(name, "Q4_1", "Q8_0", 1))
	c.scan("alpha")
	found := func(s *v1.ClusterState, word string) bool {
		return slices.ContainsFunc(s.Models, func(m *v1.Model) bool { return strings.Contains(m.Name, word) })
	}
	c.until("alpha", "the link and all models", func(s *v1.ClusterState) bool {
		return links(s, proven) == 1 && found(s, "cut") && found(s, "Q8_0") && found(s, "Q4_1")
	})
	ambiguous, _, _ := strings.Cut(stem, ".")
	for _, x := range []struct {
		what string
		argv []string
		exit int
		says []string
	}{
		{"an unknown flag", []string{"cp", "--fast", "a", "beta:"}, fault.ExitUsage, []string{"--fast", "--help"}},
		{"no agent", []string{"status", "--socket", "/nowhere.sock"}, fault.ExitNoAgent, []string{"/nowhere.sock", "tbcluster up"}},
		{"an unknown node", []string{"cp", "models/" + name, "omega:"}, fault.ExitUnknown, []string{"omega", "alpha", "beta"}},
		{"an unknown node to run on", []string{"place", stem, "--node", "omega"}, fault.ExitUnknown, []string{"omega", "alpha", "beta"}},
		{"an unknown model", []string{"place", "org/nothing"}, fault.ExitUnknown, []string{"org/nothing", "download"}},
		{"an ambiguous model", []string{"place", ambiguous}, fault.ExitUnknown, []string{ambiguous, "Q4_1", "Q8_0"}},
		{"an unknown instance", []string{"stop", "nothing"}, fault.ExitUnknown, []string{"nothing", "tbcluster place"}},
		{"a truncated model", []string{"place", "cut", "--node", "alpha"}, fault.ExitPrecondition, []string{"cut", "alpha", "50000000", "copy or download it"}},
		{"a missing file", []string{"cp", "models/none.gguf", "beta:"}, fault.ExitPartial, []string{"models/none.gguf", "alpha"}},
		{"a full disk", []string{"cp", "models/" + name, "beta:models/"}, fault.ExitFileIO, []string{"beta", "free"}},
	} {
		t.Run(x.what, func(t *testing.T) {
			c := c.in(t)
			out := c.fails(x.exit, "alpha", append([]string{"tbcluster"}, x.argv...)...)
			t.Log(out)
			c.says(out, x.says...)
		})
	}
	if out := c.run("beta", "sh", "-c", "ls -A ~ ~/models 2>/dev/null || true"); strings.Contains(out, ".gguf") {
		t.Errorf("a copy that was refused left something:\n%s", out)
	}
	s := c.until("alpha", "a state", func(*v1.ClusterState) bool { return true })
	if len(s.Instances) != 0 {
		t.Errorf("instances were left: %s", brief(s))
	}
	c.noEngines()

	t.Run("a missing engine", func(t *testing.T) {
		c := newCluster(t, lab.Options{Nodes: 2, Engines: t.TempDir()})
		c.giveModel("alpha")
		out := c.fails(fault.ExitPrecondition, "alpha", "tbcluster", "place", stem)
		t.Log(out)
		c.says(out, "alpha", "tbcluster engine install llamacpp")
	})
}
