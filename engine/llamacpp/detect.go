package llamacpp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tbcluster/host/proc"
	"tbcluster/instance/spec"
)

// SystemDir is where an administrator puts the engine for all users.
const SystemDir = "/opt/tbcluster/engines/llamacpp"

// UserDir is where Install puts the engine for the user with that home.
func UserDir(home string) string { return filepath.Join(cacheDir(home), "engines", Name) }

// ModelDir is where InstallModel puts the small model for that user.
func ModelDir(home string) string { return filepath.Join(cacheDir(home), "models") }

func cacheDir(home string) string {
	if x := os.Getenv("XDG_CACHE_HOME"); filepath.IsAbs(x) && home == os.Getenv("HOME") {
		return filepath.Join(x, "tbcluster")
	}
	return filepath.Join(home, ".cache", "tbcluster")
}

// Programs are the names of the files that a rank may be, and Variables what its
// environment may hold: no others set what code is loaded.
var (
	Programs  = append([]string{serverName}, rpcNames...)
	Variables = []string{quietAbort, keyVariable}
)

const (
	serverName = "llama-server"
	// quietAbort keeps gdb from running when it aborts.
	quietAbort = "GGML_NO_BACKTRACE"
)

// rpcNames are the names of the RPC server, the present one first.
var rpcNames = []string{"ggml-rpc-server", "rpc-server"}

// probeFor bounds each run of a program that is looked at.
const probeFor = 10 * time.Second

// places lists directories to look in: what the user has installed comes
// before what we did.
func (a *Adapter) places(home string) []string {
	out := filepath.SplitList(os.Getenv("PATH"))
	if home != "" {
		out = append(out, filepath.Join(home, ".local/bin"), filepath.Join(home, "llama.cpp/build/bin"))
	}
	out = append(out, "/usr/local/bin", "/opt/homebrew/bin", "/home/linuxbrew/.linuxbrew/bin", "/usr/bin")
	dirs := append(slices.Clone(a.opts.Dirs), SystemDir)
	if home != "" {
		dirs = append(dirs, UserDir(home))
	}
	for _, d := range dirs {
		out = append(out, d, filepath.Join(d, "bin"), filepath.Join(d, Name, "bin"))
	}
	return out
}

// Detect looks for llama-server, and the RPC server beside it. Where the first
// one found does not run, the reason says why and the search goes on.
func (a *Adapter) Detect(ctx context.Context, home string) spec.Engine {
	e := spec.Engine{Name: Name}
	var seen, broken []string
	for _, dir := range a.places(home) {
		if !filepath.IsAbs(dir) || slices.Contains(seen, dir) {
			continue
		}
		seen = append(seen, dir)
		server := filepath.Join(dir, serverName)
		if !executable(server) {
			continue
		}
		found, err := a.inspect(ctx, server, home)
		if err != nil {
			broken = append(broken, err.Error())
			continue
		}
		return found
	}
	e.Reason = "llama-server was not found in PATH nor in our engine directories; `tbcluster engine install llamacpp` installs it"
	if len(broken) > 0 {
		e.Reason = strings.Join(broken, "; ") + "; `tbcluster engine install llamacpp` installs one that may work"
	}
	return e
}

func executable(name string) bool {
	st, err := os.Stat(name)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

// builds remembers what was learnt of a build, by its files.
type builds struct {
	mu   sync.Mutex
	seen map[string]spec.Engine
}

func (a *Adapter) inspect(ctx context.Context, server, home string) (spec.Engine, error) {
	// It is run here already, to see what it is.
	real, err := trusted(server)
	if err != nil {
		return spec.Engine{}, err
	}
	rpc := ""
	for _, dir := range []string{filepath.Dir(server), filepath.Dir(real)} {
		for _, n := range rpcNames {
			if p := filepath.Join(dir, n); rpc == "" && executable(p) {
				if _, err := trusted(p); err != nil {
					return spec.Engine{}, err
				}
				rpc = p
			}
		}
	}
	files := buildFiles(real, rpc)
	key := server + "\n" + stamp(files)
	a.builds.mu.Lock()
	e, ok := a.builds.seen[key]
	a.builds.mu.Unlock()
	if ok {
		return e, nil
	}
	e, err = probe(ctx, server, rpc, files, home)
	if err != nil {
		return spec.Engine{}, err
	}
	a.builds.mu.Lock()
	defer a.builds.mu.Unlock()
	a.builds.seen = map[string]spec.Engine{key: e} // one build at a time is enough
	return e, nil
}

// trusted returns the real path of a program that nobody but root and this user
// could have put there.
func trusted(program string) (string, error) {
	real, err := proc.TrustedProgram(program, uint32(os.Getuid()), uint32(os.Getgid()))
	if err != nil {
		return "", fmt.Errorf("%s is left alone, since somebody else could have put it there (%w)", program, err)
	}
	return real, nil
}

func probe(ctx context.Context, server, rpc string, files []string, home string) (spec.Engine, error) {
	out, err := output(ctx, server, "--version")
	if err != nil {
		return spec.Engine{}, fmt.Errorf("%s does not run: %s", server, whyNot(out, err))
	}
	e := spec.Engine{Name: Name, Available: true, Path: server, Programs: map[string]string{RoleServer: server}}
	if e.Version = parseVersion(out); e.Version == "" || e.Version[0] != 'b' {
		sum, err := knownDigest(home, files)
		if err != nil {
			return spec.Engine{}, err
		}
		// The version tells nothing that could be compared: the files do.
		e.Version = strings.TrimSpace(e.Version + " sha256:" + sum[:16])
	}
	if rpc != "" {
		e.Programs[RoleRPC] = rpc
	}
	if help, err := output(ctx, server, "--help"); err == nil {
		e.Features = parseFeatures(help)
	}
	if list, err := output(ctx, server, "--list-devices"); err == nil {
		e.Devices = parseDevices(list)
	}
	return e, nil
}

// output runs a program with nothing in its environment that could change what
// it says.
func output(ctx context.Context, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeFor)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + os.Getenv("HOME"), "GGML_NO_BACKTRACE=1"}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

var missingLibrary = regexp.MustCompile(`error while loading shared libraries: (\S+):`)

// whyNot says in words why a program did not run, with what to do where known.
func whyNot(out string, err error) string {
	if m := missingLibrary.FindStringSubmatch(out); m != nil {
		why := m[1] + " is missing"
		if m[1] == "libgomp.so.1" {
			why += " (Debian, Ubuntu: `apt-get install libgomp1`; Fedora: `dnf install libgomp`)"
		}
		return why
	}
	if strings.Contains(err.Error(), "illegal instruction") {
		return "this processor lacks instructions that it uses"
	}
	if line, _, _ := strings.Cut(strings.TrimSpace(out), "\n"); line != "" {
		return line + " (" + err.Error() + ")"
	}
	return err.Error()
}

var versionLine = regexp.MustCompile(`(?m)^version: (\d+) \((\w+)\)`)

// leastBuild is below any build number of llama.cpp since it has RPC; builds
// outside its repository call themselves 0 or 1.
const leastBuild = 1000

// parseVersion returns "b6789 (abc1234)" where the build is known, "1 (571d0d5)"
// where it only has a version, "" where it says nothing.
func parseVersion(out string) string {
	m := versionLine.FindStringSubmatch(out)
	if m == nil {
		return ""
	}
	if n, err := strconv.Atoi(m[1]); err == nil && n >= leastBuild && m[2] != "unknown" {
		return fmt.Sprintf("b%d (%s)", n, m[2])
	}
	return fmt.Sprintf("%s (%s)", m[1], m[2])
}

func parseFeatures(help string) []string {
	var out []string
	for _, f := range []struct{ option, feature string }{{"--kv-unified", featureUnifiedKV}, {"--fit ", featureFit}} {
		if strings.Contains(help, f.option) {
			out = append(out, f.feature)
		}
	}
	return out
}

var deviceLine = regexp.MustCompile(`^\s+([A-Za-z]+\d+): `)

// parseDevices reads the list under "Available devices:".
func parseDevices(out string) []string {
	var names []string
	_, list, ok := strings.Cut(out, "Available devices:")
	if !ok {
		return nil
	}
	s := bufio.NewScanner(strings.NewReader(list))
	for s.Scan() {
		if m := deviceLine.FindStringSubmatch(s.Text()); m != nil && !strings.HasPrefix(m[1], "RPC") {
			names = append(names, m[1])
		}
	}
	return names
}

// buildFiles are the files that make up a build: the programs and the shared
// libraries of ggml and llama beside them.
func buildFiles(server, rpc string) []string {
	files := []string{server}
	if rpc != "" {
		files = append(files, rpc)
	}
	dir := filepath.Dir(server)
	for _, where := range []string{dir, filepath.Join(dir, "../lib")} {
		for _, pattern := range []string{"libggml*", "libllama*"} {
			found, err := filepath.Glob(filepath.Join(where, pattern))
			if err == nil {
				files = append(files, found...)
			}
		}
	}
	slices.Sort(files)
	return slices.Compact(files)
}

func stamp(files []string) string {
	var b bytes.Buffer
	for _, f := range files {
		if st, err := os.Stat(f); err == nil {
			fmt.Fprintf(&b, "%s %d %d\n", f, st.Size(), st.ModTime().UnixNano())
		}
	}
	return b.String()
}

// knownDigest is digest, remembered in the user's cache: each worker is a new
// process, and reading a build takes long on a slow disk.
func knownDigest(home string, files []string) (string, error) {
	if home == "" {
		return digest(files)
	}
	file := filepath.Join(cacheDir(home), "build.sha256")
	state := sha256.Sum256([]byte(stamp(files)))
	prefix := hex.EncodeToString(state[:]) + " "
	if b, err := os.ReadFile(file); err == nil {
		if sum, ok := strings.CutPrefix(strings.TrimSpace(string(b)), prefix); ok && len(sum) == 2*sha256.Size {
			return sum, nil
		}
	}
	sum, err := digest(files)
	if err != nil {
		return "", err
	}
	// A cache that cannot be written costs time and nothing else.
	if os.MkdirAll(filepath.Dir(file), 0o755) == nil {
		if f, err := os.CreateTemp(filepath.Dir(file), ".build-*"); err == nil {
			_, err = f.WriteString(prefix + sum + "\n")
			if errors.Join(err, f.Close()) != nil || os.Rename(f.Name(), file) != nil {
				_ = os.Remove(f.Name())
			}
		}
	}
	return sum, nil
}

// digest is the SHA-256 over the contents of files, each content once, so that
// links and the names of versions do not matter.
func digest(files []string) (string, error) {
	var sums []string
	for _, name := range files {
		if st, err := os.Stat(name); err != nil || !st.Mode().IsRegular() {
			continue
		}
		h := sha256.New()
		if err := addFile(h, name); err != nil {
			return "", err
		}
		sums = append(sums, hex.EncodeToString(h.Sum(nil)))
	}
	slices.Sort(sums)
	all := sha256.Sum256([]byte(strings.Join(slices.Compact(sums), "\n")))
	return hex.EncodeToString(all[:]), nil
}

func addFile(w io.Writer, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return errors.Join(err, f.Close())
}
