package doctor

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/timestamppb"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

// Entry is one row of the catalogue.
type Entry struct {
	Code     string
	Severity tbclusterv1.Severity
	Title    string // one line; {words} in braces are filled from what was seen
	Meaning  string
	Fix      string
}

const (
	info    = tbclusterv1.Severity_SEVERITY_INFO
	warning = tbclusterv1.Severity_SEVERITY_WARNING
	failure = tbclusterv1.Severity_SEVERITY_ERROR
)

// row is an entry with the check that finds it.
type row struct {
	Entry
	check func(Facts) []seen
}

// seen is one case of a finding.
type seen struct {
	subject  string
	evidence string
	// node that it concerns; empty means the own one.
	node, nodeName string
	words          map[string]string
}

// Catalogue has one row for each finding, by code.
func Catalogue() []Entry {
	out := make([]Entry, 0, len(rows))
	for _, r := range rows {
		out = append(out, r.Entry)
	}
	slices.SortFunc(out, func(a, b Entry) int { return cmp.Compare(a.Code, b.Code) })
	return out
}

// Check runs every check and returns what was found, worst first. A finding
// that several nodes could make is made by one of them only.
func Check(f Facts) []*tbclusterv1.Finding {
	var out []*tbclusterv1.Finding
	for _, r := range rows {
		for _, s := range r.check(f) {
			node, name := s.node, s.nodeName
			if node == "" {
				node, name = f.Self, f.Name
			}
			words := map[string]string{"node": name}
			for k, v := range s.words {
				words[k] = v
			}
			found := &tbclusterv1.Finding{
				Code: r.Code, Severity: r.Severity,
				Title: fill(r.Title, words), Meaning: fill(r.Meaning, words), Fix: fill(r.Fix, words),
				Evidence: printable(s.evidence), NodeId: node, NodeName: name, Subject: s.subject,
			}
			if !f.Now.IsZero() {
				found.Since = timestamppb.New(f.Now)
			}
			out = append(out, found)
		}
	}
	Sort(out)
	return out
}

// Sort puts findings in the order in which they are shown: worst first.
func Sort(list []*tbclusterv1.Finding) {
	slices.SortStableFunc(list, func(a, b *tbclusterv1.Finding) int {
		return cmp.Or(cmp.Compare(b.GetSeverity(), a.GetSeverity()), cmp.Compare(a.GetCode(), b.GetCode()),
			cmp.Compare(a.GetNodeName(), b.GetNodeName()), cmp.Compare(a.GetSubject(), b.GetSubject()))
	})
}

// Carry gives findings that were there before the time since when they are.
func Carry(before, now []*tbclusterv1.Finding) {
	type key struct{ code, node, subject string }
	since := map[key]*timestamppb.Timestamp{}
	for _, f := range before {
		since[key{f.GetCode(), f.GetNodeId(), f.GetSubject()}] = f.GetSince()
	}
	for _, f := range now {
		if t := since[key{f.GetCode(), f.GetNodeId(), f.GetSubject()}]; t != nil {
			f.Since = t
		}
	}
}

func fill(text string, words map[string]string) string {
	for k, v := range words {
		text = strings.ReplaceAll(text, "{"+k+"}", printable(v))
	}
	return text
}

// printable keeps what is for people free of what drives a terminal: some
// words come from machines that nobody knows.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
}

// age is for how long a link has been in its state; 0 where that is unknown.
func age(f Facts, l *tbclusterv1.Link) time.Duration {
	if l.GetStateSince() == nil || f.Now.IsZero() {
		return 0
	}
	d := f.Now.Sub(l.GetStateSince().AsTime())
	if d < 0 {
		// An end whose clock is ahead has said so.
		d += max(f.ClockOffsets[l.GetA().GetNodeId()], f.ClockOffsets[l.GetB().GetNodeId()], 0)
	}
	return max(d, 0)
}
