package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
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
			// Until the root half closes it, this process may be moved, and nothing
			// may have been started by it. It is empty.
			if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
				return fault.New(fault.Internal, "wait for the root half", err, "")
			}
			if code := rank.Main(args[0]); code != 0 {
				return exitStatus(code)
			}
			return nil
		},
	}
}
