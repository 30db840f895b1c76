package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"tbcluster/api/fault"
)

// run runs a program and returns what it printed on standard output. When it
// fails, the error has the end of what it said.
func run(ctx context.Context, cmd *exec.Cmd) (string, error) {
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// With its children, should we be interrupted or die.
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return out.String(), context.Cause(ctx)
		}
		return out.String(), &commandError{args: cmd.Args, err: err, said: lastLines(errs.String(), out.String()), all: errs.String() + out.String()}
	}
	return out.String(), nil
}

// commandError is a program that failed, with what it said.
type commandError struct {
	args []string
	err  error
	said string // the end of it
	all  string
}

func (e *commandError) Error() string {
	name := strings.Join(e.args, " ")
	if len(name) > 120 {
		name = name[:120] + " ..."
	}
	return fmt.Sprintf("%s: %v: %s", name, e.err, e.said)
}

func (e *commandError) Unwrap() error { return e.err }

// lastLines returns the end of the first of several texts that is not empty.
func lastLines(texts ...string) string {
	for _, t := range texts {
		if t = strings.TrimSpace(t); t != "" {
			lines := strings.Split(t, "\n")
			return strings.Join(lines[max(0, len(lines)-12):], "\n")
		}
	}
	return "it said nothing"
}

// needs refuses to begin without root and the programs that are named.
func needs(what string, programs ...string) error {
	if os.Geteuid() != 0 {
		return fault.Newf(fault.NoPermission, "run it once as root; what is built can then be used by anyone", "%s: that takes root", what)
	}
	var missing []string
	for _, p := range programs {
		if _, err := exec.LookPath(p); errors.Is(err, exec.ErrNotFound) {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return fault.Newf(fault.Unsupported, "`scripts/deps test` installs them on Debian", "%s needs what is not installed here: %s", what, strings.Join(missing, ", "))
	}
	return nil
}
