package channel

import (
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"
)

// A record that did not go out, or not whole, cannot be followed by another: the
// other end would take the farewell for a forged record.
func TestWriteThatTimedOutIsNotFollowedByAFarewell(t *testing.T) {
	for name, write := range map[string]func(*Conn) error{
		"nothing of it went out": func(c *Conn) error {
			if err := c.SetDeadline(time.Now().Add(-time.Second)); err != nil {
				return err
			}
			_, err := c.Write([]byte("too late"))
			return err
		},
		"a part of it went out": func(c *Conn) error {
			if err := c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				return err
			}
			// The other end reads nothing: this is more than fits.
			_, err := c.Write(make([]byte, 64<<20))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
			pairUp(t, a, b)
			a.SetWays(b.id(), []Way{lan(b.addr)})
			wrote, closed := make(chan error, 1), make(chan struct{})
			b.Handle("late/1", func(c *Conn) {
				wrote <- write(c)
				// As after every handler; here so that the test knows that it is done.
				_ = c.Close()
				close(closed)
			})
			c, err := a.Dial(ctx(t), b.id(), "late/1")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := <-wrote; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("the write ended with %v", err)
			}
			select {
			case <-closed:
			case <-ctx(t).Done():
				t.Fatal("Close waits")
			}
			// crypto/tls takes an end between two records for an end.
			if _, err = io.Copy(io.Discard, c); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("reading ends with %v", err)
			}
		})
	}
}

func TestWriteThatFailedIsNotForgottenByTheNext(t *testing.T) {
	a, b := newNode(t, "a", Options{}), newNode(t, "b", Options{})
	pairUp(t, a, b)
	a.SetWays(b.id(), []Way{lan(b.addr)})
	c, err := a.Dial(ctx(t), b.id(), echo)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	wantEcho(t, c)
	if err := c.SetWriteDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("late")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the write ended with %v", err)
	}
	if err := c.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Write([]byte("again")); err == nil {
		t.Errorf("%d bytes were written behind a gap", n)
	}
}
