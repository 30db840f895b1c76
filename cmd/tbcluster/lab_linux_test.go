package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/lab"
)

// labFor names a lab that is taken down at the end of the test.
func labFor(t *testing.T) string {
	t.Helper()
	b := make([]byte, 5)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	name := "cmd-" + hex.EncodeToString(b)
	t.Cleanup(func() {
		if l, err := lab.Open(name); err == nil {
			// The test's own context has ended by now.
			if err := l.Down(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	return name
}

func TestALabIsMadeBrokenAndTakenDown(t *testing.T) {
	name := labFor(t)
	in := func(args ...string) result {
		t.Helper()
		return tbIn(t.Context(), nil, "typed", append([]string{"lab", args[0], "--name", name}, args[1:]...)...)
	}
	ok := func(args ...string) string {
		t.Helper()
		r := in(args...)
		r.wantCode(t, fault.ExitOK)
		return r.out
	}
	current := func() lab.Status {
		t.Helper()
		var s lab.Status
		if err := json.Unmarshal([]byte(ok("status", "-o", "json")), &s); err != nil {
			t.Fatal(err)
		}
		return s
	}

	up := in("up", "--nodes", "3", "--topology", "chain", "--cables", "2", "--memory", "1g", "--disk", "32m", "--no-agent")
	if up.code != 0 && os.Geteuid() != 0 && strings.Contains(up.err, "namespaces") {
		t.Skipf("this machine gives no namespaces to ordinary users: %s", up.err)
	}
	up.wantCode(t, fault.ExitOK)
	for _, want := range []string{"lab " + name + " is running", "gamma  running  stopped", "1.0 GiB", "alpha:beta    2  plugged  0-3 : 0-3  thunderbolt1 : thunderbolt1"} {
		if !strings.Contains(up.out, want) {
			t.Errorf("`lab up` does not say %q:\n%s", want, up.out)
		}
	}
	if out := ok("list"); !strings.Contains(out, name) {
		t.Errorf("`lab list`: %s", out)
	}
	var labs labListJSON
	if err := json.Unmarshal([]byte(ok("list", "-o", "json")), &labs); err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(labs.List, func(e labEntryJSON) bool { return e.Name == name }); i < 0 || !slices.Contains(labs.Labs, name) {
		t.Errorf("`lab list -o json` lacks %s: %+v", name, labs)
	} else if e := labs.List[i]; e.State != lab.Running || e.Nodes == nil || *e.Nodes != 3 || e.Cables == nil || *e.Cables != 4 {
		t.Errorf("`lab list -o json`: %+v", e)
	}

	if out := ok("cut", "beta:alpha", "--cable", "2"); out != "beta:alpha is cut\n" {
		t.Errorf("`lab cut` says %q", out)
	}
	ok("cut", "beta:gamma", "--silent")
	ok("cut", "lan:beta")
	s := current()
	var states []string
	for _, c := range s.Cables {
		states = append(states, string(c.State))
	}
	if !slices.Equal(states, []string{"plugged", "cut", "silent", "silent"}) || !s.Nodes[1].LANCut {
		t.Errorf("states %v, LAN of beta cut: %v", states, s.Nodes[1].LANCut)
	}
	ok("mend", "alpha:beta", "--rename", "--cable", "2")
	ok("mend", "beta:gamma")
	if out := ok("mend", "beta:lan"); out != "beta:lan is plugged\n" {
		t.Errorf("`lab mend` says %q", out)
	}
	if s := current(); s.Cables[1].A.Interface != "thunderbolt2" || s.Cables[2].State != lab.Plugged || s.Nodes[1].LANCut {
		t.Errorf("mended: %+v", s)
	}

	if out := ok("kill", "gamma"); out != "gamma has no power now\n" {
		t.Errorf("`lab kill` says %q", out)
	}
	r := in("exec", "gamma", "--", "true")
	r.wantCode(t, fault.ExitNodeDown)
	if want := "`tbcluster lab start gamma --name " + name + "` boots it"; !strings.Contains(r.err, want) {
		t.Errorf("`lab exec` on a node that is off does not say %q:\n%s", want, r.err)
	}
	ok("start", "gamma")
	ok("pause", "gamma")
	if s := current(); s.Nodes[2].State != lab.Paused {
		t.Errorf("paused: %+v", s.Nodes[2])
	}
	ok("resume", "gamma")

	r = in("exec", "beta", "--", "sh", "-c", "cat; hostname; echo oops >&2; exit 9")
	if r.code != 9 || r.out != "typedbeta\n" || r.err != "oops\n" {
		t.Errorf("`lab exec`: %+v", r)
	}
	// Flags after the node are the command's own.
	if r := in("exec", "beta", "echo", "-u", "nobody"); r.code != 0 || r.out != "-u nobody\n" {
		t.Errorf("`lab exec` without --: %+v", r)
	}
	if r := in("exec", "lan", "--", "hostname"); r.out != "lan\n" {
		t.Errorf("`lab exec lan`: %+v", r)
	}

	// A signal ends it as it ends any command: the context is what main makes of one.
	interrupted, interrupt := context.WithCancel(t.Context())
	begun, w := io.Pipe()
	var said bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		g := &globals{in: eof{}, out: w, errOut: &said, run: "/nonexistent", getenv: func(string) string { return "" }}
		ended <- run(interrupted, g, []string{"lab", "exec", "--name", name, "beta", "--", "sh", "-c", "echo begun; exec sleep 600"})
	}()
	if line, err := bufio.NewReader(begun).ReadString('\n'); err != nil || line != "begun\n" {
		t.Fatalf("the command said %q, %v", line, err)
	}
	interrupt()
	if code := <-ended; code != fault.ExitInterrupted || said.Len() > 0 {
		t.Errorf("interrupted it ends with %d and says %q", code, said.String())
	}

	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"exec", "omega", "--", "true"}, fault.ExitUnknown, `has no node "omega"`},
		{[]string{"exec", "beta", "--", "no-such-command"}, fault.ExitPartial, "no-such-command"},
		{[]string{"exec", "beta"}, fault.ExitUsage, "something is missing after `tbcluster lab exec`"},
		{[]string{"cut", "alpha"}, fault.ExitUsage, "alpha:beta"},
		{[]string{"cut", "alpha:gamma"}, fault.ExitUsage, "`tbcluster lab status --name " + name + "` lists the cables"},
		{[]string{"cut", "alpha:lan", "--silent"}, fault.ExitUsage, "one plug"},
		{[]string{"kill", "lan"}, fault.ExitUsage, "no node of the cluster"},
		{[]string{"kill", "--agent", "alpha"}, fault.ExitNoAgent, "`tbcluster lab start alpha --agent --name " + name + "` starts it"},
		{[]string{"start", "beta"}, fault.ExitPrecondition, "`tbcluster lab kill beta --name " + name + "` takes its power"},
		{[]string{"up", "--no-agent"}, fault.ExitPrecondition, "running already"},
		{[]string{"up", "--memory", "much"}, fault.ExitUsage, `"much" is no size`},
		{[]string{"up", "--bind", "/tmp"}, fault.ExitUsage, "is no bind"},
	} {
		r := in(c.args...)
		r.wantCode(t, c.code)
		if !strings.Contains(r.err, c.says) {
			t.Errorf("%v does not say %q:\n%s", c.args, c.says, r.err)
		}
	}

	if out := ok("down"); out != "lab "+name+" is gone\n" {
		t.Errorf("`lab down` says %q", out)
	}
	for _, args := range [][]string{{"status"}, {"down"}, {"exec", "alpha", "--", "true"}} {
		r := in(args...)
		r.wantCode(t, fault.ExitPrecondition)
		if !strings.Contains(r.err, "no lab is called "+name) || !strings.Contains(r.err, "`tbcluster lab up --name "+name+"`") {
			t.Errorf("%v: %s", args, r.err)
		}
	}
}

func TestNamesOfALabAreCompleted(t *testing.T) {
	name := labFor(t)
	r := tb(t, nil, "lab", "up", "--name", name, "--nodes", "2", "--topology", "pair", "--no-agent", "--disk", "16m")
	if r.code != 0 && os.Geteuid() != 0 && strings.Contains(r.err, "namespaces") {
		t.Skipf("this machine gives no namespaces to ordinary users: %s", r.err)
	}
	r.wantCode(t, fault.ExitOK)
	for _, c := range []struct{ args, want []string }{
		{[]string{"lab", "kill", "--name", name, ""}, []string{"alpha\trunning", "beta\trunning"}},
		{[]string{"lab", "cut", "--name", name, ""}, []string{"alpha:beta\tplugged", "alpha:lan", "beta:lan"}},
		{[]string{"lab", "up", "--topology", ""}, []string{"mesh", "ring", "chain", "pair"}},
	} {
		r := tb(t, nil, append([]string{"__complete"}, c.args...)...)
		for _, want := range c.want {
			if !slices.Contains(strings.Split(r.out, "\n"), want) {
				t.Errorf("%v does not offer %q: %s", c.args, want, r.out)
			}
		}
	}
}
