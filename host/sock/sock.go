package sock

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// BindOptions says from where a connection leaves.
type BindOptions struct {
	// Interface is the only interface that packets of the connection leave and
	// arrive by; "" leaves it to the routing table.
	Interface string
	// Source is the local address; the kernel's choice where it is not valid.
	// Its zone, if it has one, is kept.
	Source netip.Addr
	// DeadAfter ends the connection when the other side has acknowledged
	// nothing for that long (see SetDeadAfter); 0 leaves the system's default.
	DeadAfter time.Duration
}

// DialContext connects to addr ("host:port") over network ("tcp", "tcp4",
// "tcp6", "udp", …) from where o says.
func DialContext(ctx context.Context, network, addr string, o BindOptions) (net.Conn, error) {
	addr, err := zoneNow(addr)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Control: Control(o.Interface)}
	if o.Source.IsValid() {
		local, err := localAddr(network, o.Source)
		if err != nil {
			return nil, err
		}
		d.LocalAddr = local
	}
	if o.DeadAfter > 0 {
		d.KeepAlive = -1 // set below, with intervals that fit DeadAfter
	}
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if o.DeadAfter > 0 {
		if err := SetDeadAfter(c, o.DeadAfter); err != nil {
			return nil, closeAfter(c, err)
		}
	}
	return c, nil
}

// Listen listens at addr ("host:port") for connections that arrive by the
// interface iface; "" for any.
func Listen(ctx context.Context, network, addr, iface string) (net.Listener, error) {
	addr, err := zoneNow(addr)
	if err != nil {
		return nil, err
	}
	l := net.ListenConfig{Control: Control(iface)}
	return l.Listen(ctx, network, addr)
}

// zoneNow writes the zone of an address as the number that its interface has
// now. Package net remembers for a minute which number a name had, and an
// interface comes back with another one at every replug: until then nothing
// could be reached over a cable that was pulled and plugged in again.
func zoneNow(addr string) (string, error) {
	a, err := netip.ParseAddrPort(addr)
	if err != nil || a.Addr().Zone() == "" {
		return addr, nil // a name, or an address that is in no zone
	}
	i, err := net.InterfaceByName(a.Addr().Zone())
	if err != nil {
		if _, number := strconv.Atoi(a.Addr().Zone()); number == nil {
			return addr, nil
		}
		return "", fmt.Errorf("interface %s: %w", a.Addr().Zone(), syscall.ENODEV)
	}
	return netip.AddrPortFrom(a.Addr().WithZone(strconv.Itoa(i.Index)), a.Port()).String(), nil
}

// ListenPacket opens a packet socket at addr that sends and receives by the
// interface iface only; "" for any.
func ListenPacket(ctx context.Context, network, addr, iface string) (net.PacketConn, error) {
	l := net.ListenConfig{Control: Control(iface)}
	return l.ListenPacket(ctx, network, addr)
}

// Control returns a function for net.Dialer and net.ListenConfig that binds a
// socket to iface before it is used; it binds nothing where iface is "".
func Control(iface string) func(network, address string, c syscall.RawConn) error {
	if iface == "" {
		return nil
	}
	return func(network, address string, c syscall.RawConn) error {
		var bindErr error
		if err := c.Control(func(fd uintptr) { bindErr = bind(int(fd), network, iface) }); err != nil {
			return err
		}
		if bindErr != nil {
			return fmt.Errorf("bind to interface %s: %w", iface, bindErr)
		}
		return nil
	}
}

// SetDeadAfter makes the system end a TCP connection whose other side has
// acknowledged nothing for d: neither data (TCP_USER_TIMEOUT, or the nearest
// that the system has) nor, while there is nothing to send, keepalive probes.
// Reads and writes then fail with ETIMEDOUT. The system counts in seconds for
// probes: d below 2 s counts as 2 s there.
func SetDeadAfter(c net.Conn, d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("dead after %v: must be positive", d)
	}
	if t, ok := c.(interface{ NetConn() net.Conn }); ok { // TLS
		c = t.NetConn()
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return fmt.Errorf("dead after %v: %T is no socket", d, c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return err
	}
	var optErr error
	if err := raw.Control(func(fd uintptr) { optErr = setDeadAfter(int(fd), d) }); err != nil {
		return err
	}
	return optErr
}

// probePlan splits d into the idle time before the first keepalive probe, the
// time between probes (whole seconds, at least one) and the number of probes
// that may go unanswered.
func probePlan(d time.Duration) (idle, interval, count int) {
	seconds := max(int((d+time.Second-1)/time.Second), 2)
	idle = max(seconds/2, 1)
	interval = max((seconds-idle)/4, 1)
	count = max((seconds-idle)/interval, 1)
	return idle, interval, count
}

func localAddr(network string, a netip.Addr) (net.Addr, error) {
	switch {
	case strings.HasPrefix(network, "tcp"):
		return net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), nil
	case strings.HasPrefix(network, "udp"):
		return net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), nil
	}
	return nil, fmt.Errorf("source address %s: network %q has none", a, network)
}

// Acked reports whether the other machine has acknowledged everything that was
// sent on a TCP connection. Its system does so whatever its program does, so a
// connection without answers that is acked says that the program is to blame,
// not the way.
func Acked(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	ok = false
	err = raw.Control(func(fd uintptr) { ok = acked(int(fd)) })
	return err == nil && ok
}
