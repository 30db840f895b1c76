// Package rank is the shim that runs one rank of an instance: the hidden
// command `tbcluster rank DIR`.
//
// It has the identity of the person who asked, is the subreaper of everything
// the engine starts, gives the engine a process group and a temporary directory
// of its own, and keeps three files in DIR: the log (rotated, each line with its
// time), status.json (replaced atomically at each change) and rank.json, which
// it only reads. It depends on no agent: whoever comes later reads from the
// files what became of the engine, the last lines and the exit status included.
//
// When the shim itself is killed, the kernel kills the engine with it on Linux;
// what the engine had started is found by a mark in its environment and ended by
// Clean. macOS has neither subreapers nor such marks: there the process group is
// what is ended.
package rank
