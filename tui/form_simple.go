package tui

import (
	"fmt"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"tbcluster/api/fault"
)

// quiet is the parts of a form that most do not need.
type quiet struct{}

func (quiet) hear(*Model, tea.Msg) tea.Cmd { return nil }
func (quiet) close()                       {}

// trouble shows an error: what, where, why, and what to do.
type trouble struct {
	quiet
	f *fault.Fault
}

func newTrouble(err error) *trouble { return &trouble{f: cleanFault(fault.FromStatus(err))} }

// cleanFault makes the words of an error fit for the terminal.
func cleanFault(f *fault.Fault) *fault.Fault {
	return &fault.Fault{Reason: f.Reason, What: clean(f.What), Where: clean(f.Where), Why: clean(f.Why), Fix: clean(f.Fix)}
}

func (*trouble) title() string { return "That did not work" }
func (*trouble) hint() string  { return "any key closes this" }

func (x *trouble) draw(m *Model, w, h int) []string {
	return append([]string{""}, indent(faultLines(m.t, x.f, w))...)
}

// faultLines is an error on w cells.
func faultLines(t theme, f *fault.Fault, w int) []string {
	p := &sheet{theme: t, w: w}
	p.fact("✕ what", badInk, f.What)
	p.fact("where", plainInk, f.Where)
	p.fact("why", plainInk, f.Why)
	p.fact("to do", boldInk, f.Fix)
	return p.rows
}

func (*trouble) key(*Model, tea.KeyMsg) (tea.Cmd, bool) { return nil, false }

// confirm asks before something ends, and says what ends.
type confirm struct {
	quiet
	question string
	what     []string
	verb     string // "stop it"
	yes      func(*Model) tea.Cmd
}

func (*confirm) title() string  { return "Are you sure?" }
func (c *confirm) hint() string { return "y " + c.verb + "   n leave it as it is" }

func (c *confirm) draw(m *Model, w, h int) []string {
	out := []string{"", " " + m.t.put(boldInk, cut(c.question, w-1)), ""}
	for _, s := range c.what {
		for i, l := range wrap(s, w-4) {
			mark := "• "
			if i > 0 {
				mark = "  "
			}
			out = append(out, " "+mark+l)
		}
	}
	return append(out, "", " "+m.t.put(focusInk, "y")+" "+c.verb+"     "+m.t.put(focusInk, "n")+" leave it as it is")
}

func (c *confirm) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	switch k.String() {
	case "y", "Y":
		// Whether it still applies is decided by the agent, which knows.
		return c.yes(m), false
	case "n", "N", "esc", "q":
		return nil, false
	}
	return nil, true
}

// scroller shows lines that may be more than fit.
type scroller struct {
	quiet
	name  string
	lines func(m *Model, w int) []string
	top   int
}

func (s *scroller) title() string { return s.name }
func (*scroller) hint() string    { return "↑↓ scroll   esc back" }

func (s *scroller) draw(m *Model, w, h int) []string {
	l := s.lines(m, w)
	from := max(min(s.top, len(l)-h), 0)
	return indent(l[min(from, len(l)):])
}

func (s *scroller) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	h := m.h - 4
	most := max(len(s.lines(m, m.w-4))-h, 0)
	switch k.String() {
	case "up", "k":
		s.top--
	case "down", "j":
		s.top++
	case "pgup":
		s.top -= h
	case "pgdown", " ":
		s.top += h
	case "esc", "q", "enter", "?":
		return nil, false
	}
	s.top = max(min(s.top, most), 0)
	return nil, true
}

func (m *Model) openHelp() tea.Cmd {
	where := panels[m.focus].title
	if m.page != nil {
		where = "this " + kindNames[m.page.item.kind]
	}
	m.setForm(&scroller{name: "Keys: " + where, lines: func(m *Model, w int) []string {
		t := m.t
		var out []string
		add := func(key, what, why string) {
			i := plainInk
			if why != "" {
				i, what = dimInk, what+" (not now: "+why+")"
			}
			for n, l := range wrap(what, max(w-11, 8)) {
				if n > 0 {
					key = ""
				}
				k := t.put(focusInk, fill(key, 10))
				if why != "" {
					k = t.put(dimInk, fill(key, 10))
				}
				out = append(out, k+" "+t.put(i, l))
			}
		}
		for _, a := range actions {
			if a.label == "open" && m.page != nil && m.page.logOf != "" {
				add("enter", "whole lines of the log, or a row for each", "")
				continue
			}
			k := strings.Join(a.keys, ", ")
			if k == " " {
				k = "space"
			}
			add(k, strings.TrimPrefix(a.help, "space "), a.why(m))
		}
		out = append(out, "")
		if m.page == nil {
			add("1–7, tab", "another box: "+boxNames(), "")
			add("↑↓←→ hjkl", "move; in the drawing of the cluster to the next node or cable", "")
			add("g, G", "first, last", "")
		} else {
			add("↑↓, g, G", "scroll; at the end new lines are followed", "")
			add("tab", "between what is known and the log", "")
			add("esc", "back to where you were", "")
		}
		out = append(out, "")
		for _, l := range wrap("● fine or there   ◐ under way   ▶ copying   ‖ paused   ○ not yet or ended   · not there   i worth knowing   ▲ look at it   ✕ broken   ═ a cable that carries packets   ╌ one that does not   40 ×2: two of 40 Gb/s each", w) {
			out = append(out, t.put(dimInk, l))
		}
		return out
	}})
	return nil
}

func boxNames() string {
	var l []string
	for i := 1; i <= panelCount; i++ {
		l = append(l, fmt.Sprintf("%d %s", i, panels[i].title))
	}
	return strings.Join(l, ", ")
}
