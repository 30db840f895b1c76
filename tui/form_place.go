package tui

import (
	"context"
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/grpc"

	"tbcluster/api/fault"
	pb "tbcluster/api/tbcluster/v1"
)

// placeForm places a model on nodes.
type placeForm struct {
	chooser
	model, node, engine picker
	missing             picker // what to do about nodes that lack the model
	on                  int    // which of them has the keys
	top                 int    // of the answer
}

func (m *Model) openPlace() tea.Cmd {
	f := &placeForm{
		model: picker{title: "Model"}, node: picker{title: "Nodes, memory free", many: true, on: map[string]bool{}},
		engine: picker{title: "Engine"},
		missing: picker{title: "Missing", options: []option{
			{id: "copy", name: "copy it"}, {id: "leave", name: "skip it"}}},
	}
	f.self = f
	it := m.target()
	f.options(m.snap)
	f.model.pick("")
	switch it.kind {
	case modelKind:
		f.model.pick(it.id)
		f.on = 1
	case nodeKind:
		f.node.on[it.id] = true
		f.node.pick(it.id)
	}
	f.options(m.snap)
	m.setForm(f)
	return f.changed()
}

func (f *placeForm) options(s *snapshot) {
	var models []option
	for _, x := range s.GetModels() {
		o := option{id: x.GetId(), name: x.GetName(), note: sizeText(x.GetSizeBytes())}
		if len(sourcesOf(s, x)) == 0 {
			o.why = "no complete copy is up"
		}
		models = append(models, o)
	}
	f.model.set(models)
	x := s.model[f.model.id()]
	engines := []option{{id: "", name: "any"}}
	var nodes []option
	for _, n := range s.GetNodes() {
		note := memoryText(n.GetMemory().GetAvailableBytes())
		if copyCell(s, x, n.GetId()).text == "●" {
			note = "● " + note
		}
		o := option{id: n.GetId(), name: n.GetName(), note: note}
		if n.GetState() != pb.NodeState_NODE_STATE_UP {
			o.why = say(nodeWords, n.GetState()).text
		}
		nodes = append(nodes, o)
		for _, e := range n.GetEngines() {
			if e.GetAvailable() && !slices.ContainsFunc(engines, func(o option) bool { return o.id == e.GetName() }) {
				engines = append(engines, option{id: e.GetName(), name: e.GetName()})
			}
		}
	}
	f.node.set(nodes)
	f.engine.set(engines)
}

func (f *placeForm) lists() []*picker {
	return []*picker{&f.model, &f.node, &f.engine, &f.missing}
}

func (*placeForm) title() string { return "Place a model: start an instance" }
func (*placeForm) hint() string {
	return "space node on/off (none: any)   tab next list   enter place   esc leave it"
}

// placement is what is asked for.
func (f *placeForm) placement(s *snapshot) *pb.Placement {
	p := &pb.Placement{Model: s.id(f.model.id()), Engine: f.engine.id(), CopyMissing: f.missing.id() == "copy"}
	for _, id := range f.node.several() {
		p.Nodes = append(p.Nodes, s.id(id))
	}
	return p
}

func (f *placeForm) whyNot(m *Model) string {
	if w := needAgent(m); w != "" {
		return w
	}
	switch {
	case f.starting:
		return "it is being started"
	case f.model.now().why != "":
		return f.model.now().name + ": " + f.model.now().why
	}
	for _, o := range f.node.options {
		if f.node.on[o.id] && o.why != "" {
			return o.name + " is " + o.why
		}
	}
	return ""
}

func (f *placeForm) key(m *Model, k tea.KeyMsg) (tea.Cmd, bool) {
	switch k.String() {
	case "esc", "q":
		return nil, false
	case "tab", "right", "l":
		f.on = (f.on + 1) % len(f.lists())
		return nil, true
	case "shift+tab", "left", "h":
		f.on = (f.on + len(f.lists()) - 1) % len(f.lists())
		return nil, true
	case "pgdown":
		f.top += 5
		return nil, true
	case "pgup":
		f.top = max(f.top-5, 0)
		return nil, true
	case "enter":
		why := f.whyNot(m)
		switch {
		case why != "":
		case f.answer == nil:
			why = "the plan is not there yet"
		case f.answer.fault != nil:
			why = "there is no plan: " + f.answer.fault.Error()
		case f.answer.plan.GetChoice() == nil:
			why = "it fits nowhere that is allowed; the reasons stand above"
		}
		if why != "" {
			m.flash = flash{"enter: " + why, lookInk}
			return nil, true
		}
		name := f.model.now().name
		// What was planned is what is placed: the agent refuses when the world
		// has changed since.
		req := &pb.PlaceRequest{RequestId: f.request, Placement: f.placement(m.snap), PlanId: f.answer.plan.GetPlanId()}
		return f.start(m, func(ctx context.Context, c grpc.ClientConnInterface) begun {
			r, err := pb.NewInstanceServiceClient(c).Place(ctx, req)
			return begun{"placing " + name + " as " + r.GetInstance().GetName(), 2, err}
		}), true
	}
	if !f.lists()[f.on].key(k) {
		return nil, true
	}
	f.options(m.snap)
	f.top = 0
	return f.changed(), true
}

func (f *placeForm) hear(m *Model, msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case stateChanged:
		if m.snap != nil {
			f.options(m.snap)
		}
	case rested:
		if msg.gen != f.gen || f.starting || f.whyNot(m) != "" {
			return nil
		}
		req := &pb.PlanRequest{Placement: f.placement(m.snap)}
		return f.think(m, func(ctx context.Context, c grpc.ClientConnInterface) answer {
			r, err := pb.NewInstanceServiceClient(c).Plan(ctx, req)
			if err != nil {
				return answer{fault: cleanFault(fault.FromStatus(err))}
			}
			// The ID goes back as it came.
			id := r.GetPlanId()
			r = cleanMessage(r)
			r.PlanId = id
			return answer{plan: r}
		})
	case answer:
		if msg.gen == f.gen {
			f.answer = &msg
		}
	case begun:
		f.begun(m, msg)
		if f.failed != nil && f.failed.Reason == fault.PlanStale {
			// A new plan for the same choice; what was wrong stays on the screen.
			why := f.failed
			cmd := f.changed()
			f.failed = why
			return cmd
		}
	}
	return nil
}

func (f *placeForm) draw(m *Model, w, h int) []string {
	need := 3
	for _, l := range f.lists() {
		need = max(need, len(l.options)+2)
	}
	lh := min(need, max(h/2-1, 4))
	// Engines and what to do about missing files are short words.
	widths := [4]int{(w - 26) * 44 / 100, 0, 13, 13}
	widths[1] = w - widths[0] - widths[2] - widths[3]
	var boxes [][]string
	for i, l := range f.lists() {
		boxes = append(boxes, l.draw(m.t, widths[i], lh, i == f.on))
	}
	out := append(indent(beside(boxes...)), "")
	var say []string
	for _, c := range f.say(m) {
		for i, l := range wrap(c.text, w-4) {
			if i > 0 {
				l = "  " + l
			}
			say = append(say, "  "+m.t.put(c.ink, l))
		}
	}
	if f.failed != nil {
		say = append(append(indent(faultLines(m.t, f.failed, w-2)), ""), say...)
	}
	room := max(h-len(out), 1)
	from := max(min(f.top, len(say)-room), 0)
	say = say[from:]
	if len(say) > room {
		say = append(say[:room-1:room-1], "  "+m.t.put(dimInk, fmt.Sprintf("… %d more lines: page down", len(say)-room+1)))
	}
	return append(out, say...)
}

// say is the plan: the choice with its ranks, then why the others are out.
func (f *placeForm) say(m *Model) []cell {
	if why := f.whyNot(m); why != "" && !f.starting {
		return []cell{{"○ " + why, lookInk}}
	}
	switch {
	case f.starting:
		return []cell{{"it is being started …", moveInk}}
	case f.answer == nil:
		return []cell{{"the agent plans …", dimInk}}
	case f.answer.fault != nil:
		out := []cell{{"✕ " + f.answer.fault.Error(), badInk}}
		if f.answer.fault.Fix != "" {
			out = append(out, cell{"to do: " + f.answer.fault.Fix, boldInk})
		}
		return out
	}
	return planLines(f.answer.plan)
}

// planLines is a plan in words.
func planLines(p *pb.PlanResponse) []cell {
	var out []cell
	c := p.GetChoice()
	if c == nil {
		out = append(out, cell{"✕ it fits nowhere that is allowed:", badInk})
	} else {
		out = append(out, cell{"● " + optionName(c), boldInk})
		if c.GetReason() != "" {
			out = append(out, cell{"  " + c.GetReason(), plainInk})
		}
		for _, r := range c.GetRanks() {
			s := fmt.Sprintf("  rank %d %s on %s: %s of %s", cIndex(c, r), r.GetRole(), r.GetNodeName(), memoryText(r.GetNeedBytes()), memoryText(r.GetBudgetBytes()))
			if r.GetLayers() > 0 {
				s += fmt.Sprintf(", %d layers", r.GetLayers())
			}
			if r.GetMustCopy() {
				s += ", the model is copied there first"
			}
			out = append(out, cell{s, plainInk})
		}
	}
	for _, feasible := range []bool{true, false} {
		for _, o := range p.GetAlternatives() {
			if o.GetFeasible() != feasible || (c != nil && optionName(o) == optionName(c) && feasible) {
				continue
			}
			mark := "○ "
			if !feasible {
				mark = "✕ "
			}
			out = append(out, cell{mark + optionName(o) + because(o.GetReason()), dimInk})
		}
	}
	return out
}

func cIndex(o *pb.PlanOption, r *pb.PlanRank) int { return slices.Index(o.GetRanks(), r) }

func optionName(o *pb.PlanOption) string {
	var l []string
	for _, r := range o.GetRanks() {
		l = append(l, r.GetNodeName())
	}
	return strings.TrimSpace(strings.Join(l, "+") + "  " + o.GetEngine())
}
