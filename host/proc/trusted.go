package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// overflowUID is how the kernel shows the owner of what belongs to nobody of a
// user namespace (/proc/sys/kernel/overflowuid): there it is root outside.
const overflowUID = 65534

// ManyUsers reports whether this process can become other users: in a user
// namespace with a single mapped uid it cannot, root or not.
func ManyUsers() bool {
	data, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return true
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	f := strings.Fields(lines[0])
	return len(lines) > 1 || len(f) < 3 || f[2] != "1"
}

// TrustedProgram returns the real path of a program which nobody but root and
// the user with that uid and primary group could have put there: the file and
// every directory above it, of the path as given and of the real one, belong to
// one of them and can be written by nobody else. A directory in which only the
// owner of a file can replace it (/tmp) is as good. The group that has the
// number of its one user, which many systems make, is that user.
//
// The error wraps fs.ErrNotExist where there is no such file, else it says who
// could have.
func TrustedProgram(path string, uid, gid uint32) (string, error) {
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("the path %q is not absolute", path)
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	owned := func(p string, i fs.FileInfo) error {
		st, ok := i.Sys().(*syscall.Stat_t)
		if !ok {
			return errors.ErrUnsupported
		}
		if st.Uid != 0 && st.Uid != uid && (st.Uid != overflowUID || ManyUsers()) {
			return fmt.Errorf("%s belongs to uid %d", p, st.Uid)
		}
		sticky := i.IsDir() && i.Mode()&fs.ModeSticky != 0
		if i.Mode()&fs.ModeSymlink != 0 || sticky {
			return nil
		}
		if i.Mode().Perm()&0o002 != 0 {
			return fmt.Errorf("everybody can write %s", p)
		}
		private := gid == uid && st.Gid == gid || st.Gid == 0
		if i.Mode().Perm()&0o020 != 0 && !private {
			return fmt.Errorf("group %d can write %s", st.Gid, p)
		}
		return nil
	}
	for _, begin := range []string{filepath.Clean(path), real} {
		for p := begin; ; p = filepath.Dir(p) {
			i, err := os.Lstat(p)
			if err == nil {
				err = owned(p, i)
			}
			if err != nil {
				return "", err
			}
			if p == filepath.Dir(p) {
				break
			}
		}
	}
	i, err := os.Lstat(real)
	if err != nil {
		return "", err
	}
	if !i.Mode().IsRegular() {
		return "", fmt.Errorf("%s is no file", real)
	}
	return real, nil
}
