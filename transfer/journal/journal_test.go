package journal

import (
	"bytes"
	"errors"
	"testing"

	"tbcluster/transfer/wire"
)

func header() Header {
	return Header{Identity: [IdentitySize]byte{1, 2, 3}, Size: 10*wire.ChunkSize + 5, ChunkSize: wire.ChunkSize}
}

func written(t testing.TB, chunks ...uint32) []byte {
	t.Helper()
	b := &bytes.Buffer{}
	if err := Create(b, header()); err != nil {
		t.Fatal(err)
	}
	for _, c := range chunks {
		if err := Append(b, Record{c, wire.Sum([]byte{byte(c)})}); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func TestWhatWasRecordedIsRead(t *testing.T) {
	b := written(t, 3, 0, 10)
	h, rec, good, err := Read(bytes.NewReader(b))
	if err != nil || h != header() || good != int64(len(b)) || len(rec) != 3 || rec[10] != wire.Sum([]byte{10}) {
		t.Fatalf("%+v %v %d %v", h, rec, good, err)
	}
	if h.Chunks() != 11 {
		t.Errorf("%d chunks", h.Chunks())
	}
}

func TestADamagedTailIsLeftOut(t *testing.T) {
	whole := written(t, 1, 2)
	first := int64(len(written(t, 1)))
	for name, b := range map[string][]byte{
		"torn":                  whole[:len(whole)-1],
		"flipped":               append(append([]byte{}, whole[:len(whole)-1]...), whole[len(whole)-1]^1),
		"zeros":                 append(append([]byte{}, whole[:first]...), make([]byte, 100)...),
		"a chunk out of bounds": written(t, 1, 11),
	} {
		_, rec, good, err := Read(bytes.NewReader(b))
		if err != nil || good != first || len(rec) != 1 {
			t.Errorf("%s: %v, %d sound bytes, %v", name, rec, good, err)
		}
	}
}

func TestWhatIsNoJournalIsSaidSo(t *testing.T) {
	b := written(t)
	for name, b := range map[string][]byte{"empty": nil, "short": b[:len(b)-1], "other": bytes.Repeat([]byte("x"), 200)} {
		if _, _, _, err := Read(bytes.NewReader(b)); !errors.Is(err, ErrForeign) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(written(f))
	f.Add(written(f, 1, 2, 3))
	f.Add(written(f, 1, 2, 3)[:80])
	f.Fuzz(func(t *testing.T, in []byte) {
		h, rec, good, err := Read(bytes.NewReader(in))
		if err != nil {
			return
		}
		if good > int64(len(in)) || int64(len(rec))*recordSize > good {
			t.Fatalf("%d records in %d of %d bytes", len(rec), good, len(in))
		}
		for c := range rec {
			if int(c) >= h.Chunks() {
				t.Fatalf("chunk %d of %d", c, h.Chunks())
			}
		}
	})
}
