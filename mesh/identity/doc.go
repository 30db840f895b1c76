// Package identity says who a node is and whom it trusts.
//
// A node is its Ed25519 key. The node ID is derived from the key and carries
// check digits; the certificate is made from the key at will, names no host and
// means nothing by its dates. The key file is made once, atomically, and never
// again: a key that cannot be read is an error, not a reason for a new one.
//
// Trust is a set of signed records (Store): the founding of the cluster,
// introductions, tombstones, names. Every node holds the whole set and comes to
// the same members from the same set, whatever the order of arrival. Nothing
// enters the set unverified. A tombstone outranks every introduction and is
// kept for good; what a revoked node signed stands only as far as its tombstone
// lists it, so that nobody gets in by what a revoked node signs afterwards.
//
// Package identity opens no connection and reads nothing but its own two files.
package identity
