package tui

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"google.golang.org/protobuf/encoding/prototext"

	pb "tbcluster/api/tbcluster/v1"
)

var update = flag.Bool("update", false, "write the golden screens anew")

func TestMain(m *testing.M) {
	if os.Getenv(terminalEnv) != "" {
		os.Exit(terminalMain())
	}
	// Screens show times of the day.
	time.Local = time.UTC
	os.Exit(m.Run())
}

// noon is when the states in testdata are looked at.
var noon = time.Unix(1767268800, 0)

func load(t testing.TB, name string) *pb.ClusterState {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name+".txtpb"))
	if err != nil {
		t.Fatal(err)
	}
	s := &pb.ClusterState{}
	if err := prototext.Unmarshal(raw, s); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return s
}

// screen is a model that has seen one state at noon; nothing of it is connected.
func screen(t testing.TB, s *pb.ClusterState, w, h int) *Model {
	t.Helper()
	m := NewModel(context.Background(), Options{Title: "tbcluster"})
	m.t = noCodes
	m.conn = nobody{}
	m.clock = func() time.Time { return noon }
	m.now = noon
	m.resize(w, h)
	if s != nil {
		var st store
		if err := st.apply(&pb.WatchResponse{Revision: s.GetRevision(), Event: &pb.WatchResponse_Snapshot{Snapshot: s}}); err != nil {
			t.Fatal(err)
		}
		m.take(report{state: st.state(), wire: st.wire, live: true})
		for i := range 12 {
			r := m.snap.rates.next(m.snap.ClusterState, noon.Add(time.Duration(i)*time.Second))
			m.snap.rates = r
		}
	}
	return m
}

func press(m *Model, keys ...string) {
	for _, k := range keys {
		m.Update(keyMsg(k))
	}
}

func keyMsg(k string) tea.KeyMsg {
	special := map[string]tea.KeyType{
		"enter": tea.KeyEnter, "esc": tea.KeyEsc, "tab": tea.KeyTab, "up": tea.KeyUp, "down": tea.KeyDown, "left": tea.KeyLeft,
		"right": tea.KeyRight, " ": tea.KeySpace, "backspace": tea.KeyBackspace, "pgdown": tea.KeyPgDown, "pgup": tea.KeyPgUp,
		"home": tea.KeyHome, "end": tea.KeyEnd, "shift+tab": tea.KeyShiftTab, "ctrl+c": tea.KeyCtrlC,
	}
	if t, ok := special[k]; ok {
		return tea.KeyMsg{Type: t, Runes: map[bool][]rune{true: {' '}}[k == " "]}
	}
	return tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune(k)}
}

// golden compares a screen with the one in testdata.
func golden(t *testing.T, name string, m *Model) {
	t.Helper()
	got := m.View()
	lines := strings.Split(got, "\n")
	if len(lines) != m.h {
		t.Errorf("%s: %d lines on a terminal of %d", name, len(lines), m.h)
	}
	for i, l := range lines {
		if width(l) > m.w {
			t.Errorf("%s: line %d takes %d cells of %d: %q", name, i+1, width(l), m.w, l)
		}
		lines[i] = strings.TrimRight(l, " ")
	}
	got = strings.Join(lines, "\n") + "\n"
	path := filepath.Join("testdata", name+".screen")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s looks different (go test -update writes it anew).\ngot:\n%s\nwant:\n%s", name, got, want)
	}
}

var sizes = []struct {
	name string
	w, h int
}{{"80x24", 80, 24}, {"140x40", 140, 40}}

func TestScreens(t *testing.T) {
	for _, state := range []string{"alone", "alone-cabled", "pair", "three", "four", "five", "six", "eight", "many", "broken", "hostile"} {
		for _, size := range sizes {
			t.Run(state+"-"+size.name, func(t *testing.T) {
				golden(t, state+"-"+size.name, screen(t, load(t, state), size.w, size.h))
			})
		}
	}
}

func TestScreensOfSmallTerminals(t *testing.T) {
	for _, size := range []struct {
		name string
		w, h int
	}{{"60x15", 60, 15}, {"30x8", 30, 8}} {
		m := screen(t, load(t, "three"), size.w, size.h)
		golden(t, "three-"+size.name, m)
		press(m, "2")
		golden(t, "three-instances-"+size.name, m)
	}
	for w := 0; w < 33; w += 4 {
		for h := 0; h < 12; h += 2 {
			for _, keys := range [][]string{nil, {"enter"}, {"C"}, {"P"}, {"?"}, {"2", "enter"}, {"3", "s"}} {
				m := screen(t, load(t, "three"), w, h)
				press(m, keys...)
				for _, l := range strings.Split(m.View(), "\n") {
					if width(l) > max(w, 1) {
						t.Fatalf("%d×%d after %v: %d cells: %q", w, h, keys, width(l), l)
					}
				}
			}
		}
	}
}

// pages are opened by keys, as a person does.
func TestPages(t *testing.T) {
	for _, c := range []struct {
		name, state string
		keys        []string
	}{
		{"page-node", "three", []string{"enter"}},
		{"page-cable", "three", []string{"6", "end", "enter"}},
		{"page-instance-failed", "broken", []string{"2", "enter"}},
		{"page-transfer", "three", []string{"3", "enter"}},
		{"page-transfer-failed", "broken", []string{"3", "end", "enter"}},
		{"page-model", "three", []string{"4", "enter"}},
		{"page-finding", "three", []string{"5", "enter"}},
		{"help", "three", []string{"?"}},
		{"confirm-stop", "three", []string{"2", "s"}},
		{"copy", "three", []string{"4", "down", "C"}},
		{"place", "three", []string{"4", "P"}},
		{"pair-form", "alone", []string{"p"}},
		{"filter", "three", []string{"4", "/", "s", "m"}},
		{"cables", "broken", []string{"6"}},
	} {
		for _, size := range sizes {
			t.Run(c.name+"-"+size.name, func(t *testing.T) {
				m := screen(t, load(t, c.state), size.w, size.h)
				press(m, c.keys...)
				golden(t, c.name+"-"+size.name, m)
			})
		}
	}
}

func TestScreenWithoutAgent(t *testing.T) {
	m := screen(t, nil, 80, 24)
	golden(t, "asking-80x24", m)
	m.take(report{why: "nothing answers at its socket"})
	golden(t, "noagent-80x24", m)
	m.resize(200, 24)
	m.o.Start = "`tbcluster lab start alpha --agent` starts it"
	if v := m.View(); !strings.Contains(v, "`tbcluster lab start alpha --agent` starts it; this") || strings.Contains(v, "tbcluster up") {
		t.Errorf("it does not say what starts the agent of a lab:\n%s", v)
	}
}

func TestScreenWhenTheAgentWentAway(t *testing.T) {
	m := screen(t, load(t, "three"), 80, 24)
	m.take(report{why: "nothing answers at its socket"})
	m.now = noon.Add(12 * time.Second)
	golden(t, "away-80x24", m)
	m.t = colours
	if v := m.View(); !strings.Contains(v, "\x1b[2m") || strings.Contains(v, "\x1b[36m") {
		t.Error("what is old is not dim")
	}
	press(m, "C")
	if !strings.Contains(m.View(), "what is shown is old") {
		t.Error("a key that asks the agent does not say why it does not apply")
	}
	press(m, "esc")
	m.take(report{live: true, state: m.snap.ClusterState})
	if v := m.View(); strings.Contains(v, "is old") || !strings.Contains(v, "3 nodes") {
		t.Error("the screen does not come back with the agent")
	}
}
