package tui

import (
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

// other is the node that a finding is about where another one found it; nil for
// all other findings.
func (s *snapshot) other(f *pb.Finding) *pb.Node {
	if f.GetSubject() == f.GetNodeId() {
		return nil
	}
	return s.node[f.GetSubject()]
}

// finder is the name of the node that found it.
func (s *snapshot) finder(f *pb.Finding) string {
	return cmpOr(f.GetNodeName(), s.nodeName(f.GetNodeId()))
}

func drawFindings(f frame) ([]string, string) {
	if len(f.s.GetFindings()) == 0 {
		return f.empty("nothing to look at", ""), ""
	}
	if len(f.items) == 0 {
		return f.empty("no finding fits what you look for", "esc shows all"), ""
	}
	var rows []row
	for _, it := range f.items {
		x := f.s.finding(it.id)
		w := say(severityWords, x.GetSeverity())
		text := x.GetTitle()
		if n := x.GetNodeName(); f.s.other(x) != nil {
			text += ", seen by " + f.s.finder(x)
		} else if n != "" && !strings.Contains(text, n) {
			text = n + ": " + text
		}
		r := row{id: it.id}
		lines := wrap(text, max(f.w-4, 1))
		if len(lines) > 2 {
			lines = []string{lines[0], cut(lines[1]+" "+lines[2], f.w-4)}
		}
		for i, l := range lines {
			if i == 0 {
				l = w.symbol + " " + l
			} else {
				l = "  " + l
			}
			r.lines = append(r.lines, f.put(w.ink, l))
		}
		if x.GetFix() != "" {
			r.lines = append(r.lines, "  "+f.put(dimInk, cut(x.GetFix(), f.w-4)))
		}
		rows = append(rows, r)
	}
	return f.list(nil, rows)
}
