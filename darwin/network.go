package darwin

import (
	"context"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"tbcluster/host"
)

// cableMaxMTU is the largest MTU of a Thunderbolt interface on macOS
// (`networksetup -listvalidMTUrange`); 1500 is the default.
const cableMaxMTU = 9000

// mainTable stands for the one routing table of macOS; the number is Linux's.
const mainTable = 254

// parseIfconfig parses `ifconfig -a`. What it does not know it leaves out.
func parseIfconfig(text string) []host.Interface {
	var all []host.Interface
	bridges := map[string]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		if line == "" {
			continue
		}
		if line[0] != '\t' && line[0] != ' ' {
			if i, ok := parseHead(line); ok {
				all = append(all, i)
			}
			continue
		}
		f := strings.Fields(line)
		if len(f) < 2 || len(all) == 0 {
			continue
		}
		i := &all[len(all)-1]
		switch f[0] {
		case "ether":
			i.MAC = f[1]
		case "status:":
			i.Carrier = f[1] == "active"
		case "member:":
			bridges[f[1]] = i.Name
		case "inet", "inet6":
			if p, ok := parseInet(f); ok {
				i.Addresses = append(i.Addresses, p)
			}
		}
	}
	for i := range all {
		all[i].Bridge = bridges[all[i].Name]
	}
	return all
}

// parseHead parses "en0: flags=8863<UP,RUNNING> mtu 1500".
func parseHead(line string) (host.Interface, bool) {
	name, rest, ok := strings.Cut(line, ": flags=")
	if !ok || name == "" || strings.ContainsAny(name, " \t") {
		return host.Interface{}, false
	}
	_, flags, _ := strings.Cut(rest, "<")
	flags, rest, _ = strings.Cut(flags, ">")
	set := strings.Split(flags, ",")
	i := host.Interface{
		Name: name, Up: slices.Contains(set, "UP"), Loopback: slices.Contains(set, "LOOPBACK"),
		// Corrected by "status:", which tunnels and the loopback have not.
		Carrier: slices.Contains(set, "RUNNING"),
	}
	f := strings.Fields(rest)
	for k := 0; k+1 < len(f); k++ {
		if f[k] == "mtu" {
			if n, err := strconv.ParseUint(f[k+1], 10, 31); err == nil {
				i.MTU = int(n)
			}
		}
	}
	return i, true
}

// parseInet parses the fields of "inet A [--> B] netmask 0x…" and of
// "inet6 A%zone prefixlen N …".
func parseInet(f []string) (netip.Prefix, bool) {
	a, err := netip.ParseAddr(f[1])
	if err != nil {
		return netip.Prefix{}, false
	}
	for k := 2; k+1 < len(f); k++ {
		switch f[k] {
		case "netmask":
			m, err := strconv.ParseUint(strings.TrimPrefix(f[k+1], "0x"), 16, 32)
			ones := bits.LeadingZeros32(^uint32(m))
			if err != nil || !a.Is4() || uint32(m) != ^uint32(0)<<(32-ones) {
				return netip.Prefix{}, false
			}
			return netip.PrefixFrom(a, ones), true
		case "prefixlen":
			n, err := strconv.ParseUint(f[k+1], 10, 8)
			if err != nil || n > uint64(a.BitLen()) {
				return netip.Prefix{}, false
			}
			return netip.PrefixFrom(a, int(n)), true
		}
	}
	return netip.Prefix{}, false
}

// linkStates is what changes when a cable is plugged or pulled.
func linkStates(all []host.Interface) string {
	var b strings.Builder
	for _, i := range all {
		fmt.Fprintf(&b, "%s %t %t\n", i.Name, i.Up, i.Carrier)
	}
	return b.String()
}

// counters of one interface.
type counters struct {
	index                                      int
	rxBytes, txBytes, rxErrors, txErrors, drop uint64
}

// parseCounters parses `netstat -ibdn`: of the rows of each interface that with
// "<Link#N>". Its columns end with Ipkts Ierrs Ibytes Opkts Oerrs Obytes Coll
// Drop.
func parseCounters(text string) map[string]counters {
	all := map[string]counters{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 11 {
			continue
		}
		link, ok := strings.CutPrefix(f[2], "<Link#")
		index, err := strconv.ParseUint(strings.TrimSuffix(link, ">"), 10, 31)
		if !ok || err != nil {
			continue
		}
		numbers := make([]uint64, 0, 8)
		for _, s := range f[len(f)-8:] {
			if n, err := strconv.ParseUint(s, 10, 64); err == nil {
				numbers = append(numbers, n)
			}
		}
		if len(numbers) != 8 {
			continue
		}
		// A star marks an interface that is down.
		all[strings.TrimSuffix(f[0], "*")] = counters{
			index: int(index), rxErrors: numbers[1], rxBytes: numbers[2],
			txErrors: numbers[4], txBytes: numbers[5], drop: numbers[7],
		}
	}
	return all
}

// parseRoutes parses `netstat -rn`. Routes to multicast and broadcast are left
// out.
func parseRoutes(text string) []host.Route {
	var all []host.Route
	six := false
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) == 1 && f[0] == "Internet:":
			six = false
			continue
		case len(f) == 1 && f[0] == "Internet6:":
			six = true
			continue
		case len(f) < 4:
			continue
		}
		p, ok := parseDestination(f[0], six)
		// Flags b and m: broadcast and multicast.
		if !ok || p.Addr().IsMulticast() || strings.ContainsAny(f[2], "bm") {
			continue
		}
		r := host.Route{Destination: p, Interface: f[3], Table: mainTable}
		if g, err := netip.ParseAddr(f[1]); err == nil && strings.Contains(f[2], "G") {
			r.Gateway = g
		}
		all = append(all, r)
	}
	return all
}

// parseDestination parses a destination as netstat shortens it: "default",
// "127", "10.0.0/24", "169.254", "fe80::%en0/64".
func parseDestination(s string, six bool) (netip.Prefix, bool) {
	if s == "default" {
		if six {
			return netip.PrefixFrom(netip.IPv6Unspecified(), 0), true
		}
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0), true
	}
	address, length, cut := strings.Cut(s, "/")
	full := 32
	if six {
		full = 128
		address, _, _ = strings.Cut(address, "%")
	} else if octets := strings.Count(address, ".") + 1; octets < 4 {
		full = 8 * octets
		address += strings.Repeat(".0", 4-octets)
	}
	a, err := netip.ParseAddr(address)
	if err != nil || a.Is6() != six {
		return netip.Prefix{}, false
	}
	if cut {
		n, err := strconv.ParseUint(length, 10, 8)
		if err != nil || int(n) > a.BitLen() {
			return netip.Prefix{}, false
		}
		full = int(n)
	}
	return netip.PrefixFrom(a, full).Masked(), true
}

// Network implements host.Host.
func (m *mac) Network(ctx context.Context) (host.Network, error) {
	var out [4]string
	for i, c := range [][]string{
		{"ifconfig", "-a"},
		{"netstat", "-rn"},
		{"netstat", "-ibdn"},
		{"networksetup", "-listallhardwareports"},
	} {
		b, err := m.run.Run(ctx, c[0], c[1:]...)
		if err != nil {
			return host.Network{}, err
		}
		out[i] = string(b)
	}
	n := host.Network{Interfaces: parseIfconfig(out[0]), Routes: parseRoutes(out[1])}
	count := parseCounters(out[2])
	cable := cables(parseHardwarePorts(out[3]))
	for k := range n.Interfaces {
		i := &n.Interfaces[k]
		c := count[i.Name]
		i.Index = c.index
		i.RxBytes, i.TxBytes, i.RxErrors, i.TxErrors, i.TxDropped = c.rxBytes, c.txBytes, c.rxErrors, c.txErrors, c.drop
		if i.Cable = cable[i.Name]; i.Cable {
			i.MaxMTU = cableMaxMTU
		}
	}
	return n, nil
}
