package lab

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const fixture = "testdata/linux-sysfs/sys"

func readTree(t *testing.T, path ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(string(b), "\n")
}

func oneCable(t *testing.T) *tree {
	t.Helper()
	tr := newTree(t.TempDir(), []string{"c0de0000-0000-8000-8000-00000000000a", "c0de0000-0000-8000-8000-00000000000b"})
	if err := tr.reset(); err != nil {
		t.Fatal(err)
	}
	err := tr.plug(port{number: 3}, peer{uuid: "b0000000-0000-8000-8000-000000000001", name: "beta"}, "thunderbolt0", func(uevent) {})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func TestTreeHasWhatTheFixtureHas(t *testing.T) {
	root := oneCable(t).root
	for ours, theirs := range map[string]string{"0-3": "0-2", "0-3.0": "0-2.0", "0-0": "0-0", "domain0": "domain0"} {
		files, err := os.ReadDir(filepath.Join(fixture, busDevices, theirs))
		if err != nil || len(files) == 0 {
			t.Fatalf("the fixture lacks %s: %v", theirs, err)
		}
		for _, f := range files {
			got := readTree(t, root, busDevices, ours, f.Name())
			want := readTree(t, fixture, busDevices, theirs, f.Name())
			// What is said of the peer itself differs; all else is the same.
			if !strings.Contains("unique_id device device_name vendor vendor_name maxhopid", f.Name()) && got != want {
				t.Errorf("%s/%s is %q, in the fixture %q", ours, f.Name(), got, want)
			}
			if got == "" {
				t.Errorf("%s/%s is empty", ours, f.Name())
			}
		}
	}
	if got := readTree(t, root, busDevices, "0-3/unique_id"); got != "b0000000-0000-8000-8000-000000000001" {
		t.Errorf("the peer is %s", got)
	}
	for _, attr := range []string{"operstate", "mtu", "address"} {
		if _, err := os.Stat(filepath.Join(fixture, classNet, "thunderbolt0", attr)); err != nil {
			t.Errorf("the fixture lacks %s: %v", attr, err)
		}
		if got, err := os.Readlink(filepath.Join(root, classNet, "thunderbolt0", attr)); err != nil || got != "/sys/class/net/thunderbolt0/"+attr {
			t.Errorf("%s leads to %q, %v", attr, got, err)
		}
	}
}

func TestTreeHasTheLinksOfSysfs(t *testing.T) {
	root := oneCable(t).root
	for link, want := range map[string]string{
		"bus/thunderbolt/devices/domain0": "../../../devices/pci0000:00/0000:00:0d.2/domain0",
		"bus/thunderbolt/devices/0-3":     "../../../devices/pci0000:00/0000:00:0d.2/domain0/0-0/0-3",
		"bus/thunderbolt/devices/0-3.0":   "../../../devices/pci0000:00/0000:00:0d.2/domain0/0-0/0-3/0-3.0",
		"bus/thunderbolt/devices/1-0":     "../../../devices/pci0000:00/0000:00:0d.3/domain1/1-0",
		"class/net/thunderbolt0":          "../../devices/pci0000:00/0000:00:0d.2/domain0/0-0/0-3/0-3.0/net/thunderbolt0",
		"class/net/thunderbolt0/device":   "../../../0-3.0",
		"class/net/eth0":                  "/sys/class/net/eth0",
	} {
		if got, err := os.Readlink(filepath.Join(root, link)); err != nil || got != want {
			t.Errorf("%s leads to %q, %v; want %q", link, got, err, want)
		}
	}
	// The way of a reader: interface, service, XDomain, remote UUID.
	svc, err := filepath.EvalSymlinks(filepath.Join(root, "class/net/thunderbolt0/device"))
	if err != nil || filepath.Base(svc) != "0-3.0" {
		t.Fatalf("the service is %q, %v", svc, err)
	}
	if got := readTree(t, svc, "..", "unique_id"); got != "b0000000-0000-8000-8000-000000000001" {
		t.Errorf("its XDomain is %s", got)
	}
	for _, d := range []string{"0-3/subsystem", "0-3.0/subsystem", "0-0/subsystem"} {
		if got, err := filepath.EvalSymlinks(filepath.Join(root, busDevices, d)); err != nil || got != filepath.Join(root, "bus/thunderbolt") {
			t.Errorf("%s leads to %q, %v", d, got, err)
		}
	}
	if got, err := filepath.EvalSymlinks(filepath.Join(svc, "driver")); err != nil || filepath.Base(got) != "thunderbolt-net" {
		t.Errorf("the driver is %q, %v", got, err)
	}
}

func TestUnplugLeavesTheTreeAsItWas(t *testing.T) {
	tr := oneCable(t)
	var events []string
	if err := tr.unplug(port{number: 3}, "thunderbolt0", func(e uevent) { events = append(events, e.action+" "+filepath.Base(e.path)) }); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(events, ", "); got != "remove 0-3.0, remove 0-3" {
		t.Errorf("events: %s", got)
	}
	list := func(root string) (all []string) {
		err := filepath.Walk(root, func(p string, _ os.FileInfo, err error) error {
			all = append(all, strings.TrimPrefix(p, root))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	fresh := newTree(t.TempDir(), tr.uuids)
	if err := fresh.reset(); err != nil {
		t.Fatal(err)
	}
	if a, b := strings.Join(list(tr.root), "\n"), strings.Join(list(fresh.root), "\n"); a != b {
		t.Errorf("after the unplug:\n%s\nbefore the plug:\n%s", a, b)
	}
	if err := tr.unplug(port{number: 3}, "thunderbolt0", func(uevent) { t.Error("an event of nothing") }); err != nil {
		t.Errorf("unplug again: %v", err)
	}
}

func TestTheTreeInANodeIsReal(t *testing.T) {
	t.Parallel()
	l := upLab(t, Options{Nodes: 2, Topology: Pair, Cables: 3})
	s := status(t, l)
	if c := s.Cables[2]; c.A.Port != "1-1" || c.B.Port != "1-1" || c.A.Interface != "thunderbolt2" {
		t.Errorf("the third cable: %+v", c)
	}
	for _, attr := range []string{"mtu", "address", "ifindex", "statistics/rx_bytes"} {
		ours := run(t, l, "alpha", "cat", "/lab/sys/class/net/thunderbolt2/"+attr)
		if real := run(t, l, "alpha", "cat", "/sys/class/net/thunderbolt2/"+attr); ours != real || real == "" {
			t.Errorf("%s is %q, really %q", attr, ours, real)
		}
	}
	// Each end names the domain of the other; both cables of a domain name the same.
	uuid := func(node, dev string) string {
		return run(t, l, node, "cat", "/lab/sys/bus/thunderbolt/devices/"+dev+"/unique_id")
	}
	for dev, domain := range map[string]string{"0-1": "0-0", "0-3": "0-0", "1-1": "1-0"} {
		if a, b := uuid("alpha", dev), uuid("beta", domain); a != b {
			t.Errorf("alpha's %s names %s, which is not beta's domain %s", dev, a, b)
		}
	}
	if uuid("alpha", "0-0") == uuid("alpha", "1-0") || uuid("alpha", "0-0") == uuid("beta", "0-0") {
		t.Error("two domains have one UUID")
	}
	if code, err := l.Exec(t.Context(), "alpha", ExecOptions{Argv: []string{"touch", "/lab/sys/mark"}}); err != nil || code == 0 {
		t.Errorf("the tree can be written to: exit %d, %v", code, err)
	}
}
