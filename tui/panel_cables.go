package tui

import pb "tbcluster/api/tbcluster/v1"

var cableColumns = []column{{flex: true, min: 22}, {right: true}, {drop: 2}, {right: true, drop: 4}, {right: true, drop: 1}, {drop: 3}}

func drawCables(f frame) ([]string, string) {
	if len(f.s.GetLinks()) == 0 {
		return f.empty("no cable is seen", "plug a Thunderbolt or USB4 cable between two machines; r looks again"), ""
	}
	if len(f.items) == 0 {
		return f.empty("no cable fits what you look for", "esc shows all"), ""
	}
	var cells [][]cell
	for _, it := range f.items {
		l := f.s.link(it.id)
		cells = append(cells, f.cableCells(l))
	}
	widths, gap := layout(cableColumns, cells, f.w-2)
	var rows []row
	for n, it := range f.items {
		l := f.s.link(it.id)
		r := row{it.id, []string{f.tableLine(cableColumns, widths, gap, cells[n])}}
		if l.GetReason() != "" && l.GetState() != pb.LinkState_LINK_STATE_PROVEN {
			r.lines = append(r.lines, "  "+f.put(say(linkWords, l.GetState()).ink, cut(l.GetReason(), f.w-4)))
		}
		rows = append(rows, r)
	}
	return f.list(nil, rows)
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
	rate, chart := cell{}, cell{}
	if v := f.s.rates.now(l.GetId()); v > 0 {
		rate = cell{rateText(v), moveInk}
		chart = cell{spark(f.s.rates.link[l.GetId()], 12), moveInk}
	}
	return []cell{name, gbps, {w.text, w.ink}, rtt, rate, chart}
}
