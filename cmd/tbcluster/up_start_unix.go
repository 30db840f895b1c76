//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"tbcluster/api/fault"
)

// startPatience is how long an agent may take until it answers.
const startPatience = 20 * time.Second

// isRoot reports whether the agent that `up` starts can be the machine's.
func isRoot() bool { return os.Getuid() == 0 }

// startAgent starts an agent that goes on without us and waits until it
// answers at e. What it prints until then goes to a file beside the socket, so
// that an agent that ends at once can be quoted.
func startAgent(ctx context.Context, o *upOptions, e *endpoint) (*client, error) {
	program := o.program
	if program == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, fault.New(fault.Internal, "find this program's own file", err, "start the agent by hand: `tbcluster agent`")
		}
		program = exe
	}
	dir := filepath.Dir(e.path)
	mode := os.FileMode(0o755)
	if !isRoot() {
		mode = 0o700
	}
	if err := os.MkdirAll(dir, mode); err != nil {
		return nil, fault.New(fault.FileIO, "make the directory of the agent's socket", err, "make it by hand, or set XDG_RUNTIME_DIR").At(dir)
	}
	if e.owned != "" {
		if err := ownDirectory(e.owned); err != nil {
			return nil, fault.New(fault.Denied, "use the directory of the agent's socket", err, "set XDG_RUNTIME_DIR to a directory of your own")
		}
	}
	said, err := os.OpenFile(filepath.Join(dir, "start.log"), os.O_CREATE|os.O_TRUNC|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fault.New(fault.FileIO, "write the agent's first output", err, "make it writable").At(dir)
	}
	defer said.Close()
	args := []string{"agent"}
	if isRoot() {
		args = append(args, "--root")
	}
	cmd := exec.Command(program, args...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = said, said
	// Its own session: neither the terminal's Ctrl-C nor its end is the agent's.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fault.New(fault.Internal, "start the agent", err, "start it by hand: `tbcluster agent`").At(program)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	c, err := dial(e)
	if err != nil {
		return nil, err
	}
	patience := time.NewTimer(startPatience)
	defer patience.Stop()
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		// The socket first: a gRPC connection that failed once waits a second.
		if _, statErr := os.Stat(e.path); statErr == nil {
			if err := answers(ctx, c); err == nil {
				return c, nil
			}
			c.conn.ResetConnectBackoff()
		}
		select {
		case <-ctx.Done():
			c.close()
			return nil, fault.New(fault.Interrupted, "stopped waiting for the agent, which goes on starting", nil, "`tbcluster down` ends it")
		case err := <-ended:
			c.close()
			return nil, fault.New(fault.NoAgent, "the agent ended as soon as it was started", errors.New(startWords(said, err)), "`tbcluster logs --agent` shows what else it said; start it by hand to see it end: `"+program+" "+strings.Join(args, " ")+"`").At(program)
		case <-patience.C:
			c.close()
			return nil, fault.New(fault.Timeout, fmt.Sprintf("the agent was started and does not answer after %s", startPatience), errors.New(startWords(said, nil)), "`tbcluster logs --agent` once it does; `tbcluster down` ends it").At(e.path)
		case <-tick.C:
		}
	}
}

// startWords returns the end of what the agent printed and how it ended.
func startWords(f *os.File, exit error) string {
	var b strings.Builder
	const tail = 4096
	info, err := f.Stat()
	if err == nil {
		if _, err = f.Seek(max(0, info.Size()-tail), io.SeekStart); err == nil {
			_, err = io.Copy(&b, io.LimitReader(f, tail))
		}
	}
	if err != nil {
		fmt.Fprintf(&b, "(its output could not be read: %v)", err)
	}
	words := strings.TrimSpace(b.String())
	if exit != nil {
		words = strings.TrimSpace(words + "\n" + exit.Error())
	}
	if words == "" {
		return "it said nothing"
	}
	return words
}
