// Package address gives every link a small subnet and every node one address,
// without disturbing what the machines already have.
//
// Links get a /30 each and nodes a /32 each out of one block (10.77.0.0/16
// unless configured). The node with the lower ID proposes, starting from a hash
// of both nodes and both ports; both ends check each candidate against every
// address and route of their own and every claim known in the cluster, and move
// on together where it collides. What was agreed is remembered by peer and
// ports, so that a cable keeps its addresses over replugs and reboots, and is
// applied again at once without asking. Host routes to node addresses go over
// proven links, best first.
//
// Everything applied goes through an Applier, whose journal the root half
// keeps; Down undoes it in reverse order. Without the right to change the
// machine nothing is applied and Wanted tells what would be. Addresses that a
// system gives itself (169.254/16, fe80::/10) are left alone. The packet filter
// is brought up to date before an address is usable and removed last.
package address
