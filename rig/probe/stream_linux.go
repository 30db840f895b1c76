package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/host/sock"
)

// stream makes and compares the bytes that a seed decides.
type stream struct {
	random *rand.PCG
	block  [64 << 10]byte
}

func newStream(seed, direction uint64) *stream { return &stream{random: rand.NewPCG(seed, direction)} }

// next returns the next n bytes, at most a block; they are valid until the next
// call. Only the last piece of a stream may be no multiple of 8.
func (s *stream) next(n int) []byte {
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(s.block[i:], s.random.Uint64())
	}
	return s.block[:n]
}

// write writes size bytes and returns their CRC-32C.
func (s *stream) write(w io.Writer, size int64) (uint32, error) {
	var sum uint32
	for size > 0 {
		b := s.next(int(min(size, int64(len(s.block)))))
		if _, err := w.Write(b); err != nil {
			return sum, err
		}
		sum = crc32.Update(sum, castagnoli, b)
		size -= int64(len(b))
	}
	return sum, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// read reads size bytes, compares each, and returns the CRC-32C of what came.
func (s *stream) read(r io.Reader, size int64) (uint32, error) {
	var sum uint32
	got := make([]byte, len(s.block))
	for at := int64(0); at < size; {
		n := int(min(size-at, int64(len(got))))
		if m, err := io.ReadFull(r, got[:n]); err != nil {
			return sum, fmt.Errorf("after %d of %d bytes: %w", at+int64(m), size, err)
		}
		want := s.next(n)
		for i := range want {
			if got[i] != want[i] {
				return sum, fmt.Errorf("byte %d of %d is %#02x and not %#02x", at+int64(i), size, got[i], want[i])
			}
		}
		sum = crc32.Update(sum, castagnoli, got[:n])
		at += int64(n)
	}
	return sum, nil
}

// header begins a stream: magic, seed, size.
const (
	headerSize = 24
	magic      = 0x7462726967707231 // "tbrigpr1"
)

// Result is what a stream came to.
type Result struct {
	Bytes    int64         `json:"bytes"` // each way
	Sent     string        `json:"sent"`  // CRC-32C, hexadecimal
	Received string        `json:"received"`
	Took     time.Duration `json:"took"` // nanoseconds, both ways
}

// idle is how long nothing may come before a stream is given up.
const idle = 20 * time.Second

// receive takes one stream by an interface: it says its port first.
func receive(ctx context.Context, iface string, say *json.Encoder) error {
	l, err := sock.Listen(ctx, "tcp", "[::]:0", iface)
	if err != nil {
		return err
	}
	defer l.Close()
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("listening at %v", l.Addr())
	}
	if err := say.Encode(map[string]int{"port": addr.Port}); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	begun := time.Now()
	c := deadlined{conn}
	var head [headerSize]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return fmt.Errorf("the header of the stream: %w", err)
	}
	seed, size := binary.BigEndian.Uint64(head[8:]), int64(binary.BigEndian.Uint64(head[16:]))
	if binary.BigEndian.Uint64(head[:]) != magic || size < 0 {
		return errors.New("what came is no stream of this program")
	}
	received, err := newStream(seed, 1).read(bufio.NewReaderSize(c, 256<<10), size)
	if err != nil {
		return err
	}
	sent, err := newStream(seed, 2).write(c, size)
	if err != nil {
		return fmt.Errorf("send back: %w", err)
	}
	// The sender closes when it has everything.
	if _, err := io.ReadFull(c, head[:1]); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the end of the stream: %w", err)
	}
	return say.Encode(result(size, sent, received, begun))
}

func result(size int64, sent, received uint32, begun time.Time) Result {
	return Result{Bytes: size, Sent: fmt.Sprintf("%08x", sent), Received: fmt.Sprintf("%08x", received), Took: time.Since(begun)}
}

// send sends one stream by an interface and compares what comes back.
func send(ctx context.Context, iface, addr string, seed uint64, size int64, say *json.Encoder) error {
	d := net.Dialer{Control: sock.Control(iface), Timeout: idle}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	begun := time.Now()
	c := deadlined{conn}
	var head [headerSize]byte
	binary.BigEndian.PutUint64(head[:], magic)
	binary.BigEndian.PutUint64(head[8:], seed)
	binary.BigEndian.PutUint64(head[16:], uint64(size))
	if _, err := c.Write(head[:]); err != nil {
		return err
	}
	sent, err := newStream(seed, 1).write(c, size)
	if err != nil {
		return err
	}
	received, err := newStream(seed, 2).read(bufio.NewReaderSize(c, 256<<10), size)
	if err != nil {
		return fmt.Errorf("what came back: %w", err)
	}
	if err := conn.Close(); err != nil && !errors.Is(err, unix.ENOTCONN) {
		return err
	}
	return say.Encode(result(size, sent, received, begun))
}

// deadlined gives up when nothing moves for a while.
type deadlined struct{ net.Conn }

func (d deadlined) Read(b []byte) (int, error) {
	if err := d.SetReadDeadline(time.Now().Add(idle)); err != nil {
		return 0, err
	}
	return d.Conn.Read(b)
}

func (d deadlined) Write(b []byte) (int, error) {
	if err := d.SetWriteDeadline(time.Now().Add(idle)); err != nil {
		return 0, err
	}
	return d.Conn.Write(b)
}
