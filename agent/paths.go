package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/google/renameio/v2"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
)

// Paths are the places of one agent on its machine.
type Paths struct {
	State  string // see docs/dev/architecture.md
	Run    string // holds the sockets
	Config string
}

// Socket is the API's socket.
func (p Paths) Socket() string { return filepath.Join(p.Run, string(root.SocketAPI)) }

// GatewaySocket is the gateway's socket.
func (p Paths) GatewaySocket() string { return filepath.Join(p.Run, string(root.SocketGateway)) }

// Own is the agent's part of the state.
func (p Paths) Own(name ...string) string {
	return filepath.Join(append([]string{p.State, "agent"}, name...)...)
}

// DefaultPaths returns the places for a uid.
func DefaultPaths(uid int, getenv func(string) string) Paths {
	if uid == 0 {
		return Paths{State: "/var/lib/tbcluster", Run: "/run/tbcluster", Config: "/etc/tbcluster/config.toml"}
	}
	abs := func(v, fallback string) string {
		if d := getenv(v); filepath.IsAbs(d) {
			return d
		}
		return fallback
	}
	home := getenv("HOME")
	p := Paths{
		State:  filepath.Join(abs("XDG_STATE_HOME", filepath.Join(home, ".local", "state")), "tbcluster"),
		Config: filepath.Join(abs("XDG_CONFIG_HOME", filepath.Join(home, ".config")), "tbcluster", "config.toml"),
		Run:    filepath.Join(os.TempDir(), "tbcluster-"+strconv.Itoa(uid)),
	}
	if d := abs("XDG_RUNTIME_DIR", ""); d != "" {
		p.Run = filepath.Join(d, "tbcluster")
	}
	return p
}

// stateSchema is the version of everything in the state directory.
const stateSchema = 1

// CheckSchema makes the state directory if there is none and refuses one that a
// newer program wrote.
func CheckSchema(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fault.New(fault.FileIO, "make the state directory", err, "make its parent writable").At(dir)
	}
	path := filepath.Join(dir, "schema")
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := renameio.WriteFile(path, fmt.Appendf(nil, "%d\n", stateSchema), 0o644); err != nil {
			return fault.New(fault.FileIO, "write the state directory", err, "make it writable, or free some space").At(path)
		}
		return nil
	}
	if err != nil {
		return fault.New(fault.FileIO, "read the state directory", err, "make it readable").At(path)
	}
	var have int
	if err := json.Unmarshal(data, &have); err != nil {
		return fault.New(fault.FileIO, "read the schema number", err, "restore it: it was "+strconv.Itoa(stateSchema)+" when this program wrote it").At(path)
	}
	if have > stateSchema {
		return fault.Newf(fault.StateTooNew, "install the newer version again, or move the directory away and pair anew",
			"the state on disk is of schema %d, this program knows up to %d", have, stateSchema).At(dir)
	}
	return nil
}
