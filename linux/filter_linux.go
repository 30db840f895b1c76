package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"tbcluster/host"
)

// filterTimeout is how long the kernel may take to answer.
const filterTimeout = 10 * time.Second

// elementsPerMessage keeps the elements of a set below the 64 KiB that one
// netlink attribute can hold.
const elementsPerMessage = 256

// filterConn opens nothing yet: package nftables does when it sends.
func filterConn() (*nftables.Conn, error) {
	return nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		return c.SetDeadline(time.Now().Add(filterTimeout))
	}))
}

// setFilter makes the table anew, in one transaction. Interfaces are matched by
// name, so that one that goes and comes back is still open. The hook is before
// routing: what is only passing through is dropped too.
func (m *machine) setFilter(_ context.Context, c host.Change) error {
	conn, err := filterConn()
	if err != nil {
		return fmt.Errorf("packet filter: %w", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: tableName}
	conn.AddTable(table) // so that it can be deleted
	conn.DelTable(table)
	conn.AddTable(table)
	four, six := split(c.Addresses)
	interfaces := &nftables.Set{Table: table, Name: "interfaces", KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}
	addresses4 := &nftables.Set{Table: table, Name: "addresses4", KeyType: nftables.TypeIPAddr, KeyByteOrder: binaryutil.BigEndian}
	addresses6 := &nftables.Set{Table: table, Name: "addresses6", KeyType: nftables.TypeIP6Addr, KeyByteOrder: binaryutil.BigEndian}
	forwarders := &nftables.Set{Table: table, Name: "forwarders", KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}
	type filled struct {
		set      *nftables.Set
		elements []nftables.SetElement
	}
	sets := []filled{
		{interfaces, nameElements(sortedSet(c.Interfaces))},
		{addresses4, addressElements(four)},
		{addresses6, addressElements(six)},
	}
	if len(c.Forwarders) > 0 {
		sets = append(sets, filled{forwarders, nameElements(sortedSet(c.Forwarders))})
	}
	for _, s := range sets {
		if err := conn.AddSet(s.set, nil); err != nil {
			return fmt.Errorf("packet filter: set %s: %w", s.set.Name, err)
		}
		for some := range slices.Chunk(s.elements, elementsPerMessage) {
			if err := conn.SetAddElements(s.set, some); err != nil {
				return fmt.Errorf("packet filter: set %s: %w", s.set.Name, err)
			}
		}
	}
	ids := map[string]uint32{}
	for _, s := range sets {
		ids[s.set.Name] = s.set.ID
	}
	policy := nftables.ChainPolicyAccept
	for _, chain := range filterChains(c) {
		added := conn.AddChain(&nftables.Chain{
			Table: table, Name: chain.name, Type: nftables.ChainTypeFilter, Hooknum: chain.hook, Priority: chain.priority, Policy: &policy,
		})
		for _, rule := range chain.rules {
			for _, e := range rule {
				if l, ok := e.(*expr.Lookup); ok {
					l.SetID = ids[l.SetName] // of a set that the same transaction makes
				}
			}
			conn.AddRule(&nftables.Rule{Table: table, Chain: added, Exprs: rule})
		}
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("packet filter: %w", err)
	}
	return nil
}

// filterChain is a chain of the table.
type filterChain struct {
	name     string
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	rules    [][]expr.Any
}

// filterChains are the chains of a filter; sets are looked up by name.
func filterChains(c host.Change) []filterChain {
	const register = 1
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	drop := &expr.Verdict{Kind: expr.VerdictDrop}
	inName := &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register}
	chains := []filterChain{{
		name: "prerouting", hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityRaw,
		rules: [][]expr.Any{
			{inName, &expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: ifname("lo")}, accept},
			{inName, &expr.Lookup{SourceRegister: register, SetName: "interfaces"}, accept},
			dropTo("addresses4", unix.NFPROTO_IPV4, 16, 4, drop),
			dropTo("addresses6", unix.NFPROTO_IPV6, 24, 16, drop),
		},
	}}
	if len(c.Forwarders) > 0 {
		// What we let pass on between cables gets no further than cables.
		chains = append(chains, filterChain{
			name: "forward", hook: nftables.ChainHookForward, priority: nftables.ChainPriorityFilter,
			rules: [][]expr.Any{{
				inName, &expr.Lookup{SourceRegister: register, SetName: "forwarders"},
				&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: register},
				&expr.Lookup{SourceRegister: register, SetName: "interfaces", Invert: true},
				&expr.Counter{}, drop,
			}},
		})
	}
	return chains
}

// sameRule reports whether a rule that was read is the one that was set: counters
// count, and a set has a number only while it is made.
func sameRule(have, want []expr.Any) bool {
	plain := func(e expr.Any) any {
		switch e := e.(type) {
		case *expr.Counter:
			return expr.Counter{}
		case *expr.Lookup:
			l := *e
			l.SetID = 0
			return l
		}
		return e
	}
	return slices.EqualFunc(have, want, func(a, b expr.Any) bool { return reflect.DeepEqual(plain(a), plain(b)) })
}

// dropTo drops packets of one protocol whose destination, at offset in their
// header, is in set.
func dropTo(set string, protocol byte, offset, length uint32, drop expr.Any) []expr.Any {
	const register = 1
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: register},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: []byte{protocol}},
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: register, SetName: set},
		&expr.Counter{},
		drop,
	}
}

func (m *machine) removeFilter(context.Context, host.Change) error {
	conn, err := filterConn()
	if err != nil {
		return fmt.Errorf("packet filter: %w", err)
	}
	conn.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: tableName})
	if err := conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("packet filter: %w", err)
	}
	return nil
}

// ifname is a name as the kernel compares it: padded with zeros.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func nameElements(list []string) []nftables.SetElement {
	var e []nftables.SetElement
	for _, name := range list {
		e = append(e, nftables.SetElement{Key: ifname(name)})
	}
	return e
}

func addressElements(list []netip.Addr) []nftables.SetElement {
	var e []nftables.SetElement
	for _, a := range list {
		e = append(e, nftables.SetElement{Key: a.AsSlice()})
	}
	return e
}

// seenFilter is what was found as it was set, and the generation of the kernel's
// rules then: as long as nobody changes any rule, there is nothing to list.
type seenFilter struct {
	mu         sync.Mutex
	generation uint32 // 0 if nothing was seen
	change     host.Change
}

// Lacks implements host.Host.
func (m *machine) Lacks(_ context.Context, c host.Change) (string, error) {
	if c.Kind != host.ChangeFilter {
		return "", nil
	}
	m.seen.mu.Lock()
	defer m.seen.mu.Unlock()
	now, err := rulesGeneration()
	if err != nil {
		return "", fmt.Errorf("generation of packet filters: %w", err)
	}
	was := m.seen.change
	if m.seen.generation == now && slices.Equal(was.Addresses, c.Addresses) && slices.Equal(was.Interfaces, c.Interfaces) && slices.Equal(was.Forwarders, c.Forwarders) {
		return "", nil
	}
	m.seen.generation = 0
	lacks, err := lacksFilter(c)
	if err != nil {
		return "", fmt.Errorf("packet filter: %w", err)
	}
	if lacks == "" { // a later change has another generation
		m.seen.generation, m.seen.change = now, c
	}
	return lacks, nil
}

// rulesGeneration is the number that the kernel gives to all rules of nftables as
// they are now; it has another after each change.
func rulesGeneration() (generation uint32, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := conn.SetDeadline(time.Now().Add(filterTimeout)); err != nil {
		return 0, err
	}
	const header = 4 // of every message of netfilter
	answers, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   make([]byte, header),
	})
	if err != nil {
		return 0, err
	}
	for _, a := range answers {
		if len(a.Data) < header {
			continue
		}
		attributes, err := netlink.NewAttributeDecoder(a.Data[header:])
		if err != nil {
			return 0, err
		}
		attributes.ByteOrder = binary.BigEndian
		for attributes.Next() {
			if attributes.Type() == unix.NFTA_GEN_ID {
				generation = attributes.Uint32()
			}
		}
		if err := attributes.Err(); err != nil {
			return 0, err
		}
	}
	if generation == 0 {
		return 0, errors.New("the kernel did not say it")
	}
	return generation, nil
}

// lacksFilter compares the table with what setFilter makes: its flags, chains
// with their hooks and rules, and what is in its sets.
func lacksFilter(c host.Change) (string, error) {
	conn, err := filterConn()
	if err != nil {
		return "", err
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == tableName })
	if i < 0 {
		return "the nftables table inet " + tableName + " is not there", nil
	}
	table := tables[i]
	if table.Flags != 0 {
		return "the nftables table inet " + tableName + " has flags, and may be dormant", nil
	}
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", err
	}
	four, six := split(c.Addresses)
	sets := map[string][]nftables.SetElement{
		"interfaces": nameElements(sortedSet(c.Interfaces)), "addresses4": addressElements(four), "addresses6": addressElements(six),
	}
	if len(c.Forwarders) > 0 {
		sets["forwarders"] = nameElements(sortedSet(c.Forwarders))
	}
	for _, want := range filterChains(c) {
		i := slices.IndexFunc(chains, func(c *nftables.Chain) bool { return c.Table.Name == tableName && c.Name == want.name })
		if i < 0 || chains[i].Hooknum == nil || *chains[i].Hooknum != *want.hook || chains[i].Priority == nil || *chains[i].Priority != *want.priority {
			return "the chain " + want.name + " is not there", nil
		}
		have, err := conn.GetRules(table, chains[i])
		if err != nil {
			return "", fmt.Errorf("chain %s: %w", want.name, err)
		}
		if len(have) != len(want.rules) {
			return fmt.Sprintf("the chain %s has %d rules, and was set with %d", want.name, len(have), len(want.rules)), nil
		}
		for i, rule := range have {
			if !sameRule(rule.Exprs, want.rules[i]) {
				return fmt.Sprintf("rule %d of the chain %s is not the one that was set", i+1, want.name), nil
			}
		}
	}
	for name, want := range sets {
		have, err := conn.GetSetElements(&nftables.Set{Table: table, Name: name})
		if err != nil {
			return "", fmt.Errorf("set %s: %w", name, err)
		}
		if !slices.Equal(keys(have), keys(want)) {
			return "the set " + name + " has not what was put into it", nil
		}
	}
	return "", nil
}

// keys returns the keys of elements, sorted, each once.
func keys(elements []nftables.SetElement) []string {
	var out []string
	for _, e := range elements {
		out = append(out, string(e.Key))
	}
	slices.Sort(out)
	return slices.Compact(out)
}
