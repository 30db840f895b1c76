package channel

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKernelIsToldToNoticeDeadPaths reads the options back: a silent path needs
// a network of its own, which package member's and host/sock's tests have.
func TestKernelIsToldToNoticeDeadPaths(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	accepted := make(chan *Conn, 1)
	take := func(c *Conn) { accepted <- c; <-c.Done() }
	b.Handle(Control, take)
	b.Handle(HTTP, take)
	for alpn, want := range map[string]int{Control: 2500, HTTP: 60_000} {
		near, err := a.DialWay(ctx(t), b.id(), alpn, lan(b.addr))
		if err != nil {
			t.Fatal(err)
		}
		far := <-accepted
		for name, c := range map[string]*Conn{"dialled": near, "accepted": far} {
			sc, err := c.raw.(*net.TCPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			get := func(level, option int) (v int) {
				var gerr error
				if err := sc.Control(func(fd uintptr) { v, gerr = unix.GetsockoptInt(int(fd), level, option) }); err != nil || gerr != nil {
					t.Fatal(err, gerr)
				}
				return v
			}
			if got := get(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT); got != want {
				t.Errorf("%s, %s: dead after %d ms, want %d", alpn, name, got, want)
			}
			idle, interval, count := get(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE), get(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL), get(unix.IPPROTO_TCP, unix.TCP_KEEPCNT)
			if get(unix.SOL_SOCKET, unix.SO_KEEPALIVE) != 1 || idle+interval*count > 3 {
				t.Errorf("%s, %s: keepalive %d s and %d times %d s", alpn, name, idle, count, interval)
			}
		}
		_ = near.Close()
	}
}
