package linux

import (
	"os"
	"path/filepath"
	"testing"

	"tbcluster/host/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// sysfs is a tree that a test writes.
type sysfs struct {
	t    testing.TB
	root string
}

func newSysfs(t testing.TB) sysfs {
	s := sysfs{t, t.TempDir()}
	s.mkdir("bus/thunderbolt/devices")
	s.mkdir("class/net")
	return s
}

func (s sysfs) mkdir(path string) {
	s.t.Helper()
	if err := os.MkdirAll(filepath.Join(s.root, path), 0o755); err != nil {
		s.t.Fatal(err)
	}
}

// device writes attributes of a device on the Thunderbolt bus.
func (s sysfs) device(name string, attributes map[string]string) {
	s.t.Helper()
	s.mkdir("bus/thunderbolt/devices/" + name)
	for k, v := range attributes {
		path := filepath.Join(s.root, "bus/thunderbolt/devices", name, k)
		if err := os.WriteFile(path, []byte(v+"\n"), 0o644); err != nil {
			s.t.Fatal(err)
		}
	}
}

// netdev makes an interface of a service.
func (s sysfs) netdev(name, service string) {
	s.t.Helper()
	s.mkdir("class/net/" + name)
	if err := os.Symlink("../../../bus/thunderbolt/devices/"+service, filepath.Join(s.root, "class/net", name, "device")); err != nil {
		s.t.Fatal(err)
	}
}

func (s sysfs) remove(path string) {
	s.t.Helper()
	if err := os.RemoveAll(filepath.Join(s.root, path)); err != nil {
		s.t.Fatal(err)
	}
}

// peer writes an XDomain with a network service.
func (s sysfs) peer(name, uuid string) {
	s.t.Helper()
	s.device(name, map[string]string{
		"unique_id": uuid, "vendor_name": "Acme", "device_name": "box", "uevent": "DEVTYPE=thunderbolt_xdomain",
		"rx_speed": "20.0 Gb/s", "tx_speed": "20.0 Gb/s", "rx_lanes": "2", "tx_lanes": "2",
	})
	s.device(name+".0", map[string]string{"key": "network", "prtcid": "1"})
}
