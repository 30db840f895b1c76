package proc

import (
	"context"
	"errors"
	"os/exec"
	"strconv"
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
