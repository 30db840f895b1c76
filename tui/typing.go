package tui

import (
	"context"
	"fmt"
	"strings"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/x/ansi"

	"tbcluster/api/fault"
)

func (y *typing) line(t theme, w int) string {
	s := " " + t.put(focusInk, y.prompt) + y.draw(t, max(w/2, w-40))
	if len(y.hints) > 0 {
		s += "  " + t.put(dimInk, strings.Join(y.hints, " "))
	}
	return cut(s, w)
}

func (m *Model) typeKey(k tea.KeyMsg) tea.Cmd {
	y := m.typing
	switch k.Type {
	case tea.KeyEnter:
		m.typing = nil
		return y.done(m, y.String())
	case tea.KeyEsc:
		m.typing = nil
		if y.cancel != nil {
			y.cancel(m)
		}
		return nil
	case tea.KeyTab:
		if y.complete != nil {
			return y.complete(m, y.String())
		}
		return nil
	}
	if y.key(k) {
		y.hints = nil
		if y.change != nil {
			return y.change(m, y.String())
		}
	}
	return nil
}

// completedMsg is what may stand at the end of what was typed.
type completedMsg struct {
	typing     *typing
	text       string
	candidates []string
}

// finish puts in what all the candidates for the last word have in common.
func (y *typing) finish(candidates []string) {
	y.hints = nil
	s := y.String()
	cutAt := strings.LastIndexByte(s, ' ') + 1
	var fit []string
	for _, c := range candidates {
		// Some complete to all there is and leave it to the shell to choose.
		if c = clean(c); strings.HasPrefix(c, s[cutAt:]) {
			fit = append(fit, c)
		}
	}
	candidates = fit
	if len(candidates) == 0 {
		y.hints = []string{"nothing fits"}
		return
	}
	common := candidates[0]
	for _, c := range candidates[1:] {
		for !strings.HasPrefix(c, common) {
			common = common[:len(common)-1]
		}
	}
	common = strings.ToValidUTF8(common, "")
	if len(common) > len(s)-cutAt || len(candidates) == 1 {
		s = s[:cutAt] + common
		if len(candidates) == 1 {
			s += " "
		}
		y.set(s)
	}
	if len(candidates) > 1 {
		y.hints = candidates
	}
}

func (m *Model) openFilter() tea.Cmd {
	p, before := m.focus, m.filter[m.focus]
	y := &typing{prompt: "find in " + panels[p].title + ": "}
	y.set(before)
	y.change = func(m *Model, s string) tea.Cmd { m.filter[p] = s; return nil }
	y.done = func(m *Model, s string) tea.Cmd { m.filter[p] = s; return nil }
	y.cancel = func(m *Model) { m.filter[p] = before }
	m.typing = y
	return nil
}

func (m *Model) openCommand() tea.Cmd {
	y := &typing{prompt: ":"}
	y.done = func(m *Model, s string) tea.Cmd { return m.runCommand(s) }
	y.complete = func(m *Model, s string) tea.Cmd {
		complete := m.o.Complete
		if complete == nil {
			return nil
		}
		args, err := words(s)
		if err != nil {
			return nil
		}
		if s == "" || strings.HasSuffix(s, " ") {
			args = append(args, "")
		}
		return func() tea.Msg {
			ctx, cancel := context.WithTimeout(m.ctx, askWithin)
			defer cancel()
			return completedMsg{y, s, complete(ctx, args)}
		}
	}
	m.typing = y
	return nil
}

// words splits a line as a shell would, with quotes and backslashes only.
func words(s string) (out []string, err error) {
	var b strings.Builder
	in, quote, escaped := false, rune(0), false
	for _, r := range s {
		switch {
		case escaped:
			b.WriteRune(r)
			escaped = false
		case r == '\\' && quote != '\'':
			escaped, in = true, true
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			b.WriteRune(r)
		case r == '\'' || r == '"':
			quote, in = r, true
		case r == ' ':
			if in {
				out = append(out, b.String())
				b.Reset()
				in = false
			}
		default:
			b.WriteRune(r)
			in = true
		}
	}
	switch {
	case quote != 0:
		return nil, fmt.Errorf("a %c is not closed", quote)
	case escaped:
		return nil, fmt.Errorf("nothing follows the last backslash")
	}
	if in {
		out = append(out, b.String())
	}
	return out, nil
}

// output shows what a command prints while it runs.
type output struct {
	name   string
	lines  []string
	part   string // of a line that has no end yet
	over   bool
	top    int
	stay   bool // scrolled by hand
	chunks <-chan string
	cancel context.CancelFunc
}

type outputMsg struct {
	text string
	over bool
}

func (m *Model) runCommand(s string) tea.Cmd {
	args, err := words(s)
	if err != nil {
		m.flash = flash{err.Error(), lookInk}
		return nil
	}
	if len(args) > 0 && args[0] == "tbcluster" {
		args = args[1:]
	}
	if len(args) == 0 {
		return nil
	}
	if args[0] == "q" || args[0] == "quit" {
		return m.leave()
	}
	ctx, cancel := context.WithCancel(m.ctx)
	chunks := make(chan string, 16)
	o := &output{name: "tbcluster " + clean(s), chunks: chunks, cancel: cancel}
	m.setForm(o)
	run := m.o.Command
	go func() {
		defer close(chunks)
		w := chunkWriter{ctx, chunks}
		if err := run(ctx, args, w); err != nil && ctx.Err() == nil {
			f := fault.FromStatus(err)
			text := "✕ " + f.Error() + "\n"
			if f.Fix != "" {
				text += "  to do: " + f.Fix + "\n"
			}
			// Nobody is left to read it when this fails.
			_, _ = w.Write([]byte(text))
		}
	}()
	return o.read()
}

// chunkWriter hands on what is written until its context ends.
type chunkWriter struct {
	ctx context.Context
	out chan<- string
}

func (w chunkWriter) Write(p []byte) (int, error) {
	select {
	case w.out <- string(p):
		return len(p), nil
	case <-w.ctx.Done():
		return 0, w.ctx.Err()
	}
}

func (o *output) read() tea.Cmd {
	return func() tea.Msg {
		s, ok := <-o.chunks
		return formMsg{o, outputMsg{s, !ok}}
	}
}

func (o *output) title() string { return o.name }

func (o *output) hint() string {
	if o.over {
		return "it has ended   ↑↓ scroll   esc back"
	}
	return "it is running   esc ends it"
}

func (o *output) hear(m *Model, msg tea.Msg) tea.Cmd {
	c, ok := msg.(outputMsg)
	if !ok {
		return nil
	}
	if c.over {
		o.over = true
		if o.part != "" {
			o.lines, o.part = o.all(), ""
		}
		return nil
	}
	parts := strings.Split(o.part+c.text, "\n")
	o.part = parts[len(parts)-1]
	for _, l := range parts[:len(parts)-1] {
		o.lines = append(o.lines, clean(ansi.Strip(strings.TrimRight(l, "\r"))))
	}
	if len(o.part) > maxClean {
		o.part = o.part[:maxClean]
	}
	if n := len(o.lines) - pageLogLines; n > 0 {
		o.lines = append([]string(nil), o.lines[n:]...)
	}
	return o.read()
}

func (o *output) all() []string {
	l := o.lines
	if o.part != "" {
		l = append(l[:len(l):len(l)], clean(ansi.Strip(strings.ToValidUTF8(o.part, ""))))
	}
	return l
}

func (o *output) draw(m *Model, w, h int) []string {
	l := o.all()
	from := max(len(l)-h, 0)
	if o.stay {
		from = min(o.top, from)
	}
	return indent(l[from:])
}

func (o *output) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	h := m.h - 4
	most := max(len(o.all())-h, 0)
	if !o.stay {
		o.top = most
	}
	switch k.String() {
	case "up", "k":
		o.top--
	case "down", "j":
		o.top++
	case "pgup":
		o.top -= h
	case "pgdown", " ":
		o.top += h
	case "esc", "q":
		return nil, false
	default:
		return nil, true
	}
	o.top = max(min(o.top, most), 0)
	o.stay = o.top < most
	return nil, true
}

func (o *output) close() {
	if o.cancel != nil {
		o.cancel()
	}
}
