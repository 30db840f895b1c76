package llamacpp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// real returns the installed engine and model, fetching them the first time.
func real(t *testing.T) (engineDir, model string) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs the real engine")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	engineDir = UserDir(home)
	if _, err := Install(t.Context(), engineDir, func(s string) { t.Log(s) }); err != nil {
		t.Fatal(err)
	}
	model, err = InstallModel(t.Context(), ModelDir(home), func(s string) { t.Log(s) })
	if err != nil {
		t.Fatal(err)
	}
	return engineDir, model
}

func TestInstalledEngineIsDetectedWithItsBuild(t *testing.T) {
	dir, _ := real(t)
	t.Setenv("PATH", "/usr/bin:/bin")
	e := New(Options{Dirs: []string{dir}}).Detect(t.Context(), "")
	if !e.Available || e.Programs[RoleServer] == "" || e.Programs[RoleRPC] == "" || !strings.Contains(e.Version, "sha256:") {
		t.Fatalf("%+v", e)
	}
	if !e.Has(featureUnifiedKV) || !e.Has(featureFit) || len(e.Devices) != 0 {
		t.Errorf("features %v, devices %v", e.Features, e.Devices)
	}
	// The same build elsewhere is the same build; one that differs is not.
	again := filepath.Join(t.TempDir(), "bin")
	if out, err := exec.Command("cp", "-r", filepath.Join(dir, "bin"), again).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if o := New(Options{Dirs: []string{again}}).Detect(t.Context(), ""); o.Version != e.Version {
		t.Errorf("%q and %q", o.Version, e.Version)
	}
	f, err := os.OpenFile(filepath.Join(again, "libggml-rpc.so.0"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if o := New(Options{Dirs: []string{again}}).Detect(t.Context(), ""); o.Version == e.Version {
		t.Error("a changed library is the same build")
	}
}

func TestWhatTheUserHasComesFirst(t *testing.T) {
	dir, _ := real(t)
	mine := t.TempDir()
	script := "#!/bin/sh\ncase $1 in --version) echo 'version: 6789 (abc1234)' ;; --list-devices) printf 'Available devices:\\n  Vulkan0: A GPU (1 MiB, 1 MiB free)\\n  RPC0: x\\n' ;; esac\n"
	if err := os.WriteFile(filepath.Join(mine, "llama-server"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", mine+":/usr/bin:/bin")
	e := New(Options{Dirs: []string{dir}}).Detect(t.Context(), "")
	if e.Version != "b6789 (abc1234)" || e.Path != filepath.Join(mine, "llama-server") || strings.Join(e.Devices, " ") != "Vulkan0" {
		t.Fatalf("%+v", e)
	}
	if _, ok := e.Programs[RoleRPC]; ok {
		t.Error("it has no RPC server beside it")
	}
	// One that does not run is passed over.
	if err := os.WriteFile(filepath.Join(mine, "llama-server"), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if e := New(Options{Dirs: []string{dir}}).Detect(t.Context(), ""); !e.Available || e.Path == filepath.Join(mine, "llama-server") {
		t.Errorf("%+v", e)
	}
}

func TestAMissingEngineSaysHowToGetIt(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	a := New(Options{Dirs: []string{t.TempDir()}})
	e := a.Detect(t.Context(), t.TempDir())
	if e.Available {
		t.Skip("llama.cpp is installed for all users of this machine")
	}
	if !strings.Contains(e.Reason, "tbcluster engine install llamacpp") {
		t.Errorf("%+v", e)
	}
}

func TestInstallWithoutPythonSaysSo(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	dir := filepath.Join(t.TempDir(), "engines", Name)
	_, err := Install(t.Context(), dir, nil)
	if f := fault.As(err); f == nil || f.Reason != fault.EngineMissing || !strings.Contains(f.Fix, "apt-get install python3") {
		t.Fatalf("%v", err)
	}
	left, err := os.ReadDir(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if !strings.HasSuffix(e.Name(), ".lock") {
			t.Errorf("left behind: %s", e.Name())
		}
	}
}

func TestAMissingLibraryIsNamedWithItsPackage(t *testing.T) {
	why := whyNot("x: error while loading shared libraries: libgomp.so.1: cannot open shared object file", fmt.Errorf("exit status 127"))
	if !strings.Contains(why, "apt-get install libgomp1") {
		t.Error(why)
	}
}

func request(layers []int, nodes ...string) spec.Request {
	return spec.Request{
		InstanceID: "i1", InstanceName: "smol", Nodes: nodes, Layers: layers, Context: 2048, ServedName: "smol", Secret: "sesame",
		Model:      spec.Model{Name: "smol", Format: "gguf", Layers: 30, Files: []spec.File{{Name: "m.gguf", Size: 1}}},
		ModelPaths: map[string]string{"a": "/m.gguf"},
		Engines:    map[string]spec.Engine{},
	}
}

// finish describes, grants ports as given, and returns the server's arguments.
func finish(t *testing.T, r spec.Request) []spec.Rank {
	t.Helper()
	a := New(Options{})
	ranks, err := a.Describe(r)
	if err != nil {
		t.Fatal(err)
	}
	for i := range ranks {
		ranks[i].Ports[0].Address = netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 1)})
		ranks[i].Ports[0].Number = uint16(21000 + i)
	}
	if err := a.Finish(r, ranks); err != nil {
		t.Fatal(err)
	}
	return ranks
}

func TestDevicesAreNamedAndSplitAsPlanned(t *testing.T) {
	for name, c := range map[string]struct {
		layers  []int
		nodes   []string
		devices map[string][]string
		want    string
	}{
		"alone":                       {nil, []string{"a"}, nil, ""},
		"alone with a GPU":            {nil, []string{"a"}, map[string][]string{"a": {"Vulkan0"}}, "-dev Vulkan0 -ngl 999 -sm layer"},
		"the head keeps its layers":   {[]int{20, 10}, []string{"a", "b"}, nil, "--rpc 127.0.0.2:21001 -dev RPC0 -ngl 11 -sm layer -ts 11"},
		"a head with no layer":        {[]int{0, 12, 18}, []string{"a", "b", "c"}, nil, "--rpc 127.0.0.2:21001,127.0.0.3:21002 -dev RPC0,RPC1 -ngl 31 -sm layer -ts 12,19"},
		"accelerators at both ends":   {[]int{10, 20}, []string{"a", "b"}, map[string][]string{"a": {"ROCm0"}, "b": {"ROCm0", "ROCm1"}}, "--rpc 127.0.0.2:21001 -dev ROCm0,RPC0,RPC1 -ngl 31 -sm layer -ts 10,10,11"},
		"devices are numbered on":     {[]int{0, 10, 20}, []string{"a", "b", "c"}, map[string][]string{"b": {"CUDA0", "CUDA1"}}, "--rpc 127.0.0.2:21001,127.0.0.3:21002 -dev RPC0,RPC1,RPC2 -ngl 31 -sm layer -ts 5,5,21"},
		"evenly when nothing is said": {nil, []string{"a", "b"}, nil, "--rpc 127.0.0.2:21001 -dev RPC0 -ngl 16 -sm layer -ts 16"},
	} {
		t.Run(name, func(t *testing.T) {
			r := request(c.layers, c.nodes...)
			for n, d := range c.devices {
				r.Engines[n] = spec.Engine{Devices: d}
			}
			ranks := finish(t, r)
			got := strings.Join(ranks[0].Args, " ")
			if !strings.HasSuffix(got, strings.TrimSpace("-np 1 "+c.want)) {
				t.Errorf("%s", got)
			}
			if !strings.Contains(got, "--host 127.0.0.1 --port 21000 ") || strings.Contains(got, "sesame") || ranks[0].Env[keyVariable] != "sesame" {
				t.Errorf("%s %v", got, ranks[0].Env)
			}
			for i, rk := range ranks[1:] {
				if want := fmt.Sprintf("-H 127.0.0.%d -p %d", i+2, 21001+i); !strings.HasPrefix(strings.Join(rk.Args, " "), want) {
					t.Errorf("rank %d: %v", i+1, rk.Args)
				}
			}
		})
	}
}

func TestArgumentsThatThePlacementDecidesAreRefused(t *testing.T) {
	for _, arg := range []string{"--port", "--host=0.0.0.0", "--rpc", "-m", "--tools", "--api-key"} {
		r := request(nil, "a")
		r.ExtraArgs = []string{arg, "1"}
		if _, err := New(Options{}).Describe(r); !fault.Is(err, fault.Usage) {
			t.Errorf("%s: %v", arg, err)
		}
	}
	r := request(nil, "a")
	r.ExtraArgs = []string{"--flash-attn", "on"}
	if _, err := New(Options{}).Describe(r); err != nil {
		t.Error(err)
	}
}

func TestLogLinesThatMeanTheEnd(t *testing.T) {
	for line, want := range map[string]spec.LogEvent{
		"0.00.020.518 E llama_model_load: error loading model: tensor 'blk.16.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete": {
			Fatal: "error loading model: tensor 'blk.16.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete", Reason: string(fault.ModelBroken)},
		"0.00.002.501 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 21082": {
			Fatal: "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 21082", Reason: string(fault.PortInUse)},
		"Failed to create server socket": {
			Fatal: "it could not listen on its RPC port: Failed to create server socket", Reason: string(fault.PortInUse)},
		`error while handling argument "-dev": invalid device: RPC0`: {
			Fatal: `the server of another rank did not answer, or is of another version: error while handling argument "-dev": invalid device: RPC0`, Reason: string(fault.EngineFailed)},
		"/src/ggml-rpc.cpp:498: Remote RPC server crashed or returned malformed response": {
			Fatal: "another rank is gone: /src/ggml-rpc.cpp:498: Remote RPC server crashed or returned malformed response", Reason: string(fault.EngineFailed)},
		"0.00.190.533 I srv    load_model: initializing, n_slots = 2": {},
	} {
		if got := New(Options{}).ReadLog(spec.Rank{}, line); got != want {
			t.Errorf("%s\n got %+v\nwant %+v", line, got, want)
		}
	}
}

// run starts a rank's program as it is and ends it with the test.
func run(t *testing.T, e spec.Engine, rk spec.Rank) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(e.Programs[rk.Program], rk.Args...)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=/nonexistent"}
	for k, v := range rk.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

func ready(t *testing.T, a *Adapter, rk spec.Rank) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		ok, phase, err := a.RankReady(t.Context(), rk)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("rank %d is still %s", rk.Index, phase)
		}
	}
}

func freePort(t *testing.T, addr string) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", addr+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

func TestTheRealEngineAnswersAloneAndOverRPCAlike(t *testing.T) {
	dir, model := real(t)
	t.Setenv("PATH", "/usr/bin:/bin")
	a := New(Options{Dirs: []string{dir}})
	e := a.Detect(t.Context(), "")
	answer := func(nodes ...string) string {
		r := request(nil, nodes...)
		r.ModelPaths["a"] = model
		for _, n := range nodes {
			r.Engines[n] = e
		}
		ranks, err := a.Describe(r)
		if err != nil {
			t.Fatal(err)
		}
		for i := range ranks {
			p := &ranks[i].Ports[0]
			p.Address = netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 1)})
			p.Number = freePort(t, p.Address.String())
		}
		if err := a.Finish(r, ranks); err != nil {
			t.Fatal(err)
		}
		for i := len(ranks) - 1; i >= 0; i-- {
			run(t, e, ranks[i])
			ready(t, a, ranks[i])
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		c, err := a.Complete(ctx, ranks[0], "smol", 4)
		if err != nil {
			t.Fatal(err)
		}
		if c.Tokens != 4 || c.TokensPerSecond <= 0 {
			t.Errorf("%+v", c)
		}
		if busy, mark, err := a.Progress(ctx, ranks[0]); busy || mark != "" || err != nil {
			t.Errorf("idle: %v %q %v", busy, mark, err)
		}
		stranger := ranks[0]
		stranger.Env = nil
		if _, err := a.Complete(ctx, stranger, "smol", 1); err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("without the secret: %v", err)
		}
		return c.Text
	}
	alone := answer("a")
	if !strings.Contains(alone, "Paris") {
		t.Errorf("answer %q", alone)
	}
	if two := answer("a", "b"); two != alone {
		t.Errorf("over two: %q, alone %q", two, alone)
	}
}

func FuzzReadLog(f *testing.F) {
	f.Add("0.00.020.518 E llama_model_load: error loading model: x")
	f.Add("Failed to create server socket")
	f.Fuzz(func(t *testing.T, line string) {
		e := New(Options{}).ReadLog(spec.Rank{}, line)
		if (e.Fatal == "") != (e.Reason == "") {
			t.Errorf("%+v", e)
		}
	})
}

func FuzzAnswers(f *testing.F) {
	f.Add([]byte(`{"content":" Paris","tokens_predicted":4,"timings":{"predicted_per_second":161.6}}`))
	f.Add([]byte(`[{"id":0,"is_processing":true,"id_task":6,"n_prompt_tokens_processed":4,"next_token":[{"n_decoded":4}]}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseCompletion(b); err == nil && c.Tokens < 1 {
			t.Errorf("%+v", c)
		}
		if busy, mark, err := parseSlots(b); err == nil && busy != (mark != "") {
			t.Errorf("%v %q", busy, mark)
		}
		_ = message(b)
	})
}

func FuzzProbe(f *testing.F) {
	f.Add("version: 1 (571d0d5)\nbuilt with GNU")
	f.Add("Available devices:\n  Vulkan0: AMD (1 MiB, 1 MiB free)\n")
	f.Fuzz(func(t *testing.T, out string) {
		if v := parseVersion(out); strings.Contains(v, "\n") {
			t.Errorf("%q", v)
		}
		for _, d := range parseDevices(out) {
			if strings.ContainsAny(d, ", \n") {
				t.Errorf("%q", d)
			}
		}
	})
}
