package link

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host/beat"
)

// target is where a prober dials; a change of it starts another prober.
type target struct {
	iface    string
	index    int
	local    netip.Addr
	remote   netip.Addr
	peer     string
	linkPort uint16
}

// prober keeps a probe connection over one end.
type prober struct {
	target
	cancel context.CancelFunc
	now    chan struct{} // dial now
}

func (p *prober) kick() {
	select {
	case p.now <- struct{}{}:
	default:
	}
}

// session is one probe connection of an end.
type session struct {
	conn   net.Conn
	peer   string
	dialed bool
	good   bool // the last ping came back in time
}

var (
	errSilent   = errors.New("no answer in time")
	errReplaced = errors.New("another connection took over")
)

// steer starts, keeps or ends the prober of an end. Called with the mutex held.
func (t *Tracker) steer(e *end) {
	want := target{}
	if e.listed && e.addressed() && e.peer() != "" && e.addr.Remote.IsValid() {
		want = target{
			iface: e.nic.Name, index: e.nic.Index,
			local: e.addr.Prefix.Addr(), remote: e.addr.Remote,
			peer: e.peer(), linkPort: t.peers[e.peer()].LinkPort,
		}
	}
	if e.prober != nil && e.prober.target == want {
		return
	}
	if e.prober != nil {
		old := e.prober
		if old.local != want.local || old.iface != want.iface || old.index != want.index || old.peer != want.peer {
			t.disconnect(e)
			e.silent, e.trouble = false, ""
		} else { // the same link, another port to dial
			old.cancel()
			e.prober = nil
		}
	}
	if want == (target{}) {
		return
	}
	ctx, cancel := context.WithCancel(t.ctx)
	p := &prober{target: want, cancel: cancel, now: make(chan struct{}, 1)}
	e.prober = p
	t.wg.Add(1)
	go func() {
		defer t.wg.Done()
		t.probe(ctx, e, p)
	}()
}

// disconnect ends the prober and every connection of an end. Called with the
// mutex held.
func (t *Tracker) disconnect(e *end) {
	if e.prober != nil {
		e.prober.cancel()
		e.prober = nil
	}
	for s := range e.sessions {
		// The session's own goroutine reports how it ended; closing is all.
		_ = s.conn.Close()
		delete(e.sessions, s)
	}
}

// probe listens on the link address and dials whenever no connection is good.
// Both ends dial: the end that comes up last is heard at once, as its own ARP
// request tells the first where it is. Of two connections the one that the
// lower node ID dialled stays.
func (t *Tracker) probe(ctx context.Context, e *end, p *prober) {
	delay := t.cfg.Timing.RetryFirst
	pause := func() bool {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		delay = min(2*delay, t.cfg.Timing.RetryMost)
		select {
		case <-ctx.Done():
			return false
		case <-p.now:
		case <-timer.C:
		}
		return true
	}
	if t.cfg.Listener != nil {
		for {
			l, err := t.cfg.Listener.ListenLink(p.iface, p.local)
			if err == nil {
				defer func() {
					if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
						t.cfg.Log.Warn("closing a link's listener", "interface", p.iface, "error", err)
					}
				}()
				break
			}
			t.note(e, p, fmt.Sprintf("probes cannot be accepted at %s on %s: %v", p.local, p.iface, err))
			if !pause() {
				return
			}
		}
		delay = t.cfg.Timing.RetryFirst
	}
	tries := 0
	for {
		for t.isGood(e, p) { // kicked when that ends
			tries = 0
			select {
			case <-ctx.Done():
				return
			case <-p.now:
			}
			delay = t.cfg.Timing.RetryFirst
		}
		dial, cancel := context.WithTimeout(ctx, min(1+time.Duration(tries)/slowAfter, slowMost)*t.cfg.Timing.DialTimeout)
		tries++
		conn, err := t.cfg.Dialer.DialLink(dial, p.peer, p.iface, netip.AddrPortFrom(p.local, 0), netip.AddrPortFrom(p.remote, p.linkPort))
		cancel()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return
		}
		if err == nil {
			err = t.talk(e, conn, p.peer, p.iface, p.index, true)
			if errors.Is(err, errReplaced) {
				continue
			}
		}
		t.failed(e, p, err)
		if !pause() {
			return
		}
	}
}

// A dial that is too short for a machine that has much to do never succeeds:
// after some tries each gets more time.
const (
	slowAfter = 4
	slowMost  = 4
)

// isGood reports whether p still is the end's prober and a connection is good.
func (t *Tracker) isGood(e *end, p *prober) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return e.prober == p && e.proven()
}

// note says why an end is not proven, as far as its prober knows.
func (t *Tracker) note(e *end, p *prober, trouble string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.prober == p {
		e.trouble = trouble
		t.touch()
	}
}

// failed notes what a failed dial or an ended connection means.
func (t *Tracker) failed(e *end, p *prober, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.prober != p || e.proven() {
		return
	}
	peer := t.name(p.peer)
	var timeout net.Error
	switch {
	case t.isMute(e):
		e.trouble, e.silent = t.muteTrouble(e), false
	case errors.Is(err, errSilent), errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.EHOSTUNREACH), errors.As(err, &timeout) && timeout.Timeout():
		e.trouble = fmt.Sprintf("nothing answers at %s over %s", p.remote, p.iface)
		e.silent = e.met && time.Since(e.lastPong) >= t.cfg.Timing.SilentAfter
	case errors.Is(err, syscall.ECONNREFUSED):
		e.trouble, e.silent = fmt.Sprintf("the machine at the other end answers, but no agent of %s listens there", peer), false
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, net.ErrClosed):
		e.trouble = fmt.Sprintf("%s has closed the probe", peer)
	default:
		e.trouble = err.Error()
		if f := fault.As(err); f != nil && f.Why != "" {
			e.trouble = f.Why
		}
	}
	t.touch()
}

// Serve answers and sends pings on an accepted connection of nodeID that came
// in on iface, until it ends or the end goes away. It closes conn.
func (t *Tracker) Serve(conn net.Conn, nodeID, iface string) error {
	t.mu.Lock()
	var e *end
	var index int
	for _, candidate := range t.ends {
		if candidate.listed && candidate.nic.Name == iface {
			e, index = candidate, candidate.nic.Index
		}
	}
	var why error
	switch {
	case t.closed:
		why = net.ErrClosed
	case e == nil:
		why = fault.Newf(fault.Protocol, "", "a probe came in on %s, which is no interface of a cable", iface)
	case e.peerID != "" && e.peerID != nodeID:
		why = fault.Newf(fault.Protocol, "look whether a bridge joins cables there", "a probe of %s came in on %s, which leads to %s", t.name(nodeID), iface, t.name(e.peerID))
	}
	t.mu.Unlock()
	if why != nil {
		return errors.Join(why, conn.Close())
	}
	err := t.talk(e, conn, nodeID, iface, index, false)
	if errors.Is(err, io.EOF) || errors.Is(err, errReplaced) {
		return nil
	}
	return err
}

// talk runs one connection over an interface of an end until it ends; it
// closes it.
func (t *Tracker) talk(e *end, conn net.Conn, peer, iface string, index int, dialed bool) error {
	s := &session{conn: conn, peer: peer, dialed: dialed}
	t.mu.Lock()
	if t.closed || !e.listed || e.nic.Name != iface || e.nic.Index != index {
		t.mu.Unlock()
		return errors.Join(net.ErrClosed, conn.Close())
	}
	e.sessions[s] = struct{}{}
	t.mu.Unlock()

	pongs := make(chan frame, 1)
	done := make(chan error, 1)
	var writing sync.Mutex
	send := func(f frame) error {
		writing.Lock()
		defer writing.Unlock()
		if err := conn.SetWriteDeadline(time.Now().Add(t.cfg.Timing.SilentAfter)); err != nil {
			return err
		}
		_, err := conn.Write(f.append(nil))
		return err
	}
	quit := make(chan struct{})
	go func() { done <- t.read(s, conn, send, e.port, pongs, quit) }()
	err := t.ping(e, s, send, pongs, done)
	close(quit)
	closing := conn.Close()
	if !errors.Is(err, errReaderEnded) {
		<-done
	} else {
		err = errors.Unwrap(err)
	}
	t.ended(e, s, err)
	if err == nil && closing != nil && !errors.Is(closing, net.ErrClosed) {
		err = closing
	}
	return err
}

// errReaderEnded marks an error that came from the reading side.
var errReaderEnded = errors.New("reading ended")

type readerError struct{ err error }

func (r readerError) Error() string        { return r.err.Error() }
func (r readerError) Unwrap() error        { return r.err }
func (r readerError) Is(target error) bool { return target == errReaderEnded }

// read answers pings and hands on pongs.
func (t *Tracker) read(s *session, conn net.Conn, send func(frame) error, port string, pongs chan<- frame, quit <-chan struct{}) error {
	in := bufio.NewReaderSize(conn, 256)
	for {
		f, err := readFrame(in)
		if err != nil {
			return err
		}
		if f.kind == framePing {
			if err := send(frame{kind: framePong, sequence: f.sequence, port: port, good: t.isGoodSession(s)}); err != nil {
				return err
			}
			continue
		}
		select {
		case pongs <- f:
		case <-quit:
			return nil
		}
	}
}

func (t *Tracker) isGoodSession(s *session) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return s.good
}

// outstanding is how many pings may wait for their answers at once: a cable
// full of data may take longer than PingEvery.
const outstanding = 8

// ping sends a ping every PingEvery and takes the answers, until there is none
// for SilentAfter.
func (t *Tracker) ping(e *end, s *session, send func(frame) error, pongs <-chan frame, done <-chan error) error {
	var sequence, answered uint64
	var sent [outstanding]time.Time
	timer := time.NewTimer(beat.Until(t.cfg.Timing.PingEvery))
	defer timer.Stop()
	// The last tenth of a ping's pace is for what waits here to be read: an
	// agent that stood still itself must not take that for silence.
	grace := t.cfg.Timing.PingEvery / 10
	listen := t.cfg.Timing.SilentAfter - grace
	late := false
	silence := time.NewTimer(listen)
	defer silence.Stop()
	next := func() error {
		sequence++
		sent[sequence%outstanding] = time.Now()
		return send(frame{kind: framePing, sequence: sequence, port: e.port, good: t.isGoodSession(s)})
	}
	if err := next(); err != nil {
		return err
	}
	for {
		select {
		case err := <-done:
			return readerError{err}
		case <-silence.C:
			switch {
			case !late:
				late = true
				silence.Reset(grace)
			case t.mute(e, s):
				late = false
				silence.Reset(listen)
			default:
				return errSilent
			}
		case <-timer.C:
			if err := next(); err != nil {
				return err
			}
			timer.Reset(beat.Until(t.cfg.Timing.PingEvery))
		case f := <-pongs:
			if f.sequence <= answered || f.sequence > sequence || sequence-f.sequence >= outstanding {
				continue // answered before, or never asked
			}
			answered, late = f.sequence, false
			silence.Reset(listen)
			if !t.answered(e, s, f, time.Since(sent[f.sequence%outstanding])) {
				return errReplaced
			}
		}
	}
}

// mute takes a connection that is not answered any more: true where the far
// machine has acknowledged all pings. The cable carries them then, and the agent
// there stands still; it may go on with the same connection.
func (t *Tracker) mute(e *end, s *session) bool {
	if t.cfg.Acked == nil || !t.cfg.Acked(s.conn) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, still := e.sessions[s]; !still {
		return false
	}
	s.good = false
	if !e.proven() {
		e.silent, e.trouble = false, t.muteTrouble(e)
	}
	t.touch()
	return true
}

func (t *Tracker) muteTrouble(e *end) string {
	return fmt.Sprintf("the machine at the other end takes what comes over %s, but the agent of %s does not answer", e.nic.Name, t.name(e.peer()))
}

// isMute reports whether a connection is alive of which the far agent answers
// nothing.
func (t *Tracker) isMute(e *end) bool {
	for s := range e.sessions {
		if !s.good && t.cfg.Acked != nil && t.cfg.Acked(s.conn) {
			return true
		}
	}
	return false
}

// answered takes a pong; it is false where the connection is not needed.
func (t *Tracker) answered(e *end, s *session, f frame, rtt time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, still := e.sessions[s]; !still {
		return false
	}
	news := !s.good || e.silent || e.trouble != "" || e.probedID != s.peer || e.probedPort != f.port
	s.good, e.met, e.silent, e.trouble = true, true, false, ""
	e.probedID, e.probedPort, e.lastPong = s.peer, f.port, time.Now()
	if e.rtt == 0 {
		e.rtt = rtt
	}
	e.rtt = (7*e.rtt + rtt) / 8
	// What is shown follows only large changes: it travels to every node.
	if d := (e.rtt - e.shownRTT).Abs(); e.shownRTT == 0 || d > e.shownRTT/2 && d > 100*time.Microsecond {
		e.shownRTT = e.rtt
	}
	// Once both ends know that the connection dialled by the lower ID is good,
	// the higher ends those that it dialled itself.
	if f.good && !s.dialed && t.cfg.Self > s.peer {
		for o := range e.sessions {
			if o.dialed {
				_ = o.conn.Close()
				delete(e.sessions, o)
			}
		}
	}
	if news {
		t.touch()
	}
	return true
}

// ended takes the end of a connection.
func (t *Tracker) ended(e *end, s *session, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.good = false
	if _, still := e.sessions[s]; !still {
		return // ended from here
	}
	delete(e.sessions, s)
	if e.proven() {
		return
	}
	if e.met && errors.Is(err, errSilent) {
		e.silent = true
		t.cfg.Log.Warn("link is silent", "port", e.port, "interface", e.nic.Name, "peer", t.name(s.peer))
	}
	if e.prober != nil {
		e.prober.kick()
	}
	t.touch()
}
