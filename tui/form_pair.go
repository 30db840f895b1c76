package tui

import (
	"context"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// pairForm lets another machine in by a code shown here, or joins one by the
// code that it shows.
type pairForm struct {
	row    int // which has the keys: pairShow, pairEnter or pairAs
	code   field
	as     field // local user as whom people of other nodes act here
	asks   bool  // the agent wants to be told who that is
	opened *pb.PairingCode
	events <-chan pairEvent
	cancel context.CancelFunc
	notes  []cell
	busy   bool
	done   bool
}

// The rows of the form.
const (
	pairShow = iota
	pairEnter
	pairAs
)

type pairEvent struct {
	resp *pb.OpenResponse
	err  error
}

// joined is the outcome of joining by a code.
type joined struct {
	peer string
	err  error
}

func (m *Model) openPair() tea.Cmd {
	f := &pairForm{}
	f.as.set(m.o.As)
	m.setForm(f)
	return nil
}

func (*pairForm) title() string { return "Pair with another machine" }

func (f *pairForm) hint() string {
	switch {
	case f.done:
		return "any key closes this"
	case f.opened != nil:
		return "esc withdraws the code"
	case f.busy:
		return "esc leaves it"
	}
	return "↑↓ choose, or type the code   enter go   esc leave it"
}

func (f *pairForm) draw(m *Model, w, h int) []string {
	t := m.t
	out := []string{""}
	add := func(s string) { out = append(out, "  "+s) }
	para := func(i ink, s string) {
		for _, l := range wrap(s, w-4) {
			add(t.put(i, l))
		}
	}
	switch {
	case f.opened != nil && !f.done:
		left := f.opened.GetExpiresAt().AsTime().Sub(m.now)
		para(plainInk, "On the other machine, run:")
		out = append(out, "")
		add("    " + t.put(boldInk, "tbcluster pair "+f.opened.GetCode()))
		out = append(out, "")
		para(plainInk, "or press p there and type the code. It is good once, for "+clockText(left)+" more. Show it to nobody who may not come in.")
		out = append(out, "")
		add(t.put(moveInk, "waiting for the other machine …"))
	case f.done:
	default:
		mark := func(on bool) string {
			if on {
				return t.put(focusInk, "▸ ")
			}
			return "  "
		}
		add(mark(f.row == pairShow) + t.put(boldInk, "Show a code here") + " for the other machine to enter")
		out = append(out, "")
		add(mark(f.row == pairEnter) + t.put(boldInk, "Enter the code") + " that the other machine shows: " + f.code.draw(t, 20))
		out = append(out, "")
		if f.asks {
			add(mark(f.row == pairAs) + t.put(boldInk, "People of the other nodes") + " act here as the user: " + f.as.draw(t, 20))
			out = append(out, "")
		}
		if f.busy {
			add(t.put(moveInk, "under way …"))
		}
	}
	if len(f.notes) > 0 {
		out = append(out, "")
	}
	for _, n := range f.notes {
		para(n.ink, n.text)
	}
	return out
}

func (f *pairForm) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	switch {
	case f.done:
		return nil, false
	case k.Type == tea.KeyEsc:
		return nil, false
	case f.opened != nil || f.busy:
		return nil, true
	}
	switch k.String() {
	case "up", "shift+tab":
		f.row = (f.row + f.rows() - 1) % f.rows()
		return nil, true
	case "down", "tab":
		f.row = (f.row + 1) % f.rows()
		return nil, true
	case "enter":
		switch {
		case f.row == pairAs && f.as.String() == "":
			m.flash = flash{"enter: type the name of a user of this machine first", lookInk}
			return nil, true
		case f.row == pairAs:
			// On with what asked for the name.
			f.row = pairShow
			if f.code.String() != "" {
				f.row = pairEnter
			}
		}
		f.notes = nil
		if f.row == pairShow {
			return f.open(m), true
		}
		if f.code.String() == "" {
			m.flash = flash{"enter: type the code first; it looks like 8388-DMVA-X26S", lookInk}
			return nil, true
		}
		return f.join(m), true
	}
	if f.row == pairAs {
		f.as.key(k)
	} else if f.code.key(k) {
		f.row = pairEnter
	}
	return nil, true
}

// rows is how many rows there are.
func (f *pairForm) rows() int {
	if f.asks {
		return pairAs + 1
	}
	return pairAs
}

// open shows a code until it is used, expires, or the form is closed.
func (f *pairForm) open(m *Model) tea.Cmd {
	ctx, cancel := context.WithCancel(m.ctx)
	events := make(chan pairEvent)
	f.events, f.cancel, f.busy = events, cancel, true
	conn, as := m.conn, f.as.String()
	go func() {
		defer close(events)
		s, err := pb.NewPairingServiceClient(conn).Open(ctx, &pb.OpenRequest{LocalUser: as})
		for {
			var r *pb.OpenResponse
			if err == nil {
				r, err = s.Recv()
			}
			if err == nil {
				r = cleanMessage(r)
			}
			select {
			case events <- pairEvent{r, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return f.listen()
}

func (f *pairForm) listen() tea.Cmd {
	events := f.events
	return func() tea.Msg {
		ev, ok := <-events
		if !ok {
			return nil
		}
		return formMsg{f, ev}
	}
}

func (f *pairForm) join(m *Model) tea.Cmd {
	f.busy = true
	// Pairing looks for the other machine first, which takes its time.
	ctx, cancel := context.WithTimeout(m.ctx, time.Minute)
	f.cancel = cancel
	conn, code, as := m.conn, f.code.String(), f.as.String()
	return func() tea.Msg {
		defer cancel()
		r, err := pb.NewPairingServiceClient(conn).Join(ctx, &pb.JoinRequest{Code: code, LocalUser: as})
		return formMsg{f, joined{clean(r.GetPeer().GetName()), err}}
	}
}

func (f *pairForm) hear(m *Model, msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case pairEvent:
		f.busy = false
		if msg.err != nil {
			if f.done {
				return nil
			}
			f.opened = nil
			f.trouble(msg.err)
			return nil
		}
		switch ev := msg.resp.GetEvent().(type) {
		case *pb.OpenResponse_Code:
			f.opened = ev.Code
		case *pb.OpenResponse_WrongTryFrom:
			f.notes = append(f.notes, cell{"▲ a wrong code was tried from " + ev.WrongTryFrom, lookInk})
		case *pb.OpenResponse_Joined:
			f.done, f.opened = true, nil
			f.notes = append(f.notes, cell{"● " + ev.Joined.GetName() + " has joined. Its node ID is " + ev.Joined.GetNodeId(), boldInk})
		}
		return f.listen()
	case joined:
		f.busy = false
		if msg.err != nil {
			f.trouble(msg.err)
			return nil
		}
		f.done = true
		f.notes = []cell{{"● paired with " + msg.peer, boldInk}}
	}
	return nil
}

func (f *pairForm) trouble(err error) {
	raw := fault.FromStatus(err)
	x := cleanFault(raw)
	if raw.Meta["field"] == "local_user" && !f.asks {
		f.asks, f.row = true, pairAs
		f.notes = append(f.notes, cell{"▲ " + x.What, lookInk}, cell{"to do: type the name of the user as whom they are to act, and enter (root if you mean it)", boldInk})
		return
	}
	f.notes = append(f.notes, cell{"✕ " + x.Error(), badInk})
	if x.Fix != "" {
		f.notes = append(f.notes, cell{"to do: " + x.Fix, boldInk})
	}
}

// close withdraws a code that is open: the agent ends it with the call.
func (f *pairForm) close() {
	if f.cancel != nil {
		f.cancel()
	}
}
