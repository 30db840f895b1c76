package tui

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "tbcluster/api/tbcluster/v1"
)

// evil are names as somebody would choose them who wants to write to the
// terminal of whoever looks, or to hide something from him.
var evil = map[string]string{
	"escape":   "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x9b5n\x1bP$q\x1b\\",
	"overlong": strings.Repeat("W", 4096),
	"wide":     strings.Repeat("広", 1365),
	"bidi":     "user\u202egnp.exe\u202c\u2066x\u2069\u200f",
	"marks":    "a" + strings.Repeat("\u0301", 500) + "b",
	"lines":    "one\ntwo\r\nthree\x0b\x0c\x85\u2028\u2029four",
	"invisble": "\u200b\u2800\u3164\u00ad\ufeff\U000e0041\u115f\uffa0",
	"joiners":  "👩\u200d👩\u200d👧 🇩🇪 👍🏽 \ufe0f",
	"bytes":    "\xff\xfe\x80abc",
	"zalgo":    "H\u0489\u20dde\u0e33l",
}

// infect puts a text into every string of a message, IDs that hold it together
// left out.
func infect(m protoreflect.Message, text string) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		isID := strings.HasSuffix(string(f.Name()), "id")
		switch {
		case f.IsMap():
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for i := range v.List().Len() {
				infect(v.List().Get(i).Message(), text)
			}
		case f.IsList() && f.Kind() == protoreflect.StringKind:
			for i := range v.List().Len() {
				v.List().Set(i, protoreflect.ValueOfString(text))
			}
		case f.Kind() == protoreflect.MessageKind:
			infect(v.Message(), text)
		case f.Kind() == protoreflect.StringKind && !isID:
			m.Set(f, protoreflect.ValueOfString(text))
		}
		return true
	})
}

func TestNoNameWritesToTheTerminal(t *testing.T) {
	places := [][]string{nil, {"1", "enter"}, {"2"}, {"2", "enter"}, {"2", "s"}, {"3"}, {"3", "enter"}, {"4"}, {"4", "enter"}, {"4", "d"}, {"4", "C"}, {"4", "P"},
		{"5"}, {"5", "enter"}, {"6"}, {"6", "end", "enter"}, {"7"}, {"5", "Y"}, {"1", "/", "x"}}
	around := []struct {
		state string
		w, h  int
	}{{"three", 80, 24}, {"broken", 140, 40}, {"six", 50, 14}}
	for i, what := range slices.Sorted(maps.Keys(evil)) {
		text := evil[what]
		// Each text on one screen: together they see all of them.
		for _, size := range around[i%3 : i%3+1] {
			before, after := load(t, size.state), load(t, size.state)
			infect(after.ProtoReflect(), text)
			m := screen(t, before, size.w, size.h)
			var st store
			if err := st.apply(&pb.WatchResponse{Revision: 2, Event: &pb.WatchResponse_Snapshot{Snapshot: proto.CloneOf(after)}}); err != nil {
				t.Fatal(err)
			}
			m.take(report{state: st.state(), wire: st.wire, live: true})
			for _, keys := range places {
				press(m, keys...)
				if err := harmless(m.View(), size.w, size.h); err != "" {
					t.Fatalf("%s in %s at %d×%d after %v: %s\n%s", what, size.state, size.w, size.h, keys, err, m.View())
				}
				press(m, "esc", "esc", "esc")
				m.typing = nil
			}
		}
		for _, l := range changes(nil, stateOf(t, text)) {
			if err := harmless(l.text, 1<<20, 1); err != "" {
				t.Errorf("%s as a plain line: %s: %q", what, err, l.text)
			}
		}
	}
}

// stateOf is a state with that text everywhere, as it is when it has arrived.
func stateOf(t *testing.T, text string) *pb.ClusterState {
	t.Helper()
	s := load(t, "broken")
	infect(s.ProtoReflect(), text)
	var st store
	if err := st.apply(&pb.WatchResponse{Revision: 1, Event: &pb.WatchResponse_Snapshot{Snapshot: s}}); err != nil {
		t.Fatal(err)
	}
	return st.state()
}

// harmless says what is wrong with what goes to a terminal without colours:
// nothing but lines that can be seen and fit.
func harmless(v string, w, h int) string {
	lines := strings.Split(v, "\n")
	if len(lines) > h {
		return "more lines than the terminal has"
	}
	for _, l := range lines {
		if width(l) > w {
			return "a line is too wide: " + l
		}
		for _, r := range l {
			if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r) || unicode.Is(unicode.Bidi_Control, r) {
				return "a character that drives the terminal: " + string(unicode.ToUpper(r)) + " in " + l
			}
		}
	}
	return ""
}
