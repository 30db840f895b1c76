package tui

import (
	"regexp"
	"testing"

	"github.com/charmbracelet/x/ansi"
)

// hue is an SGR sequence that sets a colour.
var hue = regexp.MustCompile(`\x1b\[(\d+;)*(3[0-7]|9[0-7]|38|48|4[0-7]|10[0-7])(;\d+)*m`)

func TestColoursAddNothingThatIsNotSaidInWords(t *testing.T) {
	for _, state := range []string{"broken", "three"} {
		m := screen(t, load(t, state), 140, 40)
		bare := m.View()
		m.t = colours
		if v := m.View(); ansi.Strip(v) != bare || !hue.MatchString(v) {
			t.Errorf("%s: with colours the text differs, or there are none", state)
		}
		m.t = noHues
		if v := m.View(); ansi.Strip(v) != bare || hue.MatchString(v) {
			t.Errorf("%s: without colours there are some, or the text differs", state)
		}
	}
}

func TestThemeFollowsTheEnvironment(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	if themeFor(false) != colours || themeFor(true) != noHues {
		t.Error("the option is not followed")
	}
	t.Setenv("NO_COLOR", "1")
	if themeFor(false) != noHues {
		t.Error("NO_COLOR is not followed")
	}
	t.Setenv("TERM", "dumb")
	if themeFor(false) != noCodes {
		t.Error("a dumb terminal gets codes")
	}
}
