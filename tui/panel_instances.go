package tui

import (
	"fmt"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

var instanceColumns = []column{{flex: true, min: 12}, {drop: 3}, {drop: 2}, {drop: 4}, {right: true}, {right: true, drop: 5}}

// instanceStatus is the state with the number that goes with it.
func instanceStatus(i *pb.Instance) cell {
	w := say(instanceWords, i.GetState())
	s := w.text
	switch {
	case i.GetState() == pb.InstanceState_INSTANCE_STATE_LOADING && i.GetStepsTotal() > 0:
		s += fmt.Sprintf(" %d %%", percent(uint64(i.GetStepsDone()), uint64(i.GetStepsTotal())))
	case i.GetState() == pb.InstanceState_INSTANCE_STATE_READY && i.GetTokensPerSecond() > 0:
		s += fmt.Sprintf(" %.0f t/s", i.GetTokensPerSecond())
	}
	return cell{s, w.ink}
}

func drawInstances(f frame) ([]string, string) {
	if len(f.items) == 0 {
		return f.empty("nothing runs yet", "P places a model on the nodes"), ""
	}
	var cells [][]cell
	for _, it := range f.items {
		i := f.s.instance(it.id)
		w := say(instanceWords, i.GetState())
		nodes := rankNodes(i)
		if n := len(i.GetRanks()); n > strings.Count(nodes, "+")+1 {
			nodes = fmt.Sprintf("%s ×%d", nodes, n)
		}
		age := ""
		if i.GetStateSince() != nil {
			age = agoText(since(i.GetStateSince(), f.now))
		}
		name := cell{w.symbol + " " + i.GetName(), w.ink}
		if w.ink == plainInk {
			name.ink = boldInk
		}
		model := i.GetModel()
		if model == i.GetName() {
			model = ""
		}
		cells = append(cells, []cell{name, {i.GetEngine(), dimInk}, {nodes, plainInk}, {model, dimInk}, instanceStatus(i), {age, dimInk}})
	}
	widths, gap := layout(instanceColumns, cells, f.w-2)
	var rows []row
	for n, it := range f.items {
		i := f.s.instance(it.id)
		r := row{it.id, []string{f.tableLine(instanceColumns, widths, gap, cells[n])}}
		if i.GetReason() != "" && i.GetState() != pb.InstanceState_INSTANCE_STATE_READY {
			ls := wrap(i.GetReason(), max(f.w-4, 1))
			if len(ls) > 2 {
				ls = []string{ls[0], cut(ls[1]+" "+ls[2], f.w-4)}
			}
			for _, l := range ls {
				r.lines = append(r.lines, "  "+f.put(say(instanceWords, i.GetState()).ink, l))
			}
		}
		rows = append(rows, r)
	}
	return f.list(nil, rows)
}

// empty is a panel without items: what is so, and what to do.
func (f frame) empty(what, todo string) []string {
	var out []string
	for _, l := range wrap(what, f.w-2) {
		out = append(out, " "+l)
	}
	for _, l := range wrap(todo, f.w-2) {
		out = append(out, " "+f.put(dimInk, l))
	}
	return out
}
