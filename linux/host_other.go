//go:build !linux

package linux

import (
	"context"
	"errors"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// elsewhere is what New returns where there is no Linux kernel to ask.
type elsewhere struct{}

func newHost(Options) host.Host { return elsewhere{} }

func unsupported(what string) error {
	return fault.New(fault.Unsupported, what, errors.New("this program runs on another system than Linux"), "")
}

func (elsewhere) Machine(context.Context) (host.Machine, error) {
	return host.Machine{}, unsupported("read the machine")
}

func (elsewhere) Thunderbolt(context.Context) (host.Thunderbolt, error) {
	return host.Thunderbolt{}, unsupported("read the Thunderbolt layer")
}

func (elsewhere) Network(context.Context) (host.Network, error) {
	return host.Network{}, unsupported("read the network")
}

func (elsewhere) Diagnose(context.Context, host.Query) (host.Diagnosis, error) {
	return host.Diagnosis{}, unsupported("look for what is wrong")
}

func (elsewhere) Firewalls(context.Context) ([]host.Firewall, error) {
	return nil, unsupported("list firewalls")
}

func (elsewhere) Watch(ctx context.Context) <-chan struct{} {
	c := make(chan struct{})
	context.AfterFunc(ctx, func() { close(c) })
	return c
}

func (elsewhere) Apply(_ context.Context, c host.Change) error  { return unsupported(c.String()) }
func (elsewhere) Revert(_ context.Context, c host.Change) error { return unsupported(c.String()) }
func (elsewhere) Lacks(context.Context, host.Change) (string, error) {
	return "", unsupported("look at the packet filter")
}
func (elsewhere) Commands(c host.Change) []string { return commands(c) }
