package link

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestAFrameComesBackAsItWasSent(t *testing.T) {
	for _, f := range []frame{
		{kind: framePing, sequence: 1, port: "0-2"},
		{kind: framePong, sequence: 1<<64 - 1, port: strings.Repeat("p", maxPortName), good: true},
	} {
		got, err := readFrame(bytes.NewReader(f.append(nil)))
		if err != nil || got != f {
			t.Errorf("%+v came back as %+v, %v", f, got, err)
		}
	}
}

func TestWhatIsNoFrameIsRefused(t *testing.T) {
	good := frame{kind: framePing, sequence: 7, port: "0-2"}.append(nil)
	change := func(at int, to byte) []byte { b := bytes.Clone(good); b[at] = to; return b }
	for name, b := range map[string][]byte{
		"magic": change(0, 'x'), "version": change(1, 9), "kind": change(2, 3), "no port": change(12, 0),
		"long port": change(12, 255), "control character": change(13, '\n'),
	} {
		if _, err := readFrame(bytes.NewReader(b)); !errors.Is(err, errFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n := 1; n < len(good); n++ {
		if _, err := readFrame(bytes.NewReader(good[:n])); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
}

func FuzzFrame(f *testing.F) {
	f.Add(frame{kind: framePing, sequence: 1, port: "0-2"}.append(nil))
	f.Add(frame{kind: framePong, sequence: 1 << 40, port: "Receptacle-3", good: true}.append(nil))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		got, err := readFrame(r)
		if err != nil {
			return
		}
		used := len(b) - r.Len()
		again := got.append(nil)
		again[3] = b[3] // flags that we do not know are not kept
		if !bytes.Equal(again, b[:used]) {
			t.Fatalf("%x was read as %+v, which is %x", b[:used], got, again)
		}
	})
}

func TestAUUIDHasOneFormHoweverItIsSpelt(t *testing.T) {
	forms := []string{
		"c0de0000-1122-8033-8044-00000000550a", "C0DE0000-1122-8033-8044-00000000550A",
		"0000dec0-3380-2211-0000-44800a550000", "c0de000011228033804400000000550a",
	}
	for _, f := range forms {
		if CanonicalUUID(f) != CanonicalUUID(forms[0]) {
			t.Errorf("%s is not %s", f, forms[0])
		}
	}
	if CanonicalUUID("c0de0000-1122-8033-8044-00000000550b") == CanonicalUUID(forms[0]) {
		t.Error("another UUID has the same form")
	}
	if got := CanonicalUUID("Not-A-UUID"); got != "not-a-uuid" {
		t.Errorf("text that is no UUID became %q", got)
	}
}
