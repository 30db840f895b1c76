package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func TestMain(m *testing.M) {
	// The keeper and the inits of a lab are this program.
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "lab-") {
		main()
	}
	if s := os.Getenv("TB_TEST_AGENT"); s != "" {
		os.Exit(playAgent(s))
	}
	os.Exit(m.Run())
}

func TestErrorsBecomeExitCodesAndWords(t *testing.T) {
	d := startDouble(t, &agentDouble{state: deskState(), fault: map[string]error{"Rename": denied(), "Forget": fault.Newf(fault.NodeUnknown, "`tbcluster node list` lists them", "no node is called %q", "dleta").At("alpha")}})
	for _, c := range []struct {
		name string
		args []string
		code int
		err  []string
	}{
		{"a command that is not there", []string{"frobnicate"}, 1, []string{"there is no command `tbcluster frobnicate`", "do:"}},
		{"a flag that is not there", []string{"status", "--frob"}, 1, []string{"unknown flag: --frob"}},
		{"an argument too many", []string{"status", "x"}, 1, []string{"too much stands after `tbcluster status`"}},
		{"an argument too few", []string{"ping"}, 1, []string{"something is missing after `tbcluster ping`", "write: tbcluster ping NODE;"}},
		{"a command that is misspelt", []string{"statsu"}, 1, []string{"did you mean `tbcluster status`?"}},
		{"JSON asked for on a line that is wrong", []string{"frobnicate", "-o", "json"}, 1, []string{`"reason": "USAGE"`}},
		{"a number that is none", []string{"links", "bench", "--seconds", "x"}, 1, []string{`--seconds wants a number, not "x"`, "0.2 to 10", "tbcluster links bench --help"}},
		{"a whole number that is none", []string{"cp", "--max-cables", "-1", "a", "b"}, 1, []string{`--max-cables wants a whole number, 0 or more, not "-1"`, "0 means all"}},
		{"a number that is too large", []string{"cp", "--max-cables", "99999999999", "a", "b"}, 1, []string{`"99999999999" is too large or too small for --max-cables`}},
		{"a switch that is none", []string{"status", "--watch=maybe"}, 1, []string{`--watch wants true or false, not "maybe"`}},
		{"help about what is not there", []string{"help", "frobnicate"}, 1, []string{"there is no command `tbcluster frobnicate`"}},
		{"help about what is not there, in a group", []string{"help", "lab", "statsu"}, 1, []string{"there is no command `tbcluster lab statsu`", "did you mean `tbcluster lab status`?"}},
		{"a lab command that is not there", []string{"lab", "frob"}, 1, []string{"there is no command `tbcluster lab frob`"}},
		{"an output that is not there", []string{"status", "-o", "yaml"}, 1, []string{`"yaml"`, "-o json"}},
		{"an unknown node", []string{"node", "forget", "dleta"}, 3, []string{`tbcluster: no node is called "dleta"`, "where: alpha", "do:    `tbcluster node list` lists them"}},
		{"no right", []string{"node", "rename", "beta", "b"}, 4, []string{"why:   user ada is no owner", "do:    add ada to owners"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := tb(t, d, c.args...)
			r.wantCode(t, c.code)
			if r.out != "" {
				t.Errorf("an error left something on standard output: %q", r.out)
			}
			for _, w := range c.err {
				if !strings.Contains(r.err, w) {
					t.Errorf("standard error lacks %q:\n%s", w, r.err)
				}
			}
		})
	}
}

func TestHelpAboutACommand(t *testing.T) {
	for _, c := range [][2]string{{"", "Start with \"tbcluster up\""}, {"lab cut", "tbcluster lab cut A:B [flags]"}} {
		r := tb(t, nil, append([]string{"help"}, strings.Fields(c[0])...)...)
		r.wantCode(t, 0)
		if !strings.Contains(r.out, c[1]) || !strings.Contains(r.out, "--help") {
			t.Errorf("`help %s` lacks %q:\n%s", c[0], c[1], r.out)
		}
	}
}

func TestErrorsAreJSONWithJSONOutput(t *testing.T) {
	d := startDouble(t, &agentDouble{fault: map[string]error{"GetState": denied()}})
	r := tb(t, d, "status", "-o", "json")
	r.wantCode(t, 4)
	var doc struct{ Error faultJSON }
	if err := json.Unmarshal([]byte(r.err), &doc); err != nil {
		t.Fatalf("%v in %s", err, r.err)
	}
	want := faultJSON{Reason: "DENIED", What: "cannot change the cluster", Where: "alpha", Why: "user ada is no owner", Fix: "add ada to owners", ExitCode: 4}
	if doc.Error.Reason != want.Reason || doc.Error.What != want.What || doc.Error.Where != want.Where || doc.Error.Why != want.Why || doc.Error.Fix != want.Fix || doc.Error.ExitCode != want.ExitCode {
		t.Errorf("got %+v, want %+v", doc.Error, want)
	}
}

func TestNoAgentSaysHowToStartOne(t *testing.T) {
	for _, args := range [][]string{{"status"}, {"ps"}, {"chat", "x", "hello"}, {"cp", "a", "b:"}} {
		r := tb(t, nil, append(args, "--socket", filepath.Join(t.TempDir(), "none.sock"))...)
		r.wantCode(t, fault.ExitNoAgent)
		if !strings.Contains(r.err, "tbcluster up") || !strings.Contains(r.err, "from --socket") {
			t.Errorf("%v: no word of what to do:\n%s", args, r.err)
		}
	}
}

func TestAgentThatGoesAwayIsNamed(t *testing.T) {
	d := startDouble(t, &agentDouble{instances: make(chan *tbv1.Instance)})
	go func() {
		// Taken only once the command follows the instance.
		d.instances <- &tbv1.Instance{Id: "i-1", Name: "smol", State: tbv1.InstanceState_INSTANCE_STATE_STARTING}
		d.server.Stop()
	}()
	r := tb(t, d, "place", "smollm2")
	r.wantCode(t, fault.ExitNoAgent)
	if !strings.Contains(r.err, "the agent does not answer any more") || !strings.Contains(r.err, d.socket) {
		t.Errorf("the agent is not named:\n%s", r.err)
	}
}

// commands returns every command that can be run, with its whole name.
func commands(c *cobra.Command) []*cobra.Command {
	list := []*cobra.Command{}
	if c.Runnable() || c.HasSubCommands() {
		list = append(list, c)
	}
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.Name() != "help" {
			list = append(list, commands(sub)...)
		}
	}
	return list
}

func TestEveryHelpListsItsExitStatus(t *testing.T) {
	root := newRootCommand(&globals{out: os.Stdout, errOut: os.Stderr, getenv: os.Getenv, run: "/run"})
	seen := map[string]bool{}
	for _, c := range commands(root)[1:] {
		path := strings.TrimPrefix(c.CommandPath(), "tbcluster ")
		seen[path] = true
		long := c.Long
		for _, want := range []string{"EXIT STATUS", "  0    it did what was asked", "  1    ", "  70   there is a bug in tbcluster"} {
			if !strings.Contains(long, want) {
				t.Errorf("%s: the help lacks %q", path, want)
			}
		}
		codes := map[string]bool{}
		_, table, _ := strings.Cut(long, "EXIT STATUS\n")
		for _, line := range strings.Split(table, "\n") {
			code, _, _ := strings.Cut(strings.TrimSpace(line), " ")
			if codes[code] {
				t.Errorf("%s: its help lists exit code %s twice", path, code)
			}
			codes[code] = true
		}
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: its short description is %q", path, c.Short)
		}
		for _, line := range strings.Split(long[:max(0, strings.Index(long, "EXIT STATUS"))], "\n") {
			if len([]rune(line)) > 100 {
				t.Errorf("%s: a line of its help is too long for a terminal: %q", path, line)
			}
		}
	}
	for _, want := range strings.Fields("up down status cp models plan place ps logs stop chat doctor pair node ping engine config bugreport version completion agent lab") {
		if !seen[want] {
			t.Errorf("there is no command %s", want)
		}
	}
}

// Where a code means something of its own, the help says that.
func TestHelpSaysWhatAnExitCodeMeansThere(t *testing.T) {
	for command, want := range map[string]string{
		"node rename": "\n  5    another node has that name\n",
		"node forget": "\n  5    the node is up or in use\n",
		"pair":        "\n  5    the name is taken; this node is in another cluster, or in use\n",
		"doctor":      "\n  23   a node could not be asked\n",
	} {
		r := tb(t, nil, append(strings.Fields(command), "--help")...)
		r.wantCode(t, 0)
		if !strings.Contains(r.out, want) {
			t.Errorf("the help of %s lacks %q:\n%s", command, want, r.out)
		}
	}
}

func TestHelpOfCpHasRsyncsCodes(t *testing.T) {
	r := tb(t, nil, "cp", "--help")
	r.wantCode(t, 0)
	for _, code := range []string{"10", "11", "12", "23", "24", "30", "130"} {
		if !strings.Contains(r.out, "\n  "+code+" ") {
			t.Errorf("exit code %s is not in the help of cp", code)
		}
	}
}

func TestVersion(t *testing.T) {
	r := tb(t, nil, "version", "-o", "json")
	r.wantCode(t, 0)
	var v versionJSON
	if err := json.Unmarshal([]byte(r.out), &v); err != nil || v.Version == "" || v.OS == "" {
		t.Errorf("%v in %s", err, r.out)
	}
}
