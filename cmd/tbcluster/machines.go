package main

import (
	"context"

	"tbcluster/lab"
)

// virtualCluster is a lab as `up` needs it.
type virtualCluster interface {
	Name() string
	SocketPath(node string) string
	NodeDir(node string) string
	Start(ctx context.Context, node string, agentOnly bool) error
	Status(ctx context.Context) (lab.Status, error)
	Exec(ctx context.Context, node string, o lab.ExecOptions) (int, error)
}

// machines opens and makes virtual clusters.
type machines struct {
	open func(name string) (virtualCluster, error)
	make func(ctx context.Context, o lab.Options) (virtualCluster, error)
}

// realMachines are those of package lab.
var realMachines = machines{
	open: func(name string) (virtualCluster, error) { return lab.Open(name) },
	make: func(ctx context.Context, o lab.Options) (virtualCluster, error) { return lab.Up(ctx, o) },
}
