package pair

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

const (
	// Lifetime is how long a code lives at most.
	Lifetime = 2 * time.Minute
	// MaxTries is how many wrong tries either side makes or takes with one code.
	MaxTries = 3
	// joinWithin bounds how long a joiner tries while another is let in.
	joinWithin = 10 * time.Second
)

// times bound how long one side waits for a message of the other.
type times struct {
	// hello is for the first one that the inviter gets: only then does an
	// exchange take the one place there is, for as long as answer at most.
	hello, answer time.Duration
	// joiner is for those of the joiner, and of the inviter once it knows who
	// joins.
	joiner time.Duration
}

var usual = times{hello: 3 * time.Second, answer: 7 * time.Second, joiner: 10 * time.Second}

// Options are the settings of a Pairer.
type Options struct {
	// InTouch reports whether a node is in this one's cluster and connected with it
	// now: with that one there is nothing to pair, and a code would be used up. nil
	// is that none is.
	InTouch func(identity.NodeID) bool
	Clock   host.Clock   // nil is the system's
	Log     *slog.Logger // nil discards
}

// Pairer pairs one node with others.
type Pairer struct {
	key   *identity.Key
	store *identity.Store
	ch    *channel.Channel
	o     Options
	times times

	mu    sync.Mutex
	open  *invitation
	tried map[[sha256.Size]byte]tries // by hash of the code
}

// tries are the guesses that this node has made with one code.
type tries struct {
	n    int
	last time.Time
	used bool
}

// New returns a Pairer for the node with that key.
func New(key *identity.Key, store *identity.Store, ch *channel.Channel, o Options) *Pairer {
	if o.Clock == nil {
		o.Clock = host.SystemClock{}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Pairer{key: key, store: store, ch: ch, o: o, times: usual, tried: map[[sha256.Size]byte]tries{}}
}

// Invitation is an open code.
type Invitation struct {
	Code    string // "NNNN-XXXX-XXXX"
	Number  string // N
	Expires time.Time
	// Events has room for all events of one code and is closed after the last.
	Events <-chan Event
}

// Event is one thing that happened to an open code; one field is set.
type Event struct {
	// WrongTryFrom is the address from which a wrong try came.
	WrongTryFrom string
	// Joined is the node that paired; the code is used.
	Joined *identity.Member
	// Ended is why the code ended without that: a *fault.Fault (PAIRING_FAILED,
	// INTERRUPTED).
	Ended error
}

// Open opens a code for one node, which gets role (0 is admin). Lifetime 0 is
// two minutes, which is the most. It ends when it is used, expires, was tried
// wrongly three times, ctx ends, or another one is opened. Faults: DENIED.
func (p *Pairer) Open(ctx context.Context, role identity.Role, lifetime time.Duration) (*Invitation, error) {
	if role == 0 {
		role = identity.Admin
	}
	if lifetime <= 0 || lifetime > Lifetime {
		lifetime = Lifetime
	}
	if self := p.store.Self(); self.Revoked || self.Role < identity.Admin || role > self.Role {
		f := fault.Newf(fault.Denied, "run it on a node that is an admin (`tbcluster pair --list` shows which)", "open a pairing code")
		f.Why = "this node may not let others into the cluster"
		if self.Revoked {
			f.Why, f.Fix = "this node was put out of its cluster", "run `tbcluster pair --new-identity` here first"
		}
		return nil, f
	}
	code, err := newCode(p.key.ID())
	if err != nil {
		return nil, fault.New(fault.Internal, "open a pairing code", err, "")
	}
	inv := &invitation{p: p, code: code, role: role, events: make(chan Event, MaxTries+2)}
	p.mu.Lock()
	old := p.open
	p.open = inv
	p.mu.Unlock()
	if old != nil {
		old.end(Event{Ended: fault.Newf(fault.Interrupted, "", "another pairing code took the place of this one")}, refusedExpiry)
	}
	remove := p.ch.HandleUnpaired(channel.Pair, inv.serve)
	timer := time.AfterFunc(lifetime, func() {
		inv.end(Event{Ended: failed("the code has expired", "open a new one with `tbcluster pair`")}, refusedExpiry)
	})
	stop := context.AfterFunc(ctx, func() {
		inv.end(Event{Ended: fault.Newf(fault.Interrupted, "", "pairing was interrupted")}, refusedExpiry)
	})
	inv.closed(func() { timer.Stop(); stop(); remove() })
	return &Invitation{Code: code, Number: Number(p.key.ID()), Expires: p.o.Clock.Now().Add(lifetime), Events: inv.events}, nil
}

// OpenNumber returns the number of the open code, "" if there is none: what is
// announced.
func (p *Pairer) OpenNumber() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		return ""
	}
	return Number(p.key.ID())
}

func failed(why, fix string) *fault.Fault {
	f := fault.Newf(fault.PairingFailed, fix, "pairing failed")
	f.Why = why
	return f
}

// Candidate is where the inviting node may be.
type Candidate struct {
	Node identity.NodeID // "" if not known
	Way  channel.Way
}

// Join pairs with the node that showed code, at the first candidate that is
// that node, and returns that node as a member. Faults: USAGE (no code),
// PAIRING_FAILED (wrong, used, expired, other node than named), NODE_IN_USE
// (this node is in another cluster), NODE_DOWN (no candidate answers), TIMEOUT
// (the other side does not answer, or this one is too slow for it).
func (p *Pairer) Join(ctx context.Context, code string, candidates []Candidate) (identity.Member, error) {
	number, code, err := ParseCode(code)
	if err != nil {
		return identity.Member{}, err
	}
	if number == Number(p.key.ID()) && p.OpenNumber() != "" {
		return identity.Member{}, failed("the code is this node's own", "type it on the other node")
	}
	if err := p.mayTry(code); err != nil {
		return identity.Member{}, err
	}
	var fit []Candidate
	for _, c := range candidates {
		if c.Node == "" || c.Node != p.key.ID() && Number(c.Node) == number {
			fit = append(fit, c)
		}
	}
	if len(fit) == 0 {
		f := fault.Newf(fault.NodeDown, "see that `tbcluster pair` still waits there; where the nodes do not see each other, add `--address HOST:PORT`", "find the node that showed code %s-…", number)
		f.Why = "no node nearby announces it"
		return identity.Member{}, f
	}
	return p.joinAny(ctx, number, code, fit)
}

// StageConnect is what "stage" of a fault says where no exchange was begun, so
// that no try is lost: nobody was reached, or nobody who shows the code.
const StageConnect = "connect"

const (
	maxCandidates = 64
	stagger       = 150 * time.Millisecond
	busyPause     = 500 * time.Millisecond
)

// joinAny dials the candidates one after the other, not waiting for those that
// hang, and makes the exchange with the first that is the right node.
func (p *Pairer) joinAny(ctx context.Context, number, code string, candidates []Candidate) (identity.Member, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		conn *channel.Conn
		err  error
		Candidate
	}
	if len(candidates) > maxCandidates {
		candidates = candidates[:maxCandidates]
	}
	answers := make(chan answer, len(candidates))
	for i, c := range candidates {
		go func() {
			select {
			case <-time.After(time.Duration(i) * stagger):
			case <-ctx.Done():
				answers <- answer{nil, ctx.Err(), c}
				return
			}
			conn, err := p.ch.DialUnpaired(ctx, channel.Pair, c.Way)
			answers <- answer{conn, err, c}
		}()
	}
	left := len(candidates)
	defer func() {
		go func() {
			for ; left > 0; left-- {
				if a := <-answers; a.conn != nil {
					_ = a.conn.Close() // not needed any more
				}
			}
		}()
	}()
	var worst error
	note := func(err error) {
		if worst == nil || rank(err) > rank(worst) {
			worst = err
		}
	}
	done := map[identity.NodeID]bool{}
	for left > 0 {
		var a answer
		select {
		case a = <-answers:
			left--
		case <-ctx.Done():
			return identity.Member{}, interrupted(ctx)
		}
		switch {
		case a.err != nil:
			note(notOpen(a.err))
			continue
		case Number(a.conn.Peer()) != number, a.Node != "" && a.conn.Peer() != a.Node:
			note(failed(fmt.Sprintf("another node (%s) than the code names answers at %s", a.conn.Peer().Short(), a.Way),
				"see that the code is typed as shown, and that the address is that of the node that shows it"))
			_ = a.conn.Close() // nothing was said
			continue
		case done[a.conn.Peer()]:
			_ = a.conn.Close() // tried already
			continue
		}
		if p.o.InTouch != nil && p.o.InTouch(a.conn.Peer()) {
			_ = a.conn.Close() // nothing was said
			f := failed("this node and "+p.nameOf(a.conn.Peer())+" are in the same cluster already",
				"the code is not used up: type it on a machine that is not in the cluster yet (`tbcluster pair --list` shows who is)")
			return identity.Member{}, f.With("stage", "in")
		}
		done[a.conn.Peer()] = true
		member, err := p.joinPatiently(ctx, code, a.conn, a.Way)
		if err == nil {
			return member, nil
		}
		note(err)
		if p.mayTry(code) != nil {
			return identity.Member{}, err // used, or the last try it was
		}
	}
	if f := fault.As(worst); f != nil && len(done) == 0 {
		return identity.Member{}, f.With("stage", StageConnect)
	}
	return identity.Member{}, worst
}

func (p *Pairer) nameOf(id identity.NodeID) string {
	if m, ok := p.store.Member(id); ok {
		return m.Name
	}
	return id.Short()
}

// rank orders what went wrong at several candidates: what says most counts.
func rank(err error) int {
	switch f := fault.As(err); {
	case f == nil:
		return 0
	case f.Reason == fault.NodeDown:
		return 1
	case f.Reason == fault.PairingFailed && f.Meta["stage"] == "":
		return 2
	}
	return 3
}

func silent() *fault.Fault {
	return fault.New(fault.Timeout, "pair", errors.New("the other node did not answer in time"), "see that `tbcluster pair` still waits there, and try again")
}

func interrupted(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return silent()
	}
	return fault.Newf(fault.Interrupted, "", "pairing was interrupted")
}

// notOpen says what a failed connection to the pairing protocol means.
func notOpen(err error) error {
	if fault.Is(err, fault.Protocol) {
		return failed("no code is open there: it was used, has expired, or three wrong tries ended it", "show a new one with `tbcluster pair` on that node")
	}
	return err
}

// joinPatiently makes the exchange, again while another one is under way there.
func (p *Pairer) joinPatiently(ctx context.Context, code string, conn *channel.Conn, way channel.Way) (identity.Member, error) {
	until := time.Now().Add(joinWithin)
	for {
		member, err := p.join(ctx, code, conn)
		if !errors.Is(err, errBusy) || time.Now().After(until) {
			return member, err
		}
		select {
		case <-time.After(busyPause):
		case <-ctx.Done():
			return identity.Member{}, interrupted(ctx)
		}
		peer := conn.Peer()
		if conn, err = p.ch.DialUnpaired(ctx, channel.Pair, way); err != nil {
			return identity.Member{}, notOpen(err)
		}
		if conn.Peer() != peer {
			_ = conn.Close() // nothing was said
			return identity.Member{}, failed("another node answers there than before", "try again")
		}
	}
}

// mayTry refuses a code that was tried three times, or used.
func (p *Pairer) mayTry(code string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.o.Clock.Now()
	for h, t := range p.tried {
		if now.Sub(t.last) > 2*Lifetime {
			delete(p.tried, h)
		}
	}
	switch t := p.tried[sha256.Sum256([]byte(code))]; {
	case t.used:
		return failed("the code is used: this node has paired with it", "show a new one with `tbcluster pair` to let in another node").With("stage", "used")
	case t.n >= MaxTries:
		return failed("the code was tried three times without success", "show a new one with `tbcluster pair` on the other node").With("stage", "tries")
	}
	return nil
}

// note counts a guess that came to nothing, or that the code is used.
func (p *Pairer) note(code string, used bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := sha256.Sum256([]byte(code))
	t := p.tried[h]
	t.last = p.o.Clock.Now()
	if used {
		t.used = true
	} else {
		t.n++
	}
	p.tried[h] = t
}
