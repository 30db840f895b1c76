package channel

import (
	"time"

	"golang.org/x/sys/unix"
)

// rxtConnDropTime is TCP_RXT_CONNDROPTIME of netinet/tcp.h: seconds after which
// a retransmitting connection is dropped.
const rxtConnDropTime = 0x80

func setUnacked(fd int, d time.Duration) error {
	seconds := int((d + time.Second - 1) / time.Second)
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, rxtConnDropTime, seconds)
}
