//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// readmeCommands are the commands of the README for real machines that pair them.
func readmeCommands(t *testing.T) (open, join string) {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, real, ok := strings.Cut(string(text), "## On real machines\n")
	found := regexp.MustCompile(`(?m)^    (tbcluster pair)\s+#.*\n    (tbcluster pair CODE)\s+#`).FindStringSubmatch(real)
	if !ok || found == nil {
		t.Fatal("the README does not say how to pair")
	}
	return found[1], found[2]
}

// TestLimitPairing: somebody who has read the README and nothing else pairs three
// machines with two codes.
func TestLimitPairing(t *testing.T) {
	limits(t)
	open, join := readmeCommands(t)
	c := newLab(t, lab.Options{Nodes: 3, Config: map[string]any{"owners": []string{"ada"}}})
	for _, n := range c.names {
		c.addUser(n, "ada", 4003)
	}
	l := &limit{what: "three nodes paired with two codes, as the README says", most: time.Minute}
	begin := time.Now()
	for _, other := range c.names[1:] {
		shown, ended := &syncBuffer{}, make(chan error, 1)
		go func() { ended <- c.types("alpha", "ada", open, shown) }()
		shown.says(t, "tbcluster pair ", ended)
		code := regexp.MustCompile(`tbcluster pair (\S+)`).FindStringSubmatch(shown.String())
		if code == nil {
			t.Fatalf("no code: %s", shown.String())
		}
		var out syncBuffer
		if err := c.types(other, "ada", strings.Replace(join, "CODE", code[1], 1), &out); err != nil {
			t.Fatalf("%s: %v\n%s", other, err, out.String())
		}
		shown.done(t, ended)
		c.says(shown.String(), other+" is in the cluster")
		c.says(out.String(), "paired with alpha")
	}
	for _, n := range c.names {
		c.until(n, "all nodes up", func(s *v1.ClusterState) bool { return len(s.Nodes) == 3 && allUp(s) == nil })
	}
	l.add(time.Since(begin))
	l.check(t)
	// What the README says next works, for the one who paired.
	for _, line := range []string{"tbcluster status", "echo hello > x; tbcluster cp x gamma:x"} {
		var out syncBuffer
		if err := c.types("beta", "ada", line, &out); err != nil {
			t.Errorf("%s: %v\n%s", line, err, out.String())
		}
	}
	if got := c.run("gamma", "stat", "-c", "%U", "/home/ada/x"); got != "ada\n" {
		t.Errorf("what was copied belongs to %s", got)
	}
}

// types runs a line in a shell of a user of a node.
func (c *cluster) types(node, user, line string, out *syncBuffer) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	code, err := c.lab.Exec(ctx, node, lab.ExecOptions{Argv: []string{"sh", "-c", line}, User: user, Env: []string{noLinger}, Stdout: out, Stderr: out})
	if err == nil && code != 0 {
		err = fmt.Errorf("exit %d", code)
	}
	return err
}
