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
	"strings"

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

// buildModules builds modules in the chroot, where the compilers are, and leaves
// the .ko files in dir. sources is told a directory for whatever it has to
// fetch.
func buildModules(ctx context.Context, t *Tools, tree kernelTree, dir string, sources func(workspace string) (map[string][]byte, error)) error {
	if err := needs("build kernel modules"); err != nil {
		return err
	}
	return t.inWorkspace(func(inside, outside string) error {
		fetched := filepath.Join(outside, "fetched")
		if err := os.Mkdir(fetched, 0o755); err != nil {
			return err
		}
		files, err := sources(fetched)
		if err != nil {
			return err
		}
		work := filepath.Join(outside, "work")
		if err := os.Mkdir(work, 0o755); err != nil {
			return err
		}
		for name, b := range files {
			if err := os.WriteFile(filepath.Join(work, name), b, 0o644); err != nil {
				return err
			}
		}
		headers := tree.headers
		if tree.build != "" {
			headers = filepath.Join(inside, "build")
			if _, err := run(ctx, exec.CommandContext(ctx, "cp", "-a", tree.build, filepath.Join(outside, "build"))); err != nil {
				return err
			}
		}
		if _, err := run(ctx, t.Chroot(ctx, "/", "/usr/bin/make", "-s", "-C", headers, "M="+filepath.Join(inside, "work"), "modules")); err != nil {
			return fault.New(fault.Unsupported, "build modules for "+tree.release, err, "the kernel's interface has changed: their sources have to follow")
		}
		built, err := filepath.Glob(filepath.Join(work, "*.ko"))
		if err != nil {
			return err
		}
		if len(built) == 0 {
			return errors.New("make built no module")
		}
		for _, ko := range built {
			if err := copyFile(filepath.Join(dir, filepath.Base(ko)), ko); err != nil {
				return err
			}
			// Debian's kernels have debugging information, and so do modules
			// built for them: tens of times their own size.
			if _, err := run(ctx, t.Command(ctx, "/usr/bin/strip", "--strip-debug", filepath.Join(dir, filepath.Base(ko)))); err != nil {
				return fmt.Errorf("strip %s: %w", strings.TrimSuffix(filepath.Base(ko), ".ko"), err)
			}
		}
		return nil
	})
}
