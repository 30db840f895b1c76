package tcp

import (
	"time"

	"golang.org/x/sys/unix"
)

// setUserTimeout sets how long macOS retransmits before it drops a connection,
// in whole seconds.
func setUserTimeout(fd int, d time.Duration) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_RXT_CONNDROPTIME, int((d+time.Second-1)/time.Second))
}
