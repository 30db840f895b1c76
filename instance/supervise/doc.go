// Package supervise owns instances: it turns a planned placement into running
// ranks, tells the truth about them, and ends them as a group.
//
// Manager is the owner's side: one per agent, it owns the instances whose
// rank 0 is on its node. LocalRanks is the serving side: one per agent, it
// grants ports and memory, checks files, starts, watches and ends the ranks that
// are on its node, whoever owns them. A Manager reaches the ranks of another
// node through RemoteRanks, whose requests the agent carries to that node's
// LocalRanks.Dispatch.
//
// Promises: an instance is ready only after a completion came back from it, and
// is checked by one again while it runs; when one rank ends, all end; grants
// are all or nothing; a record is on disk before a process is started, so that
// an agent that was killed finds its instances again, and says of one that ended
// meanwhile how it ended.
//
// It starts no process itself (Spawner does), moves no file (Copier does) and
// knows no engine (spec.Adapter does).
package supervise
