package linux

import (
	"cmp"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"tbcluster/host"
)

// capableGbps is what a host router of each generation can do over one cable,
// both lanes together. The kernel gives the generation of the router
// (Documentation/ABI/testing/sysfs-bus-thunderbolt) and no capability of a
// port; 4 covers all of USB4, of which version 2 can do 80: what a cable has
// trained at raises the number.
var capableGbps = map[int]float64{1: 10, 2: 20, 3: 40, 4: 40}

// hostRoute is the route of a domain's own router.
const hostRoute = 0

// device is the name of a device on the Thunderbolt bus, taken apart:
// "DOMAIN-ROUTE" or "DOMAIN-ROUTE.SERVICE".
type device struct {
	domain  int
	route   uint64 // a hop for each byte, the first in the lowest
	service int    // -1 for what is no service
}

// parseDevice parses a device name as drivers/thunderbolt makes them ("0-301",
// "0-2.1"); ok is false for domains, retimers ("0-0:1.1") and anything else.
func parseDevice(name string) (d device, ok bool) {
	domain, rest, ok := strings.Cut(name, "-")
	if !ok {
		return d, false
	}
	route, service, isService := strings.Cut(rest, ".")
	d.service = -1
	var err error
	if d.domain, err = parseIndex(domain); err != nil {
		return d, false
	}
	if d.route, err = strconv.ParseUint(route, 16, 64); err != nil {
		return d, false
	}
	if isService {
		if d.service, err = parseIndex(service); err != nil {
			return d, false
		}
	}
	return d, d.String() == name // the kernel writes no "0-01"
}

// String returns the name.
func (d device) String() string {
	if d.service >= 0 {
		return fmt.Sprintf("%d-%x.%d", d.domain, d.route, d.service)
	}
	return fmt.Sprintf("%d-%x", d.domain, d.route)
}

// owner returns the device that offers a service.
func (d device) owner() device { return device{d.domain, d.route, -1} }

// hops is how many cables the route takes: a byte for each, of which none is 0.
func (d device) hops() int { return (bits.Len64(d.route) + 7) / 8 }

// behindHub reports whether the route has more than one hop.
func (d device) behindHub() bool { return d.hops() > 1 }

// parseIndex parses a number as the kernel prints indices.
func parseIndex(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, err
	}
	return int(n), nil
}

// parseSpeed parses the speed of one lane, "20.0 Gb/s"; 0 if it is none.
func parseSpeed(s string) float64 {
	number, unit, _ := strings.Cut(s, " ")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || unit != "Gb/s" || !(v > 0 && v < 1e6) {
		return 0
	}
	return v
}

// parseLanes parses a number of lanes; 0 if it is none.
func parseLanes(s string) int {
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil {
		return 0
	}
	return int(n)
}

// deviceType is DEVTYPE in the text of a uevent file, "" if it is not there.
func deviceType(uevent string) string {
	for line := range strings.Lines(uevent) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "DEVTYPE="); ok {
			return v
		}
	}
	return ""
}

// tree reads the Thunderbolt bus below a sysfs root.
type tree struct{ root string }

func (t tree) devices() string { return filepath.Join(t.root, "bus/thunderbolt/devices") }

// attr reads one attribute of a device, "" if it is not there.
func (t tree) attr(dev, name string) (string, error) { return readText(t.devices(), dev, name) }

// attrs reads several attributes of a device.
func (t tree) attrs(dev string, names ...string) (map[string]string, error) {
	m := make(map[string]string, len(names))
	for _, n := range names {
		v, err := t.attr(dev, n)
		if err != nil {
			return nil, err
		}
		m[n] = v
	}
	return m, nil
}

// interfaces returns the network interfaces of the Thunderbolt layer and the
// device that each belongs to.
func (t tree) interfaces() (map[string]device, error) {
	list, err := names(t.root, "class/net")
	if err != nil {
		return nil, fmt.Errorf("list network interfaces in sysfs: %w", err)
	}
	owned := map[string]device{}
	for _, name := range list {
		target, err := os.Readlink(filepath.Join(t.root, "class/net", name, "device"))
		if err != nil {
			// EINVAL is no symbolic link; bonding_masters and its like are files.
			continue
		}
		if d, ok := parseDevice(filepath.Base(target)); ok && d.service >= 0 {
			owned[name] = d
		}
	}
	return owned, nil
}

// read reads everything.
func (t tree) read() (host.Thunderbolt, error) {
	var tb host.Thunderbolt
	if _, err := os.Stat(filepath.Join(t.root, "bus/thunderbolt")); err != nil {
		if vanished(err) {
			return tb, nil
		}
		return tb, fmt.Errorf("read the Thunderbolt bus: %w", err)
	}
	tb.DriverLoaded = true
	list, err := names(t.devices())
	if err != nil {
		return tb, fmt.Errorf("read the Thunderbolt bus: %w", err)
	}
	owned, err := t.interfaces()
	if err != nil {
		return tb, err
	}
	b := builder{tree: t, domains: map[int]*host.Domain{}, interfaces: map[device]string{}}
	for name, d := range owned {
		// The driver makes one. While it is being renamed there may be two.
		if have := b.interfaces[d.owner()]; have == "" || name < have {
			b.interfaces[d.owner()] = name
		}
	}
	for _, name := range list {
		if n, ok := strings.CutPrefix(name, "domain"); ok {
			if i, err := parseIndex(n); err == nil {
				b.domain(i)
			}
			continue
		}
		if d, ok := parseDevice(name); ok {
			b.found = append(b.found, d)
			b.domain(d.domain)
		}
	}
	if err := b.build(); err != nil {
		return tb, fmt.Errorf("read the Thunderbolt bus: %w", err)
	}
	for _, d := range b.domains {
		tb.Domains = append(tb.Domains, *d)
	}
	slices.SortFunc(tb.Domains, func(x, y host.Domain) int {
		return cmp.Or(cmp.Compare(len(x.ID), len(y.ID)), cmp.Compare(x.ID, y.ID))
	})
	return tb, nil
}

// builder collects domains while the bus is read.
type builder struct {
	tree
	domains    map[int]*host.Domain
	interfaces map[device]string // of XDomains
	found      []device
}

func (b *builder) domain(i int) *host.Domain {
	if b.domains[i] == nil {
		b.domains[i] = &host.Domain{ID: strconv.Itoa(i)}
	}
	return b.domains[i]
}

func (b *builder) build() error {
	for i, dom := range b.domains {
		if err := b.describe(i, dom); err != nil {
			return err
		}
	}
	slices.SortFunc(b.found, func(x, y device) int {
		return cmp.Or(cmp.Compare(x.domain, y.domain), cmp.Compare(x.route, y.route), cmp.Compare(x.service, y.service))
	})
	services := map[device][]device{}
	for _, d := range b.found {
		if d.service >= 0 {
			services[d.owner()] = append(services[d.owner()], d)
		}
	}
	for _, d := range b.found {
		if d.service >= 0 || d.route == hostRoute {
			continue
		}
		if err := b.add(d, services[d]); err != nil {
			return err
		}
	}
	return nil
}

// describe fills in what concerns the domain and its own router.
func (b *builder) describe(i int, dom *host.Domain) error {
	name := fmt.Sprintf("domain%d", i)
	d, err := b.attrs(name, "security", "iommu_dma_protection")
	if err != nil {
		return err
	}
	router, err := b.attrs(device{i, hostRoute, -1}.String(), "unique_id", "generation")
	if err != nil {
		return err
	}
	dom.Security = d["security"]
	dom.IOMMU = d["iommu_dma_protection"] == "1"
	dom.UUID = strings.ToLower(router["unique_id"])
	if g, err := strconv.ParseUint(router["generation"], 10, 8); err == nil {
		dom.Generation = int(g)
	}
	return nil
}

// add reads one device: a peer or something else.
func (b *builder) add(d device, services []device) error {
	name, dom := d.String(), b.domain(d.domain)
	m, err := b.attrs(name, "uevent", "authorized", "vendor_name", "device_name")
	if err != nil {
		return err
	}
	if !isXDomain(m) {
		if b.there(name) {
			dom.Others = append(dom.Others, host.Device{
				Port: name, Vendor: m["vendor_name"], Name: m["device_name"],
				Authorized: m["authorized"] != "" && m["authorized"] != "0",
			})
		}
		return nil
	}
	x, err := b.xdomain(d, m, dom.Generation, services)
	if err != nil {
		return err
	}
	// The driver takes the attributes away before the device (device_del): one
	// without a UUID is going, or not quite there.
	if x.RemoteUUID != "" && b.there(name) {
		dom.Peers = append(dom.Peers, x)
	}
	return nil
}

// isXDomain tells another machine from a router. Kernels before 5.8 write no
// DEVTYPE; there only routers have something to authorize.
func isXDomain(m map[string]string) bool {
	switch deviceType(m["uevent"]) {
	case "thunderbolt_xdomain":
		return true
	case "":
		return m["authorized"] == ""
	}
	return false
}

func (b *builder) there(name string) bool {
	_, err := os.Stat(filepath.Join(b.devices(), name))
	return err == nil
}

func (b *builder) xdomain(d device, m map[string]string, generation int, services []device) (host.XDomain, error) {
	link, err := b.attrs(d.String(), "unique_id", "rx_speed", "tx_speed", "rx_lanes", "tx_lanes")
	if err != nil {
		return host.XDomain{}, err
	}
	x := host.XDomain{
		Port: d.String(), RemoteUUID: strings.ToLower(link["unique_id"]),
		Vendor: m["vendor_name"], Device: m["device_name"],
		RxLanes: parseLanes(link["rx_lanes"]), TxLanes: parseLanes(link["tx_lanes"]),
		BehindHub: d.behindHub(), Hops: d.hops(), Interface: b.interfaces[d],
	}
	x.RxGbps = parseSpeed(link["rx_speed"]) * float64(x.RxLanes)
	x.TxGbps = parseSpeed(link["tx_speed"]) * float64(x.TxLanes)
	if capable := capableGbps[generation]; capable > 0 {
		x.CapableGbps = max(capable, x.RxGbps, x.TxGbps)
	}
	for _, s := range services {
		v, err := b.attrs(s.String(), "key", "prtcid")
		if err != nil {
			return host.XDomain{}, err
		}
		id, err := strconv.ParseUint(v["prtcid"], 10, 32)
		if err != nil || v["key"] == "" {
			continue // went away, or announces nothing that we could name
		}
		if x.Services == nil {
			x.Services = map[string]uint32{}
		}
		if _, twice := x.Services[v["key"]]; !twice {
			x.Services[v["key"]] = uint32(id)
		}
	}
	return x, nil
}
