package transfer

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/api/fault"
)

// begun is a transfer that runs in the background.
type begun struct {
	t      *Transfer
	cancel context.CancelFunc
	done   chan struct{}
	r      Result
	err    error

	mu   sync.Mutex
	cond *sync.Cond
	last Progress
}

func (c *cluster) begin(o Options, deps Deps, args ...string) *begun {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	b := &begun{cancel: cancel, done: make(chan struct{})}
	b.cond = sync.NewCond(&b.mu)
	b.t = New(c.job(o, args...), deps, func(p Progress) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.last = p
		b.cond.Broadcast()
	})
	go func() {
		defer close(b.done)
		b.r, b.err = b.t.Run(ctx)
	}()
	return b
}

// until waits for progress that fits, or the end.
func (b *begun) until(t testing.TB, what string, fits func(Progress) bool) Progress {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for !fits(b.last) {
		if b.last.State.Ended() {
			t.Fatalf("it ended %s (%v) before %s", b.last.State, b.last.Fault, what)
		}
		b.cond.Wait()
	}
	return b.last
}

func (b *begun) wait(c *cluster) (Result, error) {
	<-b.done
	b.cancel()
	c.waitAll()
	return b.r, b.err
}

func copied(n uint64) func(Progress) bool { return func(p Progress) bool { return p.DoneBytes >= n } }

func TestAKilledWorkerLeavesNothingHalfAndTheNextRunGoesOn(t *testing.T) {
	for _, victim := range []string{"alpha", "beta"} {
		t.Run(victim, func(t *testing.T) {
			c := newCluster(t)
			data := random(t, 48<<20)
			write(t, c.home("alpha", "d/big"), data)
			for i := range 20 {
				write(t, c.home("alpha", fmt.Sprintf("d/s%02d", i)), random(t, 3000))
			}
			c.home("beta")
			b := c.begin(Options{LimitBytesPerSecond: 8 << 20}, c.deps(), "alpha:d", "beta:")
			b.until(t, "12 MB were there", copied(12<<20))
			c.kill(victim)
			r, err := b.wait(c)
			f := wantFault(t, err, fault.Connection)
			if f.Exit() != 10 || r.State != Failed || !strings.Contains(f.Error(), victim) {
				t.Errorf("%s: %v", r.State, err)
			}
			for _, n := range names(t, c.home("beta", "d")) {
				if n == "big" {
					t.Fatal("a half file has its final name")
				}
				if !strings.HasPrefix(n, ".") {
					want, err := os.ReadFile(c.home("alpha", "d/"+n))
					must(t, err)
					sameFile(t, c.home("beta", "d/"+n), want)
				}
			}
			r = c.mustCp(Options{}, "alpha:d", "beta:")
			if r.DoneBytes > uint64(len(data))-(8<<20) {
				t.Errorf("sent %d of %d again: it did not go on", r.DoneBytes, len(data))
			}
			compareTrees(t, c.home("alpha", "d"), c.home("beta", "d"))
		})
	}
}

// TestKilledAtAnyMoment kills either worker at moments of all kinds, over and
// over: no run may leave a half file under a final name, and the last must end
// with everything there.
func TestKilledAtAnyMoment(t *testing.T) {
	c := newCluster(t)
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	contents := map[string][]byte{}
	for i := range 12 {
		n := fmt.Sprintf("d/%02d", i)
		contents[n] = random(t, 1+rnd.IntN(3<<20))
		write(t, c.home("alpha", n), contents[n])
	}
	c.home("beta")
	for range 12 {
		b := c.begin(Options{LimitBytesPerSecond: 30 << 20}, c.deps(), "alpha:d", "beta:")
		select {
		case <-time.After(time.Duration(rnd.IntN(500)) * time.Millisecond):
			c.killAny([]string{"alpha", "beta"}[rnd.IntN(2)])
		case <-b.done:
		}
		_, err := b.wait(c)
		for _, n := range names(t, c.home("beta")) {
			if want, ok := contents[n]; ok {
				sameFile(t, c.home("beta", n), want)
			}
		}
		if err == nil {
			break
		}
	}
	c.mustCp(Options{}, "alpha:d", "beta:")
	compareTrees(t, c.home("alpha", "d"), c.home("beta", "d"))
}

// killAny kills the newest worker of a node if there is one.
func (c *cluster) killAny(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ws := c.workers[node]; len(ws) > 0 {
		_ = ws[len(ws)-1].Process.Kill()
	}
}

func TestCancellingKeepsWhatArrived(t *testing.T) {
	c := newCluster(t)
	data := random(t, 32<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 8 << 20}, c.deps(), "alpha:x", "beta:")
	b.until(t, "8 MB were there", copied(8<<20))
	b.cancel()
	r, err := b.wait(c)
	if f := wantFault(t, err, fault.Interrupted); f.Exit() != 130 || r.State != Cancelled || f.Fix == "" {
		t.Errorf("%s, %v", r.State, err)
	}
	if got := temporaries(t, c.home("beta")); len(got) != 2 || len(names(t, c.home("beta"))) != 2 {
		t.Errorf("left behind %q", names(t, c.home("beta")))
	}
	if r := c.mustCp(Options{}, "alpha:x", "beta:"); r.SkippedBytes < 8<<20 || r.SkippedBytes+r.DoneBytes != uint64(len(data)) {
		t.Errorf("counted %+v", r.Progress)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func TestWhenTheCoordinatorDiesTheWorkersEndAndTheNextRunGoesOn(t *testing.T) {
	c := newCluster(t)
	data := random(t, 32<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	deps := c.deps()
	var mu sync.Mutex
	var streams []io.Closer
	deps.OpenWorker = func(ctx context.Context, node string) (io.ReadWriteCloser, error) {
		s, err := c.open(ctx, node)
		mu.Lock()
		defer mu.Unlock()
		streams = append(streams, s)
		return s, err
	}
	b := c.begin(Options{LimitBytesPerSecond: 8 << 20}, deps, "alpha:x", "beta:")
	b.until(t, "8 MB were there", copied(8<<20))
	mu.Lock()
	for _, s := range streams {
		_ = s.Close()
	}
	mu.Unlock()
	_, err := b.wait(c) // waits for the workers to have ended, with status 0
	wantFault(t, err, fault.Connection)
	if r := c.mustCp(Options{}, "alpha:x", "beta:"); r.SkippedBytes < 8<<20 {
		t.Errorf("it began anew: %+v", r.Progress)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func TestWhatWasDamagedOnDiskIsNotResumed(t *testing.T) {
	c := newCluster(t)
	data := random(t, 24<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 6 << 20}, c.deps(), "alpha:x", "beta:")
	b.until(t, "8 MB were there", copied(8<<20))
	b.cancel()
	_, err := b.wait(c)
	wantFault(t, err, fault.Interrupted)
	// As a power cut leaves it: recorded, but with zeros on the disk.
	for _, n := range temporaries(t, c.home("beta")) {
		if !strings.HasSuffix(n, ".journal") {
			f, err := os.OpenFile(c.home("beta", n), os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt(make([]byte, 24<<20), 0)
			must(t, err)
			must(t, f.Close())
		}
	}
	if r := c.mustCp(Options{}, "alpha:x", "beta:"); r.DoneBytes != uint64(len(data)) {
		t.Errorf("took over %d bytes of zeros", r.SkippedBytes)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func TestANewVersionOfTheSourceIsNotMixedWithTheOld(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "x"), random(t, 24<<20))
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 6 << 20}, c.deps(), "alpha:x", "beta:")
	b.until(t, "8 MB were there", copied(8<<20))
	b.cancel()
	_, err := b.wait(c)
	wantFault(t, err, fault.Interrupted)
	fi, err := os.Stat(c.home("alpha", "x"))
	must(t, err)
	data := random(t, 24<<20)
	write(t, c.home("alpha", "x"), data)
	must(t, os.Chtimes(c.home("alpha", "x"), fi.ModTime(), fi.ModTime())) // as alike as can be
	if r := c.mustCp(Options{}, "alpha:x", "beta:"); r.SkippedBytes != 0 {
		t.Errorf("took over %d bytes", r.SkippedBytes)
	}
	sameFile(t, c.home("beta", "x"), data)
	if got := names(t, c.home("beta")); !slices.Equal(got, []string{"x"}) {
		t.Errorf("left behind %q", got)
	}
}

func TestTwoAtOnceDoNotDisturbEachOther(t *testing.T) {
	c := newCluster(t)
	data := random(t, 24<<20)
	write(t, c.home("alpha", "d/x"), data)
	write(t, c.home("alpha", "d/s"), []byte("small"))
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 12 << 20}, c.deps(), "alpha:d", "beta:")
	b.until(t, "4 MB were there", copied(4<<20))
	b.t.Pause() // or it might be done before the workers of the other have started
	_, err := Run(context.Background(), c.job(Options{}, "alpha:d", "beta:"), c.deps(), nil)
	wantFault(t, err, fault.StillRunning)
	b.t.Resume()
	if _, err := b.wait(c); err != nil {
		t.Fatal(err)
	}
	compareTrees(t, c.home("alpha", "d"), c.home("beta", "d"))
}

func TestPauseHoldsAndResumeGoesOn(t *testing.T) {
	c := newCluster(t)
	data := random(t, 40<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 12 << 20}, c.deps(), "alpha:x", "beta:")
	b.until(t, "4 MB were there", copied(4<<20))
	b.t.Pause()
	// What was under way arrives; then two looks, half a second apart, agree.
	still := 0
	var last uint64
	p := b.until(t, "it stood still", func(p Progress) bool {
		if p.DoneBytes != last || p.State != Paused {
			still = 0
		}
		last = p.DoneBytes
		still++
		return still > 3
	})
	if p.DoneBytes >= uint64(len(data)) || p.ETA >= 0 {
		t.Errorf("paused at %+v", p)
	}
	b.t.Resume()
	r, err := b.wait(c)
	if err != nil || r.State != Done {
		t.Fatalf("%s, %v", r.State, err)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func TestPausedBeforeItBegins(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "x"), random(t, 8<<20))
	c.home("beta")
	b := &begun{done: make(chan struct{}), cancel: func() {}}
	b.cond = sync.NewCond(&b.mu)
	b.t = New(c.job(Options{}, "alpha:x", "beta:"), c.deps(), func(p Progress) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.last = p
		b.cond.Broadcast()
	})
	b.t.Pause()
	go func() {
		defer close(b.done)
		b.r, b.err = b.t.Run(context.Background())
	}()
	n := 0
	b.until(t, "a second of standing still", func(p Progress) bool {
		if p.TotalBytes > 0 {
			n++
		}
		return n > 4
	})
	if p := b.t.Progress(); p.DoneBytes != 0 || p.State != Paused {
		t.Errorf("%+v", p)
	}
	b.t.Resume()
	if _, err := b.wait(c); err != nil {
		t.Fatal(err)
	}
}

func TestLeftoversOfKilledRunsAreCleaned(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "d/s"), []byte("small"))
	// As a killed worker leaves them: a small file's, and a large file's of
	// another version. A stranger's of a like name stays.
	small := "d/" + tempName("s", []byte("another session"))
	large := "d/" + tempName("s", []byte("another version"))
	other := "d/" + tempName("other", []byte("x"))
	for _, n := range []string{small, large, large + ".journal", other} {
		write(t, c.home("beta", n), []byte("half"))
	}
	c.mustCp(Options{}, "alpha:d", "beta:")
	got := names(t, c.home("beta", "d"))
	slices.Sort(got)
	if want := []string{filepath.Base(other), "s"}; !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
}
