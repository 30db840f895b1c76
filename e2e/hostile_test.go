//go:build linux

package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// raw carries bytes as they are.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (raw) Unmarshal(b []byte, v any) error { *v.(*[]byte) = b; return nil }
func (raw) Name() string                    { return "proto" }

// TestHostileClients does to the sockets of an agent what no client of ours
// does: it goes on, answers others, and does not grow.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	c := newLab(t, lab.Options{Nodes: 1})
	node := c.names[0]
	c.until(node, "the agent", func(s *v1.ClusterState) bool { return len(s.Nodes) == 1 })
	before := c.resident(node)
	rnd := rand.New(rand.NewPCG(7, 7))

	t.Run("random bytes for every method", func(t *testing.T) {
		conn := c.in(t).another(node)
		all := methods()
		if len(all) < 30 {
			t.Fatalf("only %d methods are known: %q", len(all), all)
		}
		answers := map[codes.Code]int{}
		for _, m := range all {
			if strings.HasSuffix(m, "/Shutdown") {
				continue
			}
			for range 8 {
				b := make([]byte, rnd.IntN(300))
				for i := range b {
					b[i] = byte(rnd.Uint32())
				}
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, m, grpc.ForceCodec(raw{}))
				if err == nil {
					if err = s.SendMsg(&b); err == nil {
						err = s.CloseSend()
					}
					var out []byte
					if rerr := s.RecvMsg(&out); rerr != nil {
						err = rerr
					}
				}
				cancel()
				answers[status.Code(err)]++
				if status.Code(err) == codes.Unimplemented && !strings.Contains(err.Error(), "tbcluster") {
					t.Errorf("%s is not served: %v", m, err)
				}
			}
		}
		t.Log(answers)
		if answers[codes.Unavailable] > 0 {
			t.Error("the agent hung up")
		}
	})
	t.Run("names that are none", func(t *testing.T) {
		c := c.in(t)
		conn := c.another(node)
		for _, name := range []string{strings.Repeat("x", 1<<20), "\x1b[31m\n\r../../etc/passwd", "..", "-rf", "\u202e", "*"} {
			for what, call := range map[string]func(ctx context.Context) error{
				"rename": func(ctx context.Context) error {
					_, err := v1.NewNodeServiceClient(conn).Rename(ctx, &v1.RenameRequest{Node: node, Name: name})
					return err
				},
				"forget": func(ctx context.Context) error {
					_, err := v1.NewNodeServiceClient(conn).Forget(ctx, &v1.ForgetRequest{Node: name})
					return err
				},
				"ping": func(ctx context.Context) error {
					_, err := v1.NewNodeServiceClient(conn).Ping(ctx, &v1.PingRequest{Node: name})
					return err
				},
				"place": func(ctx context.Context) error {
					_, err := v1.NewInstanceServiceClient(conn).Place(ctx, &v1.PlaceRequest{Placement: &v1.Placement{Model: name, Name: name}})
					return err
				},
				"stop": func(ctx context.Context) error {
					_, err := v1.NewInstanceServiceClient(conn).Stop(ctx, &v1.StopInstanceRequest{Instance: name})
					return err
				},
				"join": func(ctx context.Context) error {
					_, err := v1.NewPairingServiceClient(conn).Join(ctx, &v1.JoinRequest{Code: name, LocalUser: "root"})
					return err
				},
				"map": func(ctx context.Context) error {
					_, err := v1.NewPairingServiceClient(conn).Map(ctx, &v1.MapRequest{Node: node, User: name, LocalUser: name})
					return err
				},
				"add": func(ctx context.Context) error {
					_, err := v1.NewModelServiceClient(conn).Add(ctx, &v1.AddRequest{Path: name})
					return err
				},
			} {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				err := call(ctx)
				cancel()
				switch status.Code(err) {
				case codes.OK, codes.Unknown, codes.Internal, codes.Unavailable, codes.DeadlineExceeded:
					t.Errorf("%s %.20q: %.300v", what, name, err)
				}
			}
		}
	})
	t.Run("watches that nobody reads", func(t *testing.T) {
		c := c.in(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 20 {
			conn := c.another(node)
			for range 20 {
				if _, err := v1.NewClusterServiceClient(conn).Watch(ctx, &v1.WatchRequest{}); err != nil {
					t.Fatal(err)
				}
			}
		}
		for i := range 30 { // news for all of them
			other := fmt.Sprintf("n%d", i)
			for _, q := range []*v1.RenameRequest{{Node: node, Name: other}, {Node: other, Name: node}} {
				if _, err := v1.NewNodeServiceClient(c.api(node)).Rename(ctx, q); err != nil {
					t.Fatal(err)
				}
				c.until(node, "the new name", func(s *v1.ClusterState) bool { return s.Nodes[0].Name == q.Name })
			}
		}
	})
	t.Run("bytes that are no HTTP", func(t *testing.T) {
		run := filepath.Dir(c.lab.SocketPath(node))
		var wg sync.WaitGroup
		for _, name := range []string{"agent.sock", "gateway.sock"} {
			for i := range 50 {
				b := make([]byte, 4096)
				for k := range b {
					b[k] = byte(rnd.Uint32())
				}
				wg.Go(func() {
					conn, err := net.Dial("unix", filepath.Join(run, name))
					if err != nil {
						t.Errorf("%s takes nobody any more: %v", name, err)
						return
					}
					defer func() { _ = conn.Close() }()
					switch i % 3 {
					case 0:
						_, _ = conn.Write(b)
					case 1: // a header that does not end
						_, _ = conn.Write([]byte("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("a", 1<<21)))
					case 2:
						_, _ = conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
						_, _ = conn.Write(b)
					}
				})
			}
		}
		wg.Wait()
	})
	c.run(node, "tbcluster", "status")
	most := uint64(64 << 20)
	if os.Getenv("TBCLUSTER_TEST_BINARY") == "" {
		most *= 8 // what the race detector takes for itself
	}
	c.until(node, "the agent", func(s *v1.ClusterState) bool { return len(s.Nodes) == 1 })
	if after := c.resident(node); after > before+most {
		t.Errorf("the agent grew from %d to %d MB", before>>20, after>>20)
	} else {
		t.Logf("from %d to %d MB", before>>20, after>>20)
	}
}

// methods lists the calls of the public API.
func methods() (out []string) {
	for _, d := range []grpc.ServiceDesc{v1.ClusterService_ServiceDesc, v1.NodeService_ServiceDesc, v1.LinkService_ServiceDesc, v1.PairingService_ServiceDesc,
		v1.ModelService_ServiceDesc, v1.TransferService_ServiceDesc, v1.InstanceService_ServiceDesc, v1.DoctorService_ServiceDesc} {
		for _, m := range d.Methods {
			out = append(out, "/"+d.ServiceName+"/"+m.MethodName)
		}
		for _, s := range d.Streams {
			out = append(out, "/"+d.ServiceName+"/"+s.StreamName)
		}
	}
	slices.Sort(out)
	return out
}

// another is one more connection to a node's agent.
func (c *cluster) another(node string) *grpc.ClientConn {
	c.t.Helper()
	conn, err := grpc.NewClient("unix:"+c.lab.SocketPath(node), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// resident is the memory of the halves of a node's agent.
func (c *cluster) resident(node string) (sum uint64) {
	c.t.Helper()
	halves := map[string]bool{}
	for _, p := range c.processes(node, "tbcluster agent") {
		// What a half is about to start looks like that half for a moment.
		if halves[p.args] {
			continue
		}
		halves[p.args] = true
		out := strings.Fields(c.run(node, "sh", "-c", fmt.Sprintf("grep VmRSS /proc/%d/status", p.pid)))
		kb, err := strconv.ParseUint(out[1], 10, 64)
		if err != nil {
			c.t.Fatal(err)
		}
		sum += kb << 10
	}
	return sum
}
