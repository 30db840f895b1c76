package tcp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"tbcluster/transfer/transport"
)

// maxHandshakes bounds what strangers can make us hold.
const maxHandshakes = 32

// Listen waits for connections on a free port.
func (t *Transport) Listen(ctx context.Context, r transport.ListenRequest) (transport.Listener, error) {
	nl, err := t.listen(ctx, r.Interface, r.Local)
	if err != nil {
		return nil, err
	}
	ap, err := netip.ParseAddrPort(nl.Addr().String())
	if err != nil {
		_ = nl.Close() // the error of parsing is the one to tell
		return nil, fmt.Errorf("address of the listener: %w", err)
	}
	life, cancel := context.WithCancel(context.Background())
	l := &listener{nl: nl, port: ap.Port(), id: r.Identity, ready: make(chan *conn), life: life, cancel: cancel}
	l.wg.Add(1)
	go l.accept()
	return l, nil
}

type listener struct {
	nl     net.Listener
	port   uint16
	id     transport.Identity
	ready  chan *conn
	life   context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func (l *listener) Port() uint16 { return l.port }

// accept takes connections until the listener is closed or fails for good.
func (l *listener) accept() {
	defer l.wg.Done()
	defer l.cancel()
	slots := make(chan struct{}, maxHandshakes)
	for {
		raw, err := l.nl.Accept()
		if err != nil {
			if ne, ok := err.(net.Error); ok && ne.Timeout() || l.life.Err() == nil && isTransient(err) {
				select { // out of descriptors: others will be closed
				case <-time.After(50 * time.Millisecond):
					continue
				case <-l.life.Done():
				}
			}
			return
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = raw.Close() // too many who do not say who they are
			continue
		}
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			c, err := handshake(l.life, raw, l.id, true, nil)
			<-slots
			if err != nil {
				return // a stranger; handshake has closed it
			}
			select {
			case l.ready <- c:
			case <-l.life.Done():
				_ = c.Close()
			}
		}()
	}
}

// Accept returns the next connection; net.ErrClosed after Close.
func (l *listener) Accept(ctx context.Context) (transport.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.life.Done():
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close ends listening; connections that were accepted live on.
func (l *listener) Close() error {
	l.cancel()
	err := l.nl.Close()
	l.wg.Wait()
	return err
}
