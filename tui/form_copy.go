package tui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// thinkAfter is how long a choice has to rest before the agent is asked what
// it would come to.
const thinkAfter = 300 * time.Millisecond

// answer is what the agent says to a choice.
type answer struct {
	gen   int // of the choice that it belongs to
	lines []cell
	fault *fault.Fault
	plan  *pb.PlanResponse
}

// begun is the outcome of starting what a form asks for.
type begun struct {
	text  string
	panel int
	err   error
}

// rested says that a choice has not changed for thinkAfter.
type rested struct{ gen int }

// chooser is what the copy and the place form have in common: choices, the
// agent's live answer to them, and starting it.
type chooser struct {
	self     form
	gen      int
	asked    context.CancelFunc // ends the question under way
	answer   *answer            // nil while it is awaited
	starting bool
	failed   *fault.Fault // of starting
	request  string       // request ID of this choice
}

// changed is called when something else is chosen.
func (c *chooser) changed() tea.Cmd {
	c.stop()
	c.gen++
	c.answer, c.failed, c.request = nil, nil, requestID()
	gen, self := c.gen, c.self
	return tea.Tick(thinkAfter, func(time.Time) tea.Msg { return formMsg{self, rested{gen}} })
}

func (c *chooser) stop() {
	if c.asked != nil {
		c.asked()
		c.asked = nil
	}
}

func (c *chooser) close() { c.stop() }

// think asks the agent in the background.
func (c *chooser) think(m *Model, ask func(context.Context, grpc.ClientConnInterface) answer) tea.Cmd {
	ctx, cancel := context.WithTimeout(m.ctx, requestWithin)
	c.asked = cancel
	gen, self, conn := c.gen, c.self, m.conn
	return func() tea.Msg {
		defer cancel()
		a := ask(ctx, conn)
		a.gen = gen
		return formMsg{self, a}
	}
}

// start begins what was asked for, once.
func (c *chooser) start(m *Model, call func(context.Context, grpc.ClientConnInterface) begun) tea.Cmd {
	c.stop()
	c.starting, c.failed = true, nil
	self, conn := c.self, m.conn
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(m.ctx, requestWithin)
		defer cancel()
		return formMsg{self, call(ctx, conn)}
	}
}

// begun closes the form, or shows why not.
func (c *chooser) begun(m *Model, b begun) {
	c.starting = false
	if b.err != nil {
		c.failed = cleanFault(fault.FromStatus(b.err))
		return
	}
	m.setForm(nil)
	m.closePage()
	m.focus = b.panel
	m.flash = flash{clean(b.text), plainInk}
}

// copyForm copies a model to a node.
type copyForm struct {
	chooser
	model, node picker
	onNode      bool // the keys go to the list of nodes
}

func (m *Model) openCopy() tea.Cmd {
	f := &copyForm{model: picker{title: "Model"}, node: picker{title: "To node"}}
	f.self = f
	it := m.target()
	f.options(m.snap)
	f.model.pick(modelToCopy(m.snap, m.snap.node[it.id]))
	if it.kind == modelKind {
		f.model.pick(it.id)
	}
	f.options(m.snap)
	f.node.pick("")
	if n := m.snap.node[it.id]; it.kind == nodeKind && whyNotTo(m.snap, m.snap.model[f.model.id()], n) == "" {
		f.node.pick(it.id)
	}
	f.onNode = it.kind == modelKind
	m.setForm(f)
	return f.changed()
}

// modelToCopy is the first model that can be copied to a node, else to any; ""
// where there is none.
func modelToCopy(s *snapshot, to *pb.Node) string {
	nodes := s.GetNodes()
	if to != nil {
		nodes = append([]*pb.Node{to}, nodes...)
	}
	for _, n := range nodes {
		for _, x := range s.GetModels() {
			if len(sourcesOf(s, x)) > 0 && whyNotTo(s, x, n) == "" {
				return x.GetId()
			}
		}
	}
	return ""
}

// options fills the lists from the state; a node that is out says why.
func (f *copyForm) options(s *snapshot) {
	var models []option
	for _, x := range s.GetModels() {
		o := option{id: x.GetId(), name: x.GetName(), note: sizeText(x.GetSizeBytes())}
		if len(sourcesOf(s, x)) == 0 {
			o.why = "no complete copy on a node that is up"
		}
		models = append(models, o)
	}
	f.model.set(models)
	x := s.model[f.model.id()]
	var nodes []option
	for _, n := range s.GetNodes() {
		nodes = append(nodes, option{id: n.GetId(), name: n.GetName(), note: sizeText(n.GetDiskFreeBytes()) + " free", why: whyNotTo(s, x, n)})
	}
	f.node.set(nodes)
}

// sourcesOf is the nodes from which a model can be copied.
func sourcesOf(s *snapshot, x *pb.Model) (l []*pb.Node) {
	for _, c := range x.GetCopies() {
		if n := s.node[c.GetNodeId()]; c.GetComplete() && n.GetState() == pb.NodeState_NODE_STATE_UP {
			l = append(l, n)
		}
	}
	return l
}

// whyNotTo is why a model cannot or need not be copied to a node.
func whyNotTo(s *snapshot, x *pb.Model, n *pb.Node) string {
	for _, c := range x.GetCopies() {
		if c.GetNodeId() == n.GetId() && c.GetComplete() {
			return "has it"
		}
	}
	switch {
	case n.GetState() != pb.NodeState_NODE_STATE_UP:
		return say(nodeWords, n.GetState()).text
	case n.GetDiskFreeBytes() > 0 && n.GetDiskFreeBytes() < x.GetSizeBytes():
		return "only " + sizeText(n.GetDiskFreeBytes()) + " free"
	}
	return ""
}

func (*copyForm) title() string { return "Copy a model to another node" }
func (*copyForm) hint() string {
	return "↑↓ choose   tab the other list   enter copy   esc leave it"
}

func (f *copyForm) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	switch k.String() {
	case "esc", "q":
		return nil, false
	case "tab", "shift+tab", "left", "right", "h", "l":
		f.onNode = !f.onNode
		return nil, true
	case "enter":
		why := f.whyNot(m)
		if why != "" {
			m.flash = flash{"enter: " + why, lookInk}
			return nil, true
		}
		x, n := m.snap.model[f.model.id()], m.snap.node[f.node.id()]
		text := "copying " + x.GetName() + " to " + n.GetName()
		req := &pb.StartTransferRequest{RequestId: f.request, Model: m.snap.id(x.GetId()), ModelNode: m.snap.id(n.GetId())}
		return f.start(m, func(ctx context.Context, c grpc.ClientConnInterface) begun {
			_, err := pb.NewTransferServiceClient(c).Start(ctx, req)
			return begun{text, 3, err}
		}), true
	}
	list := &f.model
	if f.onNode {
		list = &f.node
	}
	if !list.key(k) {
		return nil, true
	}
	f.options(m.snap)
	if !f.onNode && f.node.now().why != "" {
		f.node.pick("")
	}
	return f.changed(), true
}

func (f *copyForm) whyNot(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	switch {
	case f.starting:
		return "it is being started"
	case f.model.now().why != "":
		return f.model.now().name + ": " + f.model.now().why
	case f.node.id() == "":
		return "choose a node"
	case f.node.now().why != "":
		return f.node.now().name + ": " + f.node.now().why
	}
	return ""
}

func (f *copyForm) hear(m *Model, msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case stateChanged:
		if m.snap != nil {
			f.options(m.snap)
		}
	case rested:
		if msg.gen != f.gen || f.starting || f.whyNot(m) != "" {
			return nil
		}
		req := &pb.StartTransferRequest{RequestId: requestID(), DryRun: true, Model: m.snap.id(f.model.id()), ModelNode: m.snap.id(f.node.id())}
		return f.think(m, func(ctx context.Context, c grpc.ClientConnInterface) answer { return dryRun(ctx, c, req) })
	case answer:
		if msg.gen == f.gen {
			f.answer = &msg
		}
	case begun:
		f.begun(m, msg)
	}
	return nil
}

// dryRun asks what a copy would do: how much is to be sent and how much is
// there already. The question is taken back when nobody waits for it any more.
func dryRun(ctx context.Context, conn grpc.ClientConnInterface, req *pb.StartTransferRequest) answer {
	c := pb.NewTransferServiceClient(conn)
	r, err := c.Start(ctx, req)
	if err != nil {
		return answer{fault: cleanFault(fault.FromStatus(err))}
	}
	t := r.GetTransfer()
	w, err := c.Watch(ctx, &pb.WatchTransferRequest{Id: t.GetId()})
	for err == nil && !isOver(t.GetState()) {
		var ev *pb.WatchTransferResponse
		if ev, err = w.Recv(); err == nil && ev.GetTransfer() != nil {
			t = ev.GetTransfer()
		}
	}
	if !isOver(t.GetState()) {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), askWithin)
		defer cancel()
		// When even this fails the scan ends by itself: it sends nothing.
		_, _ = c.Cancel(stop, &pb.CancelTransferRequest{Id: t.GetId()})
	}
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return answer{fault: cleanFault(fault.FromStatus(err))}
	case t.GetError() != nil:
		e := cleanMessage(t).GetError()
		return answer{fault: &fault.Fault{Reason: fault.Reason(e.GetReason()), What: e.GetWhat(), Where: e.GetWhere(), Why: e.GetWhy(), Fix: e.GetFix()}}
	}
	s := fmt.Sprintf("checked: %s to send in %s", sizeText(t.GetTotalBytes()), count(int(t.GetTotalFiles()), "file", "files"))
	if t.GetSkippedBytes() > 0 {
		s += ", " + sizeText(t.GetSkippedBytes()) + " are there already"
	}
	lines := []cell{{s, plainInk}}
	for _, x := range cleanMessage(t).GetWarnings() {
		lines = append(lines, cell{"▲ " + x, lookInk})
	}
	return answer{lines: lines}
}

func (f *copyForm) draw(m *Model, w, h int) []string {
	lw := w * 55 / 100
	lh := max(min(max(len(f.model.options), len(f.node.options))+2, h-7), 3)
	out := indent(beside(f.model.draw(m.t, lw, lh, !f.onNode), f.node.draw(m.t, w-lw, lh, f.onNode)))
	out = append(out, "")
	for _, c := range f.say(m) {
		for _, l := range wrap(c.text, w-2) {
			out = append(out, "  "+m.t.put(c.ink, l))
		}
	}
	if f.failed != nil {
		out = append(out, "")
		out = append(out, indent(faultLines(m.t, f.failed, w-2))...)
	}
	return out
}

// say is the answer to the choice: what is known at once, then what the agent
// found out.
func (f *copyForm) say(m *Model) []cell {
	if why := f.whyNot(m); why != "" && !f.starting {
		return []cell{{"○ " + why, lookInk}}
	}
	s := m.snap
	x, n := s.model[f.model.id()], s.node[f.node.id()]
	out := []cell{{copyOffer(s, x, n), plainInk}}
	out = append(out, cell{fmt.Sprintf("%s has %s free on disk, %s after it", n.GetName(), sizeText(n.GetDiskFreeBytes()), sizeText(n.GetDiskFreeBytes()-min(x.GetSizeBytes(), n.GetDiskFreeBytes()))), plainInk})
	switch {
	case f.starting:
		out = append(out, cell{"it is being started …", moveInk})
	case f.failed != nil:
	case f.answer == nil:
		out = append(out, cell{"the agent looks at the files on both nodes …", dimInk})
	case f.answer.fault != nil:
		out = append(out, cell{"✕ " + f.answer.fault.Error(), badInk})
		if f.answer.fault.Fix != "" {
			out = append(out, cell{"to do: " + f.answer.fault.Fix, boldInk})
		}
	default:
		out = append(out, f.answer.lines...)
	}
	return out
}

// copyOffer says from where, over what and how long at the least a model would
// be copied.
func copyOffer(s *snapshot, x *pb.Model, n *pb.Node) string {
	var from []string
	best, cables := 0.0, 0
	for _, src := range sourcesOf(s, x) {
		from = append(from, src.GetName())
		sum, c := 0.0, 0
		for _, l := range s.GetLinks() {
			a, b := l.GetA().GetNodeId(), l.GetB().GetNodeId()
			if l.GetState() == pb.LinkState_LINK_STATE_PROVEN && (a == src.GetId() && b == n.GetId() || b == src.GetId() && a == n.GetId()) {
				sum += l.GetNegotiatedGbps()
				c++
			}
		}
		if sum > best || (c > cables && sum == best) {
			best, cables = sum, c
		}
	}
	text := fmt.Sprintf("%s from %s to %s", sizeText(x.GetSizeBytes()), strings.Join(from, " or "), n.GetName())
	switch {
	case cables == 0:
		return text + ": no cable between them is proven, so it goes over the LAN"
	case best == 0:
		return text + " over " + count(cables, "cable", "cables")
	}
	return fmt.Sprintf("%s over %s, %s Gb/s: %s at the best", text, count(cables, "cable", "cables"), gbpsText(best),
		clockText(time.Duration(float64(x.GetSizeBytes())*8/(best*1e9)*float64(time.Second)).Truncate(time.Second)+time.Second))
}
