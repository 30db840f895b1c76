// Package spec holds the types by which engines and the supervisor of
// instances know each other: the adapter interface, ranks, models and
// placements. It is a leaf: package instance declares it, package engine
// implements it, and neither imports the other.
package spec
