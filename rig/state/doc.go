// Package state says what the kernel of a host shows of Thunderbolt: domains,
// the hosts behind cables, their services and network interfaces. It reads
// sysfs (Documentation/ABI/testing/sysfs-bus-thunderbolt) and judges nothing.
//
// It is what tests of the rig compare with the truth of the fabric, so it shares
// no code with what tbcluster itself reads sysfs by.
package state
