package plan

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

const g = 1 << 30

var llama = spec.Traits{Name: "llamacpp", Formats: []string{"gguf"}, Split: true, Star: true, SameBuild: true, Roles: [2]string{"server", "rpc"}}

func node(name string, budget uint64) Node {
	return Node{ID: "id-" + name, Name: name, Up: true, MemoryBudget: budget, MemoryTotal: 16 * g, CanClose: true,
		Engines: []spec.Engine{{Name: "llamacpp", Available: true, Version: "b1"}}}
}

// model has 30 layers of that size and a cache that costs nothing.
func model(layer uint64) spec.Model {
	m := spec.Model{ID: "m1", Name: "m", Format: "gguf", Layers: 30, Context: 8192, SizeBytes: 30 * layer}
	for range 30 {
		m.LayerBytes = append(m.LayerBytes, layer)
	}
	return m
}

func input(m spec.Model, nodes ...Node) Input {
	in := Input{Model: m, Engines: []spec.Traits{llama}, Nodes: nodes, Copies: []spec.Copy{{NodeID: nodes[0].ID, Path: "/m.gguf", Complete: true}}}
	for i, a := range nodes {
		for _, b := range nodes[i+1:] {
			in.Links = append(in.Links, Link{ID: a.Name + b.Name, A: a.ID, B: b.ID, Proven: true, Gbps: 40})
		}
	}
	return in
}

func names(o *Option) string {
	if o == nil {
		return "nothing"
	}
	var out []string
	for _, r := range o.Ranks {
		out = append(out, fmt.Sprintf("%s:%d", r.NodeName, r.Layers))
	}
	return strings.Join(out, " ")
}

func TestFewestRanksWhereTheModelIsWin(t *testing.T) {
	in := input(model(10<<20), node("alpha", 12*g), node("beta", 14*g))
	in.Request.CopyMissing = true
	p := Make(in)
	if names(p.Choice) != "alpha:30" || p.Choice.Ranks[0].ModelPath != "/m.gguf" || p.Choice.Ranks[0].Role != "server" {
		t.Fatalf("%s: %+v", names(p.Choice), p.Choice)
	}
	if len(p.Alternatives) != 1 || !p.Alternatives[0].Feasible || !p.Alternatives[0].Ranks[0].MustCopy || p.Alternatives[0].Score >= p.Choice.Score {
		t.Errorf("%+v", p.Alternatives)
	}
	r := p.Choice.Ranks[0]
	if want := uint64(30*10<<20 + 2*g); r.NeedBytes != want || r.HeadroomBytes != 2*g {
		t.Errorf("need %d, want %d", r.NeedBytes, want)
	}
}

func TestWhatFitsNowhereAloneIsSpreadOverCables(t *testing.T) {
	in := input(model(g/2), node("alpha", 12*g), node("beta", 10*g), node("gamma", 12*g))
	in.Links = in.Links[:1] // alpha–beta only
	in.Request.CopyMissing = true
	p := Make(in)
	if names(p.Choice) != "alpha:15 beta:15" || p.Choice.Ranks[1].LinkID != "alphabeta" || p.Choice.Ranks[1].MustCopy {
		t.Fatalf("%s: %+v", names(p.Choice), p.Choice)
	}
	all := ""
	for _, o := range p.Alternatives {
		all += o.Reason + "\n"
	}
	for _, want := range []string{"30 layers with a context of 4096 tokens need 17.0 GiB", "alpha may use 12.0 GiB and has room for 20", "no proven cable joins gamma and alpha"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
}

func TestRejectionsNameNodeAndReason(t *testing.T) {
	small := model(10 << 20)
	for name, c := range map[string]struct {
		change func(in *Input)
		reason fault.Reason
		why    string
	}{
		"no engine": {func(in *Input) {
			for i := range in.Nodes {
				in.Nodes[i].Engines = []spec.Engine{{Name: "llamacpp", Reason: "not found in PATH"}}
			}
		}, fault.EngineMissing, "llamacpp is not installed on alpha: not found in PATH"},
		"builds differ": {func(in *Input) {
			in.Request.MinRanks = 2
			in.Nodes[1].Engines = []spec.Engine{{Name: "llamacpp", Available: true, Version: "b2"}}
		}, fault.EngineMismatch, "alpha has b1, beta has b2"},
		"no cable": {func(in *Input) {
			in.Request.MinRanks = 2
			in.Links[0].Proven = false
		}, fault.DoesNotFit, "no proven cable joins alpha and beta"},
		"ports open": {func(in *Input) {
			in.Request.MinRanks = 2
			in.Nodes[0].CanClose, in.Nodes[1].CanClose = false, false
		}, fault.RanksInsecure, "cannot be closed to the LAN on alpha"},
		"down": {func(in *Input) {
			in.Nodes[0].Up, in.Nodes[1].Up = false, false
		}, fault.NodeDown, "alpha is down"},
		"broken": {func(in *Input) {
			in.Nodes = in.Nodes[:1]
			in.Copies[0].Complete, in.Copies[0].Reason = false, "5 bytes are missing"
		}, fault.ModelBroken, "5 bytes are missing"},
		"not copied": {func(in *Input) {
			in.Request.Nodes = []string{"id-beta"}
		}, fault.ModelIncomplete, "beta has no whole copy"},
		"too large": {func(in *Input) {
			in.Request.Context = 1 << 20
			in.Model.KVBytes = 1 << 12
		}, fault.DoesNotFit, "context of 1048576 tokens"},
		"too many ranks": {func(in *Input) { in.Request.MinRanks = 5 }, fault.DoesNotFit, "5 ranks were asked for and there are 2 nodes"},
		"wrong format":   {func(in *Input) { in.Model.Format = "safetensors" }, fault.Unsupported, "does not load safetensors"},
		"unknown engine": {func(in *Input) { in.Request.Engine = "x" }, fault.Unsupported, `no engine "x"`},
	} {
		t.Run(name, func(t *testing.T) {
			in := input(small, node("alpha", 12*g), node("beta", 12*g))
			c.change(&in)
			p := Make(in)
			f := fault.As(p.Fault("m"))
			if p.Choice != nil || f == nil || f.Reason != c.reason || !strings.Contains(f.Why, c.why) || f.Fix == "" {
				t.Errorf("choice %s, %+v", names(p.Choice), f)
			}
		})
	}
}

func TestInsecureAndCopyMayBeAllowed(t *testing.T) {
	in := input(model(10<<20), node("alpha", 12*g), node("beta", 12*g))
	in.Nodes[1].CanClose = false
	in.Request = Request{MinRanks: 2, Insecure: true, CopyMissing: true}
	p := Make(in)
	if names(p.Choice) != "alpha:15 beta:15" {
		t.Errorf("%s", names(p.Choice))
	}
}

func TestSameStateSamePlan(t *testing.T) {
	in := input(model(g/2), node("alpha", 12*g), node("beta", 10*g), node("gamma", 12*g), node("delta", 9*g))
	want := Make(in)
	for range 50 {
		shuffled := in
		shuffled.Nodes = append([]Node{}, in.Nodes...)
		rand.Shuffle(len(shuffled.Nodes), func(i, j int) {
			shuffled.Nodes[i], shuffled.Nodes[j] = shuffled.Nodes[j], shuffled.Nodes[i]
		})
		shuffled.Links = append([]Link{}, in.Links...)
		rand.Shuffle(len(shuffled.Links), func(i, j int) {
			shuffled.Links[i], shuffled.Links[j] = shuffled.Links[j], shuffled.Links[i]
		})
		if got := Make(shuffled); !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v\n%+v", got, want)
		}
	}
}

func TestAPlanThatDoesNotHoldSaysWhatChanged(t *testing.T) {
	in := input(model(10<<20), node("alpha", 12*g), node("beta", 12*g))
	in.Request.CopyMissing = true
	old := Make(in)
	in.Nodes[0].MemoryBudget -= g // noise
	if err := Changed(old.ID, Make(in)); err != nil {
		t.Errorf("a little less memory: %v", err)
	}
	in.Nodes[0].Up = false
	in.Copies = append(in.Copies, spec.Copy{NodeID: "id-beta", Path: "/m.gguf", Complete: true})
	err := Changed(old.ID, Make(in))
	if !fault.Is(err, fault.PlanStale) || !strings.Contains(err.Error(), "where it would run changed; it would now run on beta") {
		t.Errorf("%v", err)
	}
	if err := Changed("nonsense", old); !fault.Is(err, fault.PlanStale) {
		t.Errorf("%v", err)
	}
}

func TestSplitHoldsEveryLayerUnderEveryCap(t *testing.T) {
	for range 2000 {
		n := 1 + rand.IntN(5)
		caps, weights := make([]int, n), make([]uint64, n)
		room := 0
		for i := range caps {
			caps[i], weights[i] = rand.IntN(20), uint64(rand.IntN(64))
			room += caps[i]
		}
		layers := 1 + rand.IntN(60)
		out := split(layers, weights, caps)
		possible := room >= layers && layers >= n
		for _, c := range caps {
			possible = possible && c > 0
		}
		if possible != (out != nil) {
			t.Fatalf("%d layers, caps %v: %v", layers, caps, out)
		}
		sum := 0
		for i, k := range out {
			if k < 1 || k > caps[i] {
				t.Fatalf("%v under %v", out, caps)
			}
			sum += k
		}
		if out != nil && sum != layers {
			t.Fatalf("%v is not %d", out, layers)
		}
	}
	if got := split(30, []uint64{32, 16}, []int{30, 30}); fmt.Sprint(got) != "[20 10]" {
		t.Errorf("by weight: %v", got)
	}
}

func TestAbsurdSizesFitNowhere(t *testing.T) {
	in := input(model(1<<62), node("alpha", 12*g))
	if p := Make(in); p.Choice != nil {
		t.Errorf("%+v", p.Choice)
	}
}
