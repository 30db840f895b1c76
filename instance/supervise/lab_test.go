package supervise_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/engine/llamacpp"
	"tbcluster/host"
	"tbcluster/instance/catalogue"
	"tbcluster/instance/plan"
	"tbcluster/instance/rank"
	"tbcluster/instance/spec"
	"tbcluster/instance/supervise"
)

// The test binary is the shim of ranks too.
func TestMain(m *testing.M) {
	if dir := os.Getenv("TBCLUSTER_TEST_SHIM"); dir != "" {
		os.Exit(rank.Main(dir))
	}
	os.Exit(m.Run())
}

// detector remembers builds, as a node's cache does.
var detector = sync.OnceValue(func() *llamacpp.Adapter {
	home, err := os.UserHomeDir()
	if err != nil {
		return llamacpp.New(llamacpp.Options{})
	}
	return llamacpp.New(llamacpp.Options{Dirs: []string{llamacpp.UserDir(home)}})
})

var fetch = sync.OnceValues(func() (string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return "", err
	}
	if _, err := llamacpp.Install(context.Background(), llamacpp.UserDir(home), nil); err != nil {
		return "", err
	}
	return llamacpp.InstallModel(context.Background(), llamacpp.ModelDir(home), nil)
})

func realModel(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("runs the real engine")
	}
	path, err := fetch()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// world is some nodes on one machine: each has its own LocalRanks and Manager,
// directories of its own, and 127.0.0.N for its end of every cable.
type world struct {
	t     *testing.T
	nodes map[string]*node
	ports supervise.PortRange // its own: worlds share the loopback
}

var worlds atomic.Uint32

type node struct {
	w      *world
	id     string
	number byte
	dir    string
	home   string
	env    []string
	memory uint64
	engine func(spec.Engine) spec.Engine // changes what is detected
	times  supervise.Times

	mu      sync.Mutex
	local   *supervise.LocalRanks
	manager *supervise.Manager
	states  map[string][]supervise.State // seen by instance
	changed chan struct{}
	copier  supervise.Copier
	spawner supervise.Spawner // nil for the node itself
	act     supervise.Activity
}

func newWorld(t *testing.T, ids ...string) *world {
	t.Helper()
	first := uint16(21000 + 40*(worlds.Add(1)%200))
	w := &world{t: t, nodes: map[string]*node{}, ports: supervise.PortRange{First: first, Last: first + 39}}
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	for k, id := range ids {
		n := &node{w: w, id: id, number: byte(k + 1), dir: t.TempDir(), home: home, memory: 16 << 30, states: map[string][]supervise.State{}, changed: make(chan struct{}, 1)}
		w.nodes[id] = n
	}
	for _, n := range w.nodes {
		n.start()
	}
	t.Cleanup(func() {
		for _, n := range w.nodes {
			n.stopAgent()
			n.cleanUp()
		}
	})
	return w
}

// start starts the node's agent: a LocalRanks and a Manager on its directories.
func (n *node) start() {
	n.w.t.Helper()
	adapters := []spec.Adapter{llamacpp.New(llamacpp.Options{Dirs: []string{llamacpp.UserDir(n.home)}})}
	spawner := n.spawner
	if spawner == nil {
		spawner = n
	}
	local, err := supervise.NewLocalRanks(supervise.LocalConfig{NodeID: n.id, Dir: n.dir, Adapters: adapters, Spawner: spawner, Files: n, Machine: n, Nodes: n.w.seenFrom(n.id), Ports: n.w.ports, Times: n.times})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.mu.Lock()
	n.local = local
	n.mu.Unlock()
	m, err := supervise.NewManager(supervise.Config{NodeID: n.id, Dir: n.dir, Adapters: adapters, Local: local, Nodes: n.w.seenFrom(n.id), Copier: n.copier, Activity: n.act, Times: n.times, Change: n.note})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.mu.Lock()
	n.manager = m
	n.mu.Unlock()
}

// stopAgent is what a killed agent leaves: ranks that run, and the records.
func (n *node) stopAgent() {
	n.mu.Lock()
	local, m := n.local, n.manager
	n.local, n.manager = nil, nil
	n.mu.Unlock()
	if m != nil {
		m.Close()
		local.Close()
	}
}

func (n *node) note(i supervise.Instance) {
	n.mu.Lock()
	s := n.states[i.ID]
	if len(s) == 0 || s[len(s)-1] != i.State {
		n.states[i.ID] = append(s, i.State)
	}
	n.mu.Unlock()
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// cleanUp ends whatever a test left.
func (n *node) cleanUp() {
	dirs, err := filepath.Glob(filepath.Join(n.dir, "instances/*/rank-*"))
	if err != nil {
		n.w.t.Error(err)
	}
	for _, d := range dirs {
		if err := rank.End(d, true); err != nil {
			n.w.t.Errorf("end %s: %v", d, err)
		}
	}
	for _, d := range dirs {
		s, err := rank.Observe(d)
		if err != nil {
			continue // removed
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		if err := s.Shim.Wait(ctx); err != nil {
			n.w.t.Errorf("%s does not end: %v", d, err)
		}
		cancel()
	}
}

// The Spawner: the test's own process starts the shims.

func (n *node) RankDir(id string, index int) string {
	return filepath.Join(n.dir, "instances", id, fmt.Sprintf("rank-%d", index))
}

func (n *node) StartRank(_ context.Context, _ host.Asker, id string, index int, p rank.Process) error {
	dir := n.RankDir(id, index)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	if err := rank.WriteProcess(dir, p); err != nil {
		return err
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), "TBCLUSTER_TEST_SHIM="+dir), n.env...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // no zombies: it is no child of a real agent
	return nil
}

func (n *node) EndRank(_ context.Context, id string, index int, kill bool) error {
	return rank.End(n.RankDir(id, index), kill)
}

func (n *node) RemoveRank(_ context.Context, id string, index int) error {
	return os.RemoveAll(n.RankDir(id, index))
}

// The Files: the catalogue itself.

func (n *node) CheckFiles(ctx context.Context, _ host.Asker, path string, files []spec.File) error {
	inspect := func(_ context.Context, path string) (spec.Model, error) { return plan.Inspect(path) }
	return catalogue.CheckFiles(ctx, filepath.Join(n.dir, "digests.json"), inspect, path, files)
}

func (n *node) DetectEngine(ctx context.Context, _ host.Asker, _ string) (spec.Engine, error) {
	e := detector().Detect(ctx, n.home)
	if n.engine != nil {
		e = n.engine(e)
	}
	return e, nil
}

// The Machine.

func (n *node) Memory(context.Context) (uint64, uint64, error) { return n.memory, n.memory, nil }

func linkID(a, b string) string {
	ends := []string{a, b}
	slices.Sort(ends)
	return strings.Join(ends, "-")
}

func (n *node) AddressTo(_ context.Context, peer string) (netip.Addr, string, error) {
	return netip.AddrFrom4([4]byte{127, 0, 0, n.number}), linkID(n.id, peer), nil
}

func (n *node) CloseToLAN(context.Context, netip.Addr, bool) error { return nil }

// seen is the cluster as one node sees it: others are reached by JSON.
type seen struct {
	w  *world
	me string
}

func (w *world) seenFrom(id string) supervise.Nodes { return seen{w, id} }

func (s seen) Name(id string) string { return "node " + id }

func (s seen) local(id string) *supervise.LocalRanks {
	n := s.w.nodes[id]
	if n == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.local
}

func (s seen) RankService(id string, who host.Asker) supervise.RankService {
	if id == s.me {
		return s.local(id).Ranks(who)
	}
	who.Node = s.me
	who.Socket = nil
	down := func() error { return fault.Newf(fault.NodeDown, "start it", "node %s is down", id) }
	return &supervise.RemoteRanks{
		Node: s.Name(id),
		Call: func(ctx context.Context, kind string, body []byte) ([]byte, error) {
			l := s.local(id)
			if l == nil {
				return nil, down()
			}
			return l.Dispatch(ctx, who, kind, body)
		},
		Stream: func(ctx context.Context, instance string, emit func([]byte) error) error {
			l := s.local(id)
			if l == nil {
				return down()
			}
			return l.ServeEvents(ctx, who, instance, emit)
		},
	}
}

// until waits for an instance to fit, woken by its changes.
func (n *node) until(id string, limit time.Duration, what string, fits func(supervise.Instance) bool) supervise.Instance {
	n.w.t.Helper()
	end := time.After(limit)
	var last supervise.Instance
	for {
		if m := n.agent(); m != nil {
			if i, err := m.Get(id); err == nil {
				if last = i; fits(i) {
					return i
				}
			}
		}
		select {
		case <-n.changed:
		case <-time.After(100 * time.Millisecond):
		case <-end:
			stack := make([]byte, 1<<20)
			n.w.t.Fatalf("waited %s in vain for: %s\nlast %+v\n%s", limit, what, last, stack[:runtime.Stack(stack, true)])
		}
	}
}

func (n *node) agent() *supervise.Manager {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.manager
}

func (n *node) untilState(id string, s supervise.State) supervise.Instance {
	n.w.t.Helper()
	return n.until(id, 60*time.Second, string(s), func(i supervise.Instance) bool {
		if i.State == supervise.Failed && s != supervise.Failed {
			n.w.t.Fatalf("it failed: %v", i.Fault())
		}
		return i.State == s
	})
}

// request places the model on nodes, layers spread evenly.
func request(t *testing.T, path string, nodes ...string) supervise.PlaceRequest {
	t.Helper()
	m, err := plan.Inspect(path)
	if err != nil {
		t.Fatal(err)
	}
	return requestFor(m, path, nodes...)
}

func requestFor(m spec.Model, path string, nodes ...string) supervise.PlaceRequest {
	r := supervise.PlaceRequest{Engine: "llamacpp", Model: m, Context: 512, EngineArgs: []string{"-t", "1", "--poll", "0"}}
	for k, id := range nodes {
		p := supervise.PlacedRank{NodeID: id, Layers: m.Layers / len(nodes), NeedBytes: 3 << 30, HeadroomBytes: 2 << 30}
		if k == 0 {
			p.ModelPath = path
			p.Layers += m.Layers % len(nodes)
		}
		r.Ranks = append(r.Ranks, p)
	}
	return r
}

func (n *node) place(r supervise.PlaceRequest) (supervise.Instance, error) {
	return n.agent().Place(context.Background(), host.Asker{UID: uint32(os.Getuid()), Name: "ada"}, r)
}

func (n *node) mustPlace(r supervise.PlaceRequest) supervise.Instance {
	n.w.t.Helper()
	i, err := n.place(r)
	if err != nil {
		n.w.t.Fatal(err)
	}
	return i
}

// status reads what the shim of a rank wrote.
func (n *node) status(id string, index int) rank.Status {
	n.w.t.Helper()
	s, err := rank.Observe(n.RankDir(id, index))
	if err != nil {
		n.w.t.Fatal(err)
	}
	return s
}

// nothingRuns checks that no rank of the instance is left on any node.
func (w *world) nothingRuns(id string) {
	w.t.Helper()
	for _, n := range w.nodes {
		dirs, err := filepath.Glob(filepath.Join(n.dir, "instances", id, "rank-*"))
		if err != nil {
			w.t.Fatal(err)
		}
		for _, d := range dirs {
			s, err := rank.Observe(d)
			if err != nil {
				w.t.Fatal(err)
			}
			if s.Phase != rank.Ended || s.Shim.Alive() || s.Engine.Alive() {
				w.t.Errorf("%s: %s, shim alive %v, engine alive %v", d, s.Phase, s.Shim.Alive(), s.Engine.Alive())
			}
		}
	}
}
