package tui

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/x/ansi"
)

// clipMost is the longest text that is sent to a clipboard: xterm takes 100,000
// characters of base64.
const clipMost = 74_000

// clipText is what is worth taking along of what is chosen, and how to call it.
func (m *Model) clipText() (text, what string) {
	it := m.target()
	if m.page != nil && m.page.whole {
		return strings.Join(m.page.log, "\n") + "\n", "this log"
	}
	if m.page != nil {
		name, lines := m.facts(noCodes, it, 100)
		lines = append([]string{kindNames[it.kind] + " " + name}, lines...)
		if len(m.page.log) > 0 {
			lines = append(append(lines, ""), m.page.log...)
		}
		return strings.Join(lines, "\n") + "\n", "this page"
	}
	s := m.snap
	switch it.kind {
	case nodeKind:
		return it.id, "the ID of " + cut(s.nodeName(it.id), 20)
	case linkKind:
		return it.id, "the ID of the cable"
	case instanceKind:
		return s.instance(it.id).GetName(), "the name of the instance"
	case transferKind:
		return s.transfer(it.id).GetDestination(), "the destination"
	case modelKind:
		return s.model[it.id].GetName(), "the name of the model"
	case findingKind:
		f := s.finding(it.id)
		if cs := quoted(f.GetFix()); len(cs) > 0 {
			return strings.Join(cs, "\n"), map[bool]string{true: "the command", false: "the commands"}[len(cs) == 1]
		}
		return f.GetTitle() + ". " + f.GetFix(), "what to do"
	case eventKind:
		for _, e := range s.log {
			if e.id() == it.id {
				return e.at.Format("15:04:05") + "  " + e.text, "the line"
			}
		}
	}
	return "", ""
}

// quoted are the commands in a text: what stands between backquotes.
func quoted(s string) (out []string) {
	parts := strings.Split(s, "`")
	for i := 1; i+1 < len(parts); i += 2 {
		if strings.Contains(parts[i], " ") {
			out = append(out, parts[i])
		}
	}
	return out
}

func whyNoClip(m *Model) string {
	if m.snap == nil {
		return "the agent has not answered yet"
	}
	if m.target().kind == noKind {
		return "nothing is chosen here"
	}
	return ""
}

// whyNoClipboard tells of terminals that do not take a text for the clipboard
// (OSC 52), as far as they can be told from each other. Those that may but were
// told not to cannot be: Y is for them.
func whyNoClipboard(getenv func(string) string) string {
	switch {
	case getenv("TERM") == "linux" || getenv("TERM") == "dumb":
		return "this terminal has no clipboard"
	case getenv("TERM_PROGRAM") == "Apple_Terminal":
		return "Terminal of macOS takes no text for the clipboard"
	case getenv("STY") != "":
		return "screen hands on no text for the clipboard"
	}
	return ""
}

// yank puts what is chosen into the clipboard of the person's own machine, over
// ssh too.
func (m *Model) yank() tea.Cmd {
	text, what := m.clipText()
	return m.toClipboard(text, what)
}

func (m *Model) toClipboard(text, what string) tea.Cmd {
	why := whyNoClipboard(m.getenv)
	if len(text) > clipMost {
		why = "it is too long for a clipboard"
	}
	if why != "" || m.out == nil {
		m.setForm(&bareText{why: cmpOr(why, "there is no terminal"), text: text})
		return nil
	}
	out := m.out
	return func() tea.Msg {
		if _, err := io.WriteString(out, ansi.SetSystemClipboard(text)); err != nil {
			return doneMsg{err: err}
		}
		return doneMsg{text: "copied " + what + " to the clipboard; not there? Y shows it"}
	}
}

func (m *Model) showBare() tea.Cmd {
	text, _ := m.clipText()
	b := &bareText{text: text}
	if p := m.page; p != nil && p.whole && len(p.log) > 0 {
		// It goes on where the log was.
		if p.follow {
			b.top = max(len(b.lines(m.w))-(m.h-2), 0)
		} else if n := p.topLine(m); n > 0 {
			b.top = len((&bareText{text: strings.Join(p.log[:n], "\n") + "\n"}).lines(m.w))
		}
	}
	m.setForm(b)
	return nil
}

// bareText is a text with nothing beside it, to be marked with the mouse.
type bareText struct {
	quiet
	text, why string
	top       int
}

func (*bareText) title() string { return "" }

func (b *bareText) hint() string {
	s := "mark it with the mouse   ↑↓ scroll   esc back"
	if b.why != "" {
		s = b.why + ": " + s
	}
	return s
}

func (b *bareText) lines(w int) (out []string) {
	for _, l := range strings.Split(strings.TrimRight(b.text, "\n"), "\n") {
		if l == "" {
			out = append(out, "")
			continue
		}
		// Cut hard: a line that was wrapped at words would be pasted as two.
		out = append(out, strings.Split(ansi.Hardwrap(l, max(w, 1), true), "\n")...)
	}
	return out
}

func (b *bareText) draw(_ *Model, w, h int) []string {
	l := b.lines(w)
	from := max(min(b.top, len(l)-h), 0)
	l = l[min(from, len(l)):]
	return l[:min(len(l), h)]
}

func (b *bareText) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	h := m.h - 2
	most := max(len(b.lines(m.w))-h, 0)
	switch k.String() {
	case "up", "k":
		b.top--
	case "down", "j":
		b.top++
	case "pgup":
		b.top -= h
	case "pgdown", " ":
		b.top += h
	case "esc", "q", "enter", "Y":
		return nil, false
	}
	b.top = max(min(b.top, most), 0)
	return nil, true
}

// screenWriter keeps what is written beside the screen from coming in the
// middle of a frame, each of which is one write. It is the terminal itself for
// whoever asks for its size.
type screenWriter struct {
	*os.File
	mu sync.Mutex
}

// Write implements io.Writer.
func (s *screenWriter) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.File.Write(p)
	if err != nil {
		err = fmt.Errorf("write to the terminal: %w", err)
	}
	return n, err
}

// WriteString implements io.StringWriter.
func (s *screenWriter) WriteString(p string) (int, error) { return s.Write([]byte(p)) }
