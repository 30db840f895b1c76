// Package channel is how nodes talk: TLS 1.3 with a certificate at both ends,
// the peer's key checked against the trust store in the handshake itself, many
// protocols on one TCP port told apart by ALPN.
//
// It promises that a handler or caller holds a connection to a node that is
// paired now, that connections of a revoked node are closed at once, that
// unfinished handshakes are bounded in number and time, and that errors say
// whether nobody answered, somebody else did, or the nodes have not paired.
//
// A node is dialled over its ways: cables first, the LAN a moment later,
// whichever answers. Connections over a way are bound to its interface. What
// the ways are is decided elsewhere (SetWays).
package channel
