// Package wire is how the machine and the agent in a guest talk over a serial
// port: frames with a checksum that find each other again after half of one was
// lost in a reboot, and streams with credit, so that one command that floods
// holds up no other.
//
// It imports nothing of ours: the agent has to stay small.
package wire
