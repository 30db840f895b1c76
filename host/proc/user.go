package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrNoUser is wrapped where the system knows no user of that ID.
var ErrNoUser = errors.New("no such user")

// User is a user as the system knows it.
type User struct {
	UID, GID          uint32
	Name, Home, Shell string
	// Groups are all groups of the user, GID among them, sorted.
	Groups []uint32
}

// ResolveUser returns the user with that ID, by the system's own resolver
// (getent and id on Linux, id on macOS), so that users of directory services
// are found too. Only where those programs do not exist it reads /etc/passwd
// and /etc/group. A user who cannot be resolved fully is an error that wraps
// ErrNoUser or says what was wrong, never a user with fewer groups.
func ResolveUser(ctx context.Context, uid uint32) (User, error) {
	u, err := resolver{run: runProgram, etc: "/etc"}.resolve(ctx, uid)
	if err != nil {
		return User{}, fmt.Errorf("resolve user ID %d: %w", uid, err)
	}
	return u, nil
}

// People reports whether the machine has an account of a person besides root, as
// its files or directory services list them: one that can log in and has the
// number of an ordinary user (1000 to 60000, login.defs(5); from 501 on macOS).
func People(ctx context.Context) (bool, error) {
	return resolver{run: runProgram, etc: "/etc"}.people(ctx)
}

// person reports whether an account is one that a person logs in with.
func (u User) person(least uint32) bool {
	shell := filepath.Base(u.Shell)
	return u.UID >= least && u.UID <= 60000 && shell != "nologin" && shell != "false" && shell != "sync"
}

// resolveTimeout is how long a directory service may take to answer.
const resolveTimeout = 15 * time.Second

// resolver asks programs, and files below etc where there are none.
type resolver struct {
	run func(ctx context.Context, name string, args ...string) ([]byte, error)
	etc string
}

// usable refuses what would be misread by the programs that get it.
func (u User) usable(uid uint32) error {
	switch {
	case u.UID != uid:
		return fmt.Errorf("the system answered with user ID %d", u.UID)
	case u.Name == "" || strings.HasPrefix(u.Name, "-") || strings.ContainsAny(u.Name, " \t\n/:\x00"):
		return fmt.Errorf("unusable user name %q", u.Name)
	case !filepath.IsAbs(u.Home):
		return fmt.Errorf("home directory %q of %s is not absolute", u.Home, u.Name)
	}
	return nil
}

// withGroups returns u with its groups, of which its own must be one.
func (u User) withGroups(groups []uint32) (User, error) {
	if !slices.Contains(groups, u.GID) {
		return User{}, fmt.Errorf("groups %v of %s lack its own, %d", groups, u.Name, u.GID)
	}
	slices.Sort(groups)
	u.Groups = slices.Compact(groups)
	return u, nil
}

// passwdShape is how a line of a password file is laid out.
type passwdShape struct{ fields, home, shell int }

var (
	// passwd(5): name:password:UID:GID:comment:home:shell.
	linuxPasswd = passwdShape{7, 5, 6}
	// `id -P` of macOS: name:password:UID:GID:class:change:expire:comment:home:shell.
	masterPasswd = passwdShape{10, 8, 9}
)

// parsePasswd parses one line. The shell may be empty, which means /bin/sh.
func parsePasswd(line string, shape passwdShape) (User, error) {
	f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
	if len(f) != shape.fields {
		return User{}, fmt.Errorf("password entry of %d fields, want %d", len(f), shape.fields)
	}
	uid, err := strconv.ParseUint(f[2], 10, 32)
	if err != nil {
		return User{}, fmt.Errorf("password entry: user ID: %w", err)
	}
	gid, err := strconv.ParseUint(f[3], 10, 32)
	if err != nil {
		return User{}, fmt.Errorf("password entry: group ID: %w", err)
	}
	u := User{UID: uint32(uid), GID: uint32(gid), Name: f[0], Home: f[shape.home], Shell: f[shape.shell]}
	if u.Shell == "" {
		u.Shell = "/bin/sh"
	}
	return u, nil
}

// parseGroups parses the output of `id -G`.
func parseGroups(out string) ([]uint32, error) {
	fields := strings.Fields(out)
	if len(fields) == 0 {
		return nil, errors.New("no groups")
	}
	groups := make([]uint32, len(fields))
	for i, f := range fields {
		n, err := strconv.ParseUint(f, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("group ID: %w", err)
		}
		groups[i] = uint32(n)
	}
	return groups, nil
}

// groupsOf returns all groups of u by `id -G`.
func (r resolver) groupsOf(ctx context.Context, u User) (User, error) {
	out, err := r.run(ctx, "id", "-G", u.Name)
	if err != nil {
		return User{}, fmt.Errorf("groups of %s: %w", u.Name, err)
	}
	groups, err := parseGroups(string(out))
	if err != nil {
		return User{}, fmt.Errorf("groups of %s: %w", u.Name, err)
	}
	return u.withGroups(groups)
}

// programDirs are where the system's own programs are; PATH is not asked, since
// root asks here who somebody is.
var programDirs = []string{"/usr/bin", "/bin", "/usr/sbin", "/sbin", "/run/current-system/sw/bin"}

// errNoProgram is wrapped where a program does not exist.
var errNoProgram = errors.New("no such program")

// runProgram runs one of the system's programs and returns its output.
func runProgram(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	for _, dir := range programDirs {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return nil, err
		}
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.Env = []string{"LC_ALL=C", "PATH=" + strings.Join(programDirs, ":")}
		cmd.Dir = "/"
		cmd.WaitDelay = time.Second
		var complaint bytes.Buffer
		cmd.Stderr = &complaint
		out, err := cmd.Output()
		if err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return nil, fmt.Errorf("%s %s: %w: %s", path, strings.Join(args, " "), err, bytes.TrimSpace(complaint.Bytes()))
		}
		return out, nil
	}
	return nil, fmt.Errorf("%s: %w", name, errNoProgram)
}
