package tui

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// requestID is new for each thing a person asks for; a retry of the same one
// keeps it, so that it is done once.
func requestID() string { return rand.Text() }

// askStop asks before it ends an instance or a transfer.
func (m *Model) askStop() tea.Cmd {
	it := m.target()
	id := m.snap.id(it.id)
	if it.kind == transferKind {
		t := m.snap.transfer(it.id)
		m.setForm(&confirm{
			question: "Cancel the copy of " + transferName(m.snap, t) + "?",
			what: []string{
				fmt.Sprintf("%s of %s have arrived; they are kept, and the same copy later goes on from there", sizeText(t.GetDoneBytes()), sizeText(t.GetTotalBytes())),
			},
			verb: "cancel it",
			yes: func(m *Model) tea.Cmd {
				return m.ask("cancelling", func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
					_, err := pb.NewTransferServiceClient(c).Cancel(ctx, &pb.CancelTransferRequest{Id: id})
					return "cancelled; what arrived is kept", err
				})
			},
		})
		return nil
	}
	i := m.snap.instance(it.id)
	var what []string
	for _, r := range i.GetRanks() {
		s := fmt.Sprintf("rank %d (%s) on %s", r.GetIndex(), r.GetRole(), r.GetNodeName())
		if r.GetPid() > 0 {
			s += fmt.Sprintf(", pid %d", r.GetPid())
		}
		what = append(what, s+" ends")
	}
	what = append(what, "answers under way break off, and "+i.GetModel()+" is no longer served by it")
	if i.GetUser() != "" {
		what = append(what, "it was asked for by "+i.GetUser())
	}
	m.setForm(&confirm{
		question: "Stop the instance " + i.GetName() + "?", what: what, verb: "stop it",
		yes: func(m *Model) tea.Cmd {
			name := i.GetName()
			return m.ask("stopping "+name, func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
				_, err := pb.NewInstanceServiceClient(c).Stop(ctx, &pb.StopInstanceRequest{Instance: id})
				return name + " is being stopped", err
			})
		},
	})
	return nil
}

// askRemove asks before it drops a node or the record of an instance.
func (m *Model) askRemove() tea.Cmd {
	it := m.target()
	id := m.snap.id(it.id)
	if it.kind == nodeKind {
		n := m.snap.node[it.id].GetName()
		m.setForm(&confirm{
			question: "Forget the node " + n + "?",
			what:     []string{"it leaves the lists of all nodes; it stays paired and is back as soon as it is heard again", "`tbcluster pair --revoke` puts it out for good"},
			verb:     "forget it",
			yes: func(m *Model) tea.Cmd {
				return m.ask("forgetting "+n, func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
					_, err := pb.NewNodeServiceClient(c).Forget(ctx, &pb.ForgetRequest{Node: id})
					return n + " is forgotten", err
				})
			},
		})
		return nil
	}
	if it.kind == modelKind {
		m.setForm(newRemoveForm(m.snap, it.id))
		return nil
	}
	n := m.snap.instance(it.id).GetName()
	m.setForm(&confirm{
		question: "Remove the record of " + n + "?", what: []string{"its logs and exit status are deleted on all its nodes; nothing of it runs"}, verb: "remove it",
		yes: func(m *Model) tea.Cmd {
			return m.ask("removing "+n, func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
				_, err := pb.NewInstanceServiceClient(c).Stop(ctx, &pb.StopInstanceRequest{Instance: id, Remove: true})
				return n + " is removed", err
			})
		},
	})
	return nil
}

func (m *Model) pause() tea.Cmd {
	t := m.snap.transfer(m.target().id)
	id := m.snap.id(t.GetId())
	if t.GetState() == pb.TransferState_TRANSFER_STATE_PAUSED {
		return m.ask("resuming", func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
			_, err := pb.NewTransferServiceClient(c).Resume(ctx, &pb.ResumeTransferRequest{Id: id})
			return "it goes on", err
		})
	}
	return m.ask("pausing", func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
		_, err := pb.NewTransferServiceClient(c).Pause(ctx, &pb.PauseTransferRequest{Id: id})
		return "paused; space goes on", err
	})
}

func (m *Model) rescan() tea.Cmd {
	return m.ask("looking for cables and models", func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
		l, err := pb.NewLinkServiceClient(c).Rescan(ctx, &pb.RescanRequest{})
		if err != nil {
			return "", err
		}
		s, err := pb.NewModelServiceClient(c).Scan(ctx, &pb.ScanRequest{})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("looked again: %s, %s on this node", count(len(l.GetLinks()), "cable", "cables"), count(len(s.GetModels()), "model", "models")), nil
	})
}

// bench measures a cable; where bytes go over it, it asks first.
func (m *Model) bench() tea.Cmd {
	l := m.snap.link(m.target().id)
	if v := m.snap.rates.now(l.GetId()); v > 0 {
		m.setForm(m.askBench(l, []string{"it carries " + rateText(v) + " now"}))
		return nil
	}
	return m.runBench(l, false)
}

// askBench asks whether a cable that is used is to be measured.
func (m *Model) askBench(l *pb.Link, why []string) *confirm {
	return &confirm{
		question: "Measure the cable " + linkName(l) + " all the same?",
		what:     append(why, "what uses it is slower for about five seconds, and what is measured is what it leaves"),
		verb:     "measure it",
		yes:      func(m *Model) tea.Cmd { return m.runBench(l, true) },
	}
}

func (m *Model) runBench(l *pb.Link, used bool) tea.Cmd {
	conn, id, name := m.conn, m.snap.id(l.GetId()), linkName(l)
	m.flash = flash{"measuring " + name + ": two seconds each way …", moveInk}
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(m.ctx, requestWithin)
		defer cancel()
		r, err := pb.NewLinkServiceClient(conn).Bench(ctx, &pb.BenchRequest{Link: id, EvenIfUsed: used})
		if err != nil {
			f := fault.FromStatus(err)
			if f.Reason == fault.StillRunning && f.Meta["link"] != "" && !used {
				return doneMsg{form: m.askBench(l, []string{clean(cmpOr(f.Why, f.What))})}
			}
			return doneMsg{err: f}
		}
		return doneMsg{text: clean(name + ": " + measuredText(cleanMessage(r).GetLink(), r.GetMeasurement()))}
	}
}

// removeForm deletes one copy of a model: which one is chosen first.
type removeForm struct {
	quiet
	id     string
	copies picker
}

func newRemoveForm(s *snapshot, id string) *removeForm {
	f := &removeForm{id: id, copies: picker{title: "Copies"}}
	f.fill(s)
	return f
}

func (f *removeForm) fill(s *snapshot) {
	var l []option
	for _, c := range s.model[f.id].GetCopies() {
		o := option{id: c.GetNodeId() + "\n" + c.GetPath(), name: s.nodeName(c.GetNodeId()), note: c.GetPath()}
		if s.node[c.GetNodeId()].GetState() != pb.NodeState_NODE_STATE_UP {
			o.why = say(nodeWords, s.node[c.GetNodeId()].GetState()).text
		}
		l = append(l, o)
	}
	f.copies.set(l)
}

func (*removeForm) title() string { return "Delete a copy of a model" }
func (*removeForm) hint() string  { return "↑↓ choose   enter go on   esc leave it" }

func (f *removeForm) hear(m *Model, msg tea.Msg) tea.Cmd {
	if _, ok := msg.(stateChanged); ok && m.snap != nil {
		f.fill(m.snap)
	}
	return nil
}

func (f *removeForm) draw(m *Model, w, h int) []string {
	x := m.snap.model[f.id]
	head := x.GetName() + ", " + sizeText(x.GetSizeBytes()) + ", lies on " + count(len(f.copies.options), "node", "nodes")
	out := []string{"", " " + m.t.put(boldInk, cut(head, w-1)), ""}
	return append(out, indent(f.copies.draw(m.t, w-1, max(min(len(f.copies.options)+2, h-3), 3), true))...)
}

func (f *removeForm) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	switch k.String() {
	case "esc", "q":
		return nil, false
	case "enter":
		o := f.copies.now()
		if o.id == "" || o.why != "" {
			m.flash = flash{"enter: " + cmpOr(o.why, "there is no copy"), lookInk}
			return nil, true
		}
		node, path, _ := strings.Cut(o.id, "\n")
		x := m.snap.model[f.id]
		what := []string{path + " on " + o.name + " is deleted, " + sizeText(x.GetSizeBytes()) + "; what is deleted does not come back"}
		if len(f.copies.options) == 1 {
			what = append(what, "it is the only copy in the cluster")
		}
		id, node := m.snap.id(f.id), m.snap.id(node)
		m.setForm(&confirm{
			question: "Delete " + x.GetName() + " on " + o.name + "?", what: what, verb: "delete it",
			yes: func(m *Model) tea.Cmd {
				return m.ask("deleting", func(ctx context.Context, c grpc.ClientConnInterface) (string, error) {
					_, err := pb.NewModelServiceClient(c).Remove(ctx, &pb.RemoveRequest{Model: id, Node: node})
					return x.GetName() + " is deleted on " + o.name, err
				})
			},
		})
		return nil, true
	}
	f.copies.key(k)
	return nil, true
}
