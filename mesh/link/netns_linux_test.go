package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"tbcluster/host"
	"tbcluster/host/sock"
)

// realCable is two network namespaces joined by veth pairs over a bridge in a
// third, which stands for the cable: a port taken off it keeps its carrier and
// carries nothing.
type realCable struct {
	t     *testing.T
	mid   netns.NsHandle
	sides [2]*realSide
	names int
}

// realSide is a node in a namespace of its own.
type realSide struct {
	t       *testing.T
	id, far string
	uuid    string
	farUUID string
	ns      netns.NsHandle
	h       *netlink.Handle
	tracker *Tracker
	prefix  netip.Prefix
	changed chan struct{}
	iface   string
	port    int
}

const probePort = 7871

func newNamespace(t *testing.T) (netns.NsHandle, *netlink.Handle) {
	t.Helper()
	type made struct {
		ns  netns.NsHandle
		err error
	}
	done := make(chan made)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		ns, err := netns.New()
		done <- made{ns, err}
	}()
	m := <-done
	if errors.Is(m.err, os.ErrPermission) {
		t.Skip("network namespaces need root here")
	}
	if m.err != nil {
		t.Fatal(m.err)
	}
	h, err := netlink.NewHandleAt(m.ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close(); _ = m.ns.Close() })
	return m.ns, h
}

// inside runs f on a thread in the namespace; sockets made there stay there.
func (s *realSide) inside(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(s.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func bound(iface string) func(_, _ string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) {
			err = syscall.SetsockoptString(int(fd), syscall.SOL_SOCKET, syscall.SO_BINDTODEVICE, iface)
		}); e != nil {
			return e
		}
		return err
	}
}

func (s *realSide) DialLink(ctx context.Context, nodeID, iface string, local, remote netip.AddrPort) (net.Conn, error) {
	if nodeID != s.far {
		return nil, fmt.Errorf("there is no %s", nodeID)
	}
	var c net.Conn
	err := s.inside(func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local), Control: bound(iface)}
		c, err = d.DialContext(ctx, "tcp", remote.String())
		return err
	})
	return c, err
}

func (s *realSide) ListenLink(iface string, addr netip.Addr) (io.Closer, error) {
	var l net.Listener
	err := s.inside(func() (err error) {
		c := net.ListenConfig{Control: bound(iface)}
		l, err = c.Listen(context.Background(), "tcp", netip.AddrPortFrom(addr, probePort).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _ = s.tracker.Serve(c, s.far, iface) }()
		}
	}()
	return l, nil
}

// update gives the tracker what the namespace has now.
func (s *realSide) update() {
	s.t.Helper()
	var tb host.Thunderbolt
	var n host.Network
	d := host.Domain{UUID: s.uuid}
	if s.iface != "" {
		l, err := s.h.LinkByName(s.iface)
		if err != nil {
			s.t.Fatal(err)
		}
		d.Peers = []host.XDomain{{Port: fmt.Sprint("0-", s.port), RemoteUUID: s.farUUID, Interface: s.iface}}
		n.Interfaces = []host.Interface{{Name: s.iface, Index: l.Attrs().Index, Carrier: true, Up: true, MTU: l.Attrs().MTU}}
	}
	tb.Domains = []host.Domain{d}
	s.tracker.Update(tb, n)
}

// address sets the link address, as the root half does.
func (s *realSide) address() {
	s.t.Helper()
	l, err := s.h.LinkByName(s.iface)
	if err != nil {
		s.t.Fatal(err)
	}
	a, err := netlink.ParseAddr(s.prefix.String())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, err := range []error{s.h.LinkSetUp(l), s.h.AddrReplace(l, a)} {
		if err != nil {
			s.t.Fatal(err)
		}
	}
	s.tracker.SetAddresses(map[string]Address{fmt.Sprint("0-", s.port): {Interface: s.iface, Prefix: s.prefix, Remote: other(s.prefix)}})
}

func (c *realCable) mend() {
	c.t.Helper()
	bridge, h := c.bridge()
	c.names++
	for _, s := range c.sides {
		s.iface = fmt.Sprintf("tb%d", c.names)
		far := fmt.Sprintf("%s%d", s.id[:1], c.names)
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: far, MasterIndex: bridge.Attrs().Index}, PeerName: s.iface, PeerNamespace: netlink.NsFd(s.ns)}
		if err := h.LinkAdd(veth); err != nil {
			c.t.Fatal(err)
		}
		l, err := h.LinkByName(far)
		if err != nil {
			c.t.Fatal(err)
		}
		if err := h.LinkSetUp(l); err != nil {
			c.t.Fatal(err)
		}
		s.update()
	}
	h.Close()
}

func (c *realCable) bridge() (netlink.Link, *netlink.Handle) {
	c.t.Helper()
	h, err := netlink.NewHandleAt(c.mid)
	if err != nil {
		c.t.Fatal(err)
	}
	l, err := h.LinkByName("cable")
	if err != nil {
		c.t.Fatal(err)
	}
	return l, h
}

func (c *realCable) silence(silent bool) {
	c.t.Helper()
	bridge, h := c.bridge()
	defer h.Close()
	l, err := h.LinkByName(fmt.Sprintf("%s%d", c.sides[0].id[:1], c.names))
	if err != nil {
		c.t.Fatal(err)
	}
	if silent {
		err = h.LinkSetNoMaster(l)
	} else {
		err = h.LinkSetMaster(l, bridge)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *realCable) cut() {
	c.t.Helper()
	for _, s := range c.sides {
		l, err := s.h.LinkByName(s.iface)
		if err == nil {
			err = s.h.LinkDel(l)
		}
		if err != nil {
			c.t.Fatal(err)
		}
		s.iface = ""
		s.update()
	}
}

// await waits until both ends count the link as proven, or not, and says how
// long that took; the limits are measured on an idle machine, elsewhere.
func (c *realCable) await(proven bool) time.Duration {
	c.t.Helper()
	began := time.Now()
	deadline := time.After(time.Minute)
	for {
		ok := true
		for _, s := range c.sides {
			r := s.tracker.Reports()
			ok = ok && len(r) == 1 && r[0].GetProven() == proven
		}
		if ok {
			return time.Since(began)
		}
		select {
		case <-c.sides[0].changed:
		case <-c.sides[1].changed:
		case <-deadline:
			c.t.Fatalf("never proven %v: %v, %v", proven, c.sides[0].tracker.Reports(), c.sides[1].tracker.Reports())
		}
	}
}

func TestARealCableIsProvenFallsSilentIsCutAndMended(t *testing.T) {
	c := &realCable{t: t}
	var h *netlink.Handle
	c.mid, h = newNamespace(t)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cable"}}
	for _, err := range []error{h.LinkAdd(bridge), h.LinkSetUp(bridge)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, id := range []string{"alpha", "beta"} {
		s := &realSide{t: t, id: id, far: []string{"beta", "alpha"}[i], uuid: []string{uuidA, uuidB}[i], farUUID: []string{uuidB, uuidA}[i],
			prefix: netip.MustParsePrefix([]string{"10.77.1.1/30", "10.77.1.2/30"}[i]), port: i + 1, changed: make(chan struct{}, 1)}
		s.ns, s.h = newNamespace(t)
		s.tracker = NewTracker(Config{Self: id, Dialer: s, Listener: s, Acked: sock.Acked, Changed: func() {
			select {
			case s.changed <- struct{}{}:
			default:
			}
		}})
		t.Cleanup(s.tracker.Close)
		c.sides[i] = s
	}
	c.mend()
	for i, s := range c.sides { // both have heard of each other
		o := c.sides[1-i]
		s.tracker.SetPeers([]Peer{{NodeID: o.id, Name: o.id, Up: true, LinkPort: probePort, Reports: o.tracker.Reports()}})
	}
	// The second end comes up while the first has long sent ARP into the void.
	c.sides[0].address()
	time.Sleep(600 * time.Millisecond)
	c.sides[1].address()
	t.Logf("proven in %v", c.await(true))

	c.silence(true)
	t.Logf("silence noticed in %v", c.await(false))
	for _, s := range c.sides {
		if r := s.tracker.Reports()[0]; reportState(r) != down || !strings.Contains(r.GetReason(), "carrier") {
			t.Errorf("%s says %v", s.id, r)
		}
	}
	c.silence(false)
	t.Logf("proven again in %v", c.await(true))

	c.cut()
	c.await(false)
	c.mend()
	c.sides[1].address()
	time.Sleep(200 * time.Millisecond)
	c.sides[0].address()
	t.Logf("replugged: proven in %v", c.await(true))
}
