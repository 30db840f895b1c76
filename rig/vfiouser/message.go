//go:build linux

package vfiouser

import (
	"encoding/binary"
	"encoding/json"
)

var le = binary.LittleEndian

// Commands of vfio-user 0.1.
const (
	cmdVersion = 1 + iota
	cmdDMAMap
	cmdDMAUnmap
	cmdDeviceInfo
	cmdRegionInfo
	cmdRegionIOFDs
	cmdIRQInfo
	cmdSetIRQs
	cmdRegionRead
	cmdRegionWrite
	cmdDMARead
	cmdDMAWrite
	cmdDeviceReset
	cmdDirtyPages
	cmdRegionWriteMulti
)

// The header: message ID, command, size, flags, errno.
const (
	headerSize = 16

	flagTypeMask = 0xf
	flagReply    = 1
	flagNoReply  = 1 << 4
	flagError    = 1 << 5
)

const (
	majorVersion = 0
	minorVersion = 1

	maxFDs      = 16      // descriptors with one message
	maxTransfer = 1 << 20 // bytes in one read or write of a region
	maxMessage  = headerSize + 64 + maxTransfer

	deviceReset = 1 << 0 // flags of DEVICE_INFO
	devicePCI   = 1 << 1

	regionReadable = 1 << 0 // flags of REGION_INFO
	regionWritable = 1 << 1

	irqEventfd  = 1 << 0 // flags of IRQ_INFO
	irqMaskable = 1 << 1
	irqNoResize = 1 << 3

	dmaWritable = 1 << 1 // flags of DMA_MAP
	unmapAll    = 1 << 1 // flags of DMA_UNMAP

	multiSize = 24 // one write of REGION_WRITE_MULTI
)

type header struct {
	id, command uint16
	size, flags uint32
	errorOrZero uint32
}

func parseHeader(b []byte) header {
	return header{id: le.Uint16(b), command: le.Uint16(b[2:]), size: le.Uint32(b[4:]), flags: le.Uint32(b[8:]), errorOrZero: le.Uint32(b[12:])}
}

// appendHeader appends a header whose size is put in by finish.
func appendHeader(b []byte, h header) []byte {
	b = le.AppendUint16(b, h.id)
	b = le.AppendUint16(b, h.command)
	b = le.AppendUint32(b, h.size)
	b = le.AppendUint32(b, h.flags)
	return le.AppendUint32(b, h.errorOrZero)
}

// capabilities are what both sides say of themselves in VERSION.
type capabilities struct {
	MaxMsgFDs     int  `json:"max_msg_fds,omitempty"`
	MaxDataXfer   int  `json:"max_data_xfer_size,omitempty"`
	MaxDMAMaps    int  `json:"max_dma_maps,omitempty"`
	WriteMultiple bool `json:"write_multiple,omitempty"`
}

type versionData struct {
	Capabilities capabilities `json:"capabilities"`
}

// ourVersion is the data of our answer to VERSION, with the NUL at its end.
func ourVersion() []byte {
	b, err := json.Marshal(versionData{capabilities{MaxMsgFDs: maxFDs, MaxDataXfer: maxTransfer, MaxDMAMaps: maxRegions, WriteMultiple: true}})
	if err != nil {
		panic(err) // plain numbers
	}
	return append(b, 0)
}
