package systemd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
)

// private is where the manager listens for root.
const private = "/run/systemd/private"

// Slice is a slice of the manager, by its unit's name ("tbcluster.slice").
type Slice string

// property is one of a transient unit: a(sv) on the wire.
type property struct {
	Name  string
	Value dbus.Variant
}

// auxiliary is a unit made along with another one; we make none.
type auxiliary struct {
	Name       string
	Properties []property
}

// Put moves a process, and what it will start, into a scope of that name in
// the slice, and returns once it is there. The scope ends with its last
// process. A name must be new; "-" and what may stand in a file's name may
// stand in it.
func (s Slice) Put(ctx context.Context, name, description string, pid int) (err error) {
	conn, err := dbus.Dial("unix:path="+private, dbus.WithContext(ctx))
	if err != nil {
		return fmt.Errorf("reach the manager: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// No Hello: there is no bus behind this socket.
	if err := conn.Auth(nil); err != nil {
		return fmt.Errorf("reach the manager: %w", err)
	}
	properties := []property{
		{"Description", dbus.MakeVariant(description)},
		{"Slice", dbus.MakeVariant(string(s))},
		{"PIDs", dbus.MakeVariant([]uint32{uint32(pid)})},
		// One that failed leaves its name free as well.
		{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
	}
	unit := name + ".scope"
	var job dbus.ObjectPath
	call := conn.Object("org.freedesktop.systemd1", "/org/freedesktop/systemd1").CallWithContext(ctx,
		"org.freedesktop.systemd1.Manager.StartTransientUnit", 0, unit, "fail", properties, []auxiliary{})
	if err := call.Store(&job); err != nil {
		return fmt.Errorf("make %s: %w", unit, err)
	}
	return arrived(ctx, unit, pid)
}

// arrived waits until a process is in a unit: the manager answers before it has
// moved it.
func arrived(ctx context.Context, unit string, pid int) error {
	const most = 50 * time.Millisecond
	for wait := time.Millisecond; ; wait = min(2*wait, most) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			return fmt.Errorf("see the process arrive in %s: %w", unit, err)
		}
		if inUnit(string(text), unit) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the process to be in %s: %w", unit, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// inUnit reports whether the text of a /proc/PID/cgroup says that the process
// is in a unit: in the hierarchy that the manager keeps, be it of version 1 or 2.
func inUnit(text, unit string) bool {
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) == 3 && (f[1] == "" || f[1] == "name=systemd") && path.Base(f[2]) == unit {
			return true
		}
	}
	return false
}
