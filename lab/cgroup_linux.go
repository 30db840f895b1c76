package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// How the memory of nodes is limited, by the version of cgroups.
const (
	reportedOnly = "reported only"
	cgroupV1     = "cgroup v1"
	cgroupV2     = "cgroup v2"
)

var memoryLimitFile = map[string]string{cgroupV1: "memory.limit_in_bytes", cgroupV2: "memory.max"}

// memoryPlace is a cgroup below which groups with a memory limit can be made.
type memoryPlace struct {
	version string
	dir     string
}

// memoryPlaces finds the candidates, best first: below our own cgroup, so that
// limits which already hold go on to hold.
func memoryPlaces(mountinfo, own string) []memoryPlace {
	paths := map[string]string{} // controller, "" for v2 → our path
	for line := range strings.Lines(own) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			paths[c] = f[2]
		}
	}
	var places []memoryPlace
	s := bufio.NewScanner(strings.NewReader(mountinfo))
	for s.Scan() {
		before, after, ok := strings.Cut(s.Text(), " - ")
		if !ok {
			continue
		}
		m, t := strings.Fields(before), strings.Fields(after)
		if len(m) < 5 || len(t) < 3 {
			continue
		}
		root, mount := m[3], m[4]
		var version, path string
		switch {
		case t[0] == "cgroup" && slices.Contains(strings.Split(t[2], ","), "memory"):
			version, path = cgroupV1, paths["memory"]
		case t[0] == "cgroup2":
			version, path = cgroupV2, paths[""]
		default:
			continue
		}
		// A path with ".." is that of a group above the cgroup namespace.
		if rel, err := filepath.Rel(root, path); err == nil && filepath.IsLocal(rel) && rel != "." && filepath.Clean(path) == path {
			places = append(places, memoryPlace{version, filepath.Join(mount, rel)})
		}
		places = append(places, memoryPlace{version, mount})
	}
	return places
}

// cgroupPaths says how the memory of nodes can be limited, and where the cgroup
// of each node will be; it makes none.
func cgroupPaths(lab string, nodes []string) (version string, paths []string) {
	mountinfo, err1 := os.ReadFile("/proc/self/mountinfo")
	own, err2 := os.ReadFile("/proc/self/cgroup")
	if err1 != nil || err2 != nil {
		return reportedOnly, nil
	}
	for _, place := range memoryPlaces(string(mountinfo), string(own)) {
		if place.version == cgroupV2 {
			// A group's children have the controllers that it hands down.
			b, err := os.ReadFile(filepath.Join(place.dir, "cgroup.subtree_control"))
			if err != nil || !slices.Contains(strings.Fields(string(b)), "memory") {
				continue
			}
		}
		if unix.Access(place.dir, unix.W_OK) != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(place.dir, "cgroup.procs")); err != nil {
			continue
		}
		for _, n := range nodes {
			paths = append(paths, filepath.Join(place.dir, "tbcluster-lab-"+lab+"-"+n))
		}
		return place.version, paths
	}
	return reportedOnly, nil
}

// makeCgroup makes one group with a memory limit in bytes.
func makeCgroup(version, path string, limit uint64) error {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.WriteFile(filepath.Join(path, memoryLimitFile[version]), []byte(strconv.FormatUint(limit, 10)), 0)
}

// enterCgroup puts a process into a group.
func enterCgroup(path string, pid int) error {
	return os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
}

// removeCgroup removes a group whose processes are dead or dying.
func removeCgroup(ctx context.Context, path string) error {
	const patience = 5 * time.Second
	for end := time.Now().Add(patience); ; {
		err := unix.Rmdir(path)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			pids, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			return fmt.Errorf("remove cgroup %s (processes %s): %w", path, bytes.Join(bytes.Fields(pids), []byte(" ")), err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}
