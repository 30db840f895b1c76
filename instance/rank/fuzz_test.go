package rank

import (
	"strings"
	"testing"
	"time"
)

func FuzzDecodeStatus(f *testing.F) {
	f.Add([]byte(`{"phase":"ended","shim":{"pid":1,"start":2,"boot":"x"},"exit_code":-1,"signal":9}`))
	f.Add([]byte(`{"phase":"running","started":"2026-01-01T00:00:00Z"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeStatus(b)
		if err == nil && s.Phase == Ended && s.Exit() == "" {
			t.Error("ended without an exit status in words")
		}
	})
}

func FuzzDecodeProcess(f *testing.F) {
	f.Add([]byte(`{"instance_id":"a","index":0,"program":"/bin/true","args":["x"],"env":{"A":"b"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeProcess(b)
		if err == nil && (p.Program[0] != '/' || p.Grace <= 0 || p.LogBytes <= 0 || p.LogFiles <= 0) {
			t.Errorf("accepted %+v", p)
		}
	})
}

func FuzzSplitLines(f *testing.F) {
	f.Add([]byte("2026-01-01T00:00:00.000000Z one\ntwo\nrest"))
	f.Add([]byte("2026-01-01T00:00:00.000000Z\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		rest, _ := splitLines(b, time.Time{}, func(Line) { n++ })
		if n != strings.Count(string(b), "\n") || strings.Contains(string(rest), "\n") {
			t.Errorf("%d lines, rest %q", n, rest)
		}
	})
}
