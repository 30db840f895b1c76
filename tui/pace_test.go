package tui

import (
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	pb "tbcluster/api/tbcluster/v1"
)

func TestWhatHappensByItselfIsPaintedFourTimesASecond(t *testing.T) {
	m := screen(t, load(t, "three"), 80, 24)
	now := noon
	m.clock = func() time.Time { return now }
	p := newPaced(m)
	frames, last := 0, p.View()
	seen := func() {
		if v := p.View(); v != last {
			frames, last = frames+1, v
		}
	}
	var due time.Time // of the paintMsg that was asked for
	for i := range 400 {
		now = noon.Add(time.Duration(i) * 5 * time.Millisecond)
		s := load(t, "three")
		for _, x := range s.Instances {
			x.TokensPerSecond = float64(100 + i)
		}
		before := p.due
		p.Update(reportMsg(report{live: true, state: s}))
		if p.due && !before {
			due = now.Add(repaintEvery)
		}
		seen()
		if p.due && !now.Before(due) {
			p.Update(paintMsg{})
			seen()
		}
	}
	// Two seconds have gone by.
	if frames < 4 || frames > 9 {
		t.Errorf("%d frames in two seconds, four a second are wanted", frames)
	}
	// What comes last is not lost.
	if p.due {
		p.Update(paintMsg{})
	}
	if p.View() != m.View() {
		t.Error("the last change is not on the screen")
	}
	// A key is answered at once, and so is a new size.
	for _, msg := range []tea.Msg{keyMsg("2"), tea.WindowSizeMsg{Width: 100, Height: 30}, keyMsg("?")} {
		p.Update(msg)
		if p.View() != m.View() {
			t.Errorf("%v waits", msg)
		}
	}
}

func TestPacedNeverForgetsWhatItPutOff(t *testing.T) {
	m := screen(t, load(t, "three"), 80, 24)
	now := noon
	m.clock = func() time.Time { return now }
	p := newPaced(m)
	s := load(t, "three")
	s.Instances[1].State = pb.InstanceState_INSTANCE_STATE_FAILED
	_, cmd := p.Update(reportMsg(report{live: true, state: s}))
	if cmd == nil || !p.due {
		t.Fatal("nobody will paint what has changed")
	}
	p.Update(doneMsg{text: "a line"})
	p.Update(paintMsg{})
	if p.View() != m.View() || p.due {
		t.Error("what was put off is not painted")
	}
}
