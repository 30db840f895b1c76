package sock

import (
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func bind(fd int, network, iface string) error {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return err
	}
	if strings.HasSuffix(network, "6") {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_BOUND_IF, i.Index)
	}
	return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BOUND_IF, i.Index)
}

func setDeadAfter(fd int, d time.Duration) error {
	idle, interval, count := probePlan(d)
	for _, o := range []struct {
		name              string
		level, opt, value int
	}{
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{"TCP_KEEPALIVE", unix.IPPROTO_TCP, unix.TCP_KEEPALIVE, idle},
		{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, interval},
		{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, count},
		{"TCP_RXT_CONNDROPTIME", unix.IPPROTO_TCP, unix.TCP_RXT_CONNDROPTIME, max(int((d+time.Second-1)/time.Second), 1)},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.opt, o.value); err != nil {
			return fmt.Errorf("set %s: %w", o.name, err)
		}
	}
	return nil
}

func peerCred(fd int) (Cred, error) {
	x, err := unix.GetsockoptXucred(fd, unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
	if err != nil {
		return Cred{}, err
	}
	if x.Ngroups < 1 {
		return Cred{}, ErrNoPeer
	}
	pid, err := unix.GetsockoptInt(fd, unix.SOL_LOCAL, unix.LOCAL_PEERPID)
	if err != nil {
		return Cred{}, err
	}
	return Cred{PID: pid, UID: x.Uid, GID: x.Groups[0]}, nil
}

// socketID is the inode: macOS counts the sockets that are asked for it.
func socketID(fd int) (uint64, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return st.Ino, err
}

// socketpair has no close-on-exec flag on macOS: the lock that os/exec takes
// keeps a child from being made between the two steps.
func socketpair() ([2]int, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return fds, err
	}
	unix.CloseOnExec(fds[0])
	unix.CloseOnExec(fds[1])
	return fds, nil
}

func acked(fd int) bool {
	i, err := unix.GetsockoptTCPConnectionInfo(fd, unix.IPPROTO_TCP, unix.TCP_CONNECTION_INFO)
	const established = 4 // TCPS_ESTABLISHED
	return err == nil && i.State == established && i.Snd_sbbytes == 0
}
