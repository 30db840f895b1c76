package tui

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

// The drawing of five to eight nodes: two columns, in the order in which cables
// lead from one to the next, so that a ring or a line goes around the edge.
// Each pair of nodes with cables gets one line with one label; where a line
// finds no way the table is drawn instead.
const (
	roundMost   = 8  // nodes
	roundEdges  = 16 // pairs of nodes
	roundRow    = 3  // lines of a node at the least, roundTall at the most
	roundTall   = 5
	labelLeast  = 8  // cells of a label: "✕ down" and a blank on each side
	labelNormal = 14 // that are kept free for it where there is room
)

// around orders the nodes so that neighbours stand next to each other: from one
// with few cables along cables that nobody has come by yet.
func (f frame) around() []*pb.Node {
	nodes := f.s.GetNodes()
	pairs, order := f.pairs()
	next := make([][]int, len(nodes))
	for k := range pairs {
		i, j := order[k[0]], order[k[1]]
		next[i], next[j] = append(next[i], j), append(next[j], i)
	}
	fewest := func(of []int, free func(int) bool) int {
		best := -1
		for _, i := range of {
			if free(i) && (best < 0 || len(next[i]) < len(next[best]) || len(next[i]) == len(next[best]) && i < best) {
				best = i
			}
		}
		return best
	}
	every := make([]int, len(nodes))
	for i := range every {
		every[i] = i
	}
	seen := make([]bool, len(nodes))
	free := func(i int) bool { return !seen[i] }
	var out []*pb.Node
	for len(out) < len(nodes) {
		i := fewest(every, free)
		for i >= 0 {
			seen[i] = true
			out = append(out, nodes[i])
			i = fewest(next[i], free)
		}
	}
	return out
}

// routes is how the lines of such a drawing go.
type routes struct {
	tall, cw int
	blocks   []block // in the order of around
	edges    []roundEdge
	ways     []*way // of each edge
	h        int
}

// routeCache keeps the last routes that were found: looking for them takes
// longer than drawing, and they change only with nodes, cables and size.
type routeCache struct {
	key string
	r   *routes // nil where there are none
}

// routes returns nil where the table is better.
func (f frame) routes(w, h int) *routes {
	nodes := f.s.GetNodes()
	rows := (len(nodes) + 1) / 2
	pairs, _ := f.pairs()
	if len(nodes) <= 4 || len(nodes) > roundMost || h/rows < roundRow || len(pairs) > roundEdges {
		return nil
	}
	edges := f.edges(pairs)
	loose := len(f.loose())
	var key strings.Builder
	fmt.Fprint(&key, w, " ", h, " ", loose)
	for _, n := range nodes {
		fmt.Fprint(&key, "\x00", n.GetId(), " ", width(n.GetName()), " ", width(nodeSub(n)))
	}
	for _, e := range edges {
		fmt.Fprint(&key, "\x01", e.a, "\x02", e.b)
	}
	if f.cache != nil && f.cache.key == key.String() {
		return f.cache.r.with(f, edges)
	}
	tall := min(h/rows, roundTall)
	// What stands below comes first, as long as there is room for the drawing.
	for tall > roundRow && rows*tall+loose+1 > h {
		tall--
	}
	cw := 8
	for _, n := range nodes {
		cw = max(cw, width(n.GetName())+2, width(nodeSub(n))+2)
	}
	cw = min(cw, (w-2*labelLeast-2)/2)
	var found *routes
search:
	for ; tall >= roundRow; tall-- {
		// A line that found no way is laid first the next time.
		order := slices.Clone(edges)
		for range len(order) {
			r, stuck := f.lay(w, cw, tall, h, order)
			if r != nil {
				found = r
				break search
			}
			e := order[stuck]
			order = append([]roundEdge{e}, slices.Delete(order, stuck, stuck+1)...)
		}
	}
	if f.cache != nil {
		*f.cache = routeCache{key.String(), found}
	}
	return found
}

// with is the same ways with the nodes and cables as they are now.
func (r *routes) with(f frame, edges []roundEdge) *routes {
	if r == nil {
		return nil
	}
	c := *r
	c.blocks, c.edges = slices.Clone(r.blocks), slices.Clone(r.edges)
	for i := range c.blocks {
		c.blocks[i].n = f.s.node[c.blocks[i].n.GetId()]
	}
	for i, e := range c.edges {
		for _, now := range edges {
			if now.a == e.a && now.b == e.b {
				c.edges[i] = now
			}
		}
	}
	return &c
}

// round is the drawing, nil where the table is better.
func (f frame) round(w, h int) *drawing {
	r := f.routes(w, h)
	if r == nil {
		return nil
	}
	d := &drawing{c: newCanvas(w, r.h), at: map[string][2]int{}}
	blocks := map[string]block{}
	for _, b := range r.blocks {
		blocks[b.n.GetId()] = b
	}
	for i, e := range r.edges {
		way := r.ways[i]
		d.c.line(edgePen(e.links), way.points...)
		x := way.x
		text, ink := f.edgeLabel(e.links, blocks[e.a], blocks[e.b], way.room, !way.beside)
		switch {
		case !way.beside:
			x += (way.room - width(text)) / 2
		case way.left: // ends at the line
			x += way.room - width(text)
		}
		d.c.text(x, way.y, ink, text)
		for _, l := range e.links {
			d.at[l.GetId()] = [2]int{x + width(text)/2, way.y}
		}
	}
	for _, b := range r.blocks {
		f.nodeBlock(d, b)
	}
	return d
}

// roundEdge is all cables between two nodes.
type roundEdge struct {
	a, b  string
	links []*pb.Link
}

// edges are the pairs in a fixed order.
func (f frame) edges(pairs map[[2]string][]*pb.Link) (out []roundEdge) {
	for k, ls := range pairs {
		out = append(out, roundEdge{k[0], k[1], ls})
	}
	slices.SortFunc(out, func(x, y roundEdge) int { return cmp.Or(cmp.Compare(x.a, y.a), cmp.Compare(x.b, y.b)) })
	// Short ones first: they have the fewest ways to go.
	place := map[string]int{}
	nodes := f.around()
	for i, n := range nodes {
		place[n.GetId()] = i
	}
	far := func(e roundEdge) int {
		n := place[e.a] - place[e.b]
		return min(max(n, -n), len(nodes)-max(n, -n))
	}
	slices.SortStableFunc(out, func(x, y roundEdge) int { return far(x) - far(y) })
	return out
}

// lay finds a way for each edge in order; where one has none, it returns its
// number.
func (f frame) lay(w, cw, tall, h int, edges []roundEdge) (*routes, int) {
	nodes := f.around()
	rows := (len(nodes) + 1) / 2
	// The last row needs no room below it.
	r := &routes{tall: tall, cw: cw, edges: edges, h: min((rows-1)*tall+max(blockLines, tall-1), h)}
	g := &grid{w: w, h: r.h, at: make([]occupant, w*r.h)}
	blocks := map[string]block{}
	for i, n := range nodes {
		b := block{n: n, w: cw, y: i * tall}
		if i >= rows {
			b.x, b.y = w-cw, (len(nodes)-1-i)*tall
		}
		blocks[n.GetId()] = b
		r.blocks = append(r.blocks, b)
		for line := range blockLines {
			if x := g.inner(b, b.y+line); b.x == 0 {
				g.text(0, b.y+line, x)
			} else {
				g.text(x+1, b.y+line, w-x-1)
			}
		}
	}
	for i, e := range edges {
		way := g.find(blocks[e.a], blocks[e.b], tall, w)
		if way == nil {
			return nil, i
		}
		g.take(way)
		r.ways = append(r.ways, way)
	}
	return r, 0
}

// occupant is what a cell of the grid holds.
type occupant uint8

const (
	nothing occupant = iota
	level            // a line from left to right
	upright
	taken // a corner or text
)

// grid is where lines may go.
type grid struct {
	w, h int
	at   []occupant
}

func (g *grid) text(x, y, n int) {
	for i := x; i < x+n; i++ {
		if i >= 0 && i < g.w && y >= 0 && y < g.h {
			g.at[y*g.w+i] = taken
		}
	}
}

// way is a line that can be drawn, with the place of its label.
type way struct {
	points     [][2]int
	x, y, room int
	beside     bool // the label stands beside an upright line
	left       bool // on the left of it
	cost       int
}

// find returns the cheapest way between two nodes, nil where there is none.
func (g *grid) find(a, b block, tall, w int) *way {
	if a.x == b.x && (a.y-b.y == tall || b.y-a.y == tall) {
		if c := g.between(a, b); c != nil {
			return c
		}
	}
	var best *way
	for ya := a.y; ya < min(a.y+tall, g.h); ya++ {
		for yb := b.y; yb < min(b.y+tall, g.h); yb++ {
			try := func(c *way) {
				if c == nil {
					return
				}
				if c.cost += leaves(a, ya) + leaves(b, yb); best == nil || c.cost < best.cost {
					best = c
				}
			}
			if ya == yb && a.x != b.x {
				try(g.check([][2]int{{g.inner(a, ya), ya}, {g.inner(b, yb), yb}}))
				continue
			}
			if ya == yb {
				continue
			}
			for x := labelLeast; x < w-labelLeast; x++ {
				try(g.check([][2]int{{g.inner(a, ya), ya}, {x, ya}, {x, yb}, {g.inner(b, yb), yb}}))
			}
		}
	}
	return best
}

// inner is where a line leaves a node on one of its lines.
func (g *grid) inner(b block, y int) int {
	text := 3
	switch y - b.y {
	case 0:
		text = min(width(b.n.GetName()), b.w-2) + 2
	case 1:
		text = min(width(nodeSub(b.n)), g.w/2-3) + 2
	}
	if b.x == 0 {
		return text + 1
	}
	return b.x + b.w - text - 2
}

// leaves is what it costs to leave a node on one of its lines: those with its
// name and size show best whose line it is.
func leaves(b block, y int) int {
	return []int{0, 3, 30, 40, 50}[min(y-b.y, 4)]
}

// between is a line straight down from one node to the next, beside which
// stands the label.
func (g *grid) between(a, b block) *way {
	if a.y > b.y {
		a, b = b, a
	}
	x, left := 2, false
	if a.x > 0 {
		x, left = g.w-3, true
	}
	top, bottom := a.y+blockLines, b.y-1
	if top > bottom {
		return nil
	}
	for y := top; y <= bottom; y++ {
		if g.at[y*g.w+x] != nothing {
			return nil
		}
	}
	c := &way{points: [][2]int{{x, top}, {x, bottom}}, y: (top + bottom) / 2, beside: true, left: left}
	if top == bottom { // a line of one cell has no direction to draw
		c.points = [][2]int{{x, top}, {x, top + 1}}
	}
	step := 1
	if left {
		step = -1
	}
	for i := x + step; i > 0 && i < g.w-1 && g.at[c.y*g.w+i] == nothing && c.room < labelNormal; i += step {
		c.room++
	}
	c.x = x + 1
	if left {
		c.x = x - c.room
	}
	if c.room < labelLeast {
		return nil
	}
	return c
}

// check returns the way through some points if it is free: it may cross others
// at right angles only. Its label stands on its longest level stretch that
// crosses nothing.
func (g *grid) check(points [][2]int) *way {
	c := &way{points: points}
	for i := 1; i < len(points); i++ {
		x, y, tx, ty := points[i-1][0], points[i-1][1], points[i][0], points[i][1]
		dx, dy := sign(tx-x), sign(ty-y)
		if dx == 0 && dy == 0 {
			return nil
		}
		// A line goes away from its node, not through it.
		if i == 1 && len(points) > 2 && (x < g.w/2) != (dx > 0) || i == 3 && (tx < g.w/2) != (dx < 0) {
			return nil
		}
		run, start := 0, x
		for {
			if x < 0 || y < 0 || x >= g.w || y >= g.h {
				return nil
			}
			corner := x == points[i-1][0] && y == points[i-1][1] || x == tx && y == ty
			at := g.at[y*g.w+x]
			end := corner && (i == 1 && x == points[0][0] && y == points[0][1] || i == len(points)-1 && x == tx && y == ty)
			switch {
			case at == nothing:
			case corner, at == taken, at == level && dx != 0, at == upright && dy != 0:
				return nil
			default:
				c.cost += 12 // a crossing
			}
			c.cost++
			if dx != 0 && at == nothing && !(corner && !end) {
				if run == 0 {
					start = x
				}
				run++
				if run > c.room {
					c.room, c.x, c.y = run, min(start, x), y
				}
			} else {
				run = 0
			}
			if x == tx && y == ty {
				break
			}
			x, y = x+dx, y+dy
		}
	}
	if c.room < labelLeast {
		return nil
	}
	// A bend costs something, and so does a label that has to be short.
	c.cost = c.cost/2 + 6*(len(points)-2) + 2*max(labelNormal-c.room, 0)
	return c
}

func sign(n int) int { return max(min(n, 1), -1) }

// take marks the cells of a way, and those of its label.
func (g *grid) take(c *way) {
	mark := func(x, y int, o occupant) {
		if x < 0 || y < 0 || x >= g.w || y >= g.h {
			return
		}
		if at := &g.at[y*g.w+x]; *at == nothing {
			*at = o
		} else {
			*at = taken
		}
	}
	for i := 1; i < len(c.points); i++ {
		x, y, tx, ty := c.points[i-1][0], c.points[i-1][1], c.points[i][0], c.points[i][1]
		dx, dy := sign(tx-x), sign(ty-y)
		o := level
		if dy != 0 {
			o = upright
		}
		for ; x != tx || y != ty; x, y = x+dx, y+dy {
			mark(x, y, o)
		}
		mark(tx, ty, o)
	}
	if n := min(c.room, labelNormal); c.beside {
		x := c.x
		if c.left {
			x += c.room - n
		}
		g.text(x, c.y, n)
		c.x, c.room = x, n
	} else {
		g.text(c.x+(c.room-n)/2, c.y, n)
		c.x, c.room = c.x+(c.room-n)/2, n
	}
}
