package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"tbcluster/agent/config"
	"tbcluster/agent/root"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/linux"
)

// asIs carries bytes as they are.
type asIs struct{}

func (asIs) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (asIs) Unmarshal(b []byte, v any) error { *v.(*[]byte) = slices.Clone(b); return nil }
func (asIs) Name() string                    { return "proto" }

// newTestAgent is an agent on this machine that does not run: nothing is found,
// nobody is met, and no process is started.
func newTestAgent(t testing.TB) *Agent {
	t.Helper()
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	h := linux.New(linux.Options{SysfsRoot: t.TempDir()})
	p := Process{Paths: Paths{State: dir, Run: t.TempDir(), Config: filepath.Join(dir, "none.toml")}}
	c := config.Default()
	s, err := root.NewServer(t.Context(), p.rootOptions(h, c, log, "/nonexistent", 0))
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(t.Context(), Options{Paths: p.Paths, Config: c, Host: h, Root: root.Local(s), Program: "/nonexistent", Version: "test", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// FuzzCalls gives every call of the API, and every call that other nodes hand on,
// whatever bytes: it answers, with an error that is one, and memory stays bounded.
func FuzzCalls(f *testing.F) {
	if runtime.GOOS != "linux" {
		f.Skip("the agent that is asked is one of Linux")
	}
	a := newTestAgent(f)
	l, err := net.Listen("unix", filepath.Join(f.TempDir(), "s"))
	if err != nil {
		f.Fatal(err)
	}
	server := a.newLocalServer()
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	f.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			f.Error(err)
		}
	})
	conn, err := grpc.NewClient("unix:"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = conn.Close() })
	var methods []string
	for name, info := range server.GetServiceInfo() {
		for _, m := range info.Methods {
			methods = append(methods, "/"+name+"/"+m.Name)
		}
	}
	slices.Sort(methods)
	handed := a.forwardable()
	for i := range len(methods) + len(handed) {
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), []byte{0x0a, 3, 'a', '/', '.', 0x12, 0})
		f.Add(uint8(i), []byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f})
	}
	f.Fuzz(func(t *testing.T, which uint8, in []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		n := int(which) % (len(methods) + len(handed))
		if n >= len(methods) {
			c := caller{asker: host.Asker{Node: "OTHER", UID: 1, Name: "ada"}, role: v1.Role_ROLE_ADMIN}
			if out, err := handed[n-len(methods)].call(withCaller(ctx, c), in); err == nil && len(out) > 1<<20 {
				t.Errorf("%s answers with %d bytes", handed[n-len(methods)].method, len(out))
			}
			return
		}
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, methods[n], grpc.ForceCodec(asIs{}))
		if err == nil {
			err = errors.Join(s.SendMsg(&in), s.CloseSend())
		}
		for range 3 {
			if err != nil {
				break
			}
			var out []byte
			err = s.RecvMsg(&out)
		}
		// Internal is also what gRPC says of bytes that are no message.
		if status.Code(err) == codes.Unavailable {
			t.Fatalf("%s: the agent hung up: %v", methods[n], err)
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		if m.HeapAlloc > 1<<30 {
			t.Fatalf("%s: %d MB are in use", methods[n], m.HeapAlloc>>20)
		}
	})
}
