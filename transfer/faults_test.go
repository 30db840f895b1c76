package transfer

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/transfer/manifest"
)

func TestADamagedChunkIsSentAgain(t *testing.T) {
	c := newCluster(t)
	c.env = []string{"TRANSFER_TEST_FLIP=3"}
	data := random(t, 24<<20)
	write(t, c.home("alpha", "d/x"), data)
	write(t, c.home("alpha", "d/s"), []byte("small"))
	c.home("beta")
	r := c.mustCp(Options{}, "alpha:d", "beta:")
	compareTrees(t, c.home("alpha", "d"), c.home("beta", "d"))
	if r.DoneBytes != r.TotalBytes {
		t.Errorf("%d of %d", r.DoneBytes, r.TotalBytes)
	}
}

func TestWhatIsAlwaysDamagedIsGivenUp(t *testing.T) {
	c := newCluster(t)
	c.env = []string{"TRANSFER_TEST_FLIP=1000000"}
	write(t, c.home("alpha", "d/x"), random(t, 9<<20))
	write(t, c.home("alpha", "d/s"), []byte("small"))
	c.home("beta")
	r, err := c.cp(Options{}, "alpha:d", "beta:")
	f := wantFault(t, err, fault.Corrupt)
	if f.Exit() != 12 || len(r.Problems) != 2 {
		t.Errorf("exit %d, problems %v", f.Exit(), r.Problems)
	}
	if got := names(t, c.home("beta", "d")); len(got) != 0 {
		t.Errorf("left behind %q", got)
	}
}

func TestASourceThatChangesIsReportedAndNotCopied(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, file string){
		"grows": func(t *testing.T, file string) {
			f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteString("more")
			must(t, err)
			must(t, f.Close())
		},
		"shrinks":     func(t *testing.T, file string) { must(t, os.Truncate(file, 1<<20)) },
		"is removed":  func(t *testing.T, file string) { must(t, os.Remove(file)) },
		"is replaced": func(t *testing.T, file string) { must(t, os.Rename(file+"2", file)) },
		"is rewritten": func(t *testing.T, file string) {
			f, err := os.OpenFile(file, os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt([]byte("new"), 0)
			must(t, err)
			must(t, f.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			file := c.home("alpha", "d/x")
			data := random(t, 40<<20)
			write(t, file, data)
			write(t, c.home("alpha", "d/y"), []byte("y"))
			if name == "is replaced" {
				write(t, file+"2", data)
				fi, err := os.Stat(file)
				must(t, err)
				must(t, os.Chtimes(file+"2", fi.ModTime(), fi.ModTime()))
			}
			c.home("beta")
			b := c.begin(Options{LimitBytesPerSecond: 12 << 20, Filters: []string{"-x2"}}, c.deps(), "alpha:d/", "beta:in")
			b.until(t, "4 MB were there", copied(4<<20))
			change(t, file)
			_, err := b.wait(c)
			if f := wantFault(t, err, fault.Vanished); f.Exit() != 24 || !strings.Contains(f.Error(), "d/x") {
				t.Errorf("exit %d: %v", f.Exit(), f)
			}
			if got := names(t, c.home("beta")); len(got) != 2 || got[1] != "in/y" {
				t.Errorf("there are %q", got)
			}
		})
	}
}

func TestAListedFileThatVanishesBeforeItIsRead(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "d/a"), random(t, 8<<20))
	for i := range 30 {
		write(t, c.home("alpha", fmt.Sprintf("d/b%02d", i)), random(t, 500<<10))
	}
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 4 << 20}, c.deps(), "alpha:d", "beta:")
	b.until(t, "something was there", copied(1))
	must(t, os.Remove(c.home("alpha", "d/b29")))
	r, err := b.wait(c)
	wantFault(t, err, fault.Vanished)
	if r.DoneFiles != 30 {
		t.Errorf("%d other files of 30", r.DoneFiles)
	}
	if got := temporaries(t, c.home("beta")); len(got) != 0 {
		t.Errorf("left behind %q", got)
	}
}

func TestASymlinkPlantedMidwayLeadsNowhere(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "d/sub/x"), random(t, 20<<20))
	write(t, c.home("alpha", "d/sub/y"), random(t, 2<<20))
	outside := c.home("outside")
	inside := filepath.Join(c.home("beta", "d/other"))
	must(t, os.MkdirAll(inside, 0o755))
	for name, target := range map[string]string{"outside": outside, "inside the destination": inside} {
		b := c.begin(Options{LimitBytesPerSecond: 8 << 20}, c.deps(), "alpha:d", "beta:")
		b.until(t, "4 MB were there", copied(4<<20))
		must(t, os.Rename(c.home("beta", "d/sub"), c.home("beta", "moved")))
		must(t, os.Symlink(target, c.home("beta", "d/sub")))
		_, err := b.wait(c)
		if err == nil {
			t.Errorf("%s: a copy that is not where it was to be counts as done", name)
		}
		if got := names(t, target); len(got) != 0 {
			t.Errorf("%s: written through the symlink: %q", name, got)
		}
		// One that is there from the start is refused too.
		_, err = c.cp(Options{}, "alpha:d", "beta:")
		wantFault(t, err, fault.FileEscapes)
		if got := names(t, target); len(got) != 0 {
			t.Errorf("%s: written through a symlink that was there: %q", name, got)
		}
		must(t, os.Remove(c.home("beta", "d/sub")))
		must(t, os.RemoveAll(c.home("beta", "moved")))
	}
	// A symlink in the place of a file is replaced, not written through.
	write(t, filepath.Join(outside, "precious"), []byte("precious"))
	must(t, os.MkdirAll(c.home("beta", "d/sub"), 0o755))
	must(t, os.Symlink(filepath.Join(outside, "precious"), c.home("beta", "d/sub/x")))
	c.mustCp(Options{}, "alpha:d", "beta:")
	sameFile(t, filepath.Join(outside, "precious"), []byte("precious"))
}

// TestAForgedManifestIsRefused plays the coordinator of a source that lies.
func TestAForgedManifestIsRefused(t *testing.T) {
	c := newCluster(t)
	file := func(p string) manifest.Entry {
		return manifest.Entry{Path: []byte(p), Kind: manifest.File, Size: 1, Identity: make([]byte, 32)}
	}
	root := manifest.Root{Name: []byte("d"), Dir: true}
	for name, x := range map[string]struct {
		e manifest.Entry
		r manifest.Root
	}{
		"dots":         {file("../x"), root},
		"dots within":  {file("a/../../x"), root},
		"absolute":     {file("/x"), root},
		"NUL":          {file("a\x00b"), root},
		"root name":    {file("x"), manifest.Root{Name: []byte(".."), Dir: true}},
		"root path":    {file("x"), manifest.Root{Name: []byte("a/b"), Dir: true}},
		"symlink":      {manifest.Entry{Path: []byte("l"), Kind: manifest.Symlink, Target: []byte("../../x")}, root},
		"setuid":       {manifest.Entry{Path: []byte("l"), Kind: manifest.Dir, Mode: 0o4755}, root},
		"forward link": {manifest.Entry{Path: []byte("l"), Kind: manifest.Hardlink, Link: 5}, root},
		"negative":     {manifest.Entry{Path: []byte("l"), Kind: manifest.File, Size: -1, Identity: make([]byte, 32)}, root},
		"second":       {manifest.Entry{Index: 1, Path: []byte("l"), Kind: manifest.Dir}, root},
	} {
		home := c.home("beta")
		stream, err := c.open(context.Background(), "beta")
		must(t, err)
		ctl := newControl(frame.New(stream))
		ctl.note = func(kind, json.RawMessage) error { return nil }
		served := make(chan error, 1)
		go func() { served <- ctl.serve(context.Background()) }()
		ctx := context.Background()
		must(t, ctl.ask(ctx, kHello, helloIn{Version: protocolVersion, Session: 1, NodeName: "beta"}, nil))
		must(t, ctl.tell(kEntries, entriesNote{[]manifest.Entry{x.e}}))
		err = ctl.ask(ctx, kPrepare, prepareIn{Place: place{Path: []byte("in/")}, Roots: []manifest.Root{x.r}, Here: []bool{false}}, nil)
		if !fault.Is(err, fault.Protocol) {
			t.Errorf("%s: %v, want a protocol fault", name, err)
		}
		must(t, stream.Close())
		<-served
		c.waitAll()
		if got := names(t, home); len(got) != 0 {
			t.Errorf("%s: made %q", name, got)
		}
	}
}

func TestAnotherVersionIsRefused(t *testing.T) {
	c := newCluster(t)
	stream, err := c.open(context.Background(), "beta")
	must(t, err)
	ctl := newControl(frame.New(stream))
	served := make(chan error, 1)
	go func() { served <- ctl.serve(context.Background()) }()
	if err := ctl.ask(context.Background(), kScan, scanIn{}, nil); !fault.Is(err, fault.Protocol) {
		t.Errorf("without a greeting: %v", err)
	}
	if err := ctl.ask(context.Background(), kHello, helloIn{Version: 99}, nil); !fault.Is(err, fault.Unsupported) {
		t.Errorf("version 99: %v", err)
	}
	must(t, stream.Close())
	<-served
}

// relay passes connections on until it is cut; it stands for a cable.
type relay struct {
	l net.Listener

	mu    sync.Mutex
	conns map[net.Conn]bool
	cut   bool
	bytes int64
}

func newRelay(t *testing.T) *relay {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	r := &relay{l: l, conns: map[net.Conn]bool{}}
	t.Cleanup(func() { _ = l.Close(); r.set(true) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go r.pass(c)
		}
	}()
	return r
}

// set cuts the cable, which resets what runs over it, or mends it.
func (r *relay) set(cut bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = cut
	if cut {
		for c := range r.conns {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
		clear(r.conns)
	}
}

func (r *relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cut {
		_ = c.Close()
		return false
	}
	r.conns[c] = true
	return true
}

func (r *relay) pass(c net.Conn) {
	if !r.keep(c) {
		return
	}
	br := bufio.NewReader(c)
	to, err := br.ReadString('\n')
	if err != nil {
		return
	}
	d, err := net.Dial("tcp", strings.TrimSpace(to))
	if err != nil {
		_ = c.Close()
		return
	}
	if !r.keep(d) {
		return
	}
	go func() { _, _ = io.Copy(c, d); _ = c.Close() }()
	n, _ := io.Copy(d, br)
	_ = d.Close()
	r.mu.Lock()
	r.bytes += n
	r.mu.Unlock()
}

func (r *relay) env(local string) string {
	return "TRANSFER_TEST_RELAY_" + local + "=" + r.l.Addr().String()
}

func TestWhenACableIsCutTheOtherCarriesItsChunks(t *testing.T) {
	c := newCluster(t)
	one, two := newRelay(t), newRelay(t)
	c.env = []string{one.env("127.0.0.2"), two.env("127.0.1.2")}
	c.paths = func(string, string) []Path {
		return []Path{tcpPath("one", "127.0.0.2", "127.0.0.3"), tcpPath("two", "127.0.1.2", "127.0.1.3")}
	}
	data := random(t, 80<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	changed := make(chan struct{}, 1)
	deps := c.deps()
	deps.PathsChanged = changed
	b := c.begin(Options{LimitBytesPerSecond: 20 << 20}, deps, "alpha:x", "beta:")
	b.until(t, "both carried something", func(p Progress) bool {
		return len(p.Links) == 2 && p.Links[0].Bytes > 0 && p.Links[1].Bytes > 0 && p.DoneBytes > 4<<20
	})
	one.set(true)
	down := b.until(t, "the cut one was left", func(p Progress) bool { return linkOf(p, "one").Up == false })
	b.until(t, "the other went on", func(p Progress) bool { return p.DoneBytes > down.DoneBytes+4<<20 && p.State == Copying })
	one.set(false)
	changed <- struct{}{}
	before := linkOf(b.t.Progress(), "one").Bytes
	b.until(t, "the mended one carried again", func(p Progress) bool { return linkOf(p, "one").Up && linkOf(p, "one").Bytes > before })
	if _, err := b.wait(c); err != nil {
		t.Fatal(err)
	}
	sameFile(t, c.home("beta", "x"), data)
}

// Cables that are there and carry nothing do not keep a copy from the LAN, and
// it goes back to them once they carry.
func TestTheLANIsKeptUntilACableCarries(t *testing.T) {
	c := newCluster(t)
	cable := newRelay(t)
	c.env = []string{cable.env("127.0.0.2")}
	lan := tcpPath("", "127.0.0.5", "127.0.0.6")
	lan.Kind = LAN
	c.paths = func(string, string) []Path { return []Path{tcpPath("one", "127.0.0.2", "127.0.0.3"), lan} }
	data := random(t, 64<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	cable.set(true)
	changed := make(chan struct{}, 1)
	deps := c.deps()
	deps.PathsChanged = changed
	b := c.begin(Options{LimitBytesPerSecond: 16 << 20}, deps, "alpha:x", "beta:")
	first := b.until(t, "the LAN carried", func(p Progress) bool { return linkOf(p, "").Bytes > 0 })
	b.until(t, "more went over it", func(p Progress) bool {
		if p.State != Copying || !linkOf(p, "").Up {
			t.Fatalf("left while no cable carries: %+v", p)
		}
		return p.DoneBytes > first.DoneBytes+16<<20
	})
	cable.set(false)
	changed <- struct{}{}
	b.until(t, "the cable carried alone", func(p Progress) bool { return linkOf(p, "one").Bytes > 0 && !linkOf(p, "").Up })
	if _, err := b.wait(c); err != nil {
		t.Fatal(err)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func linkOf(p Progress, id string) LinkProgress {
	for _, l := range p.Links {
		if l.LinkID == id {
			return l
		}
	}
	return LinkProgress{}
}

func TestWithoutAnyLinkItWaitsAndThenFailsResumable(t *testing.T) {
	c := newCluster(t)
	var mu sync.Mutex
	gone := false
	cable := newRelay(t)
	c.env = []string{cable.env("127.0.0.2")}
	c.paths = func(string, string) []Path {
		mu.Lock()
		defer mu.Unlock()
		if gone {
			return nil
		}
		return []Path{tcpPath("one", "127.0.0.2", "127.0.0.3")}
	}
	data := random(t, 32<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	changed := make(chan struct{}, 1)
	deps := c.deps()
	deps.PathsChanged, deps.LinkWait = changed, 4*time.Second
	b := c.begin(Options{LimitBytesPerSecond: 16 << 20}, deps, "alpha:x", "beta:")
	b.until(t, "4 MB were there", copied(4<<20))
	mu.Lock()
	gone = true
	mu.Unlock()
	cable.set(true)
	changed <- struct{}{}
	b.until(t, "it said what it waits for", func(p Progress) bool { return p.Phase == "waiting for a link to beta" })
	_, err := b.wait(c)
	if f := wantFault(t, err, fault.Connection); f.Exit() != 10 || !strings.Contains(f.Error(), "beta") {
		t.Errorf("%v", err)
	}
	mu.Lock()
	gone = false
	mu.Unlock()
	cable.set(false)
	if r := c.mustCp(Options{}, "alpha:x", "beta:"); r.SkippedBytes < 4<<20 {
		t.Errorf("it began anew: %+v", r.Progress)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func TestACableThatComesBackWhileWaitingIsUsed(t *testing.T) {
	c := newCluster(t)
	cable := newRelay(t)
	c.env = []string{cable.env("127.0.0.2")}
	data := random(t, 24<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 16 << 20}, c.deps(), "alpha:x", "beta:")
	b.until(t, "4 MB were there", copied(4<<20))
	cable.set(true)
	b.until(t, "it was missed", func(p Progress) bool { return p.State == Connecting })
	cable.set(false)
	if _, err := b.wait(c); err != nil {
		t.Fatal(err)
	}
	sameFile(t, c.home("beta", "x"), data)
}

func TestAWorkerThatDoesNotStart(t *testing.T) {
	c := newCluster(t)
	deps := c.deps()
	deps.OpenWorker = func(ctx context.Context, node string) (io.ReadWriteCloser, error) {
		if node == "beta" {
			return nil, fault.Newf(fault.NodeDown, "start it", "beta is down")
		}
		return c.open(ctx, node)
	}
	write(t, c.home("alpha", "x"), []byte("x"))
	r, err := Run(context.Background(), c.job(Options{}, "alpha:x", "beta:"), deps, nil)
	wantFault(t, err, fault.NodeDown)
	if r.State != Failed || r.FinishedAt.IsZero() {
		t.Errorf("%+v", r.Progress)
	}
}
