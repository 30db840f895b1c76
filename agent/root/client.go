package root

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"slices"
	"sync"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// Client is the agent's way to the root half: over a socketpair, or to a
// Server in the same process where there is no root.
type Client struct {
	call func(ctx context.Context, q Request, fd *os.File) (Response, *os.File, error)
	// Done is closed when the root half is gone; nil for one in the process.
	Done <-chan struct{}
	// Leave ends the root half; nil for one in the process.
	leave func(ctx context.Context) error
}

// Local returns a client of a server in this process.
func Local(s *Server) *Client {
	return &Client{call: func(ctx context.Context, q Request, fd *os.File) (Response, *os.File, error) {
		r, out := s.Handle(ctx, q, fd)
		return r, out, nil
	}}
}

// remoteClient matches answers to requests on a socketpair.
type remoteClient struct {
	c *net.UnixConn

	sending sync.Mutex
	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan answer
	done    chan struct{}
}

type answer struct {
	r  Response
	fd *os.File
}

var errGone error = fault.Newf(fault.Internal, "start it again: `tbcluster up`", "the root half is gone")

// Connect returns a client over the socketpair c, which it owns.
func Connect(c *net.UnixConn) *Client {
	rc := &remoteClient{c: c, waiting: map[uint64]chan answer{}, done: make(chan struct{})}
	go rc.read()
	return &Client{call: rc.call, Done: rc.done, leave: func(ctx context.Context) error {
		_, _, err := rc.call(ctx, Request{Kind: KindLeave}, nil)
		return err
	}}
}

func (rc *remoteClient) read() {
	defer close(rc.done)
	for {
		var r Response
		fd, err := receive(rc.c, &r)
		if err != nil {
			return
		}
		rc.mu.Lock()
		ch := rc.waiting[r.ID]
		delete(rc.waiting, r.ID)
		rc.mu.Unlock()
		if ch != nil {
			ch <- answer{r, fd}
		} else if fd != nil {
			// Nobody waits any more: the worker at the other end sees its
			// control stream end and ends too.
			_ = fd.Close()
		}
	}
}

func (rc *remoteClient) call(ctx context.Context, q Request, fd *os.File) (Response, *os.File, error) {
	ch := make(chan answer, 1)
	rc.mu.Lock()
	rc.next++
	q.ID = rc.next
	rc.waiting[q.ID] = ch
	rc.mu.Unlock()
	rc.sending.Lock()
	err := send(rc.c, q, fd)
	rc.sending.Unlock()
	if err != nil {
		rc.forget(q.ID)
		return Response{}, nil, err
	}
	select {
	case a := <-ch:
		return a.r, a.fd, nil
	case <-ctx.Done():
		if !rc.forget(q.ID) {
			// The answer came at the same time and its descriptor is ours.
			if a := <-ch; a.fd != nil {
				_ = a.fd.Close()
			}
		}
		return Response{}, nil, ctx.Err()
	case <-rc.done:
		select {
		case a := <-ch:
			return a.r, a.fd, nil
		default:
			return Response{}, nil, errGone
		}
	}
}

// forget stops waiting; false when the answer is already on its way.
func (rc *remoteClient) forget(id uint64) bool {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	_, ok := rc.waiting[id]
	delete(rc.waiting, id)
	return ok
}

func (c *Client) do(ctx context.Context, q Request, fd *os.File) (Response, *os.File, error) {
	r, out, err := c.call(ctx, q, fd)
	if err != nil {
		return r, nil, fault.New(fault.Internal, "ask the root half", err, "start the agent again: `tbcluster up`")
	}
	if err := r.Fault.Err(); err != nil {
		if out != nil {
			err = errors.Join(err, out.Close())
		}
		return r, nil, err
	}
	return r, out, nil
}

// Apply carries out a change of the network, journalled.
func (c *Client) Apply(ctx context.Context, ch host.Change) error {
	_, _, err := c.do(ctx, Request{Kind: KindApply, Change: &ch}, nil)
	return err
}

// Revert undoes a change; one that was not made is no error.
func (c *Client) Revert(ctx context.Context, ch host.Change) error {
	_, _, err := c.do(ctx, Request{Kind: KindRevert, Change: &ch}, nil)
	return err
}

// Applied returns the changes in force, oldest first.
func (c *Client) Applied(ctx context.Context) ([]host.Change, error) {
	r, _, err := c.do(ctx, Request{Kind: KindApplied}, nil)
	return r.Changes, err
}

// Lacks tells what of the packet filter that was set is not there any more; "" if
// nothing. A root half of a version before does not look: it answers with its
// whole journal.
func (c *Client) Lacks(ctx context.Context, ch host.Change) (string, error) {
	r, _, err := c.do(ctx, Request{Kind: KindApplied, Change: &ch}, nil)
	if err != nil {
		return "", err
	}
	if r.Lacks == "" && !slices.ContainsFunc(r.Changes, func(have host.Change) bool { return same(have, ch) }) {
		return "the journal of changes does not have it", nil
	}
	return r.Lacks, nil
}

// Firewalls lists what may drop what other machines send to this one.
func (c *Client) Firewalls(ctx context.Context) ([]host.Firewall, error) {
	r, _, err := c.do(ctx, Request{Kind: KindFirewalls}, nil)
	return r.Firewalls, err
}

// request fills in who asks.
func request(kind Kind, who host.Asker, paired bool) Request {
	q := Request{Kind: kind}
	switch {
	case who.Node != "":
		q.Remote = &Remote{Node: who.Node, UID: who.UID, Name: who.Name, Paired: paired}
	case who.Socket == nil:
		q.Again = true
	}
	return q
}

// Who returns the local user that an asker is or is mapped to, and whether he
// may change things here. paired says of a remote asker that he is the one who
// paired on his node.
func (c *Client) Who(ctx context.Context, who host.Asker, paired bool) (User, bool, error) {
	r, _, err := c.do(ctx, request(KindWho, who, paired), who.Socket)
	if err != nil {
		return User{}, false, err
	}
	return *r.User, r.Owner, nil
}

// Worker starts a worker and returns its control stream.
func (c *Client) Worker(ctx context.Context, who host.Asker, paired bool) (net.Conn, User, error) {
	r, fd, err := c.do(ctx, request(KindWorker, who, paired), who.Socket)
	if err != nil {
		return nil, User{}, err
	}
	if fd == nil {
		return nil, User{}, fault.Newf(fault.Internal, "", "the root half started a worker and sent no stream to it")
	}
	conn, err := net.FileConn(fd)
	if err := errors.Join(err, fd.Close()); err != nil {
		return nil, User{}, err
	}
	return conn, *r.User, nil
}

// StartRank starts a rank; process is the content of its rank.json. It returns
// the rank's directory.
func (c *Client) StartRank(ctx context.Context, who host.Asker, paired bool, instance string, index int, process any) (string, error) {
	body, err := json.Marshal(process)
	if err != nil {
		return "", err
	}
	q := request(KindRankStart, who, paired)
	q.Instance, q.Index, q.Process = instance, index, body
	r, _, err := c.do(ctx, q, who.Socket)
	return r.Dir, err
}

// EndRank asks a rank's shim to end its engine, or kills it. A rank that does
// not run is no error.
func (c *Client) EndRank(ctx context.Context, instance string, index int, kill bool) error {
	_, _, err := c.do(ctx, Request{Kind: KindRankEnd, Instance: instance, Index: index, Kill: kill}, nil)
	return err
}

// CleanRank removes a rank's directory; it fails while the rank runs.
func (c *Client) CleanRank(ctx context.Context, instance string, index int) error {
	_, _, err := c.do(ctx, Request{Kind: KindRankClean, Instance: instance, Index: index}, nil)
	return err
}

// Ranks lists the ranks that were started and not cleaned.
func (c *Client) Ranks(ctx context.Context) ([]Rank, error) {
	r, _, err := c.do(ctx, Request{Kind: KindRanks}, nil)
	return r.Ranks, err
}

// Map maps a user of another node to a local one; an empty local name takes it
// back. who must be local.
func (c *Client) Map(ctx context.Context, who host.Asker, node, remote, local string) ([]Mapping, error) {
	q := request(KindMap, who, false)
	q.Node, q.Name, q.Local = node, remote, local
	r, _, err := c.do(ctx, q, who.Socket)
	return r.Mappings, err
}

// MapDefault makes local the user as whom everybody acts who paired on another
// node. who must be local.
func (c *Client) MapDefault(ctx context.Context, who host.Asker, local string) error {
	q := request(KindMap, who, false)
	q.Default, q.Local = true, local
	_, _, err := c.do(ctx, q, who.Socket)
	return err
}

// Mappings lists the mappings in force.
func (c *Client) Mappings(ctx context.Context) ([]Mapping, error) {
	r, _, err := c.do(ctx, Request{Kind: KindMappings}, nil)
	return r.Mappings, err
}

// Leave ends the root half; nothing happens where it is in this process.
func (c *Client) Leave(ctx context.Context) error {
	if c.leave == nil {
		return nil
	}
	return c.leave(ctx)
}
