package linux

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"tbcluster/host"
)

const (
	// tableName is our nftables table, of family inet.
	tableName = "tbcluster"
	// routeProtocol marks our routes and addresses, so that those of others are
	// left alone (rtnetlink(7): who made it; 116 is nobody's in rt_protos).
	routeProtocol = 116
	// rawPriority is before connection tracking and address translation.
	rawPriority = -300
)

// commands returns what a person, as root, types for c; nothing for a change
// that is not valid.
func commands(c host.Change) []string {
	if valid(c) != nil {
		return nil
	}
	switch c.Kind {
	case host.ChangeLinkUp:
		return []string{fmt.Sprintf("ip link set dev %s up", c.Interface)}
	case host.ChangeMTU:
		return []string{fmt.Sprintf("ip link set dev %s mtu %d", c.Interface, c.MTU)}
	case host.ChangeAddress:
		return []string{fmt.Sprintf("ip address add %s dev %s", c.Prefix, c.Interface)}
	case host.ChangeRoute:
		return []string{routeCommand(c)}
	case host.ChangeFilter:
		return filterCommands(c)
	case host.ChangeForward:
		return []string{fmt.Sprintf("sysctl -w net.ipv4.conf.%s.forwarding=1", strings.ReplaceAll(c.Interface, ".", "/"))}
	case host.ChangeUnmanage:
		m, _ := managerNamed(c.Manager)
		file := m.path("/run", c.Interface)
		return []string{
			"mkdir -p " + file[:strings.LastIndexByte(file, '/')],
			fmt.Sprintf("printf '%s' > %s", strings.ReplaceAll(m.text(c.Interface), "\n", `\n`), file),
			strings.Join(m.reload, " "),
		}
	}
	return nil
}

func routeCommand(c host.Change) string {
	s := "ip route append " + c.Prefix.String()
	if c.Prefix.Addr().Is6() {
		s = "ip -6 route append " + c.Prefix.String()
	}
	if c.Gateway.IsValid() {
		s += " via " + c.Gateway.String()
	}
	s += " dev " + c.Interface
	if c.Source.IsValid() {
		s += " src " + c.Source.String()
	}
	if c.Metric > 0 {
		s += fmt.Sprintf(" metric %d", c.Metric)
	}
	return s
}

// filterRules is the table as nft(8) reads it, in one line. What the netlink
// messages make is the same; a test compares the two.
func filterRules(c host.Change) string {
	four, six := split(c.Addresses)
	forwarding := ""
	if len(c.Forwarders) > 0 {
		forwarding = fmt.Sprintf(" %s; chain forward { type filter hook forward priority 0; policy accept; "+
			"iifname @forwarders oifname != @interfaces counter drop; };", setText("forwarders", "ifname", quote(c.Forwarders)))
	}
	return fmt.Sprintf("table inet %s { %s; %s; %s; "+
		"chain prerouting { type filter hook prerouting priority %d; policy accept; "+
		`iifname "lo" accept; iifname @interfaces accept; `+
		"ip daddr @addresses4 counter drop; ip6 daddr @addresses6 counter drop; };%s }",
		tableName,
		setText("interfaces", "ifname", quote(c.Interfaces)),
		setText("addresses4", "ipv4_addr", texts(four)),
		setText("addresses6", "ipv6_addr", texts(six)),
		rawPriority, forwarding)
}

// quote is a sorted set of interfaces in nft's words.
func quote(names []string) []string {
	var out []string
	for _, i := range sortedSet(names) {
		out = append(out, `"`+i+`"`)
	}
	return out
}

func setText(name, kind string, elements []string) string {
	if len(elements) == 0 {
		return fmt.Sprintf("set %s { type %s; }", name, kind)
	}
	return fmt.Sprintf("set %s { type %s; elements = { %s } }", name, kind, strings.Join(elements, ", "))
}

func filterCommands(c host.Change) []string {
	return []string{
		"nft add table inet " + tableName,
		"nft delete table inet " + tableName,
		"nft '" + filterRules(c) + "'",
	}
}

// split returns the distinct addresses of each family, sorted.
func split(addresses []netip.Addr) (four, six []netip.Addr) {
	for _, a := range addresses {
		if a.Is4() {
			four = append(four, a)
		} else {
			six = append(six, a)
		}
	}
	for _, list := range []*[]netip.Addr{&four, &six} {
		slices.SortFunc(*list, netip.Addr.Compare)
		*list = slices.Compact(*list)
	}
	return four, six
}

func sortedSet(list []string) []string {
	s := slices.Clone(list)
	slices.Sort(s)
	return slices.Compact(s)
}

func texts(addresses []netip.Addr) []string {
	s := make([]string, len(addresses))
	for i, a := range addresses {
		s[i] = a.String()
	}
	return s
}
