package gateway

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
)

func FuzzInspect(f *testing.F) {
	for _, s := range []string{
		`{"model":"smol","stream":true}`, `{"model":"a","model":"b"}`, `{"Model":"a"}`, `{"mod\u0065l":"x"}`, `{"model":null}`, `[]`, `{`, ``,
		`{"a":{"model":"inner"},"model":"outer"}`, `{"model":"x"}{}`, `{"stream":1}`, "{\"model\":\"\xff\"}", strings.Repeat("[", 20000), `{"model":"\ud800"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		w, p := inspect(body)
		if p != nil {
			if p.status != 400 || p.message == "" {
				t.Fatalf("%+v", p)
			}
			p.body()
			return
		}
		// Whoever reads the body as JSON finds the same model in it.
		var m map[string]any
		if err := json.Unmarshal(body, &m); err != nil {
			t.Fatalf("taken for JSON: %v", err)
		}
		if got, _ := m["model"].(string); got != w.model {
			t.Fatalf("model %q, read here as %q", got, w.model)
		}
		if got, _ := m["stream"].(bool); got != w.stream {
			t.Fatalf("stream %v, read here as %v", got, w.stream)
		}
	})
}

func FuzzHost(f *testing.F) {
	for _, s := range []string{"localhost", "127.0.0.1:8555", "[::1]:1", "[::ffff:127.0.0.1]", "::1", "[::1", "evil", "localhost:", "127.1", "0x7f.1", "2130706433", "localhost.", "[localhost]", "LOCALHOST:00080", "desk"} {
		f.Add(s)
	}
	g := New(Options{LocalNames: func() []string { return []string{"Desk.", ""} }})
	f.Fuzz(func(t *testing.T, s string) {
		if !g.isLocalHost(s) {
			return
		}
		host := hostName(s)
		a, err := netip.ParseAddr(host)
		if host != "localhost" && host != "desk" && (err != nil || !a.Unmap().IsLoopback()) {
			t.Fatalf("%q is taken for this machine as %q", s, host)
		}
		if strings.ContainsAny(s, "@/\\ \t\r\n") {
			t.Fatalf("%q is taken for this machine", s)
		}
	})
}
