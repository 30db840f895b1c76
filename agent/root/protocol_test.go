package root

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/host/sock"
)

// A connection that was shown to the other half is still closed at once while
// its peer says nothing.
func TestADescriptorThatIsSentStaysWhatItWas(t *testing.T) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peer, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	f, err := conn.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ours, theirs := pipe(t)
	got := make(chan *os.File, 1)
	go func() {
		var v any
		fd, err := receive(theirs, &v)
		if err != nil {
			t.Error(err)
		}
		got <- fd
	}()
	if err := send(ours, "look", f); err != nil {
		t.Fatal(err)
	}
	if fd := <-got; fd == nil {
		t.Fatal("no descriptor came")
	} else {
		defer fd.Close()
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(n uintptr) {
		flags, err := unix.FcntlInt(n, unix.F_GETFL, 0)
		if err != nil || flags&unix.O_NONBLOCK == 0 {
			t.Errorf("the connection blocks now: flags %#x, %v", flags, err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = conn.Read(make([]byte, 1)) // ended by Close
	}()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range []chan struct{}{closed, read} {
		select {
		case <-c:
		case <-time.After(10 * time.Second):
			t.Fatal("the connection is not closed while its peer says nothing")
		}
	}
}

func pipe(t *testing.T) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	a, f, err := sock.Pair()
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = a.Close(), c.Close() })
	return a, c.(*net.UnixConn)
}
