package pair

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"tbcluster/api/fault"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

// maxWaiting connections may wait with their first message; the oldest makes
// room.
const maxWaiting = 8

// invitation is one open code at the inviting side.
type invitation struct {
	p    *Pairer
	code string
	role identity.Role

	mu      sync.Mutex
	events  chan Event
	tries   int
	busy    bool
	over    refusal // why it takes no more; "" while it does
	done    bool    // the last event was sent
	cleanup func()
	waiting []*channel.Conn
}

// closed has f called when the invitation takes no more.
func (i *invitation) closed(f func()) {
	i.mu.Lock()
	over := i.over != ""
	if !over {
		i.cleanup = f
	}
	i.mu.Unlock()
	if over {
		f()
	}
}

// shut takes no more exchanges from now on, because of why. It says whether
// that is news.
func (i *invitation) shut(why refusal) bool {
	i.mu.Lock()
	news, f := i.over == "", i.cleanup
	if news {
		i.over, i.cleanup = why, nil
	}
	i.mu.Unlock()
	if news && f != nil {
		f()
	}
	i.p.mu.Lock()
	if i.p.open == i {
		i.p.open = nil
	}
	i.p.mu.Unlock()
	return news
}

// end shuts the invitation with its last event, unless it is used already.
func (i *invitation) end(e Event, why refusal) {
	if i.shut(why) {
		i.last(e)
	}
}

func (i *invitation) last(e Event) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.done {
		return
	}
	i.done = true
	i.events <- e
	close(i.events)
}

// begin takes the one place for an exchange.
func (i *invitation) begin() refusal {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.over != "":
		return i.over
	case i.busy:
		return refusedBusy
	}
	i.busy = true
	return ""
}

func (i *invitation) finish() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.busy = false
}

// wrong notes a wrong guess, and says what the guesser is told.
func (i *invitation) wrong(from string) refusal {
	i.mu.Lock()
	i.tries++
	last := i.tries >= MaxTries
	if !i.done {
		i.events <- Event{WrongTryFrom: from} // there is room: MaxTries and two
	}
	i.mu.Unlock()
	if last {
		i.end(Event{Ended: failed("three wrong tries have ended the code", "somebody may be guessing; open a new one with `tbcluster pair`")}, refusedEnded)
		return refusedEnded
	}
	return refusedWrong
}

// wait has conn wait for its first message, in the place of the oldest if need be.
func (i *invitation) wait(conn *channel.Conn) (over func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.waiting) >= maxWaiting {
		oldest := i.waiting[0]
		i.waiting = i.waiting[1:]
		// Closing in an orderly way could wait for it.
		go func() { _ = oldest.Close() }()
	}
	i.waiting = append(i.waiting, conn)
	return func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		for n, c := range i.waiting {
			if c == conn {
				i.waiting = append(i.waiting[:n], i.waiting[n+1:]...)
				return
			}
		}
	}
}

// serve is one connection to the inviting side.
func (i *invitation) serve(conn *channel.Conn) {
	err := i.exchange(conn)
	if err != nil {
		i.p.o.Log.Info("pairing exchange ended", "from", conn.RemoteAddr(), "error", err)
	}
}

func (i *invitation) exchange(conn *channel.Conn) error {
	over := i.wait(conn)
	w := &wire{rw: conn, within: i.p.times.hello}
	hello, err := w.next()
	over()
	if err != nil {
		return err
	}
	w.within = i.p.times.answer
	if hello.Number != Number(i.p.key.ID()) {
		return w.write(frame{Refuse: refusedOther})
	}
	e, err := newExchange(i.code, inviterRole, conn.PeerKey(), i.p.key.Public(), conn.ConnectionState())
	if err != nil {
		return err
	}
	if err := e.take(hello.Point); err != nil {
		return err
	}
	if why := i.begin(); why != "" {
		return w.write(frame{Refuse: why})
	}
	defer i.finish()
	if err := w.write(frame{Point: e.y}); err != nil {
		return err
	}
	confirm, err := w.next()
	if err != nil {
		return i.slow(w, err) // no guess: without our MAC its point says nothing
	}
	ok, err := e.confirms(confirm.MAC)
	if err != nil {
		return err
	}
	if !ok {
		return w.write(frame{Refuse: i.wrong(conn.RemoteAddr().String())})
	}
	// One use, whatever comes of it.
	if !i.shut(refusedUsed) {
		i.mu.Lock()
		why := i.over
		i.mu.Unlock()
		return w.write(frame{Refuse: why})
	}
	member, err := i.letIn(conn, w, e)
	if err != nil {
		i.last(Event{Ended: err})
		return err
	}
	i.last(Event{Joined: &member})
	return nil
}

// slow tells the other side that it was given up, if err is that it did not
// answer in time. It would see a connection that ends otherwise, for whatever
// reason.
func (i *invitation) slow(w *wire, err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errors.Join(err, w.write(frame{Refuse: refusedSlow}))
	}
	return err
}

// letIn introduces the node that has shown that it knows the code.
func (i *invitation) letIn(conn *channel.Conn, w *wire, e *exchange) (member identity.Member, err error) {
	broken := func(err error) error {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fault.New(fault.Timeout, "pair", errors.New("the other node did not answer in time"), "open a new code with `tbcluster pair` and try again")
		}
		return failed(fmt.Sprintf("the other node went away in between (%v)", err), "open a new code with `tbcluster pair` and try again")
	}
	mac, err := e.mac(inviterRole)
	if err != nil {
		return member, broken(err)
	}
	if err := w.write(frame{MAC: mac}); err != nil {
		return member, broken(err)
	}
	w.confirmed, w.within = true, i.p.times.joiner
	about, err := w.next()
	if err != nil {
		return member, broken(i.slow(w, err))
	}
	if cluster, _ := i.p.store.Cluster(); !about.Alone && about.Cluster != cluster {
		f := failed("the other node is in another cluster with others", "run `tbcluster pair` there and type its code here, or take it out of that cluster with `tbcluster pair --new-identity` there")
		if err := w.write(frame{Refuse: refusedCluster}); err != nil {
			i.p.o.Log.Info("the other node did not hear why it was refused", "error", err)
		}
		return member, f
	}
	member, err = i.p.store.Introduce(conn.PeerKey(), about.Name, i.role)
	if err != nil {
		why := refusedFault
		if m, ok := i.p.store.Member(conn.Peer()); ok && m.Revoked {
			why = refusedRevoked
		}
		if werr := w.write(frame{Refuse: why, Text: err.Error()}); werr != nil {
			i.p.o.Log.Info("the other node did not hear why it was refused", "error", werr)
		}
		return member, err
	}
	if err := w.write(frame{Records: i.p.store.Export()}); err != nil {
		return member, broken(err)
	}
	done, err := w.next()
	switch {
	case err != nil:
		return member, broken(err)
	case done.Refuse != "":
		return member, failed(fmt.Sprintf("%s could not enter the cluster: %s", member.Name, clean(done.Text)), "put that right there and pair again")
	}
	return member, nil
}
