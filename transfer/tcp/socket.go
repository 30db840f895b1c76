package tcp

import (
	"errors"
	"net"
	"syscall"
	"time"
)

// tune sets what makes a silent cable be left within UserTimeout: unanswered
// bytes end the connection, and so do unanswered probes when none are under way.
func tune(c net.Conn) error {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	if err := t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3}); err != nil {
		return err
	}
	sc, err := t.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := sc.Control(func(fd uintptr) { serr = setUserTimeout(int(fd), UserTimeout) }); err != nil {
		return err
	}
	return serr
}

func isTransient(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) || errors.Is(err, syscall.ENOBUFS)
}
