package transfer

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/transfer/tcp"
	"tbcluster/transfer/transport"
)

// DialFunc connects to remote from local, bound to the interface iface where
// that is not "".
type DialFunc = tcp.DialFunc

// ListenFunc listens on a free port of local, bound to the interface iface
// where that is not "".
type ListenFunc = tcp.ListenFunc

// WorkerOptions is what a worker process hands in.
type WorkerOptions struct {
	// Dial and Listen bind to interfaces. Nil means by address alone.
	Dial   DialFunc
	Listen ListenFunc
	// Transports that this worker knows; nil means tcp over Dial and Listen.
	Transports transport.Set
}

// countEvery is how often a worker tells what it has done.
const countEvery = 200 * time.Millisecond

// worker is one side of a transfer.
type worker struct {
	ctl        *control
	transports transport.Set
	cert       tls.Certificate
	hash       transport.Hash

	mu    sync.Mutex
	hello helloIn
	src   *source
	dst   *destination
}

// ServeWorker does what the coordinator says over control until that ends or
// ctx does. It takes the whole process: it makes it non-dumpable, and expects
// to run as the user whose files it reads and writes. What arrived stays on
// disk for the next run. It closes control. A clean end is nil.
func ServeWorker(ctx context.Context, conn *frame.Conn, opts WorkerOptions) error {
	if err := guardProcess(); err != nil {
		return fmt.Errorf("protect the process: %w", err)
	}
	cert, hash, err := newCertificate()
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	w := &worker{ctl: newControl(conn), transports: opts.Transports, cert: cert, hash: hash}
	if w.transports == nil {
		w.transports = transport.NewSet(tcp.New(opts.Dial, opts.Listen))
	}
	w.ctl.note, w.ctl.call = w.note, w.call
	ctx, cancel := context.WithCancel(ctx)
	counting := make(chan struct{})
	go func() {
		defer close(counting)
		w.count(ctx)
	}()
	err = w.ctl.serve(ctx)
	cancel()
	<-counting
	w.closeSides()
	return err
}

// closeSides ends what this worker does; what arrived stays.
func (w *worker) closeSides() {
	w.mu.Lock()
	src, dst := w.src, w.dst
	w.mu.Unlock()
	if src != nil {
		src.close()
	}
	if dst != nil {
		dst.close()
	}
}

func (w *worker) stop(context.Context, json.RawMessage) (any, error) {
	w.closeSides()
	return struct{}{}, nil
}

func (w *worker) call(ctx context.Context, k kind, body json.RawMessage) (any, error) {
	if k == kHello {
		return w.greet(body)
	}
	w.mu.Lock()
	known := w.hello.Version != 0
	w.mu.Unlock()
	if !known {
		return nil, fault.Newf(fault.Protocol, "", "%q came before the greeting", k)
	}
	handle, ok := map[kind]func(context.Context, json.RawMessage) (any, error){
		kScan:     w.scan,
		kStart:    w.start,
		kConnect:  w.connect,
		kDigest:   w.digest,
		kPrepare:  w.prepare,
		kDecide:   w.decide,
		kListen:   w.listen,
		kComplete: w.complete,
		kStop:     w.stop,
	}[k]
	if !ok {
		return nil, fault.Newf(fault.Unsupported, "use the same version of tbcluster on both nodes", "a worker knows no %q", k)
	}
	return handle(ctx, body)
}

// note handles a note; where it cannot, the coordinator learns why before the
// stream ends.
func (w *worker) note(k kind, body json.RawMessage) error {
	err := w.handle(k, body)
	if err != nil {
		_ = w.ctl.tell(kFatal, problemNote{toFailure(err)}) // as for problem
	}
	return err
}

func (w *worker) handle(k kind, body json.RawMessage) error {
	switch k {
	case kEntries:
		n, err := decode[entriesNote](body)
		if err != nil {
			return err
		}
		return w.destination().add(n.Entries)
	case kFinish, kDrop:
		n, err := decode[filesNote](body)
		if err != nil {
			return err
		}
		if k == kFinish {
			return w.destination().finishFiles(n.Files)
		}
		return w.destination().dropFiles(n.Files)
	case kWant:
		n, err := decode[wantNote](body)
		if err != nil {
			return err
		}
		return w.source().want(n.Want)
	case kPause:
		n, err := decode[pauseNote](body)
		if err != nil {
			return err
		}
		w.source().queue.pause(n.Paused)
		return nil
	case kDisconnect:
		n, err := decode[pathNote](body)
		if err != nil {
			return err
		}
		w.mu.Lock()
		src, dst := w.src, w.dst
		w.mu.Unlock()
		if src != nil {
			src.disconnect(n.Path)
		}
		if dst != nil {
			dst.unlisten(n.Path)
		}
		return nil
	}
	return nil // a note of a newer version
}

// source returns this worker as a source.
func (w *worker) source() *source {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.src == nil {
		w.src = newSource(w)
	}
	return w.src
}

// destination returns this worker as a destination.
func (w *worker) destination() *destination {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dst == nil {
		w.dst = newDestination(w)
	}
	return w.dst
}

func (w *worker) greet(body json.RawMessage) (any, error) {
	in, err := decode[helloIn](body)
	if err != nil {
		return nil, err
	}
	if in.Version != protocolVersion {
		return nil, fault.Newf(fault.Unsupported, "use the same version of tbcluster on both nodes",
			"this worker speaks version %d of the transfer protocol, not %d", protocolVersion, in.Version)
	}
	w.mu.Lock()
	w.hello = in
	w.mu.Unlock()
	return helloOut{Version: protocolVersion, Hash: w.hash}, nil
}

// me returns what the greeting said.
func (w *worker) me() helloIn {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hello
}

// where returns "node:path" for messages.
func (w *worker) where(path string) string { return w.me().NodeName + ":" + path }

func (w *worker) identity(peers ...transport.Hash) transport.Identity {
	return transport.Identity{Certificate: w.cert, Peer: func(h transport.Hash) bool {
		for _, p := range peers {
			if p == h {
				return true
			}
		}
		return false
	}}
}

// problem reports a file that is not copied.
func (w *worker) problem(f *fault.Fault) {
	// Where it cannot be told the stream has ended, and so has the transfer.
	_ = w.ctl.tell(kProblem, problemNote{toFailure(f)})
}

// count tells the coordinator what has been done, when that has changed.
func (w *worker) count(ctx context.Context) {
	tick := time.NewTicker(countEvery)
	defer tick.Stop()
	var last countNote
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.tellCount(&last)
	}
}

func (w *worker) tellCount(last *countNote) {
	w.mu.Lock()
	src, dst := w.src, w.dst
	w.mu.Unlock()
	var now countNote
	if src != nil {
		now.Sent = src.sent()
	}
	if dst != nil {
		now.Bytes, now.Files = dst.verified.Load(), dst.finished.Load()
	}
	same := now.Bytes == last.Bytes && now.Files == last.Files && len(now.Sent) == len(last.Sent)
	for p, n := range now.Sent {
		same = same && last.Sent[p] == n
	}
	if !same {
		_ = w.ctl.tell(kCount, now) // as for problem
		*last = now
	}
}

// expand makes a path as a person wrote it absolute on this node.
func (w *worker) expand(p place) (string, error) {
	path, dir := string(p.Path), string(p.Dir)
	if strings.ContainsRune(path, 0) || strings.ContainsRune(dir, 0) {
		return "", fault.Newf(fault.Usage, "", "the path has a NUL byte")
	}
	if filepath.IsAbs(path) {
		return path, nil
	}
	base := dir
	if path == "~" || strings.HasPrefix(path, "~/") {
		base, path = "", strings.TrimPrefix(path[1:], "/")
		if path == "" {
			path = "."
		}
	} else if strings.HasPrefix(path, "~") {
		return "", fault.Newf(fault.Usage, "write the directory out, or ./"+path+" for a file of that name",
			"%s: only ~ and ~/… are expanded", path).At(w.where(path))
	}
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fault.New(fault.FileMissing, "find the home directory", err, "write an absolute path").At(w.me().NodeName)
		}
		base = home
	}
	if path == "" {
		return base, nil
	}
	// Join would drop what a slash at the end says.
	return strings.TrimRight(base, "/") + "/" + path, nil
}
