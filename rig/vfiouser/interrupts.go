//go:build linux

package vfiouser

import (
	"encoding/binary"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Interrupts are the interrupts of a device: descriptors of the client to which
// it listens. All methods may be called at any time.
type Interrupts struct {
	mu    sync.Mutex
	kinds [NumInterrupts][]vector
	one   [8]byte // 1, as an eventfd wants it
}

type vector struct {
	fd      int // -1: nobody listens
	masked  bool
	pending bool // fired while masked
}

func newInterrupts(counts [NumInterrupts]int) *Interrupts {
	in := &Interrupts{}
	binary.NativeEndian.PutUint64(in.one[:], 1)
	for kind, n := range counts {
		in.kinds[kind] = make([]vector, n)
		for i := range in.kinds[kind] {
			in.kinds[kind][i].fd = -1
		}
	}
	return in
}

// Fire sends an interrupt, and reports whether somebody listens. One that is
// masked is sent when the client unmasks it.
func (in *Interrupts) Fire(kind, number int) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if kind < 0 || kind >= NumInterrupts || number < 0 || number >= len(in.kinds[kind]) {
		return false
	}
	return in.fire(&in.kinds[kind][number])
}

func (in *Interrupts) fire(v *vector) bool {
	if v.fd < 0 {
		return false
	}
	if v.masked {
		v.pending = true
		return true
	}
	// The descriptor does not block: an eventfd whose counter is full has an
	// interrupt to deliver already.
	_, err := unix.Write(v.fd, in.one[:])
	return err == nil || err == unix.EAGAIN
}

// The flags of SET_IRQS (include/uapi/linux/vfio.h, VFIO_IRQ_SET_*).
const (
	irqDataNone      = 1 << 0
	irqDataBool      = 1 << 1
	irqDataEventfd   = 1 << 2
	irqActionMask    = 1 << 3
	irqActionUnmask  = 1 << 4
	irqActionTrigger = 1 << 5
	irqFlags         = 1<<6 - 1
)

// set does what a SET_IRQS asks for. It takes over the descriptors: all are
// kept or closed when it returns.
func (in *Interrupts) set(flags, kind, start, count uint32, data []byte, fds []int) error {
	defer func() { closeAll(fds) }()
	in.mu.Lock()
	defer in.mu.Unlock()
	if kind >= NumInterrupts || flags&^uint32(irqFlags) != 0 {
		return unix.EINVAL
	}
	all := in.kinds[kind]
	if uint64(start)+uint64(count) > uint64(len(all)) {
		return unix.EINVAL
	}
	which := all[start : start+count]
	how, action := flags&(irqDataNone|irqDataBool|irqDataEventfd), flags&(irqActionMask|irqActionUnmask|irqActionTrigger)
	chosen := func(int) bool { return true }
	switch how {
	case irqDataNone:
		if count == 0 { // all of them off
			if action != irqActionTrigger {
				return unix.EINVAL
			}
			in.off(all)
			return nil
		}
	case irqDataBool:
		if len(data) != int(count) {
			return unix.EINVAL
		}
		chosen = func(i int) bool { return data[i] != 0 }
	case irqDataEventfd:
		if action != irqActionTrigger || len(fds) != 0 && len(fds) != len(which) {
			return unix.EINVAL
		}
		return in.listen(which, &fds)
	default:
		return unix.EINVAL
	}
	for i := range which {
		v := &which[i]
		if !chosen(i) {
			continue
		}
		switch action {
		case irqActionMask:
			v.masked = true
		case irqActionUnmask:
			v.masked = false
			if v.pending {
				v.pending = false
				in.fire(v)
			}
		case irqActionTrigger:
			in.fire(v)
		default:
			return unix.EINVAL
		}
	}
	return nil
}

// listen makes descriptors those of vectors; none at all means that nobody
// listens to them any more.
func (in *Interrupts) listen(which []vector, fds *[]int) error {
	for _, fd := range *fds {
		if err := unix.SetNonblock(fd, true); err != nil {
			return err
		}
	}
	in.off(which)
	for i, fd := range *fds {
		which[i].fd = fd
	}
	*fds = nil
	return nil
}

func (in *Interrupts) off(which []vector) {
	for i := range which {
		if which[i].fd >= 0 {
			_ = unix.Close(which[i].fd) // an eventfd has nothing to flush
		}
		which[i] = vector{fd: -1}
	}
}

// close lets all descriptors go.
func (in *Interrupts) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, k := range in.kinds {
		in.off(k)
	}
}

func closeAll(fds []int) {
	for _, fd := range slices.Backward(fds) {
		_ = unix.Close(fd) // nothing was written to them
	}
}
