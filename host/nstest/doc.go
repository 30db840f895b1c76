// Package nstest lets tests use real network namespaces: a test binary runs
// itself again in a namespace of its own, as root there, and makes more of them
// as neighbours. For tests only; Linux only.
package nstest
