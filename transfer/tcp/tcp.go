// Package tcp is the transport that is always there: TCP connections bound to
// a link's addresses and interfaces, TLS 1.3 with both certificates pinned.
//
// Go picks AES-GCM for TLS 1.3 where the processor has it, which all machines
// with such cables do. The reading side holds one record buffer more than TLS
// needs, the writing side gathers records, so that a system call moves 256 KiB
// and not 16.
package tcp

import (
	"context"
	"net"
	"net/netip"
	"time"
)

// DialFunc connects to remote from local, bound to the interface iface where
// that is not "".
type DialFunc func(ctx context.Context, iface string, local netip.Addr, remote netip.AddrPort) (net.Conn, error)

// ListenFunc listens on a free port of local, bound to the interface iface
// where that is not "".
type ListenFunc func(ctx context.Context, iface string, local netip.Addr) (net.Listener, error)

// Name of the transport.
const Name = "tcp"

// Timeouts. A silent cable is left after UserTimeout.
const (
	dialTimeout      = 3 * time.Second
	handshakeTimeout = 5 * time.Second
	// UserTimeout is how long sent bytes may stay unacknowledged.
	UserTimeout = 3 * time.Second
)

// Transport implements transport.Transport.
type Transport struct {
	dial   DialFunc
	listen ListenFunc
}

// New returns the transport over the given functions; nil means binding by
// address alone.
func New(dial DialFunc, listen ListenFunc) *Transport {
	if dial == nil {
		dial = dialByAddress
	}
	if listen == nil {
		listen = listenByAddress
	}
	return &Transport{dial: dial, listen: listen}
}

// Name returns "tcp".
func (*Transport) Name() string { return Name }

func dialByAddress(ctx context.Context, _ string, local netip.Addr, remote netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{}
	if local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))
	}
	return d.DialContext(ctx, "tcp", remote.String())
}

func listenByAddress(ctx context.Context, _ string, local netip.Addr) (net.Listener, error) {
	var lc net.ListenConfig
	return lc.Listen(ctx, "tcp", netip.AddrPortFrom(local, 0).String())
}
