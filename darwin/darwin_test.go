package darwin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/host"
)

// file returns a recorded output.
func file(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// replay is a Runner that answers with recorded outputs, by command line.
type replay struct {
	mu      sync.Mutex
	answers map[string]string
	fails   map[string]string
	asked   []string
	// react changes the answers as the real program would change the machine.
	react func(command string, r *replay)
}

func (r *replay) Run(ctx context.Context, name string, args ...string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	command := strings.Join(append([]string{name}, args...), " ")
	r.asked = append(r.asked, command)
	if why, ok := r.fails[command]; ok {
		return nil, errors.New(command + ": exit status 1: " + why)
	}
	if r.react != nil {
		r.react(command, r)
	}
	if out, ok := r.answers[command]; ok {
		return []byte(out), nil
	}
	return nil, fmt.Errorf("%s: exit status 1: no such command in the recording", command)
}

// changes returns the commands that changed something, and forgets all.
func (r *replay) changes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []string
	for _, c := range r.asked {
		for _, reading := range []string{"ifconfig -a", "route -n get", "pfctl -a com.apple/tbcluster -s", "pfctl -s", "netstat", "system_profiler", "networksetup"} {
			if strings.HasPrefix(c, reading) {
				c = ""
				break
			}
		}
		if c != "" {
			list = append(list, c)
		}
	}
	r.asked = nil
	return list
}

func (r *replay) count(command string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.asked {
		if c == command {
			n++
		}
	}
	return n
}

const (
	profiler = "system_profiler SPThunderboltDataType -json"
	ports    = "networksetup -listallhardwareports"
)

// thunderbolt reads recorded outputs.
func thunderbolt(t *testing.T, profile, hardware string) host.Thunderbolt {
	t.Helper()
	r := &replay{answers: map[string]string{
		profiler: file(t, profile), ports: file(t, hardware), "ifconfig -a": file(t, "ifconfig_a_member_with_own_ip.txt"),
	}}
	tb, err := New(Options{Runner: r}).Thunderbolt(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return tb
}

func TestAPeerMacOnOnePortAndAHubOnAnother(t *testing.T) {
	got := thunderbolt(t, "system_profiler_tb_mbp_a_rdma_off.json", "networksetup_listallhardwareports_mbp.txt")
	want := host.Thunderbolt{DriverLoaded: true, Domains: []host.Domain{
		{ID: "2", UUID: "a0000000-0000-4000-8000-000000000002", Others: []host.Device{
			{Port: "3", Vendor: "HubCo", Name: "TB5-HUB", Authorized: true},
		}},
		{ID: "1", UUID: "a0000000-0000-4000-8000-000000000001", Peers: []host.XDomain{{
			Port: "2", RemoteUUID: "b0000000-0000-4000-8000-000000000001", Vendor: "Apple Inc.", Device: "Mac17,6",
			RxGbps: 80, TxGbps: 80, Hops: 1, CapableGbps: 80, Interface: "en6",
			// Its key is garbled in the recording.
			Services: map[string]uint32{"network": 1, "rdma": 64087},
		}}},
		{ID: "0", UUID: "a0000000-0000-4000-8000-000000000000"},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	other := thunderbolt(t, "system_profiler_tb_mbp_b_rdma_on.json", "networksetup_listallhardwareports_mbp.txt")
	if p := other.Domains[1].Peers[0]; p.RemoteUUID != got.Domains[1].UUID || len(p.Services) != 1 {
		t.Errorf("the other end: %+v", p)
	}
}

func TestThunderbolt4(t *testing.T) {
	tb := thunderbolt(t, "system_profiler_tb4_40g_two_peers.json", "networksetup_listallhardwareports_mini.txt")
	var ifaces []string
	for _, d := range tb.Domains {
		for _, p := range d.Peers {
			ifaces = append(ifaces, p.Interface)
			if p.RxGbps != 40 || p.CapableGbps != 40 || p.BehindHub {
				t.Errorf("got %+v", p)
			}
		}
	}
	if !slices.Equal(ifaces, []string{"en4", "en3"}) {
		t.Errorf("interfaces %v", ifaces)
	}
}

func TestAPeerBehindAHub(t *testing.T) {
	tb := thunderbolt(t, "system_profiler_tb_peer_behind_hub.json", "networksetup_listallhardwareports_mbp.txt")
	d := tb.Domains[0]
	if len(d.Peers) != 1 || !d.Peers[0].BehindHub || d.Peers[0].Hops != 2 || d.Peers[0].Interface != "en1" || d.Peers[0].CapableGbps != 0 || len(d.Others) != 1 {
		t.Errorf("got %+v", d)
	}
}

// In a mesh of three each cable is seen from both of its ends.
func TestAMeshOfThreeIsReciprocal(t *testing.T) {
	uuids := map[string]string{}
	type end struct{ own, remote string }
	ends := map[end]bool{}
	for _, name := range []string{"studio", "mini1", "mini2"} {
		hardware := "networksetup_listallhardwareports_" + strings.TrimRight(name, "12") + ".txt"
		for _, d := range thunderbolt(t, "system_profiler_tb_mesh3_"+name+".json", hardware).Domains {
			uuids[d.UUID] = name
			for _, p := range d.Peers {
				ends[end{d.UUID, p.RemoteUUID}] = true
				if p.Interface == "" {
					t.Errorf("%s: no interface for %+v", name, p)
				}
			}
		}
	}
	if len(ends) != 6 {
		t.Errorf("%d ends, want 6", len(ends))
	}
	for e := range ends {
		if !ends[end{e.remote, e.own}] || uuids[e.own] == uuids[e.remote] {
			t.Errorf("%s (%s) sees %s (%s) and not the other way", e.own, uuids[e.own], e.remote, uuids[e.remote])
		}
	}
}

func TestTheProfilerIsAskedWhenSomethingChanged(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := &replay{answers: map[string]string{
		profiler: file(t, "system_profiler_tb_mesh3_studio.json"), ports: file(t, "networksetup_listallhardwareports_studio.txt"),
		"ifconfig -a": file(t, "ifconfig_a_member_with_own_ip.txt"),
	}}
	h := New(Options{Runner: r, Clock: c})
	expect := func(what string, n int) {
		t.Helper()
		if _, err := h.Thunderbolt(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := r.count(profiler); got != n {
			t.Errorf("%s: asked %d times, want %d", what, got, n)
		}
	}
	expect("at first", 1)
	expect("nothing changed", 1)
	r.answers["ifconfig -a"] = strings.Replace(r.answers["ifconfig -a"], "status: inactive", "status: active", 1)
	expect("a cable was plugged", 2)
	c.now = c.now.Add(profileAge)
	expect("the answer is old", 3)
}

type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

func TestTheMachine(t *testing.T) {
	r := &replay{answers: map[string]string{
		"sysctl hw.memsize hw.logicalcpu hw.machine kern.hostname kern.osrelease kern.bootsessionuuid": file(t, "sysctl_machine.txt"),
		"sw_vers": file(t, "sw_vers_26_5_1.txt"), "vm_stat": file(t, "vm_stat_head.txt"),
		"ioreg -rd1 -c IOPlatformExpertDevice": file(t, "ioreg_platform.txt"),
	}}
	h := New(Options{Runner: r})
	got, err := h.Machine(t.Context())
	want := host.Machine{
		Hostname: "studio", OS: "darwin", OSVersion: "macOS 26.5.1 (25F80)", Kernel: "26.0.0", Arch: "arm64", CPUs: 32,
		MachineID: "f0000000-0000-5000-8000-00000000000a", BootID: "b0070000-0000-4000-8000-00000000000b",
		Memory: host.Memory{Total: 512 << 30, Available: (9563156 + 11287075 + 133882) * 16384},
	}
	if err != nil || got != want {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	if v := keysOf(file(t, "sysctl_m3ultra.txt")); v["hw.memsize"] != "549755813888" || v["machdep.cpu.brand_string"] != "Apple M3 Ultra" {
		t.Errorf("recorded sysctl: %v", v)
	}
	r.answers["vm_stat"] = "nonsense"
	if m, err := h.Machine(t.Context()); err == nil {
		t.Errorf("memory that cannot be read: %+v", m)
	}
}

func recordedNetwork(t testing.TB) *replay {
	return &replay{answers: map[string]string{
		"ifconfig -a": file(t, "ifconfig_a_member_with_own_ip.txt"), "netstat -rn": file(t, "netstat_rn.txt"),
		"netstat -ibdn": file(t, "netstat_ibdn.txt"), ports: file(t, "networksetup_listallhardwareports_studio.txt"),
	}}
}

func TestTheNetwork(t *testing.T) {
	got, err := New(Options{Runner: recordedNetwork(t)}).Network(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p := netip.MustParsePrefix
	wantInterfaces := []host.Interface{
		{Name: "lo0", Index: 1, Up: true, Carrier: true, Loopback: true, MTU: 16384, RxBytes: 120000, TxBytes: 120000,
			Addresses: []netip.Prefix{p("127.0.0.1/8"), p("::1/128"), p("fe80::1/64")}},
		{Name: "en0", Index: 6, Up: true, Carrier: true, MTU: 1500, MAC: "02:00:00:00:00:10",
			Addresses: []netip.Prefix{p("fe80::c7:1:2:3/64"), p("10.0.0.21/24")},
			RxBytes:   600000000, TxBytes: 50000000, RxErrors: 1, TxErrors: 2, TxDropped: 3},
		{Name: "en2", Index: 11, Up: true, MTU: 1500, MaxMTU: 9000, MAC: "36:00:00:aa:00:80", Cable: true, Bridge: "bridge0"},
		{Name: "en4", Index: 13, Up: true, Carrier: true, MTU: 1500, MaxMTU: 9000, MAC: "36:00:00:aa:00:88", Cable: true, Bridge: "bridge0",
			Addresses: []netip.Prefix{p("198.18.1.1/30")}, RxBytes: 9000000000, TxBytes: 8000000000},
		{Name: "bridge0", Index: 18, Up: true, Carrier: true, MTU: 1500, MAC: "36:00:00:aa:00:80", TxBytes: 1100},
	}
	if !reflect.DeepEqual(got.Interfaces, wantInterfaces) {
		t.Errorf("got  %+v\nwant %+v", got.Interfaces, wantInterfaces)
	}
	a := netip.MustParseAddr
	for _, want := range []host.Route{
		{Destination: p("0.0.0.0/0"), Gateway: a("10.0.0.1"), Interface: "en0", Table: mainTable},
		{Destination: p("127.0.0.0/8"), Interface: "lo0", Table: mainTable},
		{Destination: p("10.0.0.0/24"), Interface: "en0", Table: mainTable},
		{Destination: p("169.254.0.0/16"), Interface: "en0", Table: mainTable},
		{Destination: p("198.18.1.0/30"), Interface: "en4", Table: mainTable},
		{Destination: p("::/0"), Gateway: a("fe80::1%en0"), Interface: "en0", Table: mainTable},
		{Destination: p("fe80::/64"), Interface: "en0", Table: mainTable},
	} {
		if !slices.Contains(got.Routes, want) {
			t.Errorf("no %+v in %+v", want, got.Routes)
		}
	}
	for _, r := range got.Routes {
		if r.Destination.Addr().IsMulticast() || r.Destination.Addr() == a("10.0.0.255") {
			t.Errorf("a route to no host: %+v", r)
		}
	}
}

func TestRecordedInterfaces(t *testing.T) {
	b := parseIfconfig(file(t, "ifconfig_bridge0_members.txt"))
	if len(b) != 1 || b[0].Name != "bridge0" || len(b[0].Addresses) != 2 {
		t.Errorf("got %+v", b)
	}
	e := parseIfconfig(file(t, "ifconfig_en2_linklocal.txt"))
	if len(e) != 1 || !e[0].Carrier || !slices.Contains(e[0].Addresses, netip.MustParsePrefix("169.254.205.25/16")) {
		t.Errorf("got %+v", e)
	}
}

func TestWatchSeesACable(t *testing.T) {
	r := recordedNetwork(t)
	ctx, cancel := context.WithCancel(t.Context())
	c := New(Options{Runner: r, Interval: 5 * time.Millisecond}).Watch(ctx)
	for r.count("ifconfig -a") < 3 { // it has looked, and found nothing new
		select {
		case <-c:
			t.Fatal("a value, and nothing had changed")
		case <-time.After(time.Millisecond):
		}
	}
	r.mu.Lock()
	r.answers["ifconfig -a"] = strings.Replace(r.answers["ifconfig -a"], "status: inactive", "status: active", 1)
	r.mu.Unlock()
	select {
	case <-c:
	case <-time.After(5 * time.Second):
		t.Fatal("not seen")
	}
	cancel()
	for range c {
	}
}

func TestAProgramThatFailsIsAnError(t *testing.T) {
	h := New(Options{Runner: &replay{}})
	if m, err := h.Machine(t.Context()); err == nil {
		t.Errorf("machine %+v", m)
	}
	if tb, err := h.Thunderbolt(t.Context()); err == nil {
		t.Errorf("Thunderbolt %+v", tb)
	}
	if n, err := h.Network(t.Context()); err == nil {
		t.Errorf("network %+v", n)
	}
}

func TestRealProgramsAreRun(t *testing.T) {
	out, err := Exec{}.Run(t.Context(), "sh", "-c", "echo out; echo complaint >&2")
	if err != nil || string(out) != "out\ncomplaint\n" {
		t.Errorf("got %q, %v", out, err)
	}
	if _, err := (Exec{}).Run(t.Context(), "sh", "-c", "echo why >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("a failure: %v", err)
	}
	if _, err := (Exec{}).Run(t.Context(), "no-such-program"); err == nil {
		t.Error("a program that does not exist")
	}
}

func TestRoutesToOnePlace(t *testing.T) {
	w, err := parseRouteGet(file(t, "route_get_direct.txt"), false)
	if want := (Way{Destination: netip.MustParsePrefix("198.18.1.0/30"), Interface: "en4"}); err != nil || w != want {
		t.Errorf("got %+v, %v", w, err)
	}
	w, err = parseRouteGet(file(t, "route_get_wrong_default.txt"), false)
	if want := (Way{Destination: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("192.0.2.1"), Interface: "en0"}); err != nil || w != want {
		t.Errorf("got %+v, %v", w, err)
	}
	if _, err := parseRouteGet("route: writing to routing socket: not in table\n", false); !errors.Is(err, ErrNoRoute) {
		t.Errorf("got %v", err)
	}
	peer := netip.MustParseAddr("198.18.1.2")
	r := &replay{answers: map[string]string{"arp -n 198.18.1.2": file(t, "arp_peer_ok.txt")}}
	n, ok, err := NeighbourOf(t.Context(), r, peer)
	if want := (Neighbour{MAC: "36:0:0:bb:0:44", Interface: "en4"}); err != nil || !ok || n != want {
		t.Errorf("got %+v, %v, %v", n, ok, err)
	}
	r = &replay{fails: map[string]string{"arp -n 198.18.1.2": file(t, "arp_peer_missing.txt")}}
	if n, ok, err := NeighbourOf(t.Context(), r, peer); ok || err != nil {
		t.Errorf("nobody answers: got %+v, %v", n, err)
	}
	r = &replay{fails: map[string]string{"arp -n 198.18.1.2": "Operation not permitted"}}
	if n, ok, err := NeighbourOf(t.Context(), r, peer); ok || err == nil {
		t.Errorf("arp fails: got %+v", n)
	}
}
