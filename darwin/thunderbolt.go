package darwin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"tbcluster/host"
)

// profile is the answer of `system_profiler SPThunderboltDataType -json`.
type profile struct {
	Buses []item `json:"SPThunderboltDataType"`
}

// item is a bus or what hangs on one. Keys may be missing.
type item struct {
	Name       string    `json:"_name"`
	Items      []item    `json:"_items"`
	DeviceName string    `json:"device_name_key"`
	VendorName string    `json:"vendor_name_key"`
	DomainUUID string    `json:"domain_uuid_key"`
	Receptacle tag       `json:"receptacle_1_tag"`
	Services   []service `json:"services_title"`
}

type tag struct {
	ID     string `json:"receptacle_id_key"`
	Speed  string `json:"current_speed_key"`
	Status string `json:"receptacle_status_key"`
}

type service struct {
	Name     string `json:"_name"`
	Protocol int64  `json:"protocol_id_key"`
	Key      string `json:"service_key_key"`
}

// maxNesting bounds hubs behind hubs: USB4 routes have at most 7 hops.
const maxNesting = 16

// wellKnown are protocol IDs whose key macOS does not print, or garbles.
var wellKnown = map[int64]string{
	1:     "network",
	64087: "rdma", // 0xFA57
}

// parseProfile reads the answer; interfaces are those of parseHardwarePorts.
func parseProfile(text []byte, interfaces map[string]string) (host.Thunderbolt, error) {
	var p profile
	if err := json.Unmarshal(text, &p); err != nil {
		return host.Thunderbolt{}, fmt.Errorf("system_profiler: %w", err)
	}
	tb := host.Thunderbolt{DriverLoaded: len(p.Buses) > 0}
	capable := idleCapability(p.Buses)
	for _, bus := range p.Buses {
		d := host.Domain{ID: busNumber(bus), UUID: strings.ToLower(bus.DomainUUID)}
		w := walker{domain: &d, bus: bus, capable: capable, device: interfaces[thunderboltPort(bus.Receptacle.ID)]}
		if err := w.walk(bus.Items, 0); err != nil {
			return host.Thunderbolt{}, err
		}
		tb.Domains = append(tb.Domains, d)
	}
	return tb, nil
}

// busNumber is N of "thunderboltusb4_bus_N", else the whole name.
func busNumber(bus item) string {
	if _, n, ok := strings.Cut(bus.Name, "_bus_"); ok {
		return n
	}
	return bus.Name
}

// thunderboltPort is how networksetup calls the port of a receptacle. Receptacle
// numbers, not the order of interfaces, tell which is which (en1, en6, en2 has
// been seen).
func thunderboltPort(receptacle string) string { return "Thunderbolt " + receptacle }

// walker collects what hangs on one bus.
type walker struct {
	domain  *host.Domain
	bus     item
	capable float64
	device  string
}

func (w walker) walk(items []item, depth int) error {
	if depth > maxNesting {
		return errors.New("system_profiler: devices nested without end")
	}
	for _, i := range items {
		if i.DomainUUID == "" {
			w.domain.Others = append(w.domain.Others, host.Device{
				Port: w.bus.Receptacle.ID, Vendor: i.VendorName, Name: firstOf(i.DeviceName, i.Name), Authorized: true,
			})
		} else {
			w.domain.Peers = append(w.domain.Peers, w.peer(i, depth))
		}
		if err := w.walk(i.Items, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (w walker) peer(i item, depth int) host.XDomain {
	speed, _ := parseSpeed(w.bus.Receptacle.Speed)
	x := host.XDomain{
		Port: w.bus.Receptacle.ID, RemoteUUID: strings.ToLower(i.DomainUUID),
		Vendor: i.VendorName, Device: firstOf(i.DeviceName, i.Name),
		RxGbps: speed, TxGbps: speed, BehindHub: depth > 0, Hops: depth + 1, Interface: w.device,
	}
	if w.capable > 0 {
		x.CapableGbps = max(w.capable, speed)
	}
	for _, s := range i.Services {
		if s.Protocol < 0 || s.Protocol > 1<<32-1 {
			continue
		}
		if key := s.key(); key != "" {
			if x.Services == nil {
				x.Services = map[string]uint32{}
			}
			x.Services[key] = uint32(s.Protocol)
		}
	}
	return x
}

// key is the service's key where it can be read, else what macOS calls it.
func (s service) key() string {
	if k, ok := wellKnown[s.Protocol]; ok {
		return k
	}
	for _, r := range s.Key {
		if r > unicode.MaxASCII || !unicode.IsPrint(r) {
			return s.Name
		}
	}
	return firstOf(s.Key, s.Name)
}

// parseSpeed parses "80 Gb/s" and "Up to 120 Gb/s"; idle is true for the
// latter, which is what a port without a cable could do.
func parseSpeed(s string) (gbps float64, idle bool) {
	s, idle = strings.CutPrefix(s, "Up to ")
	number, unit, _ := strings.Cut(s, " ")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || unit != "Gb/s" || !(v > 0 && v < 1e6) {
		return 0, false
	}
	return v, idle
}

// idleCapability is what the ports of this Mac can do each way, as its idle
// ports tell it; 0 where none is idle, since a port in use does not say. All
// Thunderbolt ports of a Mac have been alike so far. 120 is three lanes of four
// one way: both ways it is 80.
func idleCapability(buses []item) float64 {
	var best float64
	for _, b := range buses {
		if v, idle := parseSpeed(b.Receptacle.Speed); idle {
			if v == 120 {
				v = 80
			}
			best = max(best, v)
		}
	}
	return best
}

func firstOf(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// parseHardwarePorts parses `networksetup -listallhardwareports` into devices
// by port name.
func parseHardwarePorts(text string) map[string]string {
	ports := map[string]string{}
	name := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if n, ok := strings.CutPrefix(line, "Hardware Port: "); ok {
			name = n
			continue
		}
		if d, ok := strings.CutPrefix(line, "Device: "); ok && name != "" {
			ports[name] = d
			name = ""
		}
	}
	return ports
}

// cables are the devices of Thunderbolt ports among hardware ports: those of
// "Thunderbolt N", not the bridge.
func cables(ports map[string]string) map[string]bool {
	devices := map[string]bool{}
	for name, device := range ports {
		n, ok := strings.CutPrefix(name, "Thunderbolt ")
		if _, err := strconv.ParseUint(n, 10, 8); ok && err == nil {
			devices[device] = true
		}
	}
	return devices
}

// Thunderbolt implements host.Host.
func (m *mac) Thunderbolt(ctx context.Context) (host.Thunderbolt, error) {
	ports, err := m.run.Run(ctx, "networksetup", "-listallhardwareports")
	if err != nil {
		return host.Thunderbolt{}, err
	}
	answer, err := m.askProfiler(ctx)
	if err != nil {
		return host.Thunderbolt{}, err
	}
	return parseProfile(answer, parseHardwarePorts(string(ports)))
}

func (m *mac) askProfiler(ctx context.Context) ([]byte, error) {
	text, err := m.run.Run(ctx, "ifconfig", "-a")
	if err != nil {
		return nil, err
	}
	state := linkStates(parseIfconfig(string(text)))
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.clock.Now()
	age := now.Sub(m.asked)
	if m.profile != nil && state == m.state && age >= 0 && age < profileAge {
		return m.profile, nil
	}
	answer, err := m.run.Run(ctx, "system_profiler", "SPThunderboltDataType", "-json")
	if err != nil {
		return nil, err
	}
	m.profile, m.asked, m.state = answer, now, state
	return answer, nil
}
