package tui

import (
	"slices"

	tea "github.com/charmbracelet/bubbletea"
)

// option is one thing to choose. Why says why it cannot be chosen.
type option struct {
	id   string
	name string
	note string // at the right: a number, or why not
	why  string
}

// picker is a list to choose one or several from.
type picker struct {
	title   string
	many    bool
	options []option
	at      int
	on      map[string]bool // of many
}

// set replaces the options and stays on the one that was chosen.
func (p *picker) set(options []option) {
	id := p.id()
	p.options = options
	p.at = 0
	for i, o := range options {
		if o.id == id {
			p.at = i
		}
	}
}

// pick goes to an option, or to the first that can be chosen.
func (p *picker) pick(id string) {
	for i, o := range p.options {
		if o.id == id && id != "" {
			p.at = i
			return
		}
	}
	if i := slices.IndexFunc(p.options, func(o option) bool { return o.why == "" }); i >= 0 {
		p.at = i
	}
}

func (p *picker) id() string { return p.now().id }

func (p *picker) now() option {
	if p.at < len(p.options) {
		return p.options[p.at]
	}
	return option{}
}

// several is the IDs that are switched on.
func (p *picker) several() (ids []string) {
	for _, o := range p.options {
		if p.on[o.id] {
			ids = append(ids, o.id)
		}
	}
	return ids
}

// key moves; it reports whether something else is chosen now.
func (p *picker) key(k tea.KeyMsg) bool {
	was := p.at
	switch k.String() {
	case "up", "k":
		p.at--
	case "down", "j":
		p.at++
	case "home", "g":
		p.at = 0
	case "end", "G":
		p.at = len(p.options) - 1
	case " ":
		if p.many && p.now().id != "" {
			p.on[p.now().id] = !p.on[p.now().id]
			return true
		}
	}
	p.at = max(min(p.at, len(p.options)-1), 0)
	return p.at != was && !p.many
}

// draw is a box of w by h cells.
func (p *picker) draw(t theme, w, h int, focused bool) []string {
	f := frame{theme: t, w: w - 2, h: h - 2, focused: true, chosen: p.id()}
	var rows []row
	for i, o := range p.options {
		mark := ""
		if p.many {
			mark = "[ ] "
			if p.on[o.id] {
				mark = "[x] "
			}
		}
		note := o.note
		if o.why != "" {
			note = o.why
		}
		room := f.w - 2
		nameW := max(room-width(note)-1, min(room, 8+width(mark)))
		l := fill(mark+o.name, nameW) + right(" "+note, max(room-nameW, 0))
		if i == p.at {
			// Of a list without the keys the choice stays visible.
			if !focused {
				l = t.put(boldInk, l)
			}
		} else if o.why != "" {
			l = t.put(dimInk, l)
		}
		rows = append(rows, row{o.id, []string{l}})
	}
	lines, note := f.list(nil, rows)
	if !focused {
		for i, r := range rows {
			if i == p.at {
				// The cursor is shown, but not as where the keys go.
				f.focused = false
				lines, note = f.list(nil, rows)
				for n := range lines {
					if lines[n] == " "+r.lines[0] {
						lines[n] = t.put(boldInk, "▸") + r.lines[0]
					}
				}
			}
		}
	}
	return t.box(p.title, note, lines, w, h, focused)
}
