package plan

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// Make works out where a model fits. The fewest ranks that fit win; among
// those, a node that has the model already; then the engine that comes first,
// the faster cables, the larger share of memory left, and the names.
func Make(in Input) Plan {
	p := planner{in: in, context: ContextFor(in.Request.Context, in.Model.Context)}
	p.needs = needsOf(in.Model, p.context)
	p.nodes = slices.Clone(in.Nodes)
	slices.SortFunc(p.nodes, func(a, b Node) int { return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.ID, b.ID)) })
	options := p.options()
	slices.SortStableFunc(options, better)
	out := Plan{Context: p.context}
	for i := range options {
		if !options[i].Feasible {
			continue
		}
		options[i].Score = 1 / float64(1+i)
	}
	if len(options) > 0 && options[0].Feasible {
		out.Choice = &options[0].Option
	}
	for i := range options {
		if i > 0 || out.Choice == nil {
			out.Alternatives = append(out.Alternatives, options[i].Option)
		}
	}
	out.ID = p.id(out.Choice)
	return out
}

// option is an Option with what it is compared by.
type option struct {
	Option
	engine int // place in Input.Engines
	copies int
	gbps   float64
	slack  float64 // least share of a budget that is left
}

func better(a, b option) int {
	return cmp.Or(
		-compareBool(a.Feasible, b.Feasible),
		cmp.Compare(len(a.Ranks), len(b.Ranks)),
		cmp.Compare(a.copies, b.copies),
		cmp.Compare(a.engine, b.engine),
		-cmp.Compare(a.gbps, b.gbps),
		// In steps, so that the noise of free memory does not decide.
		-cmp.Compare(int(a.slack*10), int(b.slack*10)),
		slices.CompareFunc(a.Ranks, b.Ranks, func(x, y Rank) int { return strings.Compare(x.NodeName, y.NodeName) }),
	)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

type planner struct {
	in      Input
	nodes   []Node // by name
	needs   needs
	context int
}

func (p *planner) options() []option {
	var out []option
	ranks := max(1, p.in.Request.MinRanks)
	for ; ranks <= max(1, len(p.nodes), p.in.Request.MinRanks); ranks++ {
		found := false
		for i, e := range p.in.Engines {
			if p.in.Request.Engine != "" && p.in.Request.Engine != e.Name {
				continue
			}
			for _, o := range p.withEngine(e, ranks) {
				o.engine = i
				found = found || o.Feasible
				out = append(out, o)
			}
		}
		if found {
			break
		}
	}
	if len(out) == 0 {
		o := option{Option: Option{Engine: p.in.Request.Engine}}
		o.reject(fault.Unsupported, fmt.Sprintf("no engine %q is known", p.in.Request.Engine))
		out = append(out, o)
	}
	return out
}

func (o *option) reject(r fault.Reason, why string) {
	if o.Rejected == "" {
		o.Rejected, o.Reason = r, why
	}
}

// withEngine returns the options of so many ranks of one engine, one for each
// node as rank 0.
func (p *planner) withEngine(e spec.Traits, ranks int) []option {
	var out []option
	if ranks > len(p.nodes) {
		o := option{Option: Option{Engine: e.Name}}
		o.reject(fault.DoesNotFit, fmt.Sprintf("%d ranks were asked for and there are %d nodes", ranks, len(p.nodes)))
		return []option{o}
	}
	for _, head := range p.nodes {
		o := option{Option: Option{Engine: e.Name}}
		p.addRank(&o, e, head, "")
		switch {
		case !slices.Contains(e.Formats, p.in.Model.Format):
			o.reject(fault.Unsupported, fmt.Sprintf("%s does not load %s", e.Name, p.in.Model.Format))
		case p.in.Model.Layers < 1:
			o.reject(fault.ModelBroken, "the layers of the model could not be counted")
		default:
			if r, why := p.unusable(head, e, 0); r != "" {
				o.reject(r, why)
			}
		}
		p.place(&o, e, head)
		if ranks > 1 && o.Rejected == "" {
			p.spread(&o, e, head, ranks)
		}
		if o.Rejected == "" {
			p.fit(&o)
		}
		out = append(out, o)
	}
	return out
}

// unusable says why a node cannot hold a rank of that engine.
func (p *planner) unusable(n Node, e spec.Traits, index int) (fault.Reason, string) {
	if len(p.in.Request.Nodes) > 0 && !slices.Contains(p.in.Request.Nodes, n.ID) {
		return fault.DoesNotFit, n.Name + " is not among the nodes that may be used"
	}
	if !n.Up {
		why := n.Name + " is down"
		if n.Reason != "" {
			why += ": " + n.Reason
		}
		return fault.NodeDown, why
	}
	engine := engineOf(n, e.Name)
	if !engine.Available {
		why := fmt.Sprintf("%s is not installed on %s", e.Name, n.Name)
		if engine.Reason != "" {
			why += ": " + engine.Reason
		}
		return fault.EngineMissing, why
	}
	role := e.Roles[min(index, 1)]
	if _, ok := engine.Programs[role]; !ok && len(engine.Programs) > 0 {
		return fault.EngineMissing, fmt.Sprintf("%s on %s lacks the program for role %s", e.Name, n.Name, role)
	}
	return "", ""
}

func engineOf(n Node, name string) spec.Engine {
	for _, e := range n.Engines {
		if e.Name == name {
			return e
		}
	}
	return spec.Engine{Name: name}
}

func (p *planner) addRank(o *option, e spec.Traits, n Node, link string) {
	o.Ranks = append(o.Ranks, Rank{
		NodeID: n.ID, NodeName: n.Name, Role: e.Roles[min(len(o.Ranks), 1)],
		HeadroomBytes: headroom(n.MemoryTotal), BudgetBytes: n.MemoryBudget, LinkID: link,
	})
}

// place looks for the files of the newest rank on its node.
func (p *planner) place(o *option, e spec.Traits, n Node) {
	rank := &o.Ranks[len(o.Ranks)-1]
	if len(o.Ranks) > 1 && !e.FilesEverywhere {
		return
	}
	var broken string
	elsewhere := false
	for _, c := range sortedCopies(p.in.Copies) {
		switch {
		case c.NodeID == n.ID && c.Complete:
			rank.ModelPath = c.Path
			return
		case c.NodeID == n.ID:
			broken = c.Reason
		case c.Complete && slices.ContainsFunc(p.nodes, func(n Node) bool { return n.ID == c.NodeID && n.Up }):
			elsewhere = true
		}
	}
	rank.MustCopy = true
	o.copies++
	switch {
	case broken != "" && !elsewhere:
		o.reject(fault.ModelBroken, fmt.Sprintf("the copy on %s cannot be used: %s", n.Name, broken))
	case !elsewhere:
		o.reject(fault.ModelIncomplete, "no node that is up has a whole copy of the model")
	case !p.in.Request.CopyMissing:
		o.reject(fault.ModelIncomplete, fmt.Sprintf("%s has no whole copy of the model, and copying was not asked for", n.Name))
	}
}

func sortedCopies(in []spec.Copy) []spec.Copy {
	out := slices.Clone(in)
	slices.SortFunc(out, func(a, b spec.Copy) int {
		return cmp.Or(strings.Compare(a.NodeID, b.NodeID), strings.Compare(a.Path, b.Path))
	})
	return out
}

// spread adds the other ranks: of the nodes that have a cable, the ones with
// the largest budgets.
func (p *planner) spread(o *option, e spec.Traits, head Node, ranks int) {
	if !e.Split {
		o.reject(fault.Unsupported, fmt.Sprintf("%s does not split a model", e.Name))
		return
	}
	if !head.CanClose && !p.in.Request.Insecure {
		o.reject(fault.RanksInsecure, fmt.Sprintf("the ports of ranks cannot be closed to the LAN on %s", head.Name))
		return
	}
	var why []string
	var reason fault.Reason
	refuse := func(r fault.Reason, text string) {
		reason = cmp.Or(reason, r)
		why = append(why, text)
	}
	others := slices.Clone(p.nodes)
	slices.SortStableFunc(others, func(a, b Node) int { return -cmp.Compare(a.MemoryTotal, b.MemoryTotal) })
	chosen := []Node{head}
	for _, n := range others {
		if n.ID == head.ID || len(chosen) == ranks {
			continue
		}
		if r, text := p.unusable(n, e, 1); r != "" {
			refuse(r, text)
			continue
		}
		if a, b := engineOf(head, e.Name).Version, engineOf(n, e.Name).Version; e.SameBuild && a != b {
			refuse(fault.EngineMismatch, fmt.Sprintf("the builds of %s differ: %s has %s, %s has %s", e.Name, head.Name, a, n.Name, b))
			continue
		}
		if !n.CanClose && !p.in.Request.Insecure {
			refuse(fault.RanksInsecure, fmt.Sprintf("the ports of ranks cannot be closed to the LAN on %s", n.Name))
			continue
		}
		with := chosen[:1]
		if !e.Star {
			with = chosen
		}
		link, ok := p.cables(n, with)
		if !ok {
			refuse(fault.DoesNotFit, fmt.Sprintf("no proven cable joins %s and %s", head.Name, n.Name))
			continue
		}
		p.addRank(o, e, n, link.ID)
		p.place(o, e, n)
		o.gbps += link.Gbps
		chosen = append(chosen, n)
	}
	if len(chosen) < ranks {
		o.reject(reason, fmt.Sprintf("%d ranks with %s at the head: %s", ranks, head.Name, strings.Join(why, "; ")))
	}
}

// cables returns the fastest proven cable from n to the first of the nodes; ok
// is false unless there is one to each.
func (p *planner) cables(n Node, to []Node) (best Link, ok bool) {
	for i, t := range to {
		found := Link{}
		has := false
		for _, l := range p.in.Links {
			if !l.Proven || !(l.A == n.ID && l.B == t.ID || l.B == n.ID && l.A == t.ID) {
				continue
			}
			if !has || l.Gbps > found.Gbps || l.Gbps == found.Gbps && l.ID < found.ID {
				found, has = l, true
			}
		}
		if !has {
			return Link{}, false
		}
		if i == 0 {
			best = found
		}
	}
	return best, true
}

// fit counts memory and splits the layers.
func (p *planner) fit(o *option) {
	n := len(o.Ranks)
	caps := make([]int, n)
	weights := make([]uint64, n)
	for i := range o.Ranks {
		r := &o.Ranks[i]
		fixed := add(p.needs.fixed(i, n), r.HeadroomBytes)
		if r.BudgetBytes > fixed && p.needs.largest > 0 {
			caps[i] = int(min((r.BudgetBytes-fixed)/p.needs.largest, maxLayers))
		}
		weights[i] = p.total(r.NodeID)
	}
	layers := split(p.in.Model.Layers, weights, caps)
	if layers == nil {
		p.tooLarge(o, caps)
		return
	}
	o.slack = 1
	at := 0
	var parts []string
	for i := range o.Ranks {
		r := &o.Ranks[i]
		r.Layers = layers[i]
		r.NeedBytes = add(add(p.needs.fixed(i, n), r.HeadroomBytes), p.needs.of(at, at+layers[i]))
		at += layers[i]
		o.slack = min(o.slack, 1-float64(r.NeedBytes)/float64(r.BudgetBytes))
		parts = append(parts, fmt.Sprintf("%s needs %s (%s of it headroom) of %s for %d layers", r.NodeName, gib(r.NeedBytes), gib(r.HeadroomBytes), gib(r.BudgetBytes), r.Layers))
	}
	o.Feasible = true
	o.Reason = fmt.Sprintf("fits with a context of %d tokens: %s", p.context, strings.Join(parts, "; "))
	if o.copies > 0 {
		o.Reason += fmt.Sprintf("; the model (%s) is copied first", gib(p.in.Model.SizeBytes))
	}
}

func (p *planner) total(id string) uint64 {
	for _, n := range p.nodes {
		if n.ID == id {
			return n.MemoryTotal
		}
	}
	return 0
}

func (p *planner) tooLarge(o *option, caps []int) {
	n := len(o.Ranks)
	var parts []string
	for i := range o.Ranks {
		r := &o.Ranks[i]
		r.NeedBytes = add(add(p.needs.fixed(i, n), r.HeadroomBytes), p.needs.of(0, p.in.Model.Layers)/uint64(n))
		parts = append(parts, fmt.Sprintf("%s may use %s and has room for %d", r.NodeName, gib(r.BudgetBytes), caps[i]))
	}
	var all uint64
	for i := range n {
		all = add(all, add(p.needs.fixed(i, n), o.Ranks[i].HeadroomBytes))
	}
	all = add(all, p.needs.of(0, p.in.Model.Layers))
	o.reject(fault.DoesNotFit, fmt.Sprintf("%d layers with a context of %d tokens need %s (headroom included): %s", p.in.Model.Layers, p.context, gib(all), strings.Join(parts, "; ")))
}

// id is made of parts, so that Changed can say what has changed: the request,
// the model, the engines of the choice, and the choice.
func (p *planner) id(choice *Option) string {
	var engines []string
	type rest struct {
		Engine string
		Ranks  []Rank
	}
	var chosen rest
	if choice != nil {
		chosen.Engine = choice.Engine
		for _, r := range choice.Ranks {
			for _, n := range p.nodes {
				if n.ID == r.NodeID {
					engines = append(engines, engineOf(n, choice.Engine).Version)
				}
			}
			r.BudgetBytes = 0 // changes all the time, and does not matter while it fits
			chosen.Ranks = append(chosen.Ranks, r)
		}
	}
	request := p.in.Request
	request.Nodes = slices.Sorted(slices.Values(request.Nodes))
	return strings.Join([]string{"plan", short(request), short(p.in.Model.ID), short(engines), short(chosen)}, "-")
}

func short(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:6])
}

// parts names what each part of a plan's ID stands for.
var parts = []string{"", "what was asked for", "the model", "the build of the engine", "where it would run"}

// Changed says what differs between a plan that was shown and the one of now,
// as a PlanStale fault; nil when nothing does.
func Changed(shown string, now Plan) error {
	if shown == now.ID {
		return nil
	}
	what := "it is no plan of this version"
	a, b := strings.Split(shown, "-"), strings.Split(now.ID, "-")
	if len(a) == len(b) {
		var names []string
		for i := 1; i < len(a); i++ {
			if a[i] != b[i] {
				names = append(names, parts[i])
			}
		}
		what = strings.Join(names, " and ") + " changed"
	}
	if now.Choice != nil {
		var names []string
		for _, r := range now.Choice.Ranks {
			names = append(names, r.NodeName)
		}
		what += "; it would now run on " + strings.Join(names, ", ")
	}
	return &fault.Fault{Reason: fault.PlanStale, What: "the plan does not hold any more", Why: what, Fix: "look at the new plan, then place again"}
}

// fixes say what to do, by the reason of what was rejected.
var fixes = map[fault.Reason]string{
	fault.DoesNotFit:      "free memory, ask for a smaller context (--context), or take a smaller quantisation",
	fault.EngineMissing:   "`tbcluster engine install llamacpp` on the node installs it",
	fault.EngineMismatch:  "install the same build on every node",
	fault.ModelIncomplete: "let it be copied (--copy), or copy it with `tbcluster cp`",
	fault.ModelBroken:     "fetch or copy the model again",
	fault.NodeDown:        "start the node, or choose others",
	fault.RanksInsecure:   "run the agent as root on the nodes, or accept it with --insecure-ranks",
	fault.Unsupported:     "choose another engine or model",
}

// mostShown is how many rejected options an error lists.
const mostShown = 8

// Fault says why nothing fits, with every rejected option; nil when there is a
// choice.
func (p Plan) Fault(model string) error {
	if p.Choice != nil {
		return nil
	}
	reason := fault.DoesNotFit
	var why []string
	asked := p.Alternatives
	// What the person ruled out is no reason, unless there is no other.
	if some := slices.DeleteFunc(slices.Clone(asked), func(o Option) bool { return strings.HasSuffix(o.Reason, "not among the nodes that may be used") }); len(some) > 0 {
		asked = some
	}
	for i, o := range asked {
		if i == 0 {
			reason = o.Rejected
		} else if o.Rejected != reason {
			reason = fault.DoesNotFit
		}
		if len(why) < mostShown && !slices.Contains(why, o.Reason) {
			why = append(why, o.Reason)
		}
	}
	// A mix is told by the first reason that is not about memory.
	if reason == fault.DoesNotFit {
		for _, o := range asked {
			if o.Rejected == fault.DoesNotFit {
				return p.fault(model, fault.DoesNotFit, why)
			}
		}
		reason = asked[0].Rejected
	}
	return p.fault(model, reason, why)
}

func (p Plan) fault(model string, r fault.Reason, why []string) error {
	return &fault.Fault{Reason: r, What: model + " fits nowhere", Why: strings.Join(why, "\n"), Fix: fixes[r]}
}
