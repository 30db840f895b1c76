package image

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"tbcluster/api/fault"
)

//go:embed debug.config
var debugConfig string

// debugKernel builds the debug kernel, from the sources of Backport, inside the
// chroot: some seven minutes of two processors.
func (s *Store) debugKernel(ctx context.Context, t *Tools) (kernelTree, error) {
	stock, err := s.kernelTree(ctx, t, Backport)
	if err != nil {
		return kernelTree{}, err
	}
	p := part{
		name: "kernel-debug", about: "kernel " + stock.release + " with KASAN, lockdep and the like: about ten minutes", need: 6 << 30,
		// Not the chroot: it costs too much to be built anew for another tool there.
		recipe: []string{"3", stock.release, debugConfig},
		build:  func(ctx context.Context, dir string) error { return s.buildDebugKernel(ctx, t, stock.release, dir) },
	}
	dir, err := s.ensure(ctx, p)
	if err != nil {
		return kernelTree{}, err
	}
	b, err := os.ReadFile(filepath.Join(dir, "release"))
	if err != nil {
		return kernelTree{}, fault.New(fault.FileIO, "read what kernel was built", err, "remove that directory: it is built anew").At(dir)
	}
	return kernelTree{
		key: p.key(), release: strings.TrimSpace(string(b)), image: filepath.Join(dir, "vmlinuz"), modules: dir,
		build: filepath.Join(dir, "build"),
	}, nil
}

func (s *Store) buildDebugKernel(ctx context.Context, t *Tools, release, dir string) error {
	if err := needs("build the debug kernel"); err != nil {
		return err
	}
	return t.inWorkspace(func(inside, outside string) error {
		source, err := s.source(ctx, t, release, outside)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(source, "kernel/configs/rig.config"), []byte(debugConfig), 0o644); err != nil {
			return err
		}
		at := filepath.Join(inside, filepath.Base(source))
		out := filepath.Join(inside, "out")
		steps := [][]string{
			{"make", "-s", "tinyconfig", "rig.config"},
			{"nice", "-n", "19", "make", "-s", fmt.Sprintf("-j%d", runtime.NumCPU()), "bzImage", "modules"},
			{"make", "-s", "modules_install", "INSTALL_MOD_PATH=" + out, "INSTALL_MOD_STRIP=1"},
			{"make", "-s", "run-command", "KBUILD_RUN_COMMAND=$(srctree)/scripts/package/install-extmod-build " + out + "/build"},
			{"sh", "-ec", "make -s kernelrelease >" + out + "/release; cp arch/x86/boot/bzImage " + out + "/vmlinuz; cp .config " + out + "/config"},
		}
		for i, step := range steps {
			s.log("kernel-debug: " + strings.Join(step, " "))
			if _, err := run(ctx, t.Chroot(ctx, at, "/usr/bin/env", step...)); err != nil {
				return err
			}
			if i > 0 {
				continue
			}
			if err := checkConfig(filepath.Join(source, ".config"), debugConfig); err != nil {
				return err
			}
		}
		_, err = run(ctx, exec.CommandContext(ctx, "cp", "-a", filepath.Join(outside, "out")+"/.", dir))
		return err
	})
}

// checkConfig sees that a kernel's configuration has all that was wanted.
func checkConfig(file, wanted string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	has := map[string]bool{}
	values := map[string]string{}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		has[line] = true
		if name, value, ok := strings.Cut(line, "="); ok {
			values[name] = value
		}
	}
	var gone []string
	for line := range strings.Lines(wanted) {
		line = strings.TrimSpace(line)
		name, off := strings.CutSuffix(strings.TrimPrefix(line, "# "), " is not set")
		switch {
		case strings.HasPrefix(line, "CONFIG_") && !has[line]:
			gone = append(gone, line)
		case off && strings.HasPrefix(line, "# CONFIG_") && values[name] != "":
			gone = append(gone, line)
		}
	}
	if len(gone) > 0 {
		return fmt.Errorf("the kernel's configuration does not become what it should: %s", strings.Join(gone, ", "))
	}
	return nil
}
