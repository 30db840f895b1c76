package image

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"tbcluster/api/fault"
)

//go:embed module
var moduleSources embed.FS

// Modules returns the directory with our test modules for a kernel: tbring.ko
// (raw traffic over rings) and rigfault.ko (commits faults on purpose). Their
// sources say how they are used.
func (s *Store) Modules(ctx context.Context, k Kernel) (string, error) {
	t, tree, err := s.treeOf(ctx, k)
	if err != nil {
		return "", err
	}
	sources := map[string][]byte{}
	recipe := []string{"1", t.key, tree.key, tree.release}
	err = fs.WalkDir(moduleSources, "module", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := moduleSources.ReadFile(name)
		sources[d.Name()] = b
		recipe = append(recipe, d.Name(), string(b))
		return err
	})
	if err != nil {
		return "", err
	}
	return s.ensure(ctx, part{
		name: "modules-" + string(k), about: "our test modules for " + tree.release + ", seconds", recipe: recipe, need: 100 << 20,
		build: func(ctx context.Context, dir string) error {
			return buildModules(ctx, t, tree, dir, func(string) (map[string][]byte, error) { return sources, nil })
		},
	})
}

// DMATest returns the file of the kernel's own DMA traffic test, dma_test.ko,
// which Debian does not build. Its source is that of the same kernel; fetching
// it takes a download of 160 MB and half a minute.
func (s *Store) DMATest(ctx context.Context, k Kernel) (string, error) {
	t, tree, err := s.treeOf(ctx, k)
	if err != nil {
		return "", err
	}
	if k == Debug { // it has it
		return filepath.Join(tree.modules, "lib/modules", tree.release, "kernel/drivers/thunderbolt/dma_test.ko"), nil
	}
	dir, err := s.ensure(ctx, part{
		name: "dmatest-" + string(k), about: "the DMA test of " + tree.release + ": half a minute", need: 1 << 30,
		recipe: []string{"1", t.key, tree.release},
		build: func(ctx context.Context, dir string) error {
			return buildModules(ctx, t, tree, dir, func(workspace string) (map[string][]byte, error) {
				source, err := s.source(ctx, t, tree.release, workspace, "*/drivers/thunderbolt/dma_test.c")
				if err != nil {
					return nil, err
				}
				b, err := os.ReadFile(filepath.Join(source, "drivers/thunderbolt/dma_test.c"))
				return map[string][]byte{"Kbuild": []byte("obj-m += dma_test.o\n"), "dma_test.c": b}, err
			})
		},
	})
	return filepath.Join(dir, "dma_test.ko"), err
}

func (s *Store) treeOf(ctx context.Context, k Kernel) (*Tools, kernelTree, error) {
	t, err := s.Tools(ctx)
	if err != nil {
		return nil, kernelTree{}, err
	}
	tree, err := s.kernelTree(ctx, t, k)
	return t, tree, err
}

// buildModules builds modules of ours and leaves the .ko files in dir. sources is
// told a directory for whatever it has to fetch.
func buildModules(ctx context.Context, t *Tools, tree kernelTree, dir string, sources func(workspace string) (map[string][]byte, error)) error {
	err := compile(ctx, t, tree, func(work, fetched string) error {
		files, err := sources(fetched)
		if err != nil {
			return err
		}
		for name, b := range files {
			if err := os.WriteFile(filepath.Join(work, name), b, 0o644); err != nil {
				return err
			}
		}
		return nil
	}, func(name, built string) error { return copyFile(filepath.Join(dir, filepath.Base(name)), built) })
	var failed *makeError
	if errors.As(err, &failed) {
		return fault.New(fault.Unsupported, "build modules for "+tree.release, failed.command, "the kernel's interface has changed: their sources have to follow")
	}
	return err
}

// BuildModules builds the modules of a directory of the machine, which has a Kbuild
// or a Makefile as the kernel's documentation describes it (kbuild/modules), for a
// kernel of the guests, and leaves the .ko files where make would. It returns them.
func (s *Store) BuildModules(ctx context.Context, k Kernel, dir string) (built []string, release string, err error) {
	what := "build the modules of a directory"
	st, err := os.Stat(dir)
	if err != nil {
		return nil, "", fault.New(fault.FileMissing, what, err, "name the directory with the Kbuild").At(dir)
	}
	if !isFile(filepath.Join(dir, "Kbuild")) && !isFile(filepath.Join(dir, "Makefile")) {
		return nil, "", &fault.Fault{Reason: fault.FileMissing, What: what, Where: dir, Why: "it has no Kbuild and no Makefile", Fix: `a Kbuild for mine.c is the line "obj-m += mine.o"`}
	}
	t, tree, err := s.treeOf(ctx, k)
	if err != nil {
		return nil, "", err
	}
	err = compile(ctx, t, tree, func(work, _ string) error {
		if err := copySources(work, dir); err != nil {
			return fault.New(fault.FileIO, what, err, "").At(dir)
		}
		return nil
	}, func(name, ko string) error {
		to := filepath.Join(dir, name)
		err := copyFile(to, ko)
		if owner, ok := st.Sys().(*syscall.Stat_t); ok && err == nil && os.Geteuid() == 0 {
			err = os.Chown(to, int(owner.Uid), int(owner.Gid)) // sudo
		}
		if err != nil {
			return fault.New(fault.FileIO, what, err, "").At(to)
		}
		built = append(built, to)
		return nil
	})
	var failed *makeError
	if errors.As(err, &failed) {
		return nil, "", &fault.Fault{Reason: fault.LabFailed, What: what + " for " + tree.release, Where: dir, Why: failed.said(dir), Err: err}
	}
	return built, tree.release, err
}

// copySources copies a directory without what an earlier build has left, and
// without hidden files.
func copySources(to, from string) error {
	return filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, name)
		switch {
		case err != nil:
			return err
		case rel == ".":
			return nil
		case strings.HasPrefix(d.Name(), "."):
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			return os.Mkdir(filepath.Join(to, rel), 0o755)
		case slices.Contains([]string{".o", ".ko", ".mod", ".cmd"}, filepath.Ext(rel)), strings.HasSuffix(rel, ".mod.c"):
			return nil
		}
		st, err := os.Stat(name) // what a link leads to
		if err != nil || !st.Mode().IsRegular() {
			return err
		}
		return copyFile(filepath.Join(to, rel), name)
	})
}

// makeError is a make that failed.
type makeError struct {
	command *commandError
	work    string // the directory of the sources, as make saw it
}

func (e *makeError) Error() string { return e.command.Error() }

func (e *makeError) Unwrap() error { return e.command }

// saidLines is how much of what a compiler said is shown: the first is what
// matters.
const saidLines = 60

// said is what make and the compiler said, with the sources in dir.
func (e *makeError) said(dir string) string {
	lines := strings.Split(strings.TrimSpace(strings.ReplaceAll(e.command.all, e.work, filepath.Clean(dir))), "\n")
	if len(lines) > saidLines {
		lines = append(lines[:saidLines], "…")
	}
	return strings.Join(lines, "\n")
}

// compile builds modules in the chroot, where the compilers are, and the headers
// that name each other by their paths in there. fill puts the sources into work,
// and may use another directory for whatever it has to fetch. take gets each module,
// by its name relative to work and as a file.
func compile(ctx context.Context, t *Tools, tree kernelTree, fill func(work, fetched string) error, take func(name, file string) error) error {
	if err := needs("build kernel modules"); err != nil {
		return err
	}
	return t.inWorkspace(func(inside, outside string) error {
		fetched, work := filepath.Join(outside, "fetched"), filepath.Join(outside, "work")
		for _, dir := range []string{fetched, work} {
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
		}
		if err := fill(work, fetched); err != nil {
			return err
		}
		headers := tree.headers
		if tree.build != "" {
			headers = filepath.Join(inside, "build")
			if _, err := run(ctx, exec.CommandContext(ctx, "cp", "-a", tree.build, filepath.Join(outside, "build"))); err != nil {
				return err
			}
		}
		seen := filepath.Join(inside, "work")
		if _, err := run(ctx, t.Chroot(ctx, "/", "/usr/bin/make", "-s", "-C", headers, "M="+seen, "modules")); err != nil {
			var failed *commandError
			if errors.As(err, &failed) {
				return &makeError{failed, seen}
			}
			return err
		}
		built := 0
		err := filepath.WalkDir(work, func(ko string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(ko) != ".ko" {
				return err
			}
			built++
			name, err := filepath.Rel(work, ko)
			if err != nil {
				return err
			}
			// Debian's kernels have debugging information, and so do modules
			// built for them: tens of times their own size.
			if _, err := run(ctx, t.Command(ctx, "/usr/bin/strip", "--strip-debug", ko)); err != nil {
				return fmt.Errorf("strip %s: %w", strings.TrimSuffix(name, ".ko"), err)
			}
			return take(name, ko)
		})
		if err == nil && built == 0 {
			err = fault.Newf(fault.LabFailed, `the Kbuild names them: "obj-m += mine.o"`, "make built no module")
		}
		return err
	})
}
