package catalogue

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"tbcluster/instance/spec"
)

// Inspect reads what a model is from its own files: a GGUF file (the first of
// split ones) or a directory with safetensors. Package plan has it.
type Inspect func(ctx context.Context, path string) (spec.Model, error)

// The trees that models are found in.
const (
	TreeHuggingFace = "huggingface"
	TreeExo         = "exo"
	TreeLMStudio    = "lmstudio"
	TreeLlamaCpp    = "llamacpp"
	TreeDir         = "dir"
)

// root is one directory to look through.
type root struct {
	tree, dir string
	named     bool // somebody named it, so it is a problem if it is not there
}

// roots lists where models of a person may be, in the order in which the same
// file found twice is counted.
func (o Options) roots() []root {
	in := func(base string, parts ...string) string { return filepath.Join(append([]string{base}, parts...)...) }
	first := func(values ...string) string {
		for _, v := range values {
			if filepath.IsAbs(v) {
				return v
			}
		}
		return ""
	}
	cache := first(o.Env["XDG_CACHE_HOME"], in(o.Home, ".cache"))
	data := first(o.Env["XDG_DATA_HOME"], in(o.Home, ".local", "share"))
	hf := o.Env["HF_HUB_CACHE"]
	if !filepath.IsAbs(hf) {
		hf = in(first(o.Env["HF_HOME"], in(cache, "huggingface")), "hub")
	}
	out := []root{{TreeHuggingFace, hf, false}}
	for _, d := range filepath.SplitList(o.Env["EXO_MODELS_DIRS"]) {
		out = append(out, root{TreeExo, d, false})
	}
	out = append(out,
		root{TreeExo, in(data, "exo", "models"), false},
		root{TreeExo, in(o.Home, ".exo", "models"), false},
		root{TreeLMStudio, in(o.Home, ".lmstudio", "models"), false},
		root{TreeLMStudio, in(cache, "lm-studio", "models"), false},
		root{TreeLlamaCpp, first(o.Env["LLAMA_CACHE"], in(cache, "llama.cpp")), false},
		root{TreeLlamaCpp, in(o.Home, "Library", "Caches", "llama.cpp"), false},
		root{TreeDir, in(cache, "tbcluster", "models"), false},
		root{TreeDir, in(o.Home, "models"), false},
	)
	for _, d := range o.Dirs {
		if d == "~" || strings.HasPrefix(d, "~/") {
			d = in(o.Home, strings.TrimPrefix(d, "~"))
		}
		out = append(out, root{TreeDir, d, true})
	}
	return out
}

// scanner walks the roots.
type scanner struct {
	inspect Inspect
	digests *digests
	entries int
	seen    map[fileID]bool // directories walked and files found
	res     Result
}

// fileID names a file or directory on this machine.
type fileID struct{ dev, ino uint64 }

func idOf(i os.FileInfo) (fileID, bool) {
	st, ok := i.Sys().(*syscall.Stat_t)
	if !ok {
		return fileID{}, false
	}
	return fileID{uint64(st.Dev), st.Ino}, true
}

// Scan finds the models that o says where to look for.
func Scan(ctx context.Context, o Options, inspect Inspect) (Result, error) {
	d, err := openDigests(o.cachePath())
	if err != nil {
		return Result{}, err
	}
	s := &scanner{inspect: inspect, digests: d, seen: map[fileID]bool{}}
	for _, r := range o.roots() {
		if err := s.root(ctx, r); err != nil {
			return Result{}, err
		}
	}
	slices.SortFunc(s.res.Models, func(a, b Found) int { return strings.Compare(a.Copy.Path, b.Copy.Path) })
	return s.res, nil
}

func (o Options) cachePath() string {
	if o.Cache != "" {
		return o.Cache
	}
	if c := o.Env["XDG_CACHE_HOME"]; filepath.IsAbs(c) {
		return filepath.Join(c, "tbcluster", "digests.json")
	}
	return filepath.Join(o.Home, ".cache", "tbcluster", "digests.json")
}

func (s *scanner) problem(path string, err error) {
	if len(s.res.Problems) < 100 {
		s.res.Problems = append(s.res.Problems, fmt.Sprintf("%s: %v", path, err))
	}
}

func (s *scanner) root(ctx context.Context, r root) error {
	if r.dir == "" {
		return nil
	}
	info, err := os.Stat(r.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !r.named:
		return nil
	case err != nil:
		s.problem(r.dir, err)
		return nil
	case !info.IsDir():
		s.files(ctx, r.tree, filepath.Dir(r.dir), []string{filepath.Base(r.dir)})
		return ctx.Err()
	}
	switch r.tree {
	case TreeHuggingFace:
		return s.huggingFace(ctx, r.dir)
	default:
		return s.walk(ctx, r.tree, r.dir, 0)
	}
}

// huggingFace looks at the snapshot that each repository's main points to, or
// at all of them where it points to none.
func (s *scanner) huggingFace(ctx context.Context, hub string) error {
	entries, err := os.ReadDir(hub)
	if err != nil {
		s.problem(hub, err)
		return nil
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "models--") {
			continue
		}
		snapshots := filepath.Join(hub, e.Name(), "snapshots")
		commit, err := os.ReadFile(filepath.Join(hub, e.Name(), "refs", "main"))
		dir := filepath.Join(snapshots, filepath.Base(strings.TrimSpace(string(commit))))
		if err != nil || len(commit) == 0 {
			dir = snapshots
		}
		if _, err := os.Stat(dir); err != nil {
			continue // refs are written last and removed first
		}
		if err := s.walk(ctx, TreeHuggingFace, dir, 0); err != nil {
			return err
		}
	}
	return nil
}

// walk looks through a directory: a model of its own, GGUF files, directories.
func (s *scanner) walk(ctx context.Context, tree, dir string, depth int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		s.problem(dir, err)
		return nil
	}
	if id, ok := idOf(info); ok {
		if s.seen[id] {
			return nil
		}
		s.seen[id] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		s.problem(dir, err)
		return nil
	}
	if s.entries += len(entries); s.entries > MaxEntries {
		s.problem(dir, fmt.Errorf("not looked at: more than %d files in all", MaxEntries))
		return nil
	}
	var ggufs, dirs []string
	hasWeights, hasConfig := false, false
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") {
			continue // hidden ones are temporary files of ours and others
		}
		mode := e.Type()
		if mode&fs.ModeSymlink != 0 {
			to, err := os.Stat(filepath.Join(dir, name))
			if err != nil {
				continue // a dangling link is seen where its model lacks the file
			}
			mode = to.Mode().Type()
		}
		switch {
		case mode.IsDir():
			dirs = append(dirs, name)
		case !mode.IsRegular():
		case strings.HasSuffix(strings.ToLower(name), ".gguf"):
			ggufs = append(ggufs, name)
		case name == "config.json":
			hasConfig = true
		case strings.HasSuffix(name, ".safetensors"), strings.HasSuffix(name, ".safetensors.index.json"):
			hasWeights = true
		}
	}
	s.files(ctx, tree, dir, ggufs)
	if hasWeights && hasConfig {
		s.add(ctx, tree, dir, nil)
		return nil
	}
	if depth >= MaxDepth {
		return nil
	}
	for _, d := range dirs {
		if err := s.walk(ctx, tree, filepath.Join(dir, d), depth+1); err != nil {
			return err
		}
	}
	return nil
}

var splitName = regexp.MustCompile(`^(.*)-(\d{5})-of-(\d{5})\.gguf$`)

// files adds the GGUF files of one directory; split ones as one model.
func (s *scanner) files(ctx context.Context, tree, dir string, names []string) {
	slices.Sort(names)
	for _, name := range names {
		if strings.HasPrefix(strings.ToLower(name), "mmproj") {
			continue // a projector is a part of another model
		}
		m := splitName.FindStringSubmatch(name)
		if m == nil {
			s.add(ctx, tree, filepath.Join(dir, name), nil)
			continue
		}
		total, err := strconv.Atoi(m[3])
		if err != nil || total < 1 || total > 9999 || m[2] != "00001" {
			continue // counted with the first part
		}
		var missing []string
		for i := 2; i <= total; i++ {
			part := fmt.Sprintf("%s-%05d-of-%s.gguf", m[1], i, m[3])
			if !slices.Contains(names, part) {
				missing = append(missing, part)
			}
		}
		s.add(ctx, tree, filepath.Join(dir, name), missing)
	}
}

// add inspects one model and adds it, once for each file on disk.
func (s *scanner) add(ctx context.Context, tree, path string, missing []string) {
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		if id, ok := idOf(info); ok {
			if s.seen[id] {
				return
			}
			s.seen[id] = true
		}
	}
	if len(s.res.Models) >= MaxModels {
		s.problem(path, fmt.Errorf("not listed: more than %d models", MaxModels))
		return
	}
	f := Found{Copy: spec.Copy{Path: path, Tree: tree, Complete: true}}
	m, err := s.inspect(ctx, path)
	if err != nil {
		if ctx.Err() != nil {
			return
		}
		f.Copy.Complete, f.Copy.Reason = false, reasonOf(err)
	}
	f.Model = m
	f.Model.Name = nameOf(tree, path)
	if len(missing) > 0 {
		f.Copy.Complete = false
		f.Copy.Reason = fmt.Sprintf("missing: %s", strings.Join(missing[:min(3, len(missing))], ", "))
	}
	dir := path
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		dir = filepath.Dir(path)
	}
	for i := range f.Model.Files {
		f.Model.Files[i].SHA256 = s.digests.known(filepath.Join(dir, f.Model.Files[i].Name))
	}
	f.Model.ID = ID(f.Model.Files)
	if len(f.Model.Files) == 0 {
		f.Model.ID = "broken:" + f.Model.Name
	}
	s.res.Models = append(s.res.Models, f)
}

// nameOf is what people write: a GGUF's stem, or org/name of a directory.
func nameOf(tree, path string) string {
	base := filepath.Base(path)
	if m := splitName.FindStringSubmatch(base); m != nil {
		return m[1]
	}
	if strings.HasSuffix(strings.ToLower(base), ".gguf") {
		return base[:len(base)-len(".gguf")]
	}
	switch tree {
	case TreeHuggingFace:
		if repo := repoOf(path); repo != "" {
			return repo
		}
	case TreeExo:
		return strings.Replace(base, "--", "/", 1)
	case TreeLMStudio:
		return filepath.Base(filepath.Dir(path)) + "/" + base
	}
	return base
}

// repoOf is the org/name of a path within a Hugging Face cache, "" elsewhere.
func repoOf(path string) string {
	for _, part := range strings.Split(path, string(filepath.Separator)) {
		if rest, ok := strings.CutPrefix(part, "models--"); ok {
			return strings.ReplaceAll(rest, "--", "/")
		}
	}
	return ""
}
