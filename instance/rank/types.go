package rank

import (
	"fmt"
	"syscall"
	"time"
)

// Names of the files in the directory of a rank.
const (
	ProcessFile = "rank.json"
	StatusFile  = "status.json"
	LogFile     = "log"
)

// Defaults of Process.
const (
	// DefaultGrace is long because an engine that is killed while it gives back
	// memory leaves it stranded on macOS.
	DefaultGrace    = 60 * time.Second
	DefaultLogBytes = 8 << 20
	DefaultLogFiles = 3
	// LastLines is how many lines a Status keeps.
	LastLines = 40
)

// Process is what a rank runs: the content of rank.json.
type Process struct {
	InstanceID string `json:"instance_id"`
	Index      int    `json:"index"`
	// Program is an absolute path on this node.
	Program string   `json:"program"`
	Args    []string `json:"args"`
	// Env is added to HOME, USER, LOGNAME, LANG and PATH of the shim; nothing
	// else is inherited. TMPDIR is always the shim's.
	Env map[string]string `json:"env"`
	// Grace is how long the engine has to end after SIGTERM; 0 means
	// DefaultGrace.
	Grace time.Duration `json:"grace_ns"`
	// LogBytes is the size at which the log is rotated, LogFiles how many are
	// kept in all; 0 means the defaults.
	LogBytes int64 `json:"log_bytes"`
	LogFiles int   `json:"log_files"`
	// Skip drops lines that contain one of these from the log: what the engine
	// says at every one of our own checks.
	Skip []string `json:"skip,omitempty"`
}

// Phase is how far a rank's process has come.
type Phase string

// The phases.
const (
	Starting Phase = "starting" // the shim runs, the engine does not yet
	Running  Phase = "running"
	Stopping Phase = "stopping" // asked to end
	Ended    Phase = "ended"
)

// Status is the content of status.json.
type Status struct {
	InstanceID string    `json:"instance_id"`
	Index      int       `json:"index"`
	Phase      Phase     `json:"phase"`
	Shim       Ident     `json:"shim"`
	Engine     Ident     `json:"engine"` // PID 0 until it started
	Started    time.Time `json:"started"`
	Ended      time.Time `json:"ended"`
	ExitCode   int       `json:"exit_code"` // -1 when a signal ended it
	Signal     int       `json:"signal"`    // 0 when it exited by itself
	// Killed is set when the engine did not end within its grace.
	Killed bool `json:"killed"`
	// Error says why the engine could not be started at all.
	Error string `json:"error"`
	// LastLines are the last lines of the log, without their times, at the end.
	LastLines []string `json:"last_lines"`
}

// Exit returns the exit status in words: "exit 1", "signal 9 (killed)", why it
// never started, or "" while it runs.
func (s Status) Exit() string {
	switch {
	case s.Error != "" && s.Engine.PID == 0:
		return "not started: " + s.Error
	case s.Error != "":
		return s.Error
	case s.Phase != Ended:
		return ""
	case s.Signal != 0:
		return fmt.Sprintf("signal %d (%s)", s.Signal, syscall.Signal(s.Signal))
	default:
		return fmt.Sprintf("exit %d", s.ExitCode)
	}
}

// Line is one line of a log.
type Line struct {
	Time time.Time
	Text string
}
