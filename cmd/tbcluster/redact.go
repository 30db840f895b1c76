package main

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// redactor takes out of text what nobody should have to show: keys, pairing
// codes, user names and prompts.
type redactor struct {
	names []string // user names, in the order in which they were met
	words *regexp.Regexp
}

// newRedactor returns a redactor that knows these user names.
func newRedactor(names []string) *redactor {
	r := &redactor{}
	r.users(names...)
	return r
}

// users makes further user names known. root is no secret.
func (r *redactor) users(names ...string) {
	for _, n := range names {
		// What is a number or one letter would take half the text along.
		if _, err := strconv.Atoi(n); err == nil || len(n) < 2 || n == "root" || slices.Contains(r.names, n) {
			continue
		}
		r.names = append(r.names, n)
	}
	if len(r.names) == 0 {
		return
	}
	quoted := make([]string, len(r.names))
	for i, n := range r.names {
		quoted[i] = regexp.QuoteMeta(n)
	}
	// Longer ones first: "ada-lovelace" before "ada".
	slices.SortFunc(quoted, func(a, b string) int { return len(b) - len(a) })
	r.words = regexp.MustCompile(`(?i)\b(?:` + strings.Join(quoted, "|") + `)\b`)
}

// rules are applied in this order, before user names.
var rules = []struct {
	what *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`(?s)-----BEGIN [^-\n]+-----.*?(?:-----END [^-\n]+-----|\z)`), "(key removed)"},
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]+`), "$1 (removed)"},
	{regexp.MustCompile(`(?i)((?:api[_-]?key|access[_-]?key|token|secret|passw(?:or)?d|passphrase|private[_-]?key|authorization)\w*["']?\s*[:=]\s*)(?:"[^"]*"|'[^']*'|[^\s,;"'&]+)`), "$1(removed)"},
	{regexp.MustCompile(`\b(?:sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{12,}`), "(key removed)"},
	{regexp.MustCompile(`\b[0-9]{1,4}-[A-Za-z0-9]{4}-[A-Za-z0-9]{4}\b`), "(code removed)"},
	// What people said to a model, in the forms in which engines log it.
	{regexp.MustCompile(`(?i)("(?:prompt|content|input|text|query|messages|system)"\s*:\s*)(?:"(?:[^"\\]|\\.)*"?|\[.*|\{.*)`), `$1"(removed)"`},
	{regexp.MustCompile(`(?i)\b((?:formatted |input |user |system )?prompt(?: text)?\s*[:=]\s*).*`), "$1(removed)"},
	{regexp.MustCompile(`(?s)<\|[a-z_]+\|>.*`), "(prompt removed)"},
	{regexp.MustCompile(`(/home/|/Users/)[^/\s"':]+`), "${1}USER"},
}

// text returns s without what must not be shown.
func (r *redactor) text(s string) string {
	for _, rule := range rules {
		s = rule.what.ReplaceAllString(s, rule.with)
	}
	if r.words == nil {
		return s
	}
	return r.words.ReplaceAllStringFunc(s, func(found string) string {
		i := slices.IndexFunc(r.names, func(n string) bool { return strings.EqualFold(n, found) })
		return "USER" + strconv.Itoa(i+1)
	})
}

// json returns v as JSON, each text in it redacted by itself.
func (r *redactor) json(v any) []byte {
	dec := json.NewDecoder(bytes.NewReader(compactJSON(v)))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		panic(err) // it was encoded in the line above
	}
	var b bytes.Buffer
	writeJSON(&b, r.walk(tree))
	return b.Bytes()
}

func (r *redactor) walk(v any) any {
	switch v := v.(type) {
	case string:
		return r.text(v)
	case []any:
		for i := range v {
			v[i] = r.walk(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = r.walk(v[k])
		}
	}
	return v
}

// systemUsers returns the names of the people on this machine: those in
// /etc/passwd with a number of people, and whoever runs this.
func systemUsers(getenv func(string) string) []string {
	names := []string{getenv("USER"), getenv("LOGNAME"), getenv("SUDO_USER")}
	b, err := os.ReadFile("/etc/passwd")
	if err != nil {
		return names // there is none on this system; what the API says is left
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Split(line, ":")
		if len(f) < 3 {
			continue
		}
		if uid, err := strconv.Atoi(f[2]); err == nil && uid >= 500 && uid < 65534 {
			names = append(names, f[0])
		}
	}
	return names
}
