package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// farEnd serves one bench on a loopback address.
func farEnd(t *testing.T, token []byte, load time.Duration) (addr string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- ServeBench(ctx, l, token, load) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-served; err != nil {
				t.Errorf("the far end: %v", err)
			}
			if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
				_ = c.Close()
				t.Error("the far end still listens")
			}
		})
	}
	t.Cleanup(stop)
	return l.Addr().String(), stop
}

func dialing(addr string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	}
}

func TestABenchMeasuresEachDirectionAndTheRoundTrip(t *testing.T) {
	token := NewBenchToken()
	addr, _ := farEnd(t, token, BenchLeast)
	r, err := Bench(t.Context(), dialing(addr), token, BenchLeast)
	if err != nil {
		t.Fatal(err)
	}
	if r.Out == 0 || r.In == 0 || r.RTT <= 0 || r.RTT > benchTripsMost {
		t.Errorf("measured %+v", r)
	}
}

// slow limits what is read from a connection.
type slow struct {
	*net.TCPConn
	perSecond int
}

func (s slow) Read(b []byte) (int, error) {
	n, err := s.TCPConn.Read(b[:min(len(b), s.perSecond/50)])
	time.Sleep(time.Duration(n) * time.Second / time.Duration(s.perSecond))
	return n, err
}

func TestABenchFindsTheRateThatThereIs(t *testing.T) {
	const load, each = time.Second, 2 << 20
	token := NewBenchToken()
	addr, _ := farEnd(t, token, load)
	dial := func(ctx context.Context) (net.Conn, error) {
		c, err := dialing(addr)(ctx)
		if err != nil {
			return nil, err
		}
		// Small buffers, so that what was sent is soon read.
		err = c.(*net.TCPConn).SetReadBuffer(64 << 10)
		return slow{c.(*net.TCPConn), each}, err
	}
	r, err := Bench(t.Context(), dial, token, load)
	if err != nil {
		t.Fatal(err)
	}
	// A busy machine reads more slowly than it is allowed to, never faster.
	if most := uint64(benchStreams * each * 5 / 4); r.In > most || r.In == 0 || r.Out < most {
		t.Errorf("in at %d bytes a second of %d, out at %d", r.In, benchStreams*each, r.Out)
	}
}

// A machine that reads late, because it has much to do, finds everything there
// at once.
func TestWhatIsReadLateIsMeasured(t *testing.T) {
	near, far := tcpPair(t)
	if _, err := near.Write(make([]byte, 64<<10)); err != nil { // buffers hold it
		t.Fatal(err)
	}
	_ = near.Close()
	got, err := drain(far, BenchMost) // a tenth of that is longer than reading takes
	if err != nil || got.bytes != 64<<10 || got.over != BenchMost {
		t.Errorf("%+v, %v", got, err)
	}
	near, far = tcpPair(t)
	_ = near.Close()
	if got, err := drain(far, BenchLeast); err != nil || rate([]count{got}) != 0 {
		t.Errorf("of nothing: %+v, %v", got, err)
	}
}

func TestABenchSaysOnceWhatIsWrongWithAllConnections(t *testing.T) {
	err := once([]error{io.EOF, nil, io.EOF, os.ErrDeadlineExceeded, io.EOF})
	if !errors.Is(err, io.EOF) || !errors.Is(err, os.ErrDeadlineExceeded) || strings.Count(err.Error(), "\n") != 1 || strings.Count(err.Error(), "the other end closed") != 1 {
		t.Errorf("%v", err)
	}
	if err := once(make([]error, 4)); err != nil {
		t.Errorf("%v", err)
	}
}

func tcpPair(t *testing.T) (near, far net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if near, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	return near, far
}

func TestWhoHasNotTheTokenOfABenchGetsNothing(t *testing.T) {
	token := NewBenchToken()
	addr, _ := farEnd(t, token, BenchLeast)
	for what, greeting := range map[string][]byte{
		"another token":     append(NewBenchToken(), benchPour),
		"no such purpose":   append(bytes.Clone(token), 'x'),
		"half a token":      token[:BenchToken/2],
		"nothing":           nil,
		"an empty sentence": make([]byte, BenchToken+1),
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(greeting); err != nil {
			t.Fatal(err)
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, _ := io.ReadAll(c); len(got) != 0 {
			t.Errorf("%s: got %d bytes", what, len(got))
		}
		_ = c.Close()
	}
	// It still serves whom it is for.
	if _, err := Bench(t.Context(), dialing(addr), token, BenchLeast); err != nil {
		t.Error(err)
	}
}

func TestConnectionsThatSayNothingKeepNobodyFromABench(t *testing.T) {
	// A far end lives for a few seconds only, in which a busy machine may not come
	// to it: then it is tried again with another.
	deadline := time.Now().Add(time.Minute)
	for {
		token := NewBenchToken()
		addr, stop := farEnd(t, token, BenchLeast)
		err := func() error {
			var idle []net.Conn
			defer func() {
				for _, c := range idle {
					_ = c.Close()
				}
			}()
			for range 3 * benchConns {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					return err
				}
				idle = append(idle, c)
			}
			for _, c := range idle { // the far end hangs up on every one of them
				if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
					t.Errorf("somebody without a token got an answer: %d, %v", n, err)
				}
			}
			_, err := Bench(t.Context(), dialing(addr), token, BenchLeast)
			return err
		}()
		stop()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestABenchEndsWithItsContextAndItsFarEnd(t *testing.T) {
	token := NewBenchToken()
	addr, stop := farEnd(t, token, BenchMost)
	ctx, cancel := context.WithCancel(t.Context())
	dialled := make(chan struct{}, 100)
	dial := func(ctx context.Context) (net.Conn, error) {
		dialled <- struct{}{}
		return dialing(addr)(ctx)
	}
	ended := make(chan error, 1)
	run := func(ctx context.Context) {
		_, err := Bench(ctx, dial, token, BenchMost)
		ended <- err
	}
	go run(ctx)
	for range 1 + benchStreams { // it is loading
		<-dialled
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	go run(t.Context())
	for range 1 + benchStreams {
		<-dialled
	}
	stop()
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "measure") {
		t.Errorf("without its far end: %v", err)
	}
}

func TestABenchIsBounded(t *testing.T) {
	for _, load := range []time.Duration{0, -time.Second, BenchLeast - 1, BenchMost + 1} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if err := ServeBench(t.Context(), l, NewBenchToken(), load); err == nil {
			t.Errorf("served a load of %v", load)
		}
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("still listening: %v", err)
		}
		if _, err := Bench(t.Context(), dialing("127.0.0.1:1"), NewBenchToken(), load); err == nil {
			t.Errorf("measured for %v", load)
		}
	}
}

func FuzzBenchConnection(f *testing.F) {
	token := bytes.Repeat([]byte{7}, BenchToken)
	f.Add(append(bytes.Clone(token), benchEcho, 1, 2, 3))
	f.Add(append(bytes.Clone(token), benchSink, 1, 2, 3))
	f.Add(append(bytes.Clone(token), 'x'))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > BenchToken && data[BenchToken] == benchPour {
			return // it sends, whatever comes
		}
		near, far := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer far.Close()
			_ = serveBenchConn(far, token, BenchLeast) // whatever it makes of it
		}()
		go func() { _, _ = io.Copy(io.Discard, near) }()
		_, _ = near.Write(data) // it may have hung up already
		_ = near.Close()
		<-done
	})
}
