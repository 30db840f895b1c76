// Command tbcluster-rig makes virtual machines that are joined by emulated USB4
// cables, and plays scenarios on them. docs/rig.md begins with it.
package main
