package tui

import (
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	pb "tbcluster/api/tbcluster/v1"
)

// action is what a key does. One table serves the keys, the line that shows
// them, and the help; an action that does not apply says why.
type action struct {
	keys []string
	// label stands in the line of keys, where it gives way to those of lower
	// rank; without a label it is in the help only.
	label string
	rank  int
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
		{[]string{"enter"}, "open", 1, "open what is chosen as a full page", whyNoOpen, (*Model).openChosen},
		{[]string{"C", "c"}, "copy", 2, "copy a model to another node", whyNoCopy, (*Model).openCopy},
		{[]string{"P"}, "place", 2, "place a model on nodes: start an instance", whyNoPlace, (*Model).openPlace},
		{[]string{"p"}, "pair", 3, "let another machine in, or join one", needAgent, (*Model).openPair},
		{[]string{"b"}, "bench", 5, "measure a cable: each direction for two seconds, and the round trip (asks where it is used)", whyNoBench, (*Model).bench},
		{[]string{"s"}, "stop", 3, "stop an instance, cancel a transfer (asks)", whyNoStop, (*Model).askStop},
		{[]string{" "}, "", 0, "space pauses and resumes a transfer", whyNoPause, (*Model).pause},
		{[]string{"d"}, "remove", 8, "forget a node that is down, remove an instance that ended, delete a copy of a model (asks)", whyNoRemove, (*Model).askRemove},
		{[]string{"r"}, "rescan", 6, "look again for cables and models", needAgent, (*Model).rescan},
		{[]string{"L", "l"}, "log", 7, "the log of an instance, or of this node's agent, on the whole screen; l does it where it does not move", whyNoLog, (*Model).openLog},
		{[]string{"y"}, "clip", 9, "copy to the clipboard: an ID or name, the command of a finding, a whole page", whyNoClip, (*Model).yank},
		{[]string{"Y"}, "", 0, "show the same with nothing beside it, to be marked with the mouse", whyNoClip, (*Model).showBare},
		{[]string{"/"}, "find", 4, "show only what holds a text; esc shows all", whyNoFilter, (*Model).openFilter},
		{[]string{":"}, "command", 8, "any command of tbcluster, tab completes", whyNoCommand, (*Model).openCommand},
		{[]string{"?"}, "keys", 0, "the keys of this place", always, (*Model).openHelp},
		{[]string{"q", "ctrl+c"}, "leave", 0, "leave; the agent and all that runs stay", always, (*Model).leave},
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
	case modelKind:
		switch x := m.snap.model[it.id]; {
		case x == nil:
			return "this model is gone"
		case len(x.GetCopies()) == 0:
			return x.GetName() + " lies nowhere any more"
		}
		return ""
	}
	return "choose a node that is down, an instance that has ended, or a model"
}

func whyNoBench(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	it := m.target()
	if it.kind != linkKind {
		return "choose a cable first, in the drawing (1) or in the list (6)"
	}
	switch l := m.snap.link(it.id); {
	case l == nil:
		return "this cable is gone"
	case l.GetB().GetNodeId() == "":
		return "the machine at the other end has not paired; p pairs it"
	case l.GetState() != pb.LinkState_LINK_STATE_PROVEN:
		return "this cable is " + say(linkWords, l.GetState()).text + "; only one that is proven can be measured"
	}
	return ""
}

func whyNoLog(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	switch it := m.target(); {
	case it.kind == instanceKind:
		return ""
	case it.kind == nodeKind && it.id == m.snap.GetSelfNodeId():
		return ""
	case it.kind == nodeKind:
		return "the log of another node's agent is read there: `tbcluster logs --agent`"
	}
	return "only an instance (2) and this node have a log; 7 has what happened"
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

// keyLine shows the keys of the place: those that do not apply are dim, and
// where there is no room for all, the help has the rest.
func (m *Model) keyLine(w int) string {
	type part struct {
		text string
		rank int
	}
	var parts []part
	for _, a := range actions {
		if a.label == "open" && m.page != nil && m.page.logOf != "" {
			s := "wrap"
			if m.page.wrap {
				s = "unwrap"
			}
			parts = append(parts, part{m.t.put(focusInk, a.keys[0]) + " " + s, a.rank})
			continue
		}
		if a.label == "" || m.page != nil && (a.label == "open" || a.label == "find") {
			continue
		}
		if a.keys[0] == "q" && m.page != nil {
			parts = append(parts, part{m.t.put(focusInk, "esc") + " back", 0})
		}
		label := a.label
		if a.label == "leave" && w >= wideWidth {
			label = "leave (agent stays)"
		}
		s := m.t.put(focusInk, a.keys[0]) + " " + label
		if a.why(m) != "" {
			s = m.t.put(dimInk, a.keys[0]+" "+label)
		}
		parts = append(parts, part{s, a.rank})
	}
	total := func(gap int) int {
		n := 1 + gap*max(len(parts)-1, 0)
		for _, p := range parts {
			n += width(p.text)
		}
		return n
	}
	for total(2) > w && len(parts) > 1 {
		worst := 0
		for i, p := range parts {
			if p.rank >= parts[worst].rank {
				worst = i
			}
		}
		parts = slices.Delete(parts, worst, worst+1)
	}
	gap := "   "
	if total(3) > w {
		gap = "  "
	}
	var texts []string
	for _, p := range parts {
		texts = append(texts, p.text)
	}
	return fill(" "+strings.Join(texts, gap), w)
}
