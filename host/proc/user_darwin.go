package proc

import (
	"context"
	"errors"
	"os/exec"
	"strconv"
	"strings"
)

// resolve asks id for the entry and for the groups: it asks Open Directory, as
// dscl does.
func (r resolver) resolve(ctx context.Context, uid uint32) (User, error) {
	out, err := r.run(ctx, "id", "-P", strconv.FormatUint(uint64(uid), 10))
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return User{}, errors.Join(ErrNoUser, err)
	}
	if err != nil {
		return User{}, err
	}
	u, err := parsePasswd(string(out), masterPasswd)
	if err != nil {
		return User{}, err
	}
	if err := u.usable(uid); err != nil {
		return User{}, err
	}
	return r.groupsOf(ctx, u)
}

// people asks Open Directory for the numbers of all accounts; service accounts
// are below those of people or negative.
func (r resolver) people(ctx context.Context) (bool, error) {
	out, err := r.run(ctx, "dscl", ".", "-list", "/Users", "UniqueID")
	if err != nil {
		return false, err
	}
	const least = 501
	for _, line := range strings.Split(string(out), "\n") {
		f := strings.Fields(line)
		if len(f) != 2 {
			continue
		}
		if n, err := strconv.ParseUint(f[1], 10, 32); err == nil && (User{UID: uint32(n)}).person(least) {
			return true, nil
		}
	}
	return false, nil
}
