package linux

import (
	"os"
	"path/filepath"
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
