package lab

import (
	"net"
	"os/exec"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
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

// A boot command that dies at once may be told to have ended before it is told to
// have been started.
func TestAnEndThatIsToldFirstCounts(t *testing.T) {
	near, far := net.Pipe()
	b := &boot{conn: frame.New(near), answers: make(chan news, 1)}
	go b.listen()
	its := frame.New(far)
	defer far.Close()
	for _, step := range []struct {
		what string
		news []news
		pid  int
		exit string
	}{
		{"its end is told first", []news{{Pid: 7, Exit: "exit status 1"}, {Answer: true, Pid: 7}}, 0, "exit status 1"},
		{"the next one runs", []news{{Answer: true, Pid: 9}}, 9, ""},
		{"and ends", []news{{Pid: 9, Exit: "killed by SIGKILL"}, {Answer: true}}, 0, "killed by SIGKILL"},
		{"another of its number runs", []news{{Answer: true, Pid: 9}}, 9, ""},
	} {
		for _, w := range step.news {
			if err := its.Send(w); err != nil {
				t.Fatal(err)
			}
		}
		<-b.answers
		b.mu.Lock()
		if b.agentPID != step.pid || b.exit != step.exit {
			t.Errorf("%s: PID %d, ended by %q", step.what, b.agentPID, b.exit)
		}
		b.mu.Unlock()
	}
}
