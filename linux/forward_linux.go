package linux

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"tbcluster/host"
)

// Attributes of RTM_SETLINK within IFLA_AF_SPEC: IFLA_INET_CONF of
// <linux/if_link.h> and IPV4_DEVCONF_FORWARDING of <linux/ip.h>. By netlink it
// works where /proc/sys is read-only, as in a hardened service.
const (
	inetConf       = 1
	confForwarding = 1
)

func (m *machine) forward(_ context.Context, c host.Change) error {
	on, err := m.forwards(c.Interface)
	if err != nil || on {
		return err
	}
	return m.setForwarding(c.Interface, 1)
}

func (m *machine) forwardNoMore(_ context.Context, c host.Change) error {
	if c.WasOn {
		return nil
	}
	return lost(m.setForwarding(c.Interface, 0))
}

// forwards tells whether what arrives by an interface is passed on.
func (m *machine) forwards(iface string) (bool, error) {
	text, err := readText(m.proc, "sys/net/ipv4/conf", iface, "forwarding")
	return text == "1", err
}

func (m *machine) setForwarding(iface string, to uint32) error {
	l, err := find(iface)
	if err != nil {
		return err
	}
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(l.Attrs().Index)
	req.AddData(msg)
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC|unix.NLA_F_NESTED, nil)
	inet := spec.AddRtAttr(unix.AF_INET|unix.NLA_F_NESTED, nil)
	conf := inet.AddRtAttr(inetConf|unix.NLA_F_NESTED, nil)
	conf.AddRtAttr(confForwarding, nl.Uint32Attr(to))
	req.AddData(spec)
	_, err = req.Execute(unix.NETLINK_ROUTE, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("%s has no IPv4 yet: %w", iface, err)
	}
	return noInterface(iface, err)
}
