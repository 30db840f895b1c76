package rig

import (
	"bytes"
	"net"
	"testing"
	"time"
)

// station is a machine on the LAN.
func station(t *testing.T, l *lan) net.Conn {
	t.Helper()
	f, err := l.plug()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func ethernet(to, from byte, text string) []byte {
	b := make([]byte, 14, 64)
	copy(b, []byte{2, 0, 0, 0, 0, to})
	if to == 255 {
		copy(b, []byte{255, 255, 255, 255, 255, 255})
	}
	copy(b[6:], []byte{2, 0, 0, 0, 0, from})
	return append(b, text...)
}

// next is the next frame that a station gets.
func next(t *testing.T, c net.Conn) []byte {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, maxEthernet)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

func put(t *testing.T, c net.Conn, frame []byte) {
	t.Helper()
	if _, err := c.Write(frame); err != nil {
		t.Fatal(err)
	}
}

func TestLANLearnsWhereStationsAre(t *testing.T) {
	l := newLAN()
	defer l.close()
	a, b, c := station(t, l), station(t, l), station(t, l)
	put(t, a, ethernet(255, 1, "who is there"))
	for _, s := range []net.Conn{b, c} {
		if got := next(t, s); !bytes.HasSuffix(got, []byte("who is there")) {
			t.Errorf("a broadcast arrived as %q", got)
		}
	}
	put(t, b, ethernet(1, 2, "me"))
	if got := next(t, a); !bytes.Equal(got, ethernet(1, 2, "me")) {
		t.Errorf("the answer arrived as %q", got)
	}
	// c has not seen the answer: the next that it gets is the broadcast.
	put(t, b, ethernet(255, 2, "all"))
	if got := next(t, c); !bytes.HasSuffix(got, []byte("all")) {
		t.Errorf("a station got %q, which was for another", got)
	}
}

func TestLANIsNotHeldUpByAMachineThatTakesNothing(t *testing.T) {
	l := newLAN()
	defer l.close()
	a, b, _ := station(t, l), station(t, l), station(t, l)
	frame := append(ethernet(255, 1, ""), make([]byte, 8<<10)...)
	// More than the third could ever have waiting.
	for range 2000 {
		put(t, a, frame)
		next(t, b)
	}
}

func TestLANIgnoresWhatIsNoFrame(t *testing.T) {
	l := newLAN()
	defer l.close()
	a, b := station(t, l), station(t, l)
	put(t, a, []byte("short"))
	put(t, a, ethernet(255, 1, "whole"))
	if got := next(t, b); !bytes.HasSuffix(got, []byte("whole")) {
		t.Errorf("it got %q", got)
	}
}
