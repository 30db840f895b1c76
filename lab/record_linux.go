package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// maxSocketPath is how long the path of a Unix socket may be on Linux, less
// the byte at its end.
const maxSocketPath = 107 - 4

// agentSocket is where the agent of a node listens, below NODE/run.
const agentSocket = "tbcluster/agent.sock"

// record is lab.json.
type record struct {
	Options  Options  `json:"options"`
	Seed     string   `json:"seed"` // of UUIDs and machine IDs
	Rootless bool     `json:"rootless"`
	Keeper   process  `json:"keeper"`
	Memory   string   `json:"memory"` // how it is enforced
	Cgroups  []string `json:"cgroups,omitempty"`
	Notes    []string `json:"notes,omitempty"`
}

func readRecord(dir string) (record, error) {
	var r record
	b, err := os.ReadFile(filepath.Join(dir, "lab.json"))
	if err != nil {
		return r, err
	}
	err = json.Unmarshal(b, &r)
	return r, err
}

func (r record) write(dir string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(filepath.Join(dir, "lab.json"), append(b, '\n'), 0o644)
}

// baseDir is the directory of the user's labs.
func baseDir() string {
	uid := os.Geteuid()
	if uid == 0 {
		return "/run/tbcluster-lab"
	}
	if run := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(run) && ownDir(run, uid) == nil {
		base := filepath.Join(run, "tbcluster-lab")
		longest := filepath.Join(base, "123456789012345678901234", "epsilon", "run", agentSocket)
		if len(longest) <= maxSocketPath {
			return base
		}
	}
	return "/tmp/tbcluster-lab-" + strconv.Itoa(uid)
}

// makeBase makes the directory of the user's labs. In /tmp anybody may have
// made it before: it must be the user's own.
func makeBase(base string) error {
	mode := os.FileMode(0o755) // the agents' sockets are for every user
	if os.Geteuid() != 0 {
		mode = 0o700
	}
	err := os.MkdirAll(base, mode)
	if err == nil {
		err = ownDir(base, os.Geteuid())
	}
	if err != nil {
		return failed("make the directory of the labs", err, "make it possible, or set XDG_RUNTIME_DIR to a directory of yours").At(base)
	}
	return nil
}

func ownDir(path string, uid int) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return errors.New("it is no directory")
	}
	if int(st.Uid) != uid {
		return fmt.Errorf("it belongs to user %d", st.Uid)
	}
	if st.Mode&0o022 != 0 {
		return errors.New("others may write to it")
	}
	return nil
}

// lockName makes sure that one process at a time makes or removes the lab.
func lockName(ctx context.Context, base, name string) (unlock func(), err error) {
	path := filepath.Join(base, name+".lock")
	fix := "wait for the other `tbcluster lab` command to end"
	for {
		if err := makeBase(base); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the last lab went, and the directory with it
		}
		if err != nil {
			return nil, failed("lock the lab "+name, err, fix).At(path)
		}
		for {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			if err == nil || !errors.Is(err, unix.EWOULDBLOCK) {
				break
			}
			select {
			case <-ctx.Done():
				f.Close()
				return nil, fault.New(fault.Interrupted, "wait for the lock of the lab "+name, ctx.Err(), fix).At(path)
			case <-time.After(20 * time.Millisecond):
			}
		}
		if err != nil {
			f.Close()
			return nil, failed("lock the lab "+name, err, fix).At(path)
		}
		// Who had it before may have removed the file.
		mine, err1 := f.Stat()
		there, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			return func() {
				os.Remove(path)
				f.Close()
				os.Remove(base) // if it was the last lab
			}, nil
		}
		f.Close()
	}
}

// List returns the names of the user's labs, also of dead ones.
func List() ([]string, error) {
	base := baseDir()
	entries, err := os.ReadDir(base)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, failed("list the labs", err, "check the rights of the directory").At(base)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && nameRE.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}
