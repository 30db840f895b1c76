package darwin

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"tbcluster/host"
)

// ill is a Mac on which all that Diagnose looks for is so.
func ill(t *testing.T) *replay {
	return &replay{
		answers: map[string]string{
			ports: file(t, "networksetup_listallhardwareports_mbp.txt"), "ifconfig -a": file(t, "ifconfig_a_member_with_own_ip.txt"),
			"ibv_devices": file(t, "ibv_devices_mbp.txt"), "ibv_devinfo": file(t, "ibv_devinfo_one_active.txt"),
			"ipconfig getpacket bridge0":                 file(t, "ipconfig_getpacket_bridge0.txt"),
			"launchctl print system/io.exo.networksetup": file(t, "launchctl_print_exo.txt"),
			"route -n get -inet 198.18.1.2":              file(t, "route_get_wrong_default.txt"),
			"socketfilterfw --getglobalstate":            "Firewall is enabled. (State = 1)\n",
			"route -n get -inet 198.18.9.9":              "route: writing to routing socket: not in table\n",
		},
		fails: map[string]string{},
	}
}

func TestWhatIsWrongWithAMacIsFound(t *testing.T) {
	r := ill(t)
	m := New(Options{Runner: r})
	query := host.Query{Towards: []netip.Addr{netip.MustParseAddr("198.18.1.2"), netip.MustParseAddr("198.18.9.9")}}
	got, err := m.Diagnose(t.Context(), query)
	want := host.Diagnosis{
		RDMA: []host.RDMAPort{
			{Device: "rdma_en1", Port: 1, State: "DOWN", Interface: "en1"},
			{Device: "rdma_en6", Port: 1, State: "ACTIVE", Active: true, Interface: "en6"},
			{Device: "rdma_en2", Port: 1, State: "DOWN", Interface: "en2"},
		},
		Leases:    []string{"bridge0"},
		Resetters: []string{"io.exo.networksetup"},
		Ways: []host.Way{
			{To: query.Towards[0], Interface: "en0", Gateway: netip.MustParseAddr("192.0.2.1")},
			{To: query.Towards[1]},
		},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}
	if _, err := m.Diagnose(t.Context(), query); err != nil || r.count("ibv_devinfo") != 1 || r.count("route -n get -inet 198.18.1.2") != 2 {
		t.Errorf("asked %v, %v: devices are not opened again and again, ways are looked for each time", r.asked, err)
	}
	walls, err := m.Firewalls(t.Context())
	if err != nil || len(walls) != 1 || walls[0].Tool != "macOS" {
		t.Errorf("firewalls %v, %v", walls, err)
	}
}

func TestNothingIsWrongWithAnOlderMac(t *testing.T) {
	r := ill(t)
	r.answers["ibv_devices"] = file(t, "ibv_devices_none.txt")
	delete(r.answers, "ipconfig getpacket bridge0") // ends with status 1
	r.fails["launchctl print system/io.exo.networksetup"] = `Could not find service "io.exo.networksetup" in domain for system`
	r.answers["socketfilterfw --getglobalstate"] = "Firewall is disabled. (State = 0)\n"
	m := New(Options{Runner: r})
	got, err := m.Diagnose(t.Context(), host.Query{})
	if err != nil || !reflect.DeepEqual(got, host.Diagnosis{}) {
		t.Errorf("got %+v, %v", got, err)
	}
	if walls, err := m.Firewalls(t.Context()); err != nil || len(walls) != 0 {
		t.Errorf("firewalls %v, %v", walls, err)
	}
}

func TestOneProgramThatFailsHidesNothingElse(t *testing.T) {
	r := ill(t)
	r.fails["ibv_devinfo"] = "Abort trap"
	got, err := New(Options{Runner: r, Interval: time.Hour}).Diagnose(t.Context(), host.Query{})
	if err == nil || !slices.Equal(got.Leases, []string{"bridge0"}) || len(got.Resetters) != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func FuzzVerbsPrograms(f *testing.F) {
	for _, name := range []string{"ibv_devinfo_one_active.txt", "ibv_devinfo_none.txt", "ibv_devices_mbp.txt"} {
		f.Add(file(f, name))
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, p := range parseDevinfo(text) {
			if p.Device == "" || p.Port < 0 || p.Active != (p.State == "ACTIVE") {
				t.Errorf("%+v", p)
			}
		}
		parseDevices(text)
		parseGlobalState(text)
	})
}
