package tui

import (
	"fmt"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

var cableColumns = []column{{flex: true, min: 22}, {right: true}, {drop: 2}, {right: true, drop: 4}, {right: true, drop: 5}, {right: true, drop: 1}, {drop: 3}}

// drawNodes is the table of nodes and that of cables below it.
func drawNodes(f frame) ([]string, string) {
	if len(f.s.GetNodes()) == 0 {
		return f.empty("no node is known yet", ""), ""
	}
	if len(f.items) == 0 {
		return f.empty("no node and no cable fits what you look for", "esc shows all"), ""
	}
	rows := f.nodeRows()
	rows = append(rows, f.cableRows()...)
	if len(f.s.GetLinks()) == 0 {
		lines, note := f.list(nil, rows)
		return append(lines, f.empty("no cable is seen", "plug a Thunderbolt or USB4 cable between two machines; r looks again")...), note
	}
	return f.list(nil, rows)
}

var nodeColumns = []column{{flex: true, min: 8}, {drop: 1}, {right: true}, {right: true, drop: 2}, {right: true, drop: 4}, {drop: 5}, {drop: 6}, {right: true, drop: 3}}

// nodeRows is a row for each node: how it is, what of its memory and disk is
// free, its processors, engines and system, and how far it is.
func (f frame) nodeRows() (rows []row) {
	var cells [][]cell
	var ids []string
	for _, it := range f.items {
		if it.kind != nodeKind {
			continue
		}
		n := f.s.node[it.id]
		w := say(nodeWords, n.GetState())
		name := cell{w.symbol + " " + n.GetName(), w.ink}
		if w.ink == plainInk {
			name.ink = boldInk
		}
		var engines []string
		for _, e := range n.GetEngines() {
			if e.GetAvailable() {
				engines = append(engines, e.GetName())
			}
		}
		state := w.text
		if n.GetSelf() {
			state = "here"
		}
		mem, disk, cpu, rtt := memoryText(n.GetMemory().GetAvailableBytes())+" of "+memoryText(n.GetMemory().GetTotalBytes())+" free", "", "", ""
		if n.GetState() == pb.NodeState_NODE_STATE_DOWN || n.GetMemory().GetTotalBytes() == 0 {
			mem = ""
		}
		if n.GetDiskFreeBytes() > 0 && n.GetState() != pb.NodeState_NODE_STATE_DOWN {
			disk = sizeText(n.GetDiskFreeBytes()) + " disk"
		}
		if n.GetCpuCount() > 0 {
			cpu = fmt.Sprintf("%d CPUs", n.GetCpuCount())
		}
		if n.GetRttUs() > 0 {
			rtt = rttText(n.GetRttUs())
		}
		cells = append(cells, []cell{name, {state, w.ink}, {mem, plainInk}, {disk, plainInk}, {cpu, dimInk}, {strings.Join(engines, " "), dimInk}, {cmpOr(n.GetOsVersion(), n.GetOs()), dimInk}, {rtt, dimInk}})
		ids = append(ids, it.id)
	}
	widths, gap := layout(nodeColumns, cells, f.w-2)
	for i, id := range ids {
		r := row{id, []string{f.tableLine(nodeColumns, widths, gap, cells[i])}}
		if n := f.s.node[id]; n.GetReason() != "" && n.GetState() != pb.NodeState_NODE_STATE_UP {
			r.lines = append(r.lines, "  "+f.put(say(nodeWords, n.GetState()).ink, cut(n.GetReason(), f.w-4)))
		}
		rows = append(rows, r)
	}
	return rows
}

func (f frame) cableCells(l *pb.Link) []cell {
	w := say(linkWords, l.GetState())
	name := cell{w.symbol + " " + linkName(l), w.ink}
	if w.ink == plainInk {
		name.ink = boldInk
	}
	gbps := cell{gbpsText(l.GetNegotiatedGbps()) + " Gb/s", plainInk}
	if below(l) {
		gbps = cell{"▲ " + gbpsText(l.GetNegotiatedGbps()) + "/" + gbpsText(l.GetCapableGbps()) + " Gb/s", lookInk}
	}
	if l.GetState() == pb.LinkState_LINK_STATE_DOWN {
		gbps = cell{"–", dimInk}
	}
	rtt := cell{}
	if l.GetRttUs() > 0 && l.GetState() == pb.LinkState_LINK_STATE_PROVEN {
		rtt = cell{rttText(l.GetRttUs()), dimInk}
	}
	measured := cell{}
	if v := l.GetMeasuredBytesPerSecond(); v > 0 {
		measured = cell{"max " + rateText(v), dimInk}
	}
	rate, chart := cell{}, cell{}
	if v := f.s.rates.now(l.GetId()); v > 0 {
		rate = cell{rateText(v), moveInk}
		chart = cell{spark(f.s.rates.link[l.GetId()], 12), moveInk}
	}
	return []cell{name, gbps, {w.text, w.ink}, rtt, measured, rate, chart}
}
