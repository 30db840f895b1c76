package lab

import (
	"encoding/binary"
	"log"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// uevent is what the kernel says of a device that comes or goes. Real sysfs
// changes are told so; those of the lab's trees are put into the node's network
// namespace through the kernel, and look to its listeners like the kernel's own.
type uevent struct {
	action, path string
	vars         []string // NAME=value
}

func added(dir, subsystem string, vars ...string) uevent {
	return uevent{"add", dir, append(vars, "SUBSYSTEM="+subsystem)}
}

func removed(dir, subsystem string, vars ...string) uevent {
	return uevent{"remove", dir, append(vars, "SUBSYSTEM="+subsystem)}
}

// payload is the event as lib/kobject_uevent.c writes it, less SEQNUM, which
// the kernel adds.
func (e uevent) payload() []byte {
	path := "/" + e.path
	parts := append([]string{e.action + "@" + path, "ACTION=" + e.action, "DEVPATH=" + path}, e.vars...)
	return []byte(strings.Join(parts, "\x00") + "\x00")
}

// sendUevent has the kernel tell the listeners of a node of a change. That it
// fails is no failure of the change: listeners re-read from time to time.
func sendUevent(b *boot, e uevent) {
	if b == nil {
		return
	}
	// Between the goroutine's threads the network namespace must not change; the
	// thread is not used for anything else if it cannot come back.
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		log.Printf("uevent: %v", err)
		runtime.UnlockOSThread()
		return
	}
	defer home.Close()
	err = netns.Set(b.ns)
	if err == nil {
		if err = broadcast(e.payload()); err != nil {
			log.Printf("uevent: %v", err)
		}
		err = netns.Set(home)
	}
	if err != nil {
		log.Printf("uevent: enter a network namespace: %v", err)
		return // still locked: the thread ends with its goroutine
	}
	runtime.UnlockOSThread()
}

// broadcast asks the kernel to send an event to all in this network namespace.
func broadcast(payload []byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	const (
		header     = 16 // struct nlmsghdr
		ueventSend = 16 // the lowest type that is no control message
	)
	msg := make([]byte, header, header+len(payload))
	binary.NativeEndian.PutUint32(msg[0:], uint32(header+len(payload)))
	binary.NativeEndian.PutUint16(msg[4:], ueventSend)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST)
	return unix.Sendto(fd, append(msg, payload...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}
