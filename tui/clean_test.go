package tui

import (
	"context"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "tbcluster/api/tbcluster/v1"
)

func TestCleanWritesOutWhatATerminalWouldObey(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                     "plain",
		"\x1b[2J":                   `\x1b[2J`,
		"a\nb\r\tc":                 "a↵b c",
		"\u009b31m":                 `\x9b31m`,
		"a\u202eb\u2066":            `a\u202eb\u2066`,
		"zero\u200bwidth\ufeff":     `zero\u200bwidth\ufeff`,
		"e\u0301":                   "é",
		"\u0301alone":               `\u0301alone`,
		"x\u0323\u0310\u0310\u0310": "x\u0323\u0310" + `\u0310\u0310`,
		"модель 模型":                 "модель 模型",
		"bad\xff":                   "bad\ufffd",
		"👍🏽":                        `👍\U01f3fd`,
		"🇩🇪":                        `\U01f1e9\U01f1ea`,
		"\u3164":                    `\u3164`,
		strings.Repeat("é", 3000):   strings.Repeat("é", 2048) + "…",
	} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}

// hostile reports what of a text a terminal would obey; SGR sequences of our
// own are taken out first.
func hostile(s string) string {
	for _, code := range colours {
		s = strings.ReplaceAll(s, "\x1b["+code+"m", "")
	}
	s = strings.ReplaceAll(s, "\x1b[0m", "")
	for _, r := range s {
		if r != '\n' && (unicode.Is(unicode.C, r) || unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r)) {
			return string(r)
		}
	}
	if !utf8.ValidString(s) {
		return "no UTF-8"
	}
	return ""
}

// poison puts s into every string of a message, IDs that tie things together
// excepted where keepIDs.
func poison(m protoreflect.Message, s string) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		id := strings.HasSuffix(string(f.Name()), "id") && m.Get(f).IsValid()
		switch {
		case f.IsList() && f.Kind() == protoreflect.StringKind:
			l := m.Mutable(f).List()
			if l.Len() == 0 {
				l.Append(protoreflect.ValueOfString(""))
			}
			for i := range l.Len() {
				l.Set(i, protoreflect.ValueOfString(l.Get(i).String()+s))
			}
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for i := range m.Get(f).List().Len() {
				poison(m.Get(f).List().Get(i).Message(), s)
			}
		case f.Kind() == protoreflect.StringKind && (!id || m.Get(f).String() != ""):
			m.Set(f, protoreflect.ValueOfString(m.Get(f).String()+s))
		case f.Kind() == protoreflect.MessageKind && !f.IsList() && m.Has(f):
			poison(m.Mutable(f).Message(), s)
		}
	}
}

// FuzzNamesFromTheNetwork puts a text into every field of everything and walks
// through all places of the screen: nothing of it may be obeyed by a terminal,
// and no line may be wider than the screen.
func FuzzNamesFromTheNetwork(f *testing.F) {
	for _, s := range []string{"", "\x1b[2J\x1b]0;title\x07", "\u202e\u2066", "\r\n\t\v\f\b", "\u009b5n", "e\u0301\u0301\u0301", "长名字", "\u200d\ufe0f", "\xff\xfe", "\u2028", "👍🏽🇩🇪", "\u200b", "%s%d", strings.Repeat("w", 300)} {
		f.Add(s)
	}
	broken, three := load(f, "broken"), load(f, "three")
	plan, err := instanceService{a: &agent{answers: map[string]error{}}}.Plan(context.Background(), &pb.PlanRequest{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		s = strings.ToValidUTF8(s, "\ufffd") // gRPC refuses the rest
		for _, base := range []*pb.ClusterState{broken, three} {
			c := proto.Clone(base).(*pb.ClusterState)
			poison(c.ProtoReflect(), s)
			m := screen(t, c, 80, 24)
			m.t = colours
			check := func(where string) {
				t.Helper()
				v := m.View()
				if bad := hostile(v); bad != "" {
					t.Fatalf("%s: %q reaches the terminal in %q", where, bad, v)
				}
				for _, l := range strings.Split(v, "\n") {
					if width(l) > m.w {
						t.Fatalf("%s: a line takes %d cells: %q", where, width(l), l)
					}
				}
			}
			for _, p := range []string{"1", "2", "3", "4", "5", "6", "7"} {
				press(m, p)
				check("panel " + p)
				for range 2 {
					press(m, "enter")
					check("page in " + p)
					if m.page != nil {
						m.takeLog(logMsg{page: m.page, lines: []string{logText(&pb.LogLine{Text: s, NodeName: s}, true)}})
						check("log in " + p)
					}
					press(m, "esc", "s")
					check("question in " + p)
					press(m, "esc", "down")
				}
			}
			press(m, "4", "C")
			check("copy")
			press(m, "esc", "P")
			r := proto.Clone(plan).(*pb.PlanResponse)
			poison(r.ProtoReflect(), s)
			m.form.(*placeForm).answer = &answer{plan: cleanMessage(r)}
			check("place")
			press(m, "esc")
			for _, l := range changes(nil, m.snap.ClusterState) {
				if bad := hostile(l.text); bad != "" || strings.Contains(l.text, "\n") {
					t.Fatalf("plain line %q", l.text)
				}
			}
			if m.resize(140, 40); true {
				check("wide")
			}
		}
	})
}

// FuzzWatch feeds whole events, as a broken or hostile agent would send them.
func FuzzWatch(f *testing.F) {
	for _, name := range []string{"three", "broken", "many", "hostile"} {
		raw, err := proto.Marshal(&pb.WatchResponse{Revision: 3, Event: &pb.WatchResponse_Snapshot{Snapshot: load(f, name)}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw, 80, 24)
	}
	f.Fuzz(func(t *testing.T, raw []byte, w, h int) {
		ev := &pb.WatchResponse{}
		if proto.Unmarshal(raw, ev) != nil {
			return
		}
		var st store
		if st.apply(ev) != nil {
			return
		}
		m := screen(t, nil, min(max(w, 0), 300), min(max(h, 0), 100))
		m.take(report{state: st.state(), wire: st.wire, live: true})
		press(m, "down", "enter", "esc", "2", "enter", "esc", "3", "s", "esc", "4", "C", "esc", "P", "esc", "6", "down", "enter", "esc", "5", "enter")
		if bad := hostile(m.View()); bad != "" {
			t.Fatalf("%q reaches the terminal", bad)
		}
	})
}

func FuzzWords(f *testing.F) {
	for _, s := range []string{"cp a b", `logs "my model" -f`, `a\ b 'c d'`, `'`, `\`, ``} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		l, err := words(s)
		if err != nil {
			return
		}
		// Quoted again, the words are the same.
		var quoted []string
		for _, w := range l {
			quoted = append(quoted, "'"+strings.ReplaceAll(w, "'", `'\''`)+"'")
		}
		again, err := words(strings.Join(quoted, " "))
		if err != nil || !slices.Equal(again, l) {
			t.Errorf("words(%q) = %q, quoted again %q (%v)", s, l, again, err)
		}
	})
}
