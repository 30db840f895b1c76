package fault

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// reasons are the constants of type Reason in fault.go.
func reasons(t *testing.T) []Reason {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "fault.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []Reason
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Values) != 1 {
			return true
		}
		if id, ok := v.Type.(*ast.Ident); ok && id.Name == "Reason" {
			s, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, Reason(s))
		}
		return true
	})
	if len(out) == 0 {
		t.Fatal("no reason was found")
	}
	return out
}

func TestEveryReasonHasARow(t *testing.T) {
	list := reasons(t)
	for _, r := range list {
		e, ok := Table[r]
		if !ok {
			t.Errorf("%s has no row", r)
			continue
		}
		if e.Code == codes.OK || e.Exit <= ExitOK || e.Exit > 130 || e.Meaning == "" {
			t.Errorf("%s: %+v", r, e)
		}
	}
	if len(Table) != len(list) {
		t.Errorf("%d rows for %d reasons", len(Table), len(list))
	}
}

// travel sends err over gRPC, as far as its encoding goes.
func travel(err error) *Fault {
	st, _ := status.FromError(err)
	return FromStatus(status.FromProto(st.Proto()).Err())
}

func TestAFaultTravels(t *testing.T) {
	for r, e := range Table {
		f := New(r, "copy x to beta", errors.New("no space left on device"), "free 94 MB").At("beta:/home/ada").With("node", "beta")
		for _, sent := range []error{f, fmt.Errorf("on the way: %w", f)} {
			got := travel(sent)
			if got.Reason != r || got.What != f.What || got.Where != f.Where || got.Why != f.Why || got.Fix != f.Fix || !maps.Equal(got.Meta, f.Meta) {
				t.Errorf("%s became %+v", r, got)
			}
			if got.Exit() != e.Exit || status.Code(got) != e.Code {
				t.Errorf("%s: exit %d, code %s", r, got.Exit(), status.Code(got))
			}
		}
	}
}

// A file's name may hold any bytes; the reason arrives all the same.
func TestAFaultWithOddBytesTravels(t *testing.T) {
	f := New(FileMissing, "read caf\xe9", errors.New("no such file: caf\xe9"), "look at caf\xe9").At("beta:caf\xe9").With("path", "caf\xe9")
	got := travel(f)
	if got.Reason != FileMissing || got.Exit() != ExitPartial || !strings.HasPrefix(got.What, "cannot read caf") || !strings.HasPrefix(got.Meta["path"], "caf") {
		t.Errorf("it became %+v", got)
	}
}

func TestWhatIsNoFaultBecomesOneByItsCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want Reason
	}{
		{status.Error(codes.Unavailable, "connection refused"), NoAgent},
		{status.Error(codes.DeadlineExceeded, "late"), Timeout},
		{status.Error(codes.Canceled, "gone"), Interrupted},
		{status.Error(codes.PermissionDenied, "no"), Denied},
		{status.Error(codes.Unimplemented, "what"), Unsupported},
		{status.Error(codes.DataLoss, "odd"), Internal},
		{fmt.Errorf("wrapped: %w", context.Canceled), Interrupted},
		{context.DeadlineExceeded, Timeout},
		{errors.New("a bug"), Internal},
	} {
		if got := FromStatus(c.err); got.Reason != c.want || !errors.Is(got, c.err) && got.What == "" {
			t.Errorf("%v became %+v, want %s", c.err, got, c.want)
		}
	}
	if f := FromStatus(nil); f != nil {
		t.Errorf("nil became %+v", f)
	}
}

func TestWhereIsSaidWithoutChangingWhatOthersHold(t *testing.T) {
	f := New(NodeDown, "connect", nil, "")
	g := f.At("beta").With("node", "beta")
	if h := g.With("rank", "1"); len(g.Meta) != 1 || len(h.Meta) != 2 || h.Where != "beta" {
		t.Errorf("%+v, %+v", g, h)
	}
	if f.Where != "" || f.Meta != nil {
		t.Errorf("the first was changed: %+v", f)
	}
}

func TestExitTable(t *testing.T) {
	got := ExitTable(ModelBroken, ModelUnknown, NoAgent, ModelBroken)
	for _, want := range []string{"  0    it did what was asked\n", "  2    no agent answers\n", "  3    no node has that model\n", "  5    the model's files are truncated or corrupt\n", "  70   there is a bug"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
}

func FuzzFaultsTravel(f *testing.F) {
	f.Add("MODEL_UNKNOWN", "what", "where", "why", "fix", "key", "value")
	f.Add("NO_SUCH_REASON", "", "\xff", "a\x00b", "", "what", "\xc3\x28")
	f.Fuzz(func(t *testing.T, reason, what, where, why, fix, key, value string) {
		sent := &Fault{Reason: Reason(reason), What: what, Where: where, Why: why, Fix: fix}
		got := travel(sent.With(key, value))
		if utf8.ValidString(reason) && got.Reason != sent.Reason {
			t.Errorf("reason %q became %q", reason, got.Reason)
		}
		if utf8.ValidString(what) && got.What != what {
			t.Errorf("what %q became %q", what, got.What)
		}
	})
}

func TestEveryWhatIsAStatement(t *testing.T) {
	for what, want := range map[string]string{
		"copy models/x.gguf to beta":   "cannot copy models/x.gguf to beta",
		"pair":                         "cannot pair",
		"wait for the lock of the lab": "gave up waiting for the lock of the lab",
		"no node is called \"gamma\"":  "no node is called \"gamma\"",
		"cannot copy models/x.gguf":    "cannot copy models/x.gguf",
		"reading stopped":              "reading stopped",
		"delete 3 files at once?":      "delete 3 files at once?",
		"copyright.txt is not a model": "copyright.txt is not a model",
		"pairing failed":               "pairing failed",
		"":                             "",
	} {
		if got := New(Internal, what, nil, "").What; got != want {
			t.Errorf("%q became %q, want %q", what, got, want)
		}
		if got := Newf(Internal, "", "%s", what).What; got != want {
			t.Errorf("%q became %q, want %q", what, got, want)
		}
	}
	// What has travelled is not changed again.
	f := New(FileIO, "read the list", nil, "")
	if got := travel(f); got.What != "cannot read the list" {
		t.Errorf("it became %q", got.What)
	}
}
