package main

import (
	"bytes"
	"strings"
)

// textLines collects what cobra prints when it is asked for completions: one a
// line, then a line that begins with ":".
type textLines struct{ bytes.Buffer }

// completions returns the lines before the last.
func (t *textLines) completions() []string {
	var out []string
	for _, l := range strings.Split(t.String(), "\n") {
		if strings.HasPrefix(l, ":") {
			break
		}
		if l != "" {
			out = append(out, l)
		}
	}
	return out
}
