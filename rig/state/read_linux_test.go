package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// sysfs makes a tree as the driver of Linux 7.3 shows it in a guest of the rig:
// files by name, with their content; links end with "@".
func sysfs(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		link, isLink := strings.CutSuffix(name, "@")
		path := filepath.Join(root, "bus/thunderbolt/devices", link)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if isLink {
			err = os.Symlink(content, path)
		} else {
			err = os.WriteFile(path, []byte(content+"\n"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

var twoCables = map[string]string{
	"domain0/security": "user", "domain0/iommu_dma_protection": "0",
	"0-0/unique_id": "adf18f24-3a61-04e6-ffff-ffffffffffff", "0-0/generation": "4", "0-0/uevent": "DEVTYPE=thunderbolt_device\nUSB4_VERSION=1.0\nUSB4_TYPE=host",
	"0-1/uevent": "DEVTYPE=thunderbolt_xdomain", "0-1/unique_id": "c5f68f24-3a64-04e6-ffff-ffffffffffff",
	"0-1/vendor_name": "Linux", "0-1/device_name": "b", "0-1/rx_lanes": "2", "0-1/tx_lanes": "2", "0-1/rx_speed": "20.0 Gb/s", "0-1/tx_speed": "20.0 Gb/s",
	"0-1.0/key": "network", "0-1.0/driver@": "../../../../bus/thunderbolt/drivers/thunderbolt-net",
	"0-1.0/net/thunderbolt0/address": "02:27:00:d1:ba:3a", "0-1.0/net/thunderbolt0/mtu": "1500",
	"0-1.0/net/thunderbolt0/flags": "0x1003", "0-1.0/net/thunderbolt0/carrier": "1",
	"0-3/uevent": "DEVTYPE=thunderbolt_xdomain", "0-3/unique_id": "c5f68f24-3a64-04e6-ffff-ffffffffffff",
	"0-3/device_name": "b", "0-3/rx_lanes": "1", "0-3/tx_lanes": "1", "0-3/rx_speed": "10.0 Gb/s", "0-3/tx_speed": "10.0 Gb/s",
	"0-3.0/key":  "network",
	"0-5/uevent": "DEVTYPE=thunderbolt_device", "0-5/authorized": "0",
	"something-else/uevent": "",
}

func TestReadFindsWhatTheDriverShows(t *testing.T) {
	s, err := Read(sysfs(t, twoCables))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Driver || len(s.Domains) != 1 || s.Domains[0].Generation != 4 || s.Domains[0].Security != "user" || s.Domains[0].UUID[:8] != "adf18f24" {
		t.Fatalf("%+v", s)
	}
	if o := s.Domains[0].Others; len(o) != 1 || o[0] != "0-5" {
		t.Errorf("routers %v", o)
	}
	p := s.Peer("0-1")
	if p == nil || p.Name != "b" || p.Vendor != "Linux" || p.RxLanes != 2 || p.TxGbps != 20 || p.Inode == 0 {
		t.Fatalf("0-1 is %+v", p)
	}
	if n := p.Interface(); n == nil || n.Name != "thunderbolt0" || n.MTU != 1500 || !n.Up || !n.Carrier || p.Services[0].Driver != "thunderbolt-net" {
		t.Errorf("0-1 has %+v", p.Services)
	}
	second := s.Peer("0-3")
	if second == nil || second.RxLanes != 1 || second.RxGbps != 10 || second.Interface() != nil || len(second.Services) != 1 {
		t.Errorf("0-3 is %+v", second)
	}
	if len(s.Peers()) != 2 || s.Peer("0-5") != nil {
		t.Errorf("peers %+v", s.Peers())
	}
}

func TestReadWithoutTheDriver(t *testing.T) {
	s, err := Read(t.TempDir())
	if err != nil || s.Driver || len(s.Domains) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if s.Peer("0-1").Interface() != nil {
		t.Error("nobody has an interface")
	}
}

// A peer on its way out has lost its attributes: it is not there.
func TestReadLeavesOutWhatIsGoing(t *testing.T) {
	s, err := Read(sysfs(t, map[string]string{"0-0/unique_id": "u", "0-1/uevent": "DEVTYPE=thunderbolt_xdomain", "0-1.0/uevent": "x"}))
	if err != nil || len(s.Peers()) != 0 || len(s.Domains) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestStatesAreEqualWhenNothingHasChanged(t *testing.T) {
	root := sysfs(t, twoCables)
	read := func() State {
		s, err := Read(root)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := read()
	if !first.Equal(read()) {
		t.Error("nothing has changed")
	}
	carrier := filepath.Join(root, "bus/thunderbolt/devices/0-1.0/net/thunderbolt0/carrier")
	if err := os.WriteFile(carrier, []byte("0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if first.Equal(read()) {
		t.Error("the carrier has gone")
	}
}
