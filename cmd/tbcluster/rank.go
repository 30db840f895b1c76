package main

import (
	"github.com/spf13/cobra"

	"tbcluster/instance/rank"
)

func newRankCommand(*globals) *cobra.Command {
	return &cobra.Command{
		Use:    "rank DIR",
		Short:  "Run one rank of an instance (started by the agent)",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			setName("tbcluster-rank")
			if code := rank.Main(args[0]); code != 0 {
				return exitStatus(code)
			}
			return nil
		},
	}
}
