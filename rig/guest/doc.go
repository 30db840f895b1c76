// Package guest runs one virtual machine of the rig: it starts QEMU (software
// emulation, no KVM) with a kernel and an initramfs of package image, and talks
// to the agent inside over a virtio-serial port: commands, files, the kernel's
// log, reboot. It cuts the power, and it notices what the kernel reports of
// itself (oops, BUG, WARNING, KASAN, lockdep, hung tasks).
//
// What comes from a guest is not trusted: frames are bounded (package wire), and
// a guest that breaks the protocol is a guest that failed.
//
// A guest has no network and no disk unless Options gives it some. The machine
// needs no root for a guest, only what package image has built.
//
// Linux only.
package guest
