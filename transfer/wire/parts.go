package wire

import (
	"encoding/binary"
	"fmt"
)

// partSize is what a part costs beside its data: two numbers of 32 bits.
const partSize = 8

// MaxParts is the most parts of one payload, so that table and data together
// stay within MaxPayload.
const MaxParts = 4096

// Extent is a run of data in a sparse chunk.
type Extent struct{ Offset, Length uint32 }

// AppendExtents appends to dst the payload of a sparse chunk: for each extent
// its offset and length, then its bytes. Extents must ascend.
func AppendExtents(dst, chunk []byte, extents []Extent) []byte {
	for _, e := range extents {
		dst = binary.BigEndian.AppendUint32(dst, e.Offset)
		dst = binary.BigEndian.AppendUint32(dst, e.Length)
		dst = append(dst, chunk[e.Offset:e.Offset+e.Length]...)
	}
	return dst
}

// Extents calls fn for each extent of a sparse chunk of size bytes, in order.
func Extents(payload []byte, size uint32, fn func(Extent, []byte) error) error {
	var end uint64
	for parts := 0; len(payload) > 0; parts++ {
		offset, length, rest, err := part(payload, parts)
		if err != nil {
			return err
		}
		if uint64(offset) < end || uint64(offset)+uint64(length) > uint64(size) {
			return fmt.Errorf("%w: extent %d+%d of %d", ErrMalformed, offset, length, size)
		}
		end = uint64(offset) + uint64(length)
		if err := fn(Extent{offset, length}, rest[:length]); err != nil {
			return err
		}
		payload = rest[length:]
	}
	return nil
}

// AppendPackHeader starts a file of length bytes in a pack; its bytes follow.
func AppendPackHeader(dst []byte, object, length uint32) []byte {
	dst = binary.BigEndian.AppendUint32(dst, object)
	return binary.BigEndian.AppendUint32(dst, length)
}

// Parts calls fn for each file of a pack.
func Parts(payload []byte, fn func(object uint32, data []byte) error) error {
	for parts := 0; len(payload) > 0; parts++ {
		object, length, rest, err := part(payload, parts)
		if err != nil {
			return err
		}
		if err := fn(object, rest[:length]); err != nil {
			return err
		}
		payload = rest[length:]
	}
	return nil
}

func part(b []byte, before int) (first, length uint32, rest []byte, err error) {
	if before >= MaxParts || len(b) < partSize {
		return 0, 0, nil, fmt.Errorf("%w: part %d of %d bytes", ErrMalformed, before, len(b))
	}
	first, length = binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
	rest = b[partSize:]
	if uint64(length) > uint64(len(rest)) {
		return 0, 0, nil, fmt.Errorf("%w: part of %d bytes in %d", ErrMalformed, length, len(rest))
	}
	return first, length, rest, nil
}
