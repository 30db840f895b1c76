package manifest

import (
	"strings"
	"testing"

	"tbcluster/api/fault"
)

func TestFiltersDecideAsRsyncsDo(t *testing.T) {
	for _, c := range []struct {
		rules string // separated by spaces
		path  string // with a slash at the end for a directory
		want  bool
	}{
		{"", "a", true},
		{"-*.tmp", "a.tmp", false},
		{"-*.tmp", "d/a.tmp", false},
		{"-*.tmp", "a.tmp.x", true},
		{"+keep.tmp -*.tmp", "d/keep.tmp", true},
		{"-*.tmp +keep.tmp", "d/keep.tmp", false},
		{"-/a", "a", false},
		{"-/a", "d/a", true},
		{"-d/a", "x/d/a", false},
		{"-d/a", "d/x/a", true},
		{"-d/**", "d/x/a", false},
		{"-d/**", "d/", true},
		{"-d/***", "d/", false},
		{"-d/***", "x/d/y", false},
		{"-cache/", "cache/", false},
		{"-cache/", "cache", true},
		{"-*", "a/b", false},
		{"-/*/b", "a/b", false},
		{"-/*/b", "a/c/b", true},
		{"-/**/b", "a/c/b", false},
		{"-a?c", "abc", false},
		{"-a?c", "a/c", true},
		{"-[a-c]x", "bx", false},
		{"-[!a-c]x", "bx", true},
		{"-[]]x", "]x", false},
		{`-\*`, "*", false},
		{`-\*`, "a", true},
		{"+*.safetensors +*/ -*", "d/m.safetensors", true},
		{"+*.safetensors +*/ -*", "d/m.bin", false},
		{"+*.safetensors +*/ -*", "d/", true},
		{"-**a*b", "x/ya/zb", true},
		{"-**a*b", "x/yazb", false},
	} {
		f, err := ParseFilter(strings.Fields(c.rules))
		if err != nil {
			t.Errorf("%q: %v", c.rules, err)
			continue
		}
		if got := f.Copies(strings.TrimSuffix(c.path, "/"), strings.HasSuffix(c.path, "/")); got != c.want {
			t.Errorf("rules %q copy %q: %v, want %v", c.rules, c.path, got, c.want)
		}
	}
}

func TestMalformedFiltersAreUsageErrors(t *testing.T) {
	for _, s := range []string{"", "a", "-", "+/", "- ", "-[a", `-a\`, "-" + strings.Repeat("*a", 40)} {
		if _, err := ParseFilter([]string{s}); !fault.Is(err, fault.Usage) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func FuzzFilter(f *testing.F) {
	for _, s := range []string{"-*.tmp", "+/a/**/b", "-[a-z]", "-d/***", `-\[`, "-[]"} {
		f.Add(s, "a/b/c.tmp", true)
	}
	f.Fuzz(func(t *testing.T, rule, path string, dir bool) {
		if len(rule) > 200 || len(path) > 200 {
			return
		}
		flt, err := ParseFilter([]string{rule})
		if err != nil {
			return
		}
		if rule[0] == '+' && !flt.Copies(path, dir) {
			t.Fatalf("%q, which only includes, excludes %q", rule, path)
		}
		// What "-**" excludes is everything.
		all, err := ParseFilter([]string{rule, "-**"})
		if err != nil {
			t.Fatal(err)
		}
		if all.Copies(path, dir) && (rule[0] == '-' || !flt.rules[0].fits(path, dir)) {
			t.Fatalf("%q then -** copies %q", rule, path)
		}
	})
}
