package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"os"
	"sync"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"tbcluster/transfer/transport"
	"tbcluster/transfer/wire"
)

// window is how many units may be unanswered on one connection: enough to keep
// it busy while the other side writes, few enough that little is lost with it.
const window = 4

// pump sends units over one connection until ctx ends or it fails, then puts
// back what was not answered.
func (s *source) pump(ctx context.Context, p *outPath, c transport.Conn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // wakes both directions
	defer stop()
	out := &unanswered{units: map[uint64]*unit{}, slots: make(chan struct{}, window)}
	answers := make(chan struct{})
	go func() {
		defer close(answers)
		cancel(s.answers(c, out))
	}()
	err := s.feed(ctx, p, c, out)
	cancel(err)
	<-answers
	for _, u := range out.units { // nobody else has it any more
		s.queue.retry(u)
	}
	return context.Cause(ctx)
}

// unanswered are the units under way on one connection.
type unanswered struct {
	mu    sync.Mutex
	units map[uint64]*unit
	slots chan struct{}
}

func (o *unanswered) put(u *unit) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.units[u.id] = u
}

func (o *unanswered) get(id uint64) *unit {
	o.mu.Lock()
	defer o.mu.Unlock()
	u := o.units[id]
	delete(o.units, id)
	return u
}

// feed reads and sends.
func (s *source) feed(ctx context.Context, p *outPath, c transport.Conn, out *unanswered) error {
	session := s.w.me().Session
	if err := c.Send(wire.Header{Kind: wire.Hello, Session: session, Object: uint64(p.id)}, nil); err != nil {
		return err
	}
	r := reader{s: s, buf: make([]byte, 0, wire.MaxPayload)}
	for {
		select {
		case out.slots <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		u := s.queue.take(ctx.Done())
		if u == nil {
			<-ctx.Done() // everything is sent; answers may still come
			return context.Cause(ctx)
		}
		h, payload, ok := r.load(u)
		if !ok {
			<-out.slots
			s.settle(u)
			continue
		}
		h.Session, h.Stream = session, u.id
		out.put(u)
		if err := c.Send(h, payload); err != nil {
			return err
		}
	}
}

// answers handles what comes back.
func (s *source) answers(c transport.Conn, out *unanswered) error {
	session := s.w.me().Session
	for {
		h, _, err := c.Receive(nil)
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the other side closed the connection")
			}
			return err
		}
		u := out.get(h.Stream)
		if h.Session != session || u == nil {
			return fmt.Errorf("%w: an answer to nothing", wire.ErrMalformed)
		}
		<-out.slots
		switch h.Kind {
		case wire.Ack:
			s.settle(u)
		case wire.Nack:
			s.damaged(u)
		case wire.Refuse:
			s.refused(u)
		default:
			s.queue.retry(u)
			return fmt.Errorf("%w: kind %d as an answer", wire.ErrMalformed, h.Kind)
		}
	}
}

// reader makes frames of units for one connection.
type reader struct {
	s      *source
	buf    []byte
	sparse []byte // the payload of sparse chunks; made when first needed
}

// load reads a unit. It returns false when there is nothing to send of it; why
// has been reported then.
func (r *reader) load(u *unit) (wire.Header, []byte, bool) {
	if u.pack != nil {
		return r.loadPack(u)
	}
	s := r.s
	s.mu.Lock()
	f := s.files[u.file]
	s.mu.Unlock()
	f.mu.Lock()
	failed, err := f.failed, error(nil)
	if !failed {
		err = f.open(s.follow)
	}
	file := f.f
	f.mu.Unlock()
	if failed {
		return wire.Header{}, nil, false
	}
	h := wire.Header{Kind: wire.Chunk, Object: uint64(u.file), Offset: uint64(u.chunk) * wire.ChunkSize}
	var chunk []byte
	if err == nil {
		chunk = r.buf[:min(wire.ChunkSize, f.entry.Size-int64(h.Offset))]
		_, err = file.ReadAt(chunk, int64(h.Offset))
	}
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = errChanged
		}
		s.fail(f, s.w.readFault(f.abs, err))
		return wire.Header{}, nil, false
	}
	h.Size, h.Digest = uint32(len(chunk)), wire.Sum(chunk)
	if f.entry.Sparse {
		if extents, ok := dataExtents(file, int64(h.Offset), len(chunk)); ok {
			if r.sparse == nil {
				r.sparse = make([]byte, 0, wire.MaxPayload)
			}
			h.Flags |= wire.Sparse
			return h, wire.AppendExtents(r.sparse[:0], chunk, extents), true
		}
	}
	return h, chunk, true
}

// loadPack reads small files, each with a check before and after.
func (r *reader) loadPack(u *unit) (wire.Header, []byte, bool) {
	s := r.s
	b := r.buf[:0]
	sent := []int{}
	for _, i := range u.pack {
		e, abs, err := s.lookup(i)
		if err == nil {
			b, err = appendFile(b, uint32(i), e.Size, func() (*os.File, fs.FileInfo, error) { return openSource(e, abs, s.follow) })
		}
		if err != nil {
			s.giveUp(i, s.w.readFault(abs, err))
			continue
		}
		sent = append(sent, i)
	}
	u.pack = sent // if it must be sent again, without what was given up
	if len(sent) == 0 {
		return wire.Header{}, nil, false
	}
	return wire.Header{Kind: wire.Pack, Size: uint32(len(b)), Digest: wire.Sum(b)}, b, true
}

// appendFile appends one file to a pack, or leaves the pack as it was.
func appendFile(pack []byte, object uint32, size int64, open func() (*os.File, fs.FileInfo, error)) ([]byte, error) {
	f, _, err := open()
	if err != nil {
		return pack, err
	}
	defer func() { _ = f.Close() }() // it was only read
	before, err := f.Stat()
	if err != nil {
		return pack, err
	}
	b := wire.AppendPackHeader(pack, object, uint32(size))
	start := len(b)
	b = b[:start+int(size)] // MaxPayload has room for a chunk and its table
	if _, err := io.ReadFull(f, b[start:]); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errChanged
		}
		return pack, err
	}
	after, err := f.Stat()
	if err != nil {
		return pack, err
	}
	if after.Size() != size || !after.ModTime().Equal(before.ModTime()) {
		return pack, errChanged
	}
	return b, nil
}

// dataExtents returns where a sparse file has data within length bytes from
// offset; false when it has no holes there or the file system does not tell.
func dataExtents(f *os.File, offset int64, length int) ([]wire.Extent, bool) {
	fd := int(f.Fd())
	end := offset + int64(length)
	var out []wire.Extent
	for at := offset; at < end; {
		data, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && data >= end {
			return out, true // a hole up to the end
		}
		if err != nil {
			return nil, false
		}
		hole, err := unix.Seek(fd, data, unix.SEEK_HOLE)
		if err != nil {
			return nil, false
		}
		hole = min(hole, end)
		if data == offset && hole == end || len(out) == wire.MaxParts {
			return nil, false
		}
		out = append(out, wire.Extent{Offset: uint32(data - offset), Length: uint32(hole - data)})
		at = hole
	}
	return out, true
}

// chunksOf returns how many chunks a file of size bytes has.
func chunksOf(size int64) int { return int((size + wire.ChunkSize - 1) / wire.ChunkSize) }

// A bitmap has chunk n at bit n%8 of byte n/8.
func hasBit(b []byte, n int) bool { return n/8 < len(b) && b[n/8]&(1<<(n%8)) != 0 }
func setBit(b []byte, n int)      { b[n/8] |= 1 << (n % 8) }
func countBits(b []byte) int {
	n := 0
	for _, x := range b {
		n += bits.OnesCount8(x)
	}
	return n
}

// digestOf returns the digest of a whole file.
func digestOf(ctx context.Context, r io.Reader) ([]byte, error) {
	h := xxh3.New()
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		n, err := r.Read(buf)
		if _, werr := h.Write(buf[:n]); werr != nil {
			return nil, werr
		}
		if errors.Is(err, io.EOF) {
			sum := h.Sum128().Bytes()
			return sum[:], nil
		}
		if err != nil {
			return nil, err
		}
	}
}
