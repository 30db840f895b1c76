package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
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

// notice is told when a text has been written to it.
type notice struct {
	wanted string
	seen   chan struct{}
	b      bytes.Buffer
}

func (n *notice) Write(b []byte) (int, error) {
	before := strings.Contains(n.b.String(), n.wanted)
	n.b.Write(b)
	if !before && strings.Contains(n.b.String(), n.wanted) {
		close(n.seen)
	}
	return len(b), nil
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
	up := &notice{wanted: "it stays up", seen: make(chan struct{})}
	ended := make(chan int, 1)
	go func() {
		ended <- run(t.Context(), &globals{in: null, out: &bytes.Buffer{}, errOut: up}, strings.Fields("up --lanes 1"))
	}()
	select {
	case <-up.seen:
	case code := <-ended:
		t.Fatalf("it ended with %d: %s", code, up.b.String())
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
		{args: []string{"settle"}},
		{args: []string{"status"}, want: "unplugged"},
		{args: []string{"plug", "a.0"}},
		{args: []string{"settle"}},
		{args: []string{"flap", "a.0", "--out", "10ms"}},
		{args: []string{"settle"}},
		{args: []string{"wire", "a.0", "--rate", "100mbit"}},
		{args: []string{"wire", "a.0"}, want: "cable a.0 - b.0: rate 100 Mb/s\n"},
		{args: []string{"--name", "default", "wire", "a.0"}, want: "rate 100 Mb/s"}, // it shows,
		{args: []string{"wire", "a.0"}, want: "rate 100 Mb/s"},                      // and changed nothing
		{args: []string{"counters"}, want: "a.0 > b.0"},
		{args: []string{"reload", "a"}},
		{args: []string{"settle"}},
		{args: []string{"dmesg", "a"}, want: "new host found"},
		{args: []string{"up"}, code: 5, want: "a rig called default runs"},
		{args: []string{"cut", "b"}},
		{args: []string{"settle"}},
		{args: []string{"status"}, want: "host b             off"},
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
	if code, _, errOut := invocation(t, t.Context(), "", "down"); code != 0 {
		t.Errorf("down: %s", errOut)
	}
	if code := <-ended; code != 0 {
		t.Errorf("the rig ended with %d: %s", code, up.b.String())
	}
	if code, _, _ := invocation(t, t.Context(), "", "status"); code != 2 {
		t.Errorf("a rig that is down has a status: exit code %d", code)
	}
}
