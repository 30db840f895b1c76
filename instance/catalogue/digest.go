package catalogue

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// digests remembers the SHA-256 of files by path, size, time and inode.
type digests struct {
	path string
	mu   sync.Mutex
	have map[string]digest
}

type digest struct {
	Size   int64  `json:"size"`
	MTime  int64  `json:"mtime_ns"`
	Inode  uint64 `json:"inode"`
	SHA256 string `json:"sha256"`
}

type digestFile struct {
	Schema  int               `json:"schema"`
	Digests map[string]digest `json:"digests"`
}

const digestSchema = 1

// openDigests reads the memory; one that cannot be read is begun anew, since
// everything in it can be computed again.
func openDigests(path string) (*digests, error) {
	d := &digests{path: path, have: map[string]digest{}}
	data, err := os.ReadFile(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return d, nil
		}
		return nil, err
	}
	var f digestFile
	if json.Unmarshal(data, &f) == nil && f.Schema == digestSchema && f.Digests != nil {
		d.have = f.Digests
	}
	return d, nil
}

// blobName matches the name of a large file's blob in a Hugging Face cache,
// which is its SHA-256.
var blobName = regexp.MustCompile(`^[0-9a-f]{64}$`)

// known returns the SHA-256 of a file if it is known without reading it.
func (d *digests) known(path string) string {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	if blobName.MatchString(filepath.Base(real)) && filepath.Base(filepath.Dir(real)) == "blobs" && repoOf(real) != "" {
		return filepath.Base(real)
	}
	info, err := os.Stat(real)
	if err != nil {
		return ""
	}
	id, _ := idOf(info)
	d.mu.Lock()
	defer d.mu.Unlock()
	h, ok := d.have[real]
	if !ok || h.Size != info.Size() || h.MTime != info.ModTime().UnixNano() || h.Inode != id.ino {
		return ""
	}
	return h.SHA256
}

// compute reads a file and remembers its SHA-256.
func (d *digests) compute(ctx context.Context, path string) (string, error) {
	if s := d.known(path); s != "" {
		return s, nil
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	f, err := os.Open(real)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read from
	before, err := f.Stat()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", err
		}
	}
	after, err := os.Stat(real)
	if err != nil {
		return "", err
	}
	a, _ := idOf(before)
	b, _ := idOf(after)
	if a != b || before.Size() != after.Size() || !before.ModTime().Equal(after.ModTime()) {
		return "", fmt.Errorf("%s changed while it was read", path)
	}
	s := hex.EncodeToString(h.Sum(nil))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.have[real] = digest{after.Size(), after.ModTime().UnixNano(), b.ino, s}
	return s, d.save()
}

// save writes the memory without what is gone; mu is held.
func (d *digests) save() error {
	maps.DeleteFunc(d.have, func(p string, _ digest) bool {
		_, err := os.Stat(p)
		return errors.Is(err, fs.ErrNotExist)
	})
	if err := os.MkdirAll(filepath.Dir(d.path), 0o755); err != nil {
		return err
	}
	data, err := json.Marshal(digestFile{digestSchema, d.have})
	if err != nil {
		return err
	}
	return renameio.WriteFile(d.path, data, 0o600)
}

// ID returns the ID of a model with these files: the SHA-256 over their sorted
// (name, size, digest), hex. While a digest is not known it begins with "size:"
// and is over names and sizes alone.
func ID(files []spec.File) string {
	lines := make([]string, 0, len(files))
	all := true
	for _, f := range files {
		all = all && f.SHA256 != ""
	}
	for _, f := range files {
		line := fmt.Sprintf("%q %d", f.Name, f.Size)
		if all {
			line += " " + f.SHA256
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	id := hex.EncodeToString(sum[:])
	if !all {
		return "size:" + id
	}
	return id
}

// CheckFiles compares files, relative to the directory of path (path itself
// where that is a directory), with sizes and, where they are given, digests; and
// looks by inspect whether the model is whole by its own headers. It returns a
// fault of reason ModelIncomplete or ModelBroken that names the file.
func CheckFiles(ctx context.Context, cache string, inspect Inspect, path string, files []spec.File) error {
	d, err := openDigests(cache)
	if err != nil {
		return err
	}
	broken := func(p, format string, args ...any) error {
		return fault.New(fault.ModelBroken, "the model file "+p+" cannot be used", fmt.Errorf(format, args...), "copy or download the model again").With("path", p)
	}
	missing := func(p string, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return fault.New(fault.ModelIncomplete, "the model file "+p+" is missing", errors.New("no such file"), "copy or download the model again").With("path", p)
		}
		return fault.New(fault.FileIO, "look at "+p, err, "make it readable for the user who asks").With("path", p)
	}
	dir := path
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return missing(path, err)
	case !info.IsDir():
		dir = filepath.Dir(path)
	}
	for _, f := range files {
		if !filepath.IsLocal(f.Name) {
			return fault.Newf(fault.FileEscapes, "", "%q leads out of the model's directory", f.Name)
		}
		p := filepath.Join(dir, f.Name)
		info, err := os.Stat(p)
		if err != nil {
			return missing(p, err)
		}
		switch size := uint64(info.Size()); {
		case size < f.Size:
			return broken(p, "it is truncated: %d bytes of %d are missing", f.Size-size, f.Size)
		case size > f.Size:
			return broken(p, "it has %d bytes and should have %d", size, f.Size)
		case f.SHA256 == "":
			continue
		}
		got, err := d.compute(ctx, p)
		if err != nil {
			return missing(p, err)
		}
		if got != f.SHA256 {
			return broken(p, "its contents are others than on the other nodes (SHA-256 %.12s… instead of %.12s…)", got, f.SHA256)
		}
	}
	_, err = inspect(ctx, path)
	return err
}

func reasonOf(err error) string {
	if f := fault.As(err); f != nil {
		return f.Error()
	}
	return err.Error()
}
