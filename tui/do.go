package tui

import (
	"context"
	"crypto/rand"
	"fmt"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

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
