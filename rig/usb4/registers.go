//go:build linux

package usb4

import (
	"fmt"
	"time"

	"tbcluster/rig/vfiouser"
)

// Registers of the host interface in BAR 0 (drivers/thunderbolt/nhi_regs.h).
// Banks have an entry for each ring.
const (
	regTXRing    = 0x00000 // 16 bytes an entry
	regRXRing    = 0x08000
	regTXOptions = 0x19800 // 32 bytes an entry
	regRXOptions = 0x29800
	regNotify    = 0x37800
	regClear     = 0x37808
	regEnable    = 0x38200
	regMask      = 0x38208
	regThrottle  = 0x38c00
	regVectors   = 0x38c40
	regCaps      = 0x39640
	regDMAMisc   = 0x39864
	regReset     = 0x39898

	ringBase    = 0 // in an entry of a ring bank
	ringBaseHi  = 4
	ringIndices = 8
	ringSize    = 12
	ringOptions = 0 // in an entry of an options bank
	ringMask    = 4

	capsVersion2  = 0x40 << 16
	noAutoClear   = 1 << 17 // of regDMAMisc
	resetHost     = 1 << 0  // of regReset
	throttleNanos = 256     // unit of regThrottle
)

// Read is a read of a region (vfiouser.Device).
func (h *Host) Read(region int, offset uint64, p []byte) error {
	h.fabric.lock()
	defer h.fabric.unlock()
	switch region {
	case vfiouser.RegionConfig:
		h.pci.read(offset, p)
	case vfiouser.RegionBAR2:
		copy(p, h.pci.msix[offset:])
	case vfiouser.RegionBAR0:
		for len(p) > 0 { // registers are 32 bits wide, whatever is asked for
			var word [4]byte
			at := offset &^ 3
			v := h.readRegister(uint32(at))
			if h.fabric.traceRegisters {
				h.fabric.trace(kindRegister, &h.node, nil, func() string { return fmt.Sprintf("> read  %s: %#x", registerName(uint32(at)), v) })
			}
			le.PutUint32(word[:], v)
			n := copy(p, word[offset&3:])
			p, offset = p[n:], offset+uint64(n)
		}
	}
	return nil
}

// Write is a write to a region (vfiouser.Device).
func (h *Host) Write(region int, offset uint64, p []byte) error {
	h.fabric.lock()
	defer h.fabric.unlock()
	switch region {
	case vfiouser.RegionConfig:
		h.pci.write(offset, p)
		if h.mastering() {
			h.fabric.stirred = true
		}
	case vfiouser.RegionBAR2:
		copy(h.pci.msix[offset:], p)
	case vfiouser.RegionBAR0:
		// The driver writes whole registers; anything else is ignored, as the
		// specification leaves it open.
		for ; offset&3 == 0 && len(p) >= 4; p, offset = p[4:], offset+4 {
			v := le.Uint32(p)
			if h.fabric.traceRegisters {
				h.fabric.trace(kindRegister, &h.node, nil, func() string { return fmt.Sprintf("> write %s: %#x", registerName(uint32(offset)), v) })
			}
			h.writeRegister(uint32(offset), v)
		}
	}
	return nil
}

// bank finds the ring and the place in its entry that a register belongs to.
func (h *Host) bank(at uint32) (r *ring, options bool, place uint32) {
	n := uint32(len(h.tx))
	switch {
	case at < regTXRing+16*n:
		return &h.tx[at/16], false, at % 16
	case at >= regRXRing && at < regRXRing+16*n:
		return &h.rx[(at-regRXRing)/16], false, at % 16
	case at >= regTXOptions && at < regTXOptions+32*n:
		return &h.tx[(at-regTXOptions)/32], true, at % 32
	case at >= regRXOptions && at < regRXOptions+32*n:
		return &h.rx[(at-regRXOptions)/32], true, at % 32
	}
	return nil, false, 0
}

func (h *Host) readRegister(at uint32) uint32 {
	if r, options, place := h.bank(at); r != nil {
		return r.readRegister(options, place)
	}
	switch {
	case at == regNotify || at == regNotify+4:
		shift := 8 * (at - regNotify)
		v := uint32(h.notify >> shift)
		if h.dmaMisc&noAutoClear == 0 {
			h.notify &^= 0xffffffff << shift
		}
		return v
	case at == regEnable || at == regEnable+4:
		return uint32(h.enabled >> (8 * (at - regEnable)))
	case at >= regThrottle && at < regThrottle+4*numVectors:
		return uint32(h.gates[(at-regThrottle)/4].interval / throttleNanos)
	case at >= regVectors && at < regVectors+uint32(len(h.vectors))/2:
		var v uint32
		for i := range uint32(8) {
			v |= uint32(h.vectors[(at-regVectors)*2+i]) << (4 * i)
		}
		return v
	case at == regCaps:
		v := uint32(len(h.tx))
		if h.options.Version == 2 {
			v |= capsVersion2
		}
		return v
	case at == regDMAMisc:
		return h.dmaMisc
	case at == regReset:
		if h.fabric.clock.Now() < h.resetAt {
			return resetHost
		}
	}
	return 0
}

func (h *Host) writeRegister(at uint32, v uint32) {
	if r, options, place := h.bank(at); r != nil {
		r.writeRegister(options, place, v)
		return
	}
	switch {
	case at == regClear || at == regClear+4:
		h.notify &^= uint64(v) << (8 * (at - regClear))
	case at == regEnable || at == regEnable+4:
		shift := 8 * (at - regEnable)
		h.enable(h.enabled&^(0xffffffff<<shift) | uint64(v)<<shift)
	case at == regMask || at == regMask+4:
		h.enable(h.enabled &^ (uint64(v) << (8 * (at - regMask))))
	case at >= regThrottle && at < regThrottle+4*numVectors:
		h.gates[(at-regThrottle)/4].interval = time.Duration(v&0xffff) * throttleNanos
	case at >= regVectors && at < regVectors+uint32(len(h.vectors))/2:
		for i := range uint32(8) {
			h.vectors[(at-regVectors)*2+i] = uint8(v >> (4 * i) & 0xf)
		}
	case at == regDMAMisc:
		h.dmaMisc = v
	case at == regReset:
		if h.options.Version == 2 && v&resetHost != 0 {
			h.resets++
			h.fabric.note(&h.node, nil, "host router reset")
			h.reset()
			h.resetAt = h.fabric.clock.Now() + resetTime
		}
	}
}

// registerName is what traces call a register.
func registerName(at uint32) string {
	entry := func(name string, base, size uint32, places map[uint32]string) string {
		place, ok := places[(at-base)%size]
		if !ok {
			place = fmt.Sprintf("+%d", (at-base)%size)
		}
		return fmt.Sprintf("%s %d %s", name, (at-base)/size, place)
	}
	rings := map[uint32]string{ringBase: "base", ringBaseHi: "base high", ringIndices: "indices", ringSize: "size"}
	options := map[uint32]string{ringOptions: "options", ringMask: "mask"}
	switch {
	case at < regTXRing+16*maxHops:
		return entry("tx ring", regTXRing, 16, rings)
	case at >= regRXRing && at < regRXRing+16*maxHops:
		return entry("rx ring", regRXRing, 16, rings)
	case at >= regTXOptions && at < regTXOptions+32*maxHops:
		return entry("tx ring", regTXOptions, 32, options)
	case at >= regRXOptions && at < regRXOptions+32*maxHops:
		return entry("rx ring", regRXOptions, 32, options)
	case at >= regThrottle && at < regThrottle+4*numVectors:
		return fmt.Sprintf("throttle of vector %d", (at-regThrottle)/4)
	case at >= regVectors && at < regVectors+maxHops:
		return fmt.Sprintf("vectors +%d", at-regVectors)
	}
	names := map[uint32]string{regNotify: "notify", regClear: "notify clear", regEnable: "interrupt enable", regMask: "interrupt disable", regCaps: "capabilities", regDMAMisc: "DMA misc", regReset: "reset"}
	for _, high := range []uint32{0, 4} {
		if n, ok := names[at-high]; ok {
			if high != 0 {
				n += " high"
			}
			return n
		}
	}
	return fmt.Sprintf("register %#x", at)
}
