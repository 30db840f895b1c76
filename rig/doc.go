// Package rig tests Thunderbolt host-to-host code without hardware: virtual
// machines with real Debian kernels and their real thunderbolt driver, each with
// a USB4 host router that we emulate (package usb4), joined by emulated cables.
//
//	func TestPing(t *testing.T) {
//		r := rig.Start(t, rig.Pair())
//		r.Settled(t)
//		a, b := r.Host("a"), r.Host("b")
//		…
//		r.Cable("a.0").Unplug()
//		r.Settled(t)
//	}
//
// A Topology says what there is: hosts with ports, cables between ports, the
// kernels. Start and Up boot it; a Rig has Hosts that run commands, and Cables
// that are plugged, cut and limited. What the kernels show of Thunderbolt comes
// in at every change (package state), so that waiting is waiting for an event:
// Settle returns when every host shows what is true of the fabric.
//
// A report of a guest's kernel (oops, WARNING, KASAN, lockdep, a hung task) fails
// whatever waits, and the test. Everything ends with the test.
//
// A Scenario is a topology with steps, in a file; Run plays one and returns it
// as it was played. Walk makes steps from a seed and Play checks after each that
// the hosts show the truth, that bytes arrive as they were sent, and that no
// kernel has complained.
//
// Guests are emulated in software: a processor of the machine for each, a tenth
// of its speed. Nothing that they send leaves the machine.
//
// Linux on amd64 only.
package rig
