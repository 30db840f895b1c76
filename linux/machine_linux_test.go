package linux

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"tbcluster/host"
)

// write writes files below dir.
func write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestThisMachine(t *testing.T) {
	m, err := New(Options{}).Machine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if m.Hostname == "" || !strings.HasPrefix(name, m.Hostname) || strings.Contains(m.Hostname, ".") {
		t.Errorf("host name %q of %q", m.Hostname, name)
	}
	if m.OS != "linux" || m.Arch != runtime.GOARCH || m.CPUs < 1 || m.Kernel == "" || len(m.BootID) != 36 {
		t.Errorf("got %+v", m)
	}
	if m.Memory.Total == 0 || m.Memory.Available > m.Memory.Total {
		t.Errorf("memory %+v", m.Memory)
	}
}

func TestNamesOfTheSystemAndTheMachine(t *testing.T) {
	etc := t.TempDir()
	write(t, etc, map[string]string{
		"os-release": "NAME=\"Debian GNU/Linux\"\nPRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n",
		"machine-id": "0123456789abcdef0123456789abcdef\n",
	})
	m, err := New(Options{EtcRoot: etc}).Machine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if m.OSVersion != "Debian GNU/Linux 13 (trixie)" || m.MachineID != "0123456789abcdef0123456789abcdef" {
		t.Errorf("got %+v", m)
	}
	for text, want := range map[string]string{
		"NAME='Arch Linux'\nID=arch\n":         "Arch Linux",
		"NAME=Alpine\nVERSION_ID=3.20\n":       "Alpine 3.20",
		`PRETTY_NAME="A \"quoted\" \$system"`:  `A "quoted" $system`,
		"#PRETTY_NAME=no\n\nnonsense\nNAME=\"": `"`,
		"":                                     "",
	} {
		if got := parseOSRelease(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

const gib = 1 << 30

const meminfo = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"

func TestMemoryOfAMachineThatIsMadeUp(t *testing.T) {
	for name, c := range map[string]struct {
		override  uint64
		cgroup    string
		files     map[string]string
		available uint64
	}{
		"real":                              {0, "0::/\n", nil, 8 * gib},
		"smaller, nothing known":            {4 * gib, "0::/\n", nil, 4 * gib},
		"no more than there really is free": {12 * gib, "", nil, 8 * gib},
		"version 2, page cache left out": {4 * gib, "0::/lab/alpha\n", map[string]string{
			"lab/alpha/memory.max": "4294967296\n", "lab/alpha/memory.current": "2147483648\n",
			"lab/alpha/memory.stat": "anon 1073741824\nactive_file 536870912\ninactive_file 536870912\n",
		}, 3 * gib},
		"version 2, limit further up": {4 * gib, "0::/lab/alpha/agent\n", map[string]string{
			"lab/alpha/agent/memory.max": "max\n", "lab/alpha/agent/memory.current": "5\n",
			"lab/alpha/memory.max": "4294967296\n", "lab/alpha/memory.current": "1073741824\n", "lab/alpha/memory.stat": "",
		}, 3 * gib},
		"version 1": {4 * gib, "4:memory:/lab/alpha\n1:cpu,cpuacct:/\n0::/\n", map[string]string{
			"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "15000000000\n",
			"memory/lab/alpha/memory.limit_in_bytes": "4294967296\n", "memory/lab/alpha/memory.usage_in_bytes": "3221225472\n",
			"memory/lab/alpha/memory.stat": "total_active_file 0\ntotal_inactive_file 1073741824\n",
		}, 2 * gib},
		"version 1, no limit": {4 * gib, "4:memory:/lab/alpha\n", map[string]string{
			"memory/lab/alpha/memory.limit_in_bytes": "9223372036854771712\n", "memory/lab/alpha/memory.usage_in_bytes": "3221225472\n",
		}, 4 * gib},
		"a limit shared with others": {4 * gib, "0::/\n", map[string]string{
			"memory.max": "8589934592\n", "memory.current": "8000000000\n",
		}, 4 * gib},
		"full": {4 * gib, "0::/a\n", map[string]string{
			"a/memory.max": "4294967296\n", "a/memory.current": "5000000000\n",
		}, 0},
		"a group that went away": {4 * gib, "0::/a\n", map[string]string{"a/memory.max": "4294967296\n"}, 4 * gib},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts{sys: t.TempDir(), proc: t.TempDir(), memoryBytes: c.override}
			write(t, f.proc, map[string]string{"meminfo": meminfo, "self/cgroup": c.cgroup})
			write(t, filepath.Join(f.sys, "fs/cgroup"), c.files)
			m, err := f.memory()
			if err != nil {
				t.Fatal(err)
			}
			want := host.Memory{Total: 16 * gib, Available: c.available}
			if c.override != 0 {
				want.Total = c.override
			}
			if m != want {
				t.Errorf("got %+v, want %+v", m, want)
			}
		})
	}
}

func TestMemoryThatCannotBeReadIsAnError(t *testing.T) {
	for _, text := range []string{"", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 5 kB\n", "MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB\n", "MemTotal: 0 kB\nMemAvailable: 0 kB\n"} {
		if m, err := parseMeminfo(text); err == nil {
			t.Errorf("%q: got %+v", text, m)
		}
	}
}

func TestKernelReleases(t *testing.T) {
	for release, want := range map[string][2]int{
		"6.18.44-fc": {6, 18}, "5.15.0-101-generic": {5, 15}, "6.1": {6, 1}, "7": {7, 0}, "": {0, 0}, "x.y": {0, 0}, "5.x": {5, 0},
	} {
		if major, minor := parseRelease(release); major != want[0] || minor != want[1] {
			t.Errorf("%q: got %d.%d", release, major, minor)
		}
	}
}

func FuzzMeminfo(f *testing.F) {
	f.Add(meminfo)
	f.Add("MemTotal:1 kB\nMemAvailable:2 kB")
	f.Fuzz(func(t *testing.T, text string) {
		if m, err := parseMeminfo(text); err == nil && (m.Total == 0 || m.Available > m.Total) {
			t.Errorf("impossible memory %+v", m)
		}
	})
}

func FuzzOSRelease(f *testing.F) {
	f.Add("NAME=\"x\"\nPRETTY_NAME='y'\n")
	f.Add("PRETTY_NAME=\"\\")
	f.Fuzz(func(t *testing.T, text string) {
		if got := parseOSRelease(text); len(got) > len(text)+1 {
			t.Errorf("%q became longer: %q", text, got)
		}
	})
}

func FuzzCgroup(f *testing.F) {
	f.Add("0::/a\n4:memory:/b\n", "active_file 5\ninactive_file 6\n", "max")
	f.Add("0::/../../etc\n", "active_file 18446744073709551615\nactive_file 18446744073709551615", "9223372036854771712")
	f.Fuzz(func(t *testing.T, text, stat, limit string) {
		for _, g := range parseCgroup(text) {
			if g.dir == ".." || strings.HasPrefix(g.dir, "../") || filepath.IsAbs(g.dir) || g.dir == "" {
				t.Errorf("%q leads to %q", text, g.dir)
			}
			parseCache(stat, g)
		}
		if n, ok := parseLimit(limit); ok && n >= noLimit {
			t.Errorf("limit %d", n)
		}
	})
}
