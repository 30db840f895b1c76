package pair

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/mesh/channel"
)

// A joiner that is too slow is told so, in a record that it can read, and costs
// the code nothing.
func TestSlowJoinerIsTold(t *testing.T) {
	a, c := newNode(t, "a"), newNode(t, "c")
	a.times.answer = 500 * time.Millisecond
	inv := a.open(t, 0)
	conn, err := c.ch.DialUnpaired(ctx(t), channel.Pair, a.at()[0].Way)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	e, err := newExchange(inv.Code, joinerRole, c.key.Public(), a.key.Public(), conn.ConnectionState())
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{rw: conn, within: 20 * time.Second}
	if err := w.write(frame{Number: e.number, Point: e.x}); err != nil {
		t.Fatal(err)
	}
	if f, err := w.next(); err != nil || f.Refuse != "" {
		t.Fatalf("hello: %+v, %v", f, err)
	}
	f, err := w.next() // and says nothing itself
	if err != nil || f.Refuse != refusedSlow {
		t.Fatalf("it hears %+v, %v", f, err)
	}
	if err := refused(f); !fault.Is(err, fault.Timeout) || !strings.Contains(err.Error(), "this node took too long") {
		t.Errorf("it is told %v", err)
	}
	select {
	case ev := <-inv.Events:
		t.Errorf("the code has %+v of it", ev)
	default:
	}
	if a.OpenNumber() != inv.Number {
		t.Error("the code is open no more")
	}
}

// What ends by time is called so at both ends, wherever it happens.
func TestSilenceIsATimeout(t *testing.T) {
	for name, script := range map[string]func(w *wire, e *exchange) error{
		"after the hello": func(*wire, *exchange) error { return nil },
		"after the MAC": func(w *wire, e *exchange) error {
			if err := w.write(frame{Point: e.y}); err != nil {
				return err
			}
			_, err := w.next()
			return err
		},
		"before the records": func(w *wire, e *exchange) error {
			if err := w.write(frame{Point: e.y}); err != nil {
				return err
			}
			if _, err := w.next(); err != nil {
				return err
			}
			mac, err := e.mac(inviterRole)
			if err != nil {
				return err
			}
			return w.write(frame{MAC: mac})
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newNode(t, "a"), newNode(t, "b")
			b.times.joiner = 2 * time.Second
			code := Number(a.id()) + "-ABCD-EFGH"
			hung := make(chan error, 1)
			defer a.ch.HandleUnpaired(channel.Pair, func(conn *channel.Conn) {
				w := &wire{rw: conn, within: 20 * time.Second}
				hello, err := w.next()
				var e *exchange
				if err == nil {
					e, err = newExchange(code, inviterRole, conn.PeerKey(), a.key.Public(), conn.ConnectionState())
				}
				if err == nil {
					err = e.take(hello.Point)
				}
				if err == nil {
					err = script(w, e)
				}
				hung <- err
				<-conn.Done()
			})()
			done := make(chan error, 1)
			go func() {
				_, err := b.Join(ctx(t), code, a.at())
				done <- err
			}()
			if err := <-hung; err != nil {
				t.Fatalf("the inviting side did not get so far: %v", err)
			}
			if err := <-done; !fault.Is(err, fault.Timeout) {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

// What a side takes for itself between two messages does not count.
func TestOwnWorkIsNotTimed(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	const within = time.Second
	w := &wire{rw: near, within: within}
	go func() {
		other := &wire{rw: far}
		for {
			f, err := other.next()
			if err != nil {
				return
			}
			if err := other.write(f); err != nil {
				return
			}
		}
	}()
	for range 2 {
		if err := w.write(frame{Name: "x"}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.next(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(within + within/3) // a machine with much else to do
	}
	far.Close()
	if _, err := w.next(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("behind the end it says %v", err)
	}
}
