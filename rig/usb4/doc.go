// Package usb4 emulates USB4 host routers and the cables between them, well
// enough for the unmodified thunderbolt driver of Linux: each host is a PCI
// device (class 0c0340) for one virtual machine, and what the driver sends
// over its rings comes out at the other end of the cable.
//
//	f, err := usb4.New(usb4.Options{Seed: 1})
//	a, err := f.AddHost(usb4.HostOptions{Name: "a"})
//	b, err := f.AddHost(usb4.HostOptions{Name: "b"})
//	go a.Serve(ctx, "a.sock") // qemu … -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"a.sock"}}'
//	go b.Serve(ctx, "b.sock")
//	cable, err := f.Connect(a.Port(0), b.Port(0), usb4.CableOptions{})
//	cable.Unplug()
//
// A Fabric is everything that is wired together: hosts, their ports, cables.
// One lock protects all of it; a frame is copied once, from the memory of the
// sending guest to that of the receiving one, while the lock is held. Serving
// several hosts is one goroutine per host and an alarm for what has to wait
// (a cable's rate and latency, interrupt throttling, training).
//
// What is emulated of a host: the registers of the host interface (rings,
// MSI-X with throttling, the reset of USB4 version 2), the control channel with
// its CRC, errors, hotplug events and their acknowledgements, the configuration
// spaces of router and adapters with paths and counters, lane adapters with
// training, bonding and downstream port reset, enough of TMU, buffer allocation
// and sideband for the driver to be content, packets between domains, end to end
// flow control, and hubs with hosts of other domains behind them (AddHub). Sources of protocol facts are the USB4 specification, where a
// section is named, and drivers/thunderbolt of Linux, where a file is.
//
// What is not: tunnels of PCIe, DisplayPort and USB 3, device routers with
// anything but ports, retimers, system sleep. Frames arrive in order or not at all; nothing is
// ever duplicated, as on hardware.
//
// Loading a driver. The thunderbolt driver resets what it finds: by the host
// router reset of version 2, else by a downstream port reset of each port (its
// parameter host_reset). Both take the links down for as long as training takes,
// and the other ends hear of an unplug and a plug. Unloading it changes nothing:
// the link stays up.
//
// Runtime power management: when nothing is plugged in, the driver suspends the
// host after some 15 s. A plug then sets the PME status of the function as the
// driver has asked for (PORT_CS_19), which Linux looks at once a second; the
// event follows when the driver is awake.
package usb4
