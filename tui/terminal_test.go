package tui

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// terminalEnv makes the test binary the program that a terminal shows: it
// holds the socket of the agent to talk to.
const terminalEnv = "TBCLUSTER_TUI_TERMINAL"

func terminalMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	c, err := grpc.NewClient("unix:"+os.Getenv(terminalEnv), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer c.Close()
	if err := Run(ctx, Options{Conn: c, Notice: "3 nodes are ready"}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("the screen has ended")
	return 0
}

// terminal is a real one: tmux with a server of its own.
type terminal struct {
	t      *testing.T
	socket string
}

func (x terminal) tmux(args ...string) (string, error) {
	cmd := exec.CommandContext(context.Background(), "tmux", append([]string{"-S", x.socket, "-f", "/dev/null"}, args...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (x terminal) sees(text string) string {
	x.t.Helper()
	last := ""
	for limit := time.Now().Add(time.Minute); time.Now().Before(limit); {
		out, err := x.tmux("capture-pane", "-p", "-t", "s")
		if err != nil {
			x.t.Fatalf("%v: %s", err, out)
		}
		if last = out; strings.Contains(out, text) {
			return out
		}
		time.Sleep(50 * time.Millisecond) // tmux tells nobody of changes
	}
	x.t.Fatalf("the terminal does not show %q:\n%s", text, last)
	return ""
}

func (x terminal) press(keys ...string) {
	x.t.Helper()
	if out, err := x.tmux(append([]string{"send-keys", "-t", "s"}, keys...)...); err != nil {
		x.t.Fatalf("%v: %s", err, out)
	}
}

func TestInARealTerminal(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("tmux is not installed: scripts/deps installs it")
	}
	for _, size := range sizes {
		t.Run(size.name, func(t *testing.T) {
			a := newAgent(t, load(t, "three"))
			x := terminal{t, filepath.Join(t.TempDir(), "tmux")}
			out, err := x.tmux("new-session", "-d", "-s", "s", "-x", fmt.Sprint(size.w), "-y", fmt.Sprint(size.h),
				"-e", terminalEnv+"="+a.socket, "sh", "-c", fmt.Sprintf("%s; sleep 60", os.Args[0]))
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			t.Cleanup(func() {
				if out, err := x.tmux("kill-server"); err != nil {
					t.Errorf("%v: %s", err, out)
				}
			})
			x.sees("3 nodes are ready")
			// Nothing is torn: each frame of the screen has its corners where
			// they belong, line by line as wide as the terminal. A look may come
			// while a frame is on its way.
			whole := func(screen string) string {
				lines := strings.Split(strings.TrimRight(screen, "\n"), "\n")
				if len(lines) != size.h {
					return fmt.Sprintf("%d lines of %d", len(lines), size.h)
				}
				for i, l := range lines[1 : len(lines)-1] {
					if width(l) != size.w {
						return fmt.Sprintf("line %d is %d cells wide: %q", i+2, width(l), l)
					}
				}
				return ""
			}
			for limit := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
				screen := x.sees("5 To look at")
				wrong := whole(screen)
				if wrong == "" {
					break
				}
				if time.Now().After(limit) {
					t.Fatalf("%s:\n%s", wrong, screen)
				}
			}
			x.press("2", "Down", "Enter")
			x.sees("server is listening")
			x.press("Escape")
			x.sees("4 Models")
			// tmux takes what is meant for the clipboard as a terminal does.
			if out, err := x.tmux("set-option", "-s", "set-clipboard", "on"); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			x.press("y")
			x.sees("copied the name of the instance to the clipboard")
			if out, err := x.tmux("show-buffer"); err != nil || out != "smol" {
				t.Errorf("the clipboard holds %q, %v", out, err)
			}
			x.press("4", "Down", "C")
			x.sees("checked: 60 MB to send")
			x.press("Enter")
			x.sees("copying smol to gamma")
			x.press("?")
			x.sees("Keys: Transfers")
			x.press("Escape")
			out, err = x.tmux("resize-window", "-t", "s", "-x", "50", "-y", "12")
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			x.sees("50×12, better 80×24")
			x.press("q")
			x.sees("the screen has ended")
		})
	}
}
