package tui

import (
	"time"

	tea "github.com/charmbracelet/bubbletea"
)

// paced draws at most once in repaintEvery for what happens by itself, and at
// once for what the person does: keys and a new size are never waited for.
type paced struct {
	*Model
	clock   func() time.Time
	frame   string
	painted time.Time // when frame was drawn
	due     bool      // a paintMsg is on its way
}

// paintMsg says that it is time to draw what has changed.
type paintMsg struct{}

func newPaced(m *Model) *paced {
	p := &paced{Model: m, clock: m.clock}
	p.paint()
	return p
}

func (p *paced) paint() {
	p.frame, p.painted = p.Model.View(), p.clock()
}

// Update implements tea.Model.
func (p *paced) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	if _, ok := msg.(paintMsg); ok {
		p.due = false
		p.paint()
		return p, nil
	}
	_, cmd := p.Model.Update(msg)
	switch msg.(type) {
	case tea.KeyMsg, tea.WindowSizeMsg:
		p.paint()
		return p, cmd
	}
	wait := repaintEvery - p.clock().Sub(p.painted)
	switch {
	case p.due:
	case wait <= 0:
		p.paint()
	default:
		p.due = true
		cmd = tea.Batch(cmd, tea.Tick(wait, func(time.Time) tea.Msg { return paintMsg{} }))
	}
	return p, cmd
}

// View implements tea.Model.
func (p *paced) View() string { return p.frame }
