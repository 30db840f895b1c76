package tui

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "tbcluster/api/tbcluster/v1"
)

// sheet collects the lines of a page.
type sheet struct {
	theme
	w    int
	s    *snapshot
	now  time.Time
	rows []string
}

const labelWidth = 12

// fact is a label with a text, wrapped; without a text it is left out.
func (p *sheet) fact(label string, i ink, text string) {
	if text == "" {
		return
	}
	for n, l := range wrap(text, max(p.w-labelWidth-1, 8)) {
		if n > 0 {
			label = ""
		}
		p.rows = append(p.rows, p.put(dimInk, fill(label, labelWidth))+" "+p.put(i, l))
	}
}

func (p *sheet) word(label string, w word, reason string, at *timestamppb.Timestamp) {
	s := w.symbol + " " + w.text
	if at != nil {
		s += " for " + agoText(since(at, p.now))
	}
	p.fact(label, w.ink, s)
	p.fact("", w.ink, reason)
}

func (p *sheet) head(title string) {
	p.rows = append(p.rows, "", p.put(titleInk, title))
}

// table adds rows of cells, indented.
func (p *sheet) table(cols []column, rows [][]cell) {
	widths, gap := layout(cols, rows, p.w-2)
	for _, r := range rows {
		p.rows = append(p.rows, "  "+p.tableLine(cols, widths, gap, r))
	}
}

// facts is everything known of an item.
func (m *Model) facts(t theme, it item, w int) (name string, lines []string) {
	p := &sheet{theme: t, w: w, s: m.snap, now: m.now}
	switch it.kind {
	case nodeKind:
		name = p.node(m.snap.node[it.id])
	case linkKind:
		name = p.link(m.snap.link(it.id))
	case instanceKind:
		name = p.instance(m.snap.instance(it.id))
	case transferKind:
		name = p.transfer(m.snap.transfer(it.id))
	case modelKind:
		name = p.model(m.snap.model[it.id])
	case findingKind:
		name = p.finding(m.snap.finding(it.id))
	}
	return name, p.rows
}

var roleWords = map[pb.Role]string{pb.Role_ROLE_VIEWER: "viewer", pb.Role_ROLE_OPERATOR: "operator", pb.Role_ROLE_ADMIN: "admin"}

func (p *sheet) node(n *pb.Node) string {
	p.word("state", say(nodeWords, n.GetState()), n.GetReason(), n.GetStateSince())
	if n.GetSelf() {
		p.fact("", plainInk, "this is the node that answers here")
	}
	p.fact("node ID", plainInk, n.GetId())
	p.fact("system", plainInk, strings.TrimSpace(cmpOr(n.GetOsVersion(), n.GetOs())+"  "+n.GetArch()))
	p.fact("tbcluster", plainInk, n.GetVersion())
	mem := n.GetMemory()
	if mem.GetTotalBytes() > 0 {
		used := mem.GetTotalBytes() - min(mem.GetAvailableBytes(), mem.GetTotalBytes())
		p.fact("memory", plainInk, fmt.Sprintf("%s of %s free  %s", memoryText(mem.GetAvailableBytes()), memoryText(mem.GetTotalBytes()), bar(used, mem.GetTotalBytes(), 20)))
	}
	if n.GetCpuCount() > 0 {
		p.fact("processors", plainInk, fmt.Sprint(n.GetCpuCount()))
	}
	if n.GetDiskFreeBytes() > 0 {
		p.fact("disk", plainInk, sizeText(n.GetDiskFreeBytes())+" free")
	}
	p.fact("address", plainInk, n.GetNodeAddress())
	if n.GetControlPath() != "" || n.GetRttUs() > 0 {
		p.fact("reached", plainInk, strings.TrimSpace(n.GetControlPath()+"  "+map[bool]string{true: rttText(n.GetRttUs())}[n.GetRttUs() > 0]))
	}
	p.fact("gateway", plainInk, n.GetGatewayAddress())
	p.fact("metrics", plainInk, n.GetMetricsAddress())
	p.fact("role", plainInk, roleWords[n.GetRole()])
	if n.GetState() == pb.NodeState_NODE_STATE_UP && !n.GetPrivileged() {
		p.fact("rights", lookInk, "▲ its agent may not set addresses; `tbcluster doctor` prints the commands to run")
	}
	if n.GetStartedAt() != nil {
		p.fact("agent", plainInk, "started "+n.GetStartedAt().AsTime().Local().Format("2006-01-02 15:04:05"))
	}
	if len(n.GetEngines()) > 0 {
		p.head("Engines")
		for _, e := range n.GetEngines() {
			if e.GetAvailable() {
				p.fact("● "+e.GetName(), plainInk, strings.TrimSpace(e.GetVersion()+"  "+e.GetPath()))
			} else {
				p.fact("○ "+e.GetName(), dimInk, cmpOr(e.GetReason(), "not found"))
			}
		}
	}
	var cells [][]cell
	f := frame{theme: p.theme, s: p.s, now: p.now}
	for _, l := range p.s.GetLinks() {
		if l.GetA().GetNodeId() == n.GetId() || l.GetB().GetNodeId() == n.GetId() {
			cells = append(cells, f.cableCells(l))
		}
	}
	if len(cells) > 0 {
		p.head("Cables")
		p.table(cableColumns, cells)
	}
	var ranks [][]cell
	for _, i := range p.s.GetInstances() {
		for _, r := range i.GetRanks() {
			if r.GetNodeId() == n.GetId() {
				w := say(rankWords, r.GetState())
				ranks = append(ranks, []cell{{w.symbol + " " + i.GetName(), boldInk}, {fmt.Sprintf("rank %d %s", r.GetIndex(), r.GetRole()), dimInk}, {w.text, w.ink}})
			}
		}
	}
	if len(ranks) > 0 {
		p.head("Instances")
		p.table([]column{{flex: true, min: 10}, {}, {}}, ranks)
	}
	p.findingsOf(n.GetId(), "")
	return n.GetName()
}

// findingsOf lists what was found of a node, or of one thing on any.
func (p *sheet) findingsOf(node, subject string) {
	first := true
	for _, f := range p.s.GetFindings() {
		if (node == "" || f.GetNodeId() != node) && (subject == "" || f.GetSubject() != subject) {
			continue
		}
		if first {
			p.head("To look at")
			first = false
		}
		w := say(severityWords, f.GetSeverity())
		for i, l := range wrap(f.GetTitle()+map[bool]string{true: ". " + f.GetFix()}[f.GetFix() != ""], max(p.w-4, 8)) {
			mark := "  "
			if i == 0 {
				mark = w.symbol + " "
			}
			p.rows = append(p.rows, "  "+p.put(w.ink, mark+l))
		}
	}
}

func (p *sheet) end(label string, e *pb.LinkEnd) {
	if e == nil {
		p.fact(label, lookInk, "not known")
		return
	}
	s := e.GetNodeName()
	if e.GetNodeId() == "" {
		s += " (not paired; p pairs it)"
	}
	for _, x := range [][2]string{{"port", e.GetPort()}, {"", e.GetInterface()}, {"", e.GetAddress()}} {
		if x[1] != "" {
			s += "  " + strings.TrimSpace(x[0]+" "+x[1])
		}
	}
	if e.GetMtu() > 0 {
		s += fmt.Sprintf("  MTU %d", e.GetMtu())
	}
	p.fact(label, plainInk, s)
}

func (p *sheet) link(l *pb.Link) string {
	p.word("state", say(linkWords, l.GetState()), l.GetReason(), l.GetStateSince())
	p.fact("evidence", plainInk, l.GetEvidence())
	p.end("one end", l.GetA())
	p.end("other end", l.GetB())
	rate := gbpsText(l.GetNegotiatedGbps()) + " Gb/s negotiated"
	i := plainInk
	if l.GetCapableGbps() > 0 {
		rate += ", both ends can " + gbpsText(l.GetCapableGbps())
	}
	if l.GetLanes() > 0 {
		rate += fmt.Sprintf(", %s", count(int(l.GetLanes()), "lane", "lanes"))
	}
	if below(l) {
		rate, i = "▲ "+rate, lookInk
	}
	p.fact("rate", i, rate)
	if l.GetRttUs() > 0 {
		p.fact("round trip", plainInk, rttText(l.GetRttUs()))
	}
	if x := l.GetMeasurement(); x != nil {
		s := measuredText(l, x)
		if x.GetMeasuredAt() != nil {
			s += ", " + agoText(since(x.GetMeasuredAt(), p.now)) + " ago"
		}
		if x.GetShared() {
			s += ", beside other traffic"
		}
		p.fact("measured", plainInk, s)
	} else if l.GetState() == pb.LinkState_LINK_STATE_PROVEN {
		p.fact("measured", dimInk, "not yet; b measures it")
	}
	moving := "nothing now"
	if v := p.s.rates.now(l.GetId()); v > 0 {
		moving = rateText(v)
	}
	p.fact("moving", plainInk, moving+"  "+strings.TrimSpace(spark(p.s.rates.link[l.GetId()], rateSeconds)))
	p.fact("bytes", plainInk, fmt.Sprintf("%s sent, %s received by %s since its interface appeared", sizeText(l.GetATxBytes()), sizeText(l.GetARxBytes()), cmpOr(l.GetA().GetNodeName(), "the first end")))
	i = plainInk
	if l.GetErrors() > 0 {
		i = lookInk
	}
	p.fact("errors", i, errorsText(l))
	if n := l.GetHops(); n > 1 {
		p.fact("hops", lookInk, fmt.Sprintf("▲ %d: there is a hub between", n))
	}
	p.fact("went down", plainInk, map[bool]string{true: "never", false: count(int(l.GetFlaps()), "time", "times")}[l.GetFlaps() == 0]+" since the agent started")
	for n, x := range l.GetFlapHistory() {
		if n == 0 {
			p.head("When it was down")
		}
		s := x.GetDownAt().AsTime().Local().Format("2006-01-02 15:04:05") + "  "
		switch {
		case x.GetBackAt() == nil:
			s += "not back yet"
		case x.GetBackAt().AsTime().Sub(x.GetDownAt().AsTime()) < time.Second:
			s += "for less than a second"
		default:
			s += "for " + agoText(x.GetBackAt().AsTime().Sub(x.GetDownAt().AsTime()))
		}
		p.rows = append(p.rows, "  "+cut(s+because(x.GetReason()), max(p.w-2, 1)))
	}
	if len(l.GetPaths()) > 0 {
		p.head("Paths")
		var cells [][]cell
		for _, x := range l.GetPaths() {
			cells = append(cells, []cell{{x.GetTransport(), boldInk}, {cmpOr(x.GetDevice(), x.GetInterface()), plainInk}, {x.GetAddress() + " → " + cmpOr(x.GetPeerAddress(), "?"), plainInk}})
		}
		p.table([]column{{}, {drop: 1}, {flex: true, min: 10}}, cells)
	}
	p.findingsOf("", l.GetId())
	return linkName(l)
}

// measuredText is what a bench found.
func measuredText(l *pb.Link, x *pb.LinkMeasurement) string {
	there, back := x.GetAToBBytesPerSecond(), x.GetBToABytesPerSecond()
	return fmt.Sprintf("%s %s → %s, %s back, %s", rateText(there), cmpOr(l.GetA().GetNodeName(), "one end"), cmpOr(l.GetB().GetNodeName(), "the other"), rateText(back), rttText(x.GetRttUs()))
}

// errorsText is the errors of both ends together, and which they are.
func errorsText(l *pb.Link) string {
	if l.GetErrors() == 0 {
		return "0"
	}
	var each []string
	for _, e := range []*pb.LinkEnd{l.GetA(), l.GetB()} {
		for _, c := range []struct {
			n    uint64
			what string
		}{{e.GetTxErrors(), "sending"}, {e.GetRxErrors(), "receiving"}, {e.GetTxDropped(), "dropped before sending"}, {e.GetRxDropped(), "dropped after receiving"}} {
			if c.n > 0 {
				each = append(each, fmt.Sprintf("%s %d %s", e.GetNodeName(), c.n, c.what))
			}
		}
	}
	if len(each) == 0 {
		return fmt.Sprint(l.GetErrors())
	}
	return fmt.Sprintf("▲ %d: %s", l.GetErrors(), strings.Join(each, ", "))
}

func (p *sheet) instance(i *pb.Instance) string {
	w := say(instanceWords, i.GetState())
	w.text = instanceStatus(i).text
	p.word("state", w, i.GetReason(), i.GetStateSince())
	if i.GetState() == pb.InstanceState_INSTANCE_STATE_LOADING && i.GetStepsTotal() > 0 {
		p.fact("", moveInk, bar(uint64(i.GetStepsDone()), uint64(i.GetStepsTotal()), 30))
	}
	if i.GetState() == pb.InstanceState_INSTANCE_STATE_FAILED {
		// What went wrong comes before what it was.
		p.ranks(i)
		p.rows = append(p.rows, "")
	}
	p.fact("model", plainInk, i.GetModel())
	p.fact("engine", plainInk, i.GetEngine())
	if len(i.GetServedNames()) > 0 {
		p.fact("served as", plainInk, strings.Join(i.GetServedNames(), ", "))
	}
	if i.GetContextTokens() > 0 {
		p.fact("context", plainInk, fmt.Sprintf("%d tokens", i.GetContextTokens()))
	}
	if i.GetPlannedBytes() > 0 {
		p.fact("memory", plainInk, memoryText(i.GetPlannedBytes())+" planned, all ranks together")
	}
	if i.GetRestarts() > 0 {
		p.fact("restarts", lookInk, fmt.Sprint(i.GetRestarts()))
	}
	owner := p.s.nodeName(i.GetOwnerNodeId())
	if i.GetUser() != "" {
		owner += "  asked for by " + i.GetUser()
	}
	p.fact("owner", plainInk, owner)
	if i.GetState() != pb.InstanceState_INSTANCE_STATE_FAILED {
		p.ranks(i)
	}
	return i.GetName()
}

func (p *sheet) ranks(i *pb.Instance) {
	p.head("Ranks")
	var cells [][]cell
	for _, r := range i.GetRanks() {
		w := say(rankWords, r.GetState())
		pid := ""
		if r.GetPid() > 0 {
			pid = fmt.Sprintf("pid %d", r.GetPid())
		}
		cells = append(cells, []cell{
			{fmt.Sprintf("%s %d %s", w.symbol, r.GetIndex(), r.GetRole()), w.ink}, {r.GetNodeName(), boldInk},
			{strings.TrimSpace(w.text + " " + r.GetExitStatus()), w.ink}, {pid, dimInk}, {strings.Join(r.GetListens(), " "), dimInk},
		})
	}
	p.table([]column{{}, {}, {flex: true, min: 8}, {drop: 1}, {drop: 2}}, cells)
	for _, r := range i.GetRanks() {
		if len(r.GetLastLines()) == 0 {
			continue
		}
		p.head(fmt.Sprintf("Last lines of rank %d on %s", r.GetIndex(), r.GetNodeName()))
		for _, l := range r.GetLastLines() {
			p.rows = append(p.rows, "  "+cut(l, max(p.w-2, 1)))
		}
	}
}

func (p *sheet) transfer(t *pb.Transfer) string {
	w := say(transferWords, t.GetState())
	p.word("state", w, "", nil)
	if e := t.GetError(); e != nil {
		p.fact("✕ what", badInk, e.GetWhat())
		p.fact("where", plainInk, e.GetWhere())
		p.fact("why", plainInk, e.GetWhy())
		p.fact("to do", boldInk, e.GetFix())
	}
	p.fact("from", plainInk, strings.Join(t.GetSources(), "  "))
	p.fact("to", plainInk, t.GetDestination())
	if t.GetTotalBytes() > 0 {
		p.fact("bytes", plainInk, fmt.Sprintf("%s of %s, %d %%", sizeText(t.GetDoneBytes()), sizeText(t.GetTotalBytes()), percent(t.GetDoneBytes(), t.GetTotalBytes())))
		p.fact("", moveInk, bar(t.GetDoneBytes(), t.GetTotalBytes(), min(40, max(p.w-labelWidth-1, 8))))
	}
	if t.GetTotalFiles() > 0 {
		p.fact("files", plainInk, fmt.Sprintf("%d of %d", t.GetDoneFiles(), t.GetTotalFiles()))
	}
	if t.GetSkippedFiles() > 0 {
		p.fact("were there", plainInk, fmt.Sprintf("%s, %s", count(int(t.GetSkippedFiles()), "file", "files"), sizeText(t.GetSkippedBytes())))
	}
	switch {
	case t.GetState() == pb.TransferState_TRANSFER_STATE_COPYING:
		p.fact("rate", plainInk, rateText(t.GetBytesPerSecond())+"  "+etaText(t)+" left")
		p.fact("", moveInk, strings.TrimSpace(spark(p.s.rates.transfer[t.GetId()], rateSeconds)))
	case t.GetState() == pb.TransferState_TRANSFER_STATE_DONE:
		p.fact("moved", plainInk, strings.TrimPrefix(doneText(t), ", "))
	}
	if t.GetStartedAt() != nil {
		s := "asked for " + t.GetStartedAt().AsTime().Local().Format("15:04:05")
		if t.GetUser() != "" {
			s += " by " + t.GetUser()
		}
		if t.GetFinishedAt() != nil {
			s += ", ended " + t.GetFinishedAt().AsTime().Local().Format("15:04:05")
		}
		p.fact("when", plainInk, s)
	}
	if len(t.GetLinks()) > 0 {
		p.head("Over")
		var cells [][]cell
		for _, x := range t.GetLinks() {
			name, i := "▲ "+lanText(x)+", no cable", lookInk
			switch {
			case withinOne(t, x):
				name, i = "within one node", plainInk
			case x.GetLinkId() != "":
				name, i = "cable "+x.GetLinkId(), plainInk
				if l := p.s.link(x.GetLinkId()); l != nil {
					name = "cable " + linkName(l)
				}
			}
			cells = append(cells, []cell{{name, i}, {x.GetTransport(), dimInk}, {sizeText(x.GetBytes()), plainInk}, {rateText(x.GetBytesPerSecond()), moveInk}})
		}
		p.table([]column{{flex: true, min: 14}, {drop: 1}, {right: true, drop: 2}, {right: true}}, cells)
	}
	for n, x := range t.GetWarnings() {
		if n == 0 {
			p.head("Worth knowing")
		}
		for _, l := range wrap(x, max(p.w-4, 8)) {
			p.rows = append(p.rows, "  "+p.put(lookInk, l))
		}
	}
	return transferName(p.s, t)
}

func (p *sheet) model(x *pb.Model) string {
	p.fact("size", plainInk, sizeText(x.GetSizeBytes()))
	p.fact("format", plainInk, strings.TrimSpace(x.GetFormat()+" "+x.GetQuant()))
	p.fact("kind", plainInk, x.GetArchitecture())
	if x.GetLayers() > 0 {
		p.fact("layers", plainInk, fmt.Sprint(x.GetLayers()))
	}
	if x.GetContextTokens() > 0 {
		p.fact("context", plainInk, fmt.Sprintf("%d tokens trained", x.GetContextTokens()))
	}
	p.fact("ID", dimInk, x.GetId())
	p.head("Where it lies")
	for _, n := range p.s.GetNodes() {
		there := false
		for _, c := range x.GetCopies() {
			if c.GetNodeId() != n.GetId() {
				continue
			}
			there = true
			if c.GetComplete() {
				p.fact("● "+n.GetName(), plainInk, c.GetPath())
			} else {
				p.fact("▲ "+n.GetName(), lookInk, "incomplete"+because(c.GetReason())+"  "+c.GetPath())
			}
		}
		if !there {
			p.fact("· "+n.GetName(), dimInk, copyCellWords(copyCell(p.s, x, n.GetId())))
		}
	}
	for n, i := range instancesOf(p.s, x) {
		if n == 0 {
			p.head("Instances")
		}
		w := say(instanceWords, i.GetState())
		p.rows = append(p.rows, "  "+p.put(w.ink, w.symbol+" "+i.GetName()+"  "+instanceStatus(i).text+"  "+rankNodes(i)))
	}
	return x.GetName()
}

func copyCellWords(c cell) string {
	if c.text == "·" {
		return "not there; C copies it"
	}
	return "being copied, " + c.text
}

func instancesOf(s *snapshot, x *pb.Model) (l []*pb.Instance) {
	for _, i := range s.GetInstances() {
		if i.GetModelId() == x.GetId() {
			l = append(l, i)
		}
	}
	return l
}

func (p *sheet) finding(f *pb.Finding) string {
	w := say(severityWords, f.GetSeverity())
	p.fact("", w.ink, w.symbol+" "+f.GetTitle())
	p.rows = append(p.rows, "")
	p.fact("what to do", boldInk, f.GetFix())
	p.fact("it means", plainInk, f.GetMeaning())
	p.fact("seen", plainInk, f.GetEvidence())
	if n := p.s.other(f); n != nil {
		p.fact("of", plainInk, "node "+n.GetName())
		p.fact("seen by", plainInk, p.s.finder(f))
	} else {
		subject := f.GetSubject()
		if l := p.s.link(subject); l != nil {
			subject = "cable " + linkName(l)
		} else if n := p.s.node[subject]; n != nil {
			subject = "node " + n.GetName()
		} else if i := p.s.instance(subject); i != nil {
			subject = "instance " + i.GetName()
		} else if x := p.s.model[subject]; x != nil {
			subject = "model " + x.GetName()
		}
		p.fact("node", plainInk, p.s.finder(f))
		p.fact("of", plainInk, subject)
	}
	if f.GetSince() != nil {
		p.fact("since", plainInk, f.GetSince().AsTime().Local().Format("2006-01-02 15:04:05"))
	}
	p.fact("code", dimInk, f.GetCode())
	return w.text
}
