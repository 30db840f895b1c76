//go:build linux

package usb4

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/vfiouser"
)

const (
	maxPorts    = 15
	maxHops     = 16 // more, and the driver clears the wrong interrupt bits (nhi.c, ring_clear_msix)
	numVectors  = 16 // MSI-X (nhi.h, MSIX_MAX_VECS)
	vendorIntel = 0x8086

	// resetTime is how long the reset bit of version 2 reads as set.
	resetTime = 20 * time.Millisecond
)

// Host is a host router with its host interface: the USB4 controller of one
// machine. It is off until Serve has a virtual machine, and its lanes come up
// when the driver there has first started the control channel.
type Host struct {
	node
	tx, rx []ring

	pci     pciFunction
	enabled uint64 // interrupts: bit = hop, receive rings from hop count on
	notify  uint64 // interrupt status, in the same order, then receive overflow
	raised  uint64 // completed in this piece of work
	vectors [maxHops * 2]uint8
	gates   [numVectors]gate
	dmaMisc uint32
	resetAt time.Duration // when the last host reset ends

	client   vfiouser.Client
	attached bool
	awake    bool   // the driver has started the control channel since the last reset
	holding  bool   // of this piece of work: memory is held
	hot      bool   // of this piece of work: in Fabric.firing
	late     uint32 // vectors that throttling has let through in this piece of work

	hungry hunger

	dirtyTX, dirtyRX uint32 // rings that were written to since the last Settle
	control          controlChannel

	attachedCount, resets, throttled uint64
	interrupts                       [numVectors]uint64
}

func newHost(f *Fabric, o HostOptions) *Host {
	h := &Host{node: node{fabric: f, name: o.Name, options: o}}
	h.host = h
	h.tx, h.rx = make([]ring, o.Hops), make([]ring, o.Hops)
	for i := range o.Hops {
		h.tx[i] = ring{host: h, number: i, transmits: true, bit: uint64(1) << i}
		h.rx[i] = ring{host: h, number: i, bit: uint64(1) << (o.Hops + i)}
	}
	for i := range h.gates {
		h.gates[i].init(h, i)
	}
	h.build()
	h.pci = newPCIFunction(o)
	h.control.answer = newEvent(h.giveAnswers)
	h.hungry.end = newEvent(func(time.Duration) { f.stirred = true })
	return h
}

// Attached reports whether a virtual machine is connected: the host has power.
func (h *Host) Attached() bool {
	h.fabric.mu.Lock()
	defer h.fabric.mu.Unlock()
	return h.attached
}

// Awake reports whether a driver has its control channel running.
func (h *Host) Awake() bool {
	h.fabric.mu.Lock()
	defer h.fabric.mu.Unlock()
	return h.listening()
}

// Serve listens on a UNIX socket, which it makes anew, and is the device of
// one virtual machine after the other until ctx ends. A machine that goes, in
// whatever way, is a loss of power for the host.
func (h *Host) Serve(ctx context.Context, path string) error {
	l, err := h.listen(path)
	if err != nil {
		return err
	}
	return h.serve(ctx, l)
}

// Start is Serve on a goroutine of its own, for those who must know that the
// socket is there before they start QEMU: it returns when it listens. What ends
// it comes out of done.
func (h *Host) Start(ctx context.Context, path string) (done <-chan error, err error) {
	l, err := h.listen(path)
	if err != nil {
		return nil, err
	}
	c := make(chan error, 1)
	go func() { c <- h.serve(ctx, l) }()
	return c, nil
}

func (h *Host) listen(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.FileIO, "remove the old socket of host "+h.name, err, "choose another path").At(path)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fault.New(fault.Connection, "listen for the virtual machine of host "+h.name, err, "choose a directory that exists and a path of at most 107 bytes").At(path)
	}
	return l, nil
}

func (h *Host) serve(ctx context.Context, l *net.UnixListener) error {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer func() { _ = l.Close() }() // and so removes the socket
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				_ = c.Close()
			}
			return ctx.Err()
		}
		if err != nil {
			return fault.New(fault.Connection, "wait for the virtual machine of host "+h.name, err, "")
		}
		if err := vfiouser.Serve(ctx, c, h); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			h.fabric.log.Warn("the virtual machine is gone", "host", h.name, "err", err)
		}
	}
}

// Regions returns the regions of the PCI function (vfiouser.Device).
func (h *Host) Regions() [vfiouser.NumRegions]vfiouser.Region {
	return [vfiouser.NumRegions]vfiouser.Region{
		vfiouser.RegionBAR0:   {Size: barSize},
		vfiouser.RegionBAR2:   {Size: msixSize},
		vfiouser.RegionConfig: {Size: configSize},
	}
}

// Interrupts returns the interrupts of the PCI function (vfiouser.Device).
func (h *Host) Interrupts() [vfiouser.NumInterrupts]int {
	return [vfiouser.NumInterrupts]int{vfiouser.InterruptMSIX: numVectors}
}

// Attach gives the host power (vfiouser.Device).
func (h *Host) Attach(c vfiouser.Client) {
	h.fabric.lock()
	defer h.fabric.unlock()
	h.client = c
	h.attached = true
	h.attachedCount++
	h.fabric.note(&h.node, nil, "power on")
	h.fabric.tell()
}

// Detach takes the power away (vfiouser.Device).
func (h *Host) Detach() {
	h.fabric.lock()
	h.fabric.note(&h.node, nil, "power off")
	h.reset()
	h.attached = false
	h.pci = newPCIFunction(h.options)
	h.fabric.tell()
	h.fabric.unlock()
	// No goroutine reaches the client from here on: whoever was holding its
	// memory did so under the lock.
	h.fabric.mu.Lock()
	h.client = vfiouser.Client{}
	h.fabric.mu.Unlock()
}

// Reset is a PCI reset: that of the whole platform (vfiouser.Device).
func (h *Host) Reset() {
	h.fabric.lock()
	defer h.fabric.unlock()
	h.resets++
	h.fabric.note(&h.node, nil, "PCI reset")
	h.reset()
	h.pci.reset()
}

// Settle runs what registers were written for (vfiouser.Device).
func (h *Host) Settle() {
	h.fabric.lock()
	defer h.fabric.unlock()
	h.settle()
}

func (h *Host) settle() {
	h.feed()
	rx := h.dirtyRX
	h.dirtyRX = 0
	for i := range h.rx {
		if rx&(1<<i) != 0 {
			h.fabric.buffers(&h.rx[i])
		}
	}
	// After the receive rings, because buffers of ring 0 let its packets go on;
	// and ring 0 last, because packets take paths away from frames that were
	// sent before.
	tx := h.dirtyTX
	h.dirtyTX = 0
	for i := len(h.tx) - 1; i >= 0; i-- {
		if tx&(1<<i) != 0 {
			h.fabric.transmit(&h.tx[i])
		}
	}
}

// reset brings router, host interface and lanes to where they are after
// power-on. Cables stay where they are.
func (h *Host) reset() {
	h.awake = false
	for i := range h.tx {
		h.tx[i].reset()
		h.rx[i].reset()
	}
	h.enabled, h.notify, h.raised, h.dmaMisc = 0, 0, 0, 0
	h.dirtyTX, h.dirtyRX = 0, 0
	h.hungry.over(h.fabric)
	h.vectors = [maxHops * 2]uint8{}
	for i := range h.gates {
		h.gates[i].reset()
	}
	h.resetControl()
	h.router.reset()
	now := h.fabric.clock.Now()
	for _, p := range h.ports {
		p.reset(now)
	}
	h.fabric.rewired()
}

// hold keeps the memory of the guest mapped until the lock is released.
func (h *Host) hold() *vfiouser.Memory {
	if !h.holding {
		h.holding = true
		h.client.Memory.Hold()
		h.fabric.held = append(h.fabric.held, h)
	}
	return h.client.Memory
}

// mastering reports whether the function may reach the guest's memory.
func (h *Host) mastering() bool { return h.attached && h.pci.mastering() }

// listening reports whether the control channel of the driver takes packets.
func (h *Host) listening() bool { return h.attached && h.rx[0].enabled() && h.tx[0].enabled() }

func (h *Host) counters() HostCounters {
	c := HostCounters{Name: h.name, Interrupts: h.interrupts, Throttled: h.throttled, Control: h.control.counters, Attached: h.attachedCount, Resets: h.resets}
	for i := range h.tx {
		c.TX = append(c.TX, h.tx[i].counters)
		c.RX = append(c.RX, h.rx[i].counters)
	}
	for _, p := range h.ports {
		c.Ports = append(c.Ports, p.counters)
	}
	c.Paths = h.router.pathCounters()
	return c
}

// String returns the name.
func (h *Host) String() string { return fmt.Sprintf("host %s", h.name) }
