package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// labRuntimeDirs returns the directories that may hold the labs of the caller:
// package lab takes the second where the first cannot be used.
func labRuntimeDirs(g *globals) []string {
	if os.Getuid() == 0 {
		return []string{filepath.Join(g.run, "tbcluster-lab")}
	}
	var dirs []string
	if d := g.getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		dirs = append(dirs, filepath.Join(d, "tbcluster-lab"))
	}
	return append(dirs, fmt.Sprintf("/tmp/tbcluster-lab-%d", os.Getuid()))
}

// labSocket returns where the agent's socket of a lab's node is, seen from the
// machine that the lab runs on.
func labSocket(base, lab, node string) string {
	return filepath.Join(base, lab, node, "run/tbcluster/agent.sock")
}
