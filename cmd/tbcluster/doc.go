// Command tbcluster is the whole program: the command line, the terminal UI,
// and the processes of a node (agent, root half, worker, rank).
//
// Each command has a file of its own: newXCommand declares its flags and help
// and hands them to runX, which takes a context and options and can be tested
// without a shell. Commands reach the agent through package api alone, over a
// Unix socket. Every error ends in one switch (see report) that prints it and
// gives the exit code; every help text lists the codes under EXIT STATUS.
package main
