package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"tbcluster/agent/config"
	"tbcluster/agent/root"
	"tbcluster/api/fault"
	"tbcluster/darwin"
	"tbcluster/engine/llamacpp"
	"tbcluster/host"
	"tbcluster/host/proc"
	"tbcluster/host/sock"
	"tbcluster/linux"
	"tbcluster/linux/systemd"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/member"
)

// Process is what the command `tbcluster agent` says of the process to run.
type Process struct {
	Paths   Paths
	Version string
	Verbose bool
	// RootHalf is the descriptor of the root half's socketpair; 0 without one.
	RootHalf int
	// AgentSocket is a socket on which a manager of services answers by starting
	// the agent, with the connection as its RootHalf; "" where the root half
	// starts the agent itself.
	AgentSocket string
	// Slice is the slice of systemd in which ranks get scopes of their own; ""
	// where they stay where the root half is.
	Slice string
	// Stderr gets the log too, for whoever runs it in a terminal.
	Stderr io.Writer
}

// program is how this program is started again: by what it is, so that an
// agent whose directory others may not enter, or that was replaced on disk,
// still starts workers of its own version.
func program() (string, error) {
	if runtime.GOOS == "linux" {
		return "/proc/self/exe", nil
	}
	return os.Executable()
}

// newHost picks the machine's implementation.
func newHost(c config.Config) host.Host {
	if runtime.GOOS == "darwin" {
		return darwin.New(darwin.Options{})
	}
	return linux.New(linux.Options{SysfsRoot: c.SysfsRoot, MemoryBytes: uint64(c.MemoryBytes)})
}

func (p Process) logger() (*slog.Logger, *LogFile, error) {
	level := slog.LevelInfo
	if p.Verbose {
		level = slog.LevelDebug
	}
	f, err := OpenLog(p.logPath())
	if err != nil {
		return nil, nil, fault.New(fault.FileIO, "open the log", err, "make it writable").At(p.logPath())
	}
	var w io.Writer = f
	if p.Stderr != nil {
		w = io.MultiWriter(f, p.Stderr)
	}
	return NewLogger(w, level), f, nil
}

func (p Process) logPath() string {
	if p.RootHalf == rootItself {
		return filepath.Join(p.Paths.State, "root", "root.log")
	}
	return p.Paths.Own("agent.log")
}

// rootItself marks the root half's own Process.
const rootItself = -1

// settled is when what only the start needed is given back to the system.
const settled = 10 * time.Second

// trimOnceSettled gives back what only the start needed, unless end comes first.
func trimOnceSettled(log *slog.Logger) (end func()) {
	t := time.AfterFunc(settled, func() {
		if err := proc.Trim(); err != nil {
			log.Debug("give back pages of the program", "error", err)
		}
	})
	return func() { t.Stop() }
}

// RunAgent runs an agent until it ends: beside a root half where p names one,
// else alone with what rights this process has.
func RunAgent(ctx context.Context, p Process) (err error) {
	if err := CheckSchema(p.Paths.State); err != nil {
		return err
	}
	if err := os.MkdirAll(p.Paths.Own(), 0o700); err != nil {
		return fault.New(fault.FileIO, "make the state directory", err, "make it writable").At(p.Paths.Own())
	}
	unlock, err := lockState(p.Paths.Own("lock"))
	if err != nil {
		return err
	}
	defer unlock()
	c, err := config.Load(p.Paths.Config)
	if err != nil {
		return err
	}
	log, file, err := p.logger()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	defer trimOnceSettled(log)()
	prog, err := program()
	if err != nil {
		return err
	}
	opt := Options{Paths: p.Paths, Config: c, Host: newHost(c), Program: prog, Version: p.Version, Log: log, LogFile: p.logPath(), Privileged: p.RootHalf > 0}
	if p.RootHalf > 0 {
		conn, err := sock.FromFile(os.NewFile(uintptr(p.RootHalf), "root half"))
		if err != nil {
			return fault.New(fault.Internal, "talk to the root half", err, "start it by `tbcluster up`")
		}
		cred, err := sock.PeerCred(conn)
		if err != nil {
			return errors.Join(fault.New(fault.Internal, "see who the root half is", err, "start it by `tbcluster up`"), conn.Close())
		}
		opt.RootPID = cred.PID
		opt.Root = root.Connect(conn)
	} else {
		s, err := root.NewServer(ctx, p.rootOptions(opt.Host, c, log, prog, os.Getgid()))
		if err != nil {
			return err
		}
		opt.Root = root.Local(s)
	}
	for {
		a, err := New(ctx, opt)
		if err != nil {
			return err
		}
		leave, err := a.Run(ctx)
		if leave {
			return errors.Join(err, opt.Root.Leave(context.WithoutCancel(ctx)))
		}
		if err != nil || !a.renewed {
			return err
		}
		if err := renew(p.Paths, time.Now()); err != nil {
			return err
		}
		if p.RootHalf > 0 {
			return nil // the root half starts the next one
		}
	}
}

// renew moves aside what makes this machine the node that it is.
func renew(p Paths, now time.Time) error {
	for _, name := range []string{member.StateFile, linkMemory, transfersMemory} {
		// What others said of themselves, and what was agreed with them.
		if err := os.Remove(p.Own(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fault.New(fault.FileIO, "leave the cluster", err, "make it writable").At(p.Own(name))
		}
	}
	_, err := identity.Renew(p.Own(), now)
	return err
}

func (p Process) rootOptions(h host.Host, c config.Config, log *slog.Logger, prog string, gid int) root.Options {
	o := root.Options{Host: h, StateDir: p.Paths.State, Program: prog, Resolve: resolver{}, PeerUID: PeerUID,
		AgentGID: gid, Owners: c.Owners, Log: log, Engines: llamacpp.Programs, EngineEnv: llamacpp.Variables, RootWorks: rootWorks(c, log)}
	o.Blocks = c.Blocks()
	if n, err := strconv.ParseUint(os.Getenv("SUDO_UID"), 10, 32); err == nil && os.Getuid() == 0 {
		o.Founder = uint32(n)
	}
	return o
}

// rootWorks says whether processes may run as root for somebody.
func rootWorks(c config.Config, log *slog.Logger) bool {
	if c.RootWork != "auto" {
		return c.RootWork == "yes"
	}
	others, err := proc.People(context.Background())
	if err != nil {
		log.Warn("look for people's accounts; nothing runs as root", "error", err)
		return false
	}
	return !others
}

// lockState keeps two agents from one state; the lock ends with the process.
func lockState(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fault.New(fault.FileIO, "lock the state directory", err, "make it writable").At(path)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fault.New(fault.StillRunning, "another agent uses this state", err, "use that one, or end it with `tbcluster down`").At(filepath.Dir(path)), f.Close())
	}
	return func() { _ = f.Close() }, nil // closing unlocks; nothing was written
}

// resolver finds users by the system's own means.
type resolver struct{}

// ByUID returns the user of that number.
func (resolver) ByUID(ctx context.Context, uid uint32) (root.User, error) {
	u, err := proc.ResolveUser(ctx, uid)
	if err != nil {
		return root.User{}, err
	}
	return root.User{UID: u.UID, GID: u.GID, Groups: u.Groups, Name: u.Name, Home: u.Home, Shell: u.Shell}, nil
}

// ByName returns the user of that name.
func (r resolver) ByName(ctx context.Context, name string) (root.User, error) {
	if name == "" || strings.HasPrefix(name, "-") {
		return root.User{}, fmt.Errorf("%q is no user name", name)
	}
	// id asks the system's own resolver, which this static program cannot.
	out, err := exec.CommandContext(ctx, "id", "-u", name).Output()
	if err != nil {
		var ended *exec.ExitError
		if errors.As(err, &ended) && ended.Exited() {
			return root.User{}, fmt.Errorf("no user is called %q", name)
		}
		return root.User{}, fmt.Errorf("look up the user %q: %w", name, err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(out)), 10, 32)
	if err != nil {
		return root.User{}, fmt.Errorf("user %q: %w", name, err)
	}
	return r.ByUID(ctx, uint32(n))
}

// fallbackUID is whom the agent runs as where there is no user for it: a
// number in the range that systemd gives to services for a time, of which no
// account is made.
const fallbackUID = 64842

// agentUser returns as whom the unprivileged half runs; ok is false where this
// process can be nobody else.
func agentUser(ctx context.Context, name string) (uid, gid int, ok bool) {
	if !proc.ManyUsers() {
		return os.Getuid(), os.Getgid(), false
	}
	if u, err := (resolver{}).ByName(ctx, name); err == nil && u.UID != 0 {
		return int(u.UID), int(u.GID), true
	}
	return fallbackUID, fallbackUID, true
}

// RunRoot runs the root half: it starts the agent as its own user, does for it
// what needs rights, and starts it again when it dies.
func RunRoot(ctx context.Context, p Process) (err error) {
	if os.Geteuid() != 0 {
		return fault.Newf(fault.NoPermission, "run it as root, or without --root: everything but addressing then works", "the root half needs root")
	}
	p.RootHalf = rootItself
	if err := CheckSchema(p.Paths.State); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(p.Paths.State, "root"), 0o700); err != nil {
		return fault.New(fault.FileIO, "make the state directory", err, "make it writable").At(p.Paths.State)
	}
	unlock, err := lockState(filepath.Join(p.Paths.State, "root", "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	c, err := config.Load(p.Paths.Config)
	if err != nil {
		return err
	}
	log, file, err := p.logger()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	defer trimOnceSettled(log)()
	prog, err := program()
	if err != nil {
		return err
	}
	uid, gid, other := agentUser(ctx, c.AgentUser)
	if err := giveDir(p.Paths.Own(), uid, gid, 0o700); err != nil {
		return fault.New(fault.FileIO, "prepare "+p.Paths.Own(), err, "make it writable")
	}
	if err := keepDir(p.Paths.Run); err != nil {
		return fault.New(fault.FileIO, "prepare "+p.Paths.Run, err, "make it writable")
	}
	opt := p.rootOptions(newHost(c), c, log, prog, gid)
	opt.RunDir = p.Paths.Run
	if p.Slice != "" {
		opt.Place = systemd.Slice(p.Slice).Put
	}
	s, err := root.NewServer(ctx, opt)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	vouching := make(chan error, 1)
	go func() { vouching <- s.ServeVouch(ctx) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-vouching)
	}()
	const least, most = time.Second, 30 * time.Second
	wait := least
	for {
		begin := time.Now()
		run := func() (bool, error) { return p.runChild(ctx, s, prog, uid, gid, other) }
		if p.AgentSocket != "" {
			run = func() (bool, error) { return p.runElsewhere(ctx, s) }
		}
		left, err := run()
		if left || ctx.Err() != nil {
			return err
		}
		log.Error("the agent ended", "error", err)
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() > 0 && time.Since(begin) < 3*time.Second && wait == least {
			// What it cannot start from at first, it says itself; a later run of it
			// would say the same.
			return exitCode(exit.ExitCode())
		}
		if time.Since(begin) > most {
			wait = least
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		wait = min(2*wait, most)
	}
}

// exitCode is the code with which the agent ended, after it has said why.
type exitCode int

// Error says the code.
func (e exitCode) Error() string { return fmt.Sprintf("the agent ended with %d", int(e)) }

// ExitCode is the code to end with.
func (e exitCode) ExitCode() int { return int(e) }

// keepDir makes a directory that only root writes to.
func keepDir(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	return errors.Join(os.Chown(path, 0, 0), os.Chmod(path, 0o755))
}

// giveDir makes a directory and everything of ours in it the agent's. What has
// another name somewhere else is none of ours: the agent may have made the link
// to get hold of it.
func giveDir(path string, uid, gid int, mode os.FileMode) error {
	if err := os.MkdirAll(path, mode); err != nil {
		return err
	}
	r, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // only used to look and chown
	if err := os.Chown(path, uid, gid); err != nil {
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		i, err := r.Lstat(e.Name())
		if err != nil {
			return err
		}
		st, ok := i.Sys().(*syscall.Stat_t)
		if !ok || !i.IsDir() && st.Nlink > 1 {
			return fmt.Errorf("%s has a second name: it is left alone, and so is everything", e.Name())
		}
		if err := r.Lchown(e.Name(), uid, gid); err != nil {
			return err
		}
	}
	return nil
}

// runChild runs one agent and serves it; left says that it asked us to end.
func (p Process) runChild(ctx context.Context, s *root.Server, prog string, uid, gid int, other bool) (left bool, err error) {
	ours, theirs, err := sock.Pair()
	if err != nil {
		return false, err
	}
	args := []string{"agent", "--root-half", "3", "--state-dir", p.Paths.State, "--run-dir", p.Paths.Run, "--config", p.Paths.Config}
	if p.Verbose {
		args = append(args, "--verbose")
	}
	cmd := exec.Command(prog, args...)
	cmd.Args[0] = "tbcluster"
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = p.Stderr
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=" + p.Paths.Own()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if other {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: []uint32{}}
	}
	err = cmd.Start()
	if cerr := theirs.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return false, errors.Join(fault.New(fault.NoPermission, fmt.Sprintf("start the agent as uid %d", uid), err, "make the program readable for everybody"), ours.Close())
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) }) // it may have ended already
	defer stop()
	left, serr := s.Serve(context.WithoutCancel(ctx), ours)
	if cerr := ours.Close(); serr == nil && !errors.Is(cerr, net.ErrClosed) {
		serr = cerr
	}
	// One that said what no agent of ours says does not end by itself.
	late := time.AfterFunc(endFor+goodbyeFor+time.Second, func() { _ = cmd.Process.Kill() }) // it may have ended
	defer late.Stop()
	return left, errors.Join(serr, cmd.Wait())
}

// runElsewhere has a manager of services run one agent, and serves it. The
// manager ends it too, when it ends us.
func (p Process) runElsewhere(ctx context.Context, s *root.Server) (left bool, err error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", p.AgentSocket)
	if err != nil {
		return false, fault.New(fault.Connection, "have the agent started", err, "`systemctl start tbcluster.service` starts its socket too").At(p.AgentSocket)
	}
	ours, ok := c.(*net.UnixConn)
	if !ok {
		return false, errors.Join(fault.Newf(fault.Internal, "", "%s is no Unix socket", p.AgentSocket), c.Close())
	}
	// The agent gives back and says goodbye once it sees our end.
	stop := context.AfterFunc(ctx, func() { _ = ours.CloseWrite() }) // it may have ended already
	defer stop()
	left, err = s.Serve(context.WithoutCancel(ctx), ours)
	if cerr := ours.Close(); err == nil && !errors.Is(cerr, net.ErrClosed) {
		err = cerr
	}
	if err == nil && !left && ctx.Err() == nil {
		err = fault.Newf(fault.Internal, "`journalctl -u 'tbcluster-agent@*'` and `tbcluster logs --agent` say why", "the agent ended")
	}
	return left, err
}

// Left lists the changes of the machine that an agent made which is gone. Only root
// may read them.
func Left(ctx context.Context, p Paths) ([]string, error) {
	c, err := config.Load(p.Config)
	if err != nil {
		c = config.Default() // it says how the machine is read, and no more here
	}
	return root.Left(ctx, newHost(c), p.State)
}

// RunUndo takes back what an agent that is gone left on the machine: it ends
// the ranks that it started and undoes the changes of the network. It returns
// what it did, and does nothing while an agent runs.
func RunUndo(ctx context.Context, p Process) (undone []string, err error) {
	if os.Geteuid() != 0 {
		return nil, fault.Newf(fault.NoPermission, "run it as root", "taking back what root's agent did needs root")
	}
	if _, err := os.Stat(filepath.Join(p.Paths.State, "root")); errors.Is(err, fs.ErrNotExist) {
		return nil, nil // there never was one
	}
	if err := CheckSchema(p.Paths.State); err != nil {
		return nil, err
	}
	unlock, err := lockState(filepath.Join(p.Paths.State, "root", "lock"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	c, err := config.Load(p.Paths.Config)
	if err != nil {
		// Which addresses were ours is in the journal.
		c = config.Default()
	}
	prog, err := program()
	if err != nil {
		return nil, err
	}
	s, err := root.NewServer(ctx, p.rootOptions(newHost(c), c, slog.New(slog.DiscardHandler), prog, os.Getgid()))
	if err != nil {
		return nil, err
	}
	undone, err = s.Undo(ctx)
	// With the lock held nobody listens on them.
	return undone, errors.Join(err, root.RemoveSockets(p.Paths.Run))
}
