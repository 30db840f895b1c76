package tui

import (
	"context"
	"errors"
	"io"
	"maps"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

const (
	// repaintEvery bounds how often a change is drawn.
	repaintEvery = 250 * time.Millisecond
	// askEvery and askWithin find an agent that hangs: its stream stays open.
	askEvery  = 2 * time.Second
	askWithin = 2 * time.Second
	// retryEvery is between tries to reach an agent that went away.
	retryEvery = 500 * time.Millisecond
)

// report is what a feed says: a new state, or how the agent is, or both.
type report struct {
	state *pb.ClusterState  // nil: as before
	wire  map[string]string // with state
	live  bool              // the agent answers
	why   string            // why not, in words
	conn  grpc.ClientConnInterface
}

// feed holds one Watch open and reports what comes of it, at most every
// repaintEvery. It reconnects by itself until its context ends.
type feed struct {
	conn   grpc.ClientConnInterface
	redial func(context.Context) (grpc.ClientConnInterface, error)
	every  time.Duration
	out    chan report
}

func newFeed(conn grpc.ClientConnInterface, redial func(context.Context) (grpc.ClientConnInterface, error)) *feed {
	return &feed{conn: conn, redial: redial, every: repaintEvery, out: make(chan report)}
}

// run reports until ctx ends, then closes out.
func (f *feed) run(ctx context.Context) {
	defer close(f.out)
	for ctx.Err() == nil {
		err := f.watch(ctx)
		if ctx.Err() != nil {
			return
		}
		if !f.send(ctx, report{why: whyLost(err), conn: f.conn}) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryEvery):
		}
		if f.redial == nil {
			// gRPC waits longer and longer between its tries, up to minutes.
			if c, ok := f.conn.(interface{ ResetConnectBackoff() }); ok {
				c.ResetConnectBackoff()
			}
			continue
		}
		dial, cancel := context.WithTimeout(ctx, askWithin)
		c, err := f.redial(dial)
		cancel()
		if err == nil {
			f.conn = c
		}
	}
}

func (f *feed) send(ctx context.Context, r report) bool {
	select {
	case f.out <- r:
		return true
	case <-ctx.Done():
		return false
	}
}

func whyLost(err error) string {
	if err == nil || errors.Is(err, io.EOF) {
		return "it ended the connection"
	}
	if s, ok := status.FromError(err); ok && s.Code() == codes.Unavailable && fault.FromStatus(err).Reason == fault.NoAgent {
		return "nothing answers at its socket"
	}
	return clean(fault.FromStatus(err).Error())
}

// watch holds one stream open and returns why it ended.
func (f *feed) watch(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	// Whatever watch started has ended when it returns.
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stream, err := pb.NewClusterServiceClient(f.conn).Watch(ctx, &pb.WatchRequest{})
	if err != nil {
		return err
	}
	type arrival struct {
		ev  *pb.WatchResponse
		err error
	}
	events := make(chan arrival)
	wg.Go(func() {
		for {
			ev, err := stream.Recv()
			select {
			case events <- arrival{ev, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	})
	asks := make(chan error)
	wg.Go(func() { ask(ctx, f.conn, asks) })

	var st store
	var why string
	live := true              // the last that was heard was an answer
	dirty, due := true, false // there is something to say; it is time to say it
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		// Events are taken in while a report is on offer, so a slow terminal
		// never holds the agent's stream up.
		var out chan<- report
		var r report
		if dirty && due && (st.full || !live) {
			out, r = f.out, report{live: live && st.full, why: why, conn: f.conn}
			if st.full {
				r.state, r.wire = st.state(), maps.Clone(st.wire)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			due = true
		case out <- r:
			dirty, due = false, false
			timer.Reset(f.every)
		case a := <-events:
			if a.err != nil {
				return a.err
			}
			if err := st.apply(a.ev); err != nil {
				return err
			}
			dirty, live = true, true
		case err := <-asks:
			dirty = dirty || live == (err != nil)
			live = err == nil
			why = "it does not answer; its process may be stopped or overloaded"
		}
	}
}

// ask asks for the agent's health again and again: a stream of a stopped
// process stays open and silent, and so does that of a cluster where nothing
// happens.
func ask(ctx context.Context, conn grpc.ClientConnInterface, out chan<- error) {
	c := healthpb.NewHealthClient(conn)
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(askEvery):
		}
		one, cancel := context.WithTimeout(ctx, askWithin)
		_, err := c.Check(one, &healthpb.HealthCheckRequest{})
		cancel()
		switch status.Code(err) {
		case codes.DeadlineExceeded, codes.Unavailable:
		default:
			err = nil // it answered, whatever it said
		}
		select {
		case out <- err:
		case <-ctx.Done():
			return
		}
	}
}
