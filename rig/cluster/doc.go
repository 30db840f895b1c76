// Package cluster runs tbcluster on the hosts of a rig: it puts the program
// there, starts the agents, pairs the hosts by the exchange that people use, and
// waits for what `tbcluster status` says. It uses the program by its command
// line only.
//
// Linux only.
package cluster
