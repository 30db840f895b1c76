package lab

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
)

func TestExecCarriesInputOutputAndExitCode(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	var out, errOut bytes.Buffer
	in := strings.Repeat("0123456789abcdef", 64<<10) // a megabyte: more than pipes hold
	code, err := l.Exec(t.Context(), "alpha", ExecOptions{
		Argv: []string{"sh", "-c", "cat; echo $GREETING $PWD >&2; exit 7"}, Env: []string{"GREETING=hello"}, Dir: "/tmp",
		Stdin: strings.NewReader(in), Stdout: &out, Stderr: &errOut,
	})
	if err != nil || code != 7 || out.String() != in || errOut.String() != "hello /tmp\n" {
		t.Errorf("exit %d, %v, %d bytes, %q", code, err, out.Len(), errOut.String())
	}
	if code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"sh", "-c", "kill -TERM $$"}}); err != nil || code != 143 {
		t.Errorf("killed by SIGTERM: exit %d, %v", code, err)
	}
	_, err = l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"no-such-command"}})
	needReason(t, err, fault.FileMissing)
	_, err = l.Exec(t.Context(), "alpha", ExecOptions{})
	needReason(t, err, fault.Usage)
	_, err = l.Exec(t.Context(), "omega", ExecOptions{Argv: []string{"true"}})
	needReason(t, err, fault.NodeUnknown)
	// Something left behind that holds the output does not hold up the caller.
	out.Reset()
	start := time.Now()
	if code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"sh", "-c", "sleep 600 & echo done"}, Stdout: &out}); err != nil || code != 0 || out.String() != "done\n" {
		t.Errorf("exit %d, %v, %q", code, err, out.String())
	}
	if took := time.Since(start); took > time.Minute {
		t.Errorf("it took %v", took)
	}
}

func TestExecEndsTheCommandWithItsContext(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := l.Exec(ctx, "alpha", ExecOptions{Argv: []string{"tbcluster", "inside", "sleep"}, Stdout: w})
		done <- err
	}()
	line, _ := firstLine(r)
	_, pid, _ := strings.Cut(line, " ")
	if _, err := strconv.Atoi(pid); err != nil {
		t.Fatalf("got %q", line)
	}
	cancel()
	needReason(t, <-done, fault.Interrupted)
	eventually(t, "the command has seen SIGTERM and ended", func() bool {
		return run(t, l, "alpha", "sh", "-c", "test -e /tmp/terminated && test ! -e /proc/"+pid+" && echo yes || echo no") == "yes"
	})
	// A node that loses power under a command says so.
	go func() {
		_, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"tbcluster", "inside", "sleep"}, Stdout: w})
		done <- err
	}()
	firstLine(r)
	if err := l.Kill(t.Context(), "alpha", false); err != nil {
		t.Fatal(err)
	}
	needReason(t, <-done, fault.NodeDown)
}

func TestExecGivesATerminal(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	var out bytes.Buffer
	in, typed := io.Pipe()
	go func() {
		_, _ = io.WriteString(typed, "echo he''llo; exit 3\n")
	}()
	code, err := l.Exec(t.Context(), "alpha", ExecOptions{
		Argv: []string{"sh", "-c", "tty; stty size; exec sh"}, Env: []string{"TERM=dumb"}, Stdin: in, Stdout: &out, TTY: true,
	})
	in.Close()
	// What is typed is echoed, at any place between.
	for _, want := range []string{"/dev/pts/0\r\n", "24 80\r\n", "hello\r\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the terminal does not show %q", want)
		}
	}
	if err != nil || code != 3 {
		t.Errorf("exit %d, %v: %q", code, err, out.String())
	}
}

func TestExecRunsAsTheUserAskedFor(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 1})
	who := func(user string) (string, error) {
		var out bytes.Buffer
		code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"tbcluster", "inside", "users"}, User: user, Stdout: &out, Stderr: &out})
		if err == nil && code != 0 {
			err = errors.New("exit " + strconv.Itoa(code))
		}
		return strings.TrimSpace(out.String()), err
	}
	if rootless() {
		for _, user := range []string{"nobody", "12345", "0:12345"} {
			_, err := who(user)
			needReason(t, err, fault.NoPermission)
		}
		if got, err := who("root"); err != nil || !strings.HasPrefix(got, "0 0 ") || !strings.HasSuffix(got, "/root /root root") {
			t.Errorf("root: %q, %v", got, err)
		}
		return
	}
	// A node's users are its own: those made there are not the host's.
	run(t, l, "alpha", "sh", "-c", "echo ada:x:1234:1235::/home/ada:/bin/sh >>/etc/passwd; echo team:x:1240:ada >>/etc/group; mkdir -m 0700 /home/ada; chown 1234:1235 /home/ada")
	if b, err := os.ReadFile("/etc/passwd"); err != nil || bytes.Contains(b, []byte("ada:x:1234")) {
		t.Fatalf("the user is on the host (%v)", err)
	}
	for user, want := range map[string]string{
		"":          "0 0 [] /root /root root",
		"ada":       "1234 1235 [1240] /home/ada /home/ada ada",
		"1234":      "1234 1235 [1240] /home/ada /home/ada ada",
		"4321":      "4321 4321 [] / / 4321",
		"4321:4322": "4321 4322 [] / / 4321",
	} {
		if got, err := who(user); err != nil || got != want {
			t.Errorf("%q is %q, %v; want %q", user, got, err, want)
		}
	}
	_, err := who("nobody-of-that-name")
	needReason(t, err, fault.Usage)
}

func TestBindsAndEnginesAreReadOnly(t *testing.T) {
	t.Parallel()
	shared, engines := t.TempDir(), t.TempDir()
	for _, d := range []string{shared, engines} {
		if err := errors.Join(os.WriteFile(d+"/file", []byte("content\n"), 0o644), os.Chmod(d, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	l := upLab(t, Options{Nodes: 1, Engines: engines, Binds: []Bind{{Source: shared, Target: "/srv/shared"}}})
	for _, dir := range []string{"/srv/shared", enginesInside} {
		if got := run(t, l, "alpha", "cat", dir+"/file"); got != "content" {
			t.Errorf("%s: %q", dir, got)
		}
		if code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"touch", dir + "/new"}}); err != nil || code == 0 {
			t.Errorf("%s can be written to: exit %d, %v", dir, code, err)
		}
	}
	if !rootless() {
		var out bytes.Buffer
		code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"cat", enginesInside + "/file"}, User: "4321", Stdout: &out})
		if err != nil || code != 0 || out.String() != "content\n" {
			t.Errorf("an ordinary user reads an engine: exit %d, %v, %q", code, err, out.String())
		}
	}
	_, err := Up(t.Context(), Options{Name: randomName(t), Binds: []Bind{{Source: "/no/such/place", Target: "/srv/x"}}})
	needReason(t, err, fault.LabFailed)
}
