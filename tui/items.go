package tui

import (
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

// kind is what sort of thing an item is.
type kind int

const (
	noKind kind = iota
	nodeKind
	linkKind
	instanceKind
	transferKind
	modelKind
	findingKind
	eventKind
)

// kindNames are the words for people.
var kindNames = map[kind]string{
	nodeKind: "node", linkKind: "cable", instanceKind: "instance", transferKind: "transfer",
	modelKind: "model", findingKind: "finding", eventKind: "change",
}

// item is a thing that the cursor can stand on. Text is what a filter looks at.
type item struct {
	kind kind
	id   string
	text string
}

func nodeItems(s *snapshot) (l []item) {
	for _, n := range s.GetNodes() {
		l = append(l, item{nodeKind, n.GetId(), n.GetName() + " " + say(nodeWords, n.GetState()).text + " " + n.GetOs()})
	}
	return l
}

func linkItems(s *snapshot) (l []item) {
	for _, n := range s.GetLinks() {
		l = append(l, item{linkKind, n.GetId(), linkName(n) + " " + say(linkWords, n.GetState()).text})
	}
	return l
}

func clusterItems(s *snapshot) []item { return append(nodeItems(s), linkItems(s)...) }

func instanceItems(s *snapshot) (l []item) {
	for _, i := range s.GetInstances() {
		l = append(l, item{instanceKind, i.GetId(), strings.Join([]string{i.GetName(), i.GetModel(), i.GetEngine(), rankNodes(i), say(instanceWords, i.GetState()).text}, " ")})
	}
	return l
}

// transferItems has those under way first, then the newest.
func transferItems(s *snapshot) (l []item) {
	for _, over := range []bool{false, true} {
		for _, t := range s.GetTransfers() {
			if isOver(t.GetState()) == over {
				l = append(l, item{transferKind, t.GetId(), transferName(s, t) + " " + say(transferWords, t.GetState()).text})
			}
		}
	}
	return l
}

func modelItems(s *snapshot) (l []item) {
	for _, m := range s.GetModels() {
		l = append(l, item{modelKind, m.GetId(), m.GetName() + " " + m.GetFormat() + " " + m.GetQuant()})
	}
	return l
}

func findingItems(s *snapshot) (l []item) {
	for _, f := range s.GetFindings() {
		l = append(l, item{findingKind, findingID(f), f.GetTitle() + " " + f.GetNodeName() + " " + f.GetCode()})
	}
	return l
}

func eventItems(s *snapshot) (l []item) {
	for i := len(s.log) - 1; i >= 0; i-- {
		l = append(l, item{eventKind, s.log[i].id(), s.log[i].text})
	}
	return l
}

func find[V interface{ GetId() string }](l []V, id string) (v V) {
	for _, x := range l {
		if x.GetId() == id {
			return x
		}
	}
	return v
}

func (s *snapshot) link(id string) *pb.Link         { return find(s.GetLinks(), id) }
func (s *snapshot) instance(id string) *pb.Instance { return find(s.GetInstances(), id) }
func (s *snapshot) transfer(id string) *pb.Transfer { return find(s.GetTransfers(), id) }

func (s *snapshot) finding(id string) *pb.Finding {
	for _, f := range s.GetFindings() {
		if findingID(f) == id {
			return f
		}
	}
	return nil
}

// has reports whether an item is still there.
func (s *snapshot) has(it item) bool {
	switch it.kind {
	case nodeKind:
		return s.node[it.id] != nil
	case linkKind:
		return s.link(it.id) != nil
	case instanceKind:
		return s.instance(it.id) != nil
	case transferKind:
		return s.transfer(it.id) != nil
	case modelKind:
		return s.model[it.id] != nil
	case findingKind:
		return s.finding(it.id) != nil
	}
	return true
}
