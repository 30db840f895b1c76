package tui

import (
	"regexp"
	"strings"
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

// On a light background white is nothing, on a dark one black is; and a
// background of our own would fit one of them only. The other colours of the
// palette are chosen by the terminal to be read on its background.
func TestColoursFitLightAndDarkBackgrounds(t *testing.T) {
	fit := map[string]bool{"1": true, "2": true, "7": true, "31": true, "32": true, "33": true, "34": true, "35": true, "36": true}
	for name, theme := range map[string]theme{"colours": colours, "no hues": noHues, "no codes": noCodes, "old": old} {
		for i, code := range theme {
			for _, c := range strings.Split(code, ";") {
				if c != "" && !fit[c] {
					t.Errorf("%s: ink %d uses SGR %s", name, i, c)
				}
			}
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
