// Package agent is the daemon of one node: it wires the packages below it, owns
// their lifecycle, publishes what they know as this node's sections, and serves
// the API on a Unix socket. It holds the node's key and parses what comes from
// the network; whatever needs root it asks of its root half (package
// agent/root), over a closed list of requests, or says that it cannot.
//
// What it owns ends with it, but for ranks: those outlive it, and the next agent
// adopts them from their records.
package agent
