// Command probe is the rig's eye in a guest: it says what the kernel shows of
// Thunderbolt, at every change, and sends and checks bytes over a chosen network
// interface. Each of its commands writes JSON, one value a line, on standard
// output. It is meant for guests of the rig and runs on any Linux.
//
//	probe watch                                     package state, at once and at every change
//	probe attributes                                package state, all attributes of Thunderbolt
//	probe receive INTERFACE                         takes one stream; says its port, then what came
//	probe send INTERFACE ADDRESS:PORT SEED BYTES    sends one stream
//
// A stream is pseudo-random bytes that its seed decides, both ways: the receiver
// compares every byte with what it has to be and sends the same amount back, which the
// sender compares.
package main
