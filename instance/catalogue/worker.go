package catalogue

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
	"tbcluster/instance/spec"
)

// kind is a kind of request to a worker.
type kind string

const (
	kindScan    kind = "scan"
	kindInspect kind = "inspect"
	kindDigest  kind = "digest"
	kindCheck   kind = "check"
	kindRemove  kind = "remove"
	kindEngines kind = "engines"
)

// request is one request on a worker's control stream; Options go with each,
// since a worker keeps nothing.
type request struct {
	Kind    kind        `json:"kind"`
	Options Options     `json:"options"`
	Path    string      `json:"path,omitempty"`
	Files   []spec.File `json:"files,omitempty"`
	Dry     bool        `json:"dry,omitempty"`
	Engine  string      `json:"engine,omitempty"`
}

type response struct {
	Fault   *failure      `json:"fault,omitempty"`
	Result  Result        `json:"result"`
	Found   *Found        `json:"found,omitempty"`
	SHA256  string        `json:"sha256,omitempty"`
	Removed Removed       `json:"removed"`
	Engines []spec.Engine `json:"engines,omitempty"`
}

// failure is a fault on the control stream.
type failure struct {
	Reason fault.Reason      `json:"reason"`
	What   string            `json:"what"`
	Where  string            `json:"where"`
	Why    string            `json:"why"`
	Fix    string            `json:"fix"`
	Meta   map[string]string `json:"meta,omitempty"`
}

func failureOf(err error) *failure {
	f := fault.As(err)
	if f == nil {
		f = fault.New(fault.FileIO, "look at models", err, "make the files readable for the user who asks")
	}
	return &failure{f.Reason, f.What, f.Where, f.Why, f.Fix, f.Meta}
}

// Removed is what removing a model deleted, or would.
type Removed struct {
	Paths []string `json:"paths"`
	Bytes uint64   `json:"bytes"`
}

// WorkerOptions is what a worker process hands in.
type WorkerOptions struct {
	Inspect Inspect
	// Engines are the adapters of this program, in order of preference.
	Engines []spec.Adapter
}

// ServeWorker answers requests over control until it ends; a clean end is nil.
// It runs in a process of its own, with the identity of the person whose files
// and engines they are. It closes control.
func ServeWorker(ctx context.Context, control *frame.Conn, w WorkerOptions) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() { _ = control.Close() }() // the other side sees the end either way
	stop := context.AfterFunc(ctx, func() { _ = control.Close() })
	defer stop()
	requests := make(chan request)
	ended := make(chan error, 1)
	go func() {
		// Reading on while a request is worked on shows when nobody waits any more.
		defer cancel()
		for {
			var q request
			if err := control.Receive(&q); err != nil {
				ended <- err
				return
			}
			select {
			case requests <- q:
			case <-ctx.Done():
				ended <- ctx.Err()
				return
			}
		}
	}()
	for {
		select {
		case err := <-ended:
			if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) || errors.Is(err, os.ErrClosed) || errors.Is(err, io.ErrClosedPipe) {
				return nil
			}
			return err
		case q := <-requests:
			r, err := w.answer(ctx, q)
			if err != nil {
				r = response{Fault: failureOf(err)}
			}
			if err := control.Send(r); err != nil && ctx.Err() == nil {
				return err
			}
		}
	}
}

func (w WorkerOptions) answer(ctx context.Context, q request) (r response, err error) {
	o := q.Options.here()
	switch q.Kind {
	case kindScan:
		r.Result, err = Scan(ctx, o, w.Inspect)
	case kindInspect:
		r.Found, err = inspectOne(ctx, o, q.Path, w.Inspect)
	case kindDigest:
		var d *digests
		if d, err = openDigests(o.cachePath()); err == nil {
			r.SHA256, err = d.compute(ctx, q.Path)
		}
	case kindCheck:
		err = CheckFiles(ctx, o.cachePath(), w.Inspect, q.Path, q.Files)
	case kindRemove:
		r.Removed, err = Remove(q.Path, q.Dry)
	case kindEngines:
		for _, a := range w.Engines {
			if q.Engine == "" || a.Name() == q.Engine {
				r.Engines = append(r.Engines, a.Detect(ctx, o.Home))
			}
		}
	default:
		err = fault.Newf(fault.Protocol, "install the same version on all nodes", "there is no request %q", q.Kind)
	}
	return r, err
}

// variables are those by which other programs say where their models are.
var variables = []string{"XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "EXO_MODELS_DIRS", "LLAMA_CACHE"}

// here fills in home and environment of this process where the asking side left
// them out.
func (o Options) here() Options {
	if o.Home == "" {
		o.Home = os.Getenv("HOME")
	}
	if o.Env == nil {
		o.Env = map[string]string{}
		for _, v := range variables {
			if s := os.Getenv(v); s != "" {
				o.Env[v] = s
			}
		}
	}
	return o
}

// inspectOne looks at one path that somebody named.
func inspectOne(ctx context.Context, o Options, path string, inspect Inspect) (*Found, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fault.New(fault.FileMissing, "look at "+path, err, "name a GGUF file or a directory with a model").At(path)
	}
	d, err := openDigests(o.cachePath())
	if err != nil {
		return nil, err
	}
	s := &scanner{inspect: inspect, digests: d, seen: map[fileID]bool{}}
	if info.IsDir() {
		err = s.walk(ctx, TreeDir, path, MaxDepth)
	} else {
		s.files(ctx, TreeDir, filepath.Dir(path), siblings(path))
	}
	if err != nil {
		return nil, err
	}
	if len(s.res.Models) == 0 {
		return nil, fault.Newf(fault.ModelBroken, "name a GGUF file or a directory with config.json and *.safetensors", "there is no model in %s", path).At(path)
	}
	f := s.res.Models[0]
	if !f.Copy.Complete {
		broken := fault.Newf(fault.ModelBroken, "copy or download it anew", "%s cannot be used", path).At(path).With("path", path)
		broken.Why = f.Copy.Reason
		return nil, broken
	}
	return &f, nil
}

// siblings are the files that belong to a GGUF file: its other parts.
func siblings(path string) []string {
	base := filepath.Base(path)
	m := splitName.FindStringSubmatch(base)
	if m == nil {
		return []string{base}
	}
	parts, err := filepath.Glob(filepath.Join(filepath.Dir(path), m[1]+"-?????-of-"+m[3]+".gguf"))
	if err != nil || len(parts) == 0 {
		return []string{base}
	}
	var out []string
	for _, p := range parts {
		out = append(out, filepath.Base(p))
	}
	return out
}

// Remove deletes a model: a GGUF file with its other parts, or a directory with
// config.json; in a Hugging Face cache what a snapshot's link points to as well.
// With dry it only says what it would delete.
func Remove(path string, dry bool) (Removed, error) {
	var out Removed
	info, err := os.Stat(path)
	if err != nil {
		return out, fault.New(fault.FileMissing, "remove "+path, err, "`tbcluster models` lists what is there").At(path)
	}
	add := func(p string) error {
		i, err := os.Lstat(p)
		if err != nil {
			return err
		}
		out.Paths = append(out.Paths, p)
		if i.Mode().IsRegular() {
			out.Bytes += uint64(i.Size())
		}
		return nil
	}
	repo := repoDir(path)
	switch {
	case info.IsDir() && repo != "":
		// The snapshot is links into the repository's blobs: all of it goes.
		path = repo
		fallthrough
	case info.IsDir():
		if _, err := os.Stat(filepath.Join(path, "config.json")); err != nil && repo == "" {
			return out, fault.Newf(fault.FileEscapes, "remove it by hand if you mean it", "%s is no model's directory", path).At(path)
		}
		err = filepath.WalkDir(path, func(p string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				if i, ierr := e.Info(); ierr == nil && i.Mode().IsRegular() {
					out.Bytes += uint64(i.Size())
				}
			}
			return err
		})
		out.Paths = []string{path}
		if err == nil && !dry {
			err = os.RemoveAll(path)
		}
	default:
		for _, name := range siblings(path) {
			p := filepath.Join(filepath.Dir(path), name)
			if real, rerr := filepath.EvalSymlinks(p); rerr == nil && real != p && repo != "" && strings.HasPrefix(real, repo+string(filepath.Separator)) {
				err = errors.Join(err, add(real))
			}
			err = errors.Join(err, add(p))
		}
		if !dry {
			for _, p := range out.Paths {
				err = errors.Join(err, os.Remove(p))
			}
		}
	}
	if err != nil {
		return out, fault.New(fault.FileIO, "remove "+path, err, "remove it as its owner").At(path)
	}
	return out, nil
}

// repoDir is the directory models--org--name that path is in, "" if in none.
func repoDir(path string) string {
	for d := path; d != filepath.Dir(d); d = filepath.Dir(d) {
		if strings.HasPrefix(filepath.Base(d), "models--") {
			return d
		}
	}
	return ""
}

// Client is the agent's side of a worker. Its calls take turns.
type Client struct {
	mu sync.Mutex
	c  *frame.Conn
}

// NewClient returns a client over a worker's control stream, which it owns.
func NewClient(rw io.ReadWriteCloser) *Client { return &Client{c: frame.New(rw)} }

// Close ends the worker.
func (c *Client) Close() error { return c.c.Close() }

func (c *Client) do(ctx context.Context, q request) (response, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var r response
	if err := ctx.Err(); err != nil {
		return r, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.c.Close() }) // ends the worker and what it does
	defer stop()
	err := c.c.Send(q)
	if err == nil {
		err = c.c.Receive(&r)
	}
	if err != nil {
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		return r, fault.New(fault.Internal, "ask a worker", err, "try again; `tbcluster logs --agent` may say why it ended")
	}
	if f := r.Fault; f != nil {
		return r, &fault.Fault{Reason: f.Reason, What: f.What, Where: f.Where, Why: f.Why, Fix: f.Fix, Meta: f.Meta}
	}
	return r, nil
}

// Scan finds models.
func (c *Client) Scan(ctx context.Context, o Options) (Result, error) {
	r, err := c.do(ctx, request{Kind: kindScan, Options: o})
	return r.Result, err
}

// Inspect looks at one path.
func (c *Client) Inspect(ctx context.Context, o Options, path string) (Found, error) {
	r, err := c.do(ctx, request{Kind: kindInspect, Options: o, Path: path})
	if err == nil && r.Found == nil {
		err = fault.Newf(fault.Protocol, "", "the worker said nothing of %s", path)
	}
	if err != nil {
		return Found{}, err
	}
	return *r.Found, nil
}

// Digest computes and remembers the SHA-256 of a file.
func (c *Client) Digest(ctx context.Context, o Options, path string) (string, error) {
	r, err := c.do(ctx, request{Kind: kindDigest, Options: o, Path: path})
	return r.SHA256, err
}

// Check compares a model's files with what is expected.
func (c *Client) Check(ctx context.Context, o Options, path string, files []spec.File) error {
	_, err := c.do(ctx, request{Kind: kindCheck, Options: o, Path: path, Files: files})
	return err
}

// Remove deletes a model.
func (c *Client) Remove(ctx context.Context, path string, dry bool) (Removed, error) {
	r, err := c.do(ctx, request{Kind: kindRemove, Path: path, Dry: dry})
	return r.Removed, err
}

// Engines looks for engines as the worker's user would find them; one by name,
// or all.
func (c *Client) Engines(ctx context.Context, o Options, name string) ([]spec.Engine, error) {
	r, err := c.do(ctx, request{Kind: kindEngines, Options: o, Engine: name})
	if err == nil && name != "" && len(r.Engines) != 1 {
		err = fault.Newf(fault.EngineMissing, "this version knows llamacpp", "there is no engine %q", name)
	}
	return r.Engines, err
}
