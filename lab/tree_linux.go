package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// tree is the Thunderbolt part of a node's sysfs, laid out as the kernel lays
// it out (Documentation/ABI/testing/sysfs-bus-thunderbolt, drivers/thunderbolt,
// drivers/net/thunderbolt):
//
//	bus/thunderbolt/devices/X        → ../../../devices/pci…/domainD/…/X
//	devices/pci…/domainD/D-0/D-R/    an XDomain, its services below it
//	class/net/thunderboltN           → ../../devices/pci…/D-R.S/net/thunderboltN
//	class/net/eth0                   → the node's real /sys
//
// The attributes of an interface are links to its real ones.
type tree struct {
	root  string
	uuids []string // of the domains
	// others are devices that are no machines.
	others []foreign
}

func newTree(root string, uuids []string, others ...foreign) *tree {
	return &tree{root: root, uuids: uuids, others: others}
}

// peer is what a cable's far end tells of itself.
type peer struct {
	uuid string // of the domain that the cable is plugged into
	name string // host name
}

const (
	busDevices = "bus/thunderbolt/devices"
	classNet   = "class/net"
)

// service is the only one that a Linux peer with thunderbolt_net announces.
func serviceName(p port) string { return p.String() + ".0" }

func serviceDir(p port) string { return filepath.Join(xdomainDir(p), serviceName(p)) }

func netDir(p port, iface string) string { return filepath.Join(serviceDir(p), "net", iface) }

func (t *tree) path(elem ...string) string {
	return filepath.Join(append([]string{t.root}, elem...)...)
}

// attributes writes a device directory that appears whole, as a device's
// attributes do.
func (t *tree) attributes(dir string, attrs map[string]string, links map[string]string) error {
	final := t.path(dir)
	if err := os.MkdirAll(filepath.Dir(final), 0o755); err != nil {
		return err
	}
	// Outside of what is read as devices.
	tmp, err := os.MkdirTemp(t.root, ".new-")
	if err != nil {
		return err
	}
	if err := fill(tmp, attrs, links); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Rename(tmp, final); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return nil
}

func fill(dir string, attrs, links map[string]string) error {
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	for name, v := range attrs {
		if v != "" {
			v += "\n"
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(v), 0o444); err != nil {
			return err
		}
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// relative is the target of a link at one path of the tree to another.
func relative(from, to string) string {
	rel, err := filepath.Rel(filepath.Dir(from), to)
	if err != nil {
		return to // both are relative to the root, so there is a way
	}
	return rel
}

// onBus lists a device on the Thunderbolt bus.
func (t *tree) onBus(dir string) error {
	link := filepath.Join(busDevices, filepath.Base(dir))
	return os.Symlink(relative(link, dir), t.path(link))
}

func subsystem(dir, of string) map[string]string {
	return map[string]string{"subsystem": relative(filepath.Join(dir, "subsystem"), of)}
}

const netDriver = "bus/thunderbolt/drivers/thunderbolt-net"

// reset makes the tree of a node without cables, as at boot.
func (t *tree) reset() error {
	if err := clearDir(t.root); err != nil {
		return err
	}
	dirs := []string{classNet}
	if len(t.uuids) > 0 {
		dirs = append(dirs, busDevices, netDriver, "module/thunderbolt/parameters", "module/thunderbolt_net")
	}
	for _, d := range dirs {
		if err := os.MkdirAll(t.path(d), 0o755); err != nil {
			return err
		}
	}
	if len(t.uuids) > 0 {
		// Whether the driver looks for other machines: drivers/thunderbolt/xdomain.c.
		if err := writeFile(t.path("module/thunderbolt/parameters/xdomain"), "Y\n"); err != nil {
			return err
		}
	}
	for _, iface := range []string{"lo", lanInterface} {
		if err := os.Symlink(filepath.Join("/sys", classNet, iface), t.path(classNet, iface)); err != nil {
			return err
		}
	}
	for d, uuid := range t.uuids {
		if err := t.addDomain(d, uuid); err != nil {
			return err
		}
	}
	for _, f := range t.others {
		if err := t.attributes(f.dir, f.attrs, subsystem(f.dir, "bus/thunderbolt")); err != nil {
			return err
		}
		if err := t.onBus(f.dir); err != nil {
			return err
		}
	}
	return nil
}

func (t *tree) addDomain(d int, uuid string) error {
	dir := domainDir(d)
	err := t.attributes(dir, map[string]string{
		"security": "user", "iommu_dma_protection": "1", "deauthorization": "0",
		"uevent": "DEVTYPE=thunderbolt_domain",
	}, subsystem(dir, "bus/thunderbolt"))
	if err != nil {
		return err
	}
	if err := t.onBus(dir); err != nil {
		return err
	}
	router := routerDir(d)
	err = t.attributes(router, map[string]string{
		"authorized": "1", "generation": "4", "unique_id": uuid,
		"vendor": "0x8087", "vendor_name": "INTEL", "device": "0x463e", "device_name": "Gen14",
		"uevent": "DEVTYPE=thunderbolt_device\nUSB4_VERSION=1.0\nUSB4_TYPE=host",
	}, subsystem(router, "bus/thunderbolt"))
	if err != nil {
		return err
	}
	for i := range portsPerDomain {
		p := filepath.Join(router, fmt.Sprintf("usb4_port%d", nthPort(i).number))
		if err := t.attributes(p, map[string]string{"link": "none", "uevent": ""}, nil); err != nil {
			return err
		}
	}
	return t.onBus(router)
}

// netAttributes are the attributes of an interface
// (Documentation/ABI/testing/sysfs-class-net), all of them the real ones.
var netAttributes = strings.Fields("addr_assign_type addr_len address broadcast carrier " +
	"carrier_changes carrier_down_count carrier_up_count dev_id dev_port dormant duplex flags " +
	"gro_flush_timeout ifalias ifindex iflink link_mode mtu name_assign_type napi_defer_hard_irqs " +
	"netdev_group operstate power proto_down queues " +
	"speed statistics testing threaded tx_queue_len type uevent")

// plug shows a peer on a port: XDomain, service, interface, as the driver does.
func (t *tree) plug(p port, far peer, iface string, tell func(uevent)) error {
	if err := writeFile(t.path(t.portFile(p)), "usb4\n"); err != nil {
		return err
	}
	xd := xdomainDir(p)
	err := t.attributes(xd, map[string]string{
		"unique_id": far.uuid, "device": "0x4", "device_name": far.name,
		"vendor": "0x1d6b", "vendor_name": "Linux", "maxhopid": "15",
		"rx_speed": "20.0 Gb/s", "tx_speed": "20.0 Gb/s", "rx_lanes": "2", "tx_lanes": "2",
		"uevent": "DEVTYPE=thunderbolt_xdomain",
	}, subsystem(xd, "bus/thunderbolt"))
	if err != nil {
		return err
	}
	if err := t.onBus(xd); err != nil {
		return err
	}
	tell(added(xd, "thunderbolt", "DEVTYPE=thunderbolt_xdomain"))
	svc := serviceDir(p)
	links := subsystem(svc, "bus/thunderbolt")
	links["driver"] = relative(filepath.Join(svc, "driver"), netDriver)
	const modalias = "tbsvc:knetworkp00000001v00000001r00000001"
	err = t.attributes(svc, map[string]string{
		"key": "network", "prtcid": "1", "prtcvers": "1", "prtcrevs": "1", "prtcstns": "0x00000007",
		"modalias": modalias, "uevent": "DEVTYPE=thunderbolt_service\nDRIVER=thunderbolt-net\nMODALIAS=" + modalias,
	}, links)
	if err != nil {
		return err
	}
	if err := t.onBus(svc); err != nil {
		return err
	}
	tell(added(svc, "thunderbolt", "DEVTYPE=thunderbolt_service", "MODALIAS="+modalias))
	// The kernel tells of the interface itself, by netlink and by an event.
	nd := netDir(p, iface)
	links = subsystem(nd, classNet)
	links["device"] = "../../../" + serviceName(p)
	for _, a := range netAttributes {
		links[a] = filepath.Join("/sys", classNet, iface, a)
	}
	if err := t.attributes(nd, nil, links); err != nil {
		return err
	}
	link := filepath.Join(classNet, iface)
	return os.Symlink(relative(link, nd), t.path(link))
}

func (t *tree) portFile(p port) string {
	return filepath.Join(routerDir(p.domain), fmt.Sprintf("usb4_port%d", p.number), "link")
}

// unplug takes away what plug showed, in the order of the driver: interface,
// service, XDomain. What is gone already is no error.
func (t *tree) unplug(p port, iface string, tell func(uevent)) error {
	if _, err := os.Lstat(t.path(xdomainDir(p))); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	steps := []struct {
		link, dir string
		event     []string
	}{
		{filepath.Join(classNet, iface), netDir(p, iface), nil},
		{filepath.Join(busDevices, serviceName(p)), serviceDir(p), []string{"DEVTYPE=thunderbolt_service"}},
		{filepath.Join(busDevices, p.String()), xdomainDir(p), []string{"DEVTYPE=thunderbolt_xdomain"}},
	}
	for _, s := range steps {
		if err := os.Remove(t.path(s.link)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := t.vanish(s.dir); err != nil {
			return err
		}
		if s.event != nil {
			tell(removed(s.dir, "thunderbolt", s.event...))
		}
	}
	if p.hub != 0 {
		return nil // the hub is still there
	}
	return writeFile(t.path(t.portFile(p)), "none\n")
}

// vanish removes a device directory at once.
func (t *tree) vanish(dir string) error {
	tmp, err := os.MkdirTemp(t.root, ".old-")
	if err != nil {
		return err
	}
	err = os.Rename(t.path(dir), filepath.Join(tmp, "gone"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(tmp))
}
