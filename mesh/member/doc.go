// Package member keeps the nodes of a cluster in touch: one Sync stream for
// each pair carries sections of state and heartbeats both ways, and says which
// nodes are up, suspect or down.
//
// A node owns the sections that it publishes; what is known of another node is
// what it said last. There is no quorum. Section "trust" is this package's own:
// it spreads the records of the trust store and merges those of others.
//
// A stream that breaks is replaced over whatever way is left before anybody is
// called suspect. Memory is bounded: MaxSections sections of MaxSection bytes
// for each member.
package member
