package tui

func drawHistory(f frame) ([]string, string) {
	if len(f.items) == 0 {
		return f.empty("nothing has changed since this screen was opened", ""), ""
	}
	at := map[string]event{}
	for _, e := range f.s.log {
		at[e.id()] = e
	}
	var rows []row
	for _, it := range f.items {
		e := at[it.id]
		r := row{id: it.id}
		for i, l := range wrap(e.text, max(f.w-12, 1)) {
			stamp := "        "
			if i == 0 {
				stamp = e.at.Format("15:04:05")
			}
			r.lines = append(r.lines, f.put(dimInk, stamp)+"  "+f.put(e.ink, l))
		}
		rows = append(rows, r)
	}
	return f.list(nil, rows)
}
