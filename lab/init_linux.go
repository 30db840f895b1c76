package lab

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/host/proc"
)

// Descriptors of an init.
const (
	initKeeper = 3 // a stream to its keeper
	initExec   = 4 // the listener of Exec
)

// machine is process 1 of a node.
type machine struct {
	keeper *frame.Conn
	reaper *reaper
	setup  *setup

	mu     sync.Mutex
	booted *bootProcess // the boot command; nil when none runs
}

// bootProcess is a boot command that was started.
type bootProcess struct {
	pid   int
	noted chan struct{} // closed when it has ended and everybody was told
}

// InitMain is `tbcluster lab-init`: process 1 of a node. The keeper starts it;
// for nobody else it is of use.
func InitMain(args []string) int {
	if len(args) != 0 || os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "lab-init is started by the keeper of a lab and is of no other use")
		return fault.ExitUsage
	}
	unix.CloseOnExec(initKeeper)
	unix.CloseOnExec(initExec)
	unix.Umask(0o022)
	signal.Ignore(unix.SIGHUP, unix.SIGPIPE)
	m := &machine{keeper: frame.New(os.NewFile(initKeeper, "keeper")), reaper: newReaper()}
	ln, err := net.FileListener(os.NewFile(initExec, "exec"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab-init:", err)
		return fault.ExitFailed
	}
	for {
		var o order
		if err := m.keeper.Receive(&o); err != nil {
			// No keeper, no machine.
			return fault.ExitFailed
		}
		answer := news{Answer: true}
		switch {
		case o.Setup != nil:
			err = m.build(o.Setup)
			if err == nil {
				go m.serveExec(ln.(*net.UnixListener))
			}
		case o.Boot:
			answer.Pid, err = m.bootCommand()
		}
		answer.Fault = toWire(err)
		if err != nil {
			fmt.Fprintln(os.Stderr, "lab-init:", err)
		}
		if err := m.keeper.Send(answer); err != nil {
			return fault.ExitFailed
		}
	}
}

// build makes the node's file system and name.
func (m *machine) build(s *setup) error {
	m.setup = s
	fail := func(err error) error {
		return failed("boot "+s.Name, err, "see "+s.Dir+"/console.log")
	}
	if err := unix.Sethostname([]byte(s.Name)); err != nil {
		return fail(fmt.Errorf("set the host name: %w", err))
	}
	if err := buildRoot(s); err != nil {
		return fail(err)
	}
	// What this process looks up on its PATH is the node's.
	for _, v := range []string{"PATH", "HOME"} {
		if err := os.Setenv(v, lookup(environment(nil), v)); err != nil {
			return fail(err)
		}
	}
	return nil
}

// bootCommand starts the boot command, in a session of its own; its output goes
// to the console.
func (m *machine) bootCommand() (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	argv := m.setup.Boot
	what := "start the boot command of " + m.setup.Name
	for m.booted != nil {
		last := m.booted
		if st, err := proc.Stat(last.pid); err == nil && !st.Zombie {
			return 0, fault.Newf(fault.NodeInUse, "end it first", "the boot command of %s is running", m.setup.Name)
		}
		// It has ended, and that is being noted.
		m.mu.Unlock()
		<-last.noted
		m.mu.Lock()
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return 0, failed(what, err, "name a command that the node has")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, failed(what, err, "see the node's console.log")
	}
	defer null.Close()
	pid, ended, err := m.reaper.start(path, argv, &syscall.ProcAttr{
		Dir: "/", Env: environment([]string{"TERM=dumb"}), Files: []uintptr{null.Fd(), 1, 2},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, failed(what, err, "see the node's console.log")
	}
	noted := make(chan struct{})
	m.booted = &bootProcess{pid: pid, noted: noted}
	go func() {
		_, words := exitStatus(<-ended)
		fmt.Fprintf(os.Stderr, "lab-init: %s: %s\n", argv[0], words)
		// Before the next can start, so that it is not taken for that one's end.
		// Without a keeper there is nobody to tell, and soon no node either.
		_ = m.keeper.Send(news{Pid: pid, Exit: words})
		m.mu.Lock()
		m.booted = nil
		m.mu.Unlock()
		close(noted)
	}()
	return pid, nil
}
