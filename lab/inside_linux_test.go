package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// insideMain is what the tests run in nodes: `agent`, a stand-in for the agent
// that the real one needs nothing of, and small probes.
func insideMain(args []string) int {
	err := errors.New("no such probe: " + strings.Join(args, " "))
	if args[0] == "agent" {
		err = agentProbe()
	} else if f, ok := probes[args[1]]; ok {
		err = f(args[2:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		return 1
	}
	return 0
}

var probes = map[string]func([]string) error{
	"serve": serveProbe, "dial": dialProbe, "receive": receiveProbe, "pull": pullProbe,
	"multicast-in": multicastIn, "multicast-out": multicastOut,
	"uevents": ueventsProbe, "eat": eatProbe, "orphan": orphanProbe, "sleep": sleepProbe,
	"wait-link": waitLinkProbe, "address": addressProbe,
	"up": upProbe, "chroot": chrootProbe, "users": usersProbe,
}

// agentProbe is two processes like the agent's halves: they listen where the
// agent listens and write where it keeps state.
func agentProbe() error {
	if len(os.Args) > 2 && os.Args[2] == "--half" {
		select {}
	}
	half, err := os.StartProcess("/lab/bin/tbcluster", []string{"tbcluster", "agent", "--half"}, &os.ProcAttr{Files: []*os.File{nil, os.Stdout, os.Stderr}})
	if err != nil {
		return err
	}
	if err := os.MkdirAll("/run/tbcluster", 0o755); err != nil {
		return err
	}
	ln, err := net.Listen("unix", "/run/"+agentSocket)
	if errors.Is(err, syscall.EADDRINUSE) {
		os.Remove("/run/" + agentSocket)
		ln, err = net.Listen("unix", "/run/"+agentSocket)
	}
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		fmt.Fprintf(c, "%d %d\n", os.Getpid(), half.Pid)
		c.Close()
	}
}

// serveProbe answers UDP on a port with what it got.
func serveProbe(args []string) error {
	pc, err := net.ListenPacket("udp", args[0])
	if err != nil {
		return err
	}
	fmt.Println("ready")
	buf := make([]byte, 2048)
	for {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			return err
		}
		if _, err := pc.WriteTo(buf[:n], from); err != nil {
			return err
		}
	}
}

// dialProbe sends to ADDRESS over INTERFACE until an answer comes, for
// DURATION; "no answer" is what it prints otherwise.
func dialProbe(args []string) error {
	patience, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var bindErr error
		err := c.Control(func(fd uintptr) { bindErr = unix.BindToDevice(int(fd), args[1]) })
		return errors.Join(err, bindErr)
	}}
	c, err := d.Dial("udp", args[0])
	if err != nil {
		return err
	}
	end := time.Now().Add(patience)
	buf := make([]byte, 2048)
	for time.Now().Before(end) {
		if _, err := c.Write([]byte("ping")); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			return err
		}
		if n, err := c.Read(buf); err == nil && string(buf[:n]) == "ping" {
			fmt.Println("answer")
			return nil
		}
	}
	fmt.Println("no answer")
	return nil
}

// receiveProbe takes a TCP connection and prints the rate in bit/s.
func receiveProbe(args []string) error {
	ln, err := net.Listen("tcp", args[0])
	if err != nil {
		return err
	}
	fmt.Println("ready")
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	ln.Close() // the next one may begin as soon as this one has said what it found
	start := time.Now()
	n, err := io.Copy(io.Discard, c)
	fmt.Println(int64(float64(n*8) / time.Since(start).Seconds()))
	return err
}

// pullProbe sends BYTES to a receiver.
func pullProbe(args []string) error {
	n, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	c, err := net.Dial("tcp", args[0])
	if err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for n > 0 {
		w, err := c.Write(buf[:min(n, int64(len(buf)))])
		if err != nil {
			return err
		}
		n -= int64(w)
	}
	return c.Close()
}

var group = &net.UDPAddr{IP: net.IPv4(224, 0, 0, 251), Port: 5353}

func multicastIn([]string) error {
	eth, err := net.InterfaceByName(lanInterface)
	if err != nil {
		return err
	}
	c, err := net.ListenMulticastUDP("udp4", eth, group)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	buf := make([]byte, 100)
	n, from, err := c.ReadFromUDP(buf)
	fmt.Printf("%s from %s\n", buf[:n], from.IP)
	return err
}

// multicastOut sends until it is ended.
func multicastOut(args []string) error {
	c, err := net.DialUDP("udp4", nil, group)
	if err != nil {
		return err
	}
	for {
		if _, err := c.Write([]byte(args[0])); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// ueventsProbe prints the kernel's device events, "action path" a line.
func ueventsProbe([]string) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		return err
	}
	fmt.Println("ready")
	buf := make([]byte, 8192)
	for {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return err
		}
		head, rest, _ := strings.Cut(string(buf[:n]), "\x00")
		kernel := from.(*unix.SockaddrNetlink).Pid == 0
		action, path, _ := strings.Cut(head, "@")
		fmt.Println(action, filepath.Base(path), kernel, strings.Contains(rest, "SEQNUM="), strings.Contains(rest, "SUBSYSTEM=thunderbolt"))
	}
}

// eatProbe uses that many bytes of memory.
func eatProbe(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	for i := 0; i < n; i += 4096 {
		b[i] = 1
	}
	fmt.Println("ate")
	return nil
}

// orphanProbe leaves a child behind and prints its PID.
func orphanProbe(args []string) error {
	p, err := os.StartProcess("/bin/sleep", []string{"sleep", args[0]}, &os.ProcAttr{})
	if err != nil {
		return err
	}
	fmt.Println(p.Pid)
	return nil
}

// sleepProbe says "ready" and lives until it gets SIGTERM; then it says so.
func sleepProbe([]string) error {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGTERM)
	fmt.Println("ready", os.Getpid())
	<-c
	return os.WriteFile("/tmp/terminated", nil, 0o644)
}

// addressProbe sets INTERFACE up with ADDRESS/BITS.
func addressProbe(args []string) error {
	link, err := netlink.LinkByName(args[0])
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(args[1])
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link))
}

// upProbe makes a lab, on the host.
func upProbe(args []string) error {
	_, err := Up(context.Background(), Options{Name: args[0], Nodes: 3, Boot: []string{"tbcluster", "agent"}})
	return err
}

// chrootProbe runs tests in a chroot whose / is no mount point, on a machine
// whose mounts spread, as under systemd. Its mount namespace is its own.
func chrootProbe(args []string) error {
	dir := args[0]
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	for _, d := range []string{"usr", "etc", "dev", "proc", "sys"} {
		p := filepath.Join(dir, d)
		if err := os.Mkdir(p, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("/"+d, p, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return err
		}
	}
	// As in a bare chroot.
	for _, d := range []string{"run", "tmp", "root", "home"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := unix.Unmount(filepath.Join(dir, "sys/fs/cgroup"), unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Chroot(dir); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return syscall.Exec("/tests", append([]string{"/tests"}, args[1:]...), os.Environ())
}

// usersProbe prints who runs it.
func usersProbe([]string) error {
	groups, err := os.Getgroups()
	if err != nil {
		return err
	}
	dir, err := os.Getwd()
	fmt.Println(os.Getuid(), os.Getgid(), groups, dir, os.Getenv("HOME"), os.Getenv("USER"))
	return err
}

// waitLinkProbe waits until an interface has a carrier ("up") or does not exist
// ("gone").
func waitLinkProbe(args []string) error {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		b, err := os.ReadFile("/sys/class/net/" + args[0] + "/carrier")
		state := "down"
		switch {
		case errors.Is(err, os.ErrNotExist):
			state = "gone"
		case err == nil && strings.TrimSpace(string(b)) == "1":
			state = "up"
		}
		if state == args[1] {
			return nil
		}
	}
	return fmt.Errorf("%s is never %s", args[0], args[1])
}

// firstLine reads the first line of r and goes on to read the rest.
func firstLine(r io.Reader) (string, *bufio.Scanner) {
	s := bufio.NewScanner(r)
	s.Scan()
	return s.Text(), s
}
