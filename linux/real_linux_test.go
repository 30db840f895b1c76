package linux

import (
	"os"
	"reflect"
	"testing"

	"tbcluster/host"
	"tbcluster/rig/state"
)

// TestTheRealDriverIsRead reads what the driver has shown in a guest of the rig.
// Nothing of what is read is missing there.
func TestTheRealDriverIsRead(t *testing.T) {
	f, err := os.Open("testdata/driver.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	shown, err := state.ParseAttributes(f)
	if err != nil {
		t.Fatal(err)
	}
	s := newSysfs(t)
	s.root = t.TempDir()
	if err := shown.Make(s.root); err != nil {
		t.Fatal(err)
	}
	want := host.Thunderbolt{DriverLoaded: true, Domains: []host.Domain{{
		ID: "0", UUID: "adf18f24-3a61-04e6-ffff-ffffffffffff", Security: "user", Generation: 4,
		Peers: []host.XDomain{{
			Port: "0-1", RemoteUUID: "c5f68f24-3a64-04e6-ffff-ffffffffffff", Vendor: "Linux", Device: "b",
			RxGbps: 40, TxGbps: 40, RxLanes: 2, TxLanes: 2, CapableGbps: 40, Hops: 1,
			Services: map[string]uint32{"network": 1}, Interface: "thunderbolt0",
		}},
	}}}
	if got := s.read(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	// All of it is read from there: without any of these something is missing.
	for _, a := range []string{
		"domain0/security", "domain0/iommu_dma_protection",
		"domain0/0-0/unique_id", "domain0/0-0/generation", "domain0/0-0/authorized",
		"domain0/0-0/0-1/uevent", "domain0/0-0/0-1/unique_id", "domain0/0-0/0-1/vendor_name", "domain0/0-0/0-1/device_name",
		"domain0/0-0/0-1/rx_speed", "domain0/0-0/0-1/tx_speed", "domain0/0-0/0-1/rx_lanes", "domain0/0-0/0-1/tx_lanes",
		"domain0/0-0/0-1/0-1.0/key", "domain0/0-0/0-1/0-1.0/prtcid", "domain0/0-0/0-1/0-1.0/driver",
		"domain0/0-0/0-1/0-1.0/net/thunderbolt0/device",
	} {
		if shown[a] == "" {
			t.Errorf("the driver shows no %s", a)
		}
	}
}
