package tui

import (
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

	"tbcluster/api/fault"
)

// historyLines is how many changes are kept.
const historyLines = 300

// Model is the screen as bubbletea wants it. View is a pure function of it;
// everything that takes time happens in commands.
type Model struct {
	ctx   context.Context
	o     Options
	t     theme
	clock func() time.Time
	feed  *feed
	conn  grpc.ClientConnInterface

	snap   *snapshot // nil until the agent has answered
	live   bool
	why    string // why it does not answer
	lostAt time.Time
	seq    uint64 // of the last event

	now        time.Time
	w, h       int // laid out for this
	cutW, cutH int // the terminal, where that is even smaller

	focus  int            // number of the panel that has the keys
	cursor map[int]cursor // by panel
	filter map[int]string
	page   *page
	form   form // what is open above it all, nil when nothing is
	typing *typing
	notice string
	flash  flash

	routes routeCache

	out    io.Writer // the terminal, for its clipboard; nil where there is none
	getenv func(string) string
}

// cursor is where one is in a panel: on a thing, and where that stood, for
// when it goes away.
type cursor struct {
	id    string
	index int
}

// flash is a line that stands in place of the keys until the next key.
type flash struct {
	text string
	ink  ink
}

// typing is a line being typed at the bottom.
type typing struct {
	field
	prompt string
	hints  []string
	// change is told of each key, done of enter, cancel of esc.
	change, done func(*Model, string) tea.Cmd
	cancel       func(*Model)
	complete     func(*Model, string) tea.Cmd
}

// form is something that takes all keys until it is closed.
type form interface {
	// title stands in its frame.
	title() string
	// draw is its inside.
	draw(m *Model, w, h int) []string
	// key handles a key; false means that the form is closed.
	key(m *Model, k tea.KeyMsg) (tea.Cmd, bool)
	// hear handles an answer that is meant for it.
	hear(m *Model, msg tea.Msg) tea.Cmd
	// hint is its line of keys.
	hint() string
	// close ends what it has running.
	close()
}

type (
	reportMsg report
	feedEnded struct{}
	tickMsg   time.Time
	// doneMsg is the outcome of one request.
	doneMsg struct {
		text string
		err  error
		form form // what to ask next; nil for nothing
	}
	// formMsg is an answer for the form that asked; a form that was closed
	// meanwhile is not the one.
	formMsg struct {
		form form
		msg  tea.Msg
	}
)

// NewModel returns the screen; its requests and streams end with ctx.
func NewModel(ctx context.Context, o Options) *Model {
	m := &Model{
		ctx: ctx, o: o, t: themeFor(o.NoColor), clock: time.Now, now: time.Now(),
		feed: newFeed(o.Conn, o.Redial), conn: o.Conn,
		focus: 1, cursor: map[int]cursor{}, filter: map[int]string{}, notice: clean(o.Notice),
		getenv: os.Getenv,
	}
	m.resize(minWidth, minHeight)
	return m
}

// leastWidth and leastHeight are what is laid out at least; a terminal that is
// smaller shows the upper left of it.
const leastWidth, leastHeight = 28, 6

func (m *Model) resize(w, h int) {
	m.w, m.h, m.cutW, m.cutH = max(w, leastWidth), max(h, leastHeight), w, h
}

// Init opens the watch.
func (m *Model) Init() tea.Cmd {
	go m.feed.run(m.ctx)
	return tea.Batch(m.listen(), tick())
}

func (m *Model) listen() tea.Cmd {
	return func() tea.Msg {
		r, ok := <-m.feed.out
		if !ok {
			return feedEnded{}
		}
		return reportMsg(r)
	}
}

// tick moves the clock and the ages.
func tick() tea.Cmd {
	return tea.Tick(time.Second, func(t time.Time) tea.Msg { return tickMsg(t) })
}

// Update takes one message in.
func (m *Model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.resize(msg.Width, msg.Height)
		return m, nil
	case tickMsg:
		m.now = m.clock()
		if m.snap != nil && m.live {
			s := *m.snap
			s.rates = s.rates.next(s.ClusterState, m.now)
			m.snap = &s
		}
		return m, tick()
	case reportMsg:
		m.take(report(msg))
		return m, tea.Batch(m.listen(), m.followForm())
	case feedEnded:
		return m, tea.Quit
	case doneMsg:
		if msg.form != nil {
			m.flash = flash{}
			m.setForm(msg.form)
		} else if msg.err != nil {
			m.flash = flash{}
			m.setForm(newTrouble(msg.err))
		} else if msg.text != "" {
			m.flash = flash{msg.text, plainInk}
		}
		return m, nil
	case completedMsg:
		if m.typing == msg.typing && m.typing.String() == msg.text {
			m.typing.finish(msg.candidates)
		}
		return m, nil
	case logMsg:
		return m, m.takeLog(msg)
	case formMsg:
		if m.form != nil && m.form == msg.form {
			return m, m.form.hear(m, msg.msg)
		}
		return m, nil
	case tea.KeyMsg:
		return m, m.key(msg)
	}
	return m, nil
}

// take makes a report the state that is shown.
func (m *Model) take(r report) {
	m.now = m.clock()
	if r.conn != nil {
		m.conn = r.conn
	}
	if m.live && !r.live {
		m.lostAt = m.now
	}
	if m.lostAt.IsZero() && !r.live {
		m.lostAt = m.now
	}
	if r.live {
		m.lostAt = time.Time{}
	}
	m.live, m.why = r.live, r.why
	if r.state == nil {
		return
	}
	s := newSnapshot(r.state)
	s.wire = r.wire
	if m.snap != nil {
		s.log = slices.Clip(m.snap.log)
		for _, l := range changes(m.snap.ClusterState, r.state) {
			m.seq++
			s.log = append(s.log, event{m.seq, m.now, l.text, l.ink})
		}
		if n := len(s.log) - historyLines; n > 0 {
			s.log = s.log[n:]
		}
		s.rates = m.snap.rates.next(r.state, m.now)
	} else {
		s.rates = rates{}.next(r.state, m.now)
	}
	m.snap = s
}

// visible is the items of a panel that its filter lets through.
func (m *Model) visible(p int) []item {
	if m.snap == nil {
		return nil
	}
	all := panels[p].items(m.snap)
	f := strings.ToLower(m.filter[p])
	if f == "" {
		return all
	}
	return slices.DeleteFunc(all, func(it item) bool { return !strings.Contains(strings.ToLower(it.text), f) })
}

// at returns the place of the cursor among items: on its thing, or where that
// was when it is gone.
func (c cursor) at(items []item) int {
	for i, it := range items {
		if it.id == c.id {
			return i
		}
	}
	return max(min(c.index, len(items)-1), 0)
}

// chosenItem is what the cursor of the focused panel is on.
func (m *Model) chosenItem() item {
	items := m.visible(m.focus)
	if len(items) == 0 {
		return item{}
	}
	return items[m.cursor[m.focus].at(items)]
}

func (m *Model) choose(p int, items []item, i int) {
	if len(items) == 0 {
		return
	}
	i = max(min(i, len(items)-1), 0)
	m.cursor[p] = cursor{items[i].id, i}
}

// key handles one key.
func (m *Model) key(k tea.KeyMsg) tea.Cmd {
	m.flash, m.notice = flash{}, ""
	if k.Type == tea.KeyCtrlC {
		return m.leave()
	}
	if m.form != nil {
		f := m.form
		cmd, open := f.key(m, k)
		if !open && m.form == f {
			f.close()
			m.form = nil
		}
		return cmd
	}
	if m.typing != nil {
		return m.typeKey(k)
	}
	s := k.String()
	if m.page != nil {
		if m.page.key(m, s) {
			return nil
		}
		if s == "esc" || s == "backspace" {
			m.closePage()
			return nil
		}
	} else if m.move(s) {
		return nil
	}
	for _, a := range actions {
		if !slices.Contains(a.keys, s) {
			continue
		}
		if why := a.why(m); why != "" {
			m.flash = flash{a.keyName() + ": " + why, lookInk}
			return nil
		}
		return a.do(m)
	}
	return nil
}

func (a action) keyName() string {
	if a.keys[0] == " " {
		return "space"
	}
	return a.keys[0]
}

// move handles the keys that move about on the screen.
func (m *Model) move(s string) bool {
	items := m.visible(m.focus)
	i := m.cursor[m.focus].at(items)
	step := func(n int) bool { m.choose(m.focus, items, i+n); return true }
	switch s {
	case "1", "2", "3", "4", "5", "6", "7":
		m.focus = int(s[0] - '0')
	case "tab":
		m.focus = m.focus%panelCount + 1
	case "shift+tab":
		m.focus = (m.focus+panelCount-2)%panelCount + 1
	case "up", "k":
		return m.steer(0, -1) || step(-1)
	case "down", "j":
		return m.steer(0, 1) || step(1)
	case "left", "h":
		if !m.steer(-1, 0) {
			m.focus = m.beside(-1)
		}
	case "right", "l":
		if s == "l" && m.chosenItem().kind == instanceKind {
			return false // its log
		}
		if !m.steer(1, 0) {
			m.focus = m.beside(1)
		}
	case "pgup", "ctrl+b":
		return step(-10)
	case "pgdown", "ctrl+f":
		return step(10)
	case "home", "g":
		return step(-len(items))
	case "end", "G":
		return step(len(items))
	case "esc":
		delete(m.filter, m.focus)
	default:
		return false
	}
	return true
}

// beside is the panel left or right of the focused one.
func (m *Model) beside(dx int) int {
	if m.snap == nil || m.small() {
		return (m.focus-1+dx+panelCount)%panelCount + 1
	}
	places := arrange(m.snap, m.w, m.h-2)
	var here place
	for _, p := range places {
		if slices.Contains(p.panels, m.focus) {
			here = p
		}
	}
	best, dist := m.focus, 1<<30
	for _, p := range places {
		if (dx < 0 && p.x+p.w == here.x) || (dx > 0 && p.x == here.x+here.w) {
			d := max(p.y+p.h/2-here.y-here.h/2, here.y+here.h/2-p.y-p.h/2)
			if d < dist {
				best, dist = m.seen(p), d
			}
		}
	}
	return best
}

// steer moves over the drawing of the cluster, to what is nearest in that
// direction; false where there is no drawing or nothing further.
func (m *Model) steer(dx, dy int) bool {
	if m.focus != 1 || m.snap == nil {
		return false
	}
	f := m.frameOf(1)
	d := f.drawing()
	if d == nil {
		return false
	}
	items := m.visible(1)
	here, ok := d.at[f.chosen]
	if !ok {
		return false
	}
	best, dist := -1, 1<<30
	at := m.cursor[1].at(items)
	for i, it := range items {
		p, ok := d.at[it.id]
		if !ok {
			continue
		}
		// A cell is about twice as high as wide.
		x, y := p[0]-here[0], (p[1]-here[1])*2
		ahead, aside := x*dx+y*dy, max(x*dy, -x*dy)+max(y*dx, -y*dx)
		if p == here && it.kind == linkKind && i > at && dx+dy > 0 || p == here && it.kind == linkKind && i < at && dx+dy < 0 {
			// Several cables of one edge come one after the other.
			best, dist = i, -1
			if dx+dy > 0 {
				break
			}
			continue
		}
		if ahead <= 0 || aside > ahead*3 {
			continue
		}
		if n := ahead + 2*aside; n < dist {
			best, dist = i, n
		}
	}
	if best < 0 {
		return false
	}
	m.choose(1, items, best)
	return true
}

func (m *Model) setForm(f form) {
	if m.form != nil {
		m.form.close()
	}
	m.form = f
}

// followForm tells the open form that the state has changed.
func (m *Model) followForm() tea.Cmd {
	if m.form == nil {
		return nil
	}
	return m.form.hear(m, stateChanged{})
}

// stateChanged is heard by a form when what it shows may have changed.
type stateChanged struct{}

func (m *Model) leave() tea.Cmd {
	m.setForm(nil)
	m.closePage()
	return tea.Quit
}

// ask makes a request in the background; its outcome is a line at the bottom,
// or a box when it failed.
func (m *Model) ask(what string, call func(context.Context, grpc.ClientConnInterface) (string, error)) tea.Cmd {
	conn := m.conn
	m.flash = flash{what + " …", dimInk}
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(m.ctx, requestWithin)
		defer cancel()
		text, err := call(ctx, conn)
		if err != nil {
			return doneMsg{err: fault.FromStatus(err)}
		}
		return doneMsg{text: clean(text)}
	}
}

// requestWithin bounds one request: all of them answer at once and report
// progress by the watch.
const requestWithin = 20 * time.Second
