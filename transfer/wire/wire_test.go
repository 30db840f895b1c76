package wire

import (
	"bytes"
	"errors"
	"testing"
)

func TestAHeaderComesBackAsPut(t *testing.T) {
	h := Header{Kind: Chunk, Flags: Sparse, Session: 1 << 60, Stream: 7, Object: 9, Offset: 3 * ChunkSize, Size: ChunkSize, Length: MaxPayload, Digest: Sum([]byte("x"))}
	var b [HeaderSize]byte
	h.Put(b[:])
	if got, err := Parse(b[:]); err != nil || got != h {
		t.Fatalf("%+v, %v; want %+v", got, err, h)
	}
}

func TestHeadersOutOfBoundsAreRefused(t *testing.T) {
	for name, h := range map[string]Header{
		"payload too long":   {Kind: Chunk, Length: MaxPayload + 1},
		"size too large":     {Kind: Chunk, Size: MaxPayload + 1},
		"unknown kind":       {Kind: Refuse + 1},
		"kind zero":          {},
		"answer with a body": {Kind: Ack, Length: 1},
		"unknown flag":       {Kind: Chunk, Flags: 1 << 9},
		"negative offset":    {Kind: Chunk, Offset: 1 << 63},
	} {
		var b [HeaderSize]byte
		h.Put(b[:])
		if _, err := Parse(b[:]); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Parse(make([]byte, HeaderSize)); !errors.Is(err, ErrMalformed) {
		t.Errorf("no magic: %v", err)
	}
}

func TestASparseChunkComesBack(t *testing.T) {
	chunk := make([]byte, 1000)
	copy(chunk[100:], "data")
	copy(chunk[900:], bytes.Repeat([]byte("e"), 100))
	p := AppendExtents(nil, chunk, []Extent{{100, 4}, {900, 100}})
	got := make([]byte, 1000)
	err := Extents(p, 1000, func(e Extent, b []byte) error {
		copy(got[e.Offset:], b)
		return nil
	})
	if err != nil || !bytes.Equal(got, chunk) {
		t.Fatalf("differs, %v", err)
	}
	for _, bad := range [][]byte{p[:len(p)-1], AppendExtents(nil, chunk, []Extent{{900, 100}, {100, 4}}), AppendExtents(nil, make([]byte, 2000), []Extent{{999, 2}})} {
		if err := Extents(bad, 1000, func(Extent, []byte) error { return nil }); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d bytes: %v", len(bad), err)
		}
	}
}

func FuzzParse(f *testing.F) {
	var b [HeaderSize]byte
	Header{Kind: Pack, Size: 5, Length: 5}.Put(b[:])
	f.Add(b[:])
	f.Fuzz(func(t *testing.T, in []byte) {
		h, err := Parse(in)
		if err != nil {
			return
		}
		if h.Length > MaxPayload || h.Size > MaxPayload {
			t.Fatalf("%+v", h)
		}
		var out [HeaderSize]byte
		h.Put(out[:])
		if !bytes.Equal(out[:], in[:HeaderSize]) {
			t.Fatalf("%x came back as %x", in[:HeaderSize], out)
		}
	})
}

func FuzzExtents(f *testing.F) {
	f.Add(AppendExtents(nil, make([]byte, 64), []Extent{{0, 8}, {16, 8}}), uint32(64))
	f.Fuzz(func(t *testing.T, in []byte, size uint32) {
		size %= ChunkSize
		chunk := make([]byte, size)
		end := uint32(0)
		_ = Extents(in, size, func(e Extent, b []byte) error {
			if e.Offset < end || int(e.Length) != len(b) {
				t.Fatalf("extent %+v after %d with %d bytes", e, end, len(b))
			}
			end = e.Offset + e.Length
			copy(chunk[e.Offset:end], b) // panics where it would be out of bounds
			return nil
		})
	})
}

func FuzzParts(f *testing.F) {
	f.Add(append(AppendPackHeader(append(AppendPackHeader(nil, 1, 2), "ab"...), 2, 1), 'c'))
	f.Fuzz(func(t *testing.T, in []byte) {
		total := 0
		err := Parts(in, func(_ uint32, b []byte) error {
			total += partSize + len(b)
			return nil
		})
		if total > len(in) || err == nil && total != len(in) {
			t.Fatalf("%d bytes out of %d, %v", total, len(in), err)
		}
	})
}
