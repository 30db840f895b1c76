package tui

import (
	"fmt"
	"strings"
	"testing"
)

// logPage is the log of this node's agent on the whole screen, with 60 lines of
// which each begins with its number and is longer than the screen is wide.
func logPage(t *testing.T) *Model {
	t.Helper()
	m := screen(t, load(t, "three"), 80, 24)
	press(m, "L")
	var lines []string
	for i := range 60 {
		lines = append(lines, fmt.Sprintf("line-%02d node=%s end-%02d", i, strings.Repeat("ABCDEFG-", 12), i))
	}
	m.Update(logMsg{page: m.page, lines: lines})
	return m
}

func TestALineOfTheLogIsReadWhole(t *testing.T) {
	m := logPage(t)
	v := m.View()
	if !strings.Contains(v, "line-59") || strings.Contains(v, "end-59") || !strings.Contains(v, "enter: whole lines") || !strings.Contains(v, "enter wrap") {
		t.Fatalf("the log does not end in a cut line, or no key is named for it:\n%s", v)
	}
	press(m, "enter")
	if v = m.View(); !strings.Contains(v, "end-59") || strings.Contains(v, "…") {
		t.Fatalf("the last line is not whole after enter:\n%s", v)
	}
	m.Update(logMsg{page: m.page, lines: []string{"news"}})
	if v = m.View(); !strings.Contains(v, "│ news") {
		t.Errorf("a new line is not followed:\n%s", v)
	}
	// What is at the top stays there, both ways.
	press(m, "enter", "g")
	for range 20 {
		press(m, "down")
	}
	top := func() string { return strings.Split(m.View(), "\n")[2] }
	for _, k := range []string{"enter", "enter"} {
		press(m, k)
		if l := top(); !strings.Contains(l, "line-20") {
			t.Errorf("after enter %q is at the top", l)
		}
	}
	press(m, "enter", "G")
	if v = m.View(); !strings.Contains(v, "│ news") {
		t.Errorf("G does not go to the end of a wrapped log:\n%s", v)
	}
	golden(t, "page-log-whole-80x24", m)
}

// Without a line there is nothing to wrap.
func TestAnEmptyLogIsWrapped(t *testing.T) {
	m := screen(t, load(t, "three"), 80, 24)
	press(m, "L", "g", "enter", "Y", "esc", "enter")
	if v := m.View(); !strings.Contains(v, "no line yet") {
		t.Errorf("an empty log:\n%s", v)
	}
}

func TestTheLogIsShownWithNothingBesideIt(t *testing.T) {
	m := logPage(t)
	press(m, "Y")
	if v := m.View(); !strings.Contains(v, "end-59") || strings.Contains(v, "│") || strings.Contains(v, "node ID") {
		t.Errorf("Y does not show the end of the log alone:\n%s", v)
	}
	press(m, "esc", "g", "down", "Y")
	if first, _, _ := strings.Cut(strings.SplitN(m.View(), "\n", 2)[1], " "); first != "line-01" {
		t.Errorf("Y begins with %q where line-01 was at the top:\n%s", first, m.View())
	}
	if text, what := m.clipText(); what != "this log" || !strings.HasPrefix(text, "line-00") || strings.Count(text, "\n") != 60 {
		t.Errorf("what is copied is %s: %q", what, text)
	}
	// Where the log stands below what is known of the node, both are taken.
	press(m, "esc", "L")
	if text, _ := m.clipText(); !strings.Contains(text, "node ID") || !strings.Contains(text, "line-00") {
		t.Errorf("of the page is copied: %q", text)
	}
}
