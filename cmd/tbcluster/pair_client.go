package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// clientJSON is `tbcluster pair --client NAME -o json`.
type clientJSON struct {
	Client memberJSON `json:"client"`
	File   string     `json:"file"` // "-" when it went to standard output
}

// pairClient lets a program in and writes its bundle.
func pairClient(ctx context.Context, o *pairOptions, c *client, role tbv1.Role) (err error) {
	if !o.given["role"] {
		role = tbv1.Role_ROLE_VIEWER
	}
	if o.out == "" {
		o.out = filepath.Base(o.client) + ".pem"
	}
	if o.out == "-" && o.g.json() {
		return fault.Newf(fault.Usage, "name a file", "the bundle and JSON do not both go to standard output")
	}
	var out io.Writer = o.g.out
	if o.out != "-" {
		// First the file, so that no key is made that is nowhere; and for its owner
		// alone from the beginning.
		f, ferr := os.OpenFile(o.out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(ferr, os.ErrExist) {
			return fault.Newf(fault.FileIO, "name another file with --out, or remove it and put that client out: tbcluster pair --revoke NAME", "the file is there already").At(o.out)
		}
		if ferr != nil {
			return fault.New(fault.FileIO, "write the bundle", ferr, "name a file that you may write: --out FILE").At(o.out)
		}
		out = f
		defer func() {
			if cerr := f.Close(); err == nil && cerr != nil {
				err = fault.New(fault.FileIO, "write the bundle", cerr, "free some space, put the client out (tbcluster pair --revoke "+o.client+") and make it anew").At(o.out)
			}
			if err != nil {
				err = errors.Join(err, os.Remove(o.out))
			}
		}()
	}
	if role != tbv1.Role_ROLE_VIEWER {
		if err := vouch(ctx, c, o.as); err != nil {
			return err
		}
	}
	resp, err := c.pairing.AddClient(ctx, &tbv1.AddClientRequest{Name: o.client, Role: role, LocalUser: o.as})
	if err != nil {
		return err
	}
	if _, err := out.Write(resp.GetBundle()); err != nil {
		return fault.New(fault.FileIO, "write the bundle", err, "put the client out (tbcluster pair --revoke "+o.client+") and make it anew").At(o.out)
	}
	switch {
	case o.g.json():
		writeJSON(o.g.out, clientJSON{toMemberJSON(resp.GetClient()), o.out})
	case o.out != "-":
		o.g.printf("%s may use the API of this node as %s; what it needs is in %s\n", plain(o.client), roleWord(resp.GetClient().GetRole()), plain(o.out))
		o.g.printf("whoever has that file may do so: move it, keep no copy; `tbcluster pair --revoke %s` ends it\n", plain(o.client))
	}
	return nil
}

// newIdentityJSON is `tbcluster pair --new-identity -o json`.
type newIdentityJSON struct {
	OldID  string   `json:"old_id"`
	NewID  string   `json:"new_id"`
	Others []string `json:"others"`
}

// renewPatience bounds the wait for the agent with the new identity.
const renewPatience = 60 * time.Second

// pairNewIdentity makes this machine a new node.
func pairNewIdentity(ctx context.Context, o *pairOptions, c *client) error {
	if !o.yes {
		resp, err := c.pairing.List(ctx, &tbv1.PairingServiceListRequest{})
		if err != nil {
			return err
		}
		st, err := c.cluster.GetState(ctx, &tbv1.GetStateRequest{})
		if err != nil {
			return err
		}
		var others []string
		for _, m := range resp.GetMembers() {
			if !m.GetRevoked() && !m.GetClient() && m.GetNodeId() != st.GetState().GetSelfNodeId() {
				others = append(others, m.GetName())
			}
		}
		question := "make this machine a new node?"
		if len(others) > 0 {
			question = fmt.Sprintf("leave the cluster of %s, and make this machine a new node?", plain(strings.Join(others, ", ")))
		}
		if err := confirm(ctx, o.g, question, "--yes"); err != nil {
			return err
		}
	}
	resp, err := c.pairing.NewIdentity(ctx, &tbv1.NewIdentityRequest{})
	if err != nil {
		return err
	}
	now, err := otherNode(ctx, c.endpoint, resp.GetOldNodeId())
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, newIdentityJSON{resp.GetOldNodeId(), now, texts(resp.GetOthers())})
		return nil
	}
	o.g.printf("this machine is now node %s, in no cluster\n", plain(now))
	if len(resp.GetOthers()) > 0 {
		o.g.printf("on %s put the old one out: tbcluster pair --revoke %s\n", plain(resp.GetOthers()[0]), plain(resp.GetOldNodeId()))
	}
	o.g.printf("`tbcluster pair` lets it in again\n")
	return nil
}

// otherNode waits until another node than old answers at e, and returns its ID.
func otherNode(ctx context.Context, e *endpoint, old string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, renewPatience)
	defer cancel()
	for {
		// Each time anew: the connection was to the agent that ends.
		c, err := dial(e)
		if err != nil {
			return "", err
		}
		st, err := c.cluster.GetState(ctx, &tbv1.GetStateRequest{})
		c.close()
		if id := st.GetState().GetSelfNodeId(); err == nil && id != "" && id != old {
			return id, nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return "", fault.Newf(fault.Timeout, "`tbcluster up` starts it; its log says what went wrong: `tbcluster logs --agent`", "the agent has not come back as a new node after %s", renewPatience)
			}
			return "", fault.FromStatus(ctx.Err())
		}
	}
}
