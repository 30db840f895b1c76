package llamacpp

import (
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// Name is the engine's name.
const Name = "llamacpp"

// Roles, and keys of Engine.Programs.
const (
	RoleServer = "server"
	RoleRPC    = "rpc"
)

// Names of ports.
const (
	PortHTTP = "http"
	PortRPC  = "rpc"
)

// Features of builds, found in the help text of llama-server.
const (
	featureUnifiedKV = "kv-unified" // slots share one context
	featureFit       = "fit"        // sizes are changed to fit, unless told not to
)

const keyVariable = "LLAMA_API_KEY"

// probeSlot is the slot that our own completions use, so that they push nobody's
// conversation out of the cache.
const probeSlot = 1

// Options say where to look for the engine.
type Options struct {
	// Dirs are engine directories from the configuration: each holds
	// llama-server, itself or in bin or llamacpp/bin.
	Dirs []string
}

// Adapter implements spec.Adapter.
type Adapter struct {
	opts   Options
	client *http.Client
	builds builds
}

var _ spec.Adapter = (*Adapter)(nil)

// New returns the adapter.
func New(o Options) *Adapter {
	return &Adapter{opts: o, client: &http.Client{
		// Never by a proxy: it is on this machine.
		Transport: &http.Transport{Proxy: nil, MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second, ResponseHeaderTimeout: 0},
	}}
}

// Name returns "llamacpp".
func (a *Adapter) Name() string { return Name }

// Traits tells the planner about llama.cpp.
func (a *Adapter) Traits() spec.Traits {
	return spec.Traits{Name: Name, Formats: []string{"gguf"}, Split: true, Star: true, SameBuild: true, Env: []string{"GGML_", "LLAMA_"}, Roles: [2]string{RoleServer, RoleRPC}}
}

// Supports says why llama.cpp cannot load a model or split it.
func (a *Adapter) Supports(m spec.Model, ranks int) error {
	switch {
	case m.Format != "gguf":
		return fault.Newf(fault.Unsupported, "use a GGUF of the model", "llama.cpp loads GGUF files, and %s is %s", m.Name, m.Format)
	case ranks > 1 && m.Layers < ranks:
		return fault.Newf(fault.Unsupported, "ask for fewer ranks", "%s has %d layers: too few for %d ranks", m.Name, m.Layers, ranks)
	}
	return nil
}

// ours are options that the placement decides.
var ours = []string{
	"-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo",
	"--host", "--port", "--rpc", "-dev", "--device", "-ngl", "--gpu-layers", "--n-gpu-layers",
	"-sm", "--split-mode", "-ts", "--tensor-split", "-c", "--ctx-size", "-np", "--parallel",
	"-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "-fit", "--fit", "-a", "--alias",
	"--api-key", "--api-key-file", "--api-prefix", "--no-slots", "--log-disable", "--log-file",
	"--models-dir", "--models-preset", "--embedding", "--embeddings", "--ssl-key-file", "--ssl-cert-file",
	// These let whoever may chat run programs on the node.
	"--tools", "-ag", "--agent", "--ui-mcp-proxy", "--webui-mcp-proxy",
}

// Describe returns one server and, for each further node, one RPC server.
func (a *Adapter) Describe(r spec.Request) ([]spec.Rank, error) {
	if len(r.Nodes) == 0 {
		return nil, fault.Newf(fault.Internal, "", "a placement of %s has no nodes", r.Model.Name)
	}
	if err := a.Supports(r.Model, len(r.Nodes)); err != nil {
		return nil, err
	}
	for _, arg := range r.ExtraArgs {
		name, _, _ := strings.Cut(arg, "=")
		if slices.Contains(ours, name) {
			return nil, fault.Newf(fault.Usage, "leave it out: the placement decides it", "engine argument %s cannot be given", name).With("field", "engine_args")
		}
	}
	layers := r.Layers
	if layers == nil {
		layers = even(r.Model.Layers, len(r.Nodes))
	}
	sum := 0
	for _, n := range layers {
		if n < 0 {
			return nil, fault.Newf(fault.Internal, "", "a placement of %s has %d layers on a node", r.Model.Name, n)
		}
		sum += n
	}
	if len(layers) != len(r.Nodes) || sum != r.Model.Layers {
		return nil, fault.Newf(fault.Internal, "", "a placement of %s has %d of %d layers on %d of %d nodes", r.Model.Name, sum, r.Model.Layers, len(layers), len(r.Nodes))
	}
	ranks := make([]spec.Rank, len(r.Nodes))
	for i, node := range r.Nodes {
		ranks[i] = spec.Rank{
			Index: i, NodeID: node, Role: RoleRPC, Program: RoleRPC, Layers: layers[i],
			Ports: []spec.Port{{Name: PortRPC, Reach: spec.ReachRanks}},
		}
	}
	head := &ranks[0]
	head.Role, head.Program, head.Files = RoleServer, RoleServer, r.Model.Files
	head.Ports = []spec.Port{{Name: PortHTTP, Reach: spec.ReachLoopback}}
	for i := 1; i < len(ranks); i++ {
		head.After = append(head.After, i)
	}
	return ranks, nil
}

// even spreads layers over n ranks, the first ones taking what is left over.
func even(layers, n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = layers / n
		if i < layers%n {
			out[i]++
		}
	}
	return out
}

// Finish fills arguments and environment once the ports are granted.
func (a *Adapter) Finish(r spec.Request, ranks []spec.Rank) error {
	for i := range ranks {
		rk := &ranks[i]
		rk.Env = map[string]string{quietAbort: "1"}
		if len(rk.Ports) != 1 || !rk.Ports[0].AddrPort().IsValid() || rk.Ports[0].Number == 0 {
			return fault.Newf(fault.Internal, "", "rank %d of %s has no port", i, r.InstanceName)
		}
		if i == 0 {
			continue
		}
		at := rk.Ports[0]
		rk.Args = []string{"-H", at.Address.String(), "-p", strconv.Itoa(int(at.Number))}
		if d := r.Engines[rk.NodeID].Devices; len(d) > 0 {
			rk.Args = append(rk.Args, "-d", strings.Join(d, ","))
		}
	}
	return a.finishServer(r, ranks)
}

func (a *Adapter) finishServer(r spec.Request, ranks []spec.Rank) error {
	head := &ranks[0]
	engine := r.Engines[head.NodeID]
	path := r.ModelPaths[head.NodeID]
	if !filepath.IsAbs(path) {
		return fault.Newf(fault.Internal, "", "the path %q of %s is not absolute", path, r.Model.Name)
	}
	at := head.Ports[0]
	args := []string{"-m", path, "--host", at.Address.String(), "--port", strconv.Itoa(int(at.Number)), "-c", strconv.Itoa(r.Context)}
	if r.ServedName != "" && !strings.Contains(r.ServedName, ",") { // a comma would be two names
		args = append(args, "-a", r.ServedName)
	}
	if engine.Has(featureUnifiedKV) {
		args = append(args, "-np", "2", "-kvu")
		head.Quiet = []string{fmt.Sprintf("id %2d | task ", probeSlot)}
	} else {
		args = append(args, "-np", "1")
	}
	if engine.Has(featureFit) {
		args = append(args, "-fit", "off") // the plan did it
	}
	args = append(args, offload(r, ranks)...)
	head.Args = append(args, r.ExtraArgs...)
	if r.Secret != "" {
		head.Env[keyVariable] = r.Secret
	}
	return nil
}

// offload names the devices and splits the layers over them. A head without an
// accelerator keeps its own layers, the first ones, on its processor; the
// output layer counts as one more and goes to the last device.
func offload(r spec.Request, ranks []spec.Rank) []string {
	local := r.Engines[ranks[0].NodeID].Devices
	if len(ranks) == 1 {
		if len(local) == 0 {
			return nil
		}
		return []string{"-dev", strings.Join(local, ","), "-ngl", "999", "-sm", "layer"}
	}
	var servers, devices []string
	var split []int
	on := func(names []string, layers int) {
		for i, n := range even(layers, len(names)) {
			devices, split = append(devices, names[i]), append(split, n)
		}
	}
	offloaded := r.Model.Layers + 1
	switch {
	case ranks[0].Layers == 0:
	case len(local) > 0:
		on(local, ranks[0].Layers)
	default:
		offloaded -= ranks[0].Layers
	}
	n := 0 // devices of RPC servers are numbered through
	for _, rk := range ranks[1:] {
		servers = append(servers, rk.Ports[0].AddrPort().String())
		names := make([]string, max(1, len(r.Engines[rk.NodeID].Devices)))
		for i := range names {
			names[i] = fmt.Sprintf("RPC%d", n)
			n++
		}
		on(names, rk.Layers)
	}
	split[len(split)-1]++
	parts := make([]string, len(split))
	for i, s := range split {
		parts[i] = strconv.Itoa(s)
	}
	return []string{
		"--rpc", strings.Join(servers, ","), "-dev", strings.Join(devices, ","),
		"-ngl", strconv.Itoa(offloaded), "-sm", "layer", "-ts", strings.Join(parts, ","),
	}
}
