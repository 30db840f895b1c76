//go:build linux

package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/engine/llamacpp"
	"tbcluster/scripts/packaging"
)

// released1 are the packages of version 1.0.0, built once.
var released1 = sync.OnceValues(func() (string, error) {
	dir, err := buildDir()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, "packages")
	return dir, packaging.Build("1.0.0", dir)
})

// built fails or skips the test where packages could not be built.
func built(t *testing.T, err error) {
	t.Helper()
	switch {
	case errors.Is(err, packaging.ErrNoTool):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
}

// needDebian skips the test where no Debian can be made, and says why.
func needDebian(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can make a Debian to install into")
	}
	for _, p := range []string{"mmdebstrap", "unshare", "nsenter", "bash"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%s is not here: no Debian can be made to install into", p)
		}
	}
	if out, err := exec.Command("unshare", "--mount", "--pid", "--fork", "--net", "--cgroup", "true").CombinedOutput(); err != nil {
		t.Skipf("this machine lets nobody have namespaces: %v\n%s", err, out)
	}
}

// baseDebian is a Debian with systemd and little else, made once and kept. It
// has no message bus: the root half needs none.
var baseDebian = sync.OnceValues(func() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	base := filepath.Join(cache, "tbcluster", "test", "debian-1")
	if _, err := os.Stat(base); !errors.Is(err, os.ErrNotExist) {
		return base, err
	}
	work := base + ".new"
	if err := errors.Join(os.RemoveAll(work), os.MkdirAll(filepath.Dir(base), 0o755)); err != nil {
		return "", err
	}
	suite := "stable"
	if data, err := os.ReadFile("/etc/os-release"); err == nil && strings.Contains(string(data), "\nID=debian\n") {
		for l := range strings.Lines(string(data)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(l), "VERSION_CODENAME="); ok {
				suite = v
			}
		}
	}
	out, err := exec.Command("mmdebstrap", "--mode=root", "--variant=minbase", "--aptopt=APT::Install-Recommends \"false\"",
		"--include=systemd-sysv,libgomp1,procps", suite, work).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mmdebstrap: %w\n%s", err, out)
	}
	return base, os.Rename(work, base)
})

// debian returns the root of a Debian that a test may change.
func debian(t *testing.T) string {
	t.Helper()
	base, err := baseDebian()
	if err != nil {
		t.Skipf("no Debian could be made to install into: %v", err)
	}
	dir, err := os.MkdirTemp("", "tbcluster-debian")
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "root")
	for _, d := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	layers := "lowerdir=" + base + ",upperdir=" + dir + "/upper,workdir=" + dir + "/work"
	mounted := unix.Mount("overlay", root, "overlay", 0, layers) == nil
	if !mounted {
		if out, err := exec.Command("cp", "-a", base+"/.", root).CombinedOutput(); err != nil {
			t.Fatalf("copy a Debian: %v\n%s", err, out)
		}
	}
	t.Cleanup(func() {
		if mounted {
			if err := unix.Unmount(root, 0); err != nil {
				t.Error(err)
				return
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return root
}

// box is a Debian to run commands in.
type box struct {
	t    *testing.T
	root string
	// pid is the first process of the machine; 0 in a chroot.
	pid int
}

func (b box) try(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	enter := []string{"chroot", b.root}
	if b.pid != 0 {
		enter = []string{"nsenter", "-t", strconv.Itoa(b.pid), "-a", "--"}
	}
	enter = append(enter, "env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	argv = append(enter, argv...)
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	return string(out), err
}

func (b box) run(argv ...string) string {
	b.t.Helper()
	out, err := b.try(argv...)
	if err != nil {
		b.t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return out
}

// put copies a file into the box.
func (b box) put(from, to string) {
	b.t.Helper()
	src, err := os.Open(from)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = src.Close() }()
	to = filepath.Join(b.root, to)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		b.t.Fatal(err)
	}
	dst, err := os.Create(to)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := io.Copy(dst, src); err != nil {
		b.t.Fatal(err)
	}
	if err := dst.Close(); err != nil {
		b.t.Fatal(err)
	}
}

// until waits until a command's output fits.
func (b box) until(what string, fits func(out string) bool, argv ...string) string {
	b.t.Helper()
	var out string
	var err error
	for end := time.Now().Add(2 * patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if out, err = b.try(argv...); err == nil && fits(out) {
			return out
		}
	}
	b.t.Fatalf("waited for %s: %s: %v\n%s", what, strings.Join(argv, " "), err, out)
	return ""
}

// tree is everything on a file system: by path, what it is and holds.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(path, root+"/")
		for _, v := range packaging.Volatile() {
			if strings.HasSuffix(v, "/") && rel+"/" == v {
				return filepath.SkipDir
			}
			if rel == v {
				return nil
			}
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		st := i.Sys().(*syscall.Stat_t)
		what := fmt.Sprintf("%s %d:%d", i.Mode(), st.Uid, st.Gid)
		switch {
		case i.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			what += " -> " + to
		case i.Mode().IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			h := sha256.New()
			_, err = io.Copy(h, f)
			if err = errors.Join(err, f.Close()); err != nil {
				return err
			}
			what += fmt.Sprintf(" %x", h.Sum(nil))
		}
		out[rel] = what
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// sameTree fails for everything that differs, but for what may.
func sameTree(t *testing.T, when string, before, after map[string]string, may ...string) {
	t.Helper()
	allowed := func(p string) bool {
		for _, m := range may {
			if p == m || strings.HasPrefix(p, m+"/") {
				return true
			}
		}
		return false
	}
	for p, was := range before {
		if now, ok := after[p]; (!ok || now != was) && !allowed(p) {
			t.Errorf("%s: /%s was %q and is %q", when, p, was, now)
		}
	}
	for p, now := range after {
		if _, ok := before[p]; !ok && !allowed(p) {
			t.Errorf("%s: /%s is left: %q", when, p, now)
		}
	}
}

// TestPackageInAChroot installs, upgrades, removes and purges the deb where no
// systemd runs: nothing is started, and nothing is left.
func TestPackageInAChroot(t *testing.T) {
	needDebian(t)
	t.Parallel()
	dist, err := released1()
	built(t, err)
	t.Run("built again it is the same", func(t *testing.T) {
		again := t.TempDir()
		built(t, packaging.Build("1.0.0", again))
		a, err := os.ReadFile(filepath.Join(dist, "SHA256SUMS"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(again, "SHA256SUMS"))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) || bytes.Count(a, []byte("\n")) != 2 {
			t.Errorf("one build:\n%sthe other:\n%s", a, b)
		}
	})
	for name, prepare := range map[string]func(box){
		"with systemd's tools": func(box) {},
		"without systemd": func(b box) {
			b.run("rm", "/usr/bin/systemd-sysusers", "/usr/bin/systemd-tmpfiles", "/usr/bin/systemctl")
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := box{t: t, root: debian(t)}
			prepare(b)
			b.put(packaging.Deb(dist, "1.0.0"), "pkg/one.deb")
			before := tree(t, b.root)
			b.run("dpkg", "--force-unsafe-io", "-i", "/pkg/one.deb")
			installed := tree(t, b.root)
			for _, p := range []string{"usr/bin/tbcluster", "usr/lib/systemd/system/tbcluster.service", "usr/share/man/man1/tbcluster-cp.1.gz",
				"usr/share/bash-completion/completions/tbcluster", "usr/share/zsh/vendor-completions/_tbcluster", "usr/share/fish/vendor_completions.d/tbcluster.fish",
				"usr/share/doc/tbcluster/copyright", "usr/share/tbcluster/grafana.json", "etc/systemd/system/multi-user.target.wants/tbcluster.service"} {
				if _, ok := installed[p]; !ok {
					t.Errorf("/%s is not there", p)
				}
			}
			if out := b.run("tbcluster", "version"); !strings.Contains(out, "1.0.0") {
				t.Errorf("it says it is %q", out)
			}
			if out := b.run("stat", "-c", "%U:%G %a", "/var/lib/tbcluster/agent"); strings.TrimSpace(out) != "tbcluster:tbcluster 700" {
				t.Errorf("the agent's directory is %q", out)
			}
			if left := procsIn(t, b.root); len(left) > 0 {
				t.Errorf("something was started in a chroot: %v", left)
			}
			b.run("dpkg", "--force-unsafe-io", "-i", "/pkg/one.deb")
			sameTree(t, "after it was installed over itself", installed, tree(t, b.root))
			b.run("dpkg", "--force-unsafe-io", "--remove", "tbcluster")
			// State and the agent's user are for a purge.
			sameTree(t, "removed", before, tree(t, b.root), "var/lib/tbcluster", "etc/passwd", "etc/shadow", "etc/group", "etc/gshadow", "etc/subuid", "etc/subgid")
			b.run("dpkg", "--force-unsafe-io", "--purge", "tbcluster")
			sameTree(t, "purged", before, tree(t, b.root))
		})
	}
}

// procsIn are the processes whose root is a directory.
func procsIn(t *testing.T, root string) (pids []string) {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*/root")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		if to, err := os.Readlink(d); err == nil && to == root {
			pids = append(pids, d)
		}
	}
	return pids
}

// bootScript makes a root the root of a machine of its own, in new namespaces,
// and systemd its first process. $1 is the root.
const bootScript = `set -e
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
for d in null zero full random urandom tty; do : >dev/$d; mount --bind /dev/$d dev/$d; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs run
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
	mount -t cgroup2 cgroup2 sys/fs/cgroup
else
	mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
	mkdir sys/fs/cgroup/systemd
	mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
fi
mkdir -p pkg/old
pivot_root . pkg/old
umount -l pkg/old
exec env -i container=tbcluster-test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=no
`

// boot runs systemd on a root, in a group of control groups of its own, and
// ends it with the test.
func boot(t *testing.T, root string) box {
	t.Helper()
	name := "tbcluster-" + randomName()
	var groups []string
	candidates, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		candidates = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	for _, c := range candidates {
		g := filepath.Join(filepath.Dir(c), name)
		// A hierarchy of version 1 that is seen by two names is one.
		if err := os.Mkdir(g, 0o755); err == nil {
			groups = append(groups, g)
		}
	}
	// It joins its groups before it sees them as the root of all.
	join := "for g in " + strings.Join(groups, " ") + "; do echo $$ >$g/cgroup.procs 2>/dev/null || :; done; " +
		"exec unshare --mount --pid --fork --uts --ipc --net --cgroup --kill-child bash -c \"$1\" boot \"$2\""
	cmd := exec.Command("bash", "-c", join, "join", bootScript, root)
	console := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	b := box{t: t, root: root}
	t.Cleanup(func() {
		if t.Failed() && b.pid != 0 {
			out, err := b.try("journalctl", "--no-pager", "-n", "150")
			t.Logf("its journal (%v):\n%s", err, out)
			out, err = b.try("sh", "-c", "tail -n 60 /var/lib/tbcluster/agent/agent.log; tail -n 20 /var/lib/tbcluster/root/root.log")
			t.Logf("the logs (%v):\n%s", err, out)
		}
		if b.pid != 0 {
			if err := syscall.Kill(b.pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Error(err)
			}
		} else if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		<-ended
		for _, g := range groups {
			removeGroup(t, g)
		}
	})
	for end := time.Now().Add(patience); b.pid == 0; time.Sleep(50 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("the machine did not start: %v\n%s", err, console)
		default:
		}
		// unshare is cmd's process; its child becomes systemd.
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		if f := strings.Fields(string(data)); len(f) == 1 {
			if comm, err := os.ReadFile("/proc/" + f[0] + "/comm"); err == nil && strings.TrimSpace(string(comm)) == "systemd" {
				if b.pid, err = strconv.Atoi(f[0]); err != nil {
					t.Fatal(err)
				}
			}
		}
		if time.Now().After(end) {
			t.Fatalf("systemd did not start within %s\n%s", patience, console)
		}
	}
	b.until("systemd to be up", func(out string) bool { return out == "running\n" || out == "degraded\n" },
		"sh", "-c", "systemctl is-system-running || true")
	return b
}

// removeGroup removes a control group and all below, once what was in it is gone.
func removeGroup(t *testing.T, g string) {
	t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		var all []string
		if werr := filepath.WalkDir(g, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				all = append(all, p)
			}
			return nil // it may go while it is walked
		}); werr != nil {
			t.Error(werr)
			return
		}
		err = nil
		for i := len(all) - 1; i >= 0; i-- {
			if rerr := os.Remove(all[i]); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
				err = rerr
			}
		}
		if err == nil {
			return
		}
	}
	t.Errorf("a control group is left: %v", err)
}

// TestPackageUnderSystemd installs the deb on a machine that systemd runs, has
// an instance serve, upgrades meanwhile, kills the root half, and removes it.
func TestPackageUnderSystemd(t *testing.T) {
	needDebian(t)
	t.Parallel()
	model := modelFile(t)
	dist, err := released1()
	built(t, err)
	next := t.TempDir()
	built(t, packaging.Build("1.0.1", next))
	b := boot(t, debian(t))
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	b.put(packaging.Deb(dist, "1.0.0"), "pkg/one.deb")
	b.put(packaging.Deb(next, "1.0.1"), "pkg/two.deb")
	before := tree(t, b.root)

	b.run("useradd", "--create-home", "--shell", "/bin/bash", "ada")
	stem := strings.TrimSuffix(filepath.Base(model), ".gguf")
	b.put(model, filepath.Join("srv/models", filepath.Base(model)))
	for _, c := range [][]string{
		{"mkdir", "-p", filepath.Join(b.root, "opt/tbcluster/engines"), filepath.Join(b.root, "etc/tbcluster")},
		{"cp", "-a", llamacpp.UserDir(home), filepath.Join(b.root, "opt/tbcluster/engines/")},
		{"chown", "-R", "0:0", filepath.Join(b.root, "opt/tbcluster")},
		{"chmod", "-R", "a+rX,go-w", filepath.Join(b.root, "opt/tbcluster"), filepath.Join(b.root, "srv/models")},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
	}
	if err := os.WriteFile(filepath.Join(b.root, "etc/tbcluster/config.toml"), []byte("name = \"box\"\nowners = [\"ada\"]\nmodel_dirs = [\"/srv/models\"]\n"), 0o644); err != nil {
		t.Fatal(err)
	}

	b.run("dpkg", "--force-unsafe-io", "-i", "/pkg/one.deb")
	answers := func(version string) {
		t.Helper()
		b.until("an agent "+version, func(out string) bool {
			return strings.Contains(out, `"version": "`+version+`"`) && strings.Contains(out, `"privileged": true`)
		}, "tbcluster", "status", "-o", "json")
	}
	answers("1.0.0")
	for _, u := range []string{"tbcluster.service", "tbcluster-agent.socket"} {
		if out, err := b.try("systemctl", "is-active", u); err != nil {
			t.Errorf("%s is %s", u, out)
		}
	}
	if out, err := b.try("systemctl", "is-enabled", "tbcluster.service"); err != nil {
		t.Errorf("it is %s", out)
	}

	// The agent has what its unit says, as the kernel sees it.
	agentPID := strings.TrimSpace(b.run("pgrep", "-o", "-u", "tbcluster", "-f", "agent --root-half"))
	status := b.run("cat", "/proc/"+agentPID+"/status")
	for _, want := range []string{"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, want) {
			t.Errorf("the agent has no %q:\n%s", want, status)
		}
	}

	as := func(argv ...string) []string { return append([]string{"runuser", "-u", "ada", "--"}, argv...) }
	b.until("the model to be found", func(out string) bool { return strings.Contains(out, stem) }, as("tbcluster", "models", "list")...)
	b.run(as("tbcluster", "place", stem, "--name", "one")...)
	// The oldest: others are asked for a moment what they are.
	running := func() string { return strings.TrimSpace(b.run("pgrep", "-o", "-u", "ada", "-x", "llama-server")) }
	engine := running()
	if group := b.run("cat", "/proc/"+engine+"/cgroup"); !strings.Contains(group, "/tbcluster.slice/tbcluster-rank-") {
		t.Errorf("the engine is no part of a scope in tbcluster.slice:\n%s", group)
	}
	serves := func(when string) {
		t.Helper()
		b.until("the instance to be ready "+when, func(out string) bool { return strings.Contains(out, `"state": "ready"`) }, "tbcluster", "ps", "-o", "json")
		// On a loaded machine it is not ready now and then; what counts is that it answers.
		b.until("an answer "+when, func(out string) bool { return strings.TrimSpace(out) != "" },
			as("tbcluster", "chat", "--max-tokens", "4", "one", "The capital of France is")...)
		if now := running(); now != engine {
			t.Errorf("%s: the engine was process %s and is %s", when, engine, now)
		}
	}
	serves("at first")

	start := time.Now()
	b.run("dpkg", "--force-unsafe-io", "-i", "/pkg/two.deb")
	answers("1.0.1")
	t.Logf("an agent of the next version answers %s after the upgrade began", time.Since(start).Round(100*time.Millisecond))
	if out := b.run("journalctl", "--no-pager", "-u", "tbcluster.service"); strings.Contains(out, "stop-sigterm' timed out") {
		t.Errorf("the root half did not end by itself:\n%s", out)
	}
	serves("after an upgrade")

	// It is called active until systemd has seen the end of its process.
	mainPID := func() string {
		return strings.TrimSpace(b.run("systemctl", "show", "--property=MainPID", "--value", "tbcluster.service"))
	}
	killed := mainPID()
	b.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "tbcluster.service")
	b.until("the service to be back", func(out string) bool { return strings.TrimSpace(out) == "active" && mainPID() != killed },
		"sh", "-c", "systemctl is-active tbcluster.service || true")
	answers("1.0.1")
	serves("after its root half was killed")

	// The agent may have been started this moment, and the instance may be busy.
	scrape := `exec 3<>/dev/tcp/127.0.0.1/7880; printf 'GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3; cat <&3`
	b.until("metrics that tell of the instance", func(out string) bool {
		return strings.Contains(out, `tbcluster_instances{engine="llamacpp",state="ready"} 1`) && strings.Contains(out, "process_resident_memory_bytes")
	}, "bash", "-c", scrape)

	b.run("dpkg", "--force-unsafe-io", "--remove", "tbcluster")
	if out, err := b.try("pgrep", "-a", "-f", "tbcluster|llama-server"); err == nil {
		t.Errorf("it is removed, and there runs:\n%s", out)
	}
	// Units that have stopped are listed until systemd comes to drop them.
	b.until("no unit to be left", func(out string) bool { return strings.TrimSpace(out) == "" }, "systemctl", "list-units", "--all", "--no-legend", "tbcluster*")
	if out := b.run("sh", "-c", "ls -d /run/tbcluster* 2>/dev/null || true"); out != "" {
		t.Errorf("left in /run: %s", out)
	}
	b.run("dpkg", "--force-unsafe-io", "--purge", "tbcluster")
	// A mail spool that never was is none of ours.
	if out, err := b.try("userdel", "--remove", "ada"); err != nil && !strings.Contains(out, "mail spool") {
		t.Errorf("userdel: %v\n%s", err, out)
	}
	b.run("rm", "-r", "/opt/tbcluster", "/srv/models")
	sameTree(t, "purged", before, tree(t, b.root))
}
