package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "tbcluster"

// imports says what the packages of a tree may import of ours: other trees, by
// their names. A tree may always import itself. The rule of the longest name
// that fits counts; a package without a rule fails the test.
var imports = map[string][]string{
	// The program puts everything together.
	"cmd/tbcluster": {"agent", "api", "engine", "gateway", "host", "instance", "lab", "mesh", "transfer", "tui"},
	// The daemon wires the packages below it; it alone picks the system.
	"agent":        {"api", "darwin", "doctor", "engine", "gateway", "host", "instance", "linux", "mesh", "transfer"},
	"agent/root":   {"api/fault", "host", "agent/config", "instance/rank"},
	"agent/config": {"api/fault"},
	// The screen knows the API and nothing else.
	"tui": {"api"},

	// Siblings: each knows the seam to the machine, none knows another.
	"mesh":          {"api", "host"},
	"doctor":        {"api", "host"},
	"transfer":      {"api/fault", "host"},
	"instance":      {"api/fault", "host"},
	"instance/spec": {"api/fault"},
	"engine":        {"api/fault", "host", "instance/spec"},
	"gateway":       {"api/fault", "host"},

	// The machine. The two systems do not know each other.
	"host":   {"api/fault"},
	"linux":  {"api/fault", "host"},
	"darwin": {"api/fault", "host"},

	"api":       {},
	"api/fault": {},

	// Virtual clusters run the program; they do not link it.
	"lab": {"api/fault", "host"},
	// End-to-end tests use the program as a person does, and the API.
	"e2e": {"api", "engine", "host", "lab", "tui"},

	// The rig: a PCI device server that knows nothing of USB4, and a USB4 that
	// knows nothing of guests.
	"rig/vfiouser": {"api/fault"},
	"rig/usb4":     {"api/fault", "rig/vfiouser"},
	"rig/image":    {"api/fault"},
	"rig/guest":    {"api/fault", "rig/image"},
	// What runs in a guest is small.
	"rig/guest/wire":   {},
	"rig/guest/guestd": {"rig/guest/wire"},
	// Virtual machines that are joined by it; rig puts them together.
	"rig":               {"api/fault", "lab"},
	"rig/state":         {},
	"rig/probe":         {"host/sock", "rig/state"},
	"rig/cluster":       {"api/fault", "rig"},
	"cmd/tbcluster-rig": {"api/fault", "host", "lab", "rig"},

	"scripts/rules":     {"api/fault"},
	"scripts/packaging": {},
}

// testImports says what tests may import besides.
var testImports = map[string][]string{
	// A supervisor is worth something with a real engine.
	"instance/supervise": {"engine/llamacpp"},
	// A root half is attacked by an agent that is a test.
	"e2e": {"agent", "mesh/identity", "scripts/packaging"},
	// The packages, with a real engine, are installed in a virtual machine.
	"rig/cluster": {"engine/llamacpp", "scripts/packaging"},
	// What the real driver shows is what both are measured by.
	"lab":   {"rig/state"},
	"linux": {"rig/state"},
	// What a crash leaves is seen on a real machine alone.
	"agent/root": {"linux"},
}

// pkg is what `go list -json` tells of a package.
type pkg struct {
	ImportPath, Name, Doc, Dir                   string
	GoFiles, TestGoFiles, XTestGoFiles, CgoFiles []string
	Imports, TestImports, XTestImports           []string
	Standard                                     bool
	Module                                       *struct {
		Path, Dir string
		Main      bool
		Replace   *struct{ Path string }
	}
}

// list runs go list for a system and decodes what it prints.
func list(t *testing.T, goos string, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH=arm64", "CGO_ENABLED=0")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, errs.String())
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) == 0 {
		t.Fatal("go list found no package")
	}
	return pkgs
}

// ruleOf returns the name of the rule for a package, "" when there is none.
func ruleOf(name string) string {
	for ; name != "." && name != ""; name = path.Dir(name) {
		if _, ok := imports[name]; ok {
			return name
		}
	}
	return ""
}

// under reports whether name is tree or lies in it.
func under(name, tree string) bool { return name == tree || strings.HasPrefix(name, tree+"/") }

// mayImport reports whether a package with that rule may import another.
func mayImport(rule, other string) bool {
	return under(other, rule) || slices.ContainsFunc(imports[rule], func(tree string) bool { return under(other, tree) })
}

func ours(importPath string) (string, bool) { return strings.CutPrefix(importPath, module+"/") }

func TestImportsPointOneWay(t *testing.T) {
	checked := 0
	for _, goos := range []string{"linux", "darwin"} {
		for _, p := range list(t, goos, "./...") {
			name, ok := ours(p.ImportPath)
			if !ok {
				t.Errorf("%s is not in the module %s", p.ImportPath, module)
				continue
			}
			rule := ruleOf(name)
			if rule == "" {
				t.Errorf("no rule says what %s may import: add one here and to docs/dev/architecture.md", name)
				continue
			}
			check := func(imports []string, verb string, besides []string) {
				for _, i := range imports {
					other, ok := ours(i)
					if !ok {
						continue
					}
					checked++
					if !mayImport(rule, other) && !slices.Contains(besides, other) {
						t.Errorf("%s %s import %s (%s)", name, verb, other, goos)
					}
				}
			}
			check(p.Imports, "must not", nil)
			check(slices.Concat(p.TestImports, p.XTestImports), "must not in its tests", testImports[name])
		}
	}
	if checked == 0 {
		t.Error("no import was checked")
	}
}

// The rules themselves: what they must refuse, whatever else they allow.
func TestRulesRefuse(t *testing.T) {
	for _, pair := range [][2]string{
		{"mesh/link", "transfer"}, {"transfer/tcp", "mesh/channel"}, {"instance/plan", "engine/llamacpp"}, {"engine/llamacpp", "instance/plan"},
		{"gateway", "instance/supervise"}, {"tui", "agent"}, {"tui", "host"}, {"lab", "agent"}, {"linux", "darwin"}, {"darwin", "linux"},
		{"host/sock", "linux"}, {"api/fault", "api/tbcluster/v1"}, {"agent", "cmd/tbcluster"}, {"agent/root", "mesh/channel"}, {"agent/root", "api/tbcluster/v1"},
		{"rig/image", "rig/guest"}, {"rig/guest/wire", "rig/guest"}, {"rig/guest/guestd", "api/fault"}, {"rig/guest", "rig/usb4"}, {"rig/guest", "host"},
		{"transfer", "api/tbcluster/v1"}, {"instance/supervise", "api/tbcluster/v1"},
	} {
		if mayImport(ruleOf(pair[0]), pair[1]) {
			t.Errorf("the rules let %s import %s", pair[0], pair[1])
		}
	}
	for _, pair := range [][2]string{{"mesh/link", "host/sock"}, {"engine/llamacpp", "instance/spec"}, {"mesh/pair", "mesh/channel"}, {"instance/plan", "instance/spec"}} {
		if !mayImport(ruleOf(pair[0]), pair[1]) {
			t.Errorf("the rules forbid %s to import %s", pair[0], pair[1])
		}
	}
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	vague := regexp.MustCompile(`(?i)^(utils?|common|helpers?|misc|shared|base|lib)$`)
	for _, p := range list(t, "linux", "./...") {
		name, _ := ours(p.ImportPath)
		if vague.MatchString(path.Base(name)) {
			t.Errorf("%s: a name that says nothing; call it after what it is for", name)
		}
		if under(name, "api/tbcluster") {
			continue // generated; the protos are commented, which buf lint enforces
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + path.Base(name) + " "
		}
		if doc := docOf(t, p); !strings.HasPrefix(doc, want) {
			t.Errorf("%s: its package comment begins with %q, not with %q", name, firstWords(doc), want)
		}
	}
}

// docOf returns the package comment; go list gives none where all files are
// tests.
func docOf(t *testing.T, p pkg) string {
	t.Helper()
	if p.Doc != "" || len(p.GoFiles) > 0 {
		return p.Doc
	}
	for _, f := range append(p.TestGoFiles, p.XTestGoFiles...) {
		b, err := os.ReadFile(filepath.Join(p.Dir, f))
		if err != nil {
			t.Fatal(err)
		}
		if i := bytes.Index(b, []byte("// Package ")); i >= 0 {
			return string(b[i+len("// "):])
		}
	}
	return ""
}

func firstWords(s string) string { return s[:min(len(s), 40)] }

func TestNothingIsLeftToDo(t *testing.T) {
	mark := regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME)\b`)
	err := filepath.WalkDir("../..", func(file string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if !slices.Contains([]string{".go", ".proto", ".md", ".sh"}, filepath.Ext(file)) {
			return nil
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for n, line := range strings.Split(string(b), "\n") {
			if mark.MatchString(line) {
				t.Errorf("%s:%d: %s", file, n+1, strings.TrimSpace(line))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// licences are those under which code may be that we link, each known by words
// of its text.
var licences = []struct {
	name  string
	words []string
}{
	{"Apache-2.0", []string{"Apache License", "Version 2.0"}},
	{"BSD", []string{"Redistribution and use in source and binary forms", "THIS SOFTWARE IS PROVIDED BY"}},
	{"MIT", []string{"Permission is hereby granted, free of charge", "WITHOUT WARRANTY OF ANY KIND"}},
	{"ISC", []string{"Permission to use, copy, modify, and", "WITH REGARD TO THIS SOFTWARE"}},
	{"CC0-1.0", []string{"CC0 1.0 Universal"}},
}

// strict are words of licences that would bind whoever uses us.
var strict = []string{"GNU GENERAL PUBLIC LICENSE", "GNU AFFERO", "GNU LESSER GENERAL PUBLIC LICENSE", "Server Side Public License", "Business Source License", "Mozilla Public License"}

// licenceOf returns the licence of a text, "" when it is none of ours.
func licenceOf(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	for _, s := range strict {
		if strings.Contains(strings.ToUpper(text), strings.ToUpper(s)) {
			return ""
		}
	}
	for _, l := range licences {
		if !slices.ContainsFunc(l.words, func(w string) bool { return !strings.Contains(text, w) }) {
			return l.name
		}
	}
	return ""
}

func TestLicencesOfWhatWeBuildOn(t *testing.T) {
	seen := map[string]bool{}
	for _, goos := range []string{"linux", "darwin"} {
		for _, p := range list(t, goos, "-deps", "-test", "./...") {
			if p.Standard || p.Module == nil || p.Module.Main || seen[p.Module.Path] {
				continue
			}
			seen[p.Module.Path] = true
			names, err := filepath.Glob(filepath.Join(p.Module.Dir, "*"))
			if err != nil {
				t.Fatal(err)
			}
			found := ""
			for _, n := range names {
				base := strings.ToUpper(filepath.Base(n))
				if !strings.HasPrefix(base, "LICEN") && !strings.HasPrefix(base, "COPYING") {
					continue
				}
				b, err := os.ReadFile(n)
				if err != nil {
					t.Fatal(err)
				}
				if found = licenceOf(string(b)); found == "" {
					t.Errorf("%s: %s is no licence that we know and can use", p.Module.Path, filepath.Base(n))
				}
			}
			if found == "" {
				t.Errorf("%s has no licence that we know", p.Module.Path)
			}
		}
	}
	if len(seen) < 3 {
		t.Errorf("only %d modules were looked at", len(seen))
	}
}

func TestOurOwnLicence(t *testing.T) {
	b, err := os.ReadFile("../../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	if l := licenceOf(string(b)); l != "Apache-2.0" {
		t.Errorf("LICENSE is %q", l)
	}
}
