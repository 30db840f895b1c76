package main

import (
	"github.com/spf13/cobra"

	"tbcluster/lab"
)

func newLabKeeperCommand(*globals) *cobra.Command {
	return &cobra.Command{
		Use:    "lab-keeper DIR",
		Short:  "Hold a virtual cluster together (started by `lab up`)",
		Hidden: true,
		Args:   cobra.ArbitraryArgs,
		RunE:   func(_ *cobra.Command, args []string) error { return asStatus(lab.KeeperMain(args)) },
	}
}

func newLabInitCommand(*globals) *cobra.Command {
	return &cobra.Command{
		Use:    "lab-init",
		Short:  "Be process 1 of a virtual node (started by the lab's keeper)",
		Hidden: true,
		Args:   cobra.ArbitraryArgs,
		RunE:   func(_ *cobra.Command, args []string) error { return asStatus(lab.InitMain(args)) },
	}
}

// asStatus ends the program with that code.
func asStatus(code int) error {
	if code == 0 {
		return nil
	}
	return exitStatus(code)
}
