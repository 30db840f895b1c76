//go:build linux

package e2e

import (
	"bytes"
	"context"
	be "encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tbcluster/agent"
	"tbcluster/host/sock"
	"tbcluster/lab"
)

// An agent that was taken over sends its root half whatever it likes. This test
// program is that agent: on a node with two users it runs the real root half,
// which starts /proc/self/exe, this program, as the agent's user. Root and eve
// have a connection to the API socket; mallory has none.

// What the root half starts by the names of our own commands.
func evilMain(command string) {
	switch command {
	case "agent":
		if err := evilAgent(); err != nil {
			fmt.Fprintln(os.Stderr, "evil agent:", err)
			os.Exit(1)
		}
	case "worker": // says who it is, and reads what it is told to
		f := os.NewFile(3, "control")
		name := make([]byte, 256)
		n, err := f.Read(name)
		if err != nil {
			os.Exit(0)
		}
		data, rerr := os.ReadFile(string(name[:n]))
		fmt.Fprintf(f, "uid %d gid %d read %q %v", os.Getuid(), os.Getgid(), data, rerr)
	case "rank":
		_ = os.WriteFile(filepath.Join(os.Args[2], "ran"), nil, 0o644) // seen by who looks for it
	}
	os.Exit(0)
}

// The places of the evil agent's root half, on the node.
const (
	evilState = "/var/lib/evil"
	evilRun   = "/run/evil"
	evilConf  = "/etc/evil.toml"
)

// attempt is one thing that was tried and what came of it.
type attempt struct {
	What, Fault, Got string
	Allowed          bool // whether it may work
}

// evilAgent tries everything and writes down what came of it.
func evilAgent() error {
	own := filepath.Join(evilState, "agent")
	if _, err := os.Stat(filepath.Join(own, "done")); err == nil {
		time.Sleep(time.Hour) // it was put out for bad manners, and started again
	}
	c, err := sock.FromFile(os.NewFile(3, "root half"))
	if err != nil {
		return err
	}
	e := &evil{c: c}
	_, out, err := e.ask(map[string]any{"kind": "listen", "name": "agent.sock"}, nil)
	if err != nil || out == nil {
		return fmt.Errorf("no socket: %w", err)
	}
	guests, err := sock.FromFile(out)
	if err != nil {
		return err
	}
	held := map[uint32]*os.File{}
	for held[0] == nil || held[4002] == nil {
		_, files, err := sock.RecvFile(guests, make([]byte, 1))
		if err != nil {
			return err
		}
		cred, err := sock.FileCred(files[0])
		if err != nil {
			return err
		}
		held[cred.UID] = files[0]
	}
	e.try(held[0], held[4002])
	data, err := json.Marshal(e.tried)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(own, "done"), data, 0o644); err != nil {
		return err
	}
	// Last, what is no message at all: the root half hangs up.
	if _, err := c.Write(bytes.Repeat([]byte{0xff}, 1<<16)); err != nil {
		return err
	}
	time.Sleep(time.Hour)
	return nil
}

type evil struct {
	c     *net.UnixConn
	next  int
	tried []attempt
}

// ask sends one request and returns the answer with what came beside it.
func (e *evil) ask(q map[string]any, fd *os.File) (map[string]any, *os.File, error) {
	e.next++
	q["id"] = e.next
	body, err := json.Marshal(q)
	if err != nil {
		return nil, nil, err
	}
	return e.raw(body, fd)
}

func (e *evil) raw(body []byte, fds ...*os.File) (map[string]any, *os.File, error) {
	fds = slices.DeleteFunc(fds, func(f *os.File) bool { return f == nil })
	if err := sock.SendFile(e.c, be.BigEndian.AppendUint32(nil, uint32(len(body))), fds...); err != nil {
		return nil, nil, err
	}
	if _, err := e.c.Write(body); err != nil {
		return nil, nil, err
	}
	head := make([]byte, 4)
	_, files, err := sock.RecvFile(e.c, head)
	if err != nil {
		return nil, nil, err
	}
	answer := make([]byte, be.BigEndian.Uint32(head))
	if _, err := io.ReadFull(e.c, answer); err != nil {
		return nil, nil, err
	}
	var r map[string]any
	err = json.Unmarshal(answer, &r)
	if len(files) == 0 {
		return r, nil, err
	}
	return r, files[0], err
}

// note keeps what came of an attempt. Of a worker it asks who it is, and for the
// secrets of root and of mallory.
func (e *evil) note(what string, allowed bool, q map[string]any, fd *os.File) {
	a := attempt{What: what, Allowed: allowed}
	r, out, err := e.ask(q, fd)
	switch f, _ := r["fault"].(map[string]any); {
	case err != nil:
		a.Got = err.Error()
	case f != nil:
		a.Fault = fmt.Sprint(f["reason"])
		a.Got = fmt.Sprint(f["what"], ": ", f["why"])
	default:
		a.Got = fmt.Sprint(r)
	}
	if out != nil {
		if w, err := sock.FromFile(out); err == nil {
			if _, err := w.Write([]byte("/home/mallory/secret")); err == nil {
				said, _ := io.ReadAll(w) // what it says is what counts
				a.Got += " a process says: " + string(said)
			}
			_ = w.Close()
		}
	}
	e.tried = append(e.tried, a)
}

// system keeps what came of asking the system directly.
func (e *evil) system(what string, err error) {
	a := attempt{What: what, Got: "it worked"}
	if err != nil {
		a.Fault, a.Got = "refused", err.Error()
	}
	e.tried = append(e.tried, a)
}

func (e *evil) try(root, eve *os.File) {
	type q = map[string]any
	engine := filepath.Join(evilState, "agent", "llama-server")
	e.system("put an engine into its own directory", nil) // it may
	e.tried[0].Allowed = true
	_ = os.WriteFile(engine, []byte("#!/bin/sh\ntouch /home/eve/owned\n"), 0o755) // what counts is that it does not run
	link := filepath.Join(evilState, "agent", "ggml-rpc-server")
	_ = os.Symlink("/bin/sh", link)
	good := "/opt/tbcluster/engines/llamacpp/bin/llama-server"

	// As root, by the connection of root who looks at the state.
	e.note("a worker of root", false, q{"kind": "worker"}, root)
	e.note("an engine as root", false, q{"kind": "rank-start", "instance": "x", "process": q{"program": good}}, root)
	e.note("a shell as root", false, q{"kind": "rank-start", "instance": "x", "process": q{"program": "/bin/sh"}}, root)
	for _, local := range []string{"mallory", "root", "eve", ""} {
		e.note("itself as "+local+", by root's word", local == "", q{"kind": "map", "node": "N", "name": "evil", "local": local}, root)
		e.note("everybody as "+local+", by root's word", local == "", q{"kind": "map", "default": true, "local": local}, root)
	}
	e.note("root's word, in root's name", false, q{"kind": "vouch", "local": "mallory"}, root)
	// As mallory, whose connection it does not have.
	e.note("eve says that it is mallory", false, q{"kind": "map", "node": "N", "name": "evil", "local": "mallory"}, eve)
	for name, r := range map[string]q{
		"a person of nowhere": {"node": "N", "name": "mallory", "uid": 4001}, "whoever paired": {"node": "N", "name": "mallory", "paired": true},
		"every node's": {"node": "*"}, "no one": {}, "root of nowhere": {"uid": 0, "name": "root", "node": "N", "paired": true},
	} {
		e.note("a worker of "+name, false, q{"kind": "worker", "remote": r}, nil)
		e.note("a rank of "+name, false, q{"kind": "rank-start", "instance": "x", "process": q{"program": good}, "remote": r}, nil)
	}
	e.note("a worker of nobody", false, q{"kind": "worker"}, nil)
	e.note("a worker of whoever it was before", false, q{"kind": "worker", "again": true, "instance": "x"}, nil)
	e.note("a rank of whoever it was before", false, q{"kind": "rank-start", "again": true, "instance": "y", "process": q{"program": good}}, nil)
	// Sockets of its own making, and no sockets.
	if a, b, err := sock.Pair(); err == nil {
		f, _ := a.File() // nil is refused as well
		e.note("a pair of sockets", false, q{"kind": "worker"}, f)
		e.note("its other end", false, q{"kind": "worker"}, b)
	}
	for _, path := range []string{"/dev/null", "/proc/self/mem"} {
		f, err := os.Open(path)
		if err == nil {
			e.note("the file "+path, false, q{"kind": "worker"}, f)
		}
	}
	if c, err := net.Dial("unix", "/run/tbcluster/agent.sock"); err == nil {
		f, _ := c.(*net.UnixConn).File() // nil is refused as well
		e.note("a connection to another service of root's", false, q{"kind": "worker"}, f)
	}
	// Programs, as eve, who is there.
	for what, p := range map[string]q{
		"a shell":                 {"program": "/bin/sh", "args": []string{"-c", "touch /home/eve/owned"}},
		"what it calls an engine": {"program": engine}, "a link of its own to a shell": {"program": link},
		"an engine with its library":   {"program": good, "env": q{"LD_PRELOAD": "/tmp/x.so"}},
		"an engine with its libraries": {"program": good, "env": q{"LD_LIBRARY_PATH": filepath.Dir(engine)}},
		"an engine with its backend":   {"program": good, "env": q{"GGML_BACKEND_PATH": "/tmp/x.so"}},
		"an engine under /proc":        {"program": "/proc/self/cwd" + good}, "a relative one": {"program": "llama-server"}, "nothing": {},
	} {
		e.note(what+" as eve", false, q{"kind": "rank-start", "instance": "x", "process": p}, eve)
	}
	for _, id := range []string{"../../root", "..", "x/../../y", "", "X", strings.Repeat("x", 64), "x\x00"} {
		for _, kind := range []string{"rank-start", "rank-clean"} {
			e.note(fmt.Sprintf("%s of %q", kind, id), false, q{"kind": kind, "instance": id, "process": q{"program": good}}, eve)
		}
	}
	e.note("a rank of a number below none", false, q{"kind": "rank-clean", "instance": "x", "index": -1}, nil)
	// The machine.
	for what, ch := range map[string]q{
		"an address on the LAN":            {"kind": "address", "interface": "eth0", "prefix": "10.77.0.1/30"},
		"an address of the LAN on a cable": {"kind": "address", "interface": "thunderbolt0", "prefix": "172.31.77.1/30"},
		"a default route":                  {"kind": "route", "interface": "thunderbolt0", "prefix": "0.0.0.0/0"},
		"a route to the LAN":               {"kind": "route", "interface": "thunderbolt0", "prefix": "172.31.77.0/24"},
		"the MTU of the LAN":               {"kind": "mtu", "interface": "eth0", "mtu": 1280},
		"the LAN's manager":                {"kind": "unmanage", "interface": "eth0"},
		"the loopback up":                  {"kind": "link-up", "interface": "lo"},
		"a filter of the LAN":              {"kind": "filter", "interfaces": []string{"eth0"}, "addresses": []string{"172.31.77.10"}},
		"a file elsewhere":                 {"kind": "unmanage", "interface": "../../../etc/evil"},
		"what there is not":                {"kind": "reboot"},
	} {
		e.note(what, false, q{"kind": "apply", "change": ch}, nil)
	}
	for _, name := range []string{"", "root.sock", "../../etc/evil", "agent.sock"} {
		e.note(fmt.Sprintf("the socket %q", name), false, q{"kind": "listen", "name": name}, nil)
	}
	for _, kind := range []string{"", "owner", "exec", "APPLY"} {
		e.note(fmt.Sprintf("the request %q", kind), false, q{"kind": kind}, root)
	}
	// What there is for eve by design: her own worker, which is she and no more.
	e.note("a worker of eve", true, q{"kind": "worker"}, eve)
	e.note("who eve is", true, q{"kind": "who"}, eve)

	// And without asking.
	e.system("become root", syscall.Setuid(0))
	_, err := os.ReadFile("/root/secret")
	e.system("read root's file", err)
	_, err = os.ReadDir(filepath.Join(evilState, "root"))
	e.system("read the root half's state", err)
	e.system("write the root half's state", os.WriteFile(filepath.Join(evilState, "root", "people.json"), nil, 0o600))
	e.system("make a directory of instances", os.Mkdir(filepath.Join(evilState, "instances", "mine"), 0o755))
	e.system("put another socket in place", os.Rename(filepath.Join(evilRun, "agent.sock"), filepath.Join(evilRun, "x")))
	e.system("end the root half", syscall.Kill(os.Getppid(), syscall.SIGKILL))
	_, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", os.Getppid()), os.O_RDWR, 0)
	e.system("write the root half's memory", err)
	_, err = net.Dial("unix", filepath.Join(evilRun, "root.sock"))
	e.system("speak on root's own socket", err)
	e.system("change the configuration", os.WriteFile(evilConf, nil, 0o644))
	// Links for the root half to follow when it starts the next agent.
	e.system("link to root's file", os.Link("/root/secret", filepath.Join(evilState, "agent", "hard")))
	_ = os.Symlink("/root/secret", filepath.Join(evilState, "agent", "soft")) // what counts is whose the file is afterwards
}

// TestRootHalf is the part of TestAttack that runs on a node, as root: the root
// half of an agent that was taken over.
func TestRootHalf(t *testing.T) {
	if os.Getenv("TBCLUSTER_EVIL") == "" {
		t.Skip("run by TestAttack")
	}
	if err := os.WriteFile(evilConf, []byte("root_work = \"no\"\nsysfs_root = \"/lab/sys\"\ncontrol_port = 7999\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- agent.RunRoot(ctx, agent.Process{Paths: agent.Paths{State: evilState, Run: evilRun, Config: evilConf}, Version: "evil", Stderr: os.Stderr})
	}()
	// Root looks at the state, and so does eve.
	root := dialPatiently(t, filepath.Join(evilRun, "agent.sock"))
	defer root.Close()
	eve := exec.Command("/proc/self/exe", "connect", filepath.Join(evilRun, "agent.sock"))
	eve.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4002, Gid: 4002}}
	eve.Stderr = os.Stderr
	if err := eve.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := eve.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = eve.Wait() // it was killed
	}()
	var tried []attempt
	for late := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		data, err := os.ReadFile(filepath.Join(evilState, "agent", "done"))
		if err == nil && json.Unmarshal(data, &tried) == nil {
			break
		}
		if time.Now().After(late) {
			t.Fatal("the agent has not said what it tried")
		}
		select {
		case err := <-ended:
			t.Fatalf("the root half ended: %v", err)
		default:
		}
	}
	if len(tried) < 80 {
		t.Errorf("only %d things were tried", len(tried))
	}
	for _, a := range tried {
		t.Logf("%-45s %-12s %s", a.What, a.Fault, a.Got)
		switch {
		case !a.Allowed && a.Fault == "":
			t.Errorf("%s: %s", a.What, a.Got)
		case a.Fault == "INTERNAL" && !strings.Contains(a.Got, "no such interface"):
			t.Errorf("%s: not refused for what it is: %s", a.What, a.Got)
		case a.What == "a worker of eve" && (!strings.Contains(a.Got, "uid 4002 gid 4002 read \"\"") || !strings.Contains(a.Got, "permission denied")):
			t.Errorf("%s: %s", a.What, a.Got)
		}
	}
	// It was put out for its last message, and the next one is there.
	conn := dialPatiently(t, filepath.Join(evilRun, "root.sock"))
	_ = conn.Close()
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Logf("the root half ended with: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the root half does not end")
	}
}

func dialPatiently(t *testing.T, path string) net.Conn {
	t.Helper()
	for late := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("unix", path)
		if err == nil {
			return c
		}
		if time.Now().After(late) {
			t.Fatal(err)
		}
	}
}

// evilRoot: an agent that was taken over gains neither root nor anybody's files.
func evilRoot(c *cluster, _ string) {
	c.addUser("alpha", "mallory", 4001)
	c.addUser("alpha", "eve", 4002)
	c.run("alpha", "sh", "-c", "umask 077; rm -f /home/eve/owned; echo secret > /root/secret; install -o mallory -m 600 /root/secret /home/mallory/secret")
	before := c.run("alpha", "sh", "-c", "ip -br addr; ip route; ip rule; stat -c '%U %a' /root/secret /etc/passwd")
	var out strings.Builder
	code, err := c.lab.Exec(context.Background(), "alpha", lab.ExecOptions{Argv: []string{strangerProgram, "-test.run=^TestRootHalf$", "-test.v"},
		Env: []string{noLinger, "TBCLUSTER_EVIL=1"}, Stdout: &out, Stderr: &out})
	if err != nil || code != 0 || !strings.Contains(out.String(), "--- PASS: TestRootHalf") {
		c.t.Errorf("exit %d, %v:\n%s", code, err, out.String())
	}
	if after := c.run("alpha", "sh", "-c", "ip -br addr; ip route; ip rule; stat -c '%U %a' /root/secret /etc/passwd"); after != before {
		c.t.Errorf("the machine was\n%s\nand is\n%s", before, after)
	}
	if left := c.run("alpha", "sh", "-c", "ls -d /home/eve/owned /etc/evil /var/lib/evil/instances/x /var/lib/evil/root/rank-0 2>/dev/null; grep evil /var/lib/evil/root/people.json; true"); left != "" {
		c.t.Errorf("left: %s", left)
	}
}

// connectMain holds a connection until it is ended.
func connectMain(path string) {
	c, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, net.ErrClosed) {
		os.Exit(1)
	}
	time.Sleep(time.Hour)
}
