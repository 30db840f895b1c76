package link

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// A bench goes over TCP connections of its own, without TLS: it measures the
// cable and not the processor, and carries nothing. A connection begins with the
// token that the far end gave over the control channel, and one byte that says
// what it is for.
const (
	// BenchToken is the length of a token in bytes.
	BenchToken = 32
	// BenchMost is how long one direction may be loaded.
	BenchMost = 10 * time.Second
	// BenchLeast is how short a load still tells something.
	BenchLeast = 200 * time.Millisecond

	// benchStreams is how many connections load a direction: as many as cp has
	// over a path.
	benchStreams = 4
	// benchConns is how many connections are served at once: those of a direction,
	// those before that have not quite ended, and as many of strangers.
	benchConns = 4 * benchStreams
	benchTrips = 50
	benchGreet = 2 * time.Second // for the token to come
	// benchSlack is what connecting and draining may take beside the load.
	benchSlack = 5 * time.Second
	// benchBlock is how much is written at once.
	benchBlock = 256 << 10

	benchEcho = 'e' // what comes goes back
	benchSink = 's' // what comes is counted, and the count goes back
	benchPour = 'r' // the far end sends
)

// NewBenchToken draws a token.
func NewBenchToken() []byte {
	b := make([]byte, BenchToken)
	_, _ = rand.Read(b) // documented never to fail
	return b
}

// ServeBench is the far end of one bench: it accepts the connections that bear
// the token until ctx ends or l fails, and serves each for a bounded time. It
// closes l and all connections before it returns.
func ServeBench(ctx context.Context, l net.Listener, token []byte, load time.Duration) error {
	if err := benchLoad(load); err != nil {
		return errors.Join(err, l.Close())
	}
	ctx, cancel := context.WithTimeout(ctx, 2*load+benchTripsMost+2*benchSlack)
	defer cancel()
	var serving sync.WaitGroup
	defer serving.Wait()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })() // that ends Accept
	slots := make(chan struct{}, benchConns)
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return errors.Join(err, l.Close())
		}
		select {
		case slots <- struct{}{}:
		default: // more than a bench needs
			_ = c.Close()
			continue
		}
		serving.Go(func() {
			defer func() { <-slots }()
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			defer stop()
			defer c.Close()
			// How a connection fails is seen, and said, at the near end.
			_ = serveBenchConn(c, token, load)
		})
	}
}

// benchTripsMost bounds the round trips.
const benchTripsMost = 5 * time.Second

func benchLoad(load time.Duration) error {
	if load < BenchLeast || load > BenchMost {
		return fmt.Errorf("a load of %v is not between %v and %v", load, BenchLeast, BenchMost)
	}
	return nil
}

func serveBenchConn(c net.Conn, token []byte, load time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(benchGreet)); err != nil {
		return err
	}
	var head [BenchToken + 1]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return err
	}
	if subtle.ConstantTimeCompare(head[:BenchToken], token) != 1 {
		return errors.New("not the token of this bench")
	}
	switch head[BenchToken] {
	case benchEcho:
		if err := c.SetDeadline(time.Now().Add(benchTripsMost)); err != nil {
			return err
		}
		var b [1]byte
		for range benchTrips {
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return err
			}
			if _, err := c.Write(b[:]); err != nil {
				return err
			}
		}
		return nil
	case benchSink:
		got, err := drain(c, load)
		if err != nil {
			return err
		}
		var out [16]byte
		binary.BigEndian.PutUint64(out[:8], got.bytes)
		binary.BigEndian.PutUint64(out[8:], uint64(got.over))
		_, err = c.Write(out[:])
		return err
	case benchPour:
		return pour(c, load)
	}
	return fmt.Errorf("a connection for %q", head[BenchToken])
}

// count is what arrived over a connection and in what time.
type count struct {
	bytes uint64
	over  time.Duration
}

// rate is the bytes a second of connections that ran beside each other.
func rate(all []count) uint64 {
	var sum uint64
	var over time.Duration
	for _, c := range all {
		sum += c.bytes
		over = max(over, c.over)
	}
	if over <= 0 {
		return 0
	}
	return uint64(float64(sum) / over.Seconds())
}

// drain reads to the end. What comes in the first tenth does not count: the
// connection is still finding out how fast it may be. Where all came at once,
// since a busy machine read it late, it counts over the whole load.
func drain(c net.Conn, load time.Duration) (count, error) {
	if err := c.SetDeadline(time.Now().Add(load + benchSlack)); err != nil {
		return count{}, err
	}
	buf := make([]byte, benchBlock)
	var got count
	var all uint64
	var first, from, last time.Time
	for {
		n, err := c.Read(buf)
		now := time.Now()
		all += uint64(n)
		switch {
		case n == 0:
		case first.IsZero():
			first = now
		case from.IsZero():
			if now.Sub(first) >= load/10 {
				from = now
			}
		default:
			got.bytes += uint64(n)
			last = now
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return count{}, err
		}
	}
	if last.IsZero() {
		return count{all, load}, nil
	}
	got.over = last.Sub(from)
	return got, nil
}

// pour sends for as long as the load lasts, and then the end.
func pour(c net.Conn, load time.Duration) error {
	begin := time.Now()
	if err := c.SetDeadline(begin.Add(load + benchSlack)); err != nil {
		return err
	}
	buf := make([]byte, benchBlock)
	_, _ = rand.Read(buf) // documented never to fail
	for time.Since(begin) < load {
		if _, err := c.Write(buf); err != nil {
			return err
		}
	}
	w, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return w.CloseWrite()
}

// Rates are what a bench found, seen from the near end.
type Rates struct {
	Out, In uint64 // bytes a second
	RTT     time.Duration
}

// Bench measures a link: the round trips of a byte first, then each direction
// for load. dial connects to what ServeBench listens at, over the link. It fails
// for a load that is out of bounds, and where a connection does.
func Bench(ctx context.Context, dial func(context.Context) (net.Conn, error), token []byte, load time.Duration) (Rates, error) {
	if err := benchLoad(load); err != nil {
		return Rates{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*load+benchTripsMost+2*benchSlack)
	defer cancel()
	b := bench{ctx: ctx, dial: dial, token: token, load: load}
	var r Rates
	var err error
	if r.RTT, err = b.trips(); err != nil {
		return Rates{}, fmt.Errorf("measure the round trip: %w", err)
	}
	if r.Out, err = b.direction(benchSink); err != nil {
		return Rates{}, fmt.Errorf("measure sending: %w", err)
	}
	if r.In, err = b.direction(benchPour); err != nil {
		return Rates{}, fmt.Errorf("measure receiving: %w", err)
	}
	return r, nil
}

type bench struct {
	ctx   context.Context
	dial  func(context.Context) (net.Conn, error)
	token []byte
	load  time.Duration
}

// with runs f on a new connection for a purpose; the end of the context ends it.
func (b *bench) with(purpose byte, f func(net.Conn) error) error {
	c, err := b.dial(b.ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(b.ctx, func() { _ = c.Close() })()
	err = c.SetDeadline(time.Now().Add(benchGreet))
	if err == nil {
		_, err = c.Write(append(slices.Clone(b.token), purpose))
	}
	if err == nil {
		err = f(c)
	}
	if err != nil && b.ctx.Err() != nil {
		return context.Cause(b.ctx)
	}
	return err
}

func (b *bench) trips() (time.Duration, error) {
	var took []time.Duration
	err := b.with(benchEcho, func(c net.Conn) error {
		if err := c.SetDeadline(time.Now().Add(benchTripsMost)); err != nil {
			return err
		}
		var one [1]byte
		for range benchTrips {
			begin := time.Now()
			if _, err := c.Write(one[:]); err != nil {
				return err
			}
			if _, err := io.ReadFull(c, one[:]); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// once joins errors, those that say the same but once.
func once(errs []error) error {
	var out []error
	said := map[string]bool{}
	for _, err := range errs {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("the other end closed the connection before it said what had come (%w)", err)
		}
		if err != nil && !said[err.Error()] {
			said[err.Error()] = true
			out = append(out, err)
		}
	}
	return errors.Join(out...)
}

// direction loads one direction over several connections.
func (b *bench) direction(purpose byte) (uint64, error) {
	counts, errs := make([]count, benchStreams), make([]error, benchStreams)
	var wg sync.WaitGroup
	for i := range counts {
		wg.Go(func() {
			errs[i] = b.with(purpose, func(c net.Conn) (err error) {
				if purpose == benchPour {
					counts[i], err = drain(c, b.load)
					return err
				}
				if err := pour(c, b.load); err != nil {
					return err
				}
				var in [16]byte
				if _, err := io.ReadFull(c, in[:]); err != nil {
					return err
				}
				counts[i] = count{binary.BigEndian.Uint64(in[:8]), time.Duration(min(binary.BigEndian.Uint64(in[8:]), uint64(2*BenchMost)))}
				return nil
			})
		})
	}
	wg.Wait()
	if err := once(errs); err != nil {
		return 0, err
	}
	r := rate(counts)
	if r == 0 {
		return 0, errors.New("too little came through to measure")
	}
	return r, nil
}
