package linux

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"tbcluster/host"
)

// parseOSRelease returns PRETTY_NAME of an os-release(5) file, or NAME and
// VERSION_ID, or "".
func parseOSRelease(text string) string {
	v := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && !strings.HasPrefix(key, "#") {
			v[key] = unquote(value)
		}
	}
	if v["PRETTY_NAME"] != "" {
		return v["PRETTY_NAME"]
	}
	return strings.TrimSpace(v["NAME"] + " " + v["VERSION_ID"])
}

// unquote takes a value as a shell would read it.
func unquote(s string) string {
	if len(s) >= 2 && s[0] == '\'' && s[len(s)-1] == '\'' {
		return s[1 : len(s)-1]
	}
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return s
	}
	var b strings.Builder
	escaped := false
	for _, r := range s[1 : len(s)-1] {
		if r == '\\' && !escaped {
			escaped = true
			continue
		}
		escaped = false
		b.WriteRune(r)
	}
	return b.String()
}

// parseMeminfo parses /proc/meminfo (proc_meminfo(5)).
func parseMeminfo(text string) (host.Memory, error) {
	v := map[string]uint64{}
	for line := range strings.Lines(text) {
		key, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if len(fields) != 2 || fields[1] != "kB" {
			continue
		}
		kb, err := strconv.ParseUint(fields[0], 10, 64)
		if err != nil || kb > math.MaxUint64>>10 {
			return host.Memory{}, fmt.Errorf("meminfo: bad value of %s: %q", key, fields[0])
		}
		v[key] = kb << 10
	}
	total, ok := v["MemTotal"]
	available, ok2 := v["MemAvailable"]
	if !ok || !ok2 || total == 0 {
		return host.Memory{}, errors.New("meminfo: no MemTotal and MemAvailable")
	}
	return host.Memory{Total: total, Available: min(available, total)}, nil
}

// cgroup is the memory cgroup that a process is in.
type cgroup struct {
	dir                string // below the mount of its hierarchy
	usage, limit       string // files
	activeKey, idleKey string // page cache in memory.stat
}

// parseCgroup finds the memory cgroups in /proc/PID/cgroup (cgroups(7)): that
// of version 1, that of version 2.
func parseCgroup(text string) []cgroup {
	var found []cgroup
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 || !filepath.IsAbs(parts[2]) {
			continue
		}
		path := "." + filepath.Clean(parts[2]) // relative: "." at the top
		switch {
		case parts[0] == "0" && parts[1] == "":
			for _, mount := range []string{"", "unified"} {
				found = append(found, cgroup{filepath.Join(mount, path), "memory.current", "memory.max", "active_file", "inactive_file"})
			}
		case containsField(parts[1], "memory"):
			found = append(found, cgroup{filepath.Join("memory", path), "memory.usage_in_bytes", "memory.limit_in_bytes", "total_active_file", "total_inactive_file"})
		}
	}
	return found
}

func containsField(list, want string) bool {
	for f := range strings.SplitSeq(list, ",") {
		if f == want {
			return true
		}
	}
	return false
}

// noLimit is the least value of memory.limit_in_bytes that means none: version
// 1 writes the largest number of whole pages.
const noLimit = math.MaxInt64 - 1<<20

// parseLimit parses a limit file; ok is false where there is no limit.
func parseLimit(s string) (limit uint64, ok bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil && n < noLimit
}

// parseCache returns the page cache in memory.stat, which the kernel gives back
// when it is asked for memory, as MemAvailable counts it.
func parseCache(text string, g cgroup) uint64 {
	var sum uint64
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 2 || f[0] != g.activeKey && f[0] != g.idleKey {
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 63)
		if err != nil || sum > math.MaxInt64 {
			return 0
		}
		sum += n
	}
	return sum
}

// used returns what the machine that Options made up holds, page cache left
// out: what is charged to the nearest cgroup around this process whose limit is
// no more than that machine's memory. A wider one is shared with others, and
// says nothing; without any it is not known.
func (h *facts) used() (n uint64, known bool, err error) {
	text, err := readText(h.proc, "self/cgroup")
	if err != nil {
		return 0, false, err
	}
	for _, g := range parseCgroup(text) {
		for last := ""; g.dir != last; last, g.dir = g.dir, filepath.Dir(g.dir) {
			if n, known, err := h.charged(g); known || err != nil {
				return n, known, err
			}
		}
	}
	return 0, false, nil
}

// charged returns what is charged to g, if its limit fits.
func (h *facts) charged(g cgroup) (n uint64, known bool, err error) {
	dir := filepath.Join(h.sys, "fs/cgroup", g.dir)
	limit, err := readText(dir, g.limit)
	if err != nil {
		return 0, false, err
	}
	if l, ok := parseLimit(limit); !ok || l > h.memoryBytes {
		return 0, false, nil
	}
	usage, err := readText(dir, g.usage)
	if err != nil {
		return 0, false, err
	}
	if n, err = strconv.ParseUint(usage, 10, 64); err != nil {
		return 0, false, nil // not there, or not a number: not known
	}
	stat, err := readText(dir, "memory.stat")
	if err != nil {
		return 0, false, err
	}
	return n - min(n, parseCache(stat, g)), true, nil
}

// memory returns the machine's memory, or what Options made of it.
func (h *facts) memory() (host.Memory, error) {
	text, err := readText(h.proc, "meminfo")
	if err != nil {
		return host.Memory{}, err
	}
	m, err := parseMeminfo(text)
	if err != nil || h.memoryBytes == 0 {
		return m, err
	}
	used, known, err := h.used()
	if err != nil {
		return m, err
	}
	free := h.memoryBytes
	if known {
		free -= min(used, free)
	}
	return host.Memory{Total: h.memoryBytes, Available: min(m.Available, free)}, nil
}

// facts are the places that facts are read from.
type facts struct {
	sysfs       string // with bus/thunderbolt and class/net; may be made up
	sys         string // where cgroups are mounted
	proc        string
	etc         string
	run         string
	memoryBytes uint64
}

// parseRelease returns the first two numbers of a kernel release ("6.1.0-18"),
// zeros where there are none.
func parseRelease(release string) (major, minor int) {
	first, rest, _ := strings.Cut(release, ".")
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(rest)
	}
	major, err := parseIndex(first)
	if err != nil {
		return 0, 0
	}
	if minor, err = parseIndex(rest[:end]); err != nil {
		return major, 0
	}
	return major, minor
}
