package rig

import (
	"errors"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// lan is an Ethernet that leads nowhere: a switch whose ports are pairs of
// datagram sockets, one frame a datagram.
type lan struct {
	mu    sync.Mutex
	ports []*net.UnixConn
	where map[[6]byte]int // port by MAC address
	done  sync.WaitGroup
}

// maxEthernet is the longest datagram that QEMU sends: a frame with the largest
// segment that virtio may hand over.
const maxEthernet = 68 << 10

// maxAddresses bounds what the switch remembers; beyond, frames go to all.
const maxAddresses = 1024

func newLAN() *lan { return &lan{where: map[[6]byte]int{}} }

// plug adds a port and returns its far end, for QEMU.
func (l *lan) plug() (*os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fault.New(fault.LabFailed, "make a port of the rig's LAN", err, "")
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "lan"), os.NewFile(uintptr(fds[1]), "lan")
	defer ours.Close()
	c, err := net.FileConn(ours)
	conn, ok := c.(*net.UnixConn)
	if err == nil && !ok {
		err = errors.New("it is no Unix socket")
	}
	if err != nil {
		return nil, errors.Join(fault.New(fault.LabFailed, "make a port of the rig's LAN", err, ""), theirs.Close())
	}
	l.mu.Lock()
	number := len(l.ports)
	l.ports = append(l.ports, conn)
	l.mu.Unlock()
	l.done.Go(func() { l.serve(number, conn) })
	return theirs, nil
}

// serve passes on the frames that come in by one port, until it is closed.
func (l *lan) serve(number int, conn *net.UnixConn) {
	frame := make([]byte, maxEthernet)
	for {
		n, err := conn.Read(frame)
		if errors.Is(err, unix.ECONNREFUSED) {
			continue // the machine at the other end was off when it was sent to
		}
		if err != nil {
			return
		}
		for _, to := range l.route(number, frame[:n]) {
			send(to, frame[:n])
		}
	}
}

// send hands a frame over, or loses it where the machine does not take it, as on
// any Ethernet: one that is off must not stop the others.
func send(to *net.UnixConn, frame []byte) {
	raw, err := to.SyscallConn()
	if err != nil {
		return // closed
	}
	_ = raw.Write(func(fd uintptr) bool {
		_, _ = unix.Write(int(fd), frame) // it does not block
		return true
	})
}

// route learns where a frame came from and says where it goes.
func (l *lan) route(from int, frame []byte) []*net.UnixConn {
	if len(frame) < 14 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	to, source := [6]byte(frame[:6]), [6]byte(frame[6:12])
	if _, known := l.where[source]; known || len(l.where) < maxAddresses {
		l.where[source] = from
	}
	if port, ok := l.where[to]; ok && to[0]&1 == 0 {
		if port == from {
			return nil
		}
		return []*net.UnixConn{l.ports[port]}
	}
	var all []*net.UnixConn
	for i, c := range l.ports {
		if i != from {
			all = append(all, c)
		}
	}
	return all
}

// close ends all ports.
func (l *lan) close() error {
	l.mu.Lock()
	ports := l.ports
	l.mu.Unlock()
	var errs []error
	for _, c := range ports {
		errs = append(errs, c.Close())
	}
	l.done.Wait()
	return errors.Join(errs...)
}
