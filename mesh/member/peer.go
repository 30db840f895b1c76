package member

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/mesh/identity"
)

const (
	// knockAfter is how much later the node with the higher ID dials, where the
	// one with the lower ID should have.
	knockAfter = 350 * time.Millisecond
	// dialTimeout bounds one attempt, hello included.
	dialTimeout = 4 * time.Second
	// firstPause to longestPause are between attempts; a node that is down is
	// tried at the longest, and kicked when discovery has news.
	firstPause   = 100 * time.Millisecond
	suspectPause = time.Second
	longestPause = 5 * time.Second
	// settling is how long a fresh stream of the node that should dial is not
	// replaced by one the other way, so that both ends choose the same of two
	// that cross.
	settling = time.Second
)

// peer is one other member. Its fields are guarded by Manager.mu.
type peer struct {
	id    identity.NodeID
	dials bool // this node has the lower ID: it dials

	life
	state State
	since time.Time
	// reason is for people.
	reason string

	incarnation uint64
	version     string
	features    []string
	sections    map[string]Section // never changed, but replaced by setSections
	revision    uint64             // of sections
	rtt, skew   time.Duration

	stream     *stream
	untrusting bool       // it does not let this node in
	attempts   []*attempt // under way
	kicked     bool       // there was news of how to reach it since the last attempt began
	failures   int
	nextDial   time.Time
	gone       bool // put out of the cluster

	wake   chan struct{}
	ctx    context.Context
	cancel context.CancelFunc
}

// attempt is one at reaching a peer.
type attempt struct {
	began   time.Time
	abandon context.CancelFunc
}

// maxAttempts are at once: the second uses what became known after the first
// began, which may hang on a way that leads nowhere.
const maxAttempts = 2

// drop takes an attempt off the list: it came to nothing, or is a stream now.
func (p *peer) drop(a *attempt) {
	p.attempts = slices.DeleteFunc(p.attempts, func(o *attempt) bool { return o == a })
}

// abandon ends the attempts under way.
func (p *peer) abandon() {
	for _, a := range p.attempts {
		a.abandon()
	}
}

func newPeer(self, id identity.NodeID, now time.Time) *peer {
	p := &peer{
		id: id, dials: self < id, state: Unknown, reason: "not heard from yet", since: now,
		life:     life{watched: now, heartbeat: time.Second},
		sections: map[string]Section{}, wake: make(chan struct{}, 1), nextDial: now,
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if !p.dials {
		p.nextDial = now.Add(knockAfter)
	}
	return p
}

// setSections puts others in the place of what p said. The caller holds mu.
func (m *Manager) setSections(p *peer, s map[string]Section) {
	m.revision++
	p.sections, p.revision = s, m.revision
}

// start begins to watch over p, once Run has begun. The caller holds mu.
func (m *Manager) start(p *peer) {
	if m.ctx == nil || m.ctx.Err() != nil {
		return
	}
	p.watched, p.heartbeat = time.Now(), m.heartbeat()
	m.work.Go(func() { m.watch(p) })
}

// watch judges p again and again, and dials it when that is called for.
func (m *Manager) watch(p *peer) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	due := time.Now()
	for {
		select {
		case <-p.wake:
		case <-timer.C:
		case <-p.ctx.Done():
			return
		case <-m.ctx.Done():
			return
		}
		now := time.Now()
		m.mu.Lock()
		// Where this process did not run for a while (SIGSTOP, suspend), the
		// silence was its own: listen for one interval before judging.
		if asleep := now.Sub(due); asleep > p.heartbeat && p.met {
			p.lastHeard = now.Add(-p.heartbeat)
		}
		due = m.step(p, now)
		m.mu.Unlock()
		timer.Reset(time.Until(due))
	}
}

// step judges p, dials it if it is time, and says when to look again. The caller
// holds mu.
func (m *Manager) step(p *peer, now time.Time) (next time.Time) {
	// However quiet it is, look in now and then: a timer that comes late is how
	// a stop of this process is noticed.
	next = now.Add(5 * p.heartbeat)
	at := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	state, reason, change := judge(now, p.life)
	at(change)
	m.enter(p, state, reason, now)

	dial := p.nextDial
	if p.stream != nil {
		spare := p.lastHeard.Add(spareAfter(p.heartbeat))
		if !p.dials {
			spare = spare.Add(knockAfter)
		}
		if spare.After(dial) {
			dial = spare
		}
	}
	busy := len(p.attempts) > 0 && (!p.kicked || p.stream != nil || len(p.attempts) >= maxAttempts)
	switch {
	case busy || p.gone:
	case now.Before(dial):
		at(dial)
	default:
		p.kicked = false
		ctx, cancel := context.WithCancel(p.ctx)
		a := &attempt{began: now, abandon: cancel}
		p.attempts = append(p.attempts, a)
		m.work.Go(func() {
			defer cancel()
			m.dial(ctx, p, a)
		})
	}
	return next
}

// enter puts p into a state. The caller holds mu.
func (m *Manager) enter(p *peer, state State, reason string, now time.Time) {
	if p.state == state && p.reason == reason {
		return
	}
	if p.state != state {
		m.o.Log.Info("node changed state", "node", p.id, "from", p.state, "to", state, "reason", reason)
		p.since = now
		if state == Down && !p.met && !p.lastHeard.IsZero() {
			p.since = p.lastHeard // of an earlier run: down since then
		}
		m.touch()
	}
	p.state, p.reason = state, reason
	m.tell()
}

// dial makes one attempt, and runs the stream that comes of it to its end. ctx
// is cancelled when the attempt is abandoned, and not once it is a stream.
func (m *Manager) dial(ctx context.Context, p *peer, a *attempt) {
	defer context.AfterFunc(m.ctx, func() {
		// At the end of Run streams have their goodbye first; an attempt has none.
		m.mu.Lock()
		defer m.mu.Unlock()
		if slices.Contains(p.attempts, a) {
			a.abandon()
		}
	})()
	timeout, done := context.WithTimeout(ctx, dialTimeout)
	session, err := m.o.Dial(timeout, p.id)
	done()
	if err != nil {
		m.dialFailed(p, a, err)
		return
	}
	defer func() { _ = session.Close() }() // it has ended already, or is to
	client, err := peerv1.NewPeerServiceClient(session).Sync(ctx, grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage))
	if err != nil {
		m.dialFailed(p, a, nil)
		return
	}
	if attached, err := m.runStream(ctx, p, client, session.Via(), a); !attached {
		m.o.Log.Debug("attempt came to nothing", "node", p.id, "via", session.Via(), "error", err)
		m.dialFailed(p, a, nil)
	}
}

// maxMessage is the largest gRPC message of a stream, bytes: a section and what
// is around it.
const maxMessage = MaxSection + 1<<20

// dialFailed notes that an attempt came to nothing. refused is why no way leads
// to the node, and nil when one did.
func (m *Manager) dialFailed(p *peer, a *attempt, refused error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.drop(a)
	signal(p.wake)
	if a.began.Before(p.broken) || p.kicked || len(p.attempts) > 0 {
		return // it says nothing of how things stand since; nextDial is set
	}
	if p.stream == nil && refused != nil {
		p.refused, p.untrusting = words(refused), fault.Is(refused, fault.NotPaired)
	}
	pause := longestPause
	if p.failures < 10 {
		pause = min(pause, firstPause<<p.failures)
	}
	if p.state == Suspect || p.state == Up {
		pause = min(pause, suspectPause)
	}
	p.failures++
	p.nextDial = time.Now().Add(pause)
}
