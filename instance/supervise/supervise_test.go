package supervise_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/instance/rank"
	"tbcluster/instance/spec"
	"tbcluster/instance/supervise"
)

// chat asks the engine itself, as the gateway would.
func chat(t *testing.T, i supervise.Instance) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+i.HTTP.String()+"/v1/completions",
		strings.NewReader(`{"prompt":"The capital of France is","max_tokens":4,"temperature":0}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+i.Secret)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.Status + string(b)
}

func TestAnInstanceIsReadyOnceACompletionCameBackAndStopLeavesNothing(t *testing.T) {
	w := newWorld(t, "a")
	a := w.nodes["a"]
	model := realModel(t)
	r := request(t, model, "a")
	r.RequestID = "once"
	began := time.Now()
	i := a.mustPlace(r)
	if again := a.mustPlace(r); again.ID != i.ID {
		t.Errorf("the same request made %s and %s", i.ID, again.ID)
	}
	i = a.untilState(i.ID, supervise.Ready)
	t.Logf("ready after %s, %.0f tokens/s", time.Since(began), i.TokensPerSecond)
	if i.TokensPerSecond <= 0 || i.Ranks[0].PID == 0 || i.Name != "smollm2-135m-instruct.q4_1" || i.User != "ada" || i.PlannedBytes != 3<<30 {
		t.Errorf("%+v", i)
	}
	if got := chat(t, i); !strings.Contains(got, "Paris") {
		t.Errorf("chat: %s", got)
	}
	a.mu.Lock()
	states := slices.Clone(a.states[i.ID])
	a.mu.Unlock()
	if !slices.Contains(states, supervise.Warming) || slices.Index(states, supervise.Warming) > slices.Index(states, supervise.Ready) || states[0] != supervise.Planned {
		t.Errorf("states %v", states)
	}
	var lines int
	if err := a.local.Logs(t.Context(), i.ID, 0, time.Time{}, false, func(rank.Line) error { lines++; return nil }); err != nil || lines == 0 {
		t.Errorf("%d lines of log, %v", lines, err)
	}
	if _, err := a.agent().Stop(t.Context(), i.Name, false); err != nil {
		t.Fatal(err)
	}
	i = a.untilState(i.ID, supervise.Stopped)
	w.nothingRuns(i.ID)
	if i.Ranks[0].State != supervise.RankExited || i.Ranks[0].ExitStatus != "exit 0" {
		t.Errorf("%+v", i.Ranks[0])
	}
	if _, err := a.agent().Stop(t.Context(), i.Name, true); err != nil {
		t.Fatal(err)
	}
	if _, err := a.agent().Get(i.ID); !fault.Is(err, fault.InstanceUnknown) {
		t.Errorf("removed: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(a.dir, "*/*.json")); err != nil || len(left) > 0 {
		t.Errorf("records left: %v %v", left, err)
	}
	if _, err := os.Stat(a.RankDir(i.ID, 0)); !os.IsNotExist(err) {
		t.Errorf("logs left: %v", err)
	}
}

func TestTwoNodesServeOneModelAndDieTogether(t *testing.T) {
	model := realModel(t)
	for name, c := range map[string]struct {
		kill  func(t *testing.T, w *world, i supervise.Instance)
		words []string
	}{
		"the RPC server": {func(t *testing.T, w *world, i supervise.Instance) {
			kill(t, w.nodes["b"].status(i.ID, 1).Engine.PID)
		}, []string{"rank 1 (rpc) on node b ended", "signal 9"}},
		"the head": {func(t *testing.T, w *world, i supervise.Instance) {
			kill(t, w.nodes["a"].status(i.ID, 0).Engine.PID)
		}, []string{"rank 0 (server) on node a ended", "signal 9"}},
		"a shim": {func(t *testing.T, w *world, i supervise.Instance) {
			kill(t, w.nodes["b"].status(i.ID, 1).Shim.PID)
		}, []string{"rank 1 (rpc) on node b ended", "its shim was killed"}},
		"the cable": {func(_ *testing.T, w *world, _ supervise.Instance) {
			w.nodes["a"].agent().LinkDown("a-b", "no answer for 2.5 s")
		}, []string{"the cable to rank 1 (rpc) on node b is down", "no answer for 2.5 s"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, "a", "b")
			a := w.nodes["a"]
			i := a.mustPlace(request(t, model, "a", "b"))
			i = a.untilState(i.ID, supervise.Ready)
			if got := chat(t, i); !strings.Contains(got, "Paris") {
				t.Errorf("chat: %s", got)
			}
			if len(i.Ranks) != 2 || i.Ranks[1].NodeID != "b" || !strings.HasPrefix(i.Ranks[1].Listens[0], "127.0.0.2:") || !strings.HasPrefix(i.Ranks[0].Listens[0], "127.0.0.1:") {
				t.Errorf("%+v", i.Ranks)
			}
			began := time.Now()
			c.kill(t, w, i)
			a.until(i.ID, time.Minute, "not ready any more", func(i supervise.Instance) bool { return i.State != supervise.Ready })
			took := time.Since(began)
			i = a.untilState(i.ID, supervise.Failed)
			t.Logf("not ready after %s, gone after %s: %s", took, time.Since(began), i.Reason)
			for _, want := range c.words {
				if !strings.Contains(i.Reason, want) {
					t.Errorf("%q is missing in %q", want, i.Reason)
				}
			}
			w.nothingRuns(i.ID)
			if f := i.Fault(); f == nil || f.Fix == "" {
				t.Errorf("%+v", f)
			}
		})
	}
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestAHangingEngineIsDegradedAndThenEnded(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a", "b")
	a := w.nodes["a"]
	a.stopAgent()
	a.times = supervise.Times{HangSplit: 10 * time.Second} // it is degraded long enough to be seen so
	a.start()
	i := a.untilState(a.mustPlace(request(t, model, "a", "b")).ID, supervise.Ready)
	// What a silent cable does: nothing comes back, /health says 200.
	pid := w.nodes["b"].status(i.ID, 1).Engine.PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	d := a.untilState(i.ID, supervise.Degraded)
	t.Logf("degraded after %s", time.Since(began))
	if !strings.Contains(d.Reason, "no completion came back") {
		t.Errorf("degraded: %s", d.Reason)
	}
	i = a.untilState(i.ID, supervise.Failed)
	w.nothingRuns(i.ID)
}

func TestADegradedInstanceThatAnswersAgainIsReady(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a")
	a := w.nodes["a"]
	i := a.untilState(a.mustPlace(request(t, model, "a")).ID, supervise.Ready)
	pid := a.status(i.ID, 0).Engine.PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	a.untilState(i.ID, supervise.Degraded)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	a.untilState(i.ID, supervise.Ready)
}

func TestAnAgentThatIsStartedAgainAdoptsItsInstances(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a", "b")
	a, b := w.nodes["a"], w.nodes["b"]
	i := a.untilState(a.mustPlace(request(t, model, "a", "b")).ID, supervise.Ready)
	before := a.status(i.ID, 0).Engine
	a.stopAgent()
	if !before.Alive() {
		t.Fatal("the engine went with the agent")
	}
	if got := chat(t, i); !strings.Contains(got, "Paris") {
		t.Errorf("without an agent: %s", got)
	}
	a.start()
	again := a.untilState(i.ID, supervise.Ready)
	if again.Ranks[0].PID != before.PID || again.HTTP != i.HTTP || again.Secret != i.Secret {
		t.Errorf("before %+v\nafter %+v", i, again)
	}
	// The other node's agent goes and comes: the instance serves on.
	b.stopAgent()
	a.until(i.ID, time.Minute, "rank 1 unknown", func(i supervise.Instance) bool { return i.Ranks[1].State == supervise.RankUnknown })
	if got := chat(t, i); !strings.Contains(got, "Paris") {
		t.Errorf("without the agent of node b: %s", got)
	}
	if v, err := a.agent().Get(i.ID); err != nil || v.State.Over() || v.State == supervise.Stopping {
		t.Errorf("%s: %s %v", v.State, v.Reason, err)
	}
	b.start()
	a.until(i.ID, time.Minute, "rank 1 ready", func(i supervise.Instance) bool { return i.Ranks[1].State == supervise.RankReady })
	if _, err := a.agent().Stop(t.Context(), i.ID, false); err != nil {
		t.Fatal(err)
	}
	a.untilState(i.ID, supervise.Stopped)
	w.nothingRuns(i.ID)
}

func TestWhatEndedWhileTheAgentWasAwayIsToldWithItsLastWords(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a")
	a := w.nodes["a"]
	i := a.untilState(a.mustPlace(request(t, model, "a")).ID, supervise.Ready)
	engine := a.status(i.ID, 0).Engine
	a.stopAgent()
	kill(t, engine.PID)
	if err := a.status(i.ID, 0).Shim.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.start()
	i = a.untilState(i.ID, supervise.Failed)
	if r := i.Ranks[0]; r.ExitStatus != "signal 9 (killed)" || len(r.LastLines) == 0 || !strings.Contains(i.Reason, "signal 9") {
		t.Errorf("%q %+v", i.Reason, r)
	}
}

func TestHowARankEndedIsLearntOnceItsNodeCanBeAsked(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a", "b")
	a, b := w.nodes["a"], w.nodes["b"]
	i := a.untilState(a.mustPlace(request(t, model, "a", "b")).ID, supervise.Ready)
	rpc := b.status(i.ID, 1)
	b.stopAgent()
	kill(t, rpc.Engine.PID)
	kill(t, a.status(i.ID, 0).Engine.PID) // as its next completion would
	i = a.untilState(i.ID, supervise.Failed)
	if r := i.Ranks[1]; r.State == supervise.RankExited || r.ExitStatus != "" || !strings.Contains(i.Reason, "rank 1 (rpc) on node b cannot be asked") {
		t.Errorf("%q %+v", i.Reason, r)
	}
	b.start()
	i = a.until(i.ID, time.Minute, "how rank 1 ended", func(i supervise.Instance) bool { return i.Ranks[1].ExitStatus != "" })
	if r := i.Ranks[1]; r.State != supervise.RankExited || r.ExitStatus != "signal 9 (killed)" || len(r.LastLines) == 0 {
		t.Errorf("%+v", r)
	}
	w.nothingRuns(i.ID)
}

func TestRanksThatTheirOwnerDoesNotKnowAnyMoreAreEnded(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a", "b")
	a := w.nodes["a"]
	i := a.untilState(a.mustPlace(request(t, model, "a", "b")).ID, supervise.Ready)
	rpc := w.nodes["b"].status(i.ID, 1)
	a.stopAgent()
	kill(t, a.status(i.ID, 0).Engine.PID)
	if err := os.RemoveAll(filepath.Join(a.dir, "owned")); err != nil { // a lost disk
		t.Fatal(err)
	}
	a.start()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := rpc.Shim.Wait(ctx); err != nil {
		t.Fatalf("rank 1 lives on: %v", err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(a.RankDir(i.ID, 0)); os.IsNotExist(err) && len(a.local.Running()) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("node a keeps what nobody owns")
		}
	}
}

func TestRanksWhoseOwnerAndCableAreGoneAreEnded(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a", "b")
	a, b := w.nodes["a"], w.nodes["b"]
	b.stopAgent()
	b.times = supervise.Times{Severed: 100 * time.Millisecond}
	b.start()
	i := a.untilState(a.mustPlace(request(t, model, "a", "b")).ID, supervise.Ready)
	rpc := b.status(i.ID, 1)
	a.stopAgent()
	b.local.Link("a-b", false)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := rpc.Shim.Wait(ctx); err != nil {
		t.Fatalf("rank 1 lives on: %v", err)
	}
	if b.status(i.ID, 1).Phase != rank.Ended {
		t.Error("it did not end properly")
	}
}

func TestFaultsBeforeTheStartNameThingNodeAndFixAndLeaveNothing(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	good := request(t, model, "a", "b")
	truncated := filepath.Join(t.TempDir(), filepath.Base(model))
	whole, err := os.ReadFile(model)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(truncated, whole[:50_000_000], 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(w *world, r *supervise.PlaceRequest)
		reason fault.Reason
		where  string
		words  string
	}{
		"a truncated model": {func(_ *world, r *supervise.PlaceRequest) { r.Ranks[0].ModelPath = truncated }, fault.ModelBroken, "node a", "48362432 bytes of 98362432 are missing"},
		"truncated, and that is all that is known": {func(_ *world, r *supervise.PlaceRequest) {
			r.Ranks[0].ModelPath = truncated
			r.Model.Files = []spec.File{{Name: filepath.Base(model), Size: 50_000_000}}
		}, fault.ModelBroken, "node a", "48362432 bytes are missing"},
		"a missing model": {func(_ *world, r *supervise.PlaceRequest) { r.Ranks[0].ModelPath = "/nowhere/" + filepath.Base(model) }, fault.ModelIncomplete, "node a", "/nowhere/"},
		"a missing engine": {func(w *world, _ *supervise.PlaceRequest) {
			w.nodes["b"].engine = func(spec.Engine) spec.Engine { return spec.Engine{Name: "llamacpp", Reason: "not found in PATH"} }
		}, fault.EngineMissing, "node b", "not found in PATH"},
		"no RPC server": {func(w *world, _ *supervise.PlaceRequest) {
			w.nodes["b"].engine = func(e spec.Engine) spec.Engine {
				e.Programs = map[string]string{"server": e.Programs["server"]}
				return e
			}
		}, fault.EngineMissing, "node b", "role rpc"},
		"another build": {func(w *world, _ *supervise.PlaceRequest) {
			w.nodes["b"].engine = func(e spec.Engine) spec.Engine { e.Version = "b1 (other)"; return e }
		}, fault.EngineMismatch, "node b", "node b has b1 (other)"},
		"too little memory":   {func(w *world, _ *supervise.PlaceRequest) { w.nodes["b"].memory = 2 << 30 }, fault.DoesNotFit, "node b", "needs 3072 MiB"},
		"a node that is down": {func(w *world, _ *supervise.PlaceRequest) { w.nodes["b"].stopAgent() }, fault.NodeDown, "node b", "is down"},
		"an argument of ours": {func(_ *world, r *supervise.PlaceRequest) { r.EngineArgs = []string{"--port", "1"} }, fault.Usage, "", "--port"},
		"a bad name":          {func(_ *world, r *supervise.PlaceRequest) { r.Name = "../x" }, fault.Usage, "", "../x"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "a", "b")
			r := good
			r.Ranks = slices.Clone(good.Ranks)
			c.change(w, &r)
			_, err := w.nodes["a"].place(r)
			f := fault.As(err)
			if f == nil || f.Reason != c.reason || f.Where != c.where || !strings.Contains(f.Error(), c.words) {
				t.Fatalf("%v, %+v", err, f)
			}
			if f.Fix == "" {
				t.Error("it says nothing to do")
			}
			for id, n := range w.nodes {
				if n.local != nil && len(n.local.Running()) > 0 {
					t.Errorf("node %s still holds %v", id, n.local.Running())
				}
				if left, err := filepath.Glob(filepath.Join(n.dir, "*/*")); err != nil || len(left) > 0 {
					t.Errorf("left on %s: %v %v", id, left, err)
				}
			}
			if len(w.nodes["a"].agent().List()) > 0 {
				t.Error("an instance is left")
			}
		})
	}
}

func TestAPortThatIsTakenBetweenGrantAndStartIsNamed(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	for name, rankIndex := range map[string]int{"HTTP": 0, "RPC": 1} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "a", "b")
			a := w.nodes["a"]
			// The thief takes the port as soon as the rank is about to start.
			thief := &stealer{node: w.nodes[[]string{"a", "b"}[rankIndex]], index: rankIndex}
			thief.install()
			defer thief.close()
			i := a.untilState(a.mustPlace(request(t, model, "a", "b")).ID, supervise.Failed)
			if i.FailReason != fault.PortInUse || !strings.Contains(i.Reason, fmt.Sprintf("rank %d", rankIndex)) || i.Fix == "" {
				t.Errorf("%s: %s", i.FailReason, i.Reason)
			}
			w.nothingRuns(i.ID)
		})
	}
}

// stealer is a Spawner that lets somebody else have the port first.
type stealer struct {
	*node
	index int
	l     net.Listener
}

func (s *stealer) install() {
	s.stopAgent()
	s.spawner = s
	s.start()
}

func (s *stealer) close() {
	if s.l != nil {
		_ = s.l.Close()
	}
}

func (s *stealer) StartRank(ctx context.Context, who host.Asker, id string, index int, p rank.Process) error {
	if index == s.index {
		port := p.Args[slices.IndexFunc(p.Args, func(a string) bool { return a == "--port" || a == "-p" })+1]
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.%d:%s", s.number, port))
		if err != nil {
			return err
		}
		s.l = l
	}
	return s.node.StartRank(ctx, who, id, index, p)
}

// copier is a Copier that copies within the machine.
type copier struct {
	from string
	to   string
	gate chan struct{}
	// asked has room for each copy that has begun: it has said once how far it
	// is, and not yet of how much.
	asked chan struct{}
}

func (c copier) CopyModel(ctx context.Context, _ host.Asker, _ string, m spec.Model, _ string, progress func(done, total uint64)) (string, error) {
	progress(0, 0)
	c.asked <- struct{}{}
	select {
	case <-c.gate:
	case <-ctx.Done():
		return "", fault.New(fault.Interrupted, "the copy was interrupted", ctx.Err(), "")
	}
	b, err := os.ReadFile(c.from)
	if err != nil {
		return "", err
	}
	progress(m.SizeBytes, m.SizeBytes)
	return c.to, os.WriteFile(c.to, b, 0o644)
}

func TestAModelThatIsNotThereIsCopiedFirst(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a")
	a := w.nodes["a"]
	gate, asked := make(chan struct{}), make(chan struct{}, 3)
	a.stopAgent()
	a.copier = copier{from: model, to: filepath.Join(t.TempDir(), filepath.Base(model)), gate: gate, asked: asked}
	a.start()
	r := request(t, model, "a")
	r.Ranks[0].ModelPath, r.Ranks[0].MustCopy = "", true
	// Stopped while it copies: nothing is started.
	i := a.mustPlace(r)
	<-asked
	if i := a.untilState(i.ID, supervise.Copying); i.Reason != "copying the model to node a" {
		t.Errorf("before it is known how much there is, it says %q", i.Reason)
	}
	if _, err := a.agent().Stop(t.Context(), i.ID, false); err != nil {
		t.Fatal(err)
	}
	a.untilState(i.ID, supervise.Stopped)
	// The agent goes while it copies: the next one says so.
	i = a.mustPlace(r)
	a.untilState(i.ID, supervise.Copying)
	a.stopAgent()
	a.start()
	i = a.untilState(i.ID, supervise.Failed)
	if i.FailReason != fault.Interrupted {
		t.Errorf("%s: %s", i.FailReason, i.Reason)
	}
	close(gate)
	a.untilState(a.mustPlace(r).ID, supervise.Ready)
}

func TestABusyInstanceIsNotDisturbed(t *testing.T) {
	t.Parallel()
	model := realModel(t)
	w := newWorld(t, "a")
	a := w.nodes["a"]
	a.stopAgent()
	a.times = supervise.Times{Probe: 100 * time.Millisecond}
	a.start()
	i := a.untilState(a.mustPlace(request(t, model, "a")).ID, supervise.Ready)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+i.HTTP.String()+"/completion",
		strings.NewReader(`{"prompt":"Once upon a time","n_predict":150,"ignore_eos":true,"temperature":0}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+i.Secret)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %v", resp.Status, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.states[i.ID]; s[len(s)-1] != supervise.Ready || slices.Contains(s, supervise.Degraded) {
		t.Errorf("states %v", s)
	}
}

func TestANodeActsOnlyForItsOwnInstances(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "a", "b")
	b := w.nodes["b"]
	who := host.Asker{UID: 1, Name: "eve", Node: "a"}
	body := `{"instance_id":"abcdefgh","instance_name":"x","engine":"llamacpp","ranks":[{"index":1,"program":"rpc","ports":[{"name":"rpc","reach":"ranks"}]}],"peers":["a"]}`
	if _, err := fetch(); err != nil {
		t.Fatal(err)
	}
	raw, err := b.local.Dispatch(t.Context(), who, supervise.KindReserve, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	var grant supervise.Grant
	if err := json.Unmarshal(raw, &grant); err != nil || len(grant.Ports[1]) != 1 || grant.Links[0] != "a-b" {
		t.Fatalf("%s %v", raw, err)
	}
	other := who
	other.Node = "c"
	for _, kind := range []string{supervise.KindStatus, supervise.KindRelease, supervise.KindStop, supervise.KindStart} {
		_, err := b.local.Dispatch(t.Context(), other, kind, []byte(`{"instance_id":"abcdefgh"}`))
		if !fault.Is(err, fault.Denied) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	for name, start := range map[string]string{
		"a variable that loads code": `{"instance_id":"abcdefgh","engine":"llamacpp","rank":{"index":1,"program":"rpc","env":{"LD_PRELOAD":"/x"},"ports":[%s]}}`,
		"another program":            `{"instance_id":"abcdefgh","engine":"llamacpp","rank":{"index":1,"program":"server","ports":[%s]}}`,
		"another port":               `{"instance_id":"abcdefgh","engine":"llamacpp","rank":{"index":1,"program":"rpc","ports":[{"name":"rpc","reach":"ranks","address":"0.0.0.0","number":22}]}}`,
	} {
		st := `{"name":"rpc","reach":"ranks","address":"127.0.0.2","number":%d}`
		if strings.Contains(start, "%s") {
			start = fmt.Sprintf(start, fmt.Sprintf(st, grant.Ports[1][0].Number))
		}
		if _, err := b.local.Dispatch(t.Context(), who, supervise.KindStart, []byte(start)); err == nil {
			t.Errorf("%s was started", name)
		}
	}
	if _, err := b.local.Dispatch(t.Context(), who, "shell", []byte(`{}`)); !fault.Is(err, fault.Unsupported) {
		t.Errorf("unknown kind: %v", err)
	}
	if _, err := b.local.Dispatch(t.Context(), who, supervise.KindStop, []byte(`{"instance_id":"abcdefgh","also":1}`)); !fault.Is(err, fault.Protocol) {
		t.Errorf("unknown field: %v", err)
	}
	if _, err := b.local.Dispatch(t.Context(), who, supervise.KindRelease, []byte(`{"instance_id":"abcdefgh"}`)); err != nil {
		t.Error(err)
	}
	if got := b.local.Running(); len(got) > 0 {
		t.Errorf("still held: %v", got)
	}
}

func TestAGrantThatIsNotUsedExpires(t *testing.T) {
	t.Parallel()
	if _, err := fetch(); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, "a")
	a := w.nodes["a"]
	a.stopAgent()
	a.times = supervise.Times{Grant: 3 * time.Second} // it is held when that is asked
	a.start()
	q := supervise.ReserveRequest{InstanceID: "abcdefgh", Engine: "llamacpp", NeedBytes: 5 << 30, HeadroomBytes: 2 << 30,
		Ranks: []spec.Rank{{Program: "server", Ports: []spec.Port{{Name: "http", Reach: spec.ReachLoopback}}}}}
	before, err := a.local.Budget(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.local.Ranks(host.Asker{}).Reserve(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	if b, err := a.local.Budget(t.Context()); err != nil || b != before-3<<30 {
		t.Errorf("budget %d, before %d, %v", b, before, err)
	}
	for end := time.Now().Add(time.Minute); len(a.local.Running()) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is still held")
		}
	}
	if b, err := a.local.Budget(t.Context()); err != nil || b != before {
		t.Errorf("budget %d, before %d, %v", b, before, err)
	}
}

func TestFindNamesWhatFits(t *testing.T) {
	all := []supervise.Instance{{ID: "abcd1", Name: "x"}, {ID: "abcd2", Name: "y"}, {ID: "efgh1", Name: "x"}}
	for name, want := range map[string]string{"abcd1": "abcd1", "y": "abcd2", "efgh": "efgh1"} {
		if i, err := supervise.Find(name, all); err != nil || i.ID != want {
			t.Errorf("%s: %s %v", name, i.ID, err)
		}
	}
	if _, err := supervise.Find("x", all); !fault.Is(err, fault.InstanceAmbiguous) || !strings.Contains(err.Error(), "abcd1, efgh1") {
		t.Error(err)
	}
	if _, err := supervise.Find("abcd", all); !fault.Is(err, fault.InstanceAmbiguous) {
		t.Error(err)
	}
	if _, err := supervise.Find("z", all); !fault.Is(err, fault.InstanceUnknown) {
		t.Error(err)
	}
}

func FuzzDispatch(f *testing.F) {
	f.Add(supervise.KindReserve, []byte(`{"instance_id":"abcdefgh","ranks":[{"index":-1}]}`))
	f.Add(supervise.KindStart, []byte(`{"instance_id":"abcdefgh","rank":{"index":5}}`))
	f.Add(supervise.KindStop, []byte(`{"instance_id":"../x"}`))
	dir := f.TempDir()
	n := &node{w: &world{nodes: map[string]*node{}}, id: "a", number: 1, dir: dir}
	local, err := supervise.NewLocalRanks(supervise.LocalConfig{NodeID: "a", Dir: dir, Spawner: n, Files: n, Machine: n, Nodes: n.w.seenFrom("a")})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(local.Close)
	f.Fuzz(func(t *testing.T, kind string, body []byte) {
		if _, err := local.Dispatch(t.Context(), host.Asker{Node: "b"}, kind, body); err != nil && fault.As(err) == nil {
			t.Errorf("no fault: %v", err)
		}
		if got := local.Running(); len(got) > 0 {
			t.Errorf("without an engine it holds %v", got)
		}
	})
}
