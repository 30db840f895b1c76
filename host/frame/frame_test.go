package frame

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

type buffer struct{ bytes.Buffer }

func (*buffer) Close() error { return nil }

func TestMessagesComeBackAsSent(t *testing.T) {
	b := &buffer{}
	c := New(b)
	for _, s := range []string{"", "one", string(bytes.Repeat([]byte("x"), 200<<10))} {
		if err := c.Send(s); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := c.Receive(&got); err != nil || got != s {
			t.Fatalf("got %d bytes, %v; want %d", len(got), err, len(s))
		}
	}
	var v any
	if err := c.Receive(&v); !errors.Is(err, io.EOF) {
		t.Fatalf("at the end: %v, want EOF", err)
	}
}

func TestTooLargeIsRefusedBothWays(t *testing.T) {
	c := New(&buffer{})
	if err := c.Send(string(make([]byte, Max))); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("send: %v", err)
	}
	if _, err := Read(bytes.NewReader([]byte{0xff, 0xff, 0xff, 0xff})); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("read: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, '{', '}'})
	f.Add([]byte{0, 0, 1, 0, '"'})
	f.Fuzz(func(t *testing.T, in []byte) {
		body, err := Read(bytes.NewReader(in))
		if err == nil && len(body) > len(in)-4 {
			t.Fatalf("%d bytes out of %d", len(body), len(in))
		}
	})
}
