package rank

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// MarkVariable is set in the environment of an engine, and so of everything it
// starts, to "INSTANCE/INDEX": how Clean finds what a killed shim left.
const MarkVariable = "TBCLUSTER_RANK"

func (p Process) mark() string { return fmt.Sprintf("%s=%s/%d", MarkVariable, p.InstanceID, p.Index) }

// inherited are the variables that an engine gets from the shim.
var inherited = []string{"HOME", "USER", "LOGNAME", "LANG", "PATH"}

// environ returns the environment of the engine, sorted.
func (p Process) environ(tmp string) []string {
	env := map[string]string{}
	for _, k := range inherited {
		if v, ok := os.LookupEnv(k); ok {
			env[k] = v
		}
	}
	for k, v := range p.Env {
		env[k] = v
	}
	env["TMPDIR"] = tmp
	out := []string{p.mark()}
	for k, v := range env {
		if k != MarkVariable {
			out = append(out, k+"="+v)
		}
	}
	slices.Sort(out)
	return out
}

func (p Process) check() error {
	switch {
	case !filepath.IsAbs(p.Program):
		return fmt.Errorf("program %q is not an absolute path", p.Program)
	case p.InstanceID == "" || strings.ContainsAny(p.InstanceID, "/\x00"):
		return fmt.Errorf("instance ID %q is not one", p.InstanceID)
	case p.Index < 0:
		return fmt.Errorf("rank %d is negative", p.Index)
	case p.Grace < 0 || p.LogBytes < 0 || p.LogFiles < 0:
		return fmt.Errorf("grace, log_bytes and log_files must not be negative")
	}
	for k := range p.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") {
			return fmt.Errorf("%q is no name of a variable", k)
		}
	}
	return nil
}

// WriteProcess writes p to rank.json in dir, atomically. Whoever creates the
// directory calls it, before `tbcluster rank DIR` runs.
func WriteProcess(dir string, p Process) error {
	if err := p.check(); err != nil {
		return err
	}
	return writeJSON(filepath.Join(dir, ProcessFile), p)
}

// ReadProcess reads rank.json in dir.
func ReadProcess(dir string) (Process, error) {
	data, err := readSmall(filepath.Join(dir, ProcessFile))
	if err != nil {
		return Process{}, err
	}
	return decodeProcess(data)
}

func decodeProcess(data []byte) (Process, error) {
	var p Process
	if err := json.Unmarshal(data, &p); err != nil {
		return Process{}, fmt.Errorf("%s: %w", ProcessFile, err)
	}
	if err := p.check(); err != nil {
		return Process{}, fmt.Errorf("%s: %w", ProcessFile, err)
	}
	if p.Grace == 0 {
		p.Grace = DefaultGrace
	}
	if p.LogBytes == 0 {
		p.LogBytes = DefaultLogBytes
	}
	if p.LogFiles == 0 {
		p.LogFiles = DefaultLogFiles
	}
	return p, nil
}
