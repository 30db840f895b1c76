package state

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Device names, as drivers/thunderbolt makes them: domain.c and switch.c for
// domains and routers ("0-301"), xdomain.c for peers and their services.
var (
	domainName  = regexp.MustCompile(`^domain([0-9]{1,6})$`)
	deviceName  = regexp.MustCompile(`^([0-9]{1,6})-([0-9a-f]{1,16})$`)
	serviceName = regexp.MustCompile(`^([0-9]{1,6}-[0-9a-f]{1,16})\.[0-9]{1,6}$`)
)

// Read reads the state from a sysfs, "/sys". What comes or goes meanwhile is in
// it or not; what is in it was there.
func Read(sysfs string) (State, error) {
	r := reader{bus: filepath.Join(sysfs, "bus/thunderbolt/devices")}
	entries, err := os.ReadDir(r.bus)
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("list the devices of the Thunderbolt bus: %w", err)
	}
	s := State{Driver: true}
	domains := map[int]*Domain{}
	domain := func(number string) *Domain {
		n, err := strconv.Atoi(number)
		if err != nil {
			return nil // the patterns let digits through, and not many
		}
		if domains[n] == nil {
			domains[n] = &Domain{Index: n}
		}
		return domains[n]
	}
	services := map[string][]Service{}
	for _, e := range entries {
		if m := serviceName.FindStringSubmatch(e.Name()); m != nil {
			if v, ok := r.service(e.Name()); ok {
				services[m[1]] = append(services[m[1]], v)
			}
		}
	}
	for _, e := range entries {
		name := e.Name()
		if m := domainName.FindStringSubmatch(name); m != nil {
			d := domain(m[1])
			d.Security, d.IOMMU = r.attr(name, "security"), r.attr(name, "iommu_dma_protection") == "1"
			continue
		}
		m := deviceName.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		d := domain(m[1])
		switch {
		case m[2] == "0":
			d.UUID, d.Generation = r.attr(name, "unique_id"), r.number(name, "generation")
		case strings.Contains(r.attr(name, "uevent"), "DEVTYPE=thunderbolt_xdomain"):
			if p, ok := r.peer(name); ok {
				p.Services = services[name]
				d.Peers = append(d.Peers, p)
			}
		case r.there(name):
			d.Others = append(d.Others, name)
		}
	}
	for _, d := range domains {
		s.Domains = append(s.Domains, *d)
	}
	s.sort()
	return s, r.err
}

// reader reads attributes. It keeps the first error that is not that of
// something that has just gone.
type reader struct {
	bus string
	err error
}

func (r *reader) attr(elem ...string) string {
	b, err := os.ReadFile(filepath.Join(append([]string{r.bus}, elem...)...))
	if err != nil {
		r.note(err)
		return ""
	}
	return strings.TrimSpace(string(b))
}

// note keeps an error, unless it is how sysfs says that something is not there
// any more: ENOENT when it was opened, ENODEV when it was read, EINVAL for the
// carrier of an interface that is down.
func (r *reader) note(err error) {
	for _, gone := range []error{fs.ErrNotExist, syscall.ENODEV, syscall.EINVAL, syscall.ENOTDIR} {
		if errors.Is(err, gone) {
			return
		}
	}
	if r.err == nil {
		r.err = err
	}
}

// number reads the number at the beginning of an attribute.
func (r *reader) number(elem ...string) int { return int(r.real(elem...)) }

func (r *reader) real(elem ...string) float64 {
	word, _, _ := strings.Cut(r.attr(elem...), " ")
	v, err := strconv.ParseFloat(word, 64)
	if err != nil {
		return 0
	}
	return v
}

func (r *reader) there(name string) bool {
	_, err := os.Stat(filepath.Join(r.bus, name))
	return err == nil
}

func (r *reader) peer(name string) (Peer, bool) {
	st, err := os.Stat(filepath.Join(r.bus, name))
	if err != nil {
		return Peer{}, false
	}
	p := Peer{
		Device: name, UUID: r.attr(name, "unique_id"), Vendor: r.attr(name, "vendor_name"), Name: r.attr(name, "device_name"),
		RxLanes: r.number(name, "rx_lanes"), TxLanes: r.number(name, "tx_lanes"),
		RxGbps: r.real(name, "rx_speed"), TxGbps: r.real(name, "tx_speed"),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		p.Inode = sys.Ino
	}
	// device_del takes the attributes away before the device: one without is
	// going.
	return p, p.UUID != ""
}

func (r *reader) service(name string) (Service, bool) {
	v := Service{Device: name, Key: r.attr(name, "key")}
	if target, err := os.Readlink(filepath.Join(r.bus, name, "driver")); err == nil {
		v.Driver = filepath.Base(target)
	}
	nets, err := os.ReadDir(filepath.Join(r.bus, name, "net"))
	if err == nil && len(nets) > 0 {
		net := filepath.Join(name, "net", nets[0].Name())
		flags, err := strconv.ParseUint(r.attr(net, "flags"), 0, 32)
		v.Interface = &Interface{
			Name: nets[0].Name(), MAC: r.attr(net, "address"), MTU: r.number(net, "mtu"),
			Up: err == nil && flags&syscall.IFF_UP != 0, Carrier: r.attr(net, "carrier") == "1",
		}
	}
	return v, v.Key != ""
}

// sort brings everything into one order.
func (s *State) sort() {
	byDevice := func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }
	slices.SortFunc(s.Domains, func(a, b Domain) int { return cmp.Compare(a.Index, b.Index) })
	for _, d := range s.Domains {
		slices.SortFunc(d.Peers, func(a, b Peer) int { return byDevice(a.Device, b.Device) })
		slices.SortFunc(d.Others, byDevice)
		for _, p := range d.Peers {
			slices.SortFunc(p.Services, func(a, b Service) int { return byDevice(a.Device, b.Device) })
		}
	}
}
