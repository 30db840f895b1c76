package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/renameio/v2"
	"google.golang.org/protobuf/proto"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/doctor"
	"tbcluster/host"
	"tbcluster/host/frame"
	"tbcluster/host/schema"
	"tbcluster/host/sock"
	"tbcluster/instance/catalogue"
	"tbcluster/instance/spec"
)

// models is what this node has: models, engines, disk, and what is wrong with
// it. Files are looked at by a worker with the identity of the person who
// paired, or before that of the agent itself.
type models struct {
	a    *Agent
	path string // of what `models add` named

	mu       sync.Mutex
	added    []string
	found    []catalogue.Found
	engine   []*v1.Engine
	user     *peerv1.User // who paired here
	homeDir  string
	free     uint64
	finding  []*v1.Finding
	problems []string

	wake  chan struct{} // asks for a scan
	fresh chan struct{} // there was one
}

// askUser asks the root half who paired here.
func (m *models) askUser(ctx context.Context) {
	u, _, err := m.a.root.Who(ctx, host.Asker{Node: m.a.id()}, true)
	if err != nil {
		if !fault.Is(err, fault.UserUnmapped) {
			m.a.log.Warn("ask who paired here", "error", err)
		}
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.user, m.homeDir = &peerv1.User{Uid: u.UID, Name: u.Name}, u.Home
}

type modelsFile struct {
	Schema int      `json:"schema"`
	Added  []string `json:"added"`
}

const modelsSchema = 1

// scanEvery is how often a node among n others looks for models unasked: a
// download by another program tells nobody.
func scanEvery(n int) time.Duration {
	return max(time.Minute, 5*time.Duration(n)*time.Second)
}

func (a *Agent) openModels(ctx context.Context) (*models, error) {
	m := &models{a: a, path: a.opt.Paths.Own("models.json"), wake: make(chan struct{}, 1), fresh: make(chan struct{}, 1)}
	// Known before the first scan: other nodes serve nobody of a node that does
	// not say who paired there.
	m.askUser(ctx)
	var err error
	m.added, err = readAdded(m.path)
	return m, err
}

// readAdded reads the list of models that were added by hand.
func readAdded(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.New(fault.FileIO, "read the list of added models", err, "make it readable for the agent").At(path)
	}
	if err := schema.Check(data, modelsSchema, path); err != nil {
		return nil, err
	}
	var f modelsFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fault.New(fault.FileIO, "read the list of added models", err, "remove the file and add them again").At(path)
	}
	return f.Added, nil
}

// rescan has the loop look again soon.
func (m *models) rescan() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// scanLoop keeps models and engines true.
func (a *Agent) scanLoop(ctx context.Context) {
	for {
		if err := a.models.scan(ctx); err != nil && ctx.Err() == nil {
			a.log.Warn("look for models", "error", err)
		}
		t := time.NewTimer(scanEvery(int(a.others.Load())))
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-a.models.wake:
		}
		t.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// options are where the worker looks.
func (m *models) options() catalogue.Options {
	m.mu.Lock()
	defer m.mu.Unlock()
	return catalogue.Options{Dirs: append(slices.Clone(m.a.opt.Config.ModelDirs), m.added...)}
}

// worker starts a worker that looks at files as the person who paired, or as
// the agent's own user where nobody has.
func (m *models) worker(ctx context.Context) (*catalogue.Client, root.User, error) {
	a := m.a
	who := host.Asker{Node: a.id()}
	conn, user, err := a.root.Worker(ctx, who, true)
	if err != nil {
		// Nobody has paired, or it was root and nothing runs as root here.
		if !fault.Is(err, fault.UserUnmapped) && !fault.Is(err, fault.Denied) {
			return nil, user, err
		}
		c, err := a.ownWorker()
		return c, root.User{}, err
	}
	c, err := a.catalogueClient(conn)
	return c, user, err
}

func (a *Agent) catalogueClient(c io.ReadWriteCloser) (*catalogue.Client, error) {
	if err := frame.New(c).Send(WorkerHello{WorkCatalogue, a.opt.Config.EngineDirs}); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return catalogue.NewClient(c), nil
}

// ownWorker starts a worker as this process's own user.
func (a *Agent) ownWorker() (*catalogue.Client, error) {
	ours, theirs, err := sock.Pair()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(a.opt.Program, "worker")
	cmd.Args[0] = "tbcluster"
	cmd.Env = []string{"HOME=" + a.opt.Paths.Own(), "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	if cerr := theirs.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	go func() { _ = cmd.Wait() }() // its end is seen on the stream
	return a.catalogueClient(ours)
}

// scan looks for models and engines now.
func (m *models) scan(ctx context.Context) error {
	c, user, err := m.worker(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // ends the worker, whose work is done
	opt := m.options()
	engines, err := c.Engines(ctx, opt, "")
	if err != nil {
		return err
	}
	res, err := c.Scan(ctx, opt)
	if err != nil {
		return err
	}
	m.set(user, engines, res)
	return nil
}

// digestLoop computes the digests that are not known yet, one file after the
// other: large models take a while, and nobody waits for them meanwhile.
func (a *Agent) digestLoop(ctx context.Context) {
	failed := map[string]bool{} // until the next start
	for {
		if path := a.models.undigested(failed); path != "" {
			if err := a.models.digest(ctx, path); err != nil {
				if ctx.Err() != nil {
					return
				}
				failed[path] = true
				a.log.Info("compute a digest", "file", path, "error", err)
			}
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-a.models.fresh:
		}
	}
}

// undigested returns a file of a model whose digest is not known, or "".
func (m *models) undigested(failed map[string]bool) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range m.found {
		if !f.Copy.Complete {
			continue
		}
		for _, file := range f.Model.Files {
			p := filepath.Join(modelDir(f.Copy.Path, f.Model.Files), file.Name)
			if file.SHA256 == "" && !failed[p] {
				return p
			}
		}
	}
	return ""
}

// digest computes one digest and puts it where it belongs.
func (m *models) digest(ctx context.Context, path string) error {
	c, _, err := m.worker(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // ends the worker, whose work is done
	sum, err := c.Digest(ctx, m.options(), path)
	if err != nil {
		return err
	}
	m.mu.Lock()
	for i := range m.found {
		f := &m.found[i]
		files := slices.Clone(f.Model.Files)
		for k := range files {
			if filepath.Join(modelDir(f.Copy.Path, files), files[k].Name) == path {
				files[k].SHA256 = sum
				f.Model.Files, f.Model.ID = files, catalogue.ID(files)
			}
		}
	}
	m.mu.Unlock()
	m.a.poke()
	return nil
}

// modelDir is the directory that a model's file names are relative to.
func modelDir(path string, files []spec.File) string {
	if slices.ContainsFunc(files, func(f spec.File) bool { return f.Name == filepath.Base(path) }) {
		return filepath.Dir(path)
	}
	return path
}

func (m *models) set(user root.User, engines []spec.Engine, res catalogue.Result) {
	m.mu.Lock()
	m.found, m.problems = res.Models, res.Problems
	m.user, m.homeDir = nil, user.Home
	if user.Name != "" {
		m.user = &peerv1.User{Uid: user.UID, Name: user.Name}
	}
	m.engine = nil
	for _, e := range engines {
		m.engine = append(m.engine, &v1.Engine{Name: e.Name, Available: e.Available, Version: e.Version, Path: e.Path, Reason: e.Reason})
	}
	dir := m.homeDir
	if dir == "" {
		dir = m.a.opt.Paths.State
	}
	var st syscall.Statfs_t
	if syscall.Statfs(dir, &st) == nil {
		m.free = st.Bavail * uint64(st.Bsize)
	}
	m.mu.Unlock()
	select {
	case m.fresh <- struct{}{}:
	default:
	}
	m.a.poke()
}

func (m *models) engines() []*v1.Engine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.engine
}

func (m *models) diskFree() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.free
}

func (m *models) home() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.homeDir
}

func (m *models) pairedUser() *peerv1.User {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.user
}

func (m *models) findings() []*v1.Finding {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.finding
}

// setFindings reports whether the findings are others than before. What was
// found before keeps the time at which it was.
func (m *models) setFindings(now []*v1.Finding) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.finding
	doctor.Carry(was, now)
	m.finding = now
	return !slices.EqualFunc(was, m.finding, func(a, b *v1.Finding) bool { return proto.Equal(a, b) })
}

// own returns this node's models as others see them.
func (m *models) own() []*v1.Model {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*v1.Model
	for _, f := range m.found {
		v := modelView(f)
		v.Copies[0].NodeId, v.Copies[0].NodeName = m.a.id(), m.a.name()
		out = append(out, v)
	}
	return out
}

// shown waits until the cluster's state lists exactly these models on a node;
// want is asked anew at each state.
func (m *models) shown(ctx context.Context, node string, want func() []*v1.Model) error {
	for {
		s, changed := m.a.board.get()
		if lists(s, node, want()) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// lists reports whether the copies of a node in a state are those of want. Of
// IDs it knows nothing: those change when digests become known.
func lists(s *v1.ClusterState, node string, want []*v1.Model) bool {
	copies := func(models []*v1.Model) map[string]bool { // by path, whether they are complete
		out := map[string]bool{}
		for _, m := range models {
			for _, c := range m.Copies {
				if c.NodeId == node {
					out[c.Path] = c.Complete
				}
			}
		}
		return out
	}
	return maps.Equal(copies(s.Models), copies(want))
}

func modelView(f catalogue.Found) *v1.Model {
	return &v1.Model{Id: f.Model.ID, Name: f.Model.Name, Format: f.Model.Format, Quant: f.Model.Quant, SizeBytes: f.Model.SizeBytes,
		Architecture: f.Model.Architecture, Layers: uint32(f.Model.Layers), ContextTokens: uint32(f.Model.Context),
		Copies: []*v1.ModelCopy{{Path: f.Copy.Path, Tree: f.Copy.Tree, Complete: f.Copy.Complete, Reason: f.Copy.Reason}}}
}

// local returns what is known of a model that lies on this node.
func (m *models) local(id string) (catalogue.Found, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range m.found {
		if f.Model.ID == id {
			return f, true
		}
	}
	return catalogue.Found{}, false
}

// provisional reports whether an ID is one of sizes alone.
func provisional(id string) bool { return strings.HasPrefix(id, "size:") }

// findModel returns the model that a person means.
func (a *Agent) findModel(name string) (*v1.Model, error) {
	s, _ := a.board.get()
	var list []catalogue.Model
	for _, m := range s.Models {
		c := catalogue.Model{Model: spec.Model{ID: m.Id, Name: m.Name, Quant: m.Quant, SizeBytes: m.SizeBytes}}
		for _, at := range m.Copies {
			c.Copies = append(c.Copies, spec.Copy{NodeID: at.NodeId, Path: at.Path})
		}
		list = append(list, c)
	}
	got, err := catalogue.Resolve(name, list)
	if err != nil {
		return nil, err
	}
	for _, m := range s.Models {
		if m.Id == got.ID {
			return m, nil
		}
	}
	return nil, fault.Newf(fault.ModelUnknown, "try again", "model %s has just gone", name)
}

// modelServer manages what models the nodes know.
type modelServer struct {
	v1.UnimplementedModelServiceServer
	a *Agent
}

// asCaller starts a worker as the person who makes the call.
func (a *Agent) asCaller(ctx context.Context) (*catalogue.Client, error) {
	c := callerOf(ctx)
	who, release, err := c.hold()
	if err != nil {
		return nil, err
	}
	defer release()
	conn, _, err := a.root.Worker(ctx, who, c.paired)
	if err != nil {
		return nil, a.unmapped(err, who)
	}
	return a.catalogueClient(conn)
}

// Add makes a path known as a model.
func (s *modelServer) Add(ctx context.Context, q *v1.AddRequest) (*v1.AddResponse, error) {
	if !filepath.IsAbs(q.Path) {
		return nil, fault.Newf(fault.Usage, "write an absolute path", "%q is not absolute", q.Path).With("field", "path")
	}
	path := filepath.Clean(q.Path)
	c, err := s.a.asCaller(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }() // ends the worker, whose work is done
	f, err := c.Inspect(ctx, catalogue.Options{}, path)
	if err != nil {
		return nil, err
	}
	if err := s.a.models.change(func(added []string) []string {
		if slices.Contains(added, path) {
			return added
		}
		return append(added, path)
	}); err != nil {
		return nil, err
	}
	v := modelView(f)
	v.Copies[0].NodeId, v.Copies[0].NodeName = s.a.id(), s.a.name()
	return &v1.AddResponse{Model: v}, nil
}

// change edits the list of added paths and looks again.
func (m *models) change(f func([]string) []string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := f(slices.Clone(m.added))
	data, err := json.MarshalIndent(modelsFile{modelsSchema, next}, "", "  ")
	if err == nil {
		err = renameio.WriteFile(m.path, data, 0o600)
	}
	if err != nil {
		return fault.New(fault.FileIO, "write the list of added models", err, "free some space").At(m.path)
	}
	m.added = next
	m.rescan()
	return nil
}

// Remove deletes a model's files from one node.
func (s *modelServer) Remove(ctx context.Context, q *v1.RemoveRequest) (*v1.RemoveResponse, error) {
	node := s.a.id()
	if q.Node != "" {
		n, err := s.a.upNode(q.Node)
		if err != nil {
			return nil, err
		}
		node = n.Id
	}
	if node == s.a.id() {
		return s.removeHere(ctx, q)
	}
	r := &v1.RemoveResponse{}
	return r, s.a.ask(ctx, node, "/tbcluster.v1.ModelService/Remove", q, r)
}

func (s *modelServer) removeHere(ctx context.Context, q *v1.RemoveRequest) (*v1.RemoveResponse, error) {
	m, err := s.a.findModel(q.Model)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(m.Copies, func(c *v1.ModelCopy) bool { return c.NodeId == s.a.id() })
	if i < 0 {
		return nil, fault.Newf(fault.ModelUnknown, "`tbcluster models` says where it is", "%s is not on %s", m.Name, s.a.name()).With("model", m.Name)
	}
	st, _ := s.a.board.get()
	for _, in := range st.Instances {
		if in.ModelId == m.Id && !over(in.State) && slices.ContainsFunc(in.Ranks, func(r *v1.Rank) bool { return r.NodeId == s.a.id() }) {
			return nil, fault.Newf(fault.ModelInUse, "stop it first: tbcluster stop "+in.Name, "instance %s uses %s on %s", in.Name, m.Name, s.a.name())
		}
	}
	c, err := s.a.asCaller(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }() // ends the worker, whose work is done
	path := m.Copies[i].Path
	gone, err := c.Remove(ctx, path, q.ValidateOnly)
	if err != nil {
		return nil, err
	}
	if !q.ValidateOnly {
		if err := s.a.models.change(func(added []string) []string {
			return slices.DeleteFunc(added, func(p string) bool { return p == path })
		}); err != nil {
			return nil, err
		}
		if err := s.a.models.scan(ctx); err != nil {
			return nil, err
		}
		s.a.settled(ctx)
	}
	return &v1.RemoveResponse{Paths: gone.Paths, FreedBytes: gone.Bytes}, nil
}

// Scan looks for models of this node now. Whoever has the answer may go by it:
// the cluster's state holds it, too.
func (s *modelServer) Scan(ctx context.Context, _ *v1.ScanRequest) (*v1.ScanResponse, error) {
	if err := s.a.models.scan(ctx); err != nil {
		return nil, err
	}
	s.a.settled(ctx)
	return &v1.ScanResponse{Models: s.a.models.own()}, nil
}

// over reports whether nothing of an instance runs any more.
func over(s v1.InstanceState) bool {
	return s == v1.InstanceState_INSTANCE_STATE_STOPPED || s == v1.InstanceState_INSTANCE_STATE_FAILED
}
