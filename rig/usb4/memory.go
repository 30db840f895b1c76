//go:build linux

package usb4

import "time"

// grace is how long a ring waits for memory that is not there. A virtual IOMMU
// takes everything away and gives it again when the guest has it forget
// everything it has cached; a device behind a real one notices nothing of that.
const grace = 250 * time.Millisecond

// hunger is that of a host whose memory was not there when it was needed.
type hunger struct {
	since time.Duration
	is    bool
	epoch uint64 // of the memory when it was last looked at
	end   *event
}

// starve is called when memory of the guest is not there. It reports whether to
// wait for it: then everything that has something to send is tried again when
// the guest's memory has changed. After the grace, what cannot be reached is
// lost.
func (h *Host) starve() bool {
	f := h.fabric
	now := f.clock.Now()
	if !h.hungry.is {
		h.hungry.is, h.hungry.since, h.hungry.epoch = true, now, h.hold().Epoch()
		f.schedule.at(h.hungry.end, now+grace)
	}
	if now < h.hungry.since+grace {
		return true
	}
	h.hungry.over(f)
	return false
}

// feed tries again, if memory was not there and has changed.
func (h *Host) feed() {
	if !h.hungry.is || !h.attached {
		return
	}
	if e := h.hold().Epoch(); e != h.hungry.epoch {
		since := h.hungry.since
		h.hungry.over(h.fabric)
		h.fabric.stir()
		if h.hungry.is { // still not there: the grace goes on
			h.hungry.since = since
			h.fabric.schedule.at(h.hungry.end, since+grace)
		}
	}
}

func (g *hunger) over(f *Fabric) {
	g.is = false
	f.schedule.cancel(g.end)
}
