package tui

import (
	"fmt"
	"slices"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

// small reports whether the terminal is too small for all panels at once.
func (m *Model) small() bool { return m.w < minWidth || m.h < minHeight }

// View draws the screen: exactly as many lines as the terminal has, none wider.
func (m *Model) View() string {
	lines := append([]string{m.header(m.w)}, m.body(m.w, m.h-2)...)
	lines = append(lines[:m.h-1:m.h-1], m.bottom(m.w))
	lines = lines[:max(min(m.cutH, len(lines)), 1)]
	for i := range lines {
		lines[i] = cut(lines[i], min(m.w, max(m.cutW, 1)))
	}
	return strings.Join(lines, "\n")
}

// header is the whole truth in one line.
func (m *Model) header(w int) string {
	t := m.t
	clock := m.now.Format("15:04") + " "
	name := cmpOr(m.o.Title, "tbcluster")
	if m.snap == nil {
		if m.lostAt.IsZero() {
			return spread(" "+t.put(boldInk, clean(name))+"  asking the agent …", clock, w)
		}
		return spread(" "+t.put(boldInk, clean(name))+"  "+t.put(badInk, "✕ no agent: "+m.why), clock, w)
	}
	if n := m.snap.GetClusterName(); n != "" {
		name = n
	}
	name = t.put(boldInk, clean(name))
	if !m.live {
		ago := agoText(m.now.Sub(m.lostAt))
		return spread(" "+name+"  "+t.put(badInk, "✕ agent away for "+ago+", this is old: "+m.why), clock, w)
	}
	if m.small() {
		clock = t.put(lookInk, fmt.Sprintf("▲ %d×%d, better %d×%d ", m.cutW, m.cutH, minWidth, minHeight))
	}
	l := ""
	for brief := range briefest + 1 {
		l = " " + strings.Join(append([]string{name}, m.summary(brief)...), "  ")
		if width(l)+width(clock) < w {
			break
		}
	}
	return spread(l, clock, w)
}

// briefest is how far the header goes where there is little room.
const briefest = 3

// summary is what there is, in few words, briefest having fewest: what is wrong
// comes with a mark.
func (m *Model) summary(brief int) []string {
	t, s := m.t, m.snap
	var out []string
	up, gone := 0, 0
	for _, n := range s.GetNodes() {
		if n.GetState() == pb.NodeState_NODE_STATE_UP {
			up++
		} else if n.GetState() == pb.NodeState_NODE_STATE_DOWN {
			gone++
		}
	}
	nodes := count(len(s.GetNodes()), "node", "nodes")
	if up < len(s.GetNodes()) {
		nodes = fmt.Sprintf("%d of %s up", up, nodes)
		if brief > 0 {
			nodes = fmt.Sprintf("%d/%d nodes", up, len(s.GetNodes()))
		}
		i := lookInk
		if gone > 0 {
			i = badInk
		}
		nodes = t.put(i, nodes)
	}
	out = append(out, nodes)
	proven, sum := 0, 0.0
	for _, l := range s.GetLinks() {
		if l.GetState() == pb.LinkState_LINK_STATE_PROVEN {
			proven++
			sum += l.GetNegotiatedGbps()
		}
	}
	if n := len(s.GetLinks()); n > 0 {
		c := count(n, "cable", "cables")
		if proven < n {
			c = fmt.Sprintf("%d of %s", proven, c)
			if brief > 0 {
				c = fmt.Sprintf("%d/%d cables", proven, n)
			}
			c = t.put(lookInk, c)
		}
		if sum > 0 && brief == 0 {
			c += ", " + gbpsText(sum) + " Gb/s"
		}
		out = append(out, c)
	}
	var ready, coming, degraded, failed int
	for _, i := range s.GetInstances() {
		switch i.GetState() {
		case pb.InstanceState_INSTANCE_STATE_READY:
			ready++
		case pb.InstanceState_INSTANCE_STATE_FAILED:
			failed++
		case pb.InstanceState_INSTANCE_STATE_DEGRADED:
			degraded++
		case pb.InstanceState_INSTANCE_STATE_STOPPED, pb.InstanceState_INSTANCE_STATE_STOPPING:
		default:
			coming++
		}
	}
	var inst []string
	if ready > 0 {
		inst = append(inst, fmt.Sprintf("%d ready", ready))
	}
	if coming > 0 {
		inst = append(inst, fmt.Sprintf("%d starting", coming))
	}
	if degraded > 0 {
		inst = append(inst, t.put(lookInk, fmt.Sprintf("▲ %d degraded", degraded)))
	}
	if failed > 0 {
		inst = append(inst, t.put(badInk, fmt.Sprintf("✕ %d failed", failed)))
	}
	if brief == briefest && failed+degraded == 0 {
		inst = nil
	}
	if len(inst) > 0 {
		out = append(out, strings.Join(inst, ", "))
	}
	copying := 0
	for _, x := range s.GetTransfers() {
		if !isOver(x.GetState()) && x.GetState() != pb.TransferState_TRANSFER_STATE_PAUSED {
			copying++
		}
	}
	if copying > 0 && brief < 2 {
		out = append(out, fmt.Sprintf("%d copying", copying))
	}
	broken, look := 0, 0
	for _, f := range s.GetFindings() {
		switch f.GetSeverity() {
		case pb.Severity_SEVERITY_ERROR:
			broken++
		case pb.Severity_SEVERITY_WARNING:
			look++
		}
	}
	if broken > 0 {
		out = append(out, t.put(badInk, fmt.Sprintf("✕ %d", broken)+map[bool]string{true: " broken"}[brief < briefest]))
	}
	if look > 0 {
		out = append(out, t.put(lookInk, fmt.Sprintf("▲ %d", look)+map[bool]string{true: " to look at"}[brief < briefest]))
	}
	return out
}

// body is everything between the header and the keys.
func (m *Model) body(w, h int) []string {
	t := m.bodyTheme()
	if b, ok := m.form.(*bareText); ok {
		lines := b.draw(m, w, h)
		for len(lines) < h {
			lines = append(lines, "")
		}
		return lines
	}
	if m.form != nil {
		return t.box(m.form.title(), "", m.form.draw(m, w-4, h-2), w, h, true)
	}
	if m.snap == nil {
		return t.box("", "", m.noAgent(w-2), w, h, false)
	}
	if m.page != nil {
		lines, _, _ := m.page.layout(m, t, w, h)
		return lines
	}
	if m.small() {
		return m.panelBox(m.focus, w, h)
	}
	var columns [][]string
	lastX := -1
	for _, p := range arrange(m.snap, w, h) {
		if p.x != lastX {
			columns = append(columns, nil)
			lastX = p.x
		}
		i := len(columns) - 1
		columns[i] = append(columns[i], m.panelBox(m.seen(p), p.w, p.h)...)
	}
	return beside(columns...)
}

func (m *Model) bodyTheme() theme {
	if m.snap != nil && !m.live {
		return m.t.aged()
	}
	return m.t
}

func (m *Model) noAgent(w int) []string {
	say := "The agent is being asked for the state of the cluster."
	if !m.lostAt.IsZero() {
		say = "The agent does not answer: " + m.why + ". " + cmpOr(m.o.Start, "`tbcluster up` starts it") + "; this screen goes on by itself as soon as it answers."
	}
	out := []string{""}
	for _, l := range wrap(say, w-2) {
		out = append(out, " "+l)
	}
	return out
}

// seen is the panel of a place that is on the screen: the focused one, else
// the first.
func (m *Model) seen(p place) int {
	if slices.Contains(p.panels, m.focus) {
		return m.focus
	}
	return p.panels[0]
}

// frameOf is what a panel is drawn from.
func (m *Model) frameOf(n int) frame {
	f := frame{theme: m.bodyTheme(), s: m.snap, items: m.visible(n), focused: n == m.focus && m.page == nil && m.form == nil, now: m.now, cache: &m.routes}
	// A box without the keys is at its top, where what runs and what is new is.
	if len(f.items) > 0 && n == m.focus {
		f.chosen = f.items[m.cursor[n].at(f.items)].id
	}
	if m.small() {
		f.w, f.h = m.w-2, m.h-4
		return f
	}
	for _, p := range arrange(m.snap, m.w, m.h-2) {
		if slices.Contains(p.panels, n) {
			f.w, f.h = p.w-2, p.h-2
		}
	}
	return f
}

func (m *Model) panelBox(n, w, h int) []string {
	f := m.frameOf(n)
	f.w, f.h = w-2, h-2
	p := panels[n]
	title := fmt.Sprintf("%d %s", n, p.title)
	var lines []string
	note := ""
	switch {
	case m.filter[n] != "":
		title += " /" + m.filter[n]
		if len(f.items) == 0 {
			lines = f.empty("nothing here holds “"+m.filter[n]+"”", "esc shows all")
			break
		}
		fallthrough
	default:
		lines, note = p.draw(f)
	}
	for _, pl := range arrange(m.snap, max(m.w, minWidth), max(m.h, minHeight)-2) {
		// What else has its place here.
		if len(pl.panels) > 1 && slices.Contains(pl.panels, n) && m.filter[n] == "" && !m.small() {
			for _, o := range pl.panels {
				if o != n {
					title += fmt.Sprintf(" · %d %s", o, panels[o].title)
				}
			}
		}
	}
	return f.theme.box(title, note, lines, w, h, f.focused)
}

// bottom is the line of keys, or what has to be said there just now.
func (m *Model) bottom(w int) string {
	switch {
	case m.typing != nil:
		return m.typing.line(m.t, w)
	case m.flash.text != "":
		return " " + m.t.put(m.flash.ink, cut(m.flash.text, w-2))
	case m.form != nil:
		return " " + cut(m.form.hint(), w-2)
	case m.notice != "":
		return " " + m.t.put(moveInk, cut(m.notice, w-2))
	}
	return m.keyLine(w)
}
