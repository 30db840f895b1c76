//go:build linux

package usb4

import (
	"encoding/binary"
	"hash/crc32"
)

var be = binary.BigEndian

// packetType is the type of a control packet: the end of frame of its
// descriptor (drivers/thunderbolt/tb_msgs.h; include/linux/thunderbolt.h,
// enum tb_cfg_pkg_type).
type packetType uint8

const (
	packetRead            packetType = 1
	packetWrite           packetType = 2
	packetError           packetType = 3
	packetNotifyAck       packetType = 4
	packetEvent           packetType = 5
	packetXDomainRequest  packetType = 6
	packetXDomainResponse packetType = 7
)

// space is a configuration space (enum tb_cfg_space).
type space uint8

const (
	spacePaths    space = 0
	spaceAdapter  space = 1
	spaceRouter   space = 2
	spaceCounters space = 3
)

// Error codes (enum tb_cfg_error).
const (
	errorNotConnected = 0
	errorSpace        = 2
	errorNoPort       = 4
	errorAckPlug      = 7
	errorLocked       = 15
)

const (
	maxPacket  = 256 // with the CRC
	maxDwords  = maxPacket/4 - 1
	fromRouter = 1 << 31 // of the first dword: on its way to the driver
	routeHigh  = 0x3fffff
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// packet is a control packet without its CRC.
type packet struct {
	kind  packetType
	words [maxDwords]uint32
	n     int // words that it has
}

// parsePacket checks a control packet as it is on the ring. ok is false when
// its CRC or its length is wrong.
func parsePacket(kind uint8, b []byte) (p packet, ok bool) {
	if len(b) < 12 || len(b)%4 != 0 || len(b) > maxPacket {
		return packet{}, false
	}
	body := b[:len(b)-4]
	if be.Uint32(b[len(body):]) != crc32.Checksum(body, castagnoli) {
		return packet{}, false
	}
	p.kind, p.n = packetType(kind), len(body)/4
	for i := range p.n {
		p.words[i] = be.Uint32(body[4*i:])
	}
	return p, true
}

// newPacket makes a packet.
func newPacket(kind packetType, words ...uint32) packet {
	p := packet{kind: kind}
	p.n = copy(p.words[:], words)
	return p
}

// append appends the packet as it is on the ring.
func (p *packet) append(b []byte) []byte {
	start := len(b)
	for _, w := range p.words[:p.n] {
		b = be.AppendUint32(b, w)
	}
	return be.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

func (p *packet) route() uint64 {
	return uint64(p.words[0]&routeHigh)<<32 | uint64(p.words[1])
}

// address is the third dword of READ and WRITE (struct tb_cfg_address).
type address uint32

func (a address) offset() uint32 { return uint32(a) & 0x1fff }
func (a address) length() uint32 { return uint32(a) >> 13 & 0x3f }
func (a address) adapter() int   { return int(a >> 19 & 0x3f) }
func (a address) space() space   { return space(a >> 25 & 3) }
func (a address) sequence() int  { return int(a >> 27 & 3) }

// from returns the address with the adapter through which the answer leaves.
func (a address) from(adapter int) uint32 { return uint32(a)&^(0x3f<<19) | uint32(adapter)<<19 }
