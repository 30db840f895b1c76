package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// manual writes the pages and returns their directory and the commands.
func manual(t *testing.T) (string, *cobra.Command) {
	t.Helper()
	root := newRootCommand(&globals{out: io.Discard, errOut: io.Discard, getenv: os.Getenv, run: "/run", output: "text"})
	dir := filepath.Join(t.TempDir(), "man")
	root.SetArgs([]string{"man", dir})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	return dir, root
}

// A page for each command that help lists, and in it each flag, each command
// below, and each exit status.
func TestEveryCommandHasAManualPage(t *testing.T) {
	dir, root := manual(t)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	left := map[string]bool{}
	for _, e := range entries {
		left[e.Name()] = true
	}
	for _, c := range append([]*cobra.Command{root}, commands(root)[1:]...) {
		name := strings.ReplaceAll(c.CommandPath(), " ", "-") + ".1"
		if !left[name] {
			t.Errorf("there is no page %s", name)
			continue
		}
		delete(left, name)
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		page := strings.NewReplacer(`\-`, "-", `\(ga`, "`", `\(aq`, "'", `\e`, `\`, `\&`, "", `\(ti`, "~", `\(ha`, "^").Replace(string(data))
		if want := page; !strings.HasPrefix(want, ".TH \""+strings.ToUpper(strings.TrimSuffix(name, ".1"))+"\" 1 ") {
			t.Errorf("%s begins with %q", name, firstLine(page))
		}
		has := func(what, want string) {
			if !strings.Contains(page, want) {
				t.Errorf("%s: its page lacks the %s %q", c.CommandPath(), what, want)
			}
		}
		for l := range strings.Lines(strings.Split(c.Long, "\n\nEXIT STATUS\n")[0]) {
			has("line", strings.TrimSpace(l))
		}
		if _, exits, ok := strings.Cut(c.Long, "\n\nEXIT STATUS\n"); ok {
			for l := range strings.Lines(exits) {
				has("exit status", ".B "+strings.Fields(l)[0]+"\n")
			}
		}
		flags := 0
		for _, set := range []*pflag.FlagSet{c.NonInheritedFlags(), c.InheritedFlags()} {
			set.VisitAll(func(f *pflag.Flag) {
				if !f.Hidden {
					flags++
					has("flag", `\fB--`+f.Name+`\fR`)
				}
			})
		}
		if flags < 3 { // --help, --output, --socket
			t.Errorf("%s: only %d flags were looked for", c.CommandPath(), flags)
		}
		for _, sub := range c.Commands() {
			if !sub.Hidden && sub.Name() != "help" {
				has("command", ".BR "+strings.ReplaceAll(sub.CommandPath(), " ", "-")+" (1)")
			}
		}
	}
	for name := range left {
		t.Errorf("%s is a page of no command", name)
	}
	if len(entries) < 30 {
		t.Errorf("only %d pages", len(entries))
	}
}

// roffRequest is a line that roff takes for a request: those that we use.
var roffRequest = regexp.MustCompile(`^\.(TH|SH|TP|BR?|nh|ad l|nf|fi)( .*)?$`)

func TestManualPagesAreWhatRoffReads(t *testing.T) {
	dir, _ := manual(t)
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		data, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range strings.Split(string(data), "\n") {
			if (strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'")) && !roffRequest.MatchString(l) {
				t.Errorf("%s:%d: roff reads a request in %q", filepath.Base(p), i+1, l)
			}
		}
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Log("groff is not here: what it makes of the pages is not looked at")
		return
	}
	out, err := exec.Command(groff, append([]string{"-man", "-ww", "-Tutf8", "-z"}, pages...)...).CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("groff: %v\n%s", err, out)
	}
}

func TestNothingInAPageIsARequest(t *testing.T) {
	var b bytes.Buffer
	preformatted(&b, ".SH a\n'br\n\\fBx\n-- `a' ~ ^\n\n.nf")
	want := ".nf\n\\&.SH a\n\\(aqbr\n\\efBx\n\\-\\- \\(gaa\\(aq \\(ti \\(ha\n\n\\&.nf\n.fi\n"
	if b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}

// Completions know every command and are what the shell reads.
func TestCompletionsAreComplete(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		r := tb(t, nil, "completion", shell)
		r.wantCode(t, 0)
		if len(r.out) < 1000 || !strings.Contains(r.out, "tbcluster") {
			t.Errorf("%s: %d bytes", shell, len(r.out))
		}
		program, err := exec.LookPath(shell)
		if err != nil {
			t.Logf("%s is not here: whether it reads its completions is not looked at", shell)
			continue
		}
		cmd := exec.Command(program, "-n")
		cmd.Stdin = strings.NewReader(r.out)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s -n: %v\n%s", shell, err, out)
		}
	}
	// The scripts ask the program; it has to offer each command and each flag.
	root := newRootCommand(&globals{out: io.Discard, errOut: io.Discard, getenv: os.Getenv, run: "/run"})
	offered := func(args ...string) []string {
		r := tb(t, nil, append([]string{cobra.ShellCompNoDescRequestCmd}, args...)...)
		r.wantCode(t, 0)
		return strings.Fields(r.out)
	}
	for _, c := range append([]*cobra.Command{root}, commands(root)[1:]...) {
		path := strings.Fields(c.CommandPath())[1:]
		have := map[string]bool{}
		for _, w := range append(offered(append(path, "")...), offered(append(path, "--")...)...) {
			have[w] = true
		}
		for _, sub := range c.Commands() {
			if !sub.Hidden && !have[sub.Name()] {
				t.Errorf("after `%s` the tab key does not offer %s", c.CommandPath(), sub.Name())
			}
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && !have["--"+f.Name] && !have["--"+f.Name+"="] {
				t.Errorf("after `%s` the tab key does not offer --%s", c.CommandPath(), f.Name)
			}
		})
	}
}
