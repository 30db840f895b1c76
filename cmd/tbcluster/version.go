package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the Makefile (-ldflags "-X main.version=…").
var version string

// buildVersion returns the version of this program; "dev" and the commit when
// it was built by hand.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "dev-" + s.Value[:12]
			}
		}
	}
	return "dev"
}

// versionJSON is `tbcluster version -o json`.
type versionJSON struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

func newVersionCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		GroupID: groupOther,
		Long: `Prints the version of the program you just ran, not that of the agents:
"tbcluster status -o json" has the version of each node.` + exitHelpAlone(),
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := versionJSON{buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH}
			if g.json() {
				writeJSON(g.out, v)
				return nil
			}
			fmt.Fprintf(g.out, "tbcluster %s (%s, %s/%s)\n", v.Version, v.Go, v.OS, v.Arch)
			return nil
		},
	}
}
