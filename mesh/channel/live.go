package channel

import (
	"fmt"
	"net"
	"time"
)

// How long a connection may go on while nothing that was sent arrives. On
// Linux this also ends a connection whose reader has stopped reading for that
// long: gRPC and the probe read always, a person's HTTP stream may not.
var deadlines = map[string]time.Duration{
	HTTP: time.Minute,
}

const deadline = 2500 * time.Millisecond

func deadAfter(alpn string) time.Duration {
	if d, ok := deadlines[alpn]; ok {
		return d
	}
	return deadline
}

// setLiveness has the kernel notice a dead path within three seconds when the
// connection is idle, and within unacked when something is under way.
func setLiveness(raw net.Conn, unacked time.Duration) error {
	tcp, ok := raw.(*net.TCPConn)
	if !ok {
		return fmt.Errorf("a %T is no TCP connection", raw)
	}
	err := tcp.SetKeepAliveConfig(net.KeepAliveConfig{
		Enable: true, Idle: time.Second, Interval: time.Second, Count: 2,
	})
	if err != nil {
		return err
	}
	sc, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := sc.Control(func(fd uintptr) { serr = setUnacked(int(fd), unacked) }); err != nil {
		return err
	}
	return serr
}
