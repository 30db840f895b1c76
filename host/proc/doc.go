// Package proc is about processes of the running system: telling one process
// from a later one with the same number, being told of its end, signalling its
// group, what it uses; and about users: who a user ID is, by the system's own
// resolver.
//
// A process is named by ID: number, start time and boot. A number alone is
// never acted on, since the system gives it to another process in time.
//
// Package proc keeps no state, and polls nowhere.
package proc
