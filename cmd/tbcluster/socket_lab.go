package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"tbcluster/lab"
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
func labSocket(base, name, node string) string {
	return filepath.Join(base, name, node, inNode)
}

// inNode is where the agent's socket is, below the directory of a lab's node.
const inNode = "run/tbcluster/agent.sock"

// labNodeDir returns the directory of the node that a socket of labSocket is of.
func labNodeDir(socket string) string { return strings.TrimSuffix(socket, "/"+inNode) }

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// labNode is a node of a lab on this machine.
type labNode struct{ lab, node string }

// String names it in a sentence.
func (n *labNode) String() string { return fmt.Sprintf("node %s of the lab %q", n.node, n.lab) }

// start says how to get an agent there: one that was started any other way
// would be the machine's own.
func (n *labNode) start() string {
	return lab.Command(n.lab, "start "+n.node+" --agent") + " starts it; " + lab.Command(n.lab, "status") + " shows how the lab stands"
}

// labNodeOf returns the node whose agent listens at a path; nil where that is in
// no lab of the caller.
func labNodeOf(g *globals, socket string) *labNode {
	abs, err := filepath.Abs(socket)
	if err != nil {
		return nil
	}
	for _, base := range labRuntimeDirs(g) {
		rest, under := strings.CutPrefix(abs, base+"/")
		if name, node, ok := strings.Cut(strings.TrimSuffix(rest, "/"+inNode), "/"); under && ok && labSocket(base, name, node) == abs && !strings.Contains(node, "/") {
			return &labNode{name, node}
		}
	}
	return nil
}
