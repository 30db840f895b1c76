//go:build linux

package vfiouser

// The indices of regions, as VFIO numbers those of PCI devices
// (include/uapi/linux/vfio.h, VFIO_PCI_*_REGION_INDEX).
const (
	RegionBAR0 = iota
	RegionBAR1
	RegionBAR2
	RegionBAR3
	RegionBAR4
	RegionBAR5
	RegionROM
	RegionConfig
	RegionVGA
	NumRegions
)

// The kinds of interrupts, as VFIO numbers those of PCI devices
// (VFIO_PCI_*_IRQ_INDEX).
const (
	InterruptINTx = iota
	InterruptMSI
	InterruptMSIX
	InterruptError
	InterruptRequest
	NumInterrupts
)

// Region describes a region of a device. The zero value is a region that does
// not exist.
type Region struct {
	Size     uint64 // bytes; that of a BAR is a power of two
	ReadOnly bool
}

// Device is a PCI device. A method that gets an offset and bytes is only
// called with a range that lies in the region. Errors of Read and Write go to
// the client as EIO; they are for accesses that hardware would not answer, not
// for values that it would ignore.
type Device interface {
	// Regions returns the regions; it never changes.
	Regions() [NumRegions]Region
	// Interrupts returns how many vectors there are of each kind; it never
	// changes.
	Interrupts() [NumInterrupts]int

	// Attach is called first, when a client has said hello. What it brings is
	// valid until Detach returns.
	Attach(Client)
	// Read fills p from a region.
	Read(region int, offset uint64, p []byte) error
	// Write stores p in a region. p is valid during the call.
	Write(region int, offset uint64, p []byte) error
	// Settle is called when everything that had arrived has been handled and
	// answered: the place for work that writes have asked for, so that a burst
	// of doorbells is one piece of work.
	Settle()
	// Reset is what a PCI reset does.
	Reset()
	// Detach is called last: the client is gone, as if the machine around the
	// device had lost its power. No memory is used after it returns.
	Detach()
}

// Client is the machine in which a device sits.
type Client struct {
	Memory     *Memory
	Interrupts *Interrupts
}
