package linux

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tbcluster/host"
)

// netDriver is the kernel's own network driver for cables, as its directory in
// sysfs is called.
const netDriver = "thunderbolt-net"

// Diagnose implements host.Host.
func (m *machine) Diagnose(_ context.Context, q host.Query) (host.Diagnosis, error) {
	var d host.Diagnosis
	if err := (tree{m.sysfs}).diagnose(&d); err != nil {
		return d, err
	}
	var err error
	if d.Offloads, err = m.offloads(); err != nil {
		return d, err
	}
	if d.RDMA, err = rdmaPorts(m.sysfs); err != nil {
		return d, fmt.Errorf("read RDMA devices: %w", err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return d, fmt.Errorf("limit of locked memory: %w", err)
	}
	d.Memlock = host.Limit{Known: true, Unlimited: limit.Cur == unix.RLIM_INFINITY, Bytes: limit.Cur}
	d.Ways, err = ways(q.Towards)
	return d, err
}

// diagnose tells how the Thunderbolt drivers are set.
func (t tree) diagnose(d *host.Diagnosis) error {
	if _, err := os.Stat(filepath.Join(t.root, "bus/thunderbolt")); err != nil {
		if vanished(err) {
			return nil
		}
		return fmt.Errorf("read the Thunderbolt bus: %w", err)
	}
	there := false
	// A driver that is built in has no module, one that was loaded both.
	for _, p := range []string{"module/thunderbolt_net", "bus/thunderbolt/drivers/" + netDriver} {
		_, err := os.Stat(filepath.Join(t.root, p))
		if err != nil && !vanished(err) {
			return fmt.Errorf("look for thunderbolt_net: %w", err)
		}
		there = there || err == nil
	}
	d.NoNetModule = !there
	hosts, err := readText(t.root, "module/thunderbolt/parameters/xdomain")
	if err != nil {
		return fmt.Errorf("read the parameters of thunderbolt: %w", err)
	}
	d.HostsOff = hosts == "N" || hosts == "0"
	return nil
}

// offloads returns what Diagnosis.Offloads says.
func (m *machine) offloads() (map[string][]string, error) {
	cables, err := tree{m.sysfs}.interfaces()
	if err != nil {
		return nil, err
	}
	var out map[string][]string
	for name := range cables {
		target, err := os.Readlink(filepath.Join(m.sysfs, "class/net", name, "device/driver"))
		if err != nil || filepath.Base(target) != netDriver {
			continue // not bound to it, or just going away
		}
		passes, err := readText(m.proc, "sys/net/ipv4/conf", name, "forwarding")
		if err != nil {
			return nil, fmt.Errorf("whether %s passes packets on: %w", name, err)
		}
		if passes != "1" {
			continue
		}
		on, err := segmentation(name)
		if err != nil {
			return nil, fmt.Errorf("features of %s: %w", name, err)
		}
		if len(on) > 0 {
			if out == nil {
				out = map[string][]string{}
			}
			out[name] = on
		}
	}
	return out, nil
}

// ethtoolValue is struct ethtool_value (linux/ethtool.h).
type ethtoolValue struct{ cmd, data uint32 }

// ethtoolRequest is struct ifreq with a pointer to data (linux/if.h).
type ethtoolRequest struct {
	name [unix.IFNAMSIZ]byte
	data *ethtoolValue
	_    [16]byte
}

// ethtool carries out one command on an interface (ethtool's old interface, an
// ioctl: what is asked for is one number).
func ethtool(name string, v *ethtoolValue) (err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	r := ethtoolRequest{data: v}
	if copy(r.name[:unix.IFNAMSIZ-1], name) != len(name) {
		return unix.EINVAL
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r))); e != 0 {
		return e
	}
	return nil
}

// segmentation returns which segmentation offloads of an interface are on, none
// where there is no such interface (any more).
func segmentation(name string) (on []string, err error) {
	for _, f := range []struct {
		name string
		cmd  uint32
	}{{"tso", unix.ETHTOOL_GTSO}, {"gso", unix.ETHTOOL_GGSO}} {
		v := ethtoolValue{cmd: f.cmd}
		switch err := ethtool(name, &v); {
		case errors.Is(err, unix.ENODEV):
			return nil, nil
		case errors.Is(err, unix.EOPNOTSUPP):
		case err != nil:
			return nil, err
		case v.data != 0:
			on = append(on, f.name)
		}
	}
	return on, nil
}

// rdmaPorts reads the ports of RDMA devices
// (Documentation/ABI/stable/sysfs-class-infiniband).
func rdmaPorts(sysfs string) ([]host.RDMAPort, error) {
	devices, err := names(sysfs, "class/infiniband")
	if err != nil {
		return nil, err
	}
	var out []host.RDMAPort
	for _, dev := range devices {
		ports, err := names(sysfs, "class/infiniband", dev, "ports")
		if err != nil {
			return nil, err
		}
		for _, p := range ports {
			n, err := parseIndex(p)
			if err != nil {
				continue
			}
			dir := filepath.Join(sysfs, "class/infiniband", dev, "ports", p)
			state, err := readText(dir, "state")
			if err != nil {
				return nil, err
			}
			iface, err := rdmaInterface(filepath.Join(dir, "gid_attrs/ndevs"))
			if err != nil {
				return nil, err
			}
			if state == "" {
				continue // just going away
			}
			// "4: ACTIVE"
			number, word, _ := strings.Cut(state, ":")
			out = append(out, host.RDMAPort{Device: dev, Port: n, State: strings.TrimSpace(word), Active: strings.TrimSpace(number) == "4", Interface: iface})
		}
	}
	return out, nil
}

// rdmaInterface returns the network interface of the first GID that has one.
func rdmaInterface(dir string) (string, error) {
	list, err := names(dir)
	if err != nil {
		return "", err
	}
	for _, gid := range list {
		b, err := os.ReadFile(filepath.Join(dir, gid))
		// An unused entry answers EINVAL.
		if errors.Is(err, unix.EINVAL) || err != nil && vanished(err) {
			continue
		}
		if err != nil {
			return "", err
		}
		if name := strings.TrimSpace(string(b)); name != "" {
			return name, nil
		}
	}
	return "", nil
}

// ways asks the kernel which way it takes to each address.
func ways(to []netip.Addr) ([]host.Way, error) {
	var out []host.Way
	for _, a := range to {
		w := host.Way{To: a}
		routes, err := netlink.RouteGet(a.AsSlice())
		switch {
		case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
			out = append(out, w) // no route, or one that forbids
			continue
		case err != nil:
			return nil, fmt.Errorf("way to %s: %w", a, err)
		}
		for _, r := range routes {
			l, err := netlink.LinkByIndex(r.LinkIndex)
			if err != nil {
				continue // it went away meanwhile
			}
			w.Interface = l.Attrs().Name
			w.Gateway = gateway(r.Gw, r.Via)
		}
		out = append(out, w)
	}
	return out, nil
}

// Firewalls implements host.Host: the chains of nftables that filter what comes
// in and drop something. What iptables and the firewalls of distributions do
// today is chains of nftables too.
func (m *machine) Firewalls(context.Context) ([]host.Firewall, error) {
	conn, err := filterConn()
	if err != nil {
		return nil, fmt.Errorf("packet filters: %w", err)
	}
	chains, err := conn.ListChains()
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("%w: packet filters: %w", host.ErrPermission, err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.ENOENT):
		return nil, nil // a kernel without nftables
	case err != nil:
		return nil, fmt.Errorf("packet filters: %w", err)
	}
	var out []host.Firewall
	for _, c := range chains {
		if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookInput || c.Table.Name == tableName && c.Table.Family == nftables.TableFamilyINet {
			continue
		}
		drops := c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop
		if !drops {
			if drops, err = dropsSome(conn, chains, c, nil); err != nil {
				return nil, fmt.Errorf("packet filters: chain %s of table %s: %w", c.Name, c.Table.Name, err)
			}
		}
		if !drops {
			continue
		}
		family := familyNames[c.Table.Family]
		out = append(out, host.Firewall{
			Tool: toolOf(chains, c), Family: family, Table: c.Table.Name, Chain: c.Name,
			Name: fmt.Sprintf("chain %s of the nftables table %s %s", c.Name, family, c.Table.Name),
		})
	}
	return out, nil
}

var familyNames = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
	nftables.TableFamilyBridge: "bridge", nftables.TableFamilyARP: "arp", nftables.TableFamilyNetdev: "netdev",
}

// toolOf tells by the names that it uses who made a chain.
func toolOf(chains []*nftables.Chain, c *nftables.Chain) string {
	if c.Table.Name == "firewalld" {
		return "firewalld"
	}
	for _, o := range chains {
		if o.Table.Name == c.Table.Name && o.Table.Family == c.Table.Family && strings.HasPrefix(o.Name, "ufw") {
			return "ufw"
		}
	}
	return "nft"
}

// dropsSome reports whether a chain, or one that it goes on to, has a rule that
// drops or refuses.
func dropsSome(conn *nftables.Conn, chains []*nftables.Chain, c *nftables.Chain, been []string) (bool, error) {
	if slices.Contains(been, c.Name) {
		return false, nil
	}
	been = append(been, c.Name)
	rules, err := conn.GetRules(c.Table, c)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return false, nil // gone meanwhile
		}
		return false, err
	}
	for _, r := range rules {
		for _, e := range r.Exprs {
			next := ""
			switch e := e.(type) {
			case *expr.Reject:
				return true, nil
			case *expr.Target: // of iptables
				if e.Name == "REJECT" || e.Name == "DROP" {
					return true, nil
				}
			case *expr.Verdict:
				switch e.Kind {
				case expr.VerdictDrop:
					return true, nil
				case expr.VerdictJump, expr.VerdictGoto:
					next = e.Chain
				}
			}
			if next == "" {
				continue
			}
			i := slices.IndexFunc(chains, func(o *nftables.Chain) bool {
				return o.Name == next && o.Table.Name == c.Table.Name && o.Table.Family == c.Table.Family
			})
			if i < 0 {
				continue
			}
			if drops, err := dropsSome(conn, chains, chains[i], been); drops || err != nil {
				return drops, err
			}
		}
	}
	return false, nil
}
