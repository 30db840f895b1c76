package tui

// panel is one box of the screen. Draw is a pure function of its frame; it
// returns lines for the inside and a note for the lower edge.
type panel struct {
	title string
	items func(*snapshot) []item
	draw  func(frame) ([]string, string)
	// want is how many lines its content would take.
	want func(*snapshot) int
}

// panels by their number on the screen.
var panels = map[int]panel{
	1: {"Cluster", clusterItems, drawCluster, func(s *snapshot) int {
		switch n := len(s.GetNodes()); {
		case n <= 2:
			return 10
		case n <= 4:
			return 11
		case n <= roundMost:
			return (n+1)/2*(roundTall-1) + 1
		default:
			return 1 + n + len(s.GetLinks())
		}
	}},
	2: {"Instances", instanceItems, drawInstances, func(s *snapshot) int {
		n := max(len(s.GetInstances()), 1)
		for _, i := range s.GetInstances() {
			if i.GetReason() != "" {
				n += 2
			}
		}
		return max(n, 2)
	}},
	3: {"Transfers", transferItems, drawTransfers, func(s *snapshot) int { return max(2*len(s.GetTransfers()), 2) }},
	4: {"Models", modelItems, drawModels, func(s *snapshot) int { return 1 + max(len(s.GetModels()), 3) }},
	5: {"To look at", findingItems, drawFindings, func(s *snapshot) int { return max(3*len(s.GetFindings()), 1) }},
	6: {"Nodes and cables", clusterItems, drawNodes, func(s *snapshot) int { return max(len(s.GetNodes())+len(s.GetLinks()), 2) }},
	7: {"Log", eventItems, drawHistory, func(s *snapshot) int { return max(len(s.log), 2) }},
}

const panelCount = 7

// place is a box on the screen for one of several panels: the one that had the
// keys last is seen.
type place struct {
	panels     []int
	x, y, w, h int
}

// The least of a terminal for all panels at once, and for the wide form.
const (
	minWidth, minHeight   = 80, 24
	wideWidth, wideHeight = 120, 30
)

// arrange says where the panels are on a body of w by h cells, h without
// header and keys.
func arrange(s *snapshot, w, h int) []place {
	stack := func(x, w int, groups ...[]int) (out []place) {
		heights := share(s, h, groups)
		y := 0
		for i, g := range groups {
			out = append(out, place{g, x, y, w, heights[i]})
			y += heights[i]
		}
		return out
	}
	if w >= wideWidth && h >= wideHeight-2 {
		a := w * 40 / 100
		b := (w - a) / 2
		out := stack(0, a, []int{1}, []int{6}, []int{4})
		out = append(out, stack(a, b, []int{2}, []int{3})...)
		return append(out, stack(a+b, w-a-b, []int{5}, []int{7})...)
	}
	a := w * 48 / 100
	return append(stack(0, a, []int{1, 6}, []int{4}), stack(a, w-a, []int{2}, []int{3}, []int{5, 7})...)
}

// share divides h among boxes: each gets what its content wants while there
// is enough; what is missing is taken from those that want most, what is left
// over goes to the last and the first in turn.
func share(s *snapshot, h int, groups [][]int) []int {
	const least = 4
	out := make([]int, len(groups))
	wants := make([]int, len(groups))
	left := h
	for i, g := range groups {
		for _, p := range g[:1] {
			wants[i] = panels[p].want(s) + 2
		}
		out[i] = min(least, wants[i])
		left -= out[i]
	}
	for left > 0 {
		// The one that has least of what it wants is next.
		next := -1
		for i := range out {
			if out[i] < wants[i] && (next < 0 || out[i] < out[next]) {
				next = i
			}
		}
		if next < 0 {
			break
		}
		out[next]++
		left--
	}
	for i := 0; left > 0; i++ {
		next := len(out) - 1 - i%len(out)
		if groups[len(out)-1][0] == 7 {
			next = len(out) - 1 // history has always more to show
		}
		out[next]++
		left--
	}
	return out
}
