package channel

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"tbcluster/mesh/identity"
)

// accepted is the one byte with which the accepting side says that it has
// checked the peer and has a handler: without it the dialling side, which in
// TLS 1.3 is done first, would learn of a refusal only by its first read.
const accepted = 0x01

// handshakes bounds what is not yet anybody: at a bound the oldest makes room,
// since a real peer is done within a few round trips.
type handshakes struct {
	total, perSource int

	mu      sync.Mutex
	pending list.List // of *pending, oldest first
	sources map[netip.Addr]int
}

type pending struct {
	conn   net.Conn
	source netip.Addr
	over   bool
}

// begin takes a place for conn. end gives it back.
func (h *handshakes) begin(conn net.Conn) (end func()) {
	p := &pending{conn: conn, source: sourceOf(conn.RemoteAddr())}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sources == nil {
		h.sources = map[netip.Addr]int{}
	}
	if h.sources[p.source] >= h.perSource {
		h.dropOldest(func(q *pending) bool { return q.source == p.source })
	} else if h.pending.Len() >= h.total {
		h.dropOldest(func(*pending) bool { return true })
	}
	e := h.pending.PushBack(p)
	h.sources[p.source]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.remove(e)
	}
}

func (h *handshakes) dropOldest(fits func(*pending) bool) {
	for e := h.pending.Front(); e != nil; e = e.Next() {
		if p := e.Value.(*pending); fits(p) {
			_ = p.conn.Close() // its handshake ends with that
			h.remove(e)
			return
		}
	}
}

func (h *handshakes) remove(e *list.Element) {
	p := e.Value.(*pending)
	if p.over {
		return
	}
	p.over = true
	h.pending.Remove(e)
	if h.sources[p.source]--; h.sources[p.source] == 0 {
		delete(h.sources, p.source)
	}
}

// sourceOf is what counts as one source: an address, and of global IPv6 the /64
// since one machine has all of that.
func sourceOf(a net.Addr) netip.Addr {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	addr := tcp.AddrPort().Addr().Unmap()
	if addr.Is6() && !addr.IsLinkLocalUnicast() {
		if p, err := addr.WithZone("").Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return addr
}

// Serve accepts on ln until ctx ends or Close, and closes ln; several listeners
// are fine. It returns nil unless the listener failed by itself.
func (c *Channel) Serve(ctx context.Context, ln net.Listener) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ln.Close()
	}
	c.listeners[ln] = true
	c.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer func() {
		stop()
		_ = ln.Close() // twice is no harm
		c.mu.Lock()
		delete(c.listeners, ln)
		c.mu.Unlock()
	}()
	var pause time.Duration
	for {
		conn, err := ln.Accept()
		if err == nil {
			pause = 0
			// Here, not in accept: places are taken in the order of arrival, else a
			// crowd that came earlier pushes out who came last.
			go c.accept(conn, c.handshakes.begin(conn))
			continue
		}
		if ctx.Err() != nil || c.ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		// Out of descriptors, most likely: others give some back.
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		c.o.Log.Warn("cannot accept connections", "error", err, "pause", pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		case <-c.ctx.Done():
			return nil
		}
	}
}

// accept serves one connection; end gives back its place among the handshakes.
func (c *Channel) accept(raw net.Conn, end func()) {
	conn, p, err := c.acceptHandshake(raw)
	end()
	if err != nil {
		_ = raw.Close() // it never was anybody's
		c.o.Log.Debug("refused a connection", "from", raw.RemoteAddr(), "error", err)
		return
	}
	if !c.register(conn) {
		return
	}
	defer func() { _ = conn.Close() }() // the peer may be gone already
	p.handle(conn)
}

func (c *Channel) acceptHandshake(raw net.Conn) (*Conn, *protocol, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.o.HandshakeTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	if err := raw.SetDeadline(deadline); err != nil {
		return nil, nil, err
	}
	t := tls.Server(raw, c.serverConfig.Load())
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, nil, err
	}
	cs := t.ConnectionState()
	p := c.protocol(cs.NegotiatedProtocol)
	if p == nil {
		return nil, nil, errProtocol
	}
	if p.clients == nil {
		if _, err := t.Write([]byte{accepted}); err != nil {
			return nil, nil, err
		}
	}
	via := Way{Kind: LAN}
	if remote, ok := raw.RemoteAddr().(*net.TCPAddr); ok {
		via.Addr = unmap(remote.AddrPort())
	}
	if local, ok := raw.LocalAddr().(*net.TCPAddr); ok {
		var cable bool
		if via.Interface, cable = c.o.InterfaceOf(local.AddrPort().Addr().Unmap()); cable {
			via.Kind = Cable
		}
	}
	if p.clients != nil {
		conn, err := c.newClientConn(raw, t, via, p.clients)
		return conn, p, err
	}
	conn, err := c.newConn(raw, t, via, p.unpaired)
	return conn, p, err
}

// newClientConn makes a Conn of a client's connection. It may come over any
// network: what the system does about dead ones is enough.
func (c *Channel) newClientConn(raw net.Conn, t *tls.Conn, via Way, s *ClientServer) (*Conn, error) {
	spki, err := clientKey(t.ConnectionState())
	if err != nil {
		return nil, err
	}
	if err := raw.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return &Conn{
		Conn: t, raw: raw, channel: c, peer: identity.ClientID(spki), via: via,
		client: s.Trusted, spki: spki, done: make(chan struct{}),
	}, nil
}

// newConn makes a Conn of a connection whose handshake is done.
func (c *Channel) newConn(raw net.Conn, t *tls.Conn, via Way, unpaired bool) (*Conn, error) {
	cs := t.ConnectionState()
	pub, err := peerKey(cs)
	if err != nil {
		return nil, err
	}
	if err := raw.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	if err := setLiveness(raw, deadAfter(cs.NegotiatedProtocol)); err != nil {
		return nil, err
	}
	return &Conn{
		Conn: t, raw: raw, channel: c, peer: identity.IDOf(pub), key: pub, via: via,
		unpaired: unpaired, done: make(chan struct{}),
	}, nil
}

// Listener returns a listener of connections of protocol alpn, all *Conn.
func (c *Channel) Listener(alpn string) net.Listener {
	l := &listener{conns: make(chan *Conn), closed: make(chan struct{}), channel: c}
	l.remove = c.Handle(alpn, l.deliver)
	return l
}

type listener struct {
	channel *Channel
	conns   chan *Conn
	remove  func()
	closing sync.Once
	closed  chan struct{}
}

// deliver hands a connection over and waits for its end: Handle closes it then.
func (l *listener) deliver(conn *Conn) {
	select {
	case l.conns <- conn:
		<-conn.Done()
	case <-l.closed:
	case <-conn.Done():
	case <-l.channel.ctx.Done():
	}
}

// Accept returns the next connection.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-l.channel.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close ends the listener, not the connections that it has handed over.
func (l *listener) Close() error {
	l.closing.Do(func() {
		l.remove()
		close(l.closed)
	})
	return nil
}

// Addr returns an address of the control port, if it has one.
func (l *listener) Addr() net.Addr {
	l.channel.mu.Lock()
	defer l.channel.mu.Unlock()
	for ln := range l.channel.listeners {
		return ln.Addr()
	}
	return &net.TCPAddr{}
}
