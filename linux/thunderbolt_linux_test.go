package linux

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"tbcluster/host"
)

// read reads the tree of s.
func (s sysfs) read() host.Thunderbolt {
	s.t.Helper()
	tb, err := tree{s.root}.read()
	if err != nil {
		s.t.Fatal(err)
	}
	return tb
}

func TestAMacIsSeenThroughACable(t *testing.T) {
	s := newSysfs(t)
	if err := os.CopyFS(filepath.Join(s.root, "recorded"), os.DirFS("testdata/sys")); err != nil {
		t.Fatal(err)
	}
	s.root = filepath.Join(s.root, "recorded")
	link := filepath.Join(s.root, "class/net/thunderbolt0/device")
	target, err := os.ReadFile(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(strings.TrimSpace(string(target)), link); err != nil {
		t.Fatal(err)
	}
	want := host.Thunderbolt{DriverLoaded: true, Domains: []host.Domain{{
		ID: "0", UUID: "c0de0000-0000-8000-8000-00000000000a", Security: "user", IOMMU: true, Generation: 4,
		Peers: []host.XDomain{{
			Port: "0-2", RemoteUUID: "b0000000-0000-4000-8000-000000000001", Vendor: "Apple Inc.", Device: "Mac16,9",
			RxGbps: 40, TxGbps: 40, RxLanes: 2, TxLanes: 2, CapableGbps: 40, Hops: 1,
			Services: map[string]uint32{"network": 1, "rdma": 64087}, Interface: "thunderbolt0",
		}},
	}}}
	if got := s.read(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestAMachineWithoutThunderboltHasNoDomains(t *testing.T) {
	tb, err := tree{t.TempDir()}.read()
	if err != nil || tb.DriverLoaded || len(tb.Domains) != 0 {
		t.Errorf("got %+v, %v", tb, err)
	}
	s := newSysfs(t)
	if tb := s.read(); !tb.DriverLoaded || len(tb.Domains) != 0 {
		t.Errorf("a loaded driver without controllers: got %+v", tb)
	}
}

func TestPeersBehindHubsAndOtherDevicesAreToldApart(t *testing.T) {
	s := newSysfs(t)
	s.device("domain0", map[string]string{"security": "user", "iommu_dma_protection": "0"})
	s.device("domain10", map[string]string{"security": "none", "iommu_dma_protection": "1"})
	s.device("domain2", nil)
	s.device("0-0", map[string]string{"unique_id": "AAAA0000-0000-8000-8000-00000000000A", "generation": "3", "authorized": "1", "uevent": "DEVTYPE=thunderbolt_device"})
	s.device("0-1", map[string]string{"authorized": "1", "vendor_name": "HubCo", "device_name": "Hub", "unique_id": "hub", "uevent": "DEVTYPE=thunderbolt_device\n"})
	s.device("0-3", map[string]string{"authorized": "0", "vendor_name": "DockCo", "device_name": "Dock", "unique_id": "dock"})
	s.device("0-0:1.1", map[string]string{"vendor": "0x1da0"}) // a retimer
	s.peer("0-301", "BBBB0000-0000-4000-8000-000000000001")
	s.netdev("renamed", "0-301.0")
	// An old kernel: no type, no speeds, and a service without a key.
	s.device("10-2", map[string]string{"unique_id": "cccc"})
	s.device("10-2.0", map[string]string{"prtcid": "7"})
	s.device("10-2.1", map[string]string{"key": "odd", "prtcid": "nonsense"})
	// Something unplugged while it is read: nothing is in it any more.
	s.device("10-3", nil)
	// Interfaces that are none of ours.
	s.mkdir("class/net/eth0")
	if err := os.WriteFile(filepath.Join(s.root, "class/net/bonding_masters"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	want := []host.Domain{
		{
			ID: "0", UUID: "aaaa0000-0000-8000-8000-00000000000a", Security: "user", Generation: 3,
			Peers: []host.XDomain{{
				Port: "0-301", RemoteUUID: "bbbb0000-0000-4000-8000-000000000001", Vendor: "Acme", Device: "box",
				RxGbps: 40, TxGbps: 40, RxLanes: 2, TxLanes: 2, CapableGbps: 40, BehindHub: true, Hops: 2,
				Services: map[string]uint32{"network": 1}, Interface: "renamed",
			}},
			Others: []host.Device{
				{Port: "0-1", Vendor: "HubCo", Name: "Hub", Authorized: true},
				{Port: "0-3", Vendor: "DockCo", Name: "Dock"},
			},
		},
		{ID: "2"},
		{ID: "10", Security: "none", IOMMU: true, Peers: []host.XDomain{{Port: "10-2", RemoteUUID: "cccc", Hops: 1}}},
	}
	if got := s.read().Domains; !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestCapabilityIsNeverBelowWhatACableHasTrainedAt(t *testing.T) {
	s := newSysfs(t)
	s.device("0-0", map[string]string{"unique_id": "a", "generation": "4", "authorized": "1"})
	s.peer("0-1", "v1")
	s.device("0-1", map[string]string{"rx_speed": "10.0 Gb/s", "tx_speed": "10.0 Gb/s"})
	s.peer("0-2", "v2")
	s.device("0-2", map[string]string{"rx_speed": "40.0 Gb/s", "tx_speed": "40.0 Gb/s", "tx_lanes": "3", "rx_lanes": "1"})
	peers := s.read().Domains[0].Peers
	if p := peers[0]; p.RxGbps != 20 || p.TxGbps != 20 || p.CapableGbps != 40 {
		t.Errorf("a cable at 10 Gb/s a lane: got %+v", p)
	}
	if p := peers[1]; p.RxGbps != 40 || p.TxGbps != 120 || p.CapableGbps != 120 {
		t.Errorf("an asymmetric cable of USB4 version 2: got %+v", p)
	}
}

// Devices come and go while the bus is read: no error, and no peer half read.
func TestReadingWhileDevicesComeAndGo(t *testing.T) {
	s := newSysfs(t)
	s.device("0-0", map[string]string{"unique_id": "own", "generation": "4", "authorized": "1"})
	s.peer("0-1", "stays")
	template := t.TempDir()
	other := sysfs{t, template}
	other.mkdir("bus/thunderbolt/devices")
	other.peer("0-2", "goes")
	done := make(chan error, 1)
	stop := make(chan struct{})
	go func() {
		// As the driver does: attributes first, the device then.
		dir := filepath.Join(s.root, "bus/thunderbolt/devices/0-2")
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if err := os.CopyFS(dir, os.DirFS(filepath.Join(template, "bus/thunderbolt/devices/0-2"))); err != nil {
				done <- err
				return
			}
			if err := os.RemoveAll(dir); err != nil {
				done <- err
				return
			}
		}
	}()
	for range 300 {
		tb, err := tree{s.root}.read()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range tb.Domains[0].Peers {
			if p.RemoteUUID != "stays" && p.RemoteUUID != "goes" {
				t.Fatalf("a peer that is none: %+v", p)
			}
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestAnUnreadableBusIsAnError(t *testing.T) {
	s := newSysfs(t)
	s.remove("bus/thunderbolt/devices")
	if err := os.Symlink("devices", filepath.Join(s.root, "bus/thunderbolt/devices")); err != nil {
		t.Fatal(err)
	}
	if tb, err := (tree{s.root}).read(); err == nil {
		t.Errorf("a bus that cannot be listed: got %+v", tb)
	}
}

func FuzzDeviceName(f *testing.F) {
	for _, s := range []string{"0-0", "0-2.1", "0-301", "1-ffffffffffffffff", "domain0", "0-0:1.1", "-", "0-", "00-01", "0-2.", "0-G"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		d, ok := parseDevice(name)
		if !ok {
			return
		}
		again, ok := parseDevice(d.String())
		if !ok || again != d {
			t.Errorf("%q is %+v, and that is %+v, %v", name, d, again, ok)
		}
	})
}

func FuzzThunderboltAttributes(f *testing.F) {
	f.Add("uuid", "20.0 Gb/s", "2", "key", "1", "4", "DEVTYPE=thunderbolt_xdomain", "1")
	f.Add("", "-1 Gb/s", "-2", "", "99999999999", "x", "DEVTYPE=", "")
	f.Add("\x00", "1e999 Gb/s", "256", "k\xff", "0x1", "-4", "\n\n", "2")
	f.Add("u", "NaN Gb/s", "255", "k", "4294967295", "255", "", "")
	f.Fuzz(func(t *testing.T, uuid, speed, lanes, key, id, generation, uevent, authorized string) {
		s := newSysfs(t)
		s.device("0-0", map[string]string{"generation": generation, "unique_id": uuid})
		s.device("0-1", map[string]string{
			"unique_id": uuid, "rx_speed": speed, "tx_speed": speed, "rx_lanes": lanes, "tx_lanes": lanes,
			"uevent": uevent, "authorized": authorized,
		})
		s.device("0-1.0", map[string]string{"key": key, "prtcid": id})
		for _, p := range s.read().Domains[0].Peers {
			if p.RemoteUUID == "" || !(p.RxGbps >= 0) || !(p.CapableGbps >= 0) || p.RxLanes < 0 || p.CapableGbps > 0 && p.CapableGbps < p.RxGbps {
				t.Errorf("impossible peer %+v", p)
			}
		}
	})
}

// A machine at the other end of a cable says of itself what it likes.
func TestNamesOfAPeerAreText(t *testing.T) {
	s := newSysfs(t)
	s.peer("0-1", "u")
	s.device("0-1", map[string]string{"device_name": "ev\xffil\x1b[2J", "vendor_name": strings.Repeat("v", 2*maxText)})
	s.device("0-3", map[string]string{"authorized": "0", "device_name": "\xc3("})
	d := s.read().Domains[0]
	if p := d.Peers[0]; p.Device != "ev\uFFFDil\x1b[2J" || len(p.Vendor) > maxText || d.Others[0].Name != "\uFFFD(" {
		t.Errorf("got %q, %d bytes, %q", p.Device, len(p.Vendor), d.Others[0].Name)
	}
}

func TestDisplaysAndDisksBesidePeersOnEveryPort(t *testing.T) {
	// Two controllers as a desktop has them: a peer and a dock on the first, a disk
	// nobody has allowed and a peer behind two hubs on the second, retimers on all.
	s := newSysfs(t)
	for d := range 2 {
		s.device(fmt.Sprintf("domain%d", d), map[string]string{"security": "user", "iommu_dma_protection": "1"})
		s.device(fmt.Sprintf("%d-0", d), map[string]string{"unique_id": fmt.Sprint("own", d), "generation": "4", "authorized": "1", "uevent": "DEVTYPE=thunderbolt_device"})
		s.device(fmt.Sprintf("%d-0:1.1", d), map[string]string{"vendor": "0x1da0", "device": "0x8833", "uevent": "DEVTYPE=thunderbolt_retimer"})
	}
	s.peer("0-1", "beta")
	s.device("0-3", map[string]string{"authorized": "1", "vendor_name": "DockCo", "device_name": "Dock", "unique_id": "dock", "uevent": "DEVTYPE=thunderbolt_device"})
	s.device("1-1", map[string]string{"authorized": "1", "vendor_name": "HubCo", "device_name": "Hub", "uevent": "DEVTYPE=thunderbolt_device"})
	s.device("1-301", map[string]string{"authorized": "1", "vendor_name": "HubCo", "device_name": "Hub", "uevent": "DEVTYPE=thunderbolt_device"})
	s.device("1-3", map[string]string{"authorized": "0", "vendor_name": "DiskCo", "device_name": "Disk", "uevent": "DEVTYPE=thunderbolt_device"})
	s.peer("1-50301", "gamma")
	s.netdev("thunderbolt0", "0-1.0")
	s.netdev("thunderbolt1", "1-50301.0")
	var got []string
	for _, d := range s.read().Domains {
		for _, p := range d.Peers {
			got = append(got, fmt.Sprintf("%s %s %d %s", p.Port, p.RemoteUUID, p.Hops, p.Interface))
		}
		for _, o := range d.Others {
			got = append(got, fmt.Sprintf("%s %s %v", o.Port, o.Name, o.Authorized))
		}
	}
	want := []string{"0-1 beta 1 thunderbolt0", "0-3 Dock true", "1-50301 gamma 3 thunderbolt1", "1-1 Hub true", "1-3 Disk false", "1-301 Hub true"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// FuzzTree makes a tree of what it is given: a device for each line, "NAME
// ATTRIBUTE VALUE", where a name may be a directory, a file or a link that leads
// anywhere.
func FuzzTree(f *testing.F) {
	f.Add([]byte("0-0 unique_id own\n0-0 generation 4\n0-1 unique_id far\n0-1 uevent DEVTYPE=thunderbolt_xdomain\n0-1.0 key network\n0-1.0 prtcid 1\n@thunderbolt0 0-1.0"))
	f.Add([]byte("0-1 unique_id a\n0-1 unique_id b\n0-301 unique_id c\n@x 0-1.0\n@y 0-1.0\n@z ../../..\n0-1.4294967295 key k"))
	f.Add([]byte("domain0 security user\ndomain0\n!domain1\n!0-0\n!0-3 x\n=0-5 0-5\n=0-7 ../0-1\n0-ffffffffffffffff unique_id u\n2147483647-1 unique_id v"))
	f.Add([]byte("0-1 rx_speed 40.0 Gb/s\n0-1 unique_id \xff\xfe\n0-1 rx_lanes 255\n0-1 device_name \x1b[2J"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newSysfs(t)
		ok := func(name string) bool {
			return name != "" && len(name) < 100 && !strings.ContainsAny(name, "/\x00") && name != "." && name != ".."
		}
		dir := filepath.Join(s.root, "bus/thunderbolt/devices")
		for i, line := range strings.Split(string(data), "\n") {
			if i == 64 {
				break
			}
			name, rest, _ := strings.Cut(line, " ")
			// That something is there already, or cannot be, is part of the game.
			switch {
			case strings.HasPrefix(name, "@") && ok(name[1:]): // an interface of a device
				_ = os.MkdirAll(filepath.Join(s.root, "class/net", name[1:]), 0o755)
				_ = os.Symlink("../../../bus/thunderbolt/devices/"+strings.ReplaceAll(rest, "\x00", ""), filepath.Join(s.root, "class/net", name[1:], "device"))
			case strings.HasPrefix(name, "!") && ok(name[1:]): // a file where a device should be
				_ = os.WriteFile(filepath.Join(dir, name[1:]), []byte(rest), 0o644)
			case strings.HasPrefix(name, "=") && ok(name[1:]) && ok(rest): // a link
				_ = os.Symlink(rest, filepath.Join(dir, name[1:]))
			case ok(name):
				_ = os.Mkdir(filepath.Join(dir, name), 0o755)
				if attr, value, _ := strings.Cut(rest, " "); ok(attr) {
					_ = os.WriteFile(filepath.Join(dir, name, attr), []byte(value), 0o644)
				}
			}
		}
		tb, err := tree{s.root}.read()
		if err != nil {
			return // a loop of links, an attribute that is a directory: said, and nothing else
		}
		if again, err := (tree{s.root}).read(); err != nil || !reflect.DeepEqual(tb, again) {
			t.Fatalf("read twice: %+v, %+v, %v", tb, again, err)
		}
		ports := map[string]bool{}
		for _, d := range tb.Domains {
			for _, p := range d.Peers {
				if ports[p.Port] || p.RemoteUUID == "" || p.Hops < 1 || p.Hops > 8 || p.BehindHub != (p.Hops > 1) || !(p.RxGbps >= 0 && p.TxGbps >= 0) ||
					!utf8.ValidString(p.Device+p.Vendor+p.RemoteUUID) {
					t.Fatalf("an impossible peer: %+v", p)
				}
				ports[p.Port] = true
			}
			for _, o := range d.Others {
				if ports[o.Port] || !utf8.ValidString(o.Name+o.Vendor) {
					t.Fatalf("an impossible device: %+v", o)
				}
				ports[o.Port] = true
			}
		}
	})
}
