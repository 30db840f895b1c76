package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

// finite are words that make a statement of words: a What has one, or says with
// its first word what was being done (package fault then makes "cannot …" of it).
var finite = regexp.MustCompile(`\b(is|are|was|were|has|have|had|does|do|did|cannot|can|may|must|would|gave|failed|ended|came|` +
	`went|took|lost|broke|stopped|vanished|changed|arrived|answered|wanted|listed|started|appeared|needs?|holds?|leads?|fits?|lies|runs?|` +
	`answers?|listens?|uses?|names?|maps?|wants?|says?|said|lacks?|differs?|comes?|goes?|clash(es)?|hangs?|shows?|points?|takes?|knows?|` +
	`speaks?|keeps?|works|joins|reach|copies|makes?|acts?|passed|interrupted|refused|left|used|sent|belongs?|ends?)\b`)

// TestErrorsReadAsStatements: people read what failed as one sentence, whichever
// part of the program says it.
func TestErrorsReadAsStatements(t *testing.T) {
	found := 0
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			what, ok := whatOf(n)
			if !ok {
				return true
			}
			found++
			if first, _, more := strings.Cut(what, " "); strings.Contains(first, "%") && !more {
				return true // known when the program runs
			}
			if said := fault.New(fault.Internal, what, nil, "").What; !finite.MatchString(said) {
				t.Errorf("%s: %q is no statement: begin with the verb of what was being done, or say what is so", set.Position(n.Pos()), what)
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 300 {
		t.Errorf("only %d errors were looked at", found)
	}
}

// whatOf is the What of a call of fault.New or fault.Newf, with "%s" for what
// is not written there.
func whatOf(n ast.Node) (string, bool) {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return "", false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", false
	}
	if x, ok := sel.X.(*ast.Ident); !ok || x.Name != "fault" {
		return "", false
	}
	switch {
	case sel.Sel.Name == "New" && len(call.Args) == 4:
		return written(call.Args[1]), true
	case sel.Sel.Name == "Newf" && len(call.Args) >= 3:
		return written(call.Args[2]), true
	}
	return "", false
}

func written(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); err == nil {
			return s
		}
	case *ast.BinaryExpr:
		return written(e.X) + written(e.Y)
	case *ast.CallExpr:
		if s, ok := e.Fun.(*ast.SelectorExpr); ok && s.Sel.Name == "Sprintf" && len(e.Args) > 0 {
			return written(e.Args[0])
		}
	}
	return "%s"
}
