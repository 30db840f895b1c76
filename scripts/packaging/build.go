// Package packaging holds what the packages are made of, and looks at it without
// installing it. Tests elsewhere build packages with it and install them: e2e in
// namespaces, rig/cluster in a virtual machine.
package packaging

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// ErrNoTool says that there is nothing to build packages with.
var ErrNoTool = errors.New("nfpm is not here, so no package is built; `scripts/deps packages` installs it")

// Build builds deb and rpm of a version for this machine into a directory. It is
// for tests, which run somewhere in the clone; a failure wraps ErrNoTool where it
// is for want of nfpm.
func Build(version, dir string) error {
	root, err := clone()
	if err != nil {
		return err
	}
	if out, err := exec.Command(filepath.Join(root, "scripts/go"), "nfpm", "--version").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %w\n%s", ErrNoTool, err, out)
	}
	cmd := exec.Command(filepath.Join(root, "scripts/packages"), dir)
	cmd.Env = append(os.Environ(), "PACKAGE_VERSION="+version, "PACKAGE_ARCHES="+runtime.GOARCH, "PACKAGE_ONLY=linux", "SOURCE_DATE_EPOCH=1790000000")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the packages: %w\n%s", err, out)
	}
	return nil
}

// clone returns the directory of go.mod.
func clone() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("packages are built inside a clone")
		}
		dir = filepath.Dir(dir)
	}
}

// Deb returns the file of the deb of a version in a directory that Build filled.
func Deb(dir, version string) string {
	return filepath.Join(dir, "tbcluster_"+version+"-1_"+runtime.GOARCH+".deb")
}

// Volatile is what changes by itself on a Debian, or is dpkg's own memory; a name
// that ends with "/" stands for all below.
func Volatile() []string {
	return []string{"proc/", "sys/", "dev/", "run/", "tmp/", "pkg/", "var/lib/dpkg/", "var/log/", "var/cache/", "var/lib/systemd/", "var/tmp/",
		"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-", "etc/.pwd.lock", "etc/machine-id", "etc/ld.so.cache", "etc/.updated", "var/.updated"}
}
