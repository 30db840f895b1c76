package main

import (
	"context"
	"net"
	"net/netip"
	"os"

	"github.com/spf13/cobra"

	"tbcluster/agent"
	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/host/sock"
	"tbcluster/instance/catalogue"
	"tbcluster/instance/plan"
	"tbcluster/instance/spec"
	"tbcluster/transfer"
)

func newWorkerCommand(*globals) *cobra.Command {
	return &cobra.Command{
		Use:    "worker",
		Short:  "Do file work for one user (started by the agent)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return runWorker(cmd.Context()) },
	}
}

// controlFD is where a worker finds its control stream.
const controlFD = 3

func runWorker(ctx context.Context) error {
	setName("tbcluster-work")
	conn, err := net.FileConn(os.NewFile(controlFD, "control"))
	if err != nil {
		return fault.New(fault.Usage, "a worker is started by the agent, with a control stream", err, "use `tbcluster cp`")
	}
	control := frame.New(conn)
	var hello agent.WorkerHello
	if err := control.Receive(&hello); err != nil {
		return nil // whoever started it is gone
	}
	switch hello.Kind {
	case agent.WorkTransfer:
		return transfer.ServeWorker(ctx, control, transfer.WorkerOptions{
			Dial: func(ctx context.Context, iface string, local netip.Addr, remote netip.AddrPort) (net.Conn, error) {
				return sock.DialContext(ctx, "tcp", remote.String(), sock.BindOptions{Interface: iface, Source: local})
			},
			Listen: func(ctx context.Context, iface string, local netip.Addr) (net.Listener, error) {
				return sock.Listen(ctx, "tcp", netip.AddrPortFrom(local, 0).String(), iface)
			},
		})
	case agent.WorkCatalogue:
		return catalogue.ServeWorker(ctx, control, catalogue.WorkerOptions{
			Inspect: func(_ context.Context, path string) (spec.Model, error) { return plan.Inspect(path) },
			Engines: agent.Adapters(hello.EngineDirs),
		})
	}
	return fault.Newf(fault.Protocol, "", "there is no work called %q", hello.Kind)
}
