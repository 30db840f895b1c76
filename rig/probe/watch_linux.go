package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/rig/state"
)

// again is how often the state is read without an event: for what the kernel
// changes without telling, such as the lanes of a link that was bonded late.
const again = time.Second

// quiet is how long the events of one change keep coming, mostly.
const quiet = 5 * time.Millisecond

// watch writes the state at once and whenever it has changed.
func watch(ctx context.Context, sysfs string, say *json.Encoder) error {
	events := make(chan struct{}, 1)
	failed := make(chan error, 2)
	// Listening comes before the first look: nothing falls between.
	for _, source := range []struct {
		protocol int
		groups   uint32
	}{
		{unix.NETLINK_KOBJECT_UEVENT, 1}, // group 1 is the kernel's own
		{unix.NETLINK_ROUTE, unix.RTMGRP_LINK},
	} {
		f, err := listen(source.protocol, source.groups)
		if err != nil {
			return err
		}
		defer f.Close()
		go func() { failed <- follow(f, events) }()
	}
	tick := time.NewTicker(again)
	defer tick.Stop()
	var last *state.State
	for {
		s, err := state.Read(sysfs)
		if err != nil {
			return fmt.Errorf("read %s: %w", sysfs, err)
		}
		if last == nil || !s.Equal(*last) {
			if err := say.Encode(s); err != nil {
				return err
			}
			last = &s
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-tick.C:
		case <-events:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(quiet):
			}
		}
	}
}

// listen opens a netlink socket that hears of changes.
func listen(protocol int, groups uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("listen to the kernel: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return nil, errors.Join(fmt.Errorf("listen to the kernel: %w", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// follow notes that something came. What it was does not matter: all is read
// again. Messages that were lost (ENOBUFS) are something that came.
func follow(f *os.File, events chan<- struct{}) error {
	buf := make([]byte, 64<<10)
	for {
		if _, err := f.Read(buf); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("listen to the kernel: %w", err)
		}
		select {
		case events <- struct{}{}:
		default:
		}
	}
}
