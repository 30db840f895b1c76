//go:build !linux

package lab

import (
	"context"

	"tbcluster/api/fault"
)

func unsupported() error {
	return fault.Newf(fault.Unsupported, "use a Linux machine or virtual machine for it",
		"a virtual cluster needs the namespaces of Linux")
}

// Lab is a virtual cluster.
type Lab struct{}

// Up returns fault.Unsupported.
func Up(context.Context, Options) (*Lab, error) { return nil, unsupported() }

// Open returns fault.Unsupported.
func Open(string) (*Lab, error) { return nil, unsupported() }

// List returns no lab: there can be none here.
func List() ([]string, error) { return nil, nil }

// Name returns "".
func (*Lab) Name() string { return "" }

// Dir returns "".
func (*Lab) Dir() string { return "" }

// Status returns fault.Unsupported.
func (*Lab) Status(context.Context) (Status, error) { return Status{}, unsupported() }

// Cut returns fault.Unsupported.
func (*Lab) Cut(context.Context, string, string, CutOptions) error { return unsupported() }

// Mend returns fault.Unsupported.
func (*Lab) Mend(context.Context, string, string, MendOptions) error { return unsupported() }

// Kill returns fault.Unsupported.
func (*Lab) Kill(context.Context, string, bool) error { return unsupported() }

// Start returns fault.Unsupported.
func (*Lab) Start(context.Context, string, bool) error { return unsupported() }

// Pause returns fault.Unsupported.
func (*Lab) Pause(context.Context, string, bool) error { return unsupported() }

// Resume returns fault.Unsupported.
func (*Lab) Resume(context.Context, string, bool) error { return unsupported() }

// CutLAN returns fault.Unsupported.
func (*Lab) CutLAN(context.Context, string) error { return unsupported() }

// MendLAN returns fault.Unsupported.
func (*Lab) MendLAN(context.Context, string) error { return unsupported() }

// Part returns fault.Unsupported.
func (*Lab) Part(context.Context, ...[]string) error { return unsupported() }

// SetMulticast returns fault.Unsupported.
func (*Lab) SetMulticast(context.Context, string, Multicast) error { return unsupported() }

// Exec returns fault.Unsupported.
func (*Lab) Exec(context.Context, string, ExecOptions) (int, error) { return 0, unsupported() }

// Down returns fault.Unsupported.
func (*Lab) Down(context.Context) error { return unsupported() }

// SocketPath returns "".
func (*Lab) SocketPath(string) string { return "" }

// NodeDir returns "".
func (*Lab) NodeDir(string) string { return "" }

// InitMain returns an exit code: there is no init of a node here.
func InitMain([]string) int { return fault.ExitPrecondition }

// KeeperMain returns an exit code: there is no keeper here.
func KeeperMain([]string) int { return fault.ExitPrecondition }
