package lab

import "io"

// ExecOptions say what to run in a node.
type ExecOptions struct {
	// Argv is the command; argv[0] is looked up on the node's PATH.
	Argv []string
	// Env is added to the environment of a fresh login ("NAME=value").
	Env []string
	// Dir is where it runs; default the home of the user.
	Dir string
	// User is a user name or "uid" or "uid:gid" in numbers; default root. A lab
	// of an ordinary user has no user but root.
	User string
	// Stdin, Stdout and Stderr; nil is /dev/null. Files are handed over as they
	// are, others are copied.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// TTY gives it a terminal of the node. Stderr is not used then.
	TTY bool
}
