package tui

import (
	"fmt"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

// drawCluster draws nodes with cables as edges between them when there are
// eight at most and there is room, else a table of nodes with a matrix of links.
func drawCluster(f frame) ([]string, string) {
	n := len(f.s.GetNodes())
	if d := f.drawing(); d != nil {
		lines := d.c.lines(f.theme)
		for i := range lines {
			lines[i] = " " + lines[i]
		}
		return append(lines, f.belowDrawing(f.h-len(lines))...), ""
	}
	if n == 0 {
		return f.empty("no node is known yet", ""), ""
	}
	return f.clusterTable()
}

// drawing is a topology with the places of its items, for moving about.
type drawing struct {
	c  *canvas
	at map[string][2]int // centre of each node and link, by item ID
}

// block is a node in the drawing.
type block struct {
	n       *pb.Node
	x, y, w int
}

const blockLines = 2

// drawing returns nil where the table is better.
func (f frame) drawing() *drawing {
	nodes := f.s.GetNodes()
	n := len(nodes)
	need := map[int]int{1: 2, 2: 2, 3: 7, 4: 9}[n]
	w := f.w - 2
	if w < 34 || len(f.items) != len(nodes)+len(f.s.GetLinks()) {
		return nil
	}
	if n > 4 {
		return f.round(w, f.h)
	}
	if need == 0 || f.h < need {
		return nil
	}
	h := need
	if n >= 3 {
		// Room for what stands below the drawing comes first.
		h = min(max(need, f.h-len(f.loose())-1), need+4)
		h = min(h, f.h)
	}
	d := &drawing{c: newCanvas(w, h), at: map[string][2]int{}}
	bw := 8
	for _, x := range nodes {
		bw = max(bw, width(x.GetName())+2, width(nodeSub(x))+2)
	}
	bw = min(bw, (w-12)/2)
	corners := [][2]int{{0, 0}, {w - bw, 0}, {0, h - blockLines}, {w - bw, h - blockLines}}
	blocks := map[string]block{}
	var order []block
	for i, x := range nodes {
		b := block{x, corners[i][0], corners[i][1], bw}
		blocks[x.GetId()] = b
		order = append(order, b)
	}
	pairs, _ := f.pairs()
	for i, a := range order {
		for j := i + 1; j < len(order); j++ {
			if ls := pairs[[2]string{a.n.GetId(), order[j].n.GetId()}]; len(ls) > 0 {
				f.edge(d, i, j, n, order, ls)
			}
		}
	}
	for _, b := range order {
		f.nodeBlock(d, b)
	}
	return d
}

// pairs is the links between each two paired nodes, keyed in the order in
// which nodes are listed.
func (f frame) pairs() (m map[[2]string][]*pb.Link, order map[string]int) {
	m, order = map[[2]string][]*pb.Link{}, map[string]int{}
	for i, n := range f.s.GetNodes() {
		order[n.GetId()] = i
	}
	for _, l := range f.s.GetLinks() {
		i, ok := order[l.GetA().GetNodeId()]
		j, ok2 := order[l.GetB().GetNodeId()]
		if !ok || !ok2 || i == j {
			continue
		}
		if i > j {
			i, j = j, i
		}
		k := [2]string{f.s.GetNodes()[i].GetId(), f.s.GetNodes()[j].GetId()}
		m[k] = append(m[k], l)
	}
	return m, order
}

// loose is the links that are no edge of the drawing: an end is unknown or has
// not paired, or both are one machine.
func (f frame) loose() (out []*pb.Link) {
	_, order := f.pairs()
	for _, l := range f.s.GetLinks() {
		a, ok := order[l.GetA().GetNodeId()]
		b, ok2 := order[l.GetB().GetNodeId()]
		if !ok || !ok2 || a == b {
			out = append(out, l)
		}
	}
	return out
}

// nodeSub is the line below a node's name.
func nodeSub(n *pb.Node) string {
	s := memoryText(n.GetMemory().GetTotalBytes())
	switch {
	case n.GetState() != pb.NodeState_NODE_STATE_UP:
		return say(nodeWords, n.GetState()).text
	case n.GetSelf():
		return s + " here"
	}
	return s
}

func (f frame) nodeBlock(d *drawing, b block) {
	w := say(nodeWords, b.n.GetState())
	name := cut(b.n.GetName(), b.w-2)
	i := boldInk
	if w.ink == badInk {
		i = badInk
	}
	if b.n.GetId() == f.chosen && f.focused {
		i = chosenInk
	}
	sub := cut(nodeSub(b.n), d.c.w/2-3)
	// At the right the block ends where the drawing ends.
	nx, sx := b.x, b.x+2
	if b.x > 0 {
		nx = b.x + b.w - width(name) - 2
		sx = b.x + b.w - width(sub)
	}
	d.c.text(nx, b.y, w.ink, w.symbol)
	if i == chosenInk {
		d.c.text(nx+1, b.y, i, "▸")
	}
	d.c.text(nx+2, b.y, i, name)
	subInk := dimInk
	if w.ink != plainInk {
		subInk = w.ink
	}
	d.c.text(sx, b.y+1, subInk, sub)
	d.at[b.n.GetId()] = [2]int{b.x + b.w/2, b.y}
}

// edge draws the cables between two nodes of the drawing, as one line.
func (f frame) edge(d *drawing, i, j, n int, blocks []block, ls []*pb.Link) {
	a, b := blocks[i], blocks[j]
	p := edgePen(ls)
	w, h := d.c.w, d.c.h
	nameEnd := func(x block) int { return x.x + 2 + min(width(x.n.GetName()), x.w-2) + 1 }
	nameStart := func(x block) int { return x.x + x.w - min(width(x.n.GetName()), x.w-2) - 2 - 2 }
	var lx, ly, room int // centre and room of the label
	level := true
	leftX, rightX := 2, w-3
	switch {
	case a.y == b.y: // top or bottom
		x0, x1 := nameEnd(a), nameStart(b)
		d.c.line(p, [2]int{x0, a.y}, [2]int{x1, a.y})
		lx, ly, room = (x0+x1)/2, a.y, x1-x0-3
	case a.x == b.x: // left or right side
		x := leftX
		if a.x > 0 {
			x = rightX
		}
		d.c.line(p, [2]int{x, a.y + blockLines}, [2]int{x, b.y - 1})
		lx, ly, level = x, h/2, false
		room = 6
		if n == 3 {
			room = w - 12
		}
	case n == 3: // top right to bottom left: down and then left
		x0 := nameEnd(b)
		d.c.line(p, [2]int{rightX, blockLines}, [2]int{rightX, b.y}, [2]int{x0, b.y})
		lx, ly, room = (x0+rightX)/2, b.y, rightX-x0-4
	case a.x < b.x: // top left to bottom right
		y := blockLines + 1
		d.c.line(p, [2]int{leftX + 7, blockLines}, [2]int{leftX + 7, y}, [2]int{rightX - 7, y}, [2]int{rightX - 7, b.y - 1})
		lx, ly, room = (leftX+rightX-3)/2, y, rightX-leftX-19
	default: // top right to bottom left
		y := h - blockLines - 2
		d.c.line(p, [2]int{rightX - 10, blockLines}, [2]int{rightX - 10, y}, [2]int{leftX + 7, y}, [2]int{leftX + 7, b.y - 1})
		lx, ly, room = (leftX+rightX-3)/2, y, rightX-leftX-19
	}
	for _, l := range ls {
		d.at[l.GetId()] = [2]int{lx, ly}
	}
	label, ink := f.edgeLabel(ls, a, b, room, level)
	x := lx - width(label)/2
	if !level { // beside the line, inwards
		x = lx - 1
		if lx > w/2 {
			x = lx + 2 - width(label)
		}
	}
	d.c.text(min(max(x, 0), w-width(label)), ly, ink, label)
}

// edgePen is double where bytes can go over a cable, dashed where over none.
func edgePen(ls []*pb.Link) pen {
	p := pen{badInk, true}
	for _, l := range ls {
		switch l.GetState() {
		case pb.LinkState_LINK_STATE_PROVEN:
			return pen{plainInk, false}
		case pb.LinkState_LINK_STATE_DOWN:
		default:
			p = pen{lookInk, true}
		}
	}
	return p
}

// edgeLabel says what the cables between two nodes are: negotiated Gb/s, how
// many, whether below what they can, how many are down, and what moves. The
// longest form that fits is taken.
func (f frame) edgeLabel(ls []*pb.Link, a, b block, room int, level bool) (string, ink) {
	byRate := map[string]int{}
	var ratesSeen []string
	lower, gone, early, up := false, 0, "", 0
	var moved uint64
	picked := 0
	for i, l := range ls {
		if l.GetId() == f.chosen && f.focused {
			picked = i + 1
		}
		switch l.GetState() {
		case pb.LinkState_LINK_STATE_PROVEN:
			g := gbpsText(l.GetNegotiatedGbps())
			if byRate[g] == 0 {
				ratesSeen = append(ratesSeen, g)
			}
			byRate[g]++
			up++
			lower = lower || below(l)
			moved += f.s.rates.now(l.GetId())
		case pb.LinkState_LINK_STATE_DOWN:
			gone++
		default:
			early = say(linkWords, l.GetState()).text
		}
	}
	var parts []string
	for _, g := range ratesSeen {
		if c := byRate[g]; c > 1 {
			g = fmt.Sprintf("%s ×%d", g, c)
		}
		parts = append(parts, g)
	}
	short := strings.Join(parts, "+")
	i := plainInk
	if lower {
		short += " ▲"
		i = lookInk
	}
	if early != "" {
		short = strings.TrimSpace(short + " ○ " + early)
		i = lookInk
	}
	if gone > 0 {
		s := "✕ down"
		if up > 0 || early != "" {
			s = fmt.Sprintf("✕%d", gone)
		}
		short = strings.TrimSpace(short + " " + s)
		i = badInk
	}
	forms := []string{short}
	if up > 0 && gone == 0 && early == "" {
		forms = append([]string{strings.Replace(short, " ▲", "", 1) + " Gb/s" + map[bool]string{true: " ▲"}[lower]}, forms...)
	}
	if moved > 0 {
		arrow := f.direction(ls, a, b, level)
		r := arrow + " " + rateText(moved)
		forms = append([]string{forms[0] + " " + r, short + " " + r, r}, forms...)
		if i == plainInk {
			i = moveInk
		}
	}
	if picked > 0 {
		i = chosenInk
		for k := range forms {
			forms[k] = "▸" + forms[k]
		}
		if len(ls) > 1 {
			forms = []string{fmt.Sprintf("%s (%d of %d)", forms[0], picked, len(ls)), fmt.Sprintf("▸%s %d/%d", short, picked, len(ls)), fmt.Sprintf("▸%d/%d", picked, len(ls))}
		}
	}
	for _, s := range forms {
		if width(s)+2 <= room {
			return " " + s + " ", i
		}
	}
	return " " + cut(forms[len(forms)-1], max(room-2, 3)) + " ", i
}

// direction is an arrow from where more of the bytes come from.
func (f frame) direction(ls []*pb.Link, a, b block, level bool) string {
	ids := map[string]bool{}
	for _, l := range ls {
		ids[l.GetId()] = true
	}
	var there, back uint64
	for _, t := range f.s.GetTransfers() {
		if t.GetState() != pb.TransferState_TRANSFER_STATE_COPYING {
			continue
		}
		for _, p := range t.GetLinks() {
			switch {
			case !ids[p.GetLinkId()]:
			case t.GetSourceNodeId() == a.n.GetId():
				there += p.GetBytesPerSecond()
			case t.GetSourceNodeId() == b.n.GetId():
				back += p.GetBytesPerSecond()
			}
		}
	}
	arrows := [3]string{"▸", "◂", "↔"}
	switch {
	case !level:
		arrows = [3]string{"▾", "▴", "↕"}
	case a.x > b.x: // a is drawn at the right
		arrows = [3]string{"◂", "▸", "↔"}
	}
	switch {
	case there > back:
		return arrows[0]
	case back > there:
		return arrows[1]
	}
	return arrows[2]
}

// belowDrawing uses the lines that are left: cables that are no edges, then
// how to go on when this node is alone.
func (f frame) belowDrawing(room int) (out []string) {
	add := func(s string) {
		if len(out) < room {
			out = append(out, s)
		}
	}
	loose := f.loose()
	if len(f.s.GetNodes()) == 1 {
		add("")
		for _, l := range wrap("No other node yet. Press p here to show a code, then on the other machine run", f.w-2) {
			add(" " + l)
		}
		add("   " + f.put(boldInk, "tbcluster pair CODE"))
		if len(f.s.GetLinks()) == 0 {
			for _, l := range wrap("Cables are found by themselves; none is seen yet.", f.w-2) {
				add(" " + f.put(dimInk, l))
			}
		}
	}
	if len(f.s.GetNodes()) == 2 && len(f.items) > 2 {
		// Two nodes leave room for each cable by itself.
		add("")
		lines, _ := f.list(nil, f.cableRows())
		for _, l := range lines {
			add(l)
		}
		return out
	}
	if n := len(f.s.GetNodes()); n > 1 && room-len(loose)-1 > n {
		add("")
		for _, l := range f.nodeLines() {
			add(" " + l)
		}
	}
	if len(loose) > 0 {
		add("")
	}
	for _, l := range loose {
		add(f.looseLine(l))
	}
	return out
}

// nodeLines is what else there is to say of each node.
func (f frame) nodeLines() (out []string) {
	var cells [][]cell
	for _, n := range f.s.GetNodes() {
		var engines []string
		for _, e := range n.GetEngines() {
			if e.GetAvailable() {
				engines = append(engines, e.GetName())
			}
		}
		mem, disk := "", ""
		if n.GetState() != pb.NodeState_NODE_STATE_DOWN {
			mem = memoryText(n.GetMemory().GetAvailableBytes()) + " free"
			disk = sizeText(n.GetDiskFreeBytes()) + " disk"
		}
		cells = append(cells, []cell{
			{say(nodeWords, n.GetState()).symbol + " " + n.GetName(), dimInk}, {mem, dimInk}, {disk, dimInk},
			{strings.Join(engines, " "), dimInk}, {cmpOr(n.GetOsVersion(), n.GetOs()), dimInk},
		})
	}
	cols := []column{{flex: true, min: 10}, {right: true}, {right: true, drop: 1}, {drop: 3}, {drop: 2}}
	widths, gap := layout(cols, cells, f.w-2)
	for _, c := range cells {
		out = append(out, f.tableLine(cols, widths, gap, c))
	}
	return out
}

func (f frame) looseLine(l *pb.Link) string {
	c := f.cableCells(l)
	s := f.put(c[0].ink, c[0].text)
	if l.GetId() == f.chosen && f.focused {
		return f.theme.chosen("▸"+s, f.w)
	}
	return " " + cut(s, f.w-1)
}

// clusterTable is for many nodes or little room: a row for each node, with one
// column for each other node, then the cables.
func (f frame) clusterTable() ([]string, string) {
	nodes := f.s.GetNodes()
	pairs, order := f.pairs()
	show := 0
	for _, it := range f.items {
		if it.kind == nodeKind {
			show++
		}
	}
	if show == 0 {
		lines, note := f.list(nil, f.cableRows())
		return lines, note
	}
	nameW := 6
	for _, n := range nodes {
		nameW = max(nameW, width(n.GetName()))
	}
	num := len(fmt.Sprint(len(nodes)))
	const memW, stateW = 7, 8
	cells := num + 1
	matrix := min(len(nodes), max((f.w-2-(num+1)-2-min(nameW, 10)-1-memW-1)/cells, 0))
	if len(pairs) == 0 {
		matrix = 0
	}
	nameW = min(nameW, f.w-2-(num+1)-2-1-memW-matrix*cells-1)
	word := 0
	if extra := f.w - 2 - (num + 1) - 2 - nameW - 1 - memW - matrix*cells - 1; extra > stateW {
		word = min(extra, 14)
	}
	head := " " + strings.Repeat(" ", num+3+nameW+1+memW+word)
	for j := range matrix {
		head += " " + right(fmt.Sprint(j+1), num)
	}
	if matrix < len(nodes) && matrix > 0 {
		head += "…"
	}
	var rows []row
	for _, it := range f.items {
		if it.kind != nodeKind {
			continue
		}
		n := f.s.node[it.id]
		i := order[n.GetId()]
		w := say(nodeWords, n.GetState())
		nameInk := boldInk
		if w.ink != plainInk {
			nameInk = w.ink
		}
		l := f.put(dimInk, right(fmt.Sprint(i+1), num)) + " " + f.put(w.ink, w.symbol) + " " +
			f.put(nameInk, fill(n.GetName(), nameW)) + " "
		if word == 0 && n.GetState() != pb.NodeState_NODE_STATE_UP {
			l += f.put(w.ink, right(w.text, memW))
		} else {
			l += right(memoryText(n.GetMemory().GetTotalBytes()), memW)
		}
		if word > 0 {
			text := w.text
			if n.GetSelf() {
				text += ", here"
			}
			l += " " + f.put(w.ink, fill(text, word-1))
		}
		for j := range matrix {
			a, b := min(i, j), max(i, j)
			text, k := "·", dimInk
			if i == j {
				text = " "
			} else if ls := pairs[[2]string{nodes[a].GetId(), nodes[b].GetId()}]; len(ls) > 0 {
				text, k = matrixCell(ls)
			}
			l += " " + f.put(k, right(text, num))
		}
		rows = append(rows, row{it.id, []string{l}})
	}
	var top []string
	if matrix > 0 {
		top = []string{f.put(dimInk, head)}
	}
	return f.list(top, append(rows, f.cableRows()...))
}

// matrixCell is the cables between two nodes in one cell.
func matrixCell(ls []*pb.Link) (string, ink) {
	up, gone, low := 0, 0, false
	for _, l := range ls {
		switch l.GetState() {
		case pb.LinkState_LINK_STATE_PROVEN:
			up++
			low = low || below(l)
		case pb.LinkState_LINK_STATE_DOWN:
			gone++
		}
	}
	switch {
	case gone > 0:
		return "✕", badInk
	case up < len(ls):
		return "○", lookInk
	case low:
		return "▲", lookInk
	case up > 1:
		return fmt.Sprint(min(up, 9)), plainInk
	}
	return "●", plainInk
}

func (f frame) cableRows() (rows []row) {
	var cells [][]cell
	var ids []string
	for _, it := range f.items {
		if it.kind == linkKind {
			cells = append(cells, f.cableCells(f.s.link(it.id)))
			ids = append(ids, it.id)
		}
	}
	widths, gap := layout(cableColumns, cells, f.w-2)
	for i, id := range ids {
		r := row{id, []string{f.tableLine(cableColumns, widths, gap, cells[i])}}
		if l := f.s.link(id); l.GetReason() != "" && l.GetState() != pb.LinkState_LINK_STATE_PROVEN {
			r.lines = append(r.lines, "  "+f.put(say(linkWords, l.GetState()).ink, cut(l.GetReason(), f.w-4)))
		}
		rows = append(rows, r)
	}
	return rows
}
