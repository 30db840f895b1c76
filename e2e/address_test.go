//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// network prints everything that the agent changes on a machine.
const network = `ip address; ip rule; ip route show table all; ip -6 route show table all; nft list ruleset; ip -4 netconf; ls /run/systemd/network /run/NetworkManager/conf.d 2>/dev/null`

// rememberingBoot starts the agent after the network was written down, which
// happens once for each disk, and after what is to be there before.
func rememberingBoot(first ...string) []string {
	return []string{"sh", "-c", strings.Join(append(first, `[ -e /var/tmp/before ] || { `+network+`; } >/var/tmp/before 2>&1; exec tbcluster agent --root`), "\n")}
}

var (
	times     = regexp.MustCompile(`(valid_lft|preferred_lft|expires) \S+`)
	ifaceLine = regexp.MustCompile(`^\d+: ([^:@]+)(?:@\S+)?: <([^>]*)>.* mtu (\d+).*`)
	cableName = regexp.MustCompile(`thunderbolt\d+`)
)

// plain is a printed network without what changes by itself: times, numbers,
// the names that a cable has at the moment, and the carrier, which is a matter
// of the other end.
func plain(text string) []string {
	var out []string
	for l := range strings.Lines(text) {
		l = strings.TrimSpace(times.ReplaceAllString(l, ""))
		if m := ifaceLine.FindStringSubmatch(l); m != nil {
			l = fmt.Sprintf("%s up=%t mtu %s", m[1], slices.Contains(strings.Split(m[2], ","), "UP"), m[3])
		}
		if l = cableName.ReplaceAllString(l, "thunderboltN"); strings.Contains(l, "link-netnsid") {
			l, _, _ = strings.Cut(l, "link-netnsid")
		}
		if l = strings.Join(strings.Fields(l), " "); l != "" {
			out = append(out, l)
		}
	}
	slices.Sort(out)
	return out
}

// lacks lists what is in a and not in b, counted.
func lacks(a, b []string) (out []string) {
	left := map[string]int{}
	for _, l := range b {
		left[l]++
	}
	for _, l := range a {
		if left[l]--; left[l] < 0 {
			out = append(out, l)
		}
	}
	return out
}

// asBefore fails the test unless the network of a node is as it was before the
// agent came.
func (c *cluster) asBefore(node string) {
	c.t.Helper()
	before, now := plain(c.run(node, "cat", "/var/tmp/before")), plain(c.run(node, "sh", "-c", network+"; true"))
	if len(before) < 10 {
		c.t.Fatalf("%s: what was before is %q", node, before)
	}
	if left, gone := lacks(now, before), lacks(before, now); len(left)+len(gone) > 0 {
		c.t.Errorf("%s is not as it was before\nleft:\n%s\ngone:\n%s", node, strings.Join(left, "\n"), strings.Join(gone, "\n"))
	}
}

// subnet is that of a link, as one end has it.
func subnet(l *v1.Link) netip.Prefix {
	p, err := netip.ParsePrefix(l.GetA().GetAddress())
	if err != nil {
		return netip.Prefix{}
	}
	return p.Masked()
}

// A LAN on all of our block, a VPN on part of it, a routed range on a part of it
// and of the next: every cable is addressed, and nothing that was there changes.
func TestAddressesKeepClearOfWhatIsThere(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Options{Nodes: 4, Topology: lab.Chain, Boot: rememberingBoot(`
		case $(hostname) in
		alpha) ip address replace 10.77.3.4/16 dev eth0;;
		beta) ip address replace 10.77.3.5/16 dev eth0
			nft 'table inet mine { chain input { type filter hook input priority 0; policy accept; tcp dport 9 drop; }; }';;
		gamma) ip tuntap add vpn0 mode tun; ip address replace 10.77.64.1/18 dev vpn0; ip link set vpn0 up
			ip route replace 10.77.32.0/19 dev vpn0 table 51820; ip rule add fwmark 0x51 table 51820 priority 90;;
		delta) ip route replace 10.77.0.0/17 via 172.31.77.250; ip route replace 172.29.0.0/17 via 172.31.77.250;;
		esac`)})
	taken := map[string][]string{
		"alpha": {"10.77.0.0/16", "172.31.77.0/24"}, "beta": {"10.77.0.0/16", "172.31.77.0/24"},
		"gamma": {"10.77.64.0/18", "10.77.32.0/19", "172.31.77.0/24"}, "delta": {"10.77.0.0/17", "172.29.0.0/17", "172.31.77.0/24"},
	}
	// What one node's network has is no node address of another either: the one
	// could not reach it over its cable.
	clear := func(n *v1.Node) bool {
		a, err := netip.ParseAddr(n.NodeAddress)
		for _, list := range taken {
			if err != nil || slices.ContainsFunc(list, func(r string) bool { return netip.MustParsePrefix(r).Contains(a) }) {
				return false
			}
		}
		return true
	}
	s := c.until("alpha", "every cable addressed and proven, and every node address clear of every network", func(s *v1.ClusterState) bool {
		return links(s, proven) == 3 && !slices.ContainsFunc(s.Nodes, func(n *v1.Node) bool { return !clear(n) })
	})
	address := map[string]string{}
	for _, n := range s.Nodes {
		address[n.Name] = n.NodeAddress
	}
	for i, n := range c.names[1:] { // a chain: each is joined to the one before
		for from, to := range map[string]string{n: c.names[i], c.names[i]: n} {
			// It comes once the cable is proven, and there may be no other.
			way, err := c.tryRun(from, "ip", "route", "get", address[to])
			for end := time.Now().Add(patience); !strings.Contains(way, " dev thunderbolt") && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				way, err = c.tryRun(from, "ip", "route", "get", address[to])
			}
			if !strings.Contains(way, " dev thunderbolt") {
				t.Errorf("%s sends to the node address of %s by %s (%v)", from, to, way, err)
			}
		}
	}
	for _, l := range s.Links {
		p := subnet(l)
		if !p.IsValid() {
			t.Errorf("the cable %s is proven and has no address", l.Id)
		}
		for _, end := range []*v1.LinkEnd{l.A, l.B} {
			for _, r := range taken[end.NodeName] {
				if netip.MustParsePrefix(r).Overlaps(p) {
					t.Errorf("the cable %s has %s, and %s of %s was there", l.Id, p, r, end.NodeName)
				}
			}
		}
	}
	for _, n := range s.Nodes {
		a := netip.MustParseAddr(n.NodeAddress)
		for _, r := range taken[n.Name] {
			if netip.MustParsePrefix(r).Contains(a) {
				t.Errorf("%s has the node address %s, and %s was there", n.Name, a, r)
			}
		}
	}
	for _, n := range c.names {
		before, now := plain(c.run(n, "cat", "/var/tmp/before")), plain(c.run(n, "sh", "-c", network+"; true"))
		gone := slices.DeleteFunc(lacks(before, now), func(l string) bool {
			return strings.HasPrefix(l, "thunderboltN up=false") || strings.Contains(l, "dev thunderboltN forwarding")
		})
		if len(gone) > 0 {
			t.Errorf("%s: up changed what was there:\n%s", n, strings.Join(gone, "\n"))
		}
	}
	for _, n := range c.names {
		c.run(n, "tbcluster", "down", "--stop")
	}
	for _, n := range c.names {
		c.asBefore(n)
	}
}

// memory is the file in which a node remembers its addresses.
const memory = "/var/lib/tbcluster/agent/links.json"

// Two halves of a cluster give their cables and nodes the same addresses while
// they do not hear of each other. When they meet, whoever has to move waits for
// what goes over it, and one keeps what it has. On the way it is seen that nodes
// without a cable reach each other through those that forward, and the LAN not.
func TestHalvesThatGrewApartSettle(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Options{Nodes: 4, Topology: lab.Chain, Config: map[string]any{"forward": true}, Boot: rememberingBoot()})
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	for _, n := range c.names {
		c.until(n, "links", func(s *v1.ClusterState) bool { return links(s, proven) == 3 })
	}
	c.through()

	s := c.until("alpha", "node addresses", func(s *v1.ClusterState) bool {
		return !slices.ContainsFunc(s.Nodes, func(n *v1.Node) bool { return n.NodeAddress == "" })
	})
	shared, owner := subnet(between(s, "alpha", "beta")), node(s, "alpha").NodeAddress
	for _, n := range []string{"gamma", "delta"} {
		c.must(c.lab.Kill(ctx, n, true))
	}
	c.must(c.lab.Cut(ctx, "beta", "gamma", lab.CutOptions{}))
	c.must(c.lab.Part(ctx, []string{"alpha", "beta"}, []string{"gamma", "delta"}))
	for n, o := range map[string]string{"gamma": node(s, "delta").Id, "delta": node(s, "gamma").Id} {
		c.rewrite(n, func(m map[string]any) {
			if n == "gamma" {
				m["node_address"] = owner + "/32"
			}
			m["agreements"] = slices.DeleteFunc(m["agreements"].([]any), func(a any) bool { return a.(map[string]any)["peer"] != o })
			for _, a := range m["agreements"].([]any) {
				a.(map[string]any)["prefix"] = shared.String()
			}
		})
		c.must(c.lab.Start(ctx, n, true))
	}
	both := func(s *v1.ClusterState) error {
		for _, p := range [][2]string{{"alpha", "beta"}, {"gamma", "delta"}} {
			if got := subnet(between(s, p[0], p[1])); got != shared {
				return fmt.Errorf("%s:%s has %s, and had %s", p[0], p[1], got, shared)
			}
		}
		return nil
	}
	for _, n := range []string{"gamma", "delta"} {
		c.until(n, "the address that the others have", func(s *v1.ClusterState) bool {
			l := between(s, "gamma", "delta")
			return l.GetState() == proven && subnet(l) == shared && node(s, "alpha").GetState() != v1.NodeState_NODE_STATE_UP &&
				(n != "gamma" || node(s, "gamma").NodeAddress == owner)
		})
	}
	// Both are in use when they meet.
	copies := map[string]chan error{}
	for from, to := range map[string]string{"alpha": "beta", "gamma": "delta"} {
		// As long as it takes two halves to meet on a machine that is busy, and longer.
		c.run(from, "sh", "-c", "head -c 9000000 /dev/urandom > /root/big; sync")
		done := make(chan error, 1)
		copies[from] = done
		go func() {
			out, err := c.tryRun(from, "tbcluster", "cp", "--bwlimit", "1M", "/root/big", to+":/root/big")
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			done <- err
		}()
	}
	running := func(s *v1.ClusterState) (n int) {
		for _, t := range s.Transfers {
			if t.State == v1.TransferState_TRANSFER_STATE_COPYING && t.DoneBytes > 0 {
				n++
			}
		}
		return n
	}
	for from := range copies {
		c.until(from, "its copy under way", func(s *v1.ClusterState) bool { return running(s) == 1 })
	}
	eye := c.observe("beta")
	c.must(c.lab.Part(ctx))
	c.must(c.lab.Mend(ctx, "beta", "gamma", lab.MendOptions{}))
	met := func(s *v1.ClusterState) bool {
		return node(s, "gamma").GetState() == v1.NodeState_NODE_STATE_UP && node(s, "delta").GetState() == v1.NodeState_NODE_STATE_UP && running(s) == 2
	}
	begin := time.Now()
	held := eye.until("the halves to meet", met, func(*v1.ClusterState) error { return nil })
	t.Logf("they met after %v", time.Since(begin).Round(time.Millisecond))
	if err := both(held); err != nil {
		t.Errorf("while both are in use: %v", err)
	}
	// What one node has just heard of another it judges a moment later.
	out, _ := c.tryRun("beta", "tbcluster", "doctor")
	for end := time.Now().Add(patience); !strings.Contains(out, "clashes with"); out, _ = c.tryRun("beta", "tbcluster", "doctor") {
		if s := c.until("beta", "a state", func(*v1.ClusterState) bool { return true }); running(s) < 2 || time.Now().After(end) {
			t.Errorf("nothing is said of the clash:\n%s", out)
			break
		}
	}
	eye.until("one copy to end", func(s *v1.ClusterState) bool { return running(s) < 2 }, func(s *v1.ClusterState) error {
		if running(s) < 2 {
			return nil
		}
		return both(s)
	})
	for from, done := range copies {
		if err := <-done; err != nil {
			t.Errorf("the copy from %s: %v", from, err)
		}
	}
	for from, to := range map[string]string{"alpha": "beta", "gamma": "delta"} {
		if a, b := c.run(from, "sha256sum", "/root/big"), c.run(to, "sha256sum", "/root/big"); a != b {
			t.Errorf("%s of %s, %s of %s", a, from, b, to)
		}
	}
	var last *v1.ClusterState
	for _, n := range c.names {
		last = c.until(n, "addresses of their own", func(s *v1.ClusterState) bool {
			seen := map[string]bool{}
			for _, l := range s.Links {
				if p := subnet(l); l.State != proven || !p.IsValid() || seen[p.String()] {
					return false
				} else {
					seen[p.String()] = true
				}
			}
			for _, x := range s.Nodes {
				if x.NodeAddress == "" || seen[x.NodeAddress] {
					return false
				}
				seen[x.NodeAddress] = true
			}
			return links(s, proven) == 3
		})
	}
	if a, b := subnet(between(last, "alpha", "beta")), subnet(between(last, "gamma", "delta")); a != shared && b != shared {
		t.Errorf("nobody kept %s: %s and %s", shared, a, b)
	}
	if a, b := node(last, "alpha").NodeAddress, node(last, "gamma").NodeAddress; a != owner && b != owner {
		t.Errorf("nobody kept %s: %s and %s", owner, a, b)
	}
	for _, n := range c.names {
		c.run(n, "tbcluster", "down", "--stop")
	}
	for _, n := range c.names {
		c.asBefore(n)
	}
}

// rewrite changes what a node remembers of its addresses.
func (c *cluster) rewrite(node string, f func(map[string]any)) {
	c.t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(c.run(node, "cat", memory)), &m); err != nil {
		c.t.Fatal(err)
	}
	f(m)
	data, err := json.Marshal(m)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	code, err := c.lab.Exec(ctx, node, lab.ExecOptions{Argv: []string{"sh", "-c", "cat >" + memory}, Stdin: strings.NewReader(string(data))})
	if err != nil || code != 0 {
		c.t.Fatalf("write %s on %s: exit %d, %v", memory, node, code, err)
	}
}

// through checks that the ends of a chain reach each other's node address by way
// of the nodes between, and that nothing else passes there.
func (c *cluster) through() {
	c.t.Helper()
	s := c.until("alpha", "node addresses", func(s *v1.ClusterState) bool {
		return !slices.ContainsFunc(s.Nodes, func(n *v1.Node) bool { return n.NodeAddress == "" })
	})
	own, far := node(s, "alpha").NodeAddress, node(s, "delta").NodeAddress
	// Routes are made one after the other along the chain: ask until all are.
	control := netip.AddrPortFrom(netip.MustParseAddr(far), 7871)
	for begin := time.Now(); !c.reaches("alpha", control, open); {
		if time.Since(begin) > patience {
			c.t.Fatalf("alpha does not reach delta's node address %s:\n%s", far, c.run("alpha", "ip", "route"))
		}
	}
	if route := c.run("alpha", "ip", "route", "get", far); !strings.Contains(route, "src "+own) || !strings.Contains(route, "dev thunderbolt") {
		c.t.Errorf("the route to delta is %s, want it by a cable and from %s", route, own)
	}
	// beta passes on between cables alone: neither from a cable to the LAN nor
	// from the LAN to a cable.
	by, err := netip.ParsePrefix(between(s, "alpha", "beta").B.Address)
	if b := between(s, "alpha", "beta"); b.A.NodeName == "beta" {
		by, err = netip.ParsePrefix(b.A.Address)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	lanHost := strings.TrimSpace(c.run("lan", "sh", "-c", "ip -4 -o address show dev eth0 | sed 's/.*inet //; s,/.*,,'"))
	c.run("lan", "ip", "route", "replace", own+"/32", "via", c.lanAddress("beta"))
	c.run("alpha", "ip", "route", "add", lanHost+"/32", "via", by.Addr().String(), "src", own)
	c.run("lan", "sh", "-c", "python3 -m http.server 7999 >/dev/null 2>&1 &")
	server := netip.AddrPortFrom(netip.MustParseAddr(lanHost), 7999)
	for begin := time.Now(); !c.reaches("beta", server, open); time.Sleep(100 * time.Millisecond) {
		if time.Since(begin) > patience {
			c.t.Fatalf("beta does not reach %s over the LAN", server)
		}
	}
	if c.reaches("alpha", server, shut) {
		c.t.Error("alpha reaches the LAN through beta")
	}
	if out := c.run("beta", "nft", "list", "chain", "inet", "tbcluster", "forward"); strings.Contains(out, "counter packets 0 ") {
		c.t.Errorf("beta dropped nothing:\n%s", out)
	}
	c.run("alpha", "ip", "route", "del", lanHost+"/32", "via", by.Addr().String())
	c.run("lan", "ip", "route", "del", own+"/32")
	c.run("lan", "ip", "route", "replace", far+"/32", "via", c.lanAddress("beta"))
	if c.reaches("lan", control, shut) {
		c.t.Error("the LAN reaches delta's node address through beta")
	}
	c.run("lan", "ip", "route", "del", far+"/32")
}

func (c *cluster) lanAddress(node string) string {
	c.t.Helper()
	s, err := c.lab.Status(context.Background())
	if err != nil {
		c.t.Fatal(err)
	}
	return s.Nodes[slices.IndexFunc(s.Nodes, func(n lab.NodeStatus) bool { return n.Name == node })].Address
}
