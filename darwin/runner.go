package darwin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// programDirs are where the system's programs are.
var programDirs = []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/libexec/ApplicationFirewall"}

// runTimeout is how long a program may take.
const runTimeout = 20 * time.Second

// Exec is the Runner of a real Mac. It runs the system's programs only.
type Exec struct{}

// Run implements Runner.
func (Exec) Run(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	path, err := program(name)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + strings.Join(programDirs, ":")}
	cmd.WaitDelay = time.Second
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return out, fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(complaint.Bytes()))
	}
	// route(8) complains and ends with status 0.
	return append(out, complaint.Bytes()...), nil
}

func program(name string) (string, error) {
	for _, dir := range programDirs {
		path := filepath.Join(dir, name)
		switch _, err := os.Stat(path); {
		case err == nil:
			return path, nil
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}
