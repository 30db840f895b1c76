package root

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"tbcluster/api/fault"
	"tbcluster/host/proc"
)

// path is what workers and ranks find programs in; engines are named by full
// paths.
const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment of a process started for a user: what a login would give, and
// nothing of ours.
func environment(u User) []string {
	env := []string{"HOME=" + u.Home, "USER=" + u.Name, "LOGNAME=" + u.Name, "PATH=" + path, "LANG=C.UTF-8"}
	if u.Shell != "" {
		env = append(env, "SHELL="+u.Shell)
	}
	// Where files are looked for is the user's matter, and he has said it to
	// this process only when it runs as him.
	if os.Geteuid() == int(u.UID) {
		for _, kv := range os.Environ() {
			for _, k := range []string{"XDG_CACHE_HOME=", "XDG_DATA_HOME=", "XDG_RUNTIME_DIR=", "HF_HOME=", "HF_HUB_CACHE=", "EXO_MODELS_DIRS=", "EXO_HOME=", "TMPDIR="} {
				if strings.HasPrefix(kv, k) {
					env = append(env, kv)
				}
			}
		}
	}
	return env
}

// attributes gives the user's identity, in a session of its own. A process
// that is the user already keeps its identity as it is.
func attributes(u User) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() != 0 || u.UID == 0 && !proc.ManyUsers() {
		return a
	}
	a.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	return a
}

// home is where the process starts: the user's home, or / where he has none.
func home(u User) string {
	if i, err := os.Stat(u.Home); err == nil && i.IsDir() {
		return u.Home
	}
	return "/"
}

// maxWorkers bounds the workers at a time: far more than a node has transfers, far
// fewer than would take the machine's processes.
const maxWorkers = 256

// startWorker starts a worker and returns its control stream. The worker ends
// when the stream does.
func (s *Server) startWorker(u User) (*os.File, int, error) {
	if s.workers.Add(1) > maxWorkers {
		s.workers.Add(-1)
		return nil, 0, fault.Newf(fault.Denied, "wait until some transfers have ended", "%d workers run on this node already", maxWorkers)
	}
	control, pid, err := startWorker(s.opt.Program, u, func() { s.workers.Add(-1) })
	if err != nil {
		s.workers.Add(-1)
	}
	return control, pid, err
}

// startWorker calls ended when the worker has; not where it never was.
func startWorker(program string, u User, ended func()) (*os.File, int, error) {
	ours, theirs, err := socketpair()
	if err != nil {
		return nil, 0, err
	}
	cmd := exec.Command(program, "worker")
	cmd.Args[0] = "tbcluster"
	cmd.Env, cmd.Dir, cmd.SysProcAttr = environment(u), home(u), attributes(u)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	err = cmd.Start()
	if cerr := theirs.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("start a worker as %s: %w", u.Name, err), ours.Close())
	}
	go func() {
		_ = cmd.Wait() // its end is seen on the stream
		ended()
	}()
	return ours, cmd.Process.Pid, nil
}

// startRank starts the shim of a rank. It starts nothing itself before the gate
// is closed, so that all of it is where the shim has been put until then.
func startRank(program, dir string, u User) (pid int, gate io.Closer, err error) {
	theirs, ours, err := os.Pipe()
	if err != nil {
		return 0, nil, err
	}
	cmd := exec.Command(program, "rank", dir)
	cmd.Args[0] = "tbcluster"
	cmd.Stdin = theirs
	cmd.Env, cmd.Dir, cmd.SysProcAttr = environment(u), home(u), attributes(u)
	err = cmd.Start()
	if cerr := theirs.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return 0, nil, errors.Join(err, ours.Close())
	}
	go func() { _ = cmd.Wait() }() // what became of it is in its status file
	return cmd.Process.Pid, ours, nil
}

// socketpair returns both ends of a stream socket, close-on-exec.
func socketpair() (a, b *os.File, err error) {
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs"), nil
}
