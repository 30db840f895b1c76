package lab

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// settle is how long processes get to stop or to die of a signal. Both are
// matters of microseconds, but for processes in uninterruptible sleep.
const settle = 5 * time.Second

// kill is a power cut, or SIGKILL for both halves of the agent.
func (k *keeper) kill(n *node, agentOnly bool) error {
	if n.boot == nil {
		return n.running()
	}
	if !agentOnly {
		k.cutPower(n)
		return nil
	}
	killed := 0
	err := until(n, "kill the agent of "+n.name, func() (bool, error) {
		agent, err := k.agentOf(n.boot)
		if err != nil || len(agent) == 0 {
			// The boot command can be started again once the init has seen its end.
			return n.boot.bootEnded(), err
		}
		for pid := range agent {
			if err := unix.Kill(pid, unix.SIGKILL); err == nil {
				killed++
			} else if !errors.Is(err, unix.ESRCH) {
				return false, err
			}
		}
		return false, nil
	})
	if err == nil && killed == 0 {
		return noAgent(n)
	}
	return err
}

func noAgent(n *node) error {
	return fault.Newf(fault.NoAgent, Command(n.lab, "start "+n.name+" --agent")+" starts it", "no agent runs on %s", n.name)
}

// start boots a node, or resumes it, or does so with its agent.
func (k *keeper) start(n *node, agentOnly bool) error {
	b := n.boot
	switch {
	case b == nil && agentOnly:
		return n.running()
	case b == nil:
		return k.boot(n)
	case b.paused && !agentOnly:
		return k.resume(n, false)
	case b.paused:
		return n.running()
	case !agentOnly:
		return fault.Newf(fault.NodeInUse, Command(n.lab, "kill "+n.name)+" takes its power", "%s is running", n.name)
	case k.rec.Options.NoBoot:
		return fault.Newf(fault.Usage, "start it with `tbcluster lab exec`", "the nodes of this lab have no boot command")
	}
	agent, err := k.agentOf(b)
	if err != nil {
		return failed("find the agent of "+n.name, err, "try again")
	}
	if len(agent) == 0 {
		return b.bootCommand()
	}
	for _, st := range agent {
		if st.state == 'T' {
			return k.resume(n, true)
		}
	}
	return fault.Newf(fault.NodeInUse, Command(n.lab, "kill "+n.name+" --agent")+" ends it", "the agent of %s is running", n.name)
}

// pause stops every process of a node, or its agent.
func (k *keeper) pause(n *node, agentOnly bool) error {
	b := n.boot
	if b == nil || b.paused {
		return n.running()
	}
	if agentOnly {
		return k.pauseAgent(n)
	}
	// The init first: it starts no more processes then.
	if err := unix.Kill(b.pid, unix.SIGSTOP); err != nil {
		return failed("pause "+n.name, err, "try again")
	}
	b.paused = true
	seen := map[int]bool{}
	return until(n, "pause "+n.name, func() (bool, error) {
		all, err := descendants(b.pid)
		if err != nil {
			return false, err
		}
		still := true
		for pid, st := range all {
			switch st.state {
			case 'T', 't', 'Z', 'X':
				// What was stopped before stays stopped at the resume.
				seen[pid] = true
				continue
			}
			if seen[pid] && b.halted[pid] == st.start {
				// On its way. In uninterruptible sleep it may stay there: a parent
				// that waits for the exec of a child which has been stopped before.
				still = still && st.state == 'D'
				continue
			}
			still = false
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil && !errors.Is(err, unix.ESRCH) {
				return false, err
			}
			seen[pid] = true
			b.halted[pid] = st.start
		}
		return still, nil
	})
}

func (k *keeper) pauseAgent(n *node) error {
	told := map[int]bool{}
	err := until(n, "pause the agent of "+n.name, func() (bool, error) {
		agent, err := k.agentOf(n.boot)
		if err != nil {
			return false, err
		}
		still := true
		for pid, st := range agent {
			if st.state == 'T' || st.state == 'D' && told[pid] {
				told[pid] = true
				continue
			}
			still = false
			told[pid] = true
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil && !errors.Is(err, unix.ESRCH) {
				return false, err
			}
		}
		return still, nil
	})
	if err == nil && len(told) == 0 {
		return noAgent(n)
	}
	return err
}

// resume undoes pause.
func (k *keeper) resume(n *node, agentOnly bool) error {
	b := n.boot
	if b == nil {
		return n.running()
	}
	if agentOnly {
		if b.paused {
			return n.running()
		}
		agent, err := k.agentOf(b)
		if err != nil {
			return failed("resume the agent of "+n.name, err, "try again")
		}
		if len(agent) == 0 {
			return noAgent(n)
		}
		for pid := range agent {
			if err := unix.Kill(pid, unix.SIGCONT); err != nil && !errors.Is(err, unix.ESRCH) {
				return failed("resume the agent of "+n.name, err, "try again")
			}
		}
		return nil
	}
	if !b.paused {
		return nil
	}
	for pid, start := range b.halted {
		if st, err := readStat(pid); err != nil || st.start != start {
			continue // killed meanwhile
		}
		if err := unix.Kill(pid, unix.SIGCONT); err != nil && !errors.Is(err, unix.ESRCH) {
			return failed("resume "+n.name, err, "try again")
		}
	}
	if err := unix.Kill(b.pid, unix.SIGCONT); err != nil {
		return failed("resume "+n.name, err, "try again")
	}
	b.paused = false
	clear(b.halted)
	return nil
}

// bootEnded reports whether the boot command of a node does not run.
func (b *boot) bootEnded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.agentPID == 0
}

// agentOf returns the processes of the agent: the boot command, and whatever
// runs as `tbcluster agent`, however it was started. Zombies are none.
func (k *keeper) agentOf(b *boot) (map[int]stat, error) {
	all, err := descendants(b.pid)
	if err != nil {
		return nil, err
	}
	program, err := os.Stat(k.rec.Options.Program)
	if err != nil {
		program = nil // replaced or removed: then by the boot command alone
	}
	b.mu.Lock()
	bootPID := b.agentPID
	b.mu.Unlock()
	for pid, st := range all {
		if st.state == 'Z' || st.state == 'X' || !isAgent(pid, bootPID, program) {
			delete(all, pid)
		}
	}
	return all, nil
}

func isAgent(pid, bootPID int, program os.FileInfo) bool {
	if bootPID != 0 && innerPID(pid) == bootPID {
		return true
	}
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false
	}
	argv := strings.Split(string(cmdline), "\x00")
	if len(argv) < 2 || argv[1] != "agent" || program == nil {
		return false
	}
	exe, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	return err == nil && os.SameFile(exe, program)
}

// innerPID is the number of a process in the PID namespace of its node; 0 if it
// is gone.
func innerPID(pid int) int {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			// The keeper's number, the node's, and those of namespaces below.
			if f := strings.Fields(rest); len(f) > 1 {
				n, err := strconv.Atoi(f[1])
				if err == nil {
					return n
				}
			}
		}
	}
	return 0
}

// until repeats a step until it says that nothing is left to do.
func until(n *node, what string, step func() (done bool, err error)) error {
	for end := time.Now().Add(settle); ; {
		done, err := step()
		if err != nil {
			return failed(what, err, "try again")
		}
		if done {
			return nil
		}
		if time.Now().After(end) {
			return failed(what, fmt.Errorf("its processes did not follow in %v", settle), Command(n.lab, "down")+" ends the lab")
		}
		// A signal has no event of its own to wait for.
		time.Sleep(time.Millisecond)
	}
}
