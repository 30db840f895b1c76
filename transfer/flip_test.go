package transfer

import (
	"context"
	"strconv"
	"sync/atomic"

	"tbcluster/transfer/transport"
	"tbcluster/transfer/wire"
)

// flipping is a transport that damages payloads as they arrive: what a bad
// adapter or memory behind the decryption would do. It damages the first n.
type flipping struct {
	transport.Transport
	left *atomic.Int64
}

func newFlipping(t transport.Transport, n string) *flipping {
	f := &flipping{t, &atomic.Int64{}}
	k, err := strconv.Atoi(n)
	if err != nil {
		panic(err)
	}
	f.left.Store(int64(k))
	return f
}

func (f *flipping) Listen(ctx context.Context, r transport.ListenRequest) (transport.Listener, error) {
	l, err := f.Transport.Listen(ctx, r)
	if err != nil {
		return nil, err
	}
	return &flippingListener{l, f.left}, nil
}

type flippingListener struct {
	transport.Listener
	left *atomic.Int64
}

func (l *flippingListener) Accept(ctx context.Context) (transport.Conn, error) {
	c, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &flippingConn{c, l.left}, nil
}

type flippingConn struct {
	transport.Conn
	left *atomic.Int64
}

func (c *flippingConn) Receive(buf []byte) (wire.Header, []byte, error) {
	h, p, err := c.Conn.Receive(buf)
	if err == nil && len(p) > 0 && c.left.Add(-1) >= 0 {
		p[len(p)/2] ^= 0x10
	}
	return h, p, err
}
