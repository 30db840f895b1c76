// Package linux implements host.Host on Linux: facts from sysfs, procfs and
// rtnetlink, changes by rtnetlink and nftables. It needs no programs.
//
// The Thunderbolt layer is read from a sysfs root that is a setting, so that a
// virtual cluster can show a tree of its own; interfaces, addresses and routes
// always come from the kernel, of the network namespace of the calling thread.
//
// What changes is told by the kernel (rtnetlink, kobject uevents where this
// process may hear them) and, since sysfs tells nobody of its changes, by
// looking at two directory listings twice a second.
package linux
