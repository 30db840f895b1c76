package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// Descriptors of the keeper.
const (
	keeperReady = 3 // it writes one reply when the nodes have booted, or failed to
	keeperGo    = 4 // it reads one byte when it has been recorded
)

const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

// starting is a keeper that has not said yet that the lab stands.
type starting struct {
	pid        int
	process    *os.Process
	ready, go_ *os.File
}

// startKeeper starts the keeper in namespaces of its own. It does nothing
// before await.
func startKeeper(dir, program string, rootless bool) (*starting, error) {
	readyR, readyW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	goR, goW, err := os.Pipe()
	if err != nil {
		closeAll([]*os.File{readyR, readyW})
		return nil, err
	}
	s := &starting{ready: readyR, go_: goW}
	log, err := os.OpenFile(filepath.Join(dir, "keeper.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		closeAll([]*os.File{readyW, goR})
		s.close()
		return nil, err
	}
	attr := &syscall.SysProcAttr{Setsid: true, Cloneflags: namespaces}
	if rootless {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	cmd := exec.Command(program, "lab-keeper", dir)
	cmd.Dir = "/"
	cmd.Env = environment(nil)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{readyW, goR}
	cmd.SysProcAttr = attr
	err = cmd.Start()
	closeAll([]*os.File{readyW, goR, log})
	if err != nil {
		s.close()
		return nil, err
	}
	s.pid, s.process = cmd.Process.Pid, cmd.Process
	// Nobody else waits for it, should it end while this process lives.
	go func() { _ = cmd.Wait() }()
	return s, nil
}

func (s *starting) close() { closeAll([]*os.File{s.ready, s.go_}) }

func (s *starting) kill() { _ = s.process.Kill() }

// await lets the keeper go on and waits until the lab stands.
func (s *starting) await(ctx context.Context, l *Lab) error {
	if _, err := s.go_.Write([]byte{1}); err != nil {
		return failed("start the keeper of the lab", err, "see "+filepath.Join(l.dir, "keeper.log"))
	}
	defer context.AfterFunc(ctx, func() { s.ready.Close() })()
	var r reply
	err := frame.New(s.ready).Receive(&r)
	if ctx.Err() != nil {
		return fault.New(fault.Interrupted, "make the lab "+l.name, ctx.Err(), "nothing is left of it")
	}
	if err != nil {
		last := lastLine(filepath.Join(l.dir, "keeper.log"))
		if last == "" {
			last = err.Error()
		}
		return failed("make the lab "+l.name, errors.New("its keeper ended: "+last), "this is a bug: please report it")
	}
	return r.Fault.err()
}

// lastLine is the end of a log, for a message.
func lastLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	const most = 500
	return string(b[max(0, len(b)-most):])
}

// environment is that of a process of root in a fresh session.
func environment(add []string) []string {
	return append([]string{
		"PATH=/lab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "USER=root", "LOGNAME=root", "LANG=C.UTF-8",
	}, add...)
}

// exitStatus says how a process ended, as shells count.
func exitStatus(w syscall.WaitStatus) (code int, words string) {
	if w.Signaled() {
		return 128 + int(w.Signal()), "killed by " + unix.SignalName(w.Signal())
	}
	return w.ExitStatus(), fmt.Sprintf("exit status %d", w.ExitStatus())
}
