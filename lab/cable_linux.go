package lab

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"tbcluster/api/fault"
)

// cable joins ports of two nodes.
type cable struct {
	planned
	state State // Plugged, Silent, Half, Cut: what a person did to it
	// blind is the end that does not see a cable that is Half.
	blind int
	// laid is set while its interfaces exist: both nodes are on, and it is not cut.
	laid bool
	// hushed is set while something drops what arrives over it.
	hushed bool
	names  [2]string // of its interfaces, while laid
}

// cableMTU is what thunderbolt_net starts with.
const cableMTU = 1500

// cablePrefix is what thunderbolt_net calls its interfaces.
const cablePrefix = "thunderbolt"

func (k *keeper) ends(c *cable) [2]*node {
	return [2]*node{k.nodes[c.node[0]], k.nodes[c.node[1]]}
}

// eachCable does something to the cables that a request names.
func (k *keeper) eachCable(req request, do func(*cable) error) error {
	a, err := k.find(req.Node)
	if err != nil {
		return err
	}
	b, err := k.find(req.Other)
	if err != nil {
		return err
	}
	var found, all int
	for _, c := range k.cables {
		if !(c.node == [2]int{a.index, b.index} || c.node == [2]int{b.index, a.index}) {
			continue
		}
		all++
		if req.Cable != 0 && req.Cable != c.index {
			continue
		}
		found++
		if err := do(c); err != nil {
			return err
		}
	}
	switch {
	case all == 0:
		return fault.Newf(fault.Usage, Command(k.rec.Options.Name, "status")+" lists the cables", "no cable joins %s and %s", a.name, b.name)
	case found == 0:
		return fault.Newf(fault.Usage, fmt.Sprintf("choose 1 to %d", all), "%s and %s have no cable %d", a.name, b.name, req.Cable)
	}
	return nil
}

// cut pulls a cable, or makes it silent, or hides it from one of its ends.
func (k *keeper) cut(c *cable, silent bool, hide string) error {
	if hide != "" {
		if c.state != Plugged {
			return fault.Newf(fault.Usage, "mend it first", "a cable that is %s cannot be seen by one end", c.state)
		}
		c.state, c.blind = Half, 0
		if k.nodes[c.node[1]].name == hide {
			c.blind = 1
		}
		return k.hide(c)
	}
	if !silent {
		err := k.unlay(c)
		c.state = Cut
		return err
	}
	if c.state == Cut {
		return fault.Newf(fault.Usage, "mend it first", "a cable that is cut has nothing to be silent about")
	}
	if c.state == Half {
		return fault.Newf(fault.Usage, "mend it first", "a cable that one end does not see carries nothing already")
	}
	c.state = Silent
	return k.silence(c)
}

// hide takes a cable from the sight of an end: what the driver shows of it is
// gone there, and the interface at the other has no carrier.
func (k *keeper) hide(c *cable) error {
	if !c.laid {
		return nil
	}
	n := k.ends(c)[c.blind]
	err := n.tree.unplug(c.port[c.blind], c.names[c.blind], k.uevent(n))
	if err == nil {
		var l netlink.Link
		if l, err = n.boot.nl.LinkByName(c.names[c.blind]); err == nil {
			err = n.boot.nl.LinkSetDown(l)
		}
	}
	if err != nil {
		return failed("hide the cable from "+n.name, err, "try again")
	}
	return nil
}

// move plugs the ends of a cable into the first ports that are free.
func (k *keeper) move(c *cable) error {
	to := c.port
	for end, n := range k.ends(c) {
		taken := map[port]bool{}
		for _, o := range k.cables {
			for i := range o.node {
				if o.node[i] == c.node[end] {
					taken[o.port[i].upstream()] = true
				}
			}
		}
		for _, f := range n.tree.others {
			for i := range len(n.tree.uuids) * portsPerDomain {
				if filepath.Base(f.dir) == nthPort(i).String() {
					taken[nthPort(i)] = true
				}
			}
		}
		free := false
		for i := range len(n.tree.uuids) * portsPerDomain {
			if p := nthPort(i); !taken[p] {
				to[end], free = p, true
				break
			}
		}
		if !free {
			return fault.Newf(fault.Usage, "make the lab with fewer cables", "%s has no other port", n.name)
		}
	}
	if err := k.unlay(c); err != nil {
		return err
	}
	c.port = to
	return nil
}

// mend plugs a cable in again, or ends its silence. With rename its interfaces
// get names that no interface of their nodes had since they booted.
func (k *keeper) mend(c *cable, rename, move bool) error {
	was := c.state
	if move {
		if err := k.move(c); err != nil {
			return err
		}
	}
	c.state = Plugged
	if was == Half {
		if err := k.unlay(c); err != nil {
			return err
		}
	}
	if rename {
		if err := k.unlay(c); err != nil {
			return err
		}
		return k.layAs(c, true)
	}
	if was == Silent && c.laid {
		return k.unsilence(c)
	}
	return k.lay(c)
}

// lay makes the interfaces of a cable, if it is plugged into two nodes that are
// on, and what the Thunderbolt driver shows of it.
func (k *keeper) lay(c *cable) error { return k.layAs(c, false) }

func (k *keeper) layAs(c *cable, fresh bool) error {
	n := k.ends(c)
	if c.laid || c.state == Cut || n[0].boot == nil || n[1].boot == nil {
		return nil
	}
	what := fmt.Sprintf("plug the cable %s:%s in", n[0].name, n[1].name)
	for end := range n {
		c.names[end] = k.freeName(n[end], fresh)
	}
	// The driver: first the XDomain, then its services, then the interface. Who
	// hears of an interface by netlink finds all that leads to it.
	for end := range n {
		if err := k.plugIn(c, end); err != nil {
			return failed(what, err, "try again")
		}
	}
	if err := k.makeVeth(c); err != nil {
		for end := range n {
			err = errors.Join(err, n[end].tree.unplug(c.port[end], c.names[end], k.uevent(n[end])))
		}
		return failed(what, err, "try again")
	}
	c.laid = true
	switch c.state {
	case Silent:
		return k.silence(c)
	case Half:
		return k.hide(c)
	}
	return nil
}

// plugIn shows the far end of a cable to one of its ends.
func (k *keeper) plugIn(c *cable, end int) error {
	n := k.ends(c)
	me, far := n[end], n[1-end]
	uuid := far.tree.uuids[c.port[1-end].domain]
	if k.rec.Options.has(Swapped) && me.index%2 == 1 {
		uuid = swapWords(uuid)
	}
	return me.tree.plug(c.port[end], peer{
		uuid: uuid,
		name: far.name,
	}, c.names[end], k.uevent(me))
}

// uevent returns what tells a node of a change in its tree.
func (k *keeper) uevent(n *node) func(uevent) {
	return func(e uevent) { sendUevent(n.boot, e) }
}

func (k *keeper) makeVeth(c *cable) error {
	n := k.ends(c)
	mac := func(end int) net.HardwareAddr {
		m := cableMAC(n[end].tree.uuids[c.port[end].domain], c.port[end])
		return m[:]
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = c.names[0]
	attrs.MTU = cableMTU
	attrs.HardwareAddr = mac(0)
	veth := netlink.NewVeth(attrs)
	veth.PeerName = c.names[1]
	veth.PeerMTU = cableMTU
	veth.PeerHardwareAddr = mac(1)
	veth.PeerNamespace = netlink.NsFd(int(n[1].boot.ns))
	if err := n[0].boot.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("make a veth pair: %w", err)
	}
	if k.rec.Options.Rate == "" {
		return nil
	}
	for end := range n {
		if err := shape(n[end].boot.nl, c.names[end], k.rec.Options.Rate); err != nil {
			return errors.Join(err, deleteLink(n[0].boot.nl, c.names[0]))
		}
	}
	return nil
}

// shape limits what an interface sends.
func shape(nl *netlink.Handle, name, rate string) error {
	bits, err := ParseRate(rate)
	if err != nil {
		return err
	}
	link, err := nl.LinkByName(name)
	if err != nil {
		return err
	}
	bytes := bits / 8
	// A burst of 4 ms, so that a busy machine does not lose what it was late for,
	// and of one large segment at least; then 5 ms of queue, so that the limit
	// shows as a rate and not as a round trip.
	burst := max(bytes/250, 128<<10)
	limit := burst + max(bytes/200, 256<<10)
	tbf := &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: link.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0),
		},
		Rate: bytes, Limit: uint32(min(limit, 1<<31)), Buffer: netlink.Xmittime(bytes, uint32(burst)),
	}
	if err := nl.QdiscAdd(tbf); err != nil {
		return fmt.Errorf("limit %s to %s: %w", name, rate, err)
	}
	return nil
}

// unlay does what the driver does at an unplug: the interfaces go first, then
// services and XDomain, at both ends.
func (k *keeper) unlay(c *cable) error {
	if !c.laid {
		return nil
	}
	n := k.ends(c)
	var errs []error
	// The kernel keeps what drops its frames for the next interface of the name,
	// which may be another cable.
	for end := range n {
		if c.hushed && n[end].boot != nil {
			errs = append(errs, dropArriving(int(n[end].boot.ns), c.names[end], false))
		}
	}
	c.laid, c.hushed = false, false
	// One veth end takes the other along. The handle of a node whose processes
	// are dead still works, but one end may be gone already.
	for end := range n {
		if n[end].boot != nil && n[end].boot.nl != nil {
			errs = append(errs, deleteLink(n[end].boot.nl, c.names[end]))
		}
	}
	for end := range n {
		errs = append(errs, n[end].tree.unplug(c.port[end], c.names[end], k.uevent(n[end])))
	}
	if err := errors.Join(errs...); err != nil {
		return failed(fmt.Sprintf("unplug the cable %s:%s", n[0].name, n[1].name), err, "try again")
	}
	return nil
}

// freeName is the name that the kernel would give to a new interface: the
// lowest number that is free; fresh asks for one that was never used.
func (k *keeper) freeName(n *node, fresh bool) string {
	used := map[string]bool{}
	for _, c := range k.cables {
		for end, node := range k.ends(c) {
			if node == n && c.laid {
				used[c.names[end]] = true
			}
		}
	}
	number := 0
	if fresh {
		number = n.lastNumber + 1
	}
	for used[cablePrefix+strconv.Itoa(number)] {
		number++
	}
	n.lastNumber = max(n.lastNumber, number)
	return cablePrefix + strconv.Itoa(number)
}

// silence drops all that arrives over a cable, at both ends, below everything
// that the nodes' own packet filters could say about it.
func (k *keeper) silence(c *cable) error { return k.filter(c, true) }

// unsilence lets it arrive again.
func (k *keeper) unsilence(c *cable) error { return k.filter(c, false) }

func (k *keeper) filter(c *cable, drop bool) error {
	if !c.laid {
		return nil
	}
	c.hushed = drop
	for end, n := range k.ends(c) {
		if err := dropArriving(int(n.boot.ns), c.names[end], drop); err != nil {
			return failed(fmt.Sprintf("make the cable silent at %s", n.name), err, "use a kernel with nf_tables for netdev")
		}
	}
	return nil
}

func dropArriving(netnsFd int, name string, drop bool) error {
	conn, err := nftables.New(nftables.WithNetNSFd(netnsFd))
	if err != nil {
		return err
	}
	table := &nftables.Table{Family: nftables.TableFamilyNetdev, Name: "lab_silent_" + strings.ToLower(name)}
	// Added first, so that deleting one that is not there is no error.
	conn.AddTable(table)
	conn.DelTable(table)
	if drop {
		conn.AddTable(table)
		policy := nftables.ChainPolicyDrop
		priority := nftables.ChainPriority(-1000)
		conn.AddChain(&nftables.Chain{
			Name: "arriving", Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookIngress, Priority: &priority, Device: name, Policy: &policy,
		})
	}
	return conn.Flush()
}
