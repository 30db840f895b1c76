// Package transfer copies files between nodes: `tbcluster cp`.
//
// Two kinds of process take part. The coordinator ([Transfer], inside the agent
// that owns the transfer) decides and reports; it touches no file and no byte
// of one. Workers ([ServeWorker], one at each node, running as the asking user)
// read, send, verify and write; they do what the coordinator says over a
// control stream and send bytes to each other over connections of their own,
// bound to the addresses and interfaces of links, under TLS 1.3 with keys made
// for this transfer alone.
//
// What is promised: a final name appears only when its file is complete and
// every chunk's digest has matched; what arrived before an interruption is used
// by the next run; nothing is written outside the destination, whatever
// symlinks appear there meanwhile; a source that changes while it is read is
// reported, not copied.
//
// What is not done here: starting workers, finding links and deciding who may
// copy (package agent), reading model caches of other programs.
//
// Subpackages: manifest (what there is to copy), journal (what has arrived),
// wire (frames between workers), transport (the seam to what carries frames)
// and tcp (the one that is always there).
package transfer
