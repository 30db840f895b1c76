// Package tui is the screen: what a person sees of the cluster, and the few
// things that a person does to it.
//
// It talks to the API only, over a connection that it is handed, and keeps no
// state of its own: one ClusterService.Watch is held open, and every view is a
// pure function of the last snapshot and of where the cursor is. Kill it and
// start it, and it looks the same. When the agent goes away it says so, dims
// what is old, and comes back by itself.
//
// Everything that came over the network is made harmless when it arrives
// (package-private function clean): no control character, escape sequence or
// bidirectional override of a name, path or log line ever reaches the
// terminal, whatever field it was in.
//
// There are two ways to run it. Run is the full screen; Plain prints each
// change as one line, for logs, pipes and screen readers.
//
// It decides nothing: what fits where is InstanceService.Plan's answer, what is
// wrong is the agent's list of findings.
package tui
