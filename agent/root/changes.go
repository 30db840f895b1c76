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
	"tbcluster/host/schema"
)

// changes carries out changes and remembers them, so that all can be undone
// after any crash: a change is in the journal before it is made and leaves the
// journal after it is undone.
type changes struct {
	host   host.Host
	blocks []netip.Prefix // of our addresses
	path   string

	// step is called between what is done to the journal and to the machine;
	// tests end the process there.
	step func(where string)

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

func openChanges(ctx context.Context, h host.Host, blocks []netip.Prefix, path string) (*changes, error) {
	c := &changes{host: h, blocks: blocks, path: path, step: func(string) {}}
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
	if err := schema.Check(data, journalSchema, path); err != nil {
		return nil, err
	}
	var j journal
	if err := json.Unmarshal(data, &j); err != nil {
		return nil, fault.New(fault.FileIO, "read the journal of changes", err,
			"look at `ip addr` and `nft list ruleset`, undo what is ours by hand, then remove the file").At(path)
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
	c.step("before the journal")
	data, err := json.MarshalIndent(journal{journalSchema, c.bootID, c.list}, "", "  ")
	if err != nil {
		return err
	}
	if err := renameio.WriteFile(c.path, append(data, '\n'), 0o600); err != nil {
		return err
	}
	c.step("after the journal")
	return nil
}

// same reports whether two changes are one: undoing either undoes both.
func same(a, b host.Change) bool {
	if a.Kind != b.Kind {
		return false
	}
	if a.Kind == host.ChangeFilter {
		return true // there is one table
	}
	return a.Interface == b.Interface && a.Prefix == b.Prefix && a.Gateway == b.Gateway && a.Source == b.Source &&
		a.Metric == b.Metric && a.MTU == b.MTU && a.Manager == b.Manager
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
	if err := check(ch, net, c.blocks, c.find(ch) >= 0); err != nil {
		return err
	}
	before := slices.Clone(c.list)
	fail := func(what string, err error, fix string) error {
		c.list = before
		return fault.New(fault.FileIO, what, err, fix).At(c.path)
	}
	c.note(ch, net)
	if err := c.save(); err != nil {
		return fail("write the journal of changes, so "+ch.String()+" was not done", err, "free some space")
	}
	c.step("before the change")
	if err := c.host.Apply(ctx, ch); err != nil {
		c.list = before
		return errors.Join(err, c.save())
	}
	c.step("after the change")
	if !c.replaced(ch) {
		return nil
	}
	if err := c.save(); err != nil {
		return fault.New(fault.FileIO, "write the journal of changes after "+ch.String(), err, "free some space").At(c.path)
	}
	return nil
}

// note puts a change into the list, with what was there before us. Of an
// interface that was made anew under its name, everything that the list has is
// gone with the old one.
func (c *changes) note(ch host.Change, net host.Network) {
	ifc, _ := net.Interface(ch.Interface)
	c.list = slices.DeleteFunc(c.list, func(have host.Change) bool {
		return have.Interface == ch.Interface && have.Index != 0 && have.Index != ifc.Index && have.Kind != host.ChangeUnmanage && have.Kind != host.ChangeFilter
	})
	ch.Index, ch.WasUp, ch.WasOn, ch.OldMTU = ifc.Index, ifc.Up, ifc.Forwarding, ifc.MTU
	for i, have := range c.list {
		switch {
		case same(have, ch):
			// What was there before us stays what was there before us.
			ch.WasUp, ch.WasOn, ch.OldMTU = have.WasUp, have.WasOn, have.OldMTU
			c.list[i] = ch
			return
		case have.Kind == host.ChangeMTU && ch.Kind == host.ChangeMTU && have.Interface == ch.Interface:
			// Until the new one is set the old one may still be there: both are
			// noted, and each undoes what it finds of its own.
			ch.OldMTU = have.OldMTU
		}
	}
	c.list = append(c.list, ch)
}

// replaced drops what a change that was made has taken the place of.
func (c *changes) replaced(ch host.Change) bool {
	if ch.Kind != host.ChangeMTU {
		return false
	}
	n := len(c.list)
	c.list = slices.DeleteFunc(c.list, func(have host.Change) bool {
		return have.Kind == host.ChangeMTU && have.Interface == ch.Interface && !same(have, ch)
	})
	return len(c.list) != n
}

func (c *changes) revert(ctx context.Context, ch host.Change) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.find(ch)
	if i < 0 {
		return nil
	}
	c.step("before undoing")
	if err := c.host.Revert(ctx, c.list[i]); err != nil {
		return err
	}
	c.step("after undoing")
	c.list = slices.Delete(c.list, i, i+1)
	return c.save()
}

func (c *changes) applied() []host.Change {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.list)
}

// look returns what the journal has of a change, and what of that is not on the
// machine any more.
func (c *changes) look(ctx context.Context, ch host.Change) (have []host.Change, lacks string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.find(ch)
	if i < 0 {
		return nil, "", nil
	}
	lacks, err = c.host.Lacks(ctx, c.list[i])
	return []host.Change{c.list[i]}, lacks, err
}

// check refuses every change that is not about one of our cables or about
// addresses of our block, and those that would draw or drop what belongs to
// another network of this machine. A change that is in force stays possible:
// the other network came later.
func check(ch host.Change, net host.Network, blocks []netip.Prefix, again bool) error {
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
		if !p.IsValid() || !within(blocks, p) {
			return refuse("the address is not of %s", blocks)
		}
		if i, other := foreign(net, p.Masked()); other.IsValid() && !again {
			return refuse("%s has %s", i, other)
		}
		return nil
	}
	switch ch.Kind {
	case host.ChangeLinkUp, host.ChangeForward:
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
			if !within(blocks, netip.PrefixFrom(a, a.BitLen())) {
				return refuse("%s is not of %s", a, blocks)
			}
			for _, i := range net.Interfaces {
				if !i.Cable && !i.Loopback && slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Addr() == a }) {
					return refuse("%s is the address of %s", a, i.Name)
				}
			}
		}
		for _, name := range slices.Concat(ch.Interfaces, ch.Forwarders) {
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

// within reports whether all of p is in one of the blocks.
func within(blocks []netip.Prefix, p netip.Prefix) bool {
	return slices.ContainsFunc(blocks, func(b netip.Prefix) bool { return b.Contains(p.Addr()) && p.Bits() >= b.Bits() })
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
