package transfer

import (
	"strings"
	"testing"

	"tbcluster/api/fault"
)

func TestEndpointsAreReadAsScpReadsThem(t *testing.T) {
	for in, want := range map[string]Endpoint{
		"a":                    {Path: "a"},
		"/a:b":                 {Path: "/a:b"},
		"./a:b":                {Path: "./a:b"},
		"dir/a:b":              {Path: "dir/a:b"},
		"beta:":                {Node: "beta"},
		"beta:x y":             {Node: "beta", Path: "x y"},
		"beta:/a:b":            {Node: "beta", Path: "/a:b"},
		"beta:~/m":             {Node: "beta", Path: "~/m"},
		"[fe80::1%en5]:/p":     {Node: "fe80::1%en5", Path: "/p"},
		"[fe80::1%en5]:":       {Node: "fe80::1%en5"},
		"[x]":                  {Path: "[x]"},
		"[a/b]:c":              {Path: "[a/b]:c"},
		"\xff\xfe":             {Path: "\xff\xfe"},
		"10.77.0.1:models/x.g": {Node: "10.77.0.1", Path: "models/x.g"},
	} {
		got, err := ParseEndpoint(in)
		if err != nil || got != want {
			t.Errorf("%q is %+v, %v; want %+v", in, got, err, want)
		}
	}
	for _, in := range []string{"", ":", ":x", "[]:x", "a\x00b", "beta:\x00"} {
		if _, err := ParseEndpoint(in); !fault.Is(err, fault.Usage) {
			t.Errorf("%q: %v, want a usage fault", in, err)
		}
	}
}

func FuzzParseEndpoint(f *testing.F) {
	for _, s := range []string{"a", "beta:x", "[fe80::1%en5]:/p", "./a:b", "[x", ":", "[]:", "[a:b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			if !fault.Is(err, fault.Usage) {
				t.Fatalf("%q: %v is no usage fault", s, err)
			}
			return
		}
		if strings.ContainsRune(e.Node+e.Path, 0) || strings.Contains(e.Node, "/") {
			t.Fatalf("%q became %+v", s, e)
		}
		if !strings.HasSuffix(s, e.Path) {
			t.Fatalf("%q lost its path: %+v", s, e)
		}
		if e.Node != "" && strings.ContainsAny(e.Node, "[]") {
			return // no node is named so; writing it back is not defined
		}
		again, err := ParseEndpoint(e.String())
		if err != nil || again.Node != e.Node || strings.TrimPrefix(again.Path, "./") != strings.TrimPrefix(e.Path, "./") {
			t.Fatalf("%q → %+v → %q → %+v, %v", s, e, e.String(), again, err)
		}
	})
}
