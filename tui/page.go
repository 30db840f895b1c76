package tui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// page is one thing as a full page: everything known, its log, its actions.
type page struct {
	item   item
	scroll int
	// facts is how far the facts are scrolled where there is a log too, and
	// onFacts whether the keys go to them.
	facts   int
	onFacts bool
	// whole is set where the log has the whole screen, wrap where its lines are
	// broken instead of cut.
	whole, wrap bool
	// logs
	logOf  string
	log    []string
	logEnd string // why no more lines come
	follow bool   // stay at the newest line
	lines  <-chan string
	cancel context.CancelFunc

	came    int // lines that ever came
	wrapped wrappedLog
}

// wrappedLog is a log as wrapped to a width, made anew when there is more.
type wrappedLog struct {
	w, came int
	rows    []string
	first   []int // the row that each line begins at
}

// pageLogLines is how many lines of a log a page keeps, logLineBytes how much
// of one.
const (
	pageLogLines = 2000
	logLineBytes = 2000
)

// logMsg is lines for the page that asked for them.
type logMsg struct {
	page  *page
	lines []string
	end   bool
}

func (m *Model) openChosen() tea.Cmd {
	it := m.chosenItem()
	// The place to come back to is this very thing.
	items := m.visible(m.focus)
	m.choose(m.focus, items, m.cursor[m.focus].at(items))
	return m.openPage(it)
}

// openLog shows the log of what is chosen on the whole screen, or puts it back
// into its place.
func (m *Model) openLog() tea.Cmd {
	if m.page != nil {
		m.page.whole = !m.page.whole
		m.page.onFacts = false
		return nil
	}
	cmd := m.openChosen()
	m.page.whole = true
	return cmd
}

func (m *Model) openPage(it item) tea.Cmd {
	p := &page{item: it, follow: true}
	m.page = p
	switch {
	case it.kind == instanceKind:
		p.logOf = "log"
		id := m.snap.id(it.id)
		return m.startLog(p, func(ctx context.Context, c grpc.ClientConnInterface) (func() (*pb.LogLine, error), error) {
			s, err := pb.NewInstanceServiceClient(c).Logs(ctx, &pb.InstanceLogsRequest{Instance: id, Follow: true})
			if err != nil {
				return nil, err
			}
			return func() (*pb.LogLine, error) { r, err := s.Recv(); return r.GetLine(), err }, nil
		})
	case it.kind == nodeKind && it.id == m.snap.GetSelfNodeId():
		p.logOf = "log of the agent"
		return m.startLog(p, func(ctx context.Context, c grpc.ClientConnInterface) (func() (*pb.LogLine, error), error) {
			s, err := pb.NewNodeServiceClient(c).Logs(ctx, &pb.NodeServiceLogsRequest{Follow: true})
			if err != nil {
				return nil, err
			}
			return func() (*pb.LogLine, error) { r, err := s.Recv(); return r.GetLine(), err }, nil
		})
	}
	return nil
}

// startLog reads a log in the background until the page is closed.
func (m *Model) startLog(p *page, open func(context.Context, grpc.ClientConnInterface) (func() (*pb.LogLine, error), error)) tea.Cmd {
	ctx, cancel := context.WithCancel(m.ctx)
	lines := make(chan string, 256)
	p.lines, p.cancel = lines, cancel
	conn := m.conn
	several := false
	if i := m.snap.instance(p.item.id); i != nil {
		several = len(i.GetRanks()) > 1
	}
	go func() {
		defer close(lines)
		put := func(s string) bool {
			select {
			case lines <- s:
				return true
			case <-ctx.Done():
				return false
			}
		}
		next, err := open(ctx, conn)
		for err == nil {
			var l *pb.LogLine
			if l, err = next(); err == nil && !put(logText(l, several)) {
				return
			}
		}
		if ctx.Err() == nil && !errors.Is(err, io.EOF) {
			put("✕ " + clean(fault.FromStatus(err).Error()))
		}
	}()
	return readLog(p)
}

func logText(l *pb.LogLine, several bool) string {
	s := l.GetText()
	if len(s) > logLineBytes {
		s = s[:logLineBytes] + "…"
	}
	s = clean(strings.ToValidUTF8(s, "\ufffd"))
	if several {
		s = fmt.Sprintf("%d %s  %s", l.GetRank(), clean(l.GetNodeName()), s)
	}
	if l.GetTime() != nil {
		s = l.GetTime().AsTime().Local().Format("15:04:05") + "  " + s
	}
	return s
}

// readLog waits for lines and takes all that are there, so that a chatty
// engine costs few repaints.
func readLog(p *page) tea.Cmd {
	return func() tea.Msg {
		l, ok := <-p.lines
		if !ok {
			return logMsg{page: p, end: true}
		}
		msg := logMsg{page: p, lines: []string{l}}
		quiet := time.NewTimer(repaintEvery / 2)
		defer quiet.Stop()
		for len(msg.lines) < pageLogLines {
			select {
			case l, ok := <-p.lines:
				if !ok {
					msg.end = true
					return msg
				}
				msg.lines = append(msg.lines, l)
			case <-quiet.C:
				return msg
			}
		}
		return msg
	}
}

func (m *Model) takeLog(msg logMsg) tea.Cmd {
	p := m.page
	if p == nil || p != msg.page {
		return nil
	}
	p.log = append(p.log, msg.lines...)
	p.came += len(msg.lines)
	if n := len(p.log) - pageLogLines; n > 0 {
		p.log = append([]string(nil), p.log[n:]...)
	}
	if msg.end {
		p.logEnd = "end of the log"
		return nil
	}
	return readLog(p)
}

func (m *Model) closePage() {
	if m.page != nil && m.page.cancel != nil {
		m.page.cancel()
	}
	m.page = nil
}

// key scrolls; it reports whether the key was one for that.
func (p *page) key(m *Model, s string) bool {
	// Where everything stands depends on the size, so the page is laid out.
	_, total, room := p.layout(m, noCodes, m.w, m.h-2)
	most := max(total-room, 0)
	if s == "tab" && p.logOf != "" && !p.whole {
		p.onFacts = !p.onFacts
		return true
	}
	if s == "enter" && p.logOf != "" {
		p.rewrap(m)
		return true
	}
	at := p.scroll
	switch {
	case p.onFacts:
		at = min(p.facts, most)
	case p.follow && p.logOf != "":
		at = most
	}
	switch s {
	case "up", "k":
		at--
	case "down", "j":
		at++
	case "pgup", "ctrl+b":
		at -= room
	case "pgdown", "ctrl+f":
		at += room
	case "home", "g":
		at = 0
	case "end", "G":
		at = most
	default:
		return false
	}
	at = max(min(at, most), 0)
	if p.onFacts {
		p.facts = at
		return true
	}
	p.scroll = at
	p.follow = p.scroll == most
	return true
}

// rewrap breaks the lines of the log, or cuts them again; what was at the top
// stays there.
func (p *page) rewrap(m *Model) {
	line := p.topLine(m)
	p.wrap = !p.wrap
	if _, first := p.logRows(p.logWidth(m.w)); !p.follow && line < len(first) {
		p.scroll = first[line]
	}
}

// topLine is the line of the log that is at the top of its box.
func (p *page) topLine(m *Model) int {
	onFacts := p.onFacts
	p.onFacts = false
	_, total, room := p.layout(m, noCodes, m.w, m.h-2)
	p.onFacts = onFacts
	from := max(total-room, 0)
	if !p.follow {
		from = min(p.scroll, from)
	}
	_, first := p.logRows(p.logWidth(m.w))
	i, found := slices.BinarySearch(first, from)
	if !found {
		i--
	}
	return max(min(i, len(p.log)-1), 0)
}

// logWidth is the width of the log's box on a screen of w cells.
func (p *page) logWidth(w int) int {
	if !p.whole && w >= wideWidth {
		return w - w*2/5
	}
	return w
}

// logRows is the log as the rows of a box of w cells, and the row at which each
// line begins.
func (p *page) logRows(w int) (rows []string, first []int) {
	if !p.wrap {
		first = make([]int, len(p.log))
		for i := range first {
			first[i] = i
		}
		return p.log, first
	}
	c := &p.wrapped
	if c.w != w || c.came != p.came {
		*c = wrappedLog{w: w, came: p.came}
		for _, l := range p.log {
			c.first = append(c.first, len(c.rows))
			for i, part := range wrap(l, max(w-5, 1)) {
				if i > 0 {
					part = "  " + part
				}
				c.rows = append(c.rows, part)
			}
		}
	}
	return c.rows, c.first
}

// layout lays the page out: facts above, log below, or beside it where the
// screen is wide. What is scrolled is the log, or the facts where there is
// none: total lines of it, of which room are seen.
func (p *page) layout(m *Model, t theme, w, h int) (lines []string, total, room int) {
	title := kindNames[p.item.kind]
	if !m.snap.has(p.item) {
		return t.box(title, "", []string{"", " This " + title + " is no longer there. esc goes back."}, w, h, true), 0, h
	}
	name, facts := m.facts(t, p.item, w-4)
	title += " " + name
	if p.logOf == "" {
		total, room = len(facts), h-2
		from := max(min(p.scroll, total-room), 0)
		return t.box(title, span(from, total, room), indent(facts[from:]), w, h, true), total, room
	}
	if p.whole {
		return p.logBox(t, title+": ", w, h)
	}
	fw, fh, lw, lh := w, 0, w, 0
	if w >= wideWidth {
		lw = p.logWidth(w)
		fw, fh, lh = w-lw, h, h
		_, facts = m.facts(t, p.item, fw-4)
	} else {
		// The facts get what they need, but the log at least a third.
		fh = min(len(facts)+2, h*2/3)
		lh = h - fh
	}
	froom := max(fh-2, 0)
	from := max(min(p.facts, len(facts)-froom), 0)
	box := t.box(title, span(from, len(facts), froom), indent(facts[from:]), fw, fh, p.onFacts)
	lines, total, room = p.logBox(t, "", lw, lh)
	if p.onFacts {
		total, room = len(facts), froom
	}
	if w >= wideWidth {
		return beside(box, lines), total, room
	}
	return append(box, lines...), total, room
}

func (p *page) logBox(t theme, of string, w, h int) (box []string, total, room int) {
	lines, _ := p.logRows(w)
	if p.logEnd != "" {
		lines = append(lines[:len(lines):len(lines)], t.put(dimInk, "── "+p.logEnd+" ──"))
	}
	if len(lines) == 0 {
		lines = []string{t.put(dimInk, "no line yet")}
	}
	total, room = len(lines), max(h-2, 0)
	from := max(total-room, 0)
	if !p.follow {
		from = max(min(p.scroll, from), 0)
	}
	note := span(from, total, room)
	if !p.wrap && slices.ContainsFunc(lines[from:min(from+room, total)], func(l string) bool { return width(l) > w-3 }) {
		note = strings.TrimSuffix("enter: whole lines · "+note, " · ")
	}
	return t.box(of+p.logOf, note, indent(lines[from:]), w, h, !p.onFacts), total, room
}

// span says which of the lines are seen when not all are.
func span(from, total, room int) string {
	if total <= room {
		return ""
	}
	return fmt.Sprintf("%d–%d of %d", from+1, min(from+room, total), total)
}

func indent(lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = " " + l
	}
	return out
}
