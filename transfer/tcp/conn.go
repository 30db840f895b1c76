package tcp

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"tbcluster/transfer/transport"
	"tbcluster/transfer/wire"
)

// gatherSize is how much a system call moves.
const gatherSize = 256 << 10

// errStranger is returned by a handshake with somebody else.
var errStranger = errors.New("the other side is not the worker that was named")

// gathered is a net.Conn that gathers what is written until it is flushed, and
// reads ahead. TLS writes and reads one record of 16 KiB at a time.
type gathered struct {
	net.Conn
	r    *bufio.Reader
	buf  []byte
	pace transport.Pace
	ctx  context.Context // ends with the connection; for pace
	// eager passes every write on at once. It is set during the handshake,
	// when no other goroutine has the connection.
	eager bool
}

func gather(ctx context.Context, c net.Conn, pace transport.Pace) *gathered {
	return &gathered{Conn: c, r: bufio.NewReaderSize(c, gatherSize), buf: make([]byte, 0, gatherSize+32<<10), pace: pace, ctx: ctx}
}

func (g *gathered) Read(p []byte) (int, error) { return g.r.Read(p) }

func (g *gathered) Write(p []byte) (int, error) {
	g.buf = append(g.buf, p...)
	if len(g.buf) < gatherSize && !g.eager {
		return len(p), nil
	}
	if err := g.flush(); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (g *gathered) flush() error {
	if len(g.buf) == 0 {
		return nil
	}
	if g.pace != nil {
		if err := g.pace(g.ctx, len(g.buf)); err != nil {
			return err
		}
	}
	_, err := g.Conn.Write(g.buf)
	g.buf = g.buf[:0]
	return err
}

// conn implements transport.Conn.
type conn struct {
	raw    net.Conn
	tls    *tls.Conn
	g      *gathered
	cancel context.CancelFunc
	once   sync.Once
	err    error

	mu   sync.Mutex // of the writing side
	head [wire.HeaderSize]byte
	in   [wire.HeaderSize]byte
}

// handshake makes a conn of raw, or closes it.
func handshake(ctx context.Context, raw net.Conn, id transport.Identity, server bool, pace transport.Pace) (*conn, error) {
	if err := tune(raw); err != nil {
		_ = raw.Close() // the error of tune is the one to tell
		return nil, fmt.Errorf("set socket options: %w", err)
	}
	life, cancel := context.WithCancel(context.Background())
	g := gather(life, raw, nil)
	config := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		Certificates:           []tls.Certificate{id.Certificate},
		SessionTicketsDisabled: true,
		// Names and dates say nothing here: the certificate itself is named.
		InsecureSkipVerify: true,
		ClientAuth:         tls.RequireAnyClientCert,
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			if len(raw) == 0 || !id.Peer(sha256.Sum256(raw[0])) {
				return errStranger
			}
			return nil
		},
	}
	var t *tls.Conn
	// During the handshake each flight must leave before its answer is awaited.
	g.eager = true
	if server {
		t = tls.Server(g, config)
	} else {
		t = tls.Client(g, config)
	}
	ctx, done := context.WithTimeout(ctx, handshakeTimeout)
	defer done()
	if err := t.HandshakeContext(ctx); err != nil {
		cancel()
		_ = raw.Close() // the error of the handshake is the one to tell
		return nil, err
	}
	g.eager, g.pace = false, pace
	return &conn{raw: raw, tls: t, g: g, cancel: cancel}, nil
}

// Send writes one frame.
func (c *conn) Send(h wire.Header, payload []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	h.Length = uint32(len(payload))
	h.Put(c.head[:])
	if _, err := c.tls.Write(c.head[:]); err != nil {
		return err
	}
	if len(payload) > 0 {
		if _, err := c.tls.Write(payload); err != nil {
			return err
		}
	}
	return c.g.flush()
}

// Receive reads one frame.
func (c *conn) Receive(buf []byte) (wire.Header, []byte, error) {
	if _, err := io.ReadFull(c.tls, c.in[:]); err != nil {
		return wire.Header{}, nil, err
	}
	h, err := wire.Parse(c.in[:])
	if err != nil {
		return wire.Header{}, nil, err
	}
	if int(h.Length) > len(buf) {
		return wire.Header{}, nil, fmt.Errorf("%w: %d bytes for a buffer of %d", wire.ErrMalformed, h.Length, len(buf))
	}
	if _, err := io.ReadFull(c.tls, buf[:h.Length]); err != nil {
		return wire.Header{}, nil, err
	}
	return h, buf[:h.Length], nil
}

// Close closes the connection without a farewell: whoever waits for a cable
// that is gone would wait for that too.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.cancel()
		c.err = c.raw.Close()
	})
	return c.err
}
