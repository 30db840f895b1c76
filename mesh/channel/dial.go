package channel

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"tbcluster/api/fault"
	"tbcluster/mesh/identity"
)

const (
	// stagger is how long a way has before the next is tried beside it; after
	// the first staggered ways, short: those are guesses.
	stagger      = 150 * time.Millisecond
	shortStagger = 50 * time.Millisecond
	staggered    = 4
	// attemptTimeout bounds one way, connecting and handshake.
	attemptTimeout = 5 * time.Second
	// failedFor is how long a way that failed comes after those that did not.
	failedFor = 10 * time.Second
	maxWays   = 128
)

// SetWays says how a node can be reached, best first within a kind.
func (c *Channel) SetWays(node identity.NodeID, ways []Way) {
	ways = slices.Clone(ways)
	if len(ways) > maxWays {
		ways = ways[:maxWays]
	}
	for i := range ways {
		ways[i].Addr = unmap(ways[i].Addr)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// A way that comes anew has not failed.
	for key := range c.failed {
		if key.node == node && !slices.Contains(ways, key.way) {
			delete(c.failed, key)
		}
	}
	if len(ways) == 0 {
		delete(c.ways, node)
		return
	}
	c.ways[node] = ways
}

// Ways returns what SetWays set.
func (c *Channel) Ways(node identity.NodeID) []Way {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.ways[node])
}

// order returns the ways to node in the order of trying: those that failed just
// now last, cables before the LAN.
func (c *Channel) order(node identity.NodeID) []Way {
	c.mu.Lock()
	defer c.mu.Unlock()
	ways := slices.Clone(c.ways[node])
	rank := func(w Way) int {
		r := 0
		if w.Kind != Cable {
			r = 1
		}
		if time.Since(c.failed[wayKey{node, w}]) < failedFor {
			r += 2
		}
		return r
	}
	slices.SortStableFunc(ways, func(a, b Way) int { return cmp.Compare(rank(a), rank(b)) })
	return ways
}

// Other returns which node was last met at an address of node, where it was
// another; a connection with node itself ends that.
func (c *Channel) Other(node identity.NodeID) (identity.NodeID, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id, ok := c.others[node]
	return id, ok
}

func (c *Channel) note(node identity.NodeID, w Way, failed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !failed {
		delete(c.failed, wayKey{node, w})
	} else if slices.Contains(c.ways[node], w) {
		c.failed[wayKey{node, w}] = time.Now()
	}
}

// wayError is what went wrong on one way.
type wayError struct {
	way Way
	err error
}

func (e wayError) Error() string { return fmt.Sprintf("%s: %s", e.way, words(e.err)) }
func (e wayError) Unwrap() error { return e.err }

// Dial connects to node over its ways: cables first, the next way 150 ms after
// the one before or at once when that failed. Faults: NODE_DOWN (no way, or none
// answers; each way is named with its error), NOT_PAIRED, PROTOCOL.
func (c *Channel) Dial(ctx context.Context, node identity.NodeID, alpn string) (*Conn, error) {
	ways := c.order(node)
	if len(ways) == 0 {
		f := fault.Newf(fault.NodeDown, "see that it is on and that its agent runs (`tbcluster status` there)", "connect to %s", c.o.NameOf(node))
		f.Why = "no address of it is known"
		return nil, f.With("node", string(node))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn *Conn
		err  error
		way  Way
	}
	results := make(chan result)
	begun, ended := 0, 0
	begin := func() {
		w := ways[begun]
		begun++
		go func() {
			conn, err := c.dial(ctx, w, alpn, node, false)
			results <- result{conn, err, w}
		}()
	}
	// rest closes connections that come too late.
	rest := func(n int) {
		for range n {
			if r := <-results; r.conn != nil {
				r.conn.abort()
			}
		}
	}
	begin()
	next := time.NewTimer(stagger)
	defer next.Stop()
	var errs []error
	for ended < begun || begun < len(ways) {
		select {
		case <-next.C:
			if begun < len(ways) {
				begin()
			}
		case r := <-results:
			ended++
			if r.err == nil {
				c.note(node, r.way, false)
				cancel()
				go rest(begun - ended)
				return r.conn, nil
			}
			if ctx.Err() == nil {
				c.note(node, r.way, true)
			}
			errs = append(errs, wayError{r.way, r.err})
			if begun < len(ways) && ctx.Err() == nil {
				begin()
			} else if ctx.Err() != nil {
				go rest(begun - ended)
				return nil, c.dialFault(node, append(errs, unansweredError{len(ways) - len(errs), ctx.Err()}))
			}
		case <-ctx.Done():
			go rest(begun - ended)
			return nil, c.dialFault(node, append(errs, unansweredError{len(ways) - len(errs), ctx.Err()}))
		}
		switch {
		case begun == len(ways):
			next.Stop()
		case begun < staggered:
			next.Reset(stagger)
		default:
			next.Reset(shortStagger)
		}
	}
	return nil, c.dialFault(node, errs)
}

// DialWay connects to node over one way. Faults as of Dial.
func (c *Channel) DialWay(ctx context.Context, node identity.NodeID, alpn string, w Way) (*Conn, error) {
	conn, err := c.dial(ctx, w, alpn, node, false)
	if err != nil {
		return nil, c.dialFault(node, []error{wayError{w, err}})
	}
	return conn, nil
}

// DialAddress connects to whichever paired node answers at w; Peer tells which.
// It is for addresses written in the configuration.
func (c *Channel) DialAddress(ctx context.Context, alpn string, w Way) (*Conn, error) {
	conn, err := c.dial(ctx, w, alpn, "", false)
	if err != nil {
		return nil, c.dialFault("", []error{wayError{w, err}})
	}
	return conn, nil
}

// DialUnpaired connects to whoever answers at w, paired or not.
func (c *Channel) DialUnpaired(ctx context.Context, alpn string, w Way) (*Conn, error) {
	conn, err := c.dial(ctx, w, alpn, "", true)
	if err != nil {
		return nil, c.dialFault("", []error{wayError{w, err}})
	}
	return conn, nil
}

func (c *Channel) dial(ctx context.Context, w Way, alpn string, want identity.NodeID, unpaired bool) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	raw, err := c.o.Dialer(ctx, "tcp", w.Addr.String(), w.Interface, netip.Addr{})
	if err != nil {
		return nil, err
	}
	conn, err := c.dialHandshake(ctx, raw, w, alpn, want, unpaired)
	if err != nil {
		_ = raw.Close() // the handshake's error is the one that counts
		if other := (otherNodeError{}); errors.As(err, &other) && want != "" {
			c.mu.Lock()
			c.others[want] = other.id
			c.mu.Unlock()
		}
		return nil, remoteAlert(err)
	}
	if !c.register(conn) {
		return nil, untrustedError{conn.peer}
	}
	return conn, nil
}

func (c *Channel) dialHandshake(ctx context.Context, raw net.Conn, w Way, alpn string, want identity.NodeID, unpaired bool) (*Conn, error) {
	t := tls.Client(raw, c.dialConfig(alpn, want, unpaired))
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	var first [1]byte
	_, err := io.ReadFull(t, first[:])
	if !stop() {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	if first[0] != accepted {
		return nil, errProtocol
	}
	if w.Interface == "" {
		if local, ok := raw.LocalAddr().(*net.TCPAddr); ok {
			w.Interface, _ = c.o.InterfaceOf(local.AddrPort().Addr().Unmap())
		}
	}
	return c.newConn(raw, t, w, unpaired)
}

// dialFault says what is wrong with all ways to node ("" for an address): the
// gravest first, since a node that answers and refuses is not down.
func (c *Channel) dialFault(node identity.NodeID, errs []error) error {
	err := errors.Join(errs...)
	whom := "the other node"
	var at wayError
	switch {
	case node != "":
		whom = c.o.NameOf(node)
	case len(errs) == 1 && errors.As(errs[0], &at):
		whom = at.way.Addr.String()
	}
	f := fault.New(fault.Internal, "connect to "+whom, nil, "")
	f.Why, f.Err = reasons(errs), err
	var untrusted untrustedError
	var other otherNodeError
	switch {
	case errors.Is(err, errRefused), errors.As(err, &untrusted):
		f.Reason, f.Fix = fault.NotPaired, "run `tbcluster pair` there and `tbcluster pair CODE` with its code here; where this node was put out (`pair --revoke`), `tbcluster pair --new-identity` here first"
	case errors.Is(err, errProtocol):
		f.Reason, f.Fix = fault.Protocol, "bring both nodes to the same version of tbcluster"
	case errors.Is(err, context.Canceled):
		f.Reason = fault.Interrupted
	case errors.Is(err, errSelf), errors.As(err, &other):
		f.Reason, f.Fix = fault.NodeDown, "its address has changed: wait until it announces itself again, or correct `peers` in the configuration"
	default:
		f.Reason, f.Fix = fault.NodeDown, "see that it is on, that its agent runs and that no packet filter is in between (`tbcluster doctor`)"
	}
	if node != "" {
		f = f.With("node", string(node))
	}
	return f
}

// maxNamed bounds how many ways with one and the same trouble are named.
const maxNamed = 2

// reasons says what is wrong with each way, once for those with the same trouble.
func reasons(errs []error) string {
	var order []string
	ways := map[string][]string{}
	for _, e := range errs {
		text, way := words(e), ""
		if w := (wayError{}); errors.As(e, &w) && error(w) == e {
			text, way = words(w.err), w.way.String()
		}
		if _, had := ways[text]; !had {
			order = append(order, text)
			ways[text] = nil
		}
		if way != "" {
			ways[text] = append(ways[text], way)
		}
	}
	var out []string
	for _, text := range order {
		named := ways[text]
		if more := len(named) - maxNamed; more > 0 {
			named = append(slices.Clone(named[:maxNamed]), fmt.Sprintf("%d more", more))
		}
		if len(named) > 0 {
			text = strings.Join(named, ", ") + ": " + text
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// unansweredError is the end of a dial while ways were left.
type unansweredError struct {
	ways int
	err  error
}

func (e unansweredError) Error() string {
	if errors.Is(e.err, context.Canceled) {
		return e.err.Error()
	}
	if e.ways == 1 {
		return "no answer in time by one way"
	}
	return fmt.Sprintf("no answer in time by %d ways", e.ways)
}

func (e unansweredError) Unwrap() error { return e.err }

// words names an error of the network as people know it.
func words(err error) string {
	var way wayError
	if errors.As(err, &way) && error(way) == err {
		return way.Error()
	}
	var left unansweredError
	if errors.As(err, &left) && error(left) == err {
		return left.Error()
	}
	for _, known := range []struct {
		err   error
		words string
	}{
		{syscall.ECONNREFUSED, "no agent listens there (connection refused)"},
		{syscall.EHOSTUNREACH, "no such machine there (no route to host)"},
		{syscall.ENETUNREACH, "no route there"},
		{syscall.EADDRNOTAVAIL, "this machine has no address there yet"},
		{syscall.ENODEV, "the interface is gone"},
		{context.DeadlineExceeded, "no answer"},
		{syscall.ETIMEDOUT, "no answer"},
	} {
		if errors.Is(err, known.err) {
			return known.words
		}
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return "no answer"
	}
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return "it closed the connection"
	}
	return err.Error()
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// plainDialer is the dialler of Options where none is given.
func plainDialer(ctx context.Context, network, addr, iface string, src netip.Addr) (net.Conn, error) {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	if iface != "" && a.Addr().Zone() != iface {
		return nil, fmt.Errorf("cannot bind to %s: no bound dialler is set", iface)
	}
	var d net.Dialer
	if src.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(src, 0))
	}
	return d.DialContext(ctx, network, addr)
}
