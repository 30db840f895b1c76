package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/host/beat"
)

const (
	// look is the time between two looks at the listings of sysfs.
	look = 500 * time.Millisecond
	// always is the time after which a value is sent in any case.
	always = 5 * time.Second
	// gap is the least time between two values: a storm of messages (routing
	// daemons, containers) must not make the agent read without end.
	gap = 50 * time.Millisecond
)

// Watch implements host.Host. It listens before it returns.
func (m *machine) Watch(ctx context.Context) <-chan struct{} {
	out := make(chan struct{}, 1)
	events := make(chan struct{}, 1)
	sources := []func() (*os.File, func([]byte) bool, error){routeEvents, kernelEvents}
	var open []*os.File
	for _, source := range sources {
		f, wanted, err := source()
		if err != nil {
			// Not permitted, or not there (a sandbox that allows no such
			// sockets): the looks below find what it would have told.
			continue
		}
		open = append(open, f)
		go listen(f, wanted, events)
	}
	go func() {
		defer close(out)
		m.watch(ctx, events, out)
		for _, f := range open {
			_ = f.Close() // ends its listener; there is nothing to lose
		}
	}()
	return out
}

// watch sends until ctx ends.
func (m *machine) watch(ctx context.Context, events <-chan struct{}, out chan<- struct{}) {
	tick := time.NewTimer(beat.Until(look))
	defer tick.Stop()
	var hold <-chan time.Time // runs after a value was sent
	var last time.Time
	pending := false
	listing, lookErr := m.listing()
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			pending = true
		case <-hold:
			hold = nil
		case now := <-tick.C:
			tick.Reset(beat.Until(look))
			next, err := m.listing()
			if !slices.Equal(next, listing) || (err == nil) != (lookErr == nil) || now.Sub(last) >= always {
				pending = true
			}
			listing, lookErr = next, err
		}
		if !pending || hold != nil {
			continue
		}
		pending = false
		last = time.Now()
		hold = time.After(gap)
		select {
		case out <- struct{}{}:
		default: // one is waiting to be read
		}
	}
}

// listing returns the names of what is on the Thunderbolt bus and of the
// interfaces in sysfs.
func (m *machine) listing() ([]string, error) {
	devices, err := names(tree{m.sysfs}.devices())
	interfaces, err2 := names(m.sysfs, "class/net")
	return append(append(devices, "/"), interfaces...), errors.Join(err, err2)
}

// listen sends to events for each message that is wanted, until f is closed.
func listen(f *os.File, wanted func([]byte) bool, events chan<- struct{}) {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		switch {
		case errors.Is(err, unix.ENOBUFS): // messages were lost: look
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return
		case !wanted(buf[:n]):
			continue
		}
		select {
		case events <- struct{}{}:
		default:
		}
	}
}

// routeEvents opens a socket that hears of links, addresses and routes.
func routeEvents() (*os.File, func([]byte) bool, error) {
	f, err := netlinkSocket(unix.NETLINK_ROUTE, unix.RTMGRP_LINK|
		unix.RTMGRP_IPV4_IFADDR|unix.RTMGRP_IPV6_IFADDR|unix.RTMGRP_IPV4_ROUTE|unix.RTMGRP_IPV6_ROUTE)
	return f, func([]byte) bool { return true }, err
}

// kernelEvents opens a socket that hears of devices; group 1 is the kernel's
// own (group 2 is udev's).
func kernelEvents() (*os.File, func([]byte) bool, error) {
	f, err := netlinkSocket(unix.NETLINK_KOBJECT_UEVENT, 1)
	return f, wantedUevent, err
}

// wantedUevent reports whether a uevent is about something that we report.
func wantedUevent(message []byte) bool {
	for field := range bytes.SplitSeq(message, []byte{0}) {
		if s, ok := bytes.CutPrefix(field, []byte("SUBSYSTEM=")); ok {
			return string(s) == "thunderbolt" || string(s) == "net"
		}
	}
	return false
}

// netlinkSocket opens a netlink socket in the network namespace of this
// thread, and puts it into the runtime's poller.
func netlinkSocket(protocol int, groups uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), "netlink")
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind netlink socket: %w", err), f.Close())
	}
	return f, nil
}
