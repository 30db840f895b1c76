package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

// receiver runs receive on the loopback and returns its port and its end.
func receiver(t *testing.T) (port int, out *json.Decoder, end <-chan error) {
	t.Helper()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := receive(t.Context(), "lo", json.NewEncoder(w))
		w.CloseWithError(io.EOF)
		done <- err
	}()
	out = json.NewDecoder(r)
	var at struct{ Port int }
	if err := out.Decode(&at); err != nil {
		t.Fatalf("the receiver says no port: %v", err)
	}
	return at.Port, out, done
}

func TestStreamsArriveBothWays(t *testing.T) {
	for _, size := range []int64{0, 1, 7, 64<<10 - 1, 64 << 10, 1<<20 + 3} {
		port, out, end := receiver(t)
		var b bytes.Buffer
		if err := send(t.Context(), "lo", fmt.Sprintf("127.0.0.1:%d", port), 9, size, json.NewEncoder(&b)); err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		var sent, received Result
		if err := json.NewDecoder(&b).Decode(&sent); err != nil {
			t.Fatal(err)
		}
		if err := out.Decode(&received); err != nil {
			t.Fatal(err)
		}
		if err := <-end; err != nil {
			t.Fatal(err)
		}
		if sent.Bytes != size || received.Bytes != size || sent.Sent != received.Received || sent.Received != received.Sent {
			t.Errorf("%d bytes: sent %+v, received %+v", size, sent, received)
		}
		if size > 8 && sent.Sent == sent.Received {
			t.Errorf("%d bytes: the same went back", size)
		}
	}
}

// spoiler passes on a stream and changes one byte of it.
func spoiler(t *testing.T, port, at int) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		in, err := l.Accept()
		if err != nil {
			return
		}
		defer in.Close()
		out, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return
		}
		defer out.Close()
		go func() {
			_, _ = io.Copy(in, out)
			in.Close() // whoever ends at one side, ends at both
		}()
		head := make([]byte, at+1)
		if _, err := io.ReadFull(in, head); err != nil {
			return
		}
		head[at] ^= 4
		if _, err := out.Write(head); err == nil {
			_, _ = io.Copy(out, in)
		}
	}()
	return l
}

func TestOneWrongBitIsFound(t *testing.T) {
	const wrong = 70_001
	port, _, end := receiver(t)
	l := spoiler(t, port, headerSize+wrong)
	if err := send(t.Context(), "lo", l.Addr().String(), 3, 100_000, json.NewEncoder(io.Discard)); err == nil {
		t.Error("the sender knows of nothing")
	}
	if err := <-end; err == nil || !strings.Contains(err.Error(), fmt.Sprintf("byte %d of 100000", wrong)) {
		t.Errorf("the receiver says %v", err)
	}
}

func TestWhatIsNoStreamIsRefused(t *testing.T) {
	port, _, end := receiver(t)
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if err := <-end; err == nil || !strings.Contains(err.Error(), "no stream") {
		t.Errorf("the receiver says %v", err)
	}
}

func TestReceiverEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	end := make(chan error, 1)
	go func() { end <- receive(ctx, "lo", json.NewEncoder(w)) }()
	if err := json.NewDecoder(r).Decode(&struct{ Port int }{}); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-end; err == nil {
		t.Error("it ended as if it had received something")
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"watch", "x"}, {"receive"}, {"send", "lo", "a", "b", "c"}, {"send", "lo", "a", "1", "-1"}, {"dance"}} {
		if err := run(t.Context(), args, io.Discard); err != errUsage {
			t.Errorf("%v: %v", args, err)
		}
	}
}
