// Package root is the root half: the only part of tbcluster that runs with
// rights over the machine. It talks to nothing but the agent, over a socketpair,
// and does nothing but what the closed list of requests in protocol.go says:
//
//   - change addresses, routes, MTU and packet filter of our own cables, with a
//     journal from which everything can be undone after any crash;
//   - start a worker or a rank under the identity of a local user, whom it reads
//     itself: from the client socket that the agent passes along, or from its
//     own file of mappings for people of other nodes. It never believes the
//     agent about who somebody is;
//   - end what it started.
//
// Without root the same Server runs inside the agent: users cannot be switched
// and changes of the network are refused, everything else is the same.
package root
