package root

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/proc"
)

// Options of a Server.
type Options struct {
	Host host.Host
	// StateDir holds root/ and instances/ (see docs/dev/architecture.md).
	StateDir string
	// RunDir is where the sockets of the agent are made for it. Without one the
	// agent, which then is this process, makes them itself, and whoever it takes
	// for a client is one.
	RunDir string
	// Blocks hold every address that we give; without one none is given.
	Blocks []netip.Prefix
	// Program is the tbcluster program to start workers and ranks with.
	Program string
	Resolve Resolver
	// PeerUID reads who is at the other end of a client's Unix socket.
	PeerUID func(*os.File) (uint32, error)
	// Place puts a process into a unit of its own under a manager of services; nil
	// where there is none. What it starts later goes with it.
	Place func(ctx context.Context, name, description string, pid int) error
	// AgentGID is the group that may read the directories of ranks.
	AgentGID int
	// Engines are the programs that a rank may be, by the names of their files,
	// and EngineEnv the variables that it may be given.
	Engines, EngineEnv []string
	// RootWorks lets workers and ranks run as root. Without it root has the agent
	// carry out nothing of what needs a person's identity.
	RootWorks bool
	// Owners are users who may change things, by configuration.
	Owners []string
	// Founder is the uid of who installed or started us; 0 for root alone.
	Founder uint32
	Log     *slog.Logger
}

// Server carries out requests.
type Server struct {
	opt     Options
	changes *changes
	people  *people
	ranks   *ranks
	sockets sockets
	workers atomic.Int32 // that run
}

// NewServer opens the state and returns a server that has changed nothing yet.
func NewServer(ctx context.Context, opt Options) (*Server, error) {
	dir := filepath.Join(opt.StateDir, "root")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fault.New(fault.FileIO, "make the state directory", err, "make it writable").At(dir)
	}
	c, err := openChanges(ctx, opt.Host, opt.Blocks, filepath.Join(dir, "changes.json"))
	if err != nil {
		return nil, err
	}
	self := uint32(os.Geteuid())
	p := &people{resolve: opt.Resolve, path: filepath.Join(dir, "people.json"), self: self, owners: opt.Owners,
		founder: opt.Founder, peerUID: opt.PeerUID, canBeAny: self == 0 && proc.ManyUsers(), rootWorks: opt.RootWorks}
	if opt.RunDir != "" {
		p.guests = &guests{}
	}
	if err := p.load(); err != nil {
		return nil, err
	}
	m, err := opt.Host.Machine(ctx)
	if err != nil {
		return nil, err
	}
	r, err := openRanks(opt, m.BootID, p.canBeAny)
	if err != nil {
		return nil, err
	}
	return &Server{opt: opt, changes: c, people: p, ranks: r, sockets: sockets{dir: opt.RunDir, log: opt.Log.Warn}}, nil
}

// Handle carries out one request. fd is what travelled beside it and stays the
// caller's; the returned descriptor, if any, becomes the caller's.
func (s *Server) Handle(ctx context.Context, q Request, fd *os.File) (Response, *os.File) {
	r := Response{ID: q.ID}
	out, err := s.handle(ctx, q, fd, &r)
	if err != nil {
		r.Fault = failure(err)
		s.opt.Log.Info("request refused or failed", "kind", q.Kind, "error", err)
	}
	return r, out
}

// worker returns the local user as whom a process is to be started. Root is
// refused unless root's own configuration says otherwise: an agent that was taken
// over has the connection of whoever looks at the state, root's too.
func (s *Server) worker(ctx context.Context, q Request, fd *os.File) (User, error) {
	u, err := s.asker(ctx, q, fd)
	if err == nil && u.UID == 0 && s.people.canBeAny && !s.opt.RootWorks {
		return User{}, fault.Newf(fault.Denied, "do it as the user whose files they are (sudo -u USER tbcluster …), or put root_work = \"yes\" into the configuration of this node and start the agent again",
			"nothing is copied and no engine runs as root on this node")
	}
	return u, err
}

// asker returns the local user for whom a request is to be carried out.
func (s *Server) asker(ctx context.Context, q Request, fd *os.File) (User, error) {
	switch {
	case fd != nil:
		return s.people.local(ctx, fd)
	case q.Remote != nil:
		return s.people.remote(ctx, *q.Remote)
	case q.Again && q.Kind != KindRankStart && s.people.canBeAny:
		return User{}, fault.Newf(fault.Denied, "", "%s needs somebody who asks", q.Kind)
	case q.Again && q.Instance != "":
		uid, ok := s.ranks.userOf(q.Instance)
		if !ok {
			return User{}, fault.Newf(fault.Denied, "", "start a rank of %s again: none was started for anybody before", q.Instance)
		}
		return s.people.become(ctx, uid)
	case !s.people.canBeAny:
		// Whoever asks, this process can act as nobody but itself.
		return s.people.become(ctx, s.people.self)
	}
	return User{}, fault.Newf(fault.Denied, "", "the request says nobody who asks")
}

// maxFirewalls bounds an answer: more than a few say no more.
const maxFirewalls = 16

func (s *Server) handle(ctx context.Context, q Request, fd *os.File, r *Response) (*os.File, error) {
	switch q.Kind {
	case KindApply, KindRevert:
		if q.Change == nil {
			return nil, fault.Newf(fault.Protocol, "", "%s has no change", q.Kind)
		}
		if q.Kind == KindApply {
			return nil, s.changes.apply(ctx, *q.Change)
		}
		return nil, s.changes.revert(ctx, *q.Change)
	case KindApplied:
		if q.Change == nil {
			r.Changes = s.changes.applied()
			return nil, nil
		}
		var err error
		r.Changes, r.Lacks, err = s.changes.look(ctx, *q.Change)
		return nil, err
	case KindFirewalls:
		all, err := s.opt.Host.Firewalls(ctx)
		r.Firewalls = all[:min(len(all), maxFirewalls)]
		return nil, err
	case KindWho:
		u, err := s.asker(ctx, q, fd)
		if err != nil {
			return nil, err
		}
		r.User, r.Owner = &u, s.people.owner(u)
		return nil, nil
	case KindWorker:
		u, err := s.worker(ctx, q, fd)
		if err != nil {
			return nil, err
		}
		control, pid, err := s.startWorker(u)
		r.User, r.PID = &u, pid
		return control, err
	case KindRankStart:
		u, err := s.worker(ctx, q, fd)
		if err != nil {
			return nil, err
		}
		r.User = &u
		r.PID, r.Dir, err = s.ranks.start(ctx, q.Instance, q.Index, q.Process, u)
		return nil, err
	case KindRankEnd:
		return nil, s.ranks.end(q.Instance, q.Index, q.Kill)
	case KindRankClean:
		return nil, s.ranks.clean(q.Instance, q.Index)
	case KindRanks:
		r.Ranks = s.ranks.all()
		return nil, nil
	case KindMap:
		u, err := s.asker(ctx, q, fd)
		if err != nil {
			return nil, err
		}
		if q.Remote != nil {
			return nil, fault.Newf(fault.Denied, "", "only a person of this node maps users here")
		}
		m := Mapping{Node: q.Node, Remote: q.Name, Local: q.Local}
		if q.Default {
			m = Mapping{Node: "*", Local: q.Local}
		} else if q.Node == "" || q.Name == "" {
			return nil, fault.Newf(fault.Protocol, "", "a mapping needs a node and a user there")
		}
		r.User = &u
		if err := s.people.setMapping(ctx, u, m); err != nil {
			return nil, err
		}
		r.Mappings = s.people.mappings()
		return nil, nil
	case KindListen:
		return s.listen(SocketName(q.Name))
	case KindMappings:
		r.Mappings = s.people.mappings()
		return nil, nil
	}
	return nil, fault.Newf(fault.Protocol, "", "there is no request %q", q.Kind)
}

// Serve answers requests on c until it ends or KindLeave comes; left tells
// which. Requests are carried out as they come, answers go back in any order.
func (s *Server) Serve(ctx context.Context, c *net.UnixConn) (left bool, err error) {
	defer func() { err = errors.Join(err, s.sockets.close()) }()
	var sending sync.Mutex
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	slots := make(chan struct{}, 64)
	for {
		var q Request
		fd, err := receive(c, &q)
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				return false, nil
			}
			return false, err
		}
		if q.Kind == KindLeave {
			if fd != nil {
				err = fd.Close()
			}
			running.Wait()
			sending.Lock()
			defer sending.Unlock()
			return true, errors.Join(err, send(c, Response{ID: q.ID}, nil))
		}
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			r, out := s.Handle(ctx, q, fd)
			sending.Lock()
			err := send(c, r, out)
			sending.Unlock()
			for _, f := range []*os.File{fd, out} {
				if f != nil {
					err = errors.Join(err, f.Close())
				}
			}
			if err != nil {
				s.opt.Log.Warn("answer the agent", "kind", q.Kind, "error", err)
			}
		})
	}
}
