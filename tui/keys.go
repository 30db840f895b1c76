package tui

import (
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	pb "tbcluster/api/tbcluster/v1"
)

// action is what a key does. One table serves the keys, the line that shows
// them, and the help; an action that does not apply says why.
type action struct {
	keys  []string
	label string // in the line of keys; empty: only in the help
	help  string
	// why says why it does not apply here; empty when it does.
	why func(*Model) string
	do  func(*Model) tea.Cmd
}

func always(*Model) string { return "" }

// needAgent is what every action needs that asks the agent.
func needAgent(m *Model) string {
	switch {
	case m.snap == nil:
		return "the agent has not answered yet"
	case !m.live:
		return "the agent does not answer; what is shown is old"
	}
	return ""
}

// actions in the order in which they are shown.
var actions []action

func init() {
	// Filled here since the help, which an action opens, reads the table.
	actions = []action{
		{[]string{"enter"}, "open", "open what is chosen as a full page", whyNoOpen, (*Model).openChosen},
		{[]string{"C"}, "copy", "copy a model to another node", whyNoCopy, (*Model).openCopy},
		{[]string{"P"}, "place", "place a model on nodes: start an instance", whyNoPlace, (*Model).openPlace},
		{[]string{"p"}, "pair", "let another machine in, or join one", needAgent, (*Model).openPair},
		{[]string{"s"}, "stop", "stop an instance, cancel a transfer (asks)", whyNoStop, (*Model).askStop},
		{[]string{" "}, "", "space pauses and resumes a transfer", whyNoPause, (*Model).pause},
		{[]string{"d"}, "", "forget a node that is down, remove an instance that ended (asks)", whyNoRemove, (*Model).askRemove},
		{[]string{"r"}, "", "look again for cables and models", needAgent, (*Model).rescan},
		{[]string{"/"}, "find", "show only what holds a text; esc shows all", whyNoFilter, (*Model).openFilter},
		{[]string{":"}, "", "any command of tbcluster, tab completes", whyNoCommand, (*Model).openCommand},
		{[]string{"?"}, "keys", "the keys of this place", always, (*Model).openHelp},
		{[]string{"q", "ctrl+c"}, "leave", "leave; the agent and all that runs stay", always, (*Model).leave},
	}
}

// target is what an action acts on: the page that is open, else what the
// cursor is on.
func (m *Model) target() item {
	if m.page != nil {
		return m.page.item
	}
	return m.chosenItem()
}

func whyNoOpen(m *Model) string {
	switch it := m.chosenItem(); {
	case m.page != nil:
		return "this page is open already; esc goes back"
	case it.kind == noKind:
		return "nothing is chosen here"
	case it.kind == eventKind:
		return "a line of history has nothing more to show"
	}
	return ""
}

func whyNoCopy(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	switch {
	case len(m.snap.GetModels()) == 0:
		return "no node has a model yet"
	case len(m.snap.GetNodes()) < 2:
		return "there is no other node to copy to; p pairs one"
	}
	return ""
}

func whyNoPlace(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	if len(m.snap.GetModels()) == 0 {
		return "no node has a model yet"
	}
	return ""
}

func whyNoStop(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	it := m.target()
	switch it.kind {
	case instanceKind:
		switch i := m.snap.instance(it.id); {
		case i == nil:
			return "this instance is gone"
		case isEnded(i.GetState()):
			return i.GetName() + " has ended already; d removes its record"
		case i.GetState() == pb.InstanceState_INSTANCE_STATE_STOPPING:
			return i.GetName() + " is being stopped"
		}
		return ""
	case transferKind:
		switch t := m.snap.transfer(it.id); {
		case t == nil:
			return "this transfer is gone"
		case isOver(t.GetState()):
			return "this transfer is over"
		}
		return ""
	}
	return "choose an instance (2) or a transfer (3) first"
}

func whyNoPause(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	it := m.target()
	if it.kind != transferKind {
		return "choose a transfer (3) first"
	}
	switch m.snap.transfer(it.id).GetState() {
	case pb.TransferState_TRANSFER_STATE_COPYING, pb.TransferState_TRANSFER_STATE_PAUSED:
		return ""
	}
	return "only a transfer that is copying or paused can be paused or resumed"
}

func whyNoRemove(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	it := m.target()
	switch it.kind {
	case nodeKind:
		switch n := m.snap.node[it.id]; {
		case n == nil:
			return "this node is gone"
		case n.GetState() != pb.NodeState_NODE_STATE_DOWN:
			return n.GetName() + " is not down; only a node that is down can be forgotten"
		}
		return ""
	case instanceKind:
		switch i := m.snap.instance(it.id); {
		case i == nil:
			return "this instance is gone"
		case !isEnded(i.GetState()):
			return i.GetName() + " still runs; s stops it"
		}
		return ""
	}
	return "choose a node that is down or an instance that has ended"
}

func whyNoFilter(m *Model) string {
	if m.page != nil {
		return "there is nothing to look through on this page"
	}
	return ""
}

func whyNoCommand(m *Model) string {
	if m.o.Command == nil {
		return "commands cannot be run from here; use `tbcluster` in a shell"
	}
	return ""
}

// keyLine shows the keys of the place: those that do not apply are dim.
func (m *Model) keyLine(w int) string {
	var parts []string
	used := 1
	for _, a := range actions {
		if a.label == "" || (m.page != nil && a.label == "open") || (m.page != nil && a.label == "find") {
			continue
		}
		key := a.keys[0]
		if key == "q" && m.page != nil {
			parts = append(parts, m.t.put(focusInk, "esc")+" back")
			used += 10
		}
		label := a.label
		if a.label == "leave" && w >= 96 {
			label = "leave (agent stays)"
		}
		s := m.t.put(focusInk, key) + " " + label
		if a.why(m) != "" {
			s = m.t.put(dimInk, key+" "+label)
		}
		if used+width(s) > w {
			break
		}
		parts = append(parts, s)
		used += width(s) + 3
	}
	gap := "   "
	if used > w {
		gap = "  "
	}
	return fill(" "+strings.Join(parts, gap), w)
}
