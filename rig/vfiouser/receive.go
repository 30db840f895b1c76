//go:build linux

package vfiouser

import (
	"io"
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// receiver cuts what arrives into messages. It reads as much as there is with
// one system call: a burst of doorbells is one read.
type receiver struct {
	conn       syscall.RawConn
	buf        []byte
	start, end int   // what is in buf and not handled yet
	position   int64 // of start in the stream
	arrivals   []arrival
	oob        [1024]byte
	// of the system call
	iov   unix.Iovec
	msg   unix.Msghdr
	n     int
	errno syscall.Errno
	read  func(uintptr) bool
}

// arrival is where in the stream descriptors came: with the message that begins
// before end and ends there or later. A read of a stream socket stops after
// data that descriptors came with, and a client sends each message with one
// call, so that message is the one they belong to.
type arrival struct {
	end int64
	fds []int
}

const readAhead = 64 << 10

func newReceiver(conn *net.UnixConn) *receiver {
	r := &receiver{buf: make([]byte, readAhead)}
	raw, err := conn.SyscallConn()
	if err != nil {
		raw = closedConn{err}
	}
	r.conn = raw
	r.read = func(fd uintptr) bool {
		for {
			n, _, errno := syscall.Syscall(syscall.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&r.msg)), unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
			if errno == unix.EINTR {
				continue
			}
			r.n, r.errno = int(n), errno
			return errno != unix.EAGAIN
		}
	}
	return r
}

// closedConn is a connection that was closed before we could look at it.
type closedConn struct{ err error }

func (c closedConn) Control(func(uintptr)) error    { return c.err }
func (c closedConn) Read(func(uintptr) bool) error  { return c.err }
func (c closedConn) Write(func(uintptr) bool) error { return c.err }

// fill waits for more. It returns io.EOF at the end of the stream, if that is
// between two messages.
func (r *receiver) fill() error {
	if r.start > 0 {
		copy(r.buf, r.buf[r.start:r.end])
		r.end -= r.start
		r.start = 0
	}
	if r.end == len(r.buf) {
		r.buf = append(r.buf, make([]byte, len(r.buf))...)
	}
	r.iov.Base = &r.buf[r.end]
	r.iov.SetLen(len(r.buf) - r.end)
	r.msg.Iov = &r.iov
	r.msg.SetIovlen(1)
	r.msg.Control = &r.oob[0]
	r.msg.SetControllen(len(r.oob))
	r.msg.Flags = 0
	if err := r.conn.Read(r.read); err != nil {
		return fault.New(fault.Connection, "hear the virtual machine", err, "")
	}
	if r.errno == unix.ECONNRESET { // killed with our answers unread
		return io.EOF
	}
	if r.errno != 0 {
		return fault.New(fault.Connection, "hear the virtual machine", r.errno, "")
	}
	if r.n == 0 {
		if r.end != 0 {
			return protocolError("half a message and hung up")
		}
		return io.EOF
	}
	r.end += r.n
	if r.msg.Controllen > 0 {
		fds, err := descriptors(r.oob[:r.msg.Controllen])
		if err != nil || r.msg.Flags&unix.MSG_CTRUNC != 0 || len(fds) > maxFDs || len(r.arrivals) >= maxFDs {
			closeAll(fds)
			return protocolError("more descriptors than %d", maxFDs)
		}
		r.arrivals = append(r.arrivals, arrival{r.position + int64(r.end), fds})
	}
	return nil
}

// descriptors returns those of control messages; all that could be had even
// when it returns an error.
func descriptors(oob []byte) (fds []int, err error) {
	ms, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range ms {
		got, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fds, err
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// next returns the next message, or not ok when it is not all there yet.
func (r *receiver) next() (m message, ok bool, err error) {
	b := r.buf[r.start:r.end]
	if len(b) < headerSize {
		return message{}, false, nil
	}
	h := parseHeader(b)
	if h.size < headerSize || h.size > maxMessage {
		return message{}, false, protocolError("a message of %d bytes", h.size)
	}
	if len(b) < int(h.size) {
		return message{}, false, nil
	}
	m = message{header: h, body: b[headerSize:h.size:h.size]}
	r.start += int(h.size)
	r.position += int64(h.size)
	for len(r.arrivals) > 0 && r.arrivals[0].end <= r.position {
		m.fds = append(m.fds, r.arrivals[0].fds...)
		r.arrivals = r.arrivals[1:]
	}
	return m, true, nil
}

// close lets go of descriptors that no message claimed.
func (r *receiver) close() {
	for _, a := range r.arrivals {
		closeAll(a.fds)
	}
	r.arrivals = nil
}
