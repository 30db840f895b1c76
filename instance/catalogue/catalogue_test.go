package catalogue

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/instance/spec"
)

// readSizes inspects as far as these tests need: the files and their sizes. A
// file that says so is broken.
func readSizes(_ context.Context, path string) (spec.Model, error) {
	info, err := os.Stat(path)
	if err != nil {
		return spec.Model{}, err
	}
	if !info.IsDir() {
		data, err := os.ReadFile(path)
		if err != nil {
			return spec.Model{}, err
		}
		if string(data) == "broken" {
			return spec.Model{}, fault.Newf(fault.ModelBroken, "", "truncated")
		}
		return spec.Model{Format: "gguf", Quant: "Q4_1", SizeBytes: uint64(info.Size()), Files: []spec.File{{Name: filepath.Base(path), Size: uint64(info.Size())}}}, nil
	}
	m := spec.Model{Format: "safetensors"}
	entries, err := os.ReadDir(path)
	if err != nil {
		return m, err
	}
	for _, e := range entries {
		i, err := os.Stat(filepath.Join(path, e.Name()))
		if err != nil {
			return m, err
		}
		m.Files = append(m.Files, spec.File{Name: e.Name(), Size: uint64(i.Size())})
		m.SizeBytes += uint64(i.Size())
	}
	return m, nil
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, to, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
}

func digestOf(s string) string { d := sha256.Sum256([]byte(s)); return hex.EncodeToString(d[:]) }

// home makes a home with a model in every tree.
func home(t *testing.T) string {
	h := t.TempDir()
	repo := filepath.Join(h, ".cache/huggingface/hub/models--org--repo-GGUF")
	sum := digestOf("weights")
	write(t, filepath.Join(repo, "blobs", sum), "weights")
	write(t, filepath.Join(repo, "refs/main"), "abc")
	link(t, "../../blobs/"+sum, filepath.Join(repo, "snapshots/abc/m.Q4_1.gguf"))
	dir := filepath.Join(h, ".cache/huggingface/hub/models--org--dir")
	write(t, filepath.Join(dir, "refs/main"), "def")
	write(t, filepath.Join(dir, "snapshots/def/config.json"), "{}")
	write(t, filepath.Join(dir, "snapshots/def/model.safetensors"), "tensors")
	write(t, filepath.Join(h, ".exo/models/mlx--tiny/config.json"), "{}")
	write(t, filepath.Join(h, ".exo/models/mlx--tiny/model.safetensors"), "x")
	write(t, filepath.Join(h, ".lmstudio/models/pub/repo/lm.gguf"), "lm")
	write(t, filepath.Join(h, ".cache/llama.cpp/cpp.gguf"), "cpp")
	write(t, filepath.Join(h, "models/split-00001-of-00002.gguf"), "one")
	write(t, filepath.Join(h, "models/split-00002-of-00002.gguf"), "two")
	write(t, filepath.Join(h, "models/half-00001-of-00003.gguf"), "one")
	write(t, filepath.Join(h, "models/bad.gguf"), "broken")
	write(t, filepath.Join(h, "models/mmproj-m.gguf"), "projector")
	write(t, filepath.Join(h, "models/.m.gguf.tbcluster-1"), "part")
	link(t, "..", filepath.Join(h, "models/loop"))
	return h
}

func scan(t *testing.T, o Options) map[string]Found {
	t.Helper()
	if o.Env == nil {
		o.Env = map[string]string{}
	}
	res, err := Scan(t.Context(), o, readSizes)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]Found{}
	for _, f := range res.Models {
		if _, twice := out[f.Model.Name]; twice {
			t.Errorf("%s is listed twice", f.Model.Name)
		}
		out[f.Model.Name] = f
	}
	return out
}

func TestModelsOfEveryTreeAreFoundByThemselves(t *testing.T) {
	got := scan(t, Options{Home: home(t)})
	want := map[string]string{"m.Q4_1": TreeHuggingFace, "org/dir": TreeHuggingFace, "mlx/tiny": TreeExo, "lm": TreeLMStudio,
		"cpp": TreeLlamaCpp, "split": TreeDir, "half": TreeDir, "bad": TreeDir}
	for name, tree := range want {
		f, ok := got[name]
		if !ok || f.Copy.Tree != tree {
			t.Errorf("%s: found %v in %q, want it in %s", name, ok, f.Copy.Tree, tree)
		}
		if complete := name != "half" && name != "bad"; f.Copy.Complete != complete || f.Copy.Complete == (f.Copy.Reason != "") {
			t.Errorf("%s: complete %v, %q", name, f.Copy.Complete, f.Copy.Reason)
		}
		delete(got, name)
	}
	for name := range got {
		t.Errorf("%s was found and is no model", name)
	}
}

func TestNamedDirectoriesAndFilesAreLookedAt(t *testing.T) {
	h, d := t.TempDir(), t.TempDir()
	write(t, filepath.Join(d, "deep/er/a.gguf"), "a")
	write(t, filepath.Join(d, "b.gguf"), "b")
	write(t, filepath.Join(h, "w/c.gguf"), "c")
	got := scan(t, Options{Home: h, Dirs: []string{filepath.Join(d, "deep"), filepath.Join(d, "b.gguf"), "~/w"}})
	if len(got) != 3 {
		t.Fatalf("%v", got)
	}
	res, err := Scan(t.Context(), Options{Home: h, Dirs: []string{"/nowhere/at/all"}}, readSizes)
	if err != nil || len(res.Problems) != 1 {
		t.Fatalf("a named directory that is not there: %v, %v", res.Problems, err)
	}
}

func TestDigestsAreRememberedUntilTheFileChanges(t *testing.T) {
	h := home(t)
	path := filepath.Join(h, ".cache/llama.cpp/cpp.gguf")
	o := Options{Home: h, Env: map[string]string{}}
	if got := scan(t, o); !strings.HasPrefix(got["cpp"].Model.ID, "size:") || strings.HasPrefix(got["m.Q4_1"].Model.ID, "size:") {
		t.Fatalf("%s %s: want a provisional ID, and one by the blob's name", got["cpp"].Model.ID, got["m.Q4_1"].Model.ID)
	}
	d, err := openDigests(o.cachePath())
	if err != nil {
		t.Fatal(err)
	}
	if s, err := d.compute(t.Context(), path); err != nil || s != digestOf("cpp") {
		t.Fatal(s, err)
	}
	first := scan(t, o)["cpp"].Model.ID
	if strings.HasPrefix(first, "size:") {
		t.Fatal("the digest was not remembered")
	}
	write(t, path, "CPP")
	if err := os.Chtimes(path, testTime, testTime); err != nil {
		t.Fatal(err)
	}
	if again := scan(t, o)["cpp"].Model.ID; !strings.HasPrefix(again, "size:") {
		t.Fatal("the digest of other contents was believed")
	}
}

func TestChecksNameTheFile(t *testing.T) {
	h := t.TempDir()
	p := filepath.Join(h, "x.gguf")
	write(t, p, "abc")
	check := func(f spec.File) error {
		return CheckFiles(t.Context(), filepath.Join(h, "d.json"), readSizes, p, []spec.File{f})
	}
	if err := check(spec.File{Name: "x.gguf", Size: 3, SHA256: digestOf("abc")}); err != nil {
		t.Fatal(err)
	}
	for want, f := range map[fault.Reason]spec.File{
		fault.ModelIncomplete: {Name: "y.gguf", Size: 3},
		fault.ModelBroken:     {Name: "x.gguf", Size: 4},
		fault.FileEscapes:     {Name: "../x.gguf", Size: 3},
	} {
		if err := check(f); !fault.Is(err, want) || !strings.Contains(err.Error(), f.Name) {
			t.Errorf("%v: %v", want, err)
		}
	}
	if err := check(spec.File{Name: "x.gguf", Size: 3, SHA256: digestOf("abd")}); !fault.Is(err, fault.ModelBroken) {
		t.Errorf("other contents: %v", err)
	}
}

func TestWorkerAnswersAndEnds(t *testing.T) {
	h := home(t)
	a, b := net.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- ServeWorker(context.Background(), frame.New(b), WorkerOptions{Inspect: readSizes})
	}()
	c := NewClient(a)
	o := Options{Home: h, Env: map[string]string{}}
	res, err := c.Scan(t.Context(), o)
	if err != nil || len(res.Models) != 8 {
		t.Fatalf("%d models, %v", len(res.Models), err)
	}
	if _, err := c.Inspect(t.Context(), o, filepath.Join(h, "models/bad.gguf")); !fault.Is(err, fault.ModelBroken) {
		t.Errorf("broken: %v", err)
	}
	if _, err := c.Inspect(t.Context(), o, filepath.Join(h, "nothing")); !fault.Is(err, fault.FileMissing) {
		t.Errorf("missing: %v", err)
	}
	if f, err := c.Inspect(t.Context(), o, filepath.Join(h, "models/split-00001-of-00002.gguf")); err != nil || f.Model.Name != "split" {
		t.Errorf("split: %v %v", f, err)
	}
	if s, err := c.Digest(t.Context(), o, filepath.Join(h, "models/bad.gguf")); err != nil || s != digestOf("broken") {
		t.Errorf("digest: %s %v", s, err)
	}
	split := filepath.Join(h, "models/split-00001-of-00002.gguf")
	dry, err := c.Remove(t.Context(), split, true)
	if err != nil || len(dry.Paths) != 2 || dry.Bytes != 6 {
		t.Errorf("dry: %+v %v", dry, err)
	}
	if _, err := os.Stat(split); err != nil {
		t.Error("a dry run deleted")
	}
	snapshot := filepath.Join(h, ".cache/huggingface/hub/models--org--repo-GGUF/snapshots/abc/m.Q4_1.gguf")
	if gone, err := c.Remove(t.Context(), snapshot, false); err != nil || gone.Bytes != 7 {
		t.Errorf("a blob behind a link: %+v %v", gone, err)
	}
	if _, err := c.Remove(t.Context(), filepath.Join(h, "models"), false); !fault.Is(err, fault.FileEscapes) {
		t.Errorf("a directory that is no model was removed: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestACancelledCallEndsTheWorker(t *testing.T) {
	a, b := net.Pipe()
	ended := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		ended <- ServeWorker(context.Background(), frame.New(b), WorkerOptions{Inspect: func(ctx context.Context, _ string) (spec.Model, error) {
			close(begun)
			<-ctx.Done()
			return spec.Model{}, ctx.Err()
		}})
	}()
	h := t.TempDir()
	write(t, filepath.Join(h, "models/x.gguf"), "x")
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	if _, err := NewClient(a).Scan(ctx, Options{Home: h, Env: map[string]string{}}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestNamesOfModels(t *testing.T) {
	m := func(id, name, quant, path string) Model {
		return Model{Model: spec.Model{ID: id, Name: name, Quant: quant}, Copies: []spec.Copy{{Path: path}}}
	}
	list := []Model{
		m("1111111111", "Smol-135M.Q4_1", "Q4_1", "/h/models--org--Smol-GGUF/snapshots/a/Smol-135M.Q4_1.gguf"),
		m("2222222222", "Smol-135M.Q8_0", "Q8_0", "/h/models--org--Smol-GGUF/snapshots/a/Smol-135M.Q8_0.gguf"),
		m("3333333333", "Qwen/big", "", "/x"),
	}
	for name, want := range map[string]string{
		"1111111111": "1111111111", "22222222": "2222222222", "smol-135m.q4_1": "1111111111", "Smol-135M:Q8_0": "2222222222",
		"org/Smol-GGUF:q4_1": "1111111111", "big": "3333333333", "qwen/big": "3333333333",
	} {
		if got, err := Resolve(name, list); err != nil || got.ID != want {
			t.Errorf("%s: %s, %v", name, got.ID, err)
		}
	}
	_, err := Resolve("Smol-135M", list)
	if f := fault.As(err); f == nil || f.Reason != fault.ModelAmbiguous || !strings.Contains(f.Fix, "Q4_1") || !strings.Contains(f.Fix, "Q8_0") {
		t.Errorf("ambiguous: %v", err)
	}
	_, err = Resolve("org/none:Q4", list)
	if f := fault.As(err); f == nil || f.Reason != fault.ModelUnknown || !strings.Contains(f.Fix, "hf download org/none --include") {
		t.Errorf("unknown: %v", err)
	}
}

func TestIDDependsOnNamesSizesAndDigestsAlone(t *testing.T) {
	f := []spec.File{{Name: "a", Size: 1, SHA256: digestOf("a")}, {Name: "b", Size: 2, SHA256: digestOf("b")}}
	r := slices.Clone(f)
	slices.Reverse(r)
	if ID(f) != ID(r) {
		t.Error("order matters")
	}
	r[0].SHA256 = digestOf("c")
	if ID(f) == ID(r) {
		t.Error("digests do not matter")
	}
}

func FuzzResolve(f *testing.F) {
	f.Add("a:b", "a", "b", "/models--x--y/z")
	f.Fuzz(func(t *testing.T, name, have, quant, path string) {
		m := Model{Model: spec.Model{ID: "id", Name: have, Quant: quant}, Copies: []spec.Copy{{Path: path}}}
		if _, err := Resolve(name, []Model{m}); err != nil && fault.As(err) == nil {
			t.Fatal(err)
		}
	})
}
