// Package journal remembers which chunks of an unfinished file have arrived.
//
// A journal is a file beside the unfinished one: a header that says what is
// being received, then one record for each chunk, appended after the chunk was
// written. A record holds the chunk's digest, and who resumes reads the chunk
// again and compares: so neither the order in which a file system makes things
// durable nor a torn record can make a chunk count that is not there.
package journal

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"tbcluster/transfer/wire"
)

var magic = [8]byte{'t', 'b', 'c', 'j', 'r', 'n', 'l', '1'}

const (
	// IdentitySize is the size of Header.Identity in bytes.
	IdentitySize = 32
	headerSize   = 8 + IdentitySize + 8 + 4 + 4
	recordSize   = 4 + 16 + 4
)

// ErrForeign is returned by Read for what is no journal of ours.
var ErrForeign = errors.New("not a journal")

// Header says what is being received.
type Header struct {
	Identity  [IdentitySize]byte // of the source's content
	Size      int64              // of the file, in bytes
	ChunkSize uint32             // in bytes
}

// Chunks returns how many chunks the file has.
func (h Header) Chunks() int {
	return int((h.Size + int64(h.ChunkSize) - 1) / int64(h.ChunkSize))
}

// Record is a chunk that has arrived.
type Record struct {
	Chunk  uint32
	Digest wire.Digest
}

// Create writes the header of a new journal.
func Create(w io.Writer, h Header) error {
	b := make([]byte, 0, headerSize)
	b = append(b, magic[:]...)
	b = append(b, h.Identity[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(h.Size))
	b = binary.BigEndian.AppendUint32(b, h.ChunkSize)
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	_, err := w.Write(b)
	return err
}

// Append writes one record, in one call of Write.
func Append(w io.Writer, r Record) error {
	b := make([]byte, 0, recordSize)
	b = binary.BigEndian.AppendUint32(b, r.Chunk)
	b = append(b, r.Digest[:]...)
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	_, err := w.Write(b)
	return err
}

// Read reads a journal. A damaged or unfinished record ends the reading without
// an error; good is how many bytes were sound, so that what follows can be cut
// off. A chunk that is recorded twice counts as last recorded. Records whose
// chunk the file does not have are damage.
func Read(r io.Reader) (h Header, records map[uint32]wire.Digest, good int64, err error) {
	br := bufio.NewReader(r)
	b := make([]byte, headerSize)
	if _, err := io.ReadFull(br, b); err != nil {
		return Header{}, nil, 0, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	sum := binary.BigEndian.Uint32(b[headerSize-4:])
	if !bytes.Equal(b[:8], magic[:]) || crc32.ChecksumIEEE(b[:headerSize-4]) != sum {
		return Header{}, nil, 0, ErrForeign
	}
	copy(h.Identity[:], b[8:])
	h.Size = int64(binary.BigEndian.Uint64(b[8+IdentitySize:]))
	h.ChunkSize = binary.BigEndian.Uint32(b[16+IdentitySize:])
	if h.Size < 0 || h.Size > 1<<60 || h.ChunkSize == 0 || h.ChunkSize > wire.ChunkSize {
		return Header{}, nil, 0, fmt.Errorf("%w: %d bytes in chunks of %d", ErrForeign, h.Size, h.ChunkSize)
	}
	chunks := (h.Size + int64(h.ChunkSize) - 1) / int64(h.ChunkSize)
	good = headerSize
	records = map[uint32]wire.Digest{}
	rec := make([]byte, recordSize)
	for {
		if _, err := io.ReadFull(br, rec); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return h, records, good, nil
			}
			return h, records, good, err
		}
		chunk := binary.BigEndian.Uint32(rec)
		if crc32.ChecksumIEEE(rec[:recordSize-4]) != binary.BigEndian.Uint32(rec[recordSize-4:]) || int64(chunk) >= chunks {
			return h, records, good, nil
		}
		records[chunk] = wire.Digest(rec[4:20])
		good += recordSize
	}
}
