package tui

import "strings"

// canvas is a grid of cells for drawings: lines that meet and cross, with text
// on top.
type canvas struct {
	w, h int
	at   []mark
}

type mark struct {
	text string // one cell; empty continues a wide one
	ink  ink
	arms arm // how lines leave the cell, 0 for text
	thin bool
}

// arm is a set of directions.
type arm uint8

const (
	up arm = 1 << iota
	down
	left
	rightward
)

func newCanvas(w, h int) *canvas {
	c := &canvas{w: w, h: h, at: make([]mark, w*h)}
	for i := range c.at {
		c.at[i].text = " "
	}
	return c
}

func (c *canvas) cell(x, y int) *mark {
	if x < 0 || y < 0 || x >= c.w || y >= c.h {
		return nil
	}
	return &c.at[y*c.w+x]
}

// pen is how a line looks.
type pen struct {
	ink  ink
	thin bool // dashed: nothing goes over it
}

// line draws through the given points, each in line with the one before.
func (c *canvas) line(p pen, points ...[2]int) {
	for i := 1; i < len(points); i++ {
		x, y, tx, ty := points[i-1][0], points[i-1][1], points[i][0], points[i][1]
		for x != tx || y != ty {
			from, to := rightward, left
			nx, ny := x, y
			switch {
			case x < tx:
				nx++
			case x > tx:
				nx--
				from, to = left, rightward
			case y < ty:
				ny++
				from, to = down, up
			default:
				ny--
				from, to = up, down
			}
			c.join(x, y, from, p)
			c.join(nx, ny, to, p)
			x, y = nx, ny
		}
	}
}

func (c *canvas) join(x, y int, a arm, p pen) {
	m := c.cell(x, y)
	if m == nil {
		return
	}
	if m.arms == 0 {
		m.ink, m.thin = p.ink, p.thin
	}
	m.arms |= a
	m.text = glyph(m.arms, m.thin)
}

// glyph is the box-drawing character for a set of arms. A full cross is drawn
// as one line passing over the other, since lines of a drawing never join.
func glyph(a arm, thin bool) string {
	g, ok := glyphs[a]
	if !ok {
		g = [2]string{"╫", "┼"}
	}
	if thin {
		return g[1]
	}
	return g[0]
}

// glyphs has the double and the dashed form of each way through a cell.
var glyphs = map[arm][2]string{
	up: {"║", "╎"}, down: {"║", "╎"}, up | down: {"║", "╎"},
	left: {"═", "╌"}, rightward: {"═", "╌"}, left | rightward: {"═", "╌"},
	up | left: {"╝", "╯"}, up | rightward: {"╚", "╰"}, down | left: {"╗", "╮"}, down | rightward: {"╔", "╭"},
}

// text writes plain text from x, over what is there; it never leaves the grid.
func (c *canvas) text(x, y int, i ink, s string) {
	for _, r := range s {
		w := width(string(r))
		if w == 0 {
			// A mark stands on the cell before it.
			if m := c.cell(x-1, y); m != nil && m.text != "" {
				m.text += string(r)
			}
			continue
		}
		m := c.cell(x, y)
		if m == nil || x+w > c.w {
			return
		}
		*m = mark{text: string(r), ink: i}
		if w == 2 {
			*c.cell(x+1, y) = mark{text: "", ink: i}
		}
		x += w
	}
}

// lines renders the grid.
func (c *canvas) lines(t theme) []string {
	out := make([]string, c.h)
	for y := range c.h {
		var b, run strings.Builder
		last := plainInk
		flush := func() {
			b.WriteString(t.put(last, run.String()))
			run.Reset()
		}
		for x := range c.w {
			m := c.at[y*c.w+x]
			if m.ink != last {
				flush()
				last = m.ink
			}
			run.WriteString(m.text)
		}
		flush()
		out[y] = strings.TrimRight(b.String(), " ")
	}
	return out
}
