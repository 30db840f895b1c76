package tui

import (
	tea "github.com/charmbracelet/bubbletea"
)

// field is one line of typed text.
type field struct {
	text []rune
	pos  int
}

func (f *field) set(s string) { f.text = []rune(s); f.pos = len(f.text) }

func (f field) String() string { return string(f.text) }

// key takes a key in and reports whether it was one for a field.
func (f *field) key(k tea.KeyMsg) bool {
	switch k.Type {
	case tea.KeyRunes, tea.KeySpace:
		if k.Alt {
			return false
		}
		in := k.Runes
		if k.Type == tea.KeySpace {
			in = []rune{' '}
		}
		var ok []rune
		for _, r := range in {
			// What is pasted is no more trusted than what is received.
			if isSafe(r) && len(f.text)+len(ok) < 256 {
				ok = append(ok, r)
			}
		}
		f.text = append(f.text[:f.pos:f.pos], append(ok, f.text[f.pos:]...)...)
		f.pos += len(ok)
	case tea.KeyBackspace:
		if f.pos > 0 {
			f.text = append(f.text[:f.pos-1:f.pos-1], f.text[f.pos:]...)
			f.pos--
		}
	case tea.KeyDelete:
		if f.pos < len(f.text) {
			f.text = append(f.text[:f.pos:f.pos], f.text[f.pos+1:]...)
		}
	case tea.KeyLeft:
		f.pos = max(f.pos-1, 0)
	case tea.KeyRight:
		f.pos = min(f.pos+1, len(f.text))
	case tea.KeyHome, tea.KeyCtrlA:
		f.pos = 0
	case tea.KeyEnd, tea.KeyCtrlE:
		f.pos = len(f.text)
	case tea.KeyCtrlU:
		f.text, f.pos = f.text[f.pos:], 0
	default:
		return false
	}
	return true
}

// draw shows the text with the cursor, the part around it when it is long.
func (f field) draw(t theme, w int) string {
	const cursor = "█"
	l, r := string(f.text[:f.pos]), string(f.text[f.pos:])
	for width(l) > w-2 && len(l) > 0 {
		l = string([]rune(l)[1:])
	}
	at, rest := cursor, ""
	if rs := []rune(r); len(rs) > 0 && t[chosenInk] != "" {
		at, rest = t.put(chosenInk, string(rs[:1])), string(rs[1:])
	} else {
		rest = r
	}
	return cut(l+at+rest, w)
}
