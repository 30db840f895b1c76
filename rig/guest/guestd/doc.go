// Command guestd is the rig's agent inside a guest. As process 1 of an initramfs
// it mounts what a Linux has to have, loads the modules of the virtual machine,
// and then either starts itself as the agent and reaps orphans for the rest of
// its life, or hands the machine over to the systemd of a disk, where the agent
// is a unit.
//
// The agent does what the machine asks over a virtio-serial port (package wire):
// it runs commands, copies files, streams the kernel's log, reboots. It does so
// as root and for anybody at the other end of the port, which is the machine
// that owns the guest anyway.
//
// The kernel's command line may have:
//
//	rig.name=NAME        the host name
//	rig.root=/dev/vda    the disk whose systemd is to take over
//	rig.modules=a,b      modules to load at once
package main
