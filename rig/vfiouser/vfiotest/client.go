//go:build linux

package vfiotest

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var le = binary.LittleEndian

// Commands of vfio-user, as the protocol numbers them.
const (
	Version = 1 + iota
	DMAMap
	DMAUnmap
	DeviceInfo
	RegionInfo
	RegionIOFDs
	IRQInfo
	SetIRQs
	RegionRead
	RegionWrite
	DMARead
	DMAWrite
	DeviceReset
	DirtyPages
	RegionWriteMulti
)

// Client is one machine. It fails its test when the connection does.
type Client struct {
	t    testing.TB
	conn *net.UnixConn
	id   uint16
}

// Pair returns both ends of a connection. They are closed with the test.
func Pair(t testing.TB) (client, server *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "socketpair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

// New returns a client on a connection, to a server that has not been talked to.
func New(t testing.TB, conn *net.UnixConn) *Client { return &Client{t: t, conn: conn} }

// Hello agrees on the version.
func (c *Client) Hello() []byte {
	c.t.Helper()
	body := append([]byte{0, 0, 1, 0}, `{"capabilities":{"max_msg_fds":8}}`+"\x00"...)
	reply, err := c.Call(Version, body)
	if err != nil {
		c.t.Fatalf("version: %v", err)
	}
	return reply
}

// Message makes a message.
func Message(id, command uint16, flags uint32, body []byte) []byte {
	b := le.AppendUint16(nil, id)
	b = le.AppendUint16(b, command)
	b = le.AppendUint32(b, uint32(16+len(body)))
	b = le.AppendUint32(b, flags)
	b = le.AppendUint32(b, 0)
	return append(b, body...)
}

// Send sends bytes with descriptors.
func (c *Client) Send(b []byte, fds ...int) {
	c.t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := c.conn.WriteMsgUnix(b, oob, nil); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

// Call sends a command and waits for its answer. The error is the errno that
// the server answered with.
func (c *Client) Call(command uint16, body []byte, fds ...int) ([]byte, error) {
	c.t.Helper()
	c.id++
	c.Send(Message(c.id, command, 0, body), fds...)
	return c.Answer(c.id, command)
}

// Answer reads the next answer, which must be that to a message.
func (c *Client) Answer(id, command uint16) ([]byte, error) {
	c.t.Helper()
	if err := c.conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		c.t.Fatal(err)
	}
	var h [16]byte
	if _, err := io.ReadFull(c.conn, h[:]); err != nil {
		c.t.Fatalf("no answer to command %d: %v", command, err)
	}
	size, flags := le.Uint32(h[4:]), le.Uint32(h[8:])
	if size < 16 || size > 2<<20 {
		c.t.Fatalf("an answer of %d bytes", size)
	}
	body := make([]byte, size-16)
	if _, err := io.ReadFull(c.conn, body); err != nil {
		c.t.Fatalf("half an answer to command %d: %v", command, err)
	}
	if gotID, gotCommand := le.Uint16(h[:]), le.Uint16(h[2:]); gotID != id || gotCommand != command || flags&0xf != 1 {
		c.t.Fatalf("answer to message %d, command %d, flags %#x; want message %d, command %d", gotID, gotCommand, flags, id, command)
	}
	if flags&(1<<5) != 0 {
		return body, unix.Errno(le.Uint32(h[12:]))
	}
	return body, nil
}

// Closed waits for the server to hang up.
func (c *Client) Closed() {
	c.t.Helper()
	if err := c.conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		c.t.Fatal(err)
	}
	if n, err := c.conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		c.t.Fatalf("the server has not hung up: %d bytes, %v", n, err)
	}
}

// Close hangs up, as a machine that loses its power.
func (c *Client) Close() { _ = c.conn.Close() }

// must fails the test for an errno.
func (c *Client) must(what string, err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatalf("%s: %v", what, err)
	}
}

func access(offset uint64, region int, n int) []byte {
	b := le.AppendUint64(nil, offset)
	b = le.AppendUint32(b, uint32(region))
	return le.AppendUint32(b, uint32(n))
}

// Read reads n bytes of a region.
func (c *Client) Read(region int, offset uint64, n int) []byte {
	c.t.Helper()
	b, err := c.Call(RegionRead, access(offset, region, n))
	c.must("read", err)
	if len(b) != 16+n {
		c.t.Fatalf("read of %d bytes: answer of %d", n, len(b))
	}
	return b[16:]
}

// Read32 reads a register.
func (c *Client) Read32(region int, offset uint64) uint32 {
	return le.Uint32(c.Read(region, offset, 4))
}

// Write writes to a region and waits until it is done.
func (c *Client) Write(region int, offset uint64, p []byte) {
	c.t.Helper()
	_, err := c.Call(RegionWrite, append(access(offset, region, len(p)), p...))
	c.must("write", err)
}

// Post writes a register without waiting, as QEMU does.
func (c *Client) Post(region int, offset uint64, v uint32) {
	c.t.Helper()
	c.id++
	c.Send(Message(c.id, RegionWrite, 1<<4, le.AppendUint32(access(offset, region, 4), v)))
}

// Multi writes registers with one message, without waiting.
func (c *Client) Multi(region int, writes ...[2]uint32) {
	c.t.Helper()
	body := le.AppendUint64(nil, uint64(len(writes)))
	for _, w := range writes {
		body = append(body, access(uint64(w[0]), region, 4)...)
		body = le.AppendUint64(body, uint64(w[1]))
	}
	c.id++
	c.Send(Message(c.id, RegionWriteMulti, 1<<4, body))
}

// Map gives the device memory: size bytes of fd from offset, at addr. fd -1 is
// memory that cannot be mapped.
func (c *Client) Map(addr, size, offset uint64, fd int, writable bool) error {
	c.t.Helper()
	flags := uint32(1)
	if writable {
		flags |= 2
	}
	body := le.AppendUint32(nil, 32)
	body = le.AppendUint32(body, flags)
	for _, v := range []uint64{offset, addr, size} {
		body = le.AppendUint64(body, v)
	}
	var fds []int
	if fd >= 0 {
		fds = []int{fd}
	}
	_, err := c.Call(DMAMap, body, fds...)
	return err
}

// Unmap takes memory away.
func (c *Client) Unmap(addr, size uint64) error {
	c.t.Helper()
	body := le.AppendUint32(nil, 24)
	body = le.AppendUint32(body, 0)
	body = le.AppendUint64(body, addr)
	body = le.AppendUint64(body, size)
	_, err := c.Call(DMAUnmap, body)
	return err
}

// SetIRQs sends a SET_IRQS.
func (c *Client) SetIRQs(flags, kind, start, count uint32, fds ...int) error {
	c.t.Helper()
	body := le.AppendUint32(nil, 20)
	for _, v := range []uint32{flags, kind, start, count} {
		body = le.AppendUint32(body, v)
	}
	_, err := c.Call(SetIRQs, body, fds...)
	return err
}

// Memory is memory of a machine, as it sees it itself.
type Memory struct {
	FD    int
	Bytes []byte
}

// NewMemory returns memory that goes with the test.
func NewMemory(t testing.TB, size int) *Memory {
	t.Helper()
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Munmap(b), unix.Close(fd)); err != nil {
			t.Error(err)
		}
	})
	return &Memory{FD: fd, Bytes: b}
}

// Interrupt is what a vector ends in.
type Interrupt struct {
	t    testing.TB
	FD   int
	file *os.File
}

// NewInterrupt returns an interrupt that goes with the test.
func NewInterrupt(t testing.TB) *Interrupt {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	i := &Interrupt{t: t, FD: fd, file: os.NewFile(uintptr(fd), "eventfd")}
	t.Cleanup(func() { _ = i.file.Close() })
	return i
}

// Wait waits until the interrupt comes, or a time has passed, and returns how
// often it has come since it was last asked.
func (i *Interrupt) Wait(d time.Duration) uint64 {
	i.t.Helper()
	if err := i.file.SetReadDeadline(time.Now().Add(d)); err != nil {
		i.t.Fatal(err)
	}
	var b [8]byte
	if _, err := i.file.Read(b[:]); errors.Is(err, os.ErrDeadlineExceeded) {
		return 0
	} else if err != nil {
		i.t.Fatal(err)
	}
	return binary.NativeEndian.Uint64(b[:])
}
