package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// process is a tbcluster-rig of its own.
type process struct {
	cmd  *exec.Cmd
	mu   sync.Mutex
	said bytes.Buffer
	up   chan struct{} // closed when it says that it stays up
	gone chan struct{}
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := strings.Contains(p.said.String(), "it stays up")
	p.said.Write(b)
	if !before && strings.Contains(p.said.String(), "it stays up") {
		close(p.up)
	}
	return len(b), nil
}

func (p *process) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.String()
}

// spawn starts a rig in a process of its own.
func spawn(t *testing.T, program string, args ...string) *process {
	t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { null.Close() })
	p := &process{cmd: exec.Command(program, args...), up: make(chan struct{}), gone: make(chan struct{})}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = null, p, p
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended, is looked at by those who need it
		close(p.gone)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // or it has ended
		<-p.gone
		if t.Failed() {
			t.Logf("%v said:\n%s", args, p.text())
		}
	})
	return p
}

func (p *process) wait(t *testing.T) {
	t.Helper()
	select {
	case <-p.up:
	case <-p.gone:
		t.Fatalf("it ended: %s", p.text())
	case <-time.After(5 * time.Minute):
		t.Fatalf("it does not come up: %s", p.text())
	}
}

// children are the processes whose parent is pid.
func children(t *testing.T, pid int) []int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var list []int
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(b), ") ") // the name may have spaces
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) && f[0] != "Z" {
			if n, err := strconv.Atoi(strings.Split(name, "/")[2]); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}

func alive(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	_, rest, _ := strings.Cut(string(b), ") ")
	return err == nil && !strings.HasPrefix(rest, "Z")
}

// traces are what a rig could leave on the machine besides files: network
// interfaces, namespaces with a name, and mounts.
func traces(t *testing.T, tmp string) []string {
	t.Helper()
	var list []string
	for _, pattern := range []string{"/sys/class/net/*", "/run/netns/*"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, names...)
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && (strings.HasPrefix(f[4], tmp+"/") || strings.Contains(f[4], "/tbcluster/rig/")) {
			list = append(list, f[4])
		}
	}
	return list
}

// Two rigs run at once and know nothing of each other. One is killed, as nothing
// else can end it worse: its machines end with it, and what is left of its files
// the next one removes.
func TestTwoRigsAndOneIsKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	ownSockets(t)
	tmp, err := os.MkdirTemp("", "two-") // a short name, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(tmp) })
	t.Setenv("TMPDIR", tmp)
	program := filepath.Join(t.TempDir(), "tbcluster-rig")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := traces(t, tmp)
	command := func(args ...string) (out string, code int) {
		t.Helper()
		code, out, errOut := invocation(t, t.Context(), "", args...)
		return out + errOut, code
	}

	one := spawn(t, program, "up", "--name", "one", "--lanes", "1", "--lan")
	two := spawn(t, program, "up", "--name", "two", "--hosts", "1", "--shape", "none", "--lan")
	one.wait(t)
	two.wait(t)
	if out, code := command("--name", "one", "status"); code != 0 || !strings.Contains(out, "host b, 1 x 20 Gb/s") {
		t.Errorf("one: %d %s", code, out)
	}
	if out, code := command("--name", "two", "status"); code != 0 || strings.Contains(out, "host b") {
		t.Errorf("two: %d %s", code, out)
	}
	if now := traces(t, tmp); !slices.Equal(now, before) {
		t.Errorf("rigs that run have left %q, before there was %q", now, before)
	}
	left, err := filepath.Glob(filepath.Join(tmp, "rig-*", "*.sock"))
	if err != nil || len(left) != 3 {
		t.Errorf("the sockets of three machines are %q: %v", left, err)
	}

	machines := children(t, one.cmd.Process.Pid)
	if len(machines) != 2 {
		t.Fatalf("the rig of two hosts has the children %v", machines)
	}
	if err := one.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-one.gone
	for deadline := time.Now().Add(30 * time.Second); slices.ContainsFunc(machines, alive); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("machines of a rig that was killed go on: %v", machines)
		}
	}
	if now := traces(t, tmp); !slices.Equal(now, before) {
		t.Errorf("a rig that was killed has left %q, before there was %q", now, before)
	}
	if out, code := command("--name", "one", "status"); code != 2 {
		t.Errorf("a rig that was killed has a status: %d %s", code, out)
	}
	if out, code := command("--name", "two", "guest", "a", "--", "echo", "still here"); code != 0 || !strings.Contains(out, "still here") {
		t.Errorf("the other one: %d %s", code, out)
	}

	again := spawn(t, program, "up", "--name", "one", "--hosts", "1", "--shape", "none")
	again.wait(t)
	left, err = filepath.Glob(filepath.Join(tmp, "rig-*", "*.sock"))
	if err != nil || len(left) != 2 {
		t.Errorf("after the next start the sockets are %q, not those of two machines: %v", left, err)
	}
	for _, name := range []string{"one", "two"} {
		if out, code := command("--name", name, "down"); code != 0 {
			t.Errorf("%s: %d %s", name, code, out)
		}
	}
	<-two.gone
	<-again.gone
	for _, p := range []*process{two, again} {
		if code := p.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("it ended with %d", code)
		}
	}
	rest, err := os.ReadDir(tmp)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range rest {
		if strings.HasPrefix(e.Name(), "rig-") {
			t.Errorf("%s is left", e.Name())
		}
	}
}
