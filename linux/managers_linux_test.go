package linux

import (
	"bufio"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"tbcluster/host"
)

// clock is a clock that stands until it is turned.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

func newSeeker(t *testing.T) (*seeker, *clock) {
	c := &clock{time.Unix(1000, 0)}
	return &seeker{proc: t.TempDir(), run: t.TempDir(), clock: c}, c
}

func (s *seeker) expect(t *testing.T, when, iface string, index int, want string) {
	t.Helper()
	got, err := s.managedBy(iface, index)
	if err != nil || got != want {
		t.Errorf("%s: managed by %q, %v; want %q", when, got, err, want)
	}
}

func TestWhoManagesAnInterface(t *testing.T) {
	s, c := newSeeker(t)
	s.expect(t, "no manager", "thunderbolt0", 7, "")
	write(t, s.run, map[string]string{
		"NetworkManager/devices/7":  "[device]\nmanaged=true\n",
		"NetworkManager/devices/8":  "[device]\nmanaged=false\n",
		"systemd/netif/links/7":     "ADMIN_STATE=unmanaged\n",
		"systemd/netif/links/8":     "ADMIN_STATE=configured\nOPER_STATE=routable\n",
		"NetworkManager/devices/10": "[device]\n",
	})
	c.now = c.now.Add(rescan)
	s.expect(t, "files of managers that do not run", "thunderbolt0", 7, "")
	write(t, s.proc, map[string]string{"41/comm": "NetworkManager\n", "42/comm": "systemd-network\n", "self/comm": "x"})
	c.now = c.now.Add(rescan)
	s.expect(t, "NetworkManager manages it", "thunderbolt0", 7, "NetworkManager")
	s.expect(t, "systemd-networkd manages it", "thunderbolt1", 8, "systemd-networkd")
	s.expect(t, "nobody knows it", "thunderbolt2", 9, "")
	s.expect(t, "NetworkManager has not decided", "thunderbolt3", 10, "")
	m, _ := managerNamed("NetworkManager")
	write(t, "/", map[string]string{m.path(s.run, "thunderbolt0"): m.text("thunderbolt0")})
	s.expect(t, "told to leave it alone", "thunderbolt0", 7, "")
	if err := os.RemoveAll(filepath.Join(s.proc, "42")); err != nil {
		t.Fatal(err)
	}
	s.expect(t, "the manager has ended", "thunderbolt1", 8, "")
}

func TestTellingAManagerToLeaveAnInterface(t *testing.T) {
	for _, name := range []string{"NetworkManager", "systemd-networkd"} {
		run := t.TempDir()
		h := New(Options{RunRoot: run, ProcRoot: t.TempDir()})
		c := host.Change{Kind: host.ChangeUnmanage, Interface: "thunderbolt0", Manager: name}
		m, _ := managerNamed(name)
		for range 2 { // idempotent
			if err := h.Apply(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(m.path(run, "thunderbolt0"))
			if err != nil || string(b) != m.text("thunderbolt0") {
				t.Errorf("%s: %q, %v", name, b, err)
			}
		}
		for range 2 {
			if err := h.Revert(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(m.path(run, "thunderbolt0")); !os.IsNotExist(err) {
				t.Errorf("%s: the file is still there: %v", name, err)
			}
		}
	}
}

// NetworkManager needs a while to leave an interface, and sets it down then.
func TestAManagerIsWaitedFor(t *testing.T) {
	const index, left = "1", "[device]\nmanaged=false\n" // of lo, everywhere
	run, proc := t.TempDir(), t.TempDir()
	file := filepath.Join(run, "NetworkManager/devices", index)
	write(t, "/", map[string]string{file: "[device]\nmanaged=true\n"})
	// A process of ours that SIGHUP makes say that it has left, also where tests are
	// run by nohup: a shell cannot trap what it was started to ignore.
	heard := make(chan os.Signal, 1)
	signal.Notify(heard, syscall.SIGHUP)
	defer signal.Stop(heard)
	manager := exec.Command("sh", "-c", `trap 'sleep 0.3; printf "$2" >"$1.new"; mv "$1.new" "$1"' HUP; echo ready; while :; do sleep 0.05; done`, "manager", file, left)
	out, err := manager.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := manager.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := manager.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = manager.Wait() // killed
	}()
	if !bufio.NewScanner(out).Scan() {
		t.Fatal("the manager did not start")
	}
	write(t, proc, map[string]string{strconv.Itoa(manager.Process.Pid) + "/comm": "NetworkManager\n"})
	h := New(Options{RunRoot: run, ProcRoot: proc})
	if err := h.Apply(t.Context(), host.Change{Kind: host.ChangeUnmanage, Interface: "lo", Manager: "NetworkManager"}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != left {
		t.Errorf("it was not waited for: %q, %v", b, err)
	}
}

func FuzzManagerState(f *testing.F) {
	f.Add("[device]\nmanaged=true\n")
	f.Add("ADMIN_STATE=configured\n")
	f.Add("=\nmanaged\n==")
	f.Fuzz(func(_ *testing.T, text string) {
		for _, m := range managers {
			m.fights(text)
		}
	})
}
