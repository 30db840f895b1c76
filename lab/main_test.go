//go:build linux

package lab

import (
	"os"
	"testing"
)

// TestMain lets the test binary be the keeper, the init and what runs in the
// nodes, as the tbcluster binary is outside of tests.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "lab-keeper":
			os.Exit(KeeperMain(os.Args[2:]))
		case "lab-init":
			os.Exit(InitMain(os.Args[2:]))
		case "agent", "inside":
			os.Exit(insideMain(os.Args[1:]))
		}
	}
	os.Exit(m.Run())
}
