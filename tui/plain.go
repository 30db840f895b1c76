package tui

import (
	"context"
	"fmt"
	"io"

	"google.golang.org/grpc"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// Plain prints the cluster to w as it is now and then each change as one line,
// without colours or cursor movements. It returns nil once stop says true of
// the state (nil means never), and a *fault.Fault when ctx ends before that.
// When the agent goes away it prints a line and tries again until ctx ends.
// stop must not change or keep the state that it is given.
func Plain(ctx context.Context, conn grpc.ClientConnInterface, w io.Writer, stop func(*pb.ClusterState) bool) error {
	return plain(ctx, conn, w, stop)
}

func plain(ctx context.Context, conn grpc.ClientConnInterface, w io.Writer, stop func(*pb.ClusterState) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	f := newFeed(conn, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.run(ctx)
	}()
	defer func() { cancel(); <-done }()

	var last *pb.ClusterState
	said := "" // why the agent is not there, as it was last printed
	for {
		select {
		case <-ctx.Done():
			return fault.FromStatus(ctx.Err())
		case r, ok := <-f.out:
			if !ok {
				return fault.FromStatus(ctx.Err())
			}
			var lines []string
			if !r.live && r.why != said {
				said = r.why
				lines = append(lines, "the agent is away: "+r.why+"; trying again")
			}
			if r.live && said != "" {
				said = ""
				lines = append(lines, "the agent is back")
			}
			if r.state != nil {
				for _, l := range changes(last, r.state) {
					lines = append(lines, l.text)
				}
				last = r.state
			}
			for _, l := range lines {
				if _, err := fmt.Fprintln(w, l); err != nil {
					return fault.New(fault.FileIO, "print what changes", err, "")
				}
			}
			if r.live && last != nil && stop != nil && stop(last) {
				return nil
			}
		}
	}
}
