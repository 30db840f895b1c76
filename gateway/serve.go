package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/net/netutil"

	"tbcluster/api/fault"
)

// DefaultPort is where the gateway listens when nothing else does.
const DefaultPort = 8555

const (
	headerBytes = 32 << 10
	// connections bounds those of one listener; more wait to be accepted.
	connections = 1024
)

func (g *Gateway) server(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: g.times.header, MaxHeaderBytes: headerBytes, IdleTimeout: g.times.idle,
		ErrorLog: slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
	}
}

// Serve serves l with h until ctx ends, with the time limits and sizes that
// every listener of the gateway has; then it lets requests under way end for a
// moment, closes the rest and returns nil. It owns l.
func (g *Gateway) Serve(ctx context.Context, l net.Listener, h http.Handler) error {
	return g.serve(ctx, netutil.LimitListener(l, connections), h)
}

// ServeConn serves one connection with h until it ends or ctx does: what comes
// in under tbcluster-http/1 goes to ServeConn(ctx, conn, g.PeerHandler()). It
// owns c.
func (g *Gateway) ServeConn(ctx context.Context, c net.Conn, h http.Handler) error {
	s := newSingle(c)
	err := g.serve(ctx, s, h)
	// Closed already, unless ctx ended before it was served; twice does no harm.
	_ = c.Close()
	return err
}

func (g *Gateway) serve(ctx context.Context, l net.Listener, h http.Handler) error {
	s := g.server(h)
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-ended:
			return
		case <-ctx.Done():
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.times.last)
		defer cancel()
		if s.Shutdown(last) != nil {
			// Who is still under way is cut off; nothing else can fail here.
			_ = s.Close()
		}
	})
	err := s.Serve(l)
	close(ended)
	wg.Wait()
	if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fault.New(fault.Connection, "serve the gateway", err, "restart the agent")
}

// single is a listener that gives out one connection and ends with it.
type single struct {
	first chan net.Conn
	done  chan struct{}
	once  sync.Once
	addr  net.Addr
}

func newSingle(c net.Conn) *single {
	s := &single{first: make(chan net.Conn, 1), done: make(chan struct{}), addr: c.LocalAddr()}
	// Wrapped, it is no *tls.Conn for package http, which would close one whose
	// ALPN it does not know.
	s.first <- &watchedConn{Conn: c, closed: s.Close}
	return s
}

func (s *single) Accept() (net.Conn, error) {
	select {
	case c := <-s.first:
		return c, nil
	default:
	}
	<-s.done
	return nil, net.ErrClosed
}

func (s *single) Close() error   { s.once.Do(func() { close(s.done) }); return nil }
func (s *single) Addr() net.Addr { return s.addr }

type watchedConn struct {
	net.Conn
	closed func() error
}

func (c *watchedConn) Close() error {
	err := c.Conn.Close()
	return errors.Join(err, c.closed())
}

// ListenLoopback listens on 127.0.0.1 and, where the machine has it, ::1 at
// the same port: at port, or the next of 100 that is free on both; port 0 takes
// any. It returns the listeners and the address for people
// ("127.0.0.1:8555"). Its error is a *fault.Fault.
func ListenLoopback(port int) (ls []net.Listener, address string, err error) {
	const tries = 100
	for i := range tries {
		p := port
		if port != 0 {
			p = port + i
		}
		if p > 65535 {
			break
		}
		if ls, err = listenBoth(p); err == nil {
			return ls, ls[0].Addr().String(), nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, "", fault.New(fault.PortInUse, fmt.Sprintf("listen on 127.0.0.1:%d for the gateway", p), err, "choose another port by gateway_port in the configuration")
		}
	}
	return nil, "", fault.New(fault.PortInUse, fmt.Sprintf("listen on 127.0.0.1 for the gateway, on any of %d ports from %d on", tries, port), err, "end what listens there, or choose another port by gateway_port in the configuration")
}

func listenBoth(port int) ([]net.Listener, error) {
	four, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	port = four.Addr().(*net.TCPAddr).Port
	six, err := net.Listen("tcp6", net.JoinHostPort("::1", strconv.Itoa(port)))
	switch {
	case err == nil:
		return []net.Listener{four, six}, nil
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAFNOSUPPORT):
		return []net.Listener{four}, nil // a machine without IPv6
	}
	return nil, errors.Join(err, four.Close())
}
