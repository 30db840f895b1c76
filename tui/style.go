package tui

import (
	"os"
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// ink is what a piece of text means; theme turns it into a colour. Colours are
// the sixteen of the terminal's own palette, so that a light background is as
// good as a dark one; the text says the same without them.
type ink int

const (
	plainInk  ink = iota
	boldInk       // names
	dimInk        // labels, what does not apply, what is old
	badInk        // broken
	lookInk       // a person should look at it
	moveInk       // bytes moving, work going on
	focusInk      // where the keys go
	chosenInk     // the line under the cursor
	titleInk      // titles of boxes
	inkCount
)

// theme holds the SGR parameters of each ink; an empty one leaves text alone.
type theme [inkCount]string

var (
	colours = theme{boldInk: "1", dimInk: "2", badInk: "31", lookInk: "33", moveInk: "36", focusInk: "1;36", chosenInk: "7", titleInk: "1"}
	noHues  = theme{boldInk: "1", dimInk: "2", badInk: "1", focusInk: "1", chosenInk: "7", titleInk: "1"}
	noCodes = theme{}
	// old is for what was true when the agent was last heard.
	old      = theme{plainInk: "2", boldInk: "2", dimInk: "2", badInk: "2", lookInk: "2", moveInk: "2", focusInk: "2", chosenInk: "7", titleInk: "2"}
	oldPlain = noCodes
)

// themeFor picks a theme from the options and the environment.
func themeFor(noColor bool) theme {
	switch {
	case os.Getenv("TERM") == "dumb":
		return noCodes
	case noColor || os.Getenv("NO_COLOR") != "":
		return noHues
	}
	return colours
}

// aged is the theme for what is old.
func (t theme) aged() theme {
	if t == noCodes {
		return oldPlain
	}
	return old
}

// put returns s in that ink.
func (t theme) put(i ink, s string) string {
	if t[i] == "" || s == "" {
		return s
	}
	return "\x1b[" + t[i] + "m" + s + "\x1b[0m"
}

// width is the cells that s takes.
func width(s string) int { return ansi.StringWidth(s) }

// cut shortens s to w cells, with "…" where something is missing.
func cut(s string, w int) string {
	if w <= 0 {
		return ""
	}
	if width(s) <= w {
		return s
	}
	return ansi.Truncate(s, w, "…")
}

// fill cuts or pads s to exactly w cells.
func fill(s string, w int) string {
	s = cut(s, w)
	if n := w - width(s); n > 0 {
		return s + strings.Repeat(" ", n)
	}
	return s
}

// right is fill with the text at the right, for numbers.
func right(s string, w int) string {
	s = cut(s, w)
	if n := w - width(s); n > 0 {
		return strings.Repeat(" ", n) + s
	}
	return s
}

// spread puts l at the left and r at the right of w cells; l gives way.
func spread(l, r string, w int) string {
	rw := width(r)
	if rw >= w {
		return fill(r, w)
	}
	return fill(l, w-rw) + r
}

// wrap breaks plain text into lines of at most w cells, at words where it can.
func wrap(s string, w int) []string {
	if w < 1 {
		return nil
	}
	return strings.Split(ansi.Wrap(s, w, " "), "\n")
}

// chosen paints a whole line as the one under the cursor.
func (t theme) chosen(s string, w int) string {
	return t.put(chosenInk, fill(ansi.Strip(s), w))
}
