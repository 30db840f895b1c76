package root

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/sock"
)

// SocketName is the name of one of the sockets in the run directory.
type SocketName string

// The sockets. The root half makes them in a directory of root: whoever could
// put another socket or a link in their place could be taken for the agent.
const (
	SocketAPI     SocketName = "agent.sock"
	SocketGateway SocketName = "gateway.sock"
)

// ListenUnix makes a socket anew, for everybody to connect to: who may do what
// is decided by who is there. One that another agent answers on is left alone,
// and a directory that others can write to is refused.
func ListenUnix(path string) (*net.UnixListener, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fault.New(fault.FileIO, "make the directory of the socket", err, "make its parent writable").At(dir)
	}
	if err := ownDir(dir); err != nil {
		return nil, err
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		return nil, errors.Join(fault.Newf(fault.StillRunning, "use it, or end it with `tbcluster down`", "another agent answers on %s", path), c.Close())
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.FileIO, "replace the socket", err, "remove it").At(path)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fault.New(fault.FileIO, "listen on the socket", err, "make its directory writable, or choose a shorter path").At(path)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// ownDir refuses a directory in which somebody else could replace what we make.
func ownDir(dir string) error {
	i, err := os.Lstat(dir)
	if err != nil {
		return fault.New(fault.FileIO, "look at the directory of the socket", err, "").At(dir)
	}
	st, ok := i.Sys().(*syscall.Stat_t)
	if !ok || !i.IsDir() || int(st.Uid) != os.Geteuid() || i.Mode().Perm()&0o022 != 0 {
		return fault.Newf(fault.NoPermission, "remove it, or name another with --run-dir",
			"the directory of the socket has to belong to uid %d and be writable for nobody else", os.Geteuid()).At(dir)
	}
	return nil
}

// guests are the connections that this process accepted from people. Only of
// those it believes who is at the other end: a process can make a socket whose
// other end is root's by connecting to any service of root.
type guests struct {
	mu   sync.Mutex
	ring []uint64
	next int
	in   map[uint64]bool
}

// maxGuests is after how many newer connections an old one is forgotten.
const maxGuests = 1 << 16

func (g *guests) add(id uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.in == nil {
		g.in = map[uint64]bool{}
	}
	if len(g.ring) < maxGuests {
		g.ring = append(g.ring, id)
	} else {
		delete(g.in, g.ring[g.next])
		g.ring[g.next] = id
		g.next = (g.next + 1) % maxGuests
	}
	g.in[id] = true
}

func (g *guests) has(id uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.in[id]
}

// sockets are those that were made for one agent.
type sockets struct {
	dir string // "" where the agent makes them itself
	log func(msg string, args ...any)

	mu   sync.Mutex
	open map[SocketName]*net.UnixListener
}

// listen makes a socket. Of the API's the agent gets a stream on which its
// connections come, of the gateway's, where nobody is asked who he is, the
// socket itself.
func (s *Server) listen(name SocketName) (*os.File, error) {
	if s.sockets.dir == "" || name != SocketAPI && name != SocketGateway {
		return nil, fault.Newf(fault.Protocol, "", "there is no socket %q to make", name)
	}
	s.sockets.mu.Lock()
	defer s.sockets.mu.Unlock()
	if s.sockets.open[name] != nil {
		return nil, fault.Newf(fault.Protocol, "", "%s is open already", name)
	}
	l, err := ListenUnix(filepath.Join(s.sockets.dir, string(name)))
	if err != nil {
		return nil, err
	}
	out, err := s.hand(name, l)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if s.sockets.open == nil {
		s.sockets.open = map[SocketName]*net.UnixListener{}
	}
	s.sockets.open[name] = l
	return out, nil
}

func (s *Server) hand(name SocketName, l *net.UnixListener) (*os.File, error) {
	if name == SocketGateway {
		return l.File()
	}
	ours, theirs, err := sock.Pair()
	if err != nil {
		return nil, err
	}
	go s.receiveGuests(l, ours)
	return theirs, nil
}

// close ends all sockets and removes their files.
func (s *sockets) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, l := range s.open {
		err = errors.Join(err, l.Close())
	}
	s.open = nil
	return err
}

// receiveGuests accepts people's connections, notes them, and hands them to the
// agent, until one of both ends.
func (s *Server) receiveGuests(l *net.UnixListener, to *net.UnixConn) {
	defer func() { _ = to.Close() }() // the agent sees that as the socket's end
	const rest = 50 * time.Millisecond
	for {
		c, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Descriptors are short, say: others give some back.
			s.sockets.log("accept on the API socket", "error", err)
			time.Sleep(rest)
			continue
		}
		f, err := c.File()
		if err = errors.Join(err, c.Close()); err != nil {
			s.sockets.log("accept on the API socket", "error", err)
			time.Sleep(rest)
			continue
		}
		id, err := sock.ID(f)
		if err == nil {
			s.people.guests.add(id)
			err = sock.SendFile(to, []byte{0}, f)
		}
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return // the agent takes no more
		}
	}
}

// Listen makes a socket in the run directory and returns its listener. It is
// the root half that listens; a client of a server in this process has none.
func (c *Client) Listen(ctx context.Context, name SocketName) (net.Listener, error) {
	_, fd, err := c.do(ctx, Request{Kind: KindListen, Name: string(name)}, nil)
	if err != nil {
		return nil, err
	}
	if fd == nil {
		return nil, fault.Newf(fault.Internal, "", "the root half made a socket and did not send it")
	}
	if name == SocketGateway {
		l, err := net.FileListener(fd)
		return l, errors.Join(err, fd.Close())
	}
	conn, err := sock.FromFile(fd)
	if err != nil {
		return nil, err
	}
	return &guestListener{conn: conn, name: name}, nil
}

// guestListener gives the connections that the root half accepted.
type guestListener struct {
	conn *net.UnixConn
	name SocketName
}

// Accept returns the next connection.
func (l *guestListener) Accept() (net.Conn, error) {
	for {
		_, files, err := sock.RecvFile(l.conn, make([]byte, 1))
		if errors.Is(err, io.EOF) {
			err = errGone
		}
		if err != nil {
			return nil, err
		}
		if len(files) != 1 {
			for _, f := range files {
				err = errors.Join(err, f.Close())
			}
			return nil, errors.Join(fmt.Errorf("%d descriptors where one connection was to come", len(files)), err)
		}
		c, err := sock.FromFile(files[0])
		if err != nil {
			continue // it has ended already
		}
		return c, nil
	}
}

// Close ends the listener.
func (l *guestListener) Close() error { return l.conn.Close() }

// Addr returns the name of the socket.
func (l *guestListener) Addr() net.Addr { return &net.UnixAddr{Name: string(l.name), Net: "unix"} }
