//go:build linux

package vfiouser

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// Serve talks to one client until it leaves or ctx ends, and closes the
// connection. It returns nil when the client has left between two messages,
// ctx's error when ctx has ended, and else a fault that says what was wrong.
// The device is attached when the client has said which version it speaks, and
// has been detached when Serve returns.
func Serve(ctx context.Context, conn *net.UnixConn, d Device) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	s := newSession(conn, d)
	err := s.run()
	s.end()
	_ = conn.Close() // whatever it says, the client is gone
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// session is one client.
type session struct {
	in       *receiver
	out      io.Writer
	reply    []byte
	device   Device
	regions  [NumRegions]Region
	vectors  [NumInterrupts]int
	memory   *Memory
	irqs     *Interrupts
	attached bool
}

func newSession(conn *net.UnixConn, d Device) *session {
	s := &session{in: newReceiver(conn), out: conn, device: d, regions: d.Regions(), vectors: d.Interrupts(), memory: newMemory()}
	s.irqs = newInterrupts(s.vectors)
	return s
}

func (s *session) run() error {
	for {
		m, ok, err := s.in.next()
		if err != nil {
			return err
		}
		if !ok { // all that had come is done
			if err := s.settle(); err != nil {
				return err
			}
			if err := s.in.fill(); err != nil {
				return err
			}
			continue
		}
		if err := s.handle(m); err != nil {
			return err
		}
		if len(s.reply) >= maxTransfer {
			if err := s.flush(); err != nil {
				return err
			}
		}
	}
}

func (s *session) settle() error {
	if err := s.flush(); err != nil {
		return err
	}
	if s.attached {
		s.device.Settle()
	}
	return nil
}

func (s *session) flush() error {
	if len(s.reply) == 0 {
		return nil
	}
	_, err := s.out.Write(s.reply)
	s.reply = s.reply[:0]
	if err != nil {
		return fault.New(fault.Connection, "answer the virtual machine", err, "")
	}
	return nil
}

// end lets go of everything the client has brought.
func (s *session) end() {
	s.in.close()
	if s.attached {
		s.device.Detach()
	}
	s.irqs.close()
	_ = s.memory.clear() // munmap of what was mapped does not fail
}

// message is one that has arrived whole. The body is valid until the next call
// of next; the descriptors belong to whoever handles it.
type message struct {
	header
	body []byte
	fds  []int
}

// handle does what a message asks for and appends the answer. An error is the
// end of the connection.
func (s *session) handle(m message) error {
	if m.flags&flagTypeMask == flagReply { // to nothing that we asked
		closeAll(m.fds)
		return nil
	}
	if m.flags&flagTypeMask != 0 {
		closeAll(m.fds)
		return protocolError("a message of type %d", m.flags&flagTypeMask)
	}
	if !s.attached && m.command != cmdVersion {
		closeAll(m.fds)
		return protocolError("command %d before the version was agreed on", m.command)
	}
	start := len(s.reply)
	s.reply = appendHeader(s.reply, header{id: m.id, command: m.command, flags: flagReply})
	err := s.command(m)
	if m.flags&flagNoReply != 0 {
		s.reply = s.reply[:start]
		return nil
	}
	if err != nil {
		errno := unix.EIO
		errors.As(err, &errno)
		s.reply = s.reply[:start+headerSize]
		le.PutUint32(s.reply[start+8:], flagReply|flagError)
		le.PutUint32(s.reply[start+12:], uint32(errno))
	}
	le.PutUint32(s.reply[start+4:], uint32(len(s.reply)-start))
	return nil
}

// command handles the body of a message and appends that of the answer. Its
// error goes to the client.
func (s *session) command(m message) error {
	if m.command != cmdDMAMap && m.command != cmdSetIRQs { // nobody else wants any
		closeAll(m.fds)
		m.fds = nil
	}
	c, ok := commands[m.command]
	if !ok {
		return unix.ENOTSUP
	}
	if len(m.body) < c.size {
		closeAll(m.fds)
		return unix.EINVAL
	}
	return c.do(s, m)
}

// command is one that we know.
type command struct {
	size int // the least of its body
	do   func(*session, message) error
}

var commands = map[uint16]command{
	cmdVersion:          {4, (*session).version},
	cmdDMAMap:           {32, (*session).dmaMap},
	cmdDMAUnmap:         {24, (*session).dmaUnmap},
	cmdDeviceInfo:       {4, (*session).deviceInfo},
	cmdRegionInfo:       {12, (*session).regionInfo},
	cmdRegionIOFDs:      {12, (*session).regionIOFDs},
	cmdIRQInfo:          {12, (*session).irqInfo},
	cmdSetIRQs:          {20, (*session).setIRQs},
	cmdRegionRead:       {16, (*session).regionRead},
	cmdRegionWrite:      {16, (*session).regionWrite},
	cmdDeviceReset:      {0, (*session).reset},
	cmdRegionWriteMulti: {8, (*session).regionWriteMulti},
}

// version agrees on a version: the client says its own, we ours; the major must
// be the same.
func (s *session) version(m message) error {
	if s.attached || le.Uint16(m.body) != majorVersion {
		return unix.EINVAL
	}
	if data := bytes.TrimRight(m.body[4:], "\x00"); len(data) > 0 {
		var v versionData
		if json.Unmarshal(data, &v) != nil {
			return unix.EINVAL
		}
	}
	s.reply = le.AppendUint16(s.reply, majorVersion)
	s.reply = le.AppendUint16(s.reply, min(minorVersion, le.Uint16(m.body[2:])))
	s.reply = append(s.reply, ourVersion()...)
	s.attached = true
	s.device.Attach(Client{Memory: s.memory, Interrupts: s.irqs})
	return nil
}

func (s *session) dmaMap(m message) error {
	defer closeAll(m.fds)
	r := mapping{addr: le.Uint64(m.body[16:]), size: le.Uint64(m.body[24:]), offset: le.Uint64(m.body[8:]), writable: le.Uint32(m.body[4:])&dmaWritable != 0, fd: -1}
	if len(m.fds) > 1 {
		return unix.EINVAL
	}
	if len(m.fds) == 1 {
		r.fd = m.fds[0]
	}
	return s.memory.add(r)
}

func (s *session) dmaUnmap(m message) error {
	var err error
	if le.Uint32(m.body[4:])&unmapAll != 0 {
		err = s.memory.clear()
	} else {
		err = s.memory.remove(le.Uint64(m.body[8:]), le.Uint64(m.body[16:]))
	}
	if err == nil {
		s.reply = append(s.reply, m.body[:24]...)
	}
	return err
}

func (s *session) deviceInfo(message) error {
	for _, v := range []uint32{16, deviceReset | devicePCI, NumRegions, NumInterrupts} {
		s.reply = le.AppendUint32(s.reply, v)
	}
	return nil
}

func (s *session) regionInfo(m message) error {
	index := le.Uint32(m.body[8:])
	if index >= NumRegions {
		return unix.EINVAL
	}
	r, flags := s.regions[index], uint32(0)
	if r.Size > 0 {
		if flags = regionReadable; !r.ReadOnly {
			flags |= regionWritable
		}
	}
	for _, v := range []uint32{32, flags, index, 0} {
		s.reply = le.AppendUint32(s.reply, v)
	}
	s.reply = le.AppendUint64(s.reply, r.Size)
	s.reply = le.AppendUint64(s.reply, 0)
	return nil
}

// regionIOFDs says that no part of a region has a descriptor of its own.
func (s *session) regionIOFDs(m message) error {
	if le.Uint32(m.body[8:]) >= NumRegions {
		return unix.EINVAL
	}
	for _, v := range []uint32{16, 0, le.Uint32(m.body[8:]), 0} {
		s.reply = le.AppendUint32(s.reply, v)
	}
	return nil
}

func (s *session) irqInfo(m message) error {
	index := le.Uint32(m.body[8:])
	if index >= NumInterrupts {
		return unix.EINVAL
	}
	flags := uint32(0)
	if s.vectors[index] > 0 {
		flags = irqEventfd
		if index == InterruptINTx {
			flags |= irqMaskable
		} else {
			flags |= irqNoResize
		}
	}
	for _, v := range []uint32{16, flags, index, uint32(s.vectors[index])} {
		s.reply = le.AppendUint32(s.reply, v)
	}
	return nil
}

func (s *session) setIRQs(m message) error {
	b := m.body
	return s.irqs.set(le.Uint32(b[4:]), le.Uint32(b[8:]), le.Uint32(b[12:]), le.Uint32(b[16:]), b[20:], m.fds)
}

// access checks a range of a region.
func (s *session) access(b []byte) (index int, offset uint64, count int, err error) {
	offset, region, n := le.Uint64(b), le.Uint32(b[8:]), le.Uint32(b[12:])
	if region >= NumRegions || n == 0 || n > maxTransfer {
		return 0, 0, 0, unix.EINVAL
	}
	size := s.regions[region].Size
	if offset >= size || uint64(n) > size-offset {
		return 0, 0, 0, unix.EINVAL
	}
	return int(region), offset, int(n), nil
}

func (s *session) regionRead(m message) error {
	region, offset, n, err := s.access(m.body)
	if err != nil {
		return err
	}
	s.reply = append(s.reply, m.body[:16]...)
	at := len(s.reply)
	s.reply = slices.Grow(s.reply, n)[:at+n]
	clear(s.reply[at:])
	return s.device.Read(region, offset, s.reply[at:])
}

func (s *session) regionWrite(m message) error {
	region, offset, n, err := s.access(m.body)
	if err != nil {
		return err
	}
	if len(m.body) < 16+n || s.regions[region].ReadOnly {
		return unix.EINVAL
	}
	s.reply = append(s.reply, m.body[:16]...)
	return s.device.Write(region, offset, m.body[16:16+n])
}

// regionWriteMulti does up to eight bytes of each of several writes, and says
// how many were done.
func (s *session) regionWriteMulti(m message) error {
	n, b := le.Uint64(m.body), m.body[8:]
	if n > uint64(len(b)/multiSize) {
		return unix.EINVAL
	}
	for i := range int(n) {
		one := b[i*multiSize:][:multiSize]
		region, offset, count, err := s.access(one)
		if err != nil {
			return err
		}
		if count > 8 || s.regions[region].ReadOnly {
			return unix.EINVAL
		}
		if err := s.device.Write(region, offset, one[16:16+count]); err != nil {
			return err
		}
	}
	s.reply = le.AppendUint64(s.reply, n)
	return nil
}

func (s *session) reset(message) error {
	s.device.Reset()
	return nil
}

func protocolError(format string, args ...any) error {
	return fault.Newf(fault.Protocol, "use QEMU 10.1 or later and its vfio-user-pci", "vfio-user: the client sent "+format, args...)
}
