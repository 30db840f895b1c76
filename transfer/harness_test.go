package transfer

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/tcp"
	"tbcluster/transfer/transport"
)

// TestMain makes the test binary a worker when it is started as one.
func TestMain(m *testing.M) {
	if os.Getenv("TRANSFER_TEST_WORKER") == "" {
		flag.Parse()
		// They wait for limited rates and for the disk, not for processors.
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err)
		}
		os.Exit(m.Run())
	}
	conn, err := net.FileConn(os.NewFile(3, "control"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	opts := WorkerOptions{Dial: testDial}
	if os.Getenv("TRANSFER_TEST_FLIP") != "" {
		opts.Transports = transport.NewSet(newFlipping(tcp.New(testDial, nil), os.Getenv("TRANSFER_TEST_FLIP")))
	}
	if err := ServeWorker(context.Background(), frame.New(conn), opts); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// testDial dials from the given address; where a relay listens for that
// address, through it, so that a test can cut the way.
func testDial(ctx context.Context, _ string, local netip.Addr, remote netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))}
	relay := os.Getenv("TRANSFER_TEST_RELAY_" + local.String())
	if relay == "" {
		return d.DialContext(ctx, "tcp", remote.String())
	}
	c, err := d.DialContext(ctx, "tcp", relay)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(c, "%s\n", remote); err != nil {
		return nil, err
	}
	return c, nil
}

// cluster is two or more nodes: directories of this machine, each with workers
// that are processes of their own.
type cluster struct {
	t     testing.TB
	root  string
	env   []string
	paths func(src, dst string) []Path
	cred  *syscall.Credential // of the workers; nil for our own

	mu      sync.Mutex
	workers map[string][]*exec.Cmd
	wait    []func()
}

func newCluster(t *testing.T) *cluster {
	t.Parallel() // most of a test is waiting for a limited rate
	c := &cluster{t: t, root: t.TempDir(), workers: map[string][]*exec.Cmd{}}
	c.paths = func(string, string) []Path { return []Path{tcpPath("cable-1", "127.0.0.2", "127.0.0.3")} }
	t.Cleanup(c.waitAll)
	return c
}

func tcpPath(link, src, dst string) Path {
	return Path{LinkID: link, SrcInterface: "if-" + link, SrcAddr: netip.MustParseAddr(src), DstInterface: "if-" + link, DstAddr: netip.MustParseAddr(dst), Transport: "tcp", Kind: Cable}
}

// home is the home directory of a node; name below it.
func (c *cluster) home(node string, name ...string) string {
	dir := filepath.Join(c.root, node)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		c.t.Fatal(err)
	}
	return filepath.Join(append([]string{dir}, name...)...)
}

func (c *cluster) waitAll() {
	c.mu.Lock()
	wait := c.wait
	c.wait = nil
	c.mu.Unlock()
	for _, f := range wait {
		f()
	}
}

// kill ends the newest worker of a node as a power cut would.
func (c *cluster) kill(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ws := c.workers[node]
	if len(ws) == 0 {
		c.t.Errorf("no worker on %s to kill", node)
		return
	}
	if err := ws[len(ws)-1].Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		c.t.Error(err)
	}
}

func (c *cluster) open(_ context.Context, node string) (io.ReadWriteCloser, error) {
	// No other worker may inherit an end: it would keep the stream alive.
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, err
	}
	mine, theirs := os.NewFile(uintptr(fds[0]), "mine"), os.NewFile(uintptr(fds[1]), "theirs")
	defer theirs.Close()
	conn, err := net.FileConn(mine)
	mine.Close()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(os.Args[0])
	if c.cred != nil {
		// The test's binary lies where only we may go; its own name leads there.
		cmd.Path = "/proc/self/exe"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.cred}
	}
	cmd.Env = append(append(os.Environ(), "TRANSFER_TEST_WORKER=1", "HOME="+c.home(node)), c.env...)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Dir = "/"
	out := &bytes.Buffer{}
	cmd.Stderr = out
	if err := cmd.Start(); err != nil {
		conn.Close()
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.workers[node] = append(c.workers[node], cmd)
	c.wait = append(c.wait, func() {
		err := cmd.Wait()
		if err != nil && err.Error() != "signal: killed" {
			c.t.Errorf("worker of %s: %v: %s", node, err, out)
		}
		if bytes.Contains(out.Bytes(), []byte("DATA RACE")) {
			c.t.Errorf("worker of %s: %s", node, out)
		}
	})
	return conn, nil
}

func (c *cluster) deps() Deps {
	return Deps{OpenWorker: c.open, Paths: func(a, b string) []Path {
		if a == b {
			return nil
		}
		return c.paths(a, b)
	}, LinkWait: 30 * time.Second}
}

// job makes a Job of what a person would write; every path is remote.
func (c *cluster) job(o Options, args ...string) Job {
	j := Job{ID: "t1", Options: o}
	for i, a := range args {
		e, err := ParseEndpoint(a)
		if err != nil {
			c.t.Fatal(err)
		}
		if i < len(args)-1 {
			j.Sources = append(j.Sources, e)
		} else {
			j.Destination = e
		}
	}
	return j
}

// cp copies and waits for the workers to have ended.
func (c *cluster) cp(o Options, args ...string) (Result, error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	r, err := Run(ctx, c.job(o, args...), c.deps(), nil)
	c.waitAll()
	return r, err
}

func (c *cluster) mustCp(o Options, args ...string) Result {
	c.t.Helper()
	r, err := c.cp(o, args...)
	if err != nil {
		c.t.Fatalf("cp %v: %v", args, err)
	}
	if r.State != Done {
		c.t.Fatalf("cp %v ended %s", args, r.State)
	}
	return r
}

func wantFault(t testing.TB, err error, reason fault.Reason) *fault.Fault {
	t.Helper()
	f := fault.As(err)
	if f == nil || f.Reason != reason {
		t.Fatalf("error is %v (%+v), want reason %s", err, f, reason)
	}
	return f
}

func write(t testing.TB, name string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func random(t testing.TB, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

func sameFile(t testing.TB, name string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s has %d bytes that differ from the %d sent", name, len(got), len(want))
	}
}

// names lists everything below dir, with slashes after directories.
func names(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if d.IsDir() {
			rel += "/"
		}
		out = append(out, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// temporaries lists unfinished files below dir.
func temporaries(t testing.TB, dir string) []string {
	var out []string
	for _, n := range names(t, dir) {
		if manifest.Temporary.MatchString(filepath.Base(n)) {
			out = append(out, n)
		}
	}
	return out
}
