package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"
)

// Port is the name of the agent's virtio-serial port.
const Port = "tbcluster.rig.agent"

// Overlay is the directory of the initramfs with what is to be laid over the root
// of a disk with a system.
const Overlay = "overlay"

// Window is how many bytes of a channel may be on their way, unread.
const Window = 512 << 10

// The channels of a stream: those of a process, by their descriptors. Files and
// logs use Input towards the guest and Output from it.
const (
	Input  = 0
	Output = 1
	Errors = 2
)

// Greeting is what the agent says first.
type Greeting struct {
	Version int           `json:"version"` // Version
	Release string        `json:"release"` // of the kernel, as uname -r prints it
	BootID  string        `json:"boot_id"` // the kernel's random one
	System  string        `json:"system"`  // "initramfs", or "systemd" on a disk with it
	Uptime  time.Duration `json:"uptime"`  // of the kernel
}

// Version is the version of this protocol. Machine and agent are built from one
// source; it is there so that a stale agent says so.
const Version = 1

// What a Request asks for.
const (
	Exec   = "exec"   // run a program
	Push   = "push"   // write a file
	Pull   = "pull"   // read a file
	Log    = "log"    // the kernel's log, from its first record on, without end
	Reboot = "reboot" // in good order where there is a system to do it
	Off    = "off"    // likewise
)

// Request begins a stream.
type Request struct {
	Kind string `json:"kind"`

	// Exec.
	Args     []string `json:"args,omitempty"` // the program, by path or by name, and its arguments
	Env      []string `json:"env,omitempty"`  // besides the agent's own: "NAME=value"
	Dir      string   `json:"dir,omitempty"`  // "/" when empty
	Terminal bool     `json:"terminal,omitempty"`
	Columns  uint16   `json:"columns,omitempty"`
	Rows     uint16   `json:"rows,omitempty"`
	NoInput  bool     `json:"no_input,omitempty"` // standard input is /dev/null

	// Push and Pull.
	Path string `json:"path,omitempty"`
	Mode uint32 `json:"mode,omitempty"` // permissions of the file that is written
	Sync bool   `json:"sync,omitempty"` // fsync file and directory before saying it is there
}

// Result ends a stream.
type Result struct {
	// Code is the exit status of the program, -1 when a signal ended it.
	Code   int    `json:"code"`
	Signal int    `json:"signal,omitempty"`
	Error  string `json:"error,omitempty"` // why it could not be done
	// Size and SHA256 (hex) are those of a file, as the guest has seen it.
	Size   int64  `json:"size,omitempty"`
	SHA256 string `json:"sha256,omitempty"`
}

// Encode returns the JSON of a message, which has to fit into a frame.
func Encode(message any) ([]byte, error) {
	b, err := json.Marshal(message)
	if err == nil && len(b) > MaxPayload {
		err = fmt.Errorf("a message of %d bytes: at most %d fit", len(b), MaxPayload)
	}
	return b, err
}

// decode reads JSON and refuses fields that it does not know.
func decode(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after the message")
	}
	return nil
}

// DecodeGreeting reads the payload of Hello.
func DecodeGreeting(b []byte) (Greeting, error) {
	var g Greeting
	if err := decode(b, &g); err != nil {
		return g, fmt.Errorf("greeting: %w", err)
	}
	if g.Version != Version {
		return g, fmt.Errorf("greeting: the agent speaks version %d, not %d", g.Version, Version)
	}
	if g.System != "initramfs" && g.System != "systemd" {
		return g, fmt.Errorf("greeting: unknown system %q", g.System)
	}
	return g, nil
}

// DecodeRequest reads the payload of Start.
func DecodeRequest(b []byte) (Request, error) {
	var r Request
	if err := decode(b, &r); err != nil {
		return r, fmt.Errorf("request: %w", err)
	}
	switch r.Kind {
	case Exec:
		if len(r.Args) == 0 || r.Args[0] == "" {
			return r, errors.New("request: no program is named")
		}
	case Push, Pull:
		if !path.IsAbs(r.Path) || strings.ContainsRune(r.Path, 0) {
			return r, fmt.Errorf("request: %q is no absolute path", r.Path)
		}
	case Log, Reboot, Off:
	default:
		return r, fmt.Errorf("request: unknown kind %q", r.Kind)
	}
	return r, nil
}

// DecodeResult reads the payload of Exit.
func DecodeResult(b []byte) (Result, error) {
	var r Result
	if err := decode(b, &r); err != nil {
		return r, fmt.Errorf("result: %w", err)
	}
	if r.Size < 0 || r.Code < -1 || r.Code > 255 || r.Signal < 0 || r.Signal > 64 {
		return r, errors.New("result: a number that cannot be")
	}
	return r, nil
}
