package darwin

import (
	"context"
	"errors"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"tbcluster/host"
)

// healthAge is how long what Diagnose found holds: it takes several programs,
// one of which opens RDMA devices.
const healthAge = time.Minute

// resetters are launchd services that set up cables' interfaces in their own
// way, again and again: Exo's destroys bridge0 and asks for DHCP on each port.
var resetters = []string{"io.exo.networksetup"}

// Diagnose implements host.Host.
func (m *mac) Diagnose(ctx context.Context, q host.Query) (host.Diagnosis, error) {
	d, err := m.diagnose(ctx)
	for _, a := range q.Towards {
		w, werr := RouteTo(ctx, m.run, a)
		switch {
		case errors.Is(werr, ErrNoRoute):
			w = Way{}
		case werr != nil:
			err = errors.Join(err, werr)
			continue
		}
		d.Ways = append(d.Ways, host.Way{To: a, Interface: w.Interface, Gateway: w.Gateway})
	}
	return d, err
}

func (m *mac) diagnose(ctx context.Context) (host.Diagnosis, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.clock.Now()
	if age := now.Sub(m.diagnosed); !m.diagnosed.IsZero() && age >= 0 && age < healthAge {
		return m.health, nil
	}
	var d host.Diagnosis
	var errs []error
	ports, err := m.rdmaPorts(ctx)
	errs = append(errs, err)
	d.RDMA = ports
	d.Leases, err = m.leases(ctx)
	errs = append(errs, err)
	for _, label := range resetters {
		_, err := m.run.Run(ctx, "launchctl", "print", "system/"+label)
		switch {
		case err == nil:
			d.Resetters = append(d.Resetters, label)
		case strings.Contains(err.Error(), "Could not find service"):
		default:
			errs = append(errs, err)
		}
	}
	m.health, m.diagnosed = d, now
	return d, errors.Join(errs...)
}

// rdmaPorts asks the verbs programs, which are there from macOS 26.2 on.
func (m *mac) rdmaPorts(ctx context.Context) ([]host.RDMAPort, error) {
	out, err := m.run.Run(ctx, "ibv_devices")
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, err
	case len(parseDevices(string(out))) == 0:
		return nil, nil
	}
	if out, err = m.run.Run(ctx, "ibv_devinfo"); err != nil {
		return nil, err
	}
	return parseDevinfo(string(out)), nil
}

// parseDevices returns the names that `ibv_devices` lists.
func parseDevices(text string) (names []string) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 2 || len(f[1]) != 16 {
			continue
		}
		if _, err := strconv.ParseUint(f[1], 16, 64); err == nil {
			names = append(names, f[0])
		}
	}
	return names
}

// parseDevinfo parses `ibv_devinfo`. A device is named by the interface of its
// port: rdma_en2.
func parseDevinfo(text string) (ports []host.RDMAPort) {
	device := ""
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "hca_id:":
			device = f[1]
		case "port:":
			n, err := strconv.ParseUint(f[1], 10, 8)
			if err != nil || device == "" {
				continue
			}
			p := host.RDMAPort{Device: device, Port: int(n)}
			if name, ok := strings.CutPrefix(device, "rdma_"); ok {
				p.Interface = name
			}
			ports = append(ports, p)
		case "state:":
			if len(ports) == 0 || ports[len(ports)-1].State != "" {
				continue
			}
			p := &ports[len(ports)-1]
			p.State = strings.TrimPrefix(f[1], "PORT_")
			p.Active = p.State == "ACTIVE"
		}
	}
	return ports
}

// leases returns the bridges of cables that have an address by DHCP.
func (m *mac) leases(ctx context.Context) ([]string, error) {
	out, err := m.run.Run(ctx, "ifconfig", "-a")
	if err != nil {
		return nil, err
	}
	hardware, err := m.run.Run(ctx, "networksetup", "-listallhardwareports")
	if err != nil {
		return nil, err
	}
	cable := cables(parseHardwarePorts(string(hardware)))
	var bridges []string
	for _, i := range parseIfconfig(string(out)) {
		if cable[i.Name] && i.Bridge != "" && !slices.Contains(bridges, i.Bridge) {
			bridges = append(bridges, i.Bridge)
		}
	}
	var leased []string
	for _, b := range bridges {
		// It ends with status 1 and says nothing where there is no lease.
		packet, err := m.run.Run(ctx, "ipconfig", "getpacket", b)
		if err == nil && strings.Contains(string(packet), "lease_time") {
			leased = append(leased, b)
		}
	}
	return leased, ctx.Err()
}

// Firewalls implements host.Host: the application firewall.
func (m *mac) Firewalls(ctx context.Context) ([]host.Firewall, error) {
	out, err := m.run.Run(ctx, "socketfilterfw", "--getglobalstate")
	if errors.Is(err, exec.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	switch state := parseGlobalState(string(out)); state {
	case 1:
		return []host.Firewall{{Tool: "macOS", Name: "the application firewall of macOS"}}, nil
	case 2:
		return []host.Firewall{{Tool: "macOS", Name: "the application firewall of macOS, which blocks all incoming connections"}}, nil
	}
	return nil, nil
}

// parseGlobalState parses "Firewall is enabled. (State = 1)": 0 is off, 2
// blocks everything.
func parseGlobalState(text string) int {
	_, rest, ok := strings.Cut(text, "(State = ")
	number, _, ok2 := strings.Cut(rest, ")")
	n, err := strconv.ParseUint(number, 10, 8)
	if !ok || !ok2 || err != nil {
		return 0
	}
	return int(n)
}
