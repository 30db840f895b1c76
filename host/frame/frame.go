// Package frame carries JSON messages over a byte stream: the control streams
// of workers and the root half's socketpair. A message is a big-endian uint32
// length and that many bytes of JSON.
package frame

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Max is the most bytes that one message may have: room for a manifest page,
// far below what could hurt.
const Max = 16 << 20

// ErrTooLarge is returned for a message longer than Max; the stream cannot be
// used after it.
var ErrTooLarge = errors.New("message too large")

// Conn sends and receives messages. Send may be called from several
// goroutines; Receive from one at a time.
type Conn struct {
	rw io.ReadWriteCloser
	mu sync.Mutex
}

// New returns a Conn over rw, which it owns from then on.
func New(rw io.ReadWriteCloser) *Conn { return &Conn{rw: rw} }

// Send writes one message.
func (c *Conn) Send(v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	if len(body) > Max {
		return fmt.Errorf("send %d bytes: %w", len(body), ErrTooLarge)
	}
	buf := make([]byte, 4+len(body))
	binary.BigEndian.PutUint32(buf, uint32(len(body)))
	copy(buf[4:], body)
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err = c.rw.Write(buf)
	return err
}

// Receive reads one message into v. It returns io.EOF at a clean end and
// io.ErrUnexpectedEOF within a message.
func (c *Conn) Receive(v any) error {
	body, err := Read(c.rw)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("decode message: %w", err)
	}
	return nil
}

// Close closes the stream.
func (c *Conn) Close() error { return c.rw.Close() }

// Read reads the body of one message. It allocates as bytes arrive, not as the
// length promises.
func Read(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > Max {
		return nil, fmt.Errorf("receive %d bytes: %w", n, ErrTooLarge)
	}
	const step = 64 << 10
	body := make([]byte, 0, min(int(n), step))
	for len(body) < int(n) {
		want := min(int(n)-len(body), step)
		start := len(body)
		body = append(body, make([]byte, want)...)
		if _, err := io.ReadFull(r, body[start:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return body, nil
}
