//go:build linux

package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/backoff"

	"tbcluster/engine/llamacpp"
)

var quick = backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond}

// The program is built twice: as people get it, and with the race detector,
// which takes several times as long for everything. TBCLUSTER_TEST_BINARY names
// a ready one for both.
var (
	buildDir = sync.OnceValues(func() (string, error) {
		dir, err := os.MkdirTemp("", "tbcluster-e2e")
		if err != nil {
			return "", err
		}
		return dir, os.Chmod(dir, 0o755)
	})
	released = sync.OnceValues(func() (string, error) { return build("tbcluster", []string{"-trimpath"}, "CGO_ENABLED=0") })
	raced    = sync.OnceValues(func() (string, error) { return build("tbcluster-race", []string{"-race"}, "CGO_ENABLED=1") })
)

func build(name string, flags []string, env string) (string, error) {
	if p := os.Getenv("TBCLUSTER_TEST_BINARY"); p != "" {
		return p, nil
	}
	dir, err := buildDir()
	if err != nil {
		return "", err
	}
	p := filepath.Join(dir, name)
	cmd := exec.Command("go", append(append([]string{"build"}, flags...), "-o", p, "tbcluster/cmd/tbcluster")...)
	cmd.Env = append(os.Environ(), env)
	cmd.Stderr = os.Stderr
	return p, cmd.Run()
}

// binary is the program as people get it; in the long run, the one with the
// race detector.
func binary(t *testing.T) string {
	t.Helper()
	if os.Getenv("TBCLUSTER_LONG") != "" {
		return racing(t)
	}
	p, err := released()
	if err != nil {
		t.Fatalf("build the program: %v", err)
	}
	return p
}

// racing is the program with the race detector.
func racing(t *testing.T) string {
	t.Helper()
	p, err := raced()
	if err != nil {
		t.Fatalf("build the program with the race detector: %v", err)
	}
	return p
}

// installed puts engine and model into the cache, once, as users do.
var installed = sync.OnceValues(func() (string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if _, err := llamacpp.Install(ctx, llamacpp.UserDir(home), func(string) {}); err != nil {
		return "", err
	}
	return llamacpp.InstallModel(ctx, llamacpp.ModelDir(home), func(string) {})
})

// modelFile is the path of the small model.
func modelFile(t *testing.T) string {
	t.Helper()
	p, err := installed()
	if err != nil {
		t.Fatalf("install engine and model: %v", err)
	}
	return p
}
