package root

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/proc"
)

// Left lists the changes of the machine that the agent whose state is in stateDir
// made and nobody undid. Only root may read them.
func Left(ctx context.Context, h host.Host, stateDir string) ([]string, error) {
	c, err := openChanges(ctx, h, nil, filepath.Join(stateDir, "root", "changes.json"))
	if err != nil {
		return nil, err
	}
	var left []string
	for _, ch := range c.applied() {
		left = append(left, ch.String())
	}
	return left, nil
}

// undoGrace is how long a rank may take to end by itself, above what its engine
// is given.
const undoGrace = 45 * time.Second

// Undo ends every rank that was started and still runs, removes what they left,
// and undoes every change that is in force, the newest first. It goes on after
// a failure and returns what it did with all of them.
func (s *Server) Undo(ctx context.Context) (undone []string, err error) {
	for _, k := range s.ranks.all() {
		if kerr := s.endOne(ctx, k); kerr != nil {
			err = errors.Join(err, kerr)
			continue
		}
		if k.Alive {
			undone = append(undone, fmt.Sprintf("ended rank %d of instance %s", k.Index, k.Instance))
		}
	}
	for _, c := range slices.Backward(s.changes.applied()) {
		if rerr := s.changes.revert(ctx, c); rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		undone = append(undone, "undone: "+c.String())
	}
	return undone, err
}

// RemoveSockets removes the sockets of an agent that is gone from its run directory,
// and nothing else there.
func RemoveSockets(dir string) (err error) {
	for _, name := range []string{string(SocketAPI), string(SocketGateway), vouchSocket} {
		path := filepath.Join(dir, name)
		info, serr := os.Lstat(path)
		switch {
		case errors.Is(serr, fs.ErrNotExist), serr == nil && info.Mode().Type() != fs.ModeSocket:
			continue
		case serr == nil:
			serr = os.Remove(path)
		}
		if serr != nil {
			err = errors.Join(err, fault.New(fault.FileIO, "remove a socket of the agent that is gone", serr, "remove it by hand").At(path))
		}
	}
	return err
}

// endOne ends a rank, kills it when it does not, and removes what it left.
func (s *Server) endOne(ctx context.Context, k Rank) error {
	for _, kill := range []bool{false, true} {
		if err := s.ranks.end(k.Instance, k.Index, kill); err != nil {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, undoGrace)
		err := s.ranks.waitEnd(wait, k.Instance, k.Index)
		cancel()
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return err
		}
	}
	return s.ranks.clean(k.Instance, k.Index)
}

// waitEnd returns when a rank's process is gone.
func (r *ranks) waitEnd(ctx context.Context, instance string, index int) error {
	r.mu.Lock()
	i := r.find(instance, index)
	if i < 0 {
		r.mu.Unlock()
		return nil
	}
	id := r.list[i].Process
	r.mu.Unlock()
	h, err := proc.Open(id)
	if errors.Is(err, proc.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(h.Wait(ctx), h.Close())
}
