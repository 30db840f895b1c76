package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// machineSocket returns the socket of an agent that runs as root, and of the
// agent of a lab node seen from inside the node.
func machineSocket(g *globals) string { return filepath.Join(g.run, "tbcluster", "agent.sock") }

// maxMessage bounds one message from the agent: 64 nodes in full mesh with
// hundreds of models stay far below it.
const maxMessage = 64 << 20

// endpoint is an agent's socket and how it was chosen.
type endpoint struct {
	// path of the Unix socket.
	path string
	// from says what chose it, for error messages.
	from string
	// foreign is set when the agent's files are not the caller's: it is a node
	// of a lab, so relative paths of the caller mean nothing there.
	foreign bool
	// owned is a directory above the socket that must be the caller's own;
	// empty where only root could have made it.
	owned string
	// remark goes to standard error once, when the choice may surprise.
	remark string
	// in is the node of a lab whose agent it is, as seen from the machine that
	// the lab runs on; nil for any other.
	in *labNode
}

// unanswered is the error of an endpoint where no agent answers.
func (e *endpoint) unanswered(what string, why error, fix string) *fault.Fault {
	if e.in != nil {
		what, fix = "the agent of "+e.in.String()+" does not answer", e.in.start()
	}
	return fault.New(fault.NoAgent, what, why, fix).At(fmt.Sprintf("%s (from %s)", e.path, e.from))
}

// gateway returns the path of the gateway's socket, which is beside the agent's.
func (e *endpoint) gateway() string { return filepath.Join(filepath.Dir(e.path), "gateway.sock") }

// candidates returns where an agent may be, in the order of preference. A
// fixed endpoint was named by the caller and is the only one.
func candidates(g *globals) (list []endpoint, fixed bool) {
	if g.socket != "" {
		return []endpoint{{path: g.socket, from: "--socket", in: labNodeOf(g, g.socket)}}, true
	}
	if s := g.getenv("TBCLUSTER_SOCKET"); s != "" {
		return []endpoint{{path: s, from: "TBCLUSTER_SOCKET", in: labNodeOf(g, s)}}, true
	}
	if node := g.getenv("TBCLUSTER_NODE"); node != "" {
		return []endpoint{{path: machineSocket(g), from: "lab node " + node}}, true
	}
	list = append(list, endpoint{path: machineSocket(g), from: "this machine's agent"})
	for _, dir := range userRuntimeDirs(g) {
		list = append(list, endpoint{path: filepath.Join(dir, "agent.sock"), from: "your agent", owned: dir})
	}
	first := &labNode{lab.DefaultName, lab.NodeNames(1)[0]}
	for _, base := range labRuntimeDirs(g) {
		e := endpoint{
			path: labSocket(base, first.lab, first.node), from: "the default lab", foreign: true, in: first,
			remark: "talking to " + first.String() + "; no agent runs on this machine itself",
		}
		if os.Getuid() != 0 {
			e.owned = base
		}
		list = append(list, e)
	}
	return list, false
}

// userRuntimeDirs returns where a user's agent may keep its sockets.
func userRuntimeDirs(g *globals) []string {
	var dirs []string
	if d := g.getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		dirs = append(dirs, filepath.Join(d, "tbcluster"))
	}
	return append(dirs, filepath.Join(temporaryDir(g), fmt.Sprintf("tbcluster-%d", os.Getuid())))
}

// temporaryDir returns the directory for temporary files.
func temporaryDir(g *globals) string {
	if d := g.getenv("TMPDIR"); filepath.IsAbs(d) {
		return d
	}
	return "/tmp"
}

// choose returns the first endpoint that somebody listens on.
func choose(ctx context.Context, g *globals) (*endpoint, error) {
	if g.chosen != nil {
		return g.chosen, nil
	}
	list, fixed := candidates(g)
	var why error
	var off *endpoint // a lab's node whose agent does not answer
	var offWhy error
	for i := range list {
		e := &list[i]
		if e.owned != "" {
			if err := ownDirectory(e.owned); err != nil {
				if !errors.Is(err, os.ErrNotExist) {
					why = errors.Join(why, err)
				}
				continue
			}
		}
		c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", e.path)
		if err != nil {
			if !fixed && e.in != nil {
				if isDir(labNodeDir(e.path)) {
					off, offWhy = e, err
				}
				continue
			}
			if fixed || !errors.Is(err, os.ErrNotExist) {
				why = errors.Join(why, err)
			}
			continue
		}
		c.Close()
		if e.remark != "" && !g.json() {
			g.notef("%s", e.remark)
		}
		g.chosen = e
		return e, nil
	}
	if ctx.Err() != nil {
		return nil, fault.FromStatus(ctx.Err())
	}
	if fixed {
		return nil, list[0].unanswered("no agent answers", why, "start it with `tbcluster up`, or name another socket")
	}
	if off != nil && why == nil {
		return nil, off.unanswered("", offWhy, "")
	}
	return nil, fault.New(fault.NoAgent, "no agent runs here", why, "start it with `tbcluster up`; `tbcluster up --lab 3` makes three virtual machines to try it on")
}

// client is a connection to one agent with a stub for each service.
type client struct {
	endpoint  *endpoint
	conn      *grpc.ClientConn
	cluster   tbv1.ClusterServiceClient
	node      tbv1.NodeServiceClient
	link      tbv1.LinkServiceClient
	pairing   tbv1.PairingServiceClient
	model     tbv1.ModelServiceClient
	transfer  tbv1.TransferServiceClient
	instance  tbv1.InstanceServiceClient
	diagnosis tbv1.DoctorServiceClient
}

// connect finds the agent and connects to it. The error is a fault.Fault.
func connect(ctx context.Context, g *globals) (*client, error) {
	e, err := choose(ctx, g)
	if err != nil {
		return nil, err
	}
	return dial(e)
}

// dial connects to the agent behind e; it does not wait for an answer.
func dial(e *endpoint) (*client, error) {
	conn, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", e.path)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return callFault(e, invoke(ctx, method, req, reply, cc, opts...))
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			s, err := open(ctx, desc, cc, method, opts...)
			if err != nil {
				return nil, callFault(e, err)
			}
			return &faultStream{s, e}, nil
		}),
	)
	if err != nil {
		return nil, fault.New(fault.Internal, "prepare the connection to the agent", err, "").At(e.path)
	}
	return &client{
		endpoint:  e,
		conn:      conn,
		cluster:   tbv1.NewClusterServiceClient(conn),
		node:      tbv1.NewNodeServiceClient(conn),
		link:      tbv1.NewLinkServiceClient(conn),
		pairing:   tbv1.NewPairingServiceClient(conn),
		model:     tbv1.NewModelServiceClient(conn),
		transfer:  tbv1.NewTransferServiceClient(conn),
		instance:  tbv1.NewInstanceServiceClient(conn),
		diagnosis: tbv1.NewDoctorServiceClient(conn),
	}, nil
}

// close ends the connection; there is nothing to do about an error then.
func (c *client) close() { _ = c.conn.Close() }

// state returns the whole state of the cluster.
func (c *client) state(ctx context.Context) (*tbv1.ClusterState, error) {
	resp, err := c.cluster.GetState(ctx, &tbv1.GetStateRequest{})
	if err != nil {
		return nil, err
	}
	return resp.GetState(), nil
}

// faultStream turns the errors of a stream into faults.
type faultStream struct {
	grpc.ClientStream
	e *endpoint
}

// RecvMsg receives a message; io.EOF stays io.EOF.
func (s *faultStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return callFault(s.e, err)
}

// callFault turns what a call returned into a fault, in which an agent that
// cannot be reached is named.
func callFault(e *endpoint, err error) error {
	if err == nil {
		return nil
	}
	f := fault.FromStatus(err)
	if f.Reason == fault.NoAgent && f.Fix == "" {
		f = e.unanswered("the agent does not answer any more", errors.New(f.What), "start it again with `tbcluster up`; `tbcluster logs --agent` shows what it last said")
	}
	return f
}
