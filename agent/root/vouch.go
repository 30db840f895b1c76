package root

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/sock"
)

// vouchSocket is where root itself says who may stand for people of other nodes.
// The agent has no part in it: an agent that was taken over holds the connection
// of root who only looks at the state, and that must not be enough to act as
// everybody.
const vouchSocket = "root.sock"

// vouchFor bounds one connection.
const vouchFor = 5 * time.Second

// ServeVouch takes root's word on the socket in the run directory until ctx ends.
func (s *Server) ServeVouch(ctx context.Context) error {
	path := filepath.Join(s.opt.RunDir, vouchSocket)
	l, err := ListenUnix(path)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })() // removes the file too
	if err := os.Chmod(path, 0o600); err != nil {
		return errors.Join(err, l.Close())
	}
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			s.opt.Log.Warn("accept on "+vouchSocket, "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		// One after the other: it is root who connects.
		if err := s.hearRoot(ctx, c); err != nil {
			s.opt.Log.Warn("a request on "+vouchSocket, "error", err)
		}
	}
}

func (s *Server) hearRoot(ctx context.Context, c *net.UnixConn) (err error) {
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.SetDeadline(time.Now().Add(vouchFor)); err != nil {
		return err
	}
	cred, err := sock.PeerCred(c)
	if err != nil {
		return err
	}
	if cred.UID != 0 {
		return fault.Newf(fault.Denied, "", "uid %d is not root", cred.UID)
	}
	var q Request
	fd, err := receive(c, &q)
	if fd != nil {
		err = errors.Join(err, fd.Close())
	}
	if err != nil {
		return err
	}
	var r Response
	if q.Kind != KindVouch {
		r.Fault = failure(fault.Newf(fault.Protocol, "", "there is no request %q here", q.Kind))
	} else if err := s.people.vouch(ctx, q.Local); err != nil {
		r.Fault = failure(err)
	}
	return send(c, r, nil)
}

// vouch remembers a user for whom root has spoken.
func (p *people) vouch(ctx context.Context, local string) error {
	if _, err := p.resolve.ByName(ctx, local); err != nil {
		return fault.New(fault.Usage, "map to "+local+": the system does not know that user", err, "name a local user")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Contains(p.file.Vouched, local) {
		return nil
	}
	before := p.file.Vouched
	p.file.Vouched = append(slices.Clone(before), local)
	if err := p.save(); err != nil {
		p.file.Vouched = before
		return fault.New(fault.FileIO, "write who may do what", err, "free some space").At(p.path)
	}
	return nil
}

// rootMayMap says whether the agent's word that root maps somebody to u is
// enough: root has named u before, in its configuration, on its own socket, or by
// starting all this for him.
func (p *people) rootMayMap(u User) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.guests == nil || !p.canBeAny || u.UID == 0 && p.rootWorks || p.founder != 0 && u.UID == p.founder ||
		slices.Contains(p.owners, u.Name) || slices.Contains(p.file.Owners, u.Name) || slices.Contains(p.file.Vouched, u.Name)
}

// Vouch says, as root, that people of other nodes may be mapped to a local user,
// to the root half whose sockets are in dir. Where there is none, nothing has to
// be said.
func Vouch(ctx context.Context, dir, local string) error {
	path := filepath.Join(dir, vouchSocket)
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault.New(fault.Connection, "tell the root half who may stand for people of other nodes", err, "start the agent again: `tbcluster up`").At(path)
	}
	c := conn.(*net.UnixConn)
	defer func() { _ = c.Close() }() // all has been said
	if err := c.SetDeadline(time.Now().Add(vouchFor)); err != nil {
		return err
	}
	if err := send(c, Request{Kind: KindVouch, Local: local}, nil); err != nil {
		return err
	}
	var r Response
	fd, err := receive(c, &r)
	if fd != nil {
		err = errors.Join(err, fd.Close())
	}
	if err != nil {
		return err
	}
	return r.Fault.Err()
}
