package guest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"tbcluster/api/fault"
)

// agentPackage is the import path of the agent.
const agentPackage = "tbcluster/rig/guest/guestd"

// BuildAgent returns the file of a guestd: the one beside the running program,
// if there is one, else one built from source, which takes the go command and a
// working directory inside the module. Go's cache makes that cheap.
func BuildAgent(ctx context.Context) (string, error) {
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), "guestd"); isFile(beside) {
			return beside, nil
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fault.New(fault.FileIO, "find the cache directory", err, "set XDG_CACHE_HOME or HOME")
	}
	dir := filepath.Join(cache, "tbcluster", "rig")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fault.New(fault.FileIO, "make the cache directory", err, "").At(dir)
	}
	work, err := os.MkdirTemp(dir, "guestd.new-")
	if err != nil {
		return "", fault.New(fault.FileIO, "make a directory", err, "").At(dir)
	}
	defer os.RemoveAll(work)
	file := filepath.Join(work, "guestd")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", file, agentPackage)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return "", fault.New(fault.Interrupted, "build the agent of the rig's guests", context.Cause(ctx), "")
		}
		why := errors.New(strings.TrimSpace(string(out) + "\n" + err.Error()))
		return "", fault.New(fault.Unsupported, "build the agent of the rig's guests", why, "run it inside a clone with Go installed, or put guestd beside the program")
	}
	// Named by what it is, so that neither a guest that boots nor another build
	// sees it change.
	b, err := os.ReadFile(file)
	if err != nil {
		return "", fault.New(fault.FileIO, "read the agent that was just built", err, "")
	}
	sum := sha256.Sum256(b)
	final := filepath.Join(dir, "guestd-"+hex.EncodeToString(sum[:8]))
	if isFile(final) {
		return final, nil
	}
	old, err := filepath.Glob(filepath.Join(dir, "guestd-*"))
	if err != nil {
		return "", err
	}
	if err := os.Rename(file, final); err != nil {
		return "", fault.New(fault.FileIO, "keep the agent of the rig's guests", err, "").At(dir)
	}
	return final, removeStale(old)
}

func isFile(name string) bool {
	st, err := os.Stat(name)
	return err == nil && st.Mode().IsRegular()
}
