package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// getentNotFound is getent's exit status where a key is not in the database.
const getentNotFound = 2

// resolve asks getent for the entry and id for the groups. With getent but no
// id the groups cannot be known, since the files may not list them all.
func (r resolver) resolve(ctx context.Context, uid uint32) (User, error) {
	out, err := r.run(ctx, "getent", "passwd", strconv.FormatUint(uint64(uid), 10))
	if errors.Is(err, errNoProgram) {
		u, err := r.passwdInFile(uid)
		if err != nil {
			return User{}, err
		}
		full, err := r.groupsOf(ctx, u)
		if errors.Is(err, errNoProgram) {
			return r.groupsFromFile(u)
		}
		return full, err
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == getentNotFound {
		return User{}, ErrNoUser
	}
	if err != nil {
		return User{}, err
	}
	line, rest, _ := strings.Cut(string(out), "\n")
	if rest != "" {
		return User{}, fmt.Errorf("getent: more than one entry")
	}
	u, err := parsePasswd(line, linuxPasswd)
	if err != nil {
		return User{}, err
	}
	if err := u.usable(uid); err != nil {
		return User{}, err
	}
	return r.groupsOf(ctx, u)
}

func (r resolver) groupsFromFile(u User) (User, error) {
	b, err := os.ReadFile(filepath.Join(r.etc, "group"))
	if err != nil {
		return User{}, err
	}
	groups, err := groupsInFile(string(b), u.Name, u.GID)
	if err != nil {
		return User{}, err
	}
	return u.withGroups(groups)
}

// groupsInFile returns gid and the groups in text, a group(5) file, that list
// the user. A line that it cannot read is an error: it might list him.
func groupsInFile(text, name string, gid uint32) ([]uint32, error) {
	groups := []uint32{gid}
	for i, line := range strings.Split(text, "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Split(line, ":")
		if len(f) != 4 {
			return nil, fmt.Errorf("line %d of the group file: %d fields, want 4", i+1, len(f))
		}
		n, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			return nil, fmt.Errorf("line %d of the group file: %w", i+1, err)
		}
		if slices.Contains(strings.Split(f[3], ","), name) {
			groups = append(groups, uint32(n))
		}
	}
	return groups, nil
}

// passwdInFile returns the entry of uid in the passwd(5) file.
func (r resolver) passwdInFile(uid uint32) (User, error) {
	b, err := os.ReadFile(filepath.Join(r.etc, "passwd"))
	if err != nil {
		return User{}, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		if u, err := parsePasswd(line, linuxPasswd); err == nil && u.UID == uid {
			return u, u.usable(uid)
		}
	}
	return User{}, ErrNoUser
}

// people asks getent for all accounts it lists, and reads the file without it.
func (r resolver) people(ctx context.Context) (bool, error) {
	out, err := r.run(ctx, "getent", "passwd")
	if errors.Is(err, errNoProgram) {
		out, err = os.ReadFile(filepath.Join(r.etc, "passwd"))
	}
	if err != nil {
		return false, err
	}
	const least = 1000
	for _, line := range strings.Split(string(out), "\n") {
		if u, err := parsePasswd(line, linuxPasswd); err == nil && u.person(least) {
			return true, nil
		}
	}
	return false, nil
}
