// Package sock makes sockets that stay where they belong: dialled and listening
// sockets that are bound to one network interface, connections that end when
// the cable under them falls silent, the credentials of a local peer, and file
// descriptors passed over Unix sockets.
//
// Binding to an address is not enough on either system: Linux answers on an
// address by whichever interface a packet came, and macOS sends all of
// 169.254/16 by the primary interface. So everything that concerns one cable is
// bound to its interface (SO_BINDTODEVICE on Linux, IP_BOUND_IF and
// IPV6_BOUND_IF on macOS).
//
// Errors are those of package net and the system, with the interface named;
// those who show them to people make Faults of them.
package sock
