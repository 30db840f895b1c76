// Package vfiouser is the server side of the vfio-user protocol: it makes a
// PCI device that is written in Go appear in a virtual machine of QEMU (10.1
// or later, device vfio-user-pci), over a UNIX socket.
//
// It knows PCI and nothing of what the device is for. A device implements
// Device; Serve negotiates the version, answers questions about regions and
// interrupts, maps the guest's memory, hands register accesses over, and tells
// the device when the client is gone. The messages are those of version 0.1 of
// the protocol as QEMU documents it (docs/interop/vfio-user.rst).
//
// Memory. The guest's RAM is mapped from the descriptors that the client sends
// along, so a device reads and writes it in place. A device holds the Memory
// (Hold, Release) while it uses slices of it; what the client unmaps
// meanwhile stays until the last holder has let go. Regions for which the
// client sent no descriptor are known and cannot be reached.
//
// Calls. Serve makes all calls of a Device from one goroutine, one at a time.
// A device that does more at the same time (timers, other devices) brings its
// own lock; Serve holds none of its own while it calls, and sends no answer
// while the device runs, so that a client that does not read blocks nobody but
// itself.
//
// Trust. The client may say anything: sizes, offsets and counts are bounded
// and checked, and what does not fit is an error to the client or the end of
// the connection, never a panic. It is trusted in one respect: that a file
// whose size was checked when it was mapped is not truncated afterwards (QEMU
// seals its memory against that).
//
// What it does not do: migration, dirty page tracking, device feature
// messages, regions that the client maps, DMA over messages.
package vfiouser
