package linux

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tbcluster/host"
	"tbcluster/host/nstest"
)

func (s sysfs) file(path, text string) {
	s.t.Helper()
	s.mkdir(filepath.Dir(path))
	if err := os.WriteFile(filepath.Join(s.root, path), []byte(text+"\n"), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func diagnose(t *testing.T, h host.Host, to ...netip.Addr) host.Diagnosis {
	t.Helper()
	d, err := h.Diagnose(t.Context(), host.Query{Towards: to})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestHowTheThunderboltDriversAreSet(t *testing.T) {
	s := newSysfs(t)
	h := New(Options{SysfsRoot: s.root})
	if d := diagnose(t, h); !d.NoNetModule || d.HostsOff || len(d.RDMA) != 0 {
		t.Errorf("without thunderbolt_net: %+v", d)
	}
	s.file("module/thunderbolt/parameters/xdomain", "N")
	s.mkdir("module/thunderbolt_net")
	if d := diagnose(t, h); d.NoNetModule || !d.HostsOff {
		t.Errorf("with it, and told to stay away from other machines: %+v", d)
	}
	s.file("module/thunderbolt/parameters/xdomain", "Y")
	s.remove("module/thunderbolt_net")
	s.mkdir("bus/thunderbolt/drivers/thunderbolt-net") // built in
	if d := diagnose(t, h); d.NoNetModule || d.HostsOff {
		t.Errorf("with it built in: %+v", d)
	}
	if d := diagnose(t, New(Options{SysfsRoot: t.TempDir()})); d.NoNetModule || d.HostsOff {
		t.Errorf("without Thunderbolt: %+v", d)
	}
}

func TestPortsOfRDMADevices(t *testing.T) {
	s := newSysfs(t)
	const p = "class/infiniband/"
	s.file(p+"tbr0/ports/1/state", "1: DOWN")
	s.file(p+"tbr0/ports/1/gid_attrs/ndevs/0", "")
	s.file(p+"tbr0/ports/1/gid_attrs/ndevs/1", "thunderbolt0")
	s.file(p+"mlx5_0/ports/1/state", "4: ACTIVE")
	s.file(p+"mlx5_0/ports/2/link_layer", "Ethernet") // going away: no state
	want := []host.RDMAPort{
		{Device: "mlx5_0", Port: 1, State: "ACTIVE", Active: true},
		{Device: "tbr0", Port: 1, State: "DOWN", Interface: "thunderbolt0"},
	}
	d := diagnose(t, New(Options{SysfsRoot: s.root}))
	if !reflect.DeepEqual(d.RDMA, want) {
		t.Errorf("got  %+v\nwant %+v", d.RDMA, want)
	}
	if !d.Memlock.Known || d.Memlock.Bytes == 0 {
		t.Errorf("locked memory: %+v", d.Memlock)
	}
}

func TestOffloadsOfACableThatPassesPacketsOn(t *testing.T) {
	own, _ := cabled(t, "thunderbolt0")
	s := newSysfs(t)
	s.peer("0-2", "peer")
	s.netdev("thunderbolt0", "0-2.0")
	h := New(Options{SysfsRoot: s.root})
	on := func() []string { return diagnose(t, h).Offloads["thunderbolt0"] }
	pass := func(yes string) {
		t.Helper()
		own.Do(func() {
			if err := os.WriteFile("/proc/sys/net/ipv4/conf/thunderbolt0/forwarding", []byte(yes), 0); err != nil {
				t.Fatal(err)
			}
		})
	}
	offload := func(on uint32) {
		t.Helper()
		for _, cmd := range []uint32{unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO} {
			if err := ethtool("thunderbolt0", &ethtoolValue{cmd, on}); err != nil {
				t.Fatal(err)
			}
		}
	}
	pass("1")
	if got := on(); got != nil {
		t.Errorf("of another driver's interface: %v", got)
	}
	s.mkdir("bus/thunderbolt/drivers/thunderbolt-net")
	if err := os.Symlink("../../drivers/thunderbolt-net", filepath.Join(s.root, "bus/thunderbolt/devices/0-2.0/driver")); err != nil {
		t.Fatal(err)
	}
	if got := on(); !slices.Equal(got, []string{"tso", "gso"}) {
		t.Errorf("a veth has both on: %v", got)
	}
	offload(0)
	if got := on(); got != nil {
		t.Errorf("switched off: %v", got)
	}
	offload(1)
	pass("0")
	if got := on(); got != nil {
		t.Errorf("nothing is passed on: %v", got)
	}
}

func TestWaysAreThoseThatTheKernelTakes(t *testing.T) {
	own, _ := cabled(t, "thunderbolt0")
	cabled(t, "lan0")
	own.Address("thunderbolt0", "10.77.0.1/30")
	own.Address("lan0", "192.168.7.1/24")
	peer, far := addr("10.77.0.2"), addr("198.51.100.1")
	h := New(Options{SysfsRoot: t.TempDir()})
	want := []host.Way{{To: peer, Interface: "thunderbolt0"}, {To: far}}
	if got := diagnose(t, h, peer, far).Ways; !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	// As a VPN does it: by a rule, so that the main table looks as before.
	own.Run("ip", "route", "add", "default", "via", "192.168.7.9", "dev", "lan0", "table", "52")
	own.Run("ip", "rule", "add", "pref", "100", "lookup", "52")
	t.Cleanup(func() { own.Run("ip", "rule", "del", "pref", "100") })
	want = []host.Way{{To: peer, Interface: "lan0", Gateway: addr("192.168.7.9")}}
	if got := diagnose(t, h, peer).Ways; !reflect.DeepEqual(got, want) {
		t.Errorf("behind a VPN: got %+v, want %+v", got, want)
	}
}

func TestFirewallsAreWhatDropsSomethingThatComesIn(t *testing.T) {
	own := nstest.Own(t)
	h := New(Options{})
	names := func() (all []string) {
		t.Helper()
		walls, err := h.Firewalls(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range walls {
			all = append(all, w.Tool+": "+w.Name)
		}
		slices.Sort(all)
		return all
	}
	load := func(rules string) {
		t.Helper()
		f := filepath.Join(t.TempDir(), "rules")
		if err := os.WriteFile(f, []byte(rules), 0o600); err != nil {
			t.Fatal(err)
		}
		own.Run("nft", "flush", "ruleset")
		own.Run("nft", "-f", f)
	}
	t.Cleanup(func() { own.Run("nft", "flush", "ruleset") })
	load(`table inet tbcluster { chain prerouting { type filter hook prerouting priority raw; drop; };
		chain input { type filter hook input priority 0; drop; };
	}
	table inet open { chain input { type filter hook input priority 0; tcp dport 22 accept; };
	}
	table inet passing { chain forward { type filter hook forward priority 0; policy drop; };
	}`)
	if got := names(); got != nil {
		t.Errorf("our own, one that lets everything in, and one of what passes through: %v", got)
	}
	load(`table inet filter { chain input { type filter hook input priority 0; policy drop; ct state established accept; };
	}
	table ip zones { chain zone { jump deny; };
		chain deny { reject; };
		chain in { type filter hook input priority 1; jump zone; };
	}
	table inet firewalld { chain filter_INPUT { type filter hook input priority 10; reject with icmpx admin-prohibited; };
	}
	table ip6 mine { chain ufw6-before-input { };
		chain INPUT { type filter hook input priority 0; drop; };
	}`)
	want := []string{
		"firewalld: chain filter_INPUT of the nftables table inet firewalld", "nft: chain in of the nftables table ip zones",
		"nft: chain input of the nftables table inet filter", "ufw: chain INPUT of the nftables table ip6 mine",
	}
	if got := names(); !slices.Equal(got, want) {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "\n     "), strings.Join(want, "\n     "))
	}
}

func TestFirewallsNeedRights(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never given back: the thread ends without rights
		caps := [2]unix.CapUserData{}
		if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
			t.Error(err)
			return
		}
		if _, err := New(Options{}).Firewalls(t.Context()); !errors.Is(err, host.ErrPermission) {
			t.Errorf("got %v", err)
		}
	}()
	<-done
}
