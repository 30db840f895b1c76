// Package systemd puts processes into units of their own, where systemd runs
// the machine: a rank that is in a scope of its own is no part of the service
// that started it, and outlives its upgrade.
//
// It talks to the manager itself, over the private socket that systemctl uses
// too: no message bus has to run. It changes nothing else.
package systemd
