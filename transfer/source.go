package transfer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/time/rate"

	"tbcluster/api/fault"
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/transport"
	"tbcluster/transfer/wire"
)

const (
	// smallFile is the size below which files are packed.
	smallFile = 1 << 20
	// entriesPage is how many entries one message holds.
	entriesPage = 1000
	// maxDamaged is how often a unit is sent again after arriving damaged.
	maxDamaged = 3
)

// source is the reading side of a worker.
type source struct {
	w     *worker
	queue *queue

	mu        sync.Mutex
	roots     []manifest.Root
	firstRoot int
	entries   []manifest.Entry
	first     int
	follow    bool // copy what symlinks point to
	files     map[int]*sending
	pack      []int // being filled
	packSize  int64
	paths     map[int]*outPath
	limit     *rate.Limiter
	closed    bool
}

// sending is a file that goes in chunks.
type sending struct {
	entry manifest.Entry
	abs   string

	mu     sync.Mutex
	f      *os.File
	info   fs.FileInfo // as it was when opened
	left   int         // units not yet done
	failed bool
}

func newSource(w *worker) *source {
	return &source{w: w, queue: newQueue(), files: map[int]*sending{}, paths: map[int]*outPath{}}
}

// scan lists the sources.
func (w *worker) scan(ctx context.Context, body json.RawMessage) (any, error) {
	in, err := decode[scanIn](body)
	if err != nil {
		return nil, err
	}
	filter, err := manifest.ParseFilter(in.Filters)
	if err != nil {
		return nil, err
	}
	s, me := w.source(), w.me()
	paths := make([]string, len(in.Places))
	for i, p := range in.Places {
		if paths[i], err = w.expand(p); err != nil {
			return nil, err
		}
	}
	page := make([]manifest.Entry, 0, entriesPage)
	flush := func() error {
		if len(page) == 0 {
			return nil
		}
		err := w.ctl.tell(kEntries, entriesNote{page})
		page = page[:0]
		return err
	}
	o := manifest.Options{Filter: filter, CopyLinks: in.CopyLinks, Node: me.NodeID, NodeName: me.NodeName, First: in.First, FirstRoot: in.FirstRoot}
	var entries []manifest.Entry
	roots, err := manifest.Scan(ctx, paths, o, func(e manifest.Entry) error {
		entries = append(entries, e)
		if page = append(page, e); len(page) == entriesPage {
			return flush()
		}
		return nil
	}, w.problem)
	if err == nil {
		err = flush()
	}
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roots, s.firstRoot, s.entries, s.first, s.follow = roots, in.FirstRoot, entries, in.First, in.CopyLinks
	return scanOut{Roots: roots, Next: in.First + len(entries)}, nil
}

// lookup returns a File entry and its absolute path.
func (s *source) lookup(i int) (manifest.Entry, string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i < s.first || i >= s.first+len(s.entries) || s.entries[i-s.first].Kind != manifest.File {
		return manifest.Entry{}, "", fault.Newf(fault.Protocol, "use the same version of tbcluster on both nodes", "this transfer has no file %d", i)
	}
	e := s.entries[i-s.first]
	abs := string(s.roots[e.Root-s.firstRoot].Abs)
	if len(e.Path) > 0 {
		abs = filepath.Join(abs, string(e.Path))
	}
	return e, abs, nil
}

// want queues what the destination asks for.
func (s *source) want(ws []want) error {
	for _, w := range ws {
		e, abs, err := s.lookup(w.File)
		if err != nil {
			return err
		}
		if e.Size < smallFile && !e.Sparse {
			s.packFile(e)
			continue
		}
		f := &sending{entry: e, abs: abs}
		var units []*unit
		for c := range chunksOf(e.Size) {
			if !hasBit(w.Have, c) {
				units = append(units, &unit{file: e.Index, chunk: c})
			}
		}
		f.left = len(units)
		s.mu.Lock()
		s.files[e.Index] = f
		s.mu.Unlock()
		if len(units) == 0 {
			// Everything had arrived before, but for the last step.
			if err := s.w.ctl.tell(kFinish, filesNote{[]int{e.Index}}); err != nil {
				return err
			}
			continue
		}
		s.queue.add(units...)
	}
	return nil
}

func (s *source) packFile(e manifest.Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pack) > 0 && (s.packSize+e.Size > wire.ChunkSize || len(s.pack) >= wire.MaxParts/2) {
		s.flushPack()
	}
	s.pack = append(s.pack, e.Index)
	s.packSize += e.Size
}

// flushPack queues the pack; call it with mu held.
func (s *source) flushPack() {
	if len(s.pack) > 0 {
		s.queue.add(&unit{pack: s.pack})
		s.pack, s.packSize = nil, 0
	}
}

// start begins sending: nothing more will be wanted.
func (w *worker) start(_ context.Context, body json.RawMessage) (any, error) {
	in, err := decode[startIn](body)
	if err != nil {
		return nil, err
	}
	s := w.source()
	s.mu.Lock()
	if in.Limit > 0 {
		s.limit = rate.NewLimiter(rate.Limit(in.Limit), paceStep)
	}
	s.flushPack()
	s.mu.Unlock()
	s.queue.seal()
	go func() {
		<-s.queue.done
		w.tellCount(&countNote{})
		_ = w.ctl.tell(kSent, struct{}{}) // where it cannot be told the transfer has ended
	}()
	return struct{}{}, nil
}

// settle takes a unit off the queue for good.
func (s *source) settle(u *unit) {
	defer s.queue.finish()
	if u.pack != nil {
		return
	}
	s.mu.Lock()
	f := s.files[u.file]
	s.mu.Unlock()
	f.mu.Lock()
	f.left--
	last, failed := f.left == 0, f.failed
	var err error
	if last {
		if !failed {
			err = f.unchanged(s.follow)
		}
		f.closeFile()
	}
	f.mu.Unlock()
	switch {
	case !last || failed:
	case err != nil:
		s.giveUp(f.entry.Index, s.w.readFault(f.abs, err))
	default:
		_ = s.w.ctl.tell(kFinish, filesNote{[]int{u.file}}) // as in start
	}
}

// giveUp reports that a file is not copied and why, and tells the destination
// to forget it.
func (s *source) giveUp(file int, why *fault.Fault) {
	s.w.problem(why)
	_ = s.w.ctl.tell(kDrop, filesNote{[]int{file}}) // as in start
}

// fail marks a file as not to be copied, once; report says why, nil when the
// destination has said it.
func (s *source) fail(f *sending, report *fault.Fault) {
	f.mu.Lock()
	first := !f.failed
	f.failed = true
	f.mu.Unlock()
	if first && report != nil {
		s.giveUp(f.entry.Index, report)
	}
}

// damaged is called when a unit did not arrive as it was sent.
func (s *source) damaged(u *unit) {
	if u.tries++; u.tries <= maxDamaged {
		s.queue.retry(u)
		return
	}
	corrupt := func(abs string) *fault.Fault {
		return fault.Newf(fault.Corrupt, "try another cable or adapter; `tbcluster doctor` shows error counts; a memory test is worth its time",
			"%s arrived damaged %d times", abs, u.tries).At(s.w.where(abs)).With("path", abs)
	}
	if u.pack == nil {
		s.mu.Lock()
		f := s.files[u.file]
		s.mu.Unlock()
		s.fail(f, corrupt(f.abs))
	}
	for _, i := range u.pack {
		if _, abs, err := s.lookup(i); err == nil { // it was looked up when it was packed
			s.giveUp(i, corrupt(abs))
		}
	}
	s.settle(u)
}

// refused is called when the destination cannot take a unit and has said why.
func (s *source) refused(u *unit) {
	if u.pack == nil {
		s.mu.Lock()
		f := s.files[u.file]
		s.mu.Unlock()
		s.fail(f, nil)
	}
	s.settle(u)
}

// errChanged is the reason of a Vanished fault.
var errChanged = errors.New("it changed while it was read")

func (w *worker) readFault(abs string, err error) *fault.Fault {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	reason, fix := fault.FileIO, "look at the disk of "+w.me().NodeName+"; the same command goes on where this one ended"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		reason, fix = fault.Vanished, "run the same command again if it should have been copied"
		err = errors.New("it vanished after the files were listed")
	case errors.Is(err, errChanged), errors.Is(err, syscall.ELOOP):
		reason, fix = fault.Vanished, "wait until nothing writes to it, then run the same command again"
		err = errChanged
	case errors.Is(err, fs.ErrPermission):
		reason, fix = fault.FileDenied, "let the user read it, or leave it out with --exclude"
	}
	return fault.New(reason, "read "+abs, err, fix).At(w.where(abs)).With("path", abs)
}

// digest returns the digests of files of this side.
func (w *worker) digest(ctx context.Context, body json.RawMessage) (any, error) {
	in, err := decode[filesNote](body)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	dst := w.dst
	w.mu.Unlock()
	out := digestOut{Digests: make([][]byte, len(in.Files))}
	for i, n := range in.Files {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		var sum []byte
		if dst != nil {
			sum, err = dst.digestFile(ctx, n)
		} else {
			sum, err = w.source().digestFile(ctx, n)
		}
		if err != nil {
			continue // it is not the same, then; sending it will tell why
		}
		out.Digests[i] = sum
	}
	return out, nil
}

func (s *source) digestFile(ctx context.Context, n int) ([]byte, error) {
	e, abs, err := s.lookup(n)
	if err != nil {
		return nil, err
	}
	f, info, err := openSource(e, abs, s.follow)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	sum, err := digestOf(ctx, f)
	if err == nil && !e.Unchanged(info) {
		err = errChanged
	}
	return sum, err
}

// openSource opens a file that was listed, and only that.
func openSource(e manifest.Entry, abs string, follow bool) (*os.File, fs.FileInfo, error) {
	flags := os.O_RDONLY | syscall.O_NONBLOCK // a pipe put in its place must not stop us
	if !follow && len(e.Path) > 0 {
		flags |= syscall.O_NOFOLLOW
	}
	f, err := os.OpenFile(abs, flags, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !e.Unchanged(info) {
		err = errChanged
	}
	if err != nil {
		_ = f.Close() // the error above is the one to tell
		return nil, nil, err
	}
	return f, info, nil
}

// open opens the file at its first chunk; call it with mu held.
func (f *sending) open(follow bool) error {
	if f.f != nil {
		return nil
	}
	var err error
	f.f, f.info, err = openSource(f.entry, f.abs, follow)
	return err
}

func (f *sending) closeFile() {
	if f.f != nil {
		_ = f.f.Close() // it was only read
		f.f = nil
	}
}

// unchanged checks after the last byte that the file is what was listed: size
// and time of what was read, and that the name still means it. Call it with mu
// held.
func (f *sending) unchanged(follow bool) error {
	if f.f == nil { // every chunk was answered without being read: cannot be
		return errChanged
	}
	now, err := f.f.Stat()
	if err != nil {
		return err
	}
	stat := os.Lstat
	if follow || len(f.entry.Path) == 0 {
		stat = os.Stat
	}
	named, err := stat(f.abs)
	if err != nil {
		return err
	}
	if !f.entry.Unchanged(now) || !os.SameFile(named, f.info) {
		return errChanged
	}
	return nil
}

// outPath is one path to the destination and its connections.
type outPath struct {
	id     int
	bytes  atomic.Uint64
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// paceStep is the most bytes that are written at once.
const paceStep = 512 << 10

// connect opens connections along a path and lets them pull from the queue.
func (w *worker) connect(ctx context.Context, body json.RawMessage) (any, error) {
	in, err := decode[connectIn](body)
	if err != nil {
		return nil, err
	}
	local, lerr := netip.ParseAddr(in.Local)
	remote, rerr := netip.ParseAddr(in.Remote)
	if err := errors.Join(lerr, rerr); err != nil || in.Conns < 1 || in.Conns > 64 {
		return nil, fault.New(fault.Protocol, "a path is malformed", err, "")
	}
	t, err := w.transports.Get(in.Transport)
	if err != nil {
		return nil, fault.New(fault.Unsupported, "use transport "+in.Transport, err, "choose --transport auto")
	}
	s := w.source()
	life, cancel := context.WithCancel(context.Background())
	p := &outPath{id: in.Path, cancel: cancel}
	pace := func(ctx context.Context, n int) error {
		s.mu.Lock()
		limit := s.limit
		s.mu.Unlock()
		if limit != nil {
			if err := limit.WaitN(ctx, n); err != nil {
				return err
			}
		}
		p.bytes.Add(uint64(n))
		return nil
	}
	conns, err := dialAll(ctx, t, in.Conns, transport.DialRequest{Interface: in.Interface, Local: local, Remote: remote,
		Port: in.Port, Identity: w.identity(in.Peer), Pace: pace})
	if err != nil {
		cancel()
		return nil, fault.New(fault.Connection, fmt.Sprintf("connect from %s to %s", in.Local, in.Remote), err, "").At(w.me().NodeName)
	}
	s.mu.Lock()
	if s.closed || s.paths[in.Path] != nil {
		s.mu.Unlock()
		cancel()
		closeAll(conns)
		return nil, fault.Newf(fault.Protocol, "", "path %d is already in use, or the transfer has ended", in.Path)
	}
	s.paths[in.Path] = p
	p.wg.Add(len(conns))
	s.mu.Unlock()
	failed := make(chan error, len(conns))
	for _, c := range conns {
		go func() {
			defer p.wg.Done()
			failed <- s.pump(life, p, c)
		}()
	}
	go func() {
		// The first connection that fails takes its path along: what has
		// silenced one will silence the others.
		err := <-failed
		wanted := life.Err() == nil
		cancel()
		p.wg.Wait()
		if wanted && err != nil {
			_ = w.ctl.tell(kPathDown, pathNote{in.Path, err.Error()}) // as in start
		}
	}()
	return struct{}{}, nil
}

func dialAll(ctx context.Context, t transport.Transport, n int, r transport.DialRequest) ([]transport.Conn, error) {
	type result struct {
		c   transport.Conn
		err error
	}
	results := make(chan result, n)
	for range n {
		go func() {
			c, err := t.Dial(ctx, r)
			results <- result{c, err}
		}()
	}
	var conns []transport.Conn
	var first error
	for range n {
		r := <-results
		if r.err != nil {
			first = cmp.Or(first, r.err)
			continue
		}
		conns = append(conns, r.c)
	}
	if first != nil {
		closeAll(conns)
		return nil, first
	}
	return conns, nil
}

func closeAll(conns []transport.Conn) {
	for _, c := range conns {
		_ = c.Close() // nothing was sent on it that matters
	}
}

// disconnect ends a path; what was under way on it goes back to the queue.
func (s *source) disconnect(id int) {
	s.mu.Lock()
	p := s.paths[id]
	s.mu.Unlock()
	if p != nil {
		p.cancel()
	}
}

// sent returns the bytes sent by each path so far.
func (s *source) sent() map[int]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := make(map[int]uint64, len(s.paths))
	for id, p := range s.paths {
		m[id] = p.bytes.Load()
	}
	return m
}

// close ends everything.
func (s *source) close() {
	s.mu.Lock()
	s.closed = true
	var paths []*outPath
	for _, p := range s.paths {
		paths = append(paths, p)
	}
	s.mu.Unlock()
	for _, p := range paths {
		p.cancel()
	}
	for _, p := range paths {
		p.wg.Wait()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.files {
		f.mu.Lock()
		f.closeFile()
		f.mu.Unlock()
	}
}
