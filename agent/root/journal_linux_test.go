package root

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"tbcluster/host"
	"tbcluster/host/nstest"
	"tbcluster/linux"
)

// journalled is what a root half does in its life, on an interface "cable".
func journalled() (do func(*changes) error) {
	p, a := netip.MustParsePrefix, netip.MustParseAddr
	filter := host.Change{Kind: host.ChangeFilter, Addresses: []netip.Addr{a("10.77.0.1")}, Interfaces: []string{"cable"}}
	wider := filter
	wider.Addresses = append(wider.Addresses, a("10.77.200.1"))
	wider.Forwarders = []string{"cable"}
	steps := []struct {
		undo bool
		host.Change
	}{
		{false, filter},
		{false, host.Change{Kind: host.ChangeUnmanage, Interface: "cable", Manager: "systemd-networkd"}},
		{false, host.Change{Kind: host.ChangeMTU, Interface: "cable", MTU: 9000}},
		{false, host.Change{Kind: host.ChangeLinkUp, Interface: "cable"}},
		{false, host.Change{Kind: host.ChangeAddress, Interface: "cable", Prefix: p("10.77.0.1/30")}},
		{false, host.Change{Kind: host.ChangeAddress, Interface: "lo", Prefix: p("10.77.200.1/32")}},
		{false, host.Change{Kind: host.ChangeRoute, Interface: "cable", Prefix: p("10.77.200.2/32"), Gateway: a("10.77.0.2"), Source: a("10.77.200.1"), Metric: 100}},
		{false, wider},
		{false, host.Change{Kind: host.ChangeForward, Interface: "cable"}},
		// Another MTU, another metric, the same filter again.
		{false, host.Change{Kind: host.ChangeMTU, Interface: "cable", MTU: 4000}},
		{false, host.Change{Kind: host.ChangeRoute, Interface: "cable", Prefix: p("10.77.200.2/32"), Gateway: a("10.77.0.2"), Source: a("10.77.200.1"), Metric: 101}},
		{true, host.Change{Kind: host.ChangeRoute, Interface: "cable", Prefix: p("10.77.200.2/32"), Gateway: a("10.77.0.2"), Source: a("10.77.200.1"), Metric: 100}},
		{false, wider},
		{true, host.Change{Kind: host.ChangeForward, Interface: "cable"}},
		{true, host.Change{Kind: host.ChangeAddress, Interface: "cable", Prefix: p("10.77.0.1/30")}},
		{false, host.Change{Kind: host.ChangeAddress, Interface: "cable", Prefix: p("10.77.0.5/30")}},
	}
	return func(c *changes) error {
		for _, s := range steps {
			what := c.apply
			if s.undo {
				what = c.revert
			}
			if err := what(context.Background(), s.Change); err != nil {
				return err
			}
		}
		return nil
	}
}

// journalHost is the machine of the test: the network is real, the Thunderbolt
// layer a directory that makes "cable" a cable, and /run is one too.
func journalHost(dir string) host.Host {
	return linux.New(linux.Options{SysfsRoot: filepath.Join(dir, "sys"), RunRoot: filepath.Join(dir, "run")})
}

func openJournal(dir string) (*changes, error) {
	return openChanges(context.Background(), journalHost(dir), []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16")}, filepath.Join(dir, "changes.json"))
}

// journalVictim is the process that is killed: it does everything, and ends
// itself with SIGKILL at the given step.
func journalVictim(dir, step string) int {
	at, err := strconv.Atoi(step)
	if err != nil {
		println(err.Error())
		return 1
	}
	c, err := openJournal(dir)
	if err != nil {
		println(err.Error())
		return 1
	}
	n := 0
	c.step = func(string) {
		if n++; n == at {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // until it arrives
		}
	}
	if err := journalled()(c); err != nil {
		println(err.Error())
		return 1
	}
	return 0
}

// everything of the network that a change could leave behind, without times.
func everything(own *nstest.Namespace) string {
	text := own.Run("ip", "address") + own.Run("ip", "rule") + own.Run("ip", "route", "show", "table", "all") +
		own.Run("ip", "-6", "route", "show", "table", "all") + own.Run("nft", "list", "ruleset") + own.Run("ip", "-4", "netconf")
	return regexp.MustCompile(`(?m)(valid_lft|preferred_lft|expires) \S+`).ReplaceAllString(text, "")
}

// TestAKillAtAnyMomentLeavesNothingUnknown kills the root half before and after
// every write of the journal and every change of the machine, and lets the next
// one undo what the journal says: the machine is as it was.
func TestAKillAtAnyMomentLeavesNothingUnknown(t *testing.T) {
	if !nstest.Alone(t) {
		return
	}
	own, far := nstest.Own(t), nstest.New(t)
	nstest.Cable(t, own, "cable", far, "cable0")
	t.Cleanup(func() { own.Cut("cable") })
	for _, n := range []*nstest.Namespace{own, far} {
		for _, i := range []string{"cable", "cable0"} {
			if strings.Contains(n.Run("ip", "link"), " "+i+"@") {
				n.Run("ip", "link", "set", i, "addrgenmode", "none")
				n.Run("ip", "-6", "address", "flush", "dev", i)
			}
		}
	}
	own.Run("ip", "link", "set", "cable", "down")
	before := everything(own)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for at := 1; ; at++ {
		dir := t.TempDir()
		cableTree(t, dir)
		var out []byte
		own.Do(func() { out, err = exec.Command(exe, "journal", dir, strconv.Itoa(at)).CombinedOutput() })
		var exit *exec.ExitError
		done := err == nil
		if !done && (!errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL) {
			t.Fatalf("step %d: %v\n%s", at, err, out)
		}
		c, err := openJournal(dir)
		if err != nil {
			t.Fatalf("step %d: the next life cannot read the journal: %v", at, err)
		}
		list := c.applied()
		for i := len(list) - 1; i >= 0; i-- {
			if err := c.revert(t.Context(), list[i]); err != nil {
				t.Fatalf("step %d: undo %s: %v", at, list[i], err)
			}
		}
		if left := c.applied(); len(left) > 0 {
			t.Errorf("step %d: left in the journal: %v", at, left)
		}
		if now := everything(own); now != before {
			t.Fatalf("killed at step %d; undoing %v leaves\n%s\nof\n%s", at, list, now, before)
		}
		if files, err := filepath.Glob(filepath.Join(dir, "run", "systemd", "network", "*")); err != nil || len(files) > 0 {
			t.Fatalf("step %d: left for a network manager: %v, %v", at, files, err)
		}
		if done {
			break
		}
		killed++
	}
	if killed < 60 {
		t.Errorf("killed at %d moments only", killed)
	}
	t.Logf("killed at %d moments", killed)
}

// cableTree makes "cable" an interface of the Thunderbolt layer.
func cableTree(t *testing.T, dir string) {
	t.Helper()
	for _, d := range []string{"sys/bus/thunderbolt/devices", "sys/class/net/cable", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../../../0-1.0", filepath.Join(dir, "sys/class/net/cable/device")); err != nil {
		t.Fatal(err)
	}
}
