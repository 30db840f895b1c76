// Package gateway is the OpenAI-compatible front of the cluster: one address on
// each node that answers for every model that any node serves.
//
// A request names a model; the gateway finds the ready instances of it, takes
// the one with the fewest requests under way, and passes the request through
// untouched: to the engine's loopback port when this node owns the instance,
// else over the agents' mutual TLS to the gateway of the node that does.
// Answers are passed on as they arrive, never buffered.
//
// It listens on 127.0.0.1 and ::1 only. A web page must not reach it: Host has
// to be a name of this machine (so a rebound DNS name is refused), and a
// browser's request from another origin is refused too. Other addresses are
// served only with an API key.
//
// The peer side (Gateway.PeerHandler) serves only instances that this node
// owns, so a request crosses at most one pair of gateways.
//
// Package gateway starts no engine and keeps no state but counters.
package gateway
