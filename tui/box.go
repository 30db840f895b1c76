package tui

import (
	"fmt"
	"strings"
	"time"
)

// box draws lines in a frame of w by h cells. What does not fit is left out;
// note stands in the lower edge at the right.
func (t theme) box(title, note string, lines []string, w, h int, focused bool) []string {
	if w < 4 || h < 2 {
		out := make([]string, max(h, 0))
		for i := range out {
			out[i] = strings.Repeat(" ", max(w, 0))
		}
		return out
	}
	edge := dimInk
	name := titleInk
	if focused {
		edge, name = focusInk, focusInk
	}
	in := w - 2
	top := t.put(edge, "╭")
	left := in
	if title != "" {
		s := cut(" "+title+" ", in-1)
		top += t.put(name, s)
		left -= width(s)
	}
	top += t.put(edge, strings.Repeat("─", left)+"╮")
	out := []string{top}
	side := t.put(edge, "│")
	for i := range h - 2 {
		s := ""
		if i < len(lines) {
			s = lines[i]
		}
		out = append(out, side+fill(s, in)+side)
	}
	bottom := strings.Repeat("─", in)
	if note != "" {
		n := cut(" "+note+" ", in-1)
		bottom = strings.Repeat("─", in-1-width(n)) + n + "─"
	}
	return append(out, t.put(edge, "╰"+bottom+"╯"))
}

// beside puts blocks of lines next to each other.
func beside(blocks ...[]string) []string {
	n := 0
	for _, b := range blocks {
		n = max(n, len(b))
	}
	out := make([]string, n)
	for i := range out {
		for _, b := range blocks {
			if i < len(b) {
				out[i] += b[i]
			}
		}
	}
	return out
}

// cell is a piece of a table: text with its ink.
type cell struct {
	text string
	ink  ink
}

// column is how a column of a table behaves when there is little room.
type column struct {
	right bool // numbers
	flex  bool // gives and takes room; one column
	min   int  // of the flexible one
	drop  int  // columns with the highest are left out first; 0 never
}

// layout returns the width of each column for w cells; 0 is left out. One cell
// of room stands between columns, two where there is enough.
func layout(cols []column, rows [][]cell, w int) (widths []int, gap int) {
	natural := make([]int, len(cols))
	for _, r := range rows {
		for i, c := range r {
			natural[i] = max(natural[i], width(c.text))
		}
	}
	widths = append([]int(nil), natural...)
	for gap = 2; ; {
		sum, n, flex := 0, 0, -1
		for i, x := range widths {
			if cols[i].flex {
				flex = i
			}
			if x > 0 {
				sum += x
				n++
			}
		}
		sum += gap * max(n-1, 0)
		if flex < 0 || widths[flex] == 0 {
			return widths, gap
		}
		least := min(cols[flex].min, natural[flex])
		if room := w - (sum - widths[flex]); room >= least || (gap == 1 && !canDrop(cols, widths)) {
			if room < natural[flex] && gap == 2 && w-(sum-widths[flex]-(n-1)) >= least {
				gap = 1
				continue
			}
			widths[flex] = max(room, 1)
			return widths, gap
		}
		if gap == 2 {
			gap = 1
			continue
		}
		worst := -1
		for i, x := range widths {
			if x > 0 && cols[i].drop > 0 && (worst < 0 || cols[i].drop > cols[worst].drop) {
				worst = i
			}
		}
		widths[worst] = 0
	}
}

func canDrop(cols []column, widths []int) bool {
	for i, x := range widths {
		if x > 0 && cols[i].drop > 0 {
			return true
		}
	}
	return false
}

// tableLine is one row of a table.
func (t theme) tableLine(cols []column, widths []int, gap int, row []cell) string {
	var b strings.Builder
	first := true
	for i, c := range row {
		if widths[i] == 0 {
			continue
		}
		if !first {
			b.WriteString(strings.Repeat(" ", gap))
		}
		first = false
		s := fill(c.text, widths[i])
		if cols[i].right {
			s = right(c.text, widths[i])
		}
		b.WriteString(t.put(c.ink, s))
	}
	return b.String()
}

// frame is what a panel is drawn from, and into.
type frame struct {
	theme
	s       *snapshot
	items   []item // those that the filter lets through
	chosen  string // ID of the item under the cursor
	focused bool
	w, h    int // inside the box
	now     time.Time
	cache   *routeCache
}

// row is one item as drawn: one line or more.
type row struct {
	id    string
	lines []string
}

// list draws rows below head, scrolled so that the chosen one is seen, and
// says in note how many there are when not all fit.
func (f frame) list(head []string, rows []row) (lines []string, note string) {
	room := max(f.h-len(head), 1)
	var body []string
	start, end, nth := 0, 0, 0
	for i, r := range rows {
		is := r.id == f.chosen
		if is {
			start, end, nth = len(body), len(body)+len(r.lines), i+1
		}
		for n, l := range r.lines {
			body = append(body, f.mark(l, is, n == 0))
		}
	}
	offset := 0
	if end > room {
		offset = min(end-room, start)
	}
	if len(body) > room {
		note = fmt.Sprintf("%d of %d", max(nth, 1), len(rows))
	}
	body = body[min(offset, len(body)):]
	if len(body) > room {
		body = body[:room]
	}
	return append(append([]string(nil), head...), body...), note
}

// mark puts the cursor's column in front of a line.
func (f frame) mark(l string, is, first bool) string {
	switch {
	case is && f.focused && first:
		return f.theme.chosen("▸"+l, f.w)
	case is && f.focused:
		return f.theme.chosen(" "+l, f.w)
	}
	return " " + l
}
