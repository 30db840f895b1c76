package tui

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	pb "tbcluster/api/tbcluster/v1"
)

// event is one line of history.
type event struct {
	seq  uint64
	at   time.Time
	text string
	ink  ink
}

// line is one change in words.
type line struct {
	text string
	ink  ink
}

// changes says in words what differs between two states, one line per change,
// worst news with the rest in a fixed order: nodes, cables, transfers,
// instances, models, findings. Before may be nil: then it is what there is, less
// transfers that have ended.
// Numbers that move all the time (rates, round trips, memory) are no change.
func changes(before, after *pb.ClusterState) []line {
	var out []line
	add := func(i ink, format string, args ...any) {
		out = append(out, line{fmt.Sprintf(format, args...), i})
	}
	names := newSnapshot(after)
	earlier := newSnapshot(&pb.ClusterState{})
	first := before == nil
	if !first {
		earlier = newSnapshot(before)
	} else {
		before = &pb.ClusterState{}
	}
	diff(before.GetNodes(), after.GetNodes(), func(was, is *pb.Node) {
		w := say(nodeWords, is.GetState())
		switch {
		case was == nil || was.GetState() != is.GetState(): // why it is so differs with each try to reach it
			add(w.ink, "node %s: %s%s", is.GetName(), w.text, because(is.GetReason()))
		case was.GetIncarnation() != is.GetIncarnation():
			add(plainInk, "node %s: its agent was started again", is.GetName())
		case was.GetName() != is.GetName():
			add(plainInk, "node %s: now called %s", was.GetName(), is.GetName())
		}
	}, func(n *pb.Node) { add(plainInk, "node %s: forgotten", n.GetName()) })

	diff(before.GetLinks(), after.GetLinks(), func(was, is *pb.Link) {
		if was == nil || was.GetState() != is.GetState() || was.GetNegotiatedGbps() != is.GetNegotiatedGbps() {
			w := say(linkWords, is.GetState())
			rate := ""
			if g := is.GetNegotiatedGbps(); g > 0 && is.GetState() != pb.LinkState_LINK_STATE_DOWN {
				rate = ", " + gbpsText(g) + " Gb/s"
				if below(is) {
					rate += " of " + gbpsText(is.GetCapableGbps()) + " that both ends can"
				}
			}
			add(w.ink, "cable %s: %s%s%s", linkName(is), w.text, rate, because(is.GetReason()))
		}
	}, func(l *pb.Link) { add(plainInk, "cable %s: gone", linkName(l)) })

	diff(before.GetTransfers(), after.GetTransfers(), func(was, is *pb.Transfer) {
		if first && isOver(is.GetState()) {
			return // that was long ago
		}
		w := say(transferWords, is.GetState())
		tenth := percent(is.GetDoneBytes(), is.GetTotalBytes()) / 10
		moved := was != nil && is.GetState() == pb.TransferState_TRANSFER_STATE_COPYING &&
			tenth > percent(was.GetDoneBytes(), was.GetTotalBytes())/10
		if was != nil && was.GetState() == is.GetState() && !moved {
			return
		}
		more := ""
		switch is.GetState() {
		case pb.TransferState_TRANSFER_STATE_COPYING:
			more = fmt.Sprintf(" %d %% of %s", percent(is.GetDoneBytes(), is.GetTotalBytes()), sizeText(is.GetTotalBytes()))
			if is.GetBytesPerSecond() > 0 {
				more += ", " + rateText(is.GetBytesPerSecond())
			}
		case pb.TransferState_TRANSFER_STATE_DONE:
			more = doneText(is)
		case pb.TransferState_TRANSFER_STATE_FAILED:
			more = because(failureText(is.GetError()))
		}
		add(w.ink, "copy %s: %s%s", transferName(names, is), w.text, more)
	}, nil)

	diff(before.GetInstances(), after.GetInstances(), func(was, is *pb.Instance) {
		w := say(instanceWords, is.GetState())
		quarter := percent(uint64(is.GetStepsDone()), uint64(is.GetStepsTotal())) / 25
		moved := was != nil && is.GetStepsTotal() > 0 &&
			quarter > percent(uint64(was.GetStepsDone()), uint64(was.GetStepsTotal()))/25
		if was != nil && was.GetState() == is.GetState() && was.GetReason() == is.GetReason() && !moved {
			return
		}
		more := because(is.GetReason())
		if is.GetStepsTotal() > 0 && is.GetState() == pb.InstanceState_INSTANCE_STATE_LOADING {
			more = fmt.Sprintf(" %d %%", percent(uint64(is.GetStepsDone()), uint64(is.GetStepsTotal()))) + more
		}
		add(w.ink, "instance %s (%s on %s): %s%s", is.GetName(), is.GetModel(), rankNodes(is), w.text, more)
	}, func(i *pb.Instance) { add(plainInk, "instance %s: removed", i.GetName()) })

	copies := func(s *snapshot) map[[2]string]string {
		m := map[[2]string]string{}
		for _, mod := range s.GetModels() {
			for _, c := range mod.GetCopies() {
				how := "complete"
				if !c.GetComplete() {
					how = "incomplete" + because(c.GetReason())
				}
				m[[2]string{mod.GetName(), s.nodeName(c.GetNodeId())}] = how
			}
		}
		return m
	}
	had, has := copies(earlier), copies(names)
	for _, k := range sortedKeys(has) {
		if how, ok := had[k]; !ok || how != has[k] {
			add(plainInk, "model %s on %s: %s", k[0], k[1], has[k])
		}
	}
	for _, k := range sortedKeys(had) {
		if _, ok := has[k]; !ok {
			add(plainInk, "model %s on %s: no longer there", k[0], k[1])
		}
	}

	open := map[string]*pb.Finding{}
	for _, f := range before.GetFindings() {
		open[findingID(f)] = f
	}
	for _, f := range after.GetFindings() {
		id := findingID(f)
		if was := open[id]; was == nil || was.GetTitle() != f.GetTitle() || was.GetSeverity() != f.GetSeverity() {
			w := say(severityWords, f.GetSeverity())
			fix := ""
			if f.GetFix() != "" {
				fix = ". To do: " + f.GetFix()
			}
			if names.other(f) != nil {
				add(w.ink, "%s: %s, seen by %s%s", w.text, f.GetTitle(), names.finder(f), fix)
			} else {
				add(w.ink, "%s on %s: %s%s", w.text, names.finder(f), f.GetTitle(), fix)
			}
		}
		delete(open, id)
	}
	for _, f := range before.GetFindings() {
		if _, ok := open[findingID(f)]; ok {
			if earlier.other(f) != nil {
				add(plainInk, "no longer: %s", f.GetTitle())
			} else {
				add(plainInk, "no longer on %s: %s", names.finder(f), f.GetTitle())
			}
		}
	}
	return out
}

// diff calls changed for each that is new or another one than before (was nil
// where it is new), in the order of after, then gone for those that went away.
func diff[V interface {
	GetId() string
	comparable
}](before, after []V, changed func(was, is V), gone func(V)) {
	m := map[string]V{}
	for _, v := range before {
		m[v.GetId()] = v
	}
	for _, v := range after {
		was, ok := m[v.GetId()]
		delete(m, v.GetId())
		// States are immutable: the same pointer is the same value.
		if !ok || was != v {
			changed(was, v)
		}
	}
	if gone == nil {
		return
	}
	for _, v := range before {
		if _, ok := m[v.GetId()]; ok {
			gone(v)
		}
	}
}

func sortedKeys(m map[[2]string]string) [][2]string {
	var l [][2]string
	for k := range m {
		l = append(l, k)
	}
	slices.SortFunc(l, func(a, b [2]string) int {
		if c := strings.Compare(a[0], b[0]); c != 0 {
			return c
		}
		return strings.Compare(a[1], b[1])
	})
	return l
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

// below reports whether a link runs below what both its ends can.
func below(l *pb.Link) bool {
	return l.GetNegotiatedGbps() > 0 && l.GetCapableGbps() > 0 && l.GetNegotiatedGbps() < l.GetCapableGbps()-0.05
}

// endName is one end of a link: node and port.
func endName(e *pb.LinkEnd) string {
	switch {
	case e == nil:
		return "?"
	case e.GetNodeId() == "":
		return cmpOr(e.GetNodeName(), "?") + " (not paired)"
	case e.GetPort() == "":
		return e.GetNodeName()
	}
	return e.GetNodeName() + " " + e.GetPort()
}

func linkName(l *pb.Link) string { return endName(l.GetA()) + " – " + endName(l.GetB()) }

// fileName is the last part of a path that may begin with a node's name.
func fileName(p string) string {
	p = strings.TrimRight(p, "/")
	if i := strings.LastIndexByte(p, '/'); i >= 0 {
		return p[i+1:]
	}
	if i := strings.IndexByte(p, ':'); i >= 0 {
		return p[i+1:]
	}
	return p
}

// transferLabel is what is copied, transferName also where to.
func transferLabel(t *pb.Transfer) string {
	if len(t.GetSources()) == 0 {
		return "?"
	}
	name := strings.TrimSuffix(cmpOr(fileName(t.GetSources()[0]), t.GetSources()[0]), ".gguf")
	if n := len(t.GetSources()); n > 1 {
		name += fmt.Sprintf(" +%d", n-1)
	}
	return name
}

func transferTo(s *snapshot, t *pb.Transfer) string {
	id := t.GetDestinationNodeId()
	// A node that is not listed any more has its name in what was asked for.
	if node, _, ok := strings.Cut(t.GetDestination(), ":"); ok && node != "" && id != "" && s.node[id] == nil {
		return node
	}
	if id != "" {
		return s.nodeName(id)
	}
	return t.GetDestination()
}

func transferName(s *snapshot, t *pb.Transfer) string {
	return transferLabel(t) + " → " + transferTo(s, t)
}

func failureText(f *pb.Failure) string {
	if f == nil {
		return ""
	}
	s := f.GetWhat()
	if f.GetWhere() != "" {
		s += " (" + f.GetWhere() + ")"
	}
	return s + because(f.GetWhy())
}

// doneText is what a finished transfer moved, and how fast.
func doneText(t *pb.Transfer) string {
	s := ", " + sizeText(t.GetDoneBytes())
	if t.GetSkippedBytes() > 0 {
		s += ", " + sizeText(t.GetSkippedBytes()) + " were there"
	}
	if t.GetStartedAt() != nil && t.GetFinishedAt() != nil {
		d := t.GetFinishedAt().AsTime().Sub(t.GetStartedAt().AsTime())
		if sec := d.Seconds(); sec > 0.01 && t.GetDoneBytes() > 0 {
			s += ", " + rateText(uint64(float64(t.GetDoneBytes())/sec))
		}
		s += " in " + clockText(d)
	}
	return s
}

// rankNodes is the nodes of an instance, head first.
func rankNodes(i *pb.Instance) string {
	var l []string
	for _, r := range i.GetRanks() {
		if n := cmpOr(r.GetNodeName(), "?"); !slices.Contains(l, n) {
			l = append(l, n)
		}
	}
	if len(l) == 0 {
		return "no node yet"
	}
	return strings.Join(l, "+")
}

func (e event) id() string { return strconv.FormatUint(e.seq, 10) }
