package cluster

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"tbcluster/rig"
)

// program builds the program as people get it.
func program(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tbcluster")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", file, "tbcluster/cmd/tbcluster")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the program: %v\n%s", err, out)
	}
	return file
}

func TestPair(t *testing.T) {
	topology := rig.Pair()
	topology.LAN = true
	r := rig.StartWith(t, topology, rig.Options{Files: Files(program(t))})
	r.Settled(t)
	c := New(r)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := c.Up(ctx); err != nil {
		t.Fatal(err)
	}
	out, err := r.Host("a").Run(ctx, Path, "status")
	t.Logf("%v\n%s", err, out)
}
