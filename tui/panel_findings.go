package tui

import "strings"

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
		where := ""
		if n := x.GetNodeName(); n != "" && !strings.Contains(x.GetTitle(), n) {
			where = n + ": "
		}
		r := row{id: it.id}
		lines := wrap(where+x.GetTitle(), max(f.w-4, 1))
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
