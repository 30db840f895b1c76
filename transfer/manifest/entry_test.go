package manifest

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

func TestEscapingIsJudgedByTheWords(t *testing.T) {
	for _, c := range []struct {
		at, target string
		want       bool
	}{
		{"l", "a", false}, {"l", "../a", true}, {"d/l", "../a", false}, {"d/l", "../../a", true},
		{"l", "/etc", true}, {"d/l", "x/../../a", false}, {"d/l", "x/../../../a", true}, {"l", ".", false}, {"l", "..", true},
	} {
		if got := Escapes(c.at, c.target); got != c.want {
			t.Errorf("%s -> %s: %v", c.at, c.target, got)
		}
	}
}

func FuzzEntryCheck(f *testing.F) {
	for _, s := range []string{
		`{"i":0,"r":0,"p":"YS9i","k":"file","s":3,"id":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}`,
		`{"i":0,"p":"Li4veA==","k":"dir"}`, `{"i":0,"p":"YQ==","k":"symlink","l":"Li4vLi4="}`, `{"i":0,"k":"hardlink","h":0}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var e Entry
		if json.Unmarshal(in, &e) != nil || e.Check(0, 1) != nil {
			return
		}
		joined := filepath.Join("/base/in", string(e.Path))
		if joined != "/base/in" && !strings.HasPrefix(joined, "/base/in/") {
			t.Fatalf("%q leads to %s", e.Path, joined)
		}
		if e.Kind == Symlink {
			to := filepath.Join(filepath.Dir(joined), string(e.Target))
			if filepath.IsAbs(string(e.Target)) || len(e.Path) > 0 && to != "/base/in" && !strings.HasPrefix(to, "/base/in/") {
				t.Fatalf("symlink %q leads to %s", e.Path, to)
			}
		}
	})
}
