//go:build linux

package usb4

import (
	"encoding/binary"
)

var le = binary.LittleEndian

const (
	configSize = 256
	barSize    = 256 << 10 // BAR 0: the registers of the host interface
	msixSize   = 4096      // BAR 2: the MSI-X table, which QEMU keeps itself

	pciCommand  = 0x04
	pciMaster   = 1 << 2
	capMSIX     = 0x40
	capPM       = 0x50
	pmControl   = capPM + 4
	pmStateMask = 3
	pmD3        = 3
	pmNoReset   = 1 << 3
	pmEnable    = 1 << 8
	pmStatus    = 1 << 15
)

// pciFunction is the configuration space of the PCI function, and the bytes of
// its MSI-X table.
type pciFunction struct {
	config   [configSize]byte
	writable [configSize]byte // bits that a write changes
	msix     [msixSize]byte
	options  HostOptions
}

func newPCIFunction(o HostOptions) pciFunction {
	p := pciFunction{options: o}
	p.reset()
	return p
}

func (p *pciFunction) reset() {
	p.config, p.writable, p.msix = [configSize]byte{}, [configSize]byte{}, [msixSize]byte{}
	c := p.config[:]
	le.PutUint16(c[0x00:], p.options.Vendor)
	le.PutUint16(c[0x02:], p.options.Device)
	le.PutUint16(c[0x06:], 1<<4)                 // there are capabilities
	c[0x08] = 1                                  // revision
	c[0x09], c[0x0a], c[0x0b] = 0x40, 0x03, 0x0c // USB4 host interface (PCI_CLASS_SERIAL_USB_USB4)
	le.PutUint32(c[0x10:], 1<<2)                 // BAR 0, 64 bits wide
	le.PutUint32(c[0x18:], 1<<2)                 // BAR 2, 64 bits wide
	le.PutUint16(c[0x2c:], p.options.Vendor)
	le.PutUint16(c[0x2e:], 1)
	c[0x34] = capMSIX

	c[capMSIX], c[capMSIX+1] = 0x11, capPM
	le.PutUint16(c[capMSIX+2:], numVectors-1)
	le.PutUint32(c[capMSIX+4:], 2)           // table: BAR 2, offset 0
	le.PutUint32(c[capMSIX+8:], 0x800|2)     // pending bits: BAR 2, offset 0x800
	c[capPM], c[capPM+1] = 0x01, 0           // power management, the last capability
	le.PutUint16(c[capPM+2:], 3|1<<11|1<<14) // version 3; PME from D0 and D3hot
	le.PutUint16(c[pmControl:], pmNoReset)

	w := p.writable[:]
	le.PutUint16(w[pciCommand:], 0x0507)
	w[0x0c], w[0x3c] = 0xff, 0xff
	for i := range 16 { // BARs; QEMU keeps their addresses itself
		w[0x10+i] = 0xff
	}
	w[capMSIX+3] = 0xc0
	w[pmControl] = pmStateMask
	w[pmControl+1] = pmEnable >> 8
}

func (p *pciFunction) read(offset uint64, b []byte) { copy(b, p.config[offset:]) }

func (p *pciFunction) write(offset uint64, b []byte) {
	for i, v := range b {
		at := int(offset) + i
		if at == pmControl+1 && v&(pmStatus>>8) != 0 { // written with 1, it is cleared
			p.config[at] &^= pmStatus >> 8
		}
		p.config[at] = p.config[at]&^p.writable[at] | v&p.writable[at]
	}
}

func (p *pciFunction) mastering() bool { return le.Uint16(p.config[pciCommand:])&pciMaster != 0 }

// wake asks for power, if the function sleeps and is to be woken. Linux looks
// at the bit once a second (drivers/pci/pci.c, pci_pme_list_scan) for functions
// that have no root port to tell it.
func (p *pciFunction) wake() bool {
	c := le.Uint16(p.config[pmControl:])
	if c&pmStateMask != pmD3 || c&pmEnable == 0 {
		return false
	}
	le.PutUint16(p.config[pmControl:], c|pmStatus)
	return true
}
