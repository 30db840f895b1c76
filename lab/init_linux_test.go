package lab

import (
	"os/exec"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/host/proc"
)

// TestWhatHasEndedIsStartedAtOnce: who sees that the boot command has ended may
// start it again, though its end was not noted yet.
func TestWhatHasEndedIsStartedAtOnce(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	last := &bootProcess{pid: cmd.Process.Pid, noted: make(chan struct{})}
	m := &machine{setup: &setup{Name: "alpha", Boot: []string{"/no/such/command"}}, booted: last}
	_, err := m.bootCommand()
	needReason(t, err, fault.NodeInUse)

	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has ended", func() bool { s, err := proc.Stat(last.pid); return err == nil && s.Zombie })
	ended := make(chan error, 1)
	go func() {
		_, err := m.bootCommand()
		ended <- err
	}()
	_ = cmd.Wait() // killed
	m.mu.Lock()
	m.booted = nil
	m.mu.Unlock()
	close(last.noted)
	if err := <-ended; fault.Is(err, fault.NodeInUse) {
		t.Errorf("what has ended is in the way: %v", err)
	} else if err == nil {
		t.Error("a command that does not exist was started")
	}
}
