package pair

import (
	"context"
	"errors"
	"io"
	"os"
	"syscall"

	"tbcluster/api/fault"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

var errBusy = errors.New("another exchange is under way")

// join makes one exchange and closes the connection.
func (p *Pairer) join(ctx context.Context, code string, conn *channel.Conn) (identity.Member, error) {
	defer func() { _ = conn.Close() }() // what was to be said has been
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	w := &wire{rw: conn, within: p.times.joiner}
	member, err := p.joinOver(w, code, conn)
	switch {
	case err == nil || fault.As(err) != nil || errors.Is(err, errBusy):
		return member, err
	case ctx.Err() != nil:
		return member, interrupted(ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return member, silent().With("stage", "exchange")
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		err = errors.New("it closed the connection")
	}
	return member, fault.New(fault.PairingFailed, "pairing failed", err, "try again; if it stays so, bring both nodes to the same version of tbcluster").With("stage", "exchange")
}

func (p *Pairer) joinOver(w *wire, code string, conn *channel.Conn) (member identity.Member, err error) {
	e, err := newExchange(code, joinerRole, p.key.Public(), conn.PeerKey(), conn.ConnectionState())
	if err != nil {
		return member, err
	}
	if err := w.write(frame{Number: e.number, Point: e.x}); err != nil {
		return member, err
	}
	answer, err := w.next()
	if err != nil {
		return member, err
	}
	if answer.Refuse != "" {
		return member, refused(answer)
	}
	if err := e.take(answer.Point); err != nil {
		return member, err
	}
	mac, err := e.mac(joinerRole)
	if err != nil {
		return member, err
	}
	// From here on somebody without the code has had his guess.
	confirmed := false
	defer func() {
		if !confirmed {
			p.note(code, false)
		}
	}()
	if err := w.write(frame{MAC: mac}); err != nil {
		return member, err
	}
	confirm, err := w.next()
	if err != nil {
		return member, err
	}
	if confirm.Refuse != "" {
		return member, refused(confirm)
	}
	if ok, err := e.confirms(confirm.MAC); err != nil || !ok {
		return member, errors.Join(err, failed("the node there does not know the code, or somebody is in between",
			"type the code of the node that shows it; if it is right, do not trust this network").With("stage", "wrong"))
	}
	confirmed = true
	p.note(code, true)
	w.confirmed = true
	return p.enter(w, conn)
}

// enter goes into the cluster of the node that is now known to be the right one.
func (p *Pairer) enter(w *wire, conn *channel.Conn) (member identity.Member, err error) {
	cluster, _ := p.store.Cluster()
	if err := w.write(frame{Name: p.store.Self().Name, Cluster: cluster, Alone: p.store.Alone()}); err != nil {
		return member, err
	}
	entry, err := w.next()
	if err != nil {
		return member, err
	}
	if entry.Refuse != "" {
		return member, refused(entry)
	}
	records, err := identity.ParseRecords(entry.Records)
	if err == nil {
		err = p.store.Adopt(records, conn.PeerKey())
	}
	if err != nil {
		// It is the error that counts, not whether the other one heard of it.
		_ = w.write(frame{Refuse: refusedFault, Text: err.Error()})
		return member, err
	}
	if err := w.write(frame{Done: true}); err != nil {
		p.o.Log.Warn("paired, but the other node did not hear so", "error", err)
	}
	member, ok := p.store.Member(conn.Peer())
	if !ok {
		return member, errors.New("the other node is not in its own cluster")
	}
	return member, nil
}

// refused says what a refusal means.
func refused(f frame) error {
	again := "show a new one with `tbcluster pair` on that node"
	var err *fault.Fault
	switch f.Refuse {
	case refusedBusy:
		return errBusy
	case refusedWrong:
		err = failed("the code is wrong", "type it again as the other node shows it: NNNN-XXXX-XXXX; three wrong tries end it")
	case refusedOther:
		err = failed("that node shows another code", "type the code that it shows now")
	case refusedUsed:
		err = failed("the code is used: another node has paired with it", again)
	case refusedEnded:
		err = failed("three wrong tries have ended the code", again)
	case refusedExpiry:
		err = failed("the code has expired", again)
	case refusedSlow:
		err = fault.New(fault.Timeout, "pair", errors.New("this node took too long to answer, and the other one has given up"), "try again when this machine has less to do; if the code is used then, "+again)
	case refusedCluster:
		err = fault.Newf(fault.NodeInUse,
			"run `tbcluster pair` here and type its code at the other node; to bring this node over instead, run `tbcluster pair --new-identity` here first",
			"enter the cluster of the other node")
		err.Why = "this node is in another cluster with others"
	case refusedRevoked:
		err = failed("this node was put out of that cluster, which is for good", "run `tbcluster pair --new-identity` here and pair again")
	default:
		err = failed("the other node refused: "+clean(f.Text), "see what it says")
	}
	return err.With("stage", string(f.Refuse))
}

// clean bounds what the other side says, and takes out what would move a cursor.
func clean(s string) string {
	out := make([]rune, 0, 200)
	for _, r := range s {
		if len(out) == cap(out) {
			break
		}
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			r = ' '
		}
		out = append(out, r)
	}
	return string(out)
}
