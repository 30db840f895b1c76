package tcp

import (
	"context"
	"net/netip"

	"tbcluster/transfer/transport"
)

// Dial connects and proves both sides to each other.
func (t *Transport) Dial(ctx context.Context, r transport.DialRequest) (transport.Conn, error) {
	dctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	raw, err := t.dial(dctx, r.Interface, r.Local, netip.AddrPortFrom(r.Remote, r.Port))
	if err != nil {
		return nil, err
	}
	c, err := handshake(ctx, raw, r.Identity, false, r.Pace)
	if err != nil {
		return nil, err
	}
	return c, nil
}
