package sock

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"tbcluster/host/nstest"
)

// two returns two neighbours that have the same address, each on a cable of its
// own: only the interface tells them apart.
func two(t *testing.T) (own, first, second *nstest.Namespace) {
	t.Helper()
	own, first, second = nstest.Own(t), nstest.New(t), nstest.New(t)
	nstest.Cable(t, own, "one", first, "cable0")
	nstest.Cable(t, own, "two", second, "cable0")
	t.Cleanup(func() { own.Cut("one"); own.Cut("two") })
	own.Address("one", "10.77.0.1/24")
	own.Address("two", "10.77.0.3/24")
	for _, n := range []*nstest.Namespace{first, second} {
		n.Address("cable0", "10.77.0.2/24")
		n.Address("cable0", "fe80::2/64")
	}
	own.Address("one", "fe80::1/64")
	own.Address("two", "fe80::3/64")
	return own, first, second
}

// tellApart gives the second neighbour an address of its own, so that answers
// to it leave by its cable.
func tellApart(own, second *nstest.Namespace) {
	second.Address("cable0", "10.77.0.4/24")
	second.Run("ip", "route", "add", "10.77.0.1/32", "dev", "cable0", "src", "10.77.0.4")
	own.Run("ip", "route", "add", "10.77.0.4/32", "dev", "two")
}

// serve writes word to whoever connects in ns.
func serve(t *testing.T, ns *nstest.Namespace, address, word string) {
	t.Helper()
	var l net.Listener
	var err error
	ns.Do(func() { l, err = net.Listen("tcp", address) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go greet(l, word)
}

func greet(l net.Listener, word string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		io.WriteString(c, word)
		c.Close()
	}
}

// says dials and returns what the other side says.
func says(t *testing.T, address string, o BindOptions) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := DialContext(ctx, "tcp", address, o)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if o.Source.IsValid() && c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().WithZone("") != o.Source.WithZone("") {
		t.Errorf("left from %s, want %s", c.LocalAddr(), o.Source)
	}
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestADialledConnectionLeavesByItsInterface(t *testing.T) {
	_, first, second := two(t)
	serve(t, first, ":7000", "first")
	serve(t, second, ":7000", "second")
	for iface, want := range map[string]string{"one": "first", "two": "second"} {
		if got := says(t, "10.77.0.2:7000", BindOptions{Interface: iface}); got != want {
			t.Errorf("by %s: reached %q, want %q", iface, got, want)
		}
		if got := says(t, "[fe80::2%"+iface+"]:7000", BindOptions{Interface: iface}); got != want {
			t.Errorf("by %s, IPv6: reached %q, want %q", iface, got, want)
		}
	}
	source := netip.MustParseAddr("10.77.0.3")
	if got := says(t, "10.77.0.2:7000", BindOptions{Interface: "two", Source: source, DeadAfter: time.Second}); got != "second" {
		t.Errorf("from %s: reached %q", source, got)
	}
}

func TestAListenerHearsItsInterfaceOnly(t *testing.T) {
	own, first, second := two(t)
	tellApart(own, second)
	l, err := Listen(t.Context(), "tcp", ":7001", "one")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go greet(l, "own")
	dial := func(ns *nstest.Namespace) error {
		var c net.Conn
		var err error
		ns.Do(func() { c, err = net.DialTimeout("tcp", "10.77.0.1:7001", time.Minute) })
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = io.ReadAll(c)
		return err
	}
	if err := dial(first); err != nil {
		t.Errorf("by its interface: %v", err)
	}
	if err := dial(second); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("by another interface: %v, want connection refused", err)
	}
	if c, err := net.Dial("tcp", "127.0.0.1:7001"); err == nil {
		c.Close()
		t.Error("by the loopback: connected")
	}
}

func TestPacketsAreHeardOnTheirInterfaceOnly(t *testing.T) {
	own, first, second := two(t)
	tellApart(own, second)
	p, err := ListenPacket(t.Context(), "udp", ":7002", "one")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	send := func(ns *nstest.Namespace, word string) {
		var c net.Conn
		var err error
		ns.Do(func() { c, err = net.Dial("udp", "10.77.0.1:7002") })
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, word); err != nil {
			t.Fatal(err)
		}
		if word != "second" {
			return
		}
		// The port is closed on that interface: the answer proves that the
		// packet was there before the first neighbour's is sent.
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 9)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("by another interface: %v, want connection refused", err)
		}
	}
	send(second, "second")
	send(first, "first")
	b := make([]byte, 99)
	if err := p.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	n, _, err := p.ReadFrom(b)
	if err != nil || string(b[:n]) != "first" {
		t.Errorf("heard %q, %v", b[:n], err)
	}
}

func TestAnInterfaceThatIsNotThere(t *testing.T) {
	if _, err := DialContext(t.Context(), "tcp", "127.0.0.1:1", BindOptions{Interface: "nowhere"}); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("dial: %v", err)
	}
	if _, err := Listen(t.Context(), "tcp", ":0", "nowhere"); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("listen: %v", err)
	}
	if _, err := DialContext(t.Context(), "unix", "/nowhere", BindOptions{Source: netip.MustParseAddr("::1")}); err == nil {
		t.Error("a source address for a Unix socket was accepted")
	}
}

// A silent cable keeps its carrier and drops every frame.
func TestASilentCableEndsAConnection(t *testing.T) {
	for name, write := range map[string]bool{"while it sends": true, "while it is idle": false} {
		t.Run(name, func(t *testing.T) {
			own, first, _ := two(t)
			var l net.Listener
			var err error
			first.Do(func() { l, err = net.Listen("tcp", "10.77.0.2:7003") })
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			c, err := DialContext(t.Context(), "tcp", "10.77.0.2:7003", BindOptions{Interface: "one", DeadAfter: 2 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			other, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			eventually := func(want bool) {
				t.Helper()
				for end := time.Now().Add(time.Minute); Acked(c) != want; time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("acked: %t", !want)
					}
				}
			}
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			eventually(true) // though nobody reads it
			own.Run("nft", "table netdev silent { chain in { type filter hook ingress device one priority 0; policy drop; }; }")
			t.Cleanup(func() { own.Run("nft", "delete", "table", "netdev", "silent") })
			start := time.Now()
			if err := c.SetDeadline(start.Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			if write {
				if _, err := c.Write(make([]byte, 1000)); err != nil {
					t.Fatal(err)
				}
				eventually(false)
			}
			_, err = c.Read(make([]byte, 1))
			took := time.Since(start)
			if !errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("after %v: %v", took, err)
			}
			if took > 30*time.Second {
				t.Errorf("ended after %v", took)
			}
			t.Logf("ended after %v", took)
		})
	}
}

// A cable that is pulled and plugged in again has an interface of the same name
// and another number, which package net would take a minute to notice.
func TestAnInterfaceThatCameBackUnderItsName(t *testing.T) {
	own := nstest.Own(t)
	for round := range 3 {
		far := nstest.New(t)
		nstest.Cable(t, own, "again", far, "cable0")
		own.Address("again", "fe80::1/64")
		far.Address("cable0", "fe80::2/64")
		serve(t, far, ":7000", "far")
		if got := says(t, "[fe80::2%again]:7000", BindOptions{Interface: "again"}); got != "far" {
			t.Errorf("round %d: reached %q", round, got)
		}
		own.Cut("again")
		if _, err := DialContext(t.Context(), "tcp", "[fe80::2%again]:7000", BindOptions{Interface: "again"}); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("round %d: without it: %v", round, err)
		}
	}
}
