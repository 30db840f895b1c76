package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"tbcluster/api/fault"
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/transport"
	"tbcluster/transfer/wire"
)

// maxConns bounds the connections of one path, and with it the buffers.
const maxConns = 64

// listen waits for the source's connections along a path.
func (w *worker) listen(ctx context.Context, body json.RawMessage) (any, error) {
	in, err := decode[listenIn](body)
	if err != nil {
		return nil, err
	}
	addr, err := netip.ParseAddr(in.Addr)
	if err != nil {
		return nil, fault.New(fault.Protocol, "a path is malformed", err, "")
	}
	t, err := w.transports.Get(in.Transport)
	if err != nil {
		return nil, fault.New(fault.Unsupported, "use transport "+in.Transport, err, "choose --transport auto")
	}
	d := w.destination()
	l, err := t.Listen(ctx, transport.ListenRequest{Interface: in.Interface, Local: addr, Identity: w.identity(in.Peers...)})
	if err != nil {
		return nil, fault.New(fault.Connection, "listen on "+in.Addr, err, "").At(w.me().NodeName)
	}
	life, cancel := context.WithCancel(context.Background())
	d.mu.Lock()
	if _, ok := d.inbound[in.Path]; ok || d.closed {
		d.mu.Unlock()
		cancel()
		_ = l.Close() // it only listened
		return nil, fault.Newf(fault.Protocol, "", "path %d is already in use, or the transfer has ended", in.Path)
	}
	d.inbound[in.Path] = inbound{l, cancel}
	d.conns.Add(1)
	d.mu.Unlock()
	go func() {
		defer d.conns.Done()
		d.accept(life, l, in.Path)
	}()
	return listenOut{Port: l.Port()}, nil
}

// unlisten ends a path.
func (d *destination) unlisten(id int) {
	d.mu.Lock()
	in, ok := d.inbound[id]
	delete(d.inbound, id)
	d.mu.Unlock()
	if ok {
		in.cancel()
		_ = in.l.Close() // it only listened
	}
}

// accept serves the connections of one path until its end.
func (d *destination) accept(ctx context.Context, l transport.Listener, id int) {
	slots := make(chan struct{}, maxConns)
	for {
		c, err := l.Accept(ctx)
		if err != nil {
			return
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = c.Close() // more than any source opens
			continue
		}
		d.conns.Add(1)
		go func() {
			defer d.conns.Done()
			defer func() { <-slots }()
			stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // wakes Receive
			defer stop()
			// How a connection ended is told by the source, which sends again
			// what was not answered.
			_ = d.serve(c, id)
			_ = c.Close()
		}()
	}
}

// serve takes frames from one connection and answers each.
func (d *destination) serve(c transport.Conn, id int) error {
	session := d.w.me().Session
	b := buffers{in: make([]byte, wire.MaxPayload)}
	h, _, err := c.Receive(nil)
	if err != nil {
		return err
	}
	if h.Kind != wire.Hello || h.Session != session || h.Object != uint64(id) {
		return fmt.Errorf("%w: no greeting", wire.ErrMalformed)
	}
	for {
		h, payload, err := c.Receive(b.in)
		if err != nil {
			return err
		}
		if h.Session != session {
			return fmt.Errorf("%w: another session", wire.ErrMalformed)
		}
		answer := wire.Header{Session: session, Stream: h.Stream, Object: h.Object, Offset: h.Offset}
		if answer.Kind, err = d.take(h, payload, &b); err != nil {
			return err
		}
		if err := c.Send(answer, nil); err != nil {
			return err
		}
	}
}

// buffers of one connection.
type buffers struct {
	in       []byte
	expanded []byte // a sparse chunk with its holes; made when first needed
}

// take verifies and writes what a frame carries, and says how to answer it. An
// error ends the connection.
func (d *destination) take(h wire.Header, payload []byte, b *buffers) (wire.Kind, error) {
	if d.dead() {
		return wire.Refuse, nil
	}
	switch h.Kind {
	case wire.Chunk:
		return d.takeChunk(h, payload, b)
	case wire.Pack:
		return d.takePack(h, payload)
	}
	return 0, fmt.Errorf("%w: kind %d from a source", wire.ErrMalformed, h.Kind)
}

func (d *destination) takeChunk(h wire.Header, payload []byte, b *buffers) (wire.Kind, error) {
	if h.Object > 1<<31 {
		return 0, fmt.Errorf("%w: file %d", wire.ErrMalformed, h.Object)
	}
	f, err := d.file(int(h.Object))
	if err != nil {
		return 0, err
	}
	if err := f.check(h); err != nil {
		return 0, err
	}
	chunk, extents := payload, []wire.Extent(nil)
	if h.Flags&wire.Sparse != 0 {
		if chunk, extents, err = b.expand(h, payload); err != nil {
			return wire.Nack, nil // damaged, as what the digest does not match
		}
	}
	if len(chunk) != int(h.Size) || wire.Sum(chunk) != h.Digest {
		return wire.Nack, nil
	}
	if err := f.write(h, chunk, extents); err != nil {
		d.failed(f, err)
		return wire.Refuse, nil
	}
	return wire.Ack, nil
}

// expand puts the holes back into a sparse chunk.
func (b *buffers) expand(h wire.Header, payload []byte) ([]byte, []wire.Extent, error) {
	if b.expanded == nil {
		b.expanded = make([]byte, wire.ChunkSize)
	}
	chunk, extents := b.expanded[:h.Size], []wire.Extent{}
	clear(chunk)
	err := wire.Extents(payload, h.Size, func(e wire.Extent, data []byte) error {
		copy(chunk[e.Offset:], data)
		extents = append(extents, e)
		return nil
	})
	return chunk, extents, err
}

func (d *destination) takePack(h wire.Header, payload []byte) (wire.Kind, error) {
	if len(payload) != int(h.Size) || wire.Sum(payload) != h.Digest {
		return wire.Nack, nil
	}
	err := wire.Parts(payload, func(object uint32, data []byte) error {
		f, err := d.file(int(object))
		if err != nil {
			return err
		}
		if f.large() || f.entry.Kind != manifest.File || int64(len(data)) != f.entry.Size {
			return fmt.Errorf("%w: %d bytes for a file of %d", wire.ErrMalformed, len(data), f.entry.Size)
		}
		if err := d.lander.small(f, data); err != nil {
			d.failed(f, err)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if d.dead() {
		return wire.Refuse, nil
	}
	return wire.Ack, nil
}

// failed reports that a file could not be written, once; a full disk ends
// everything.
func (d *destination) failed(f *receiving, err error) {
	if errors.Is(err, errGivenUp) {
		return
	}
	why := d.writeFault(f.target, err)
	if errors.Is(err, errBusy) {
		why = fault.New(fault.StillRunning, "write "+d.show(f.target), err, "wait for it, or cancel it").At(d.show(f.target))
	}
	if why.Reason == fault.DiskFull {
		missing := f.room()
		if free, ferr := freeSpace(d.existing()); ferr == nil && missing > free {
			missing -= free
		}
		why.Why = fmt.Sprintf("no space left on device: at least %s more are needed", size(missing))
		why.Fix = fmt.Sprintf("free %s on %s, then run the same command again", size(missing), d.w.me().NodeName)
		d.die(why.With("missing_bytes", fmt.Sprint(missing)).With("node", d.w.me().NodeName))
	}
	if f.giveUp() && why.Reason != fault.DiskFull {
		d.w.problem(why)
	}
}

// finishFiles lands files that the source has sent in whole and found
// unchanged.
func (d *destination) finishFiles(files []int) error {
	for _, i := range files {
		f, err := d.file(i)
		if err != nil {
			return err
		}
		d.lander.large(f)
	}
	return nil
}

// dropFiles forgets files that the source has given up; it has said why.
func (d *destination) dropFiles(files []int) error {
	for _, i := range files {
		f, err := d.file(i)
		if err != nil {
			return err
		}
		d.lander.drop(f)
	}
	return nil
}
