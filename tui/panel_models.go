package tui

import (
	"fmt"

	pb "tbcluster/api/tbcluster/v1"
)

// copyCell is how one model stands on one node.
func copyCell(s *snapshot, m *pb.Model, node string) cell {
	var best *pb.ModelCopy
	for _, c := range m.GetCopies() {
		if c.GetNodeId() == node && (best == nil || c.GetComplete()) {
			best = c
		}
	}
	if best.GetComplete() {
		return cell{"●", plainInk}
	}
	for _, t := range s.GetTransfers() {
		if t.GetDestinationNodeId() == node && !isOver(t.GetState()) && copies(s, t, m) {
			return cell{fmt.Sprintf("%d %%", percent(t.GetDoneBytes(), t.GetTotalBytes())), moveInk}
		}
	}
	if best != nil {
		return cell{"▲", lookInk}
	}
	return cell{"·", dimInk}
}

// copies reports whether a transfer copies a model: one of its sources is where
// a copy of the model lies.
func copies(s *snapshot, t *pb.Transfer, m *pb.Model) bool {
	for _, src := range t.GetSources() {
		if src == m.GetName() || src == m.GetId() {
			return true
		}
		for _, c := range m.GetCopies() {
			if c.GetNodeId() != t.GetDestinationNodeId() && fileName(c.GetPath()) == fileName(src) {
				return true
			}
		}
	}
	return false
}

// drawModels is the matrix of models and nodes: as many nodes as fit, this one
// first among those left out of none.
func drawModels(f frame) ([]string, string) {
	if len(f.s.GetModels()) == 0 {
		return f.empty("no node has a model yet", "download one to any node (Hugging Face, LM Studio, llama.cpp and Exo caches are found), or `tbcluster models add PATH`"), ""
	}
	if len(f.items) == 0 {
		return f.empty("no model fits what you look for", "esc shows all"), ""
	}
	nodes := f.s.GetNodes()
	const cellMin = 5
	nameWidth := 8
	for _, it := range f.items {
		nameWidth = max(nameWidth, width(f.s.model[it.id].GetName()))
	}
	quant := 0
	if f.w >= 60 {
		for _, it := range f.items {
			quant = max(quant, width(f.s.model[it.id].GetQuant())+2)
		}
	}
	const sizeWidth = 6
	room := f.w - 2 - sizeWidth - 1 - quant
	cellWidth := cellMin
	for _, n := range nodes {
		cellWidth = max(cellWidth, min(width(n.GetName()), 9))
	}
	for cellWidth > cellMin && room-(cellWidth+1)*len(nodes) < min(nameWidth, 12) {
		cellWidth--
	}
	numbers := room-(cellWidth+1)*len(nodes) < min(nameWidth, 12)
	if numbers {
		// As in the table of nodes, where the numbers stand beside the names.
		cellWidth = len(fmt.Sprint(len(nodes)))
	}
	fit := min(len(nodes), max((room-min(nameWidth, 12))/(cellWidth+1), 1))
	nameWidth = min(nameWidth, room-(cellWidth+1)*fit)
	more := ""
	if fit < len(nodes) {
		more = fmt.Sprintf(" +%d", len(nodes)-fit)
		nameWidth = max(nameWidth-width(more), 6)
	}
	head := " " + fill("", nameWidth+1+sizeWidth+quant)
	for j, n := range nodes[:fit] {
		i, name := dimInk, n.GetName()
		if numbers {
			name = fmt.Sprint(j + 1)
		}
		if n.GetState() == pb.NodeState_NODE_STATE_DOWN {
			i = badInk
		}
		head += " " + f.put(i, center(name, cellWidth))
	}
	head += f.put(dimInk, more)
	var rows []row
	for _, it := range f.items {
		m := f.s.model[it.id]
		l := f.put(boldInk, fill(m.GetName(), nameWidth)) + " " + right(sizeText(m.GetSizeBytes()), sizeWidth)
		if quant > 0 {
			l += "  " + f.put(dimInk, fill(m.GetQuant(), quant-2))
		}
		for _, n := range nodes[:fit] {
			c := copyCell(f.s, m, n.GetId())
			if numbers && c.ink == moveInk {
				c.text = "◐"
			}
			l += " " + f.put(c.ink, center(c.text, cellWidth))
		}
		rows = append(rows, row{it.id, []string{l}})
	}
	return f.list([]string{head}, rows)
}

func center(s string, w int) string {
	s = cut(s, w)
	n := w - width(s)
	return fill("", n/2) + s + fill("", n-n/2)
}
