package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// invocation is one command line with files at its edges, as a shell gives it.
func invocation(t *testing.T, ctx context.Context, input string, args ...string) (code int, out, errOut string) {
	t.Helper()
	dir := t.TempDir()
	file := func(name, content string) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
		if err == nil {
			_, err = f.WriteString(content)
		}
		if err == nil {
			_, err = f.Seek(0, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	in, o, e := file("in", input), file("out", ""), file("err", "")
	defer in.Close()
	defer o.Close()
	defer e.Close()
	code = run(ctx, &globals{in: in, out: o, errOut: e}, args)
	read := func(f *os.File) string {
		b, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	return code, read(o), read(e)
}

// notices are told when a text has been written to them.
type notices struct {
	mu     sync.Mutex
	wanted map[string]chan struct{} // closed then
	b      bytes.Buffer
}

func (n *notices) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.b.Write(b)
	for text, seen := range n.wanted {
		if strings.Contains(n.b.String(), text) {
			close(seen)
			delete(n.wanted, text)
		}
	}
	return len(b), nil
}

func (n *notices) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.b.String()
}

// machineOf is the process of the QEMU of a host.
func machineOf(t *testing.T, name string) int {
	t.Helper()
	for _, pid := range children(t, os.Getpid()) {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if err == nil && strings.Contains(string(b), " rig.name="+name) {
			return pid
		}
	}
	t.Fatalf("there is no QEMU of host %s", name)
	return 0
}

func TestCommandsOnARunningRig(t *testing.T) {
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	ownSockets(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	seen, killed := make(chan struct{}), make(chan struct{})
	up := &notices{wanted: map[string]chan struct{}{"it stays up": seen, "host b's QEMU ended (signal: killed)": killed}}
	ended := make(chan int, 1)
	go func() {
		ended <- run(t.Context(), &globals{in: null, out: &bytes.Buffer{}, errOut: up}, strings.Fields("up --lanes 1"))
	}()
	select {
	case <-seen:
	case code := <-ended:
		t.Fatalf("it ended with %d: %s", code, up.String())
	}
	for _, c := range []struct {
		args  []string
		input string
		code  int
		want  string // in the output, or in the errors
	}{
		{args: []string{"status"}, want: "host b, 1 x 20 Gb/s, thunderbolt0"},
		{args: []string{"guest", "b", "--", "uname", "-n"}, want: "b\n"},
		{args: []string{"guest", "a", "--", "cat"}, input: "hello\n", want: "hello\n"},
		{args: []string{"guest", "a"}, input: "echo from $(uname -n)\n", want: "from a\n"},
		{args: []string{"guest", "a", "sh", "-c", "echo wrong >&2; exit 3"}, code: 3, want: "wrong"},
		{args: []string{"guest", "z", "true"}, code: 3, want: "the hosts are a, b"},
		{args: []string{"unplug", "z.0"}, code: 1, want: "the cables are a.0 - b.0"},
		{args: []string{"unplug", "b.0"}},
		{args: []string{"unplug", "a.0"}, want: "the cable a.0 - b.0 is out already\n"},
		{args: []string{"settle"}},
		{args: []string{"status"}, want: "unplugged\n"},
		{args: []string{"plug", "a.0"}},
		{args: []string{"plug", "b.0"}, want: "plugged in already\n"},
		{args: []string{"boot", "b"}, want: "host b is on already\n"},
		{args: []string{"settle"}},
		{args: []string{"flap", "a.0", "--out", "10ms"}},
		{args: []string{"settle"}},
		{args: []string{"wire", "a.0", "--rate", "100mbit"}},
		{args: []string{"wire", "a.0"}, want: "cable a.0 - b.0: rate 100 Mb/s\n"},
		{args: []string{"--name", "default", "wire", "a.0"}, want: "rate 100 Mb/s"}, // it shows,
		{args: []string{"wire", "a.0"}, want: "rate 100 Mb/s"},                      // and changed nothing
		{args: []string{"status"}, want: "cable a.0 - b.0    up, rate 100 Mb/s\n"},
		{args: []string{"counters"}, want: "a.0 > b.0"},
		{args: []string{"reload", "a"}},
		{args: []string{"settle"}},
		{args: []string{"dmesg", "a"}, want: "new host found"},
		{args: []string{"up"}, code: 5, want: "a rig called default runs"},
		{args: []string{"cut", "b"}},
		{args: []string{"settle"}},
		{args: []string{"status"}, want: "host b             off\n"},
		{args: []string{"guest", "b", "true"}, code: 7, want: "tbcluster-rig: host b is off\n  `tbcluster-rig boot b` switches it on\n"},
		{args: []string{"reload", "b"}, code: 7, want: "tbcluster-rig: host b is off\n  `tbcluster-rig boot b` switches it on\n"},
		{args: []string{"dmesg", "b"}, code: 7, want: "`tbcluster-rig boot b` switches it on\n"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		code, out, errOut := invocation(t, ctx, c.input, c.args...)
		cancel()
		if code != c.code || !strings.Contains(out+errOut, c.want) {
			t.Errorf("%v: exit code %d, not %d; it printed %q and %q, not %q", c.args, code, c.code, out, errOut, c.want)
		}
	}
	// A trace goes on until its reader ends.
	ctx, cancel := context.WithCancel(t.Context())
	traced := make(chan string, 1)
	go func() {
		_, out, _ := invocation(t, ctx, "", "trace", "control")
		traced <- out
	}()
	for _, args := range [][]string{{"boot", "b"}, {"settle"}} {
		if code, _, errOut := invocation(t, t.Context(), "", args...); code != 0 {
			t.Errorf("%v: %s", args, errOut)
		}
	}
	cancel()
	if out := <-traced; !strings.Contains(out, "XDOMAIN") {
		t.Errorf("the trace has no packet between the hosts:\n%.2000s", out)
	}
	// A QEMU that somebody else ends is noticed.
	if err := syscall.Kill(machineOf(t, "b"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-killed:
	case <-time.After(time.Minute):
		t.Errorf("nobody says that the QEMU of host b was killed: %s", up)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"settle"}, 7, "host b is off: its QEMU ended (signal: killed)"},
		{[]string{"status"}, 0, "host b             off: its QEMU ended (signal: killed)\n"},
		{[]string{"boot", "b"}, 0, ""},
		{[]string{"guest", "b", "true"}, 0, ""},
	} {
		if code, out, errOut := invocation(t, t.Context(), "", c.args...); code != c.code || !strings.Contains(out+errOut, c.want) {
			t.Errorf("%v: exit code %d, %q and %q", c.args, code, out, errOut)
		}
	}
	// What is not done when the rig is taken down, fails.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	refused := make(chan int, 1)
	go func() {
		defer w.Close()
		refused <- run(t.Context(), &globals{in: null, out: w, errOut: w}, []string{"guest", "a", "sh", "-c", "echo begun; sleep 1000"})
	}()
	said := bufio.NewReader(r)
	if line, err := said.ReadString('\n'); line != "begun\n" {
		t.Errorf("a command in host a says %q: %v", line, err)
	}
	if code, _, errOut := invocation(t, t.Context(), "", "down"); code != 0 {
		t.Errorf("down: %s", errOut)
	}
	if rest, err := io.ReadAll(said); <-refused != 2 || !strings.Contains(string(rest), "the rig was taken down") {
		t.Errorf("a command that was not over says %q: %v", rest, err)
	}
	if code := <-ended; code != 0 {
		t.Errorf("the rig ended with %d: %s", code, up.String())
	}
	if code, _, _ := invocation(t, t.Context(), "", "status"); code != 2 {
		t.Errorf("a rig that is down has a status: exit code %d", code)
	}
}
