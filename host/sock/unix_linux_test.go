package sock

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestWhoIsAtTheOtherEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	want := Cred{PID: os.Getpid(), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	got, err := PeerCred(server.(*net.UnixConn))
	if err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	f, err := server.(*net.UnixConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := FileCred(f); err != nil || got != want {
		t.Errorf("through a file: got %+v, %v", got, err)
	}
}

func TestWhatHasNoPeer(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if c, err := FileCred(f); err == nil {
		t.Errorf("a device: %+v", c)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	alone := os.NewFile(uintptr(fd), "alone")
	defer alone.Close()
	if c, err := FileCred(alone); !errors.Is(err, ErrNoPeer) {
		t.Errorf("a socket that is not connected: %+v, %v", c, err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	tcp, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	file, err := tcp.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if c, err := FileCred(file); err == nil {
		t.Errorf("a TCP socket: %+v", c)
	}
	if _, err := FromFile(file); err == nil {
		t.Error("a TCP socket was taken for a Unix one")
	}
}

// pair returns both ends as connections.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	a, f, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	if b, err = FromFile(f); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestDescriptorsArrive(t *testing.T) {
	a, b := pair(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := SendFile(a, []byte("plain")); err != nil {
		t.Fatal(err)
	}
	if err := SendFile(a, []byte("with two"), f, f); err != nil {
		t.Fatal(err)
	}
	var data []byte
	var files []*os.File
	for len(data) < len("plainwith two") {
		buf := make([]byte, 100)
		n, got, err := RecvFile(b, buf)
		if err != nil {
			t.Fatal(err)
		}
		data, files = append(data, buf[:n]...), append(files, got...)
	}
	if string(data) != "plainwith two" || len(files) != 2 {
		t.Fatalf("got %q and %d files", data, len(files))
	}
	text, err := io.ReadAll(files[0])
	if err != nil || string(text) != "content" {
		t.Errorf("got %q, %v", text, err)
	}
	for _, got := range files {
		flags, err := unix.FcntlInt(got.Fd(), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("it would be inherited: %x, %v", flags, err)
		}
		got.Close()
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := RecvFile(b, make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d, %v", n, err)
	}
}

func TestMuchDataWithADescriptor(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	sent := make(chan error, 1)
	go func() { sent <- SendFile(a, want, f) }()
	var got []byte
	files := 0
	for len(got) < len(want) {
		buf := make([]byte, 70000)
		n, fs, err := RecvFile(b, buf)
		if err != nil {
			t.Fatal(err)
		}
		got, files = append(got, buf[:n]...), files+len(fs)
		for _, f := range fs {
			f.Close()
		}
	}
	if err := <-sent; err != nil || files != 1 || !bytes.Equal(got, want) {
		t.Errorf("%v, %d files, equal: %v", err, files, bytes.Equal(got, want))
	}
}

func TestTooManyDescriptorsLeaveNoneOpen(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	many := make([]*os.File, MaxFiles+1)
	fds := make([]int, 60)
	for i := range many {
		many[i] = f
	}
	for i := range fds {
		fds[i] = int(f.Fd())
	}
	if err := SendFile(a, []byte("x"), many...); err == nil {
		t.Error("too many were sent")
	}
	if err := SendFile(a, nil, f); err == nil {
		t.Error("a descriptor without data was sent")
	}
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := count()
	// A peer that does not keep to it: one too many, and so many that the
	// kernel drops some.
	for _, n := range []int{MaxFiles + 1, 60} {
		if _, _, err := a.WriteMsgUnix([]byte("x"), unix.UnixRights(fds[:n]...), nil); err != nil {
			t.Fatal(err)
		}
		if _, files, err := RecvFile(b, make([]byte, 9)); err == nil || files != nil {
			t.Errorf("%d descriptors: got %d, %v", n, len(files), err)
		}
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors open, before %d", after, before)
	}
}

// A child gets its end, and the parent's end is not inherited.
func TestAPairSpansAChild(t *testing.T) {
	ours, theirs, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := ours.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var stat unix.Stat_t
	var statErr error
	if err := errors.Join(raw.Control(func(fd uintptr) { statErr = unix.Fstat(int(fd), &stat) }), statErr); err != nil {
		t.Fatal(err)
	}
	own := fmt.Sprintf("socket:[%d]", stat.Ino)
	cmd := exec.Command("sh", "-c", "read line <&3; echo got $line >&3; ls -l /proc/self/fd")
	cmd.ExtraFiles = []*os.File{theirs}
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(ours, "hello\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(ours)
	if err != nil || string(answer) != "got hello\n" {
		t.Errorf("got %q, %v", answer, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "3 -> socket:[") || strings.Contains(out.String(), own) {
		t.Errorf("with our end %s the child has\n%s", own, out.String())
	}
}

func TestOptionsReachTheSocketUnderTLS(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := SetDeadAfter(tls.Client(c, &tls.Config{ServerName: "x"}), 7*time.Second); err != nil {
		t.Fatal(err)
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		if v, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT); v != 7000 || err != nil {
			t.Errorf("TCP_USER_TIMEOUT is %d, %v", v, err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	a, _ := pair(t)
	if err := SetDeadAfter(a, time.Second); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("a Unix socket: %v", err)
	}
	if err := SetDeadAfter(c, 0); err == nil {
		t.Error("no time at all was accepted")
	}
}

func TestProbesFitTheTime(t *testing.T) {
	for d := time.Duration(1); d < 10*time.Minute; d = d*3/2 + 1 {
		idle, interval, count := probePlan(d)
		total := time.Duration(idle+interval*count) * time.Second
		if idle < 1 || interval < 1 || count < 1 || total > max(d+time.Second, 2*time.Second) || total < d*3/4 {
			t.Errorf("%v: %d + %d × %d s", d, idle, interval, count)
		}
	}
}

func FuzzRights(f *testing.F) {
	f.Add([]byte{})
	f.Add(unix.UnixRights())
	f.Add([]byte("\x11\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x000")) // one byte of descriptors
	f.Add(bytes.Repeat([]byte{0xff}, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		// Descriptors that do not exist, so that none of the test's own is
		// closed: what the parser makes files of is set to 1<<20 and more.
		if messages, err := unix.ParseSocketControlMessage(b); err == nil {
			for _, m := range messages {
				for i := 0; i+4 <= len(m.Data); i += 4 {
					m.Data[i+2], m.Data[i+3] = 0xf0, 0x7f
				}
			}
		}
		files, _ := parseRights(b)
		for _, file := range files {
			file.Close()
		}
	})
}
