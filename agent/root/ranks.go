package root

import (
	"context"
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
	"time"

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
	engines engines
	place   func(ctx context.Context, name, description string, pid int) error
	warn    func(msg string, args ...any)

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

func openRanks(opt Options, bootID string, strict bool) (*ranks, error) {
	r := &ranks{program: opt.Program, path: filepath.Join(opt.StateDir, "root", "ranks.json"),
		dir: filepath.Join(opt.StateDir, "instances"), gid: opt.AgentGID, bootID: bootID,
		engines: engines{opt.Engines, opt.EngineEnv, strict},
		place:   opt.Place, warn: opt.Log.Warn}
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

// engines are the programs that a rank may be.
type engines struct {
	names, env []string
	// strict is set where this process can become somebody else: the agent asks
	// then for what it could not do itself.
	strict bool
}

// check refuses programs that are no engine or that somebody else than root or
// the user could have put there, and environments that make one run other code.
// It returns what to run: the process with the real path of its program, which
// no link leads elsewhere any more.
func (e engines) check(raw json.RawMessage, u User) (json.RawMessage, error) {
	var p process
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, fault.New(fault.Protocol, "read what to run", err, "")
	}
	refuse := func(format string, args ...any) (json.RawMessage, error) {
		return nil, fault.Newf(fault.Denied, "install the engine as root (/opt/tbcluster/engines) or as the user who uses it (tbcluster engine install), and take the right to write there from everybody else (chmod -R go-w)",
			"refused to run "+p.Program+" for "+u.Name+": "+format, args...).With("path", p.Program)
	}
	if !filepath.IsAbs(p.Program) {
		return refuse("the path is not absolute")
	}
	for k := range p.Env {
		if e.strict && !slices.Contains(e.env, k) || strings.HasPrefix(k, "LD_") || strings.HasPrefix(k, "DYLD_") {
			return refuse("%s is in its environment", k)
		}
	}
	if !e.strict {
		return raw, runnable(p.Program, u, refuse)
	}
	real, err := proc.TrustedProgram(p.Program, u.UID, u.GID)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.EngineMissing, "run "+p.Program, err, "`tbcluster engine list` says which engines are there")
	}
	if err != nil {
		return refuse("%v", err)
	}
	if !slices.Contains(e.names, filepath.Base(real)) {
		return refuse("%s is no engine; those are %s", filepath.Base(real), strings.Join(e.names, ", "))
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, fault.New(fault.Protocol, "read what to run", err, "")
	}
	for k := range all {
		// Names are matched whatever their case: one that is written otherwise
		// would be another one here and the same one there.
		if strings.EqualFold(k, "program") || strings.EqualFold(k, "env") {
			delete(all, k)
		}
	}
	if all["program"], err = json.Marshal(real); err != nil {
		return nil, err
	}
	if all["env"], err = json.Marshal(p.Env); err != nil {
		return nil, err
	}
	out, err := json.Marshal(all)
	return out, err
}

// runnable is the check where whoever asks is this process's own user: it keeps
// mistakes out, nobody's rights.
func runnable(program string, u User, refuse func(string, ...any) (json.RawMessage, error)) error {
	info, err := os.Stat(program)
	if err != nil {
		return fault.New(fault.EngineMissing, "run "+program, err, "`tbcluster engine list` says which engines are there")
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok || !info.Mode().IsRegular():
		_, err = refuse("it is no file")
	case st.Uid != 0 && st.Uid != u.UID && st.Uid != uint32(os.Geteuid()):
		_, err = refuse("it belongs to uid %d", st.Uid)
	case info.Mode().Perm()&0o002 != 0:
		_, err = refuse("everybody can write it")
	}
	return err
}

// start makes the rank's directory, writes rank.json into it and starts its
// shim as the user, in a session of its own so that it outlives us.
func (r *ranks) start(ctx context.Context, instance string, index int, raw json.RawMessage, u User) (_ int, dir string, err error) {
	if !instanceID.MatchString(instance) || index < 0 || index >= maxRanks {
		return 0, "", fault.Newf(fault.Protocol, "", "%q rank %d is no rank", instance, index)
	}
	if raw, err = r.engines.check(raw, u); err != nil {
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
	pid, gate, err := startRank(r.program, dir, u)
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
		return 0, "", errors.Join(fault.New(fault.FileIO, "write the record of ranks", err, "free some space").At(r.path), syscall.Kill(pid, syscall.SIGKILL), gate.Close())
	}
	r.putAside(ctx, instance, index, pid)
	if err := gate.Close(); err != nil {
		return 0, "", fault.New(fault.Internal, fmt.Sprintf("let rank %d of %s begin", index, instance), err, "")
	}
	return pid, dir, nil
}

// putAsideFor bounds how long a rank waits to be put into a unit of its own.
const putAsideFor = 5 * time.Second

// putAside puts a rank into a unit of its own. One that stays in ours works all
// the same, and outlives us as well: our unit ends nobody but its first process.
func (r *ranks) putAside(ctx context.Context, instance string, index, pid int) {
	if r.place == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, putAsideFor)
	defer cancel()
	// Of a name that ended a moment ago the manager may still know something.
	name := fmt.Sprintf("tbcluster-rank-%s-%d-%d", instance, index, pid)
	if err := r.place(ctx, name, fmt.Sprintf("tbcluster: rank %d of instance %s", index, instance), pid); err != nil {
		r.warn("put a rank into a unit of its own", "instance", instance, "rank", index, "error", err)
	}
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
