// Package metrics says in numbers, for Prometheus, what an agent knows of its
// cluster: a collector over the cluster's state, and counters of what passes.
//
// Every node says all of the cluster as that node sees it, so one of them is
// enough to ask. All metrics are in one table (All), which the documentation is
// made of.
//
// No label holds the name of a person, a file, a model or an instance. Labels
// are states of closed lists, codes of findings from the catalogue, and names of
// nodes and ports, of which there are as many as there are machines; past
// maxNodes and maxLinks the rest is left out and counted.
package metrics
