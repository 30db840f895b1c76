// Package vfiotest is the client side of vfio-user for tests: a machine without
// a processor, with memory, interrupts and a socket, that does to a device what
// its test says.
package vfiotest
