package transfer

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"testing"

	"tbcluster/host/frame"
	"tbcluster/transfer/manifest"
)

// FuzzForgedManifest gives a destination what a lying source might have sent:
// whatever it makes of it, nothing appears outside of the directory that was
// named.
func FuzzForgedManifest(f *testing.F) {
	add := func(roots []manifest.Root, entries ...manifest.Entry) {
		r, err := json.Marshal(roots)
		must(f, err)
		e, err := json.Marshal(entriesNote{entries})
		must(f, err)
		f.Add(r, e)
	}
	id := make([]byte, 32)
	dir := []manifest.Root{{Name: []byte("d"), Dir: true}}
	add(dir, manifest.Entry{Kind: manifest.Dir, Mode: 0o755}, manifest.Entry{Index: 1, Path: []byte("a"), Kind: manifest.File, Identity: id},
		manifest.Entry{Index: 2, Path: []byte("b"), Kind: manifest.Symlink, Target: []byte("a")}, manifest.Entry{Index: 3, Path: []byte("c"), Kind: manifest.Hardlink, Link: 1})
	add(dir, manifest.Entry{Path: []byte("../../x"), Kind: manifest.Dir})
	add([]manifest.Root{{Name: []byte(".."), Dir: true}}, manifest.Entry{Kind: manifest.Dir})
	add([]manifest.Root{{Contents: true, Dir: true}}, manifest.Entry{Kind: manifest.File, Identity: id})
	add([]manifest.Root{{Name: []byte("f")}}, manifest.Entry{Kind: manifest.Symlink, Target: []byte("../x")})
	add(dir, manifest.Entry{Path: []byte("l"), Kind: manifest.Symlink, Target: []byte("x")}, manifest.Entry{Index: 1, Path: []byte("l/y"), Kind: manifest.File, Identity: id})
	f.Fuzz(func(t *testing.T, rootsJSON, entriesJSON []byte) {
		var roots []manifest.Root
		if json.Unmarshal(rootsJSON, &roots) != nil || len(roots) > 10 {
			return
		}
		note, err := decode[entriesNote](entriesJSON)
		if err != nil || len(note.Entries) > 100 {
			return
		}
		top := t.TempDir()
		base := filepath.Join(top, "in", "base")
		must(t, os.MkdirAll(filepath.Dir(base), 0o755))
		mine, theirs := net.Pipe()
		w := &worker{ctl: newControl(frame.New(mine)), hello: helloIn{Version: protocolVersion, Session: 1, NodeName: "beta"}}
		read := make(chan struct{})
		go func() { // what the worker says is of no interest
			defer close(read)
			buf := make([]byte, 4096)
			for {
				if _, err := theirs.Read(buf); err != nil {
					return
				}
			}
		}()
		must(t, w.destination().add(note.Entries))
		in, err := json.Marshal(prepareIn{Place: place{Path: []byte(base + "/")}, Roots: roots, Here: make([]bool, len(roots))})
		must(t, err)
		if _, err := w.prepare(context.Background(), in); err == nil {
			if _, err := w.decide(context.Background(), json.RawMessage(`{}`)); err == nil {
				w.destination().lander.drain()
				for i, r := range w.destination().files { // what never came
					if r != nil && !r.settled() {
						must(t, w.destination().dropFiles([]int{i}))
					}
				}
				_, _ = w.complete(context.Background(), nil) // faults are welcome
			}
		}
		w.closeSides()
		must(t, mine.Close())
		<-read
		for dir, only := range map[string]string{top: "in", filepath.Dir(base): "base"} {
			list, err := os.ReadDir(dir)
			must(t, err)
			for _, e := range list {
				if e.Name() != only {
					t.Fatalf("%s appeared in %s", e.Name(), dir)
				}
			}
		}
		// Modes may have closed directories; let the clean-up in.
		_ = filepath.WalkDir(base, func(p string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				return os.Chmod(p, 0o755)
			}
			return nil
		})
	})
}
