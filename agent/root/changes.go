package root

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// changes carries out changes and remembers them, so that all can be undone
// after any crash: a change is in the journal before it is made and leaves the
// journal after it is undone.
type changes struct {
	host  host.Host
	block netip.Prefix // of our addresses
	path  string

	mu     sync.Mutex
	bootID string
	list   []host.Change
}

// journal is the file's content.
type journal struct {
	Schema  int           `json:"schema"`
	BootID  string        `json:"boot_id"`
	Changes []host.Change `json:"changes"`
}

const journalSchema = 1

func openChanges(ctx context.Context, h host.Host, block netip.Prefix, path string) (*changes, error) {
	c := &changes{host: h, block: block, path: path}
	m, err := h.Machine(ctx)
	if err != nil {
		return nil, err
	}
	c.bootID = m.BootID
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return nil, fault.New(fault.FileIO, "read the journal of changes", err, "make it readable for root").At(path)
	}
	var j journal
	if err := json.Unmarshal(data, &j); err != nil {
		return nil, fault.New(fault.FileIO, "read the journal of changes", err,
			"look at `ip addr` and `nft list ruleset`, undo what is ours by hand, then remove the file").At(path)
	}
	if j.Schema > journalSchema {
		return nil, fault.Newf(fault.StateTooNew, "install the newer version again, or `tbcluster down` with it first",
			"the journal of changes is of schema %d, this program knows %d", j.Schema, journalSchema).At(path)
	}
	for _, ch := range j.Changes {
		// A reboot undoes everything but what is written to files.
		if j.BootID == c.bootID || ch.Kind == host.ChangeUnmanage {
			c.list = append(c.list, ch)
		}
	}
	return c, nil
}

func (c *changes) save() error {
	data, err := json.MarshalIndent(journal{journalSchema, c.bootID, c.list}, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(c.path, append(data, '\n'), 0o600)
}

// same reports whether two changes are about the same thing.
func same(a, b host.Change) bool {
	if a.Kind != b.Kind {
		return false
	}
	if a.Kind == host.ChangeFilter {
		return true
	}
	return a.Interface == b.Interface && a.Prefix == b.Prefix && a.Manager == b.Manager
}

func (c *changes) find(ch host.Change) int {
	return slices.IndexFunc(c.list, func(have host.Change) bool { return same(have, ch) })
}

func (c *changes) apply(ctx context.Context, ch host.Change) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	net, err := c.host.Network(ctx)
	if err != nil {
		return err
	}
	if err := check(ch, net, c.block, c.find(ch) >= 0); err != nil {
		return err
	}
	ifc, _ := net.Interface(ch.Interface)
	before := slices.Clone(c.list)
	if i := c.find(ch); i >= 0 {
		// What was there before us stays what was there before us.
		ch.WasUp, ch.OldMTU = c.list[i].WasUp, c.list[i].OldMTU
		c.list[i] = ch
	} else {
		ch.WasUp, ch.OldMTU = ifc.Up, ifc.MTU
		c.list = append(c.list, ch)
	}
	if err := c.save(); err != nil {
		c.list = before
		return fault.New(fault.FileIO, "write the journal of changes, so "+ch.String()+" was not done", err, "free some space").At(c.path)
	}
	if err := c.host.Apply(ctx, ch); err != nil {
		c.list = before
		return errors.Join(err, c.save())
	}
	return nil
}

func (c *changes) revert(ctx context.Context, ch host.Change) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.find(ch)
	if i < 0 {
		return nil
	}
	if err := c.host.Revert(ctx, c.list[i]); err != nil {
		return err
	}
	c.list = slices.Delete(c.list, i, i+1)
	return c.save()
}

func (c *changes) applied() []host.Change {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.list)
}

// check refuses every change that is not about one of our cables or about
// addresses of our block, and those that would draw or drop what belongs to
// another network of this machine. A change that is in force stays possible:
// the other network came later.
func check(ch host.Change, net host.Network, block netip.Prefix, again bool) error {
	refuse := func(format string, args ...any) error {
		return fault.Newf(fault.Denied, "only cables, and addresses of the configured address_block on them, can be changed",
			"refused to "+ch.String()+": "+format, args...)
	}
	cable := func() error {
		i, ok := net.Interface(ch.Interface)
		if !ok {
			return fmt.Errorf("%s: %w", ch.Interface, host.ErrNoInterface)
		}
		if !i.Cable {
			return refuse("%s is not one of the cables", ch.Interface)
		}
		return nil
	}
	ours := func(p netip.Prefix) error {
		if !p.IsValid() || !block.Contains(p.Addr()) || p.Bits() < block.Bits() {
			return refuse("the address is not of %s", block)
		}
		if i, other := foreign(net, p.Masked()); other.IsValid() && !again {
			return refuse("%s has %s", i, other)
		}
		return nil
	}
	switch ch.Kind {
	case host.ChangeLinkUp:
		return cable()
	case host.ChangeMTU:
		if ch.MTU < 1280 || ch.MTU > 65535 {
			return refuse("%d is no MTU", ch.MTU)
		}
		return cable()
	case host.ChangeAddress:
		if err := ours(ch.Prefix); err != nil {
			return err
		}
		if i, ok := net.Interface(ch.Interface); ok && i.Loopback && ch.Prefix.Bits() == 32 {
			return nil
		}
		if ch.Prefix.Bits() < 29 || ch.Prefix.Bits() > 31 {
			return refuse("a link has a /30")
		}
		return cable()
	case host.ChangeRoute:
		if err := ours(ch.Prefix); err != nil {
			return err
		}
		if ch.Prefix.Bits() < 29 {
			return refuse("only routes to single nodes and links")
		}
		return cable()
	case host.ChangeFilter:
		for _, a := range ch.Addresses {
			if !block.Contains(a) {
				return refuse("%s is not of %s", a, block)
			}
			for _, i := range net.Interfaces {
				if !i.Cable && !i.Loopback && slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Addr() == a }) {
					return refuse("%s is the address of %s", a, i.Name)
				}
			}
		}
		for _, name := range ch.Interfaces {
			if i, ok := net.Interface(name); ok && !i.Cable && !i.Loopback {
				return refuse("%s is not one of the cables", name)
			}
		}
		return nil
	case host.ChangeUnmanage:
		return cable()
	}
	return refuse("there is no such kind of change")
}

// foreign returns a network of an interface that is no cable and overlaps p.
func foreign(net host.Network, p netip.Prefix) (string, netip.Prefix) {
	for _, i := range net.Interfaces {
		if i.Cable || i.Loopback {
			continue
		}
		for _, q := range i.Addresses {
			if q.Addr().Is4() && q.Masked().Overlaps(p) {
				return i.Name, q
			}
		}
	}
	return "", netip.Prefix{}
}
