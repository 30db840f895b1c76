package guest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"tbcluster/api/fault"
)

// agentPackage is the import path of the agent.
const agentPackage = "tbcluster/rig/guest/guestd"

// BuildAgent returns the file of a guestd, as BuildProgram does.
func BuildAgent(ctx context.Context) (string, error) { return BuildProgram(ctx, agentPackage) }

// BuildProgram returns the file of a program for guests, by the import path of a
// main package of this module: the one beside the running program that is called
// like the package, if there is one, else one built from source, which takes the
// go command and a working directory inside the module. Go's cache makes that
// cheap.
func BuildProgram(ctx context.Context, importPath string) (string, error) {
	name := path.Base(importPath)
	what := "build " + name + ", which the rig's guests run"
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), name); isFile(beside) {
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
	work, err := os.MkdirTemp(dir, name+".new-")
	if err != nil {
		return "", fault.New(fault.FileIO, "make a directory", err, "").At(dir)
	}
	defer os.RemoveAll(work)
	file := filepath.Join(work, name)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", file, importPath)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return "", fault.New(fault.Interrupted, what, context.Cause(ctx), "")
		}
		why := errors.New(strings.TrimSpace(string(out) + "\n" + err.Error()))
		return "", fault.New(fault.Unsupported, what, why, "run it inside a clone with Go installed, or put "+name+" beside the program")
	}
	// Named by what it is, so that neither a guest that boots nor another build
	// sees it change.
	b, err := os.ReadFile(file)
	if err != nil {
		return "", fault.New(fault.FileIO, "read "+name+", which was just built", err, "")
	}
	sum := sha256.Sum256(b)
	final := filepath.Join(dir, name+"-"+hex.EncodeToString(sum[:8]))
	if isFile(final) {
		return final, nil
	}
	old, err := filepath.Glob(filepath.Join(dir, name+"-*"))
	if err != nil {
		return "", err
	}
	if err := os.Rename(file, final); err != nil {
		return "", fault.New(fault.FileIO, "keep "+name+", which the rig's guests run", err, "").At(dir)
	}
	return final, removeStale(old)
}

func isFile(name string) bool {
	st, err := os.Stat(name)
	return err == nil && st.Mode().IsRegular()
}
