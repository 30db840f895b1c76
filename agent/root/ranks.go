package root

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
	"tbcluster/host/proc"
	"tbcluster/host/schema"
	"tbcluster/instance/rank"
)

// ranks starts ranks and remembers them, so that they can be ended after any
// restart. What it believes of a rank's process is its own record, never what
// the rank's user wrote.
type ranks struct {
	program string
	path    string // ranks.json
	dir     string // instances/
	gid     int
	bootID  string

	mu   sync.Mutex
	list []rankRecord
}

type rankRecord struct {
	Instance string  `json:"instance"`
	Index    int     `json:"index"`
	UID      uint32  `json:"uid"`
	User     string  `json:"user"`
	Process  proc.ID `json:"process"`
}

type ranksFile struct {
	Schema int          `json:"schema"`
	Ranks  []rankRecord `json:"ranks"`
}

const ranksSchema = 1

func openRanks(opt Options, bootID string) (*ranks, error) {
	r := &ranks{program: opt.Program, path: filepath.Join(opt.StateDir, "root", "ranks.json"),
		dir: filepath.Join(opt.StateDir, "instances"), gid: opt.AgentGID, bootID: bootID}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return nil, fault.New(fault.FileIO, "make the directory of instances", err, "make it writable").At(r.dir)
	}
	data, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, fault.New(fault.FileIO, "read the record of ranks", err, "make it readable for root").At(r.path)
	}
	if err := schema.Check(data, ranksSchema, r.path); err != nil {
		return nil, err
	}
	var f ranksFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fault.New(fault.FileIO, "read the record of ranks", err, "end what still runs by hand, then remove the file").At(r.path)
	}
	r.list = f.Ranks
	return r, nil
}

func (r *ranks) save() error {
	data, err := json.MarshalIndent(ranksFile{ranksSchema, r.list}, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(r.path, append(data, '\n'), 0o600)
}

func (r *ranks) find(instance string, index int) int {
	return slices.IndexFunc(r.list, func(have rankRecord) bool { return have.Instance == instance && have.Index == index })
}

// userOf returns the user for whom ranks of an instance were started.
func (r *ranks) userOf(instance string) (uint32, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, have := range r.list {
		if have.Instance == instance {
			return have.UID, true
		}
	}
	return 0, false
}

var instanceID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// maxRanks is far above what a cluster of 64 nodes has.
const maxRanks = 1024

// process is what the root half must know of rank.json; package instance/rank
// knows the rest.
type process struct {
	Program string            `json:"program"`
	Env     map[string]string `json:"env"`
}

// checkProcess refuses programs that somebody else than root or the user could
// have put there, and environments that make the loader run other code.
func checkProcess(raw json.RawMessage, u User) error {
	var p process
	if err := json.Unmarshal(raw, &p); err != nil {
		return fault.New(fault.Protocol, "read what to run", err, "")
	}
	refuse := func(format string, args ...any) error {
		return fault.Newf(fault.Denied, "install the engine as root or as the user who uses it", format, args...).With("path", p.Program)
	}
	if !filepath.IsAbs(p.Program) {
		return refuse("refused to run %q: the path is not absolute", p.Program)
	}
	info, err := os.Stat(p.Program)
	if err != nil {
		return fault.New(fault.EngineMissing, "run "+p.Program, err, "`tbcluster engine list` says which engines are there")
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() {
		return refuse("refused to run %s: it is no file", p.Program)
	}
	if st.Uid != 0 && st.Uid != u.UID && st.Uid != uint32(os.Geteuid()) {
		return refuse("refused to run %s for %s: it belongs to uid %d", p.Program, u.Name, st.Uid)
	}
	if info.Mode().Perm()&0o002 != 0 {
		return refuse("refused to run %s for %s: everybody can write it", p.Program, u.Name)
	}
	for k := range p.Env {
		if strings.HasPrefix(k, "LD_") && k != "LD_LIBRARY_PATH" || strings.HasPrefix(k, "DYLD_INSERT") {
			return refuse("refused to run %s with %s in its environment", p.Program, k)
		}
	}
	return nil
}

// start makes the rank's directory, writes rank.json into it and starts its
// shim as the user, in a session of its own so that it outlives us.
func (r *ranks) start(instance string, index int, raw json.RawMessage, u User) (pid int, dir string, err error) {
	if !instanceID.MatchString(instance) || index < 0 || index >= maxRanks {
		return 0, "", fault.Newf(fault.Protocol, "", "%q rank %d is no rank", instance, index)
	}
	if err := checkProcess(raw, u); err != nil {
		return 0, "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := r.find(instance, index); i >= 0 && proc.Alive(r.list[i].Process) {
		return 0, "", fault.Newf(fault.StillRunning, "stop it first", "rank %d of %s still runs (pid %d)", index, instance, r.list[i].Process.PID)
	}
	dir = r.rankDir(instance, index)
	if err := r.makeDir(dir, raw, u); err != nil {
		return 0, "", fault.New(fault.FileIO, "make the directory of a rank", err, "free some space or make it writable").At(dir)
	}
	pid, err = startRank(r.program, dir, u)
	if err != nil {
		return 0, "", fault.New(fault.NoPermission, fmt.Sprintf("start rank %d of %s as %s", index, instance, u.Name), err, "")
	}
	id, err := proc.Of(pid)
	if err != nil {
		// It has ended already: the record of an ended process does no harm.
		id = proc.ID{PID: pid, BootID: r.bootID}
	}
	rec := rankRecord{instance, index, u.UID, u.Name, id}
	if i := r.find(instance, index); i >= 0 {
		r.list[i] = rec
	} else {
		r.list = append(r.list, rec)
	}
	if err := r.save(); err != nil {
		// Nothing may run that we could not find again.
		return 0, "", errors.Join(fault.New(fault.FileIO, "write the record of ranks", err, "free some space").At(r.path), syscall.Kill(pid, syscall.SIGKILL))
	}
	return pid, dir, nil
}

// makeDir writes everything while the directory is still ours and gives it to
// the user last, so that no link of his can lead a write of ours elsewhere.
func (r *ranks) makeDir(dir string, raw json.RawMessage, u User) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	path := filepath.Join(dir, "rank.json")
	if err := os.WriteFile(path, raw, 0o640); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return nil
	}
	if err := os.Chown(path, int(u.UID), r.gid); err != nil {
		return err
	}
	if err := os.Chown(dir, int(u.UID), r.gid); err != nil {
		return err
	}
	// The setgid bit makes what the shim writes readable for the agent.
	return os.Chmod(dir, 0o750|fs.ModeSetgid)
}

// end asks a rank to end, or kills it with everything that its engine started.
// It is signalled as its own record names it; what a shim that was killed left
// behind is found by rank.End, among processes of the rank's user alone.
func (r *ranks) end(instance string, index int, kill bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.find(instance, index)
	if i < 0 {
		return nil
	}
	if err := rank.End(r.rankDir(instance, index), kill); err != nil {
		return fault.New(fault.NoPermission, fmt.Sprintf("end rank %d of %s (pid %d)", index, instance, r.list[i].Process.PID), err, "")
	}
	if !proc.Alive(r.list[i].Process) {
		return nil
	}
	// A shim whose user keeps it from reading its own status is ended all the
	// same.
	sig := syscall.SIGTERM
	if kill {
		sig = syscall.SIGQUIT
	}
	if err := proc.Signal(r.list[i].Process, sig); err != nil && !errors.Is(err, proc.ErrGone) {
		return fault.New(fault.NoPermission, fmt.Sprintf("end rank %d of %s (pid %d)", index, instance, r.list[i].Process.PID), err, "")
	}
	return nil
}

// clean removes a rank's directory, and the instance's with the last one.
func (r *ranks) clean(instance string, index int) error {
	if !instanceID.MatchString(instance) || index < 0 || index >= maxRanks {
		return fault.Newf(fault.Protocol, "", "%q rank %d is no rank", instance, index)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.find(instance, index)
	if i >= 0 && proc.Alive(r.list[i].Process) {
		return fault.Newf(fault.StillRunning, "stop it first", "rank %d of %s still runs (pid %d)", index, instance, r.list[i].Process.PID)
	}
	dir := r.rankDir(instance, index)
	if err := os.RemoveAll(dir); err != nil {
		return fault.New(fault.FileIO, "remove what a rank left", err, "remove it by hand").At(dir)
	}
	// It stays while other ranks are in it.
	if err := os.Remove(filepath.Dir(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, syscall.EEXIST) {
		return fault.New(fault.FileIO, "remove what an instance left", err, "remove it by hand").At(filepath.Dir(dir))
	}
	if i >= 0 {
		r.list = slices.Delete(r.list, i, i+1)
	}
	return r.save()
}

func (r *ranks) rankDir(instance string, index int) string {
	return filepath.Join(r.dir, instance, "rank-"+strconv.Itoa(index))
}

func (r *ranks) all() []Rank {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]Rank, 0, len(r.list))
	for _, have := range r.list {
		out = append(out, Rank{have.Instance, have.Index, have.Process.PID, have.User, proc.Alive(have.Process)})
	}
	return out
}
