package guest

import (
	"os/exec"
	"testing"
)

func TestHowQEMUEndedIsOneLine(t *testing.T) {
	for script, want := range map[string]string{"exit 0": "exit status 0", "exit 1": "exit status 1: out of memory", "kill -9 $$": "signal: killed"} {
		cmd := exec.Command("sh", "-c", script)
		_ = cmd.Run() // how it ends is what is looked at
		if got := ending(cmd.ProcessState, "warning: no error recovery\nout of memory"); got != want {
			t.Errorf("%s: %q, not %q", script, got, want)
		}
	}
	cmd := exec.Command("false")
	_ = cmd.Run()
	if got := ending(cmd.ProcessState, ""); got != "exit status 1" {
		t.Errorf("one that said nothing: %q", got)
	}
}
