// Package wire is the form of what workers send each other on a data
// connection: a header of fixed size, then a payload. Numbers are big-endian.
//
//	0   4  magic "tbx1"
//	4   1  kind
//	5   1  reserved, zero
//	6   2  flags
//	8   8  session: the transfer
//	16  8  stream: the unit of work; an answer repeats it
//	24  8  object: the file's number in the manifest
//	32  8  offset in the object
//	40  4  size: bytes of the object that this frame covers
//	44  4  length of the payload
//	48 16  digest: XXH3-128 of the size bytes, before holes were left out
//
// Parsers here take what comes from a network: they allocate nothing by a
// length that they have not checked.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Sizes in bytes.
const (
	HeaderSize = 64
	// ChunkSize is the most bytes of an object that one frame covers.
	ChunkSize = 4 << 20
	// MaxPayload is the most bytes that a frame carries: a chunk and the table
	// of its parts.
	MaxPayload = ChunkSize + 64<<10
)

const magic = 0x74627831 // "tbx1"

// Kind of frame.
type Kind uint8

// The kinds. Chunk and Pack go from source to destination, answers back.
const (
	Hello  Kind = 1 // first frame of a connection: Object is the path's number
	Chunk  Kind = 2 // a piece of one file
	Pack   Kind = 3 // several small files
	Ack    Kind = 4 // verified and written
	Nack   Kind = 5 // the digest did not match: send it again
	Refuse Kind = 6 // cannot be taken; why is said on the control stream
)

// Flags.
const (
	// Sparse chunks carry only their data: see AppendExtents.
	Sparse uint16 = 1 << 0
)

// ErrMalformed is wrapped by every error of a parser.
var ErrMalformed = errors.New("malformed frame")

// Digest is XXH3-128 as two halves.
type Digest [16]byte

// Sum returns the digest of b.
func Sum(b []byte) Digest { return xxh3.Hash128(b).Bytes() }

// Header of a frame.
type Header struct {
	Kind    Kind
	Flags   uint16
	Session uint64
	Stream  uint64
	Object  uint64
	Offset  uint64
	Size    uint32
	Length  uint32
	Digest  Digest
}

// Put writes the header into b, which must hold HeaderSize bytes.
func (h Header) Put(b []byte) {
	_ = b[HeaderSize-1]
	binary.BigEndian.PutUint32(b[0:], magic)
	b[4], b[5] = byte(h.Kind), 0
	binary.BigEndian.PutUint16(b[6:], h.Flags)
	binary.BigEndian.PutUint64(b[8:], h.Session)
	binary.BigEndian.PutUint64(b[16:], h.Stream)
	binary.BigEndian.PutUint64(b[24:], h.Object)
	binary.BigEndian.PutUint64(b[32:], h.Offset)
	binary.BigEndian.PutUint32(b[40:], h.Size)
	binary.BigEndian.PutUint32(b[44:], h.Length)
	copy(b[48:], h.Digest[:])
}

// Parse reads a header and checks that its lengths are within bounds.
func Parse(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, fmt.Errorf("%w: %d bytes of header", ErrMalformed, len(b))
	}
	if binary.BigEndian.Uint32(b) != magic {
		return Header{}, fmt.Errorf("%w: bad magic", ErrMalformed)
	}
	h := Header{
		Kind:    Kind(b[4]),
		Flags:   binary.BigEndian.Uint16(b[6:]),
		Session: binary.BigEndian.Uint64(b[8:]),
		Stream:  binary.BigEndian.Uint64(b[16:]),
		Object:  binary.BigEndian.Uint64(b[24:]),
		Offset:  binary.BigEndian.Uint64(b[32:]),
		Size:    binary.BigEndian.Uint32(b[40:]),
		Length:  binary.BigEndian.Uint32(b[44:]),
		Digest:  Digest(b[48:64]),
	}
	switch {
	case h.Kind < Hello || h.Kind > Refuse:
		return Header{}, fmt.Errorf("%w: kind %d", ErrMalformed, h.Kind)
	case b[5] != 0 || h.Flags&^Sparse != 0:
		return Header{}, fmt.Errorf("%w: unknown flags", ErrMalformed)
	case h.Length > MaxPayload || h.Size > MaxPayload:
		return Header{}, fmt.Errorf("%w: %d bytes of payload for %d", ErrMalformed, h.Length, h.Size)
	case h.Kind != Chunk && h.Kind != Pack && h.Length != 0:
		return Header{}, fmt.Errorf("%w: kind %d with a payload", ErrMalformed, h.Kind)
	case h.Offset > 1<<62:
		return Header{}, fmt.Errorf("%w: offset %d", ErrMalformed, h.Offset)
	}
	return h, nil
}
