package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tbcluster/api/fault"
)

// listenAt serves an agent at path.
func listenAt(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	d := &agentDouble{socket: path, state: deskState()}
	d.serve(t)
}

// shortDir returns a directory whose paths fit into a socket address.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Every place is there at once, and one after the other is taken away: each
// time the next best is chosen.
func TestTheNearestAgentIsChosen(t *testing.T) {
	dir := shortDir(t)
	env := map[string]string{"TMPDIR": filepath.Join(dir, "t"), "XDG_RUNTIME_DIR": filepath.Join(dir, "x")}
	g := &globals{run: filepath.Join(dir, "r"), getenv: func(k string) string { return env[k] }}
	uid := strconv.Itoa(os.Getuid())
	places := []string{
		filepath.Join(dir, "flag.sock"),
		filepath.Join(dir, "env.sock"),
		filepath.Join(dir, "r/tbcluster/agent.sock"),
		filepath.Join(dir, "x/tbcluster/agent.sock"),
		filepath.Join(dir, "t/tbcluster-"+uid+"/agent.sock"),
		labSocket(labRuntimeDirs(g)[0], "default", "alpha"),
	}
	for _, p := range places {
		listenAt(t, p)
	}
	g.socket, env["TBCLUSTER_SOCKET"] = places[0], places[1]
	for i, want := range places {
		var said bytes.Buffer
		try := *g
		try.errOut = &said
		e, err := choose(t.Context(), &try)
		if err != nil {
			t.Fatalf("with %v left: %v", places[i:], err)
		}
		if e.path != want {
			t.Fatalf("chose %s, want %s", e.path, want)
		}
		if isLab := i == len(places)-1; isLab != strings.Contains(said.String(), "alpha") || isLab != e.foreign {
			t.Errorf("for %s standard error says %q, foreign is %v", want, said.String(), e.foreign)
		}
		switch i {
		case 0:
			g.socket = ""
		case 1:
			env["TBCLUSTER_SOCKET"] = ""
		default:
			if err := os.Remove(want); err != nil {
				t.Fatal(err)
			}
		}
	}
	var said bytes.Buffer
	g.errOut = &said
	if e, err := choose(t.Context(), g); err == nil {
		t.Errorf("nobody listens, and %s was chosen", e.path)
	}
}

func TestInsideALabNodeOnlyItsOwnAgentIsMeant(t *testing.T) {
	dir := shortDir(t)
	env := map[string]string{"TBCLUSTER_NODE": "beta", "XDG_RUNTIME_DIR": filepath.Join(dir, "x")}
	listenAt(t, filepath.Join(dir, "x/tbcluster/agent.sock"))
	g := &globals{run: filepath.Join(dir, "r"), getenv: func(k string) string { return env[k] }, errOut: discard{}}
	if e, err := choose(t.Context(), g); err == nil {
		t.Fatalf("the node's agent does not run, and %s was chosen instead", e.path)
	}
	listenAt(t, filepath.Join(dir, "r/tbcluster/agent.sock"))
	e, err := choose(t.Context(), g)
	if err != nil || e.path != filepath.Join(dir, "r/tbcluster/agent.sock") {
		t.Fatalf("chose %v, %v", e, err)
	}
}

// Whoever makes the directory first must not be able to play the agent.
func TestASocketInADirectoryOpenToOthersIsLeftAlone(t *testing.T) {
	dir := shortDir(t)
	env := map[string]string{"TMPDIR": dir}
	trap := filepath.Join(dir, "tbcluster-"+strconv.Itoa(os.Getuid()))
	listenAt(t, filepath.Join(trap, "agent.sock"))
	if err := os.Chmod(trap, 0o777); err != nil {
		t.Fatal(err)
	}
	g := &globals{run: filepath.Join(dir, "r"), getenv: func(k string) string { return env[k] }, errOut: discard{}}
	_, err := choose(t.Context(), g)
	if err == nil || !strings.Contains(err.Error(), "can be written by others") {
		t.Fatalf("want a refusal that says why, got %v", err)
	}
	if os.Getuid() == 0 {
		if err := os.Chmod(trap, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(trap, 4242, 4242); err != nil {
			t.Fatal(err)
		}
		if _, err := choose(t.Context(), g); err == nil || !strings.Contains(err.Error(), "belongs to user 4242") {
			t.Fatalf("want a refusal that says whose it is, got %v", err)
		}
	}
}

// An agent that was started on the advice of this error would be the machine's
// own, and no part of the lab.
func TestWithoutTheAgentOfALabItsNodeIsNamed(t *testing.T) {
	dir := shortDir(t)
	env := map[string]string{"TMPDIR": filepath.Join(dir, "t"), "XDG_RUNTIME_DIR": filepath.Join(dir, "x")}
	g := &globals{run: filepath.Join(dir, "r"), getenv: func(k string) string { return env[k] }, errOut: discard{}}
	base := labRuntimeDirs(g)[0]
	for _, c := range []struct {
		name, lab, socket string
		says              []string
	}{
		{"the nearest", "default", "", []string{`node alpha of the lab "default"`, "`tbcluster lab start alpha --agent`"}},
		{"one that was chosen", "desk", labSocket(base, "desk", "alpha"), []string{`node alpha of the lab "desk"`, "`tbcluster lab start alpha --agent --name desk`", "from --socket"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.MkdirAll(filepath.Join(base, c.lab, "alpha"), 0o700); err != nil {
				t.Fatal(err)
			}
			try := *g
			try.socket = c.socket
			_, err := choose(t.Context(), &try)
			f := fault.As(err)
			if f == nil || f.Reason != fault.NoAgent {
				t.Fatalf("want that no agent answers, got %v", err)
			}
			said := f.What + "\n" + f.Where + "\n" + f.Fix
			for _, want := range c.says {
				if !strings.Contains(said, want) {
					t.Errorf("the error lacks %q:\n%s", want, said)
				}
			}
			if strings.Contains(said, "tbcluster up") {
				t.Errorf("the error would have an agent of the machine itself started:\n%s", said)
			}
		})
	}
	// One that answers no more, and one without its gateway.
	socket := labSocket(base, "desk", "alpha")
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		t.Fatal(err)
	}
	(&agentDouble{socket: socket, fault: map[string]error{"GetState": status.Error(codes.Unavailable, "it is gone")}}).serve(t)
	for _, args := range [][]string{{"status"}, {"chat", "smol", "hello"}} {
		var said bytes.Buffer
		try := *g
		try.out, try.errOut = discard{}, &said
		if code := run(t.Context(), &try, append(args, "--socket", socket)); code != fault.ExitNoAgent ||
			!strings.Contains(said.String(), "`tbcluster lab start alpha --agent --name desk`") || strings.Contains(said.String(), "tbcluster up") {
			t.Errorf("%v ends with %d and says\n%s", args, code, said.String())
		}
	}
	// A socket that only looks like one of a lab is not.
	for _, path := range []string{base + "/desk/run/tbcluster/agent.sock", base + "/a/b/c/" + inNode, dir + "/desk/alpha/" + inNode} {
		if n := labNodeOf(g, path); n != nil {
			t.Errorf("%s is taken for the one of %s", path, n)
		}
	}
}

func TestWhereItTalksToIsNoPartOfJSON(t *testing.T) {
	dir := shortDir(t)
	env := map[string]string{"TMPDIR": filepath.Join(dir, "t"), "XDG_RUNTIME_DIR": filepath.Join(dir, "x")}
	var out, said bytes.Buffer
	g := &globals{run: filepath.Join(dir, "r"), getenv: func(k string) string { return env[k] }, out: &out, errOut: &said}
	socket := labSocket(labRuntimeDirs(g)[0], "default", "alpha")
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		t.Fatal(err)
	}
	(&agentDouble{socket: socket, fault: map[string]error{"GetState": denied()}}).serve(t)
	if code := run(t.Context(), g, []string{"status", "-o", "json"}); code != fault.ExitDenied {
		t.Fatalf("exit code %d: %s", code, said.String())
	}
	var doc struct{ Error faultJSON }
	if err := json.Unmarshal(said.Bytes(), &doc); err != nil || doc.Error.Reason != "DENIED" {
		t.Errorf("standard error is not one document (%v):\n%s", err, said.String())
	}
}
