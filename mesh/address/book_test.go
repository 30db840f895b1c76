package address

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host"
)

// cluster is many books whose nodes talk without delay and whose claims travel
// when the test says so.
type cluster struct {
	t     *testing.T
	books map[string]*book
	ids   []string
	links []pairing
}

type pairing struct{ low, lowPort, high, highPort string }

func newCluster(t *testing.T, n int, block netip.Prefix) *cluster {
	s, err := newSpaces(block, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, books: map[string]*book{}}
	for i := range n {
		id := fmt.Sprintf("node%03d", i)
		c.ids = append(c.ids, id)
		c.books[id] = newBook(id, s, nil)
	}
	return c
}

// mesh joins every two nodes by so many cables.
func (c *cluster) mesh(cables int) {
	for i, low := range c.ids {
		for j, high := range c.ids[i+1:] {
			for k := range cables {
				c.links = append(c.links, pairing{low, fmt.Sprintf("%d-%d", i+1+j, k), high, fmt.Sprintf("%d-%d", i, k)})
			}
		}
	}
}

// agree lets the lower node of a link propose until the higher one takes it.
func (c *cluster) agree(l pairing) {
	low, high := c.books[l.low], c.books[l.high]
	if a := low.find(l.high, l.lowPort, l.highPort); a != nil {
		if !low.standing(a).move && !high.accept(l.low, l.highPort, l.lowPort, a.Prefix, 9000).there() {
			return
		}
	}
	var refused []netip.Prefix
	for {
		p, why := low.next(l.high, l.lowPort, l.highPort, refused)
		if !p.IsValid() {
			c.t.Fatalf("%v: nothing is free: %s", l, why)
		}
		low.settled(p)
		taken := high.accept(l.low, l.highPort, l.lowPort, p, 9000)
		if !taken.there() {
			low.record(l.high, l.lowPort, l.highPort, p, 9000)
			return
		}
		refused = append(refused, p, taken.prefix)
	}
}

// tell gives one node what all others claim now.
func (c *cluster) tell(to string) {
	b := c.books[to]
	for _, id := range c.ids {
		if id != to {
			b.claims[id] = parseClaims(id, c.books[id].ownClaims())
		}
	}
}

// check finds what must never be: two links or nodes with overlapping
// addresses, ends that do not agree, an address on an occupied range.
func (c *cluster) check() error {
	owner := map[netip.Prefix]string{}
	for _, l := range c.links {
		a, b := c.books[l.low].find(l.high, l.lowPort, l.highPort), c.books[l.high].find(l.low, l.highPort, l.lowPort)
		if a == nil || b == nil || a.Prefix != b.Prefix {
			return fmt.Errorf("%v: the ends have %+v and %+v", l, a, b)
		}
		if got := c.books[l.low].own(a).Addr(); got != c.books[l.high].far(b) || got == c.books[l.high].own(b).Addr() {
			return fmt.Errorf("%v: addresses do not face each other", l)
		}
		if o, taken := owner[a.Prefix]; taken {
			return fmt.Errorf("%s belongs to %s and %v", a.Prefix, o, l)
		}
		owner[a.Prefix] = fmt.Sprint(l)
		for _, id := range []string{l.low, l.high} {
			if by := overlapping(c.books[id].uses, a.Prefix).by; by != "" {
				return fmt.Errorf("%v has %s, which is taken on %s by %s", l, a.Prefix, id, by)
			}
		}
	}
	for _, id := range c.ids {
		n := c.books[id].node
		if o, taken := owner[n]; taken || !n.IsValid() {
			return fmt.Errorf("node address %s of %s belongs to %q too", n, id, o)
		}
		owner[n] = id
	}
	return nil
}

// settle runs rounds in which claims travel late and in any order, until
// nothing moves.
func (c *cluster) settle(r *rand.Rand) error {
	var err error
	for range 12 {
		links := slices.Clone(c.links)
		r.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
		ids := slices.Clone(c.ids)
		r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		for _, id := range ids[:len(ids)/2] {
			c.tell(id)
		}
		for _, l := range links {
			c.agree(l)
		}
		for _, id := range ids {
			c.books[id].chooseNode()
		}
		for _, id := range ids {
			c.tell(id)
		}
		if err = c.check(); err == nil {
			return nil
		}
	}
	return err
}

func TestSixtyFourNodesInFullMeshGetUniqueAddresses(t *testing.T) {
	c := newCluster(t, 64, DefaultBlock)
	c.mesh(1)
	if err := c.settle(rand.New(rand.NewPCG(1, 2))); err != nil {
		t.Fatal(err)
	}
}

func TestRandomClustersAgreeAroundWhatIsOccupied(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 7))
		block := netip.MustParsePrefix([]string{"10.77.0.0/16", "10.77.0.0/20", "172.30.4.0/22"}[r.IntN(3)])
		c := newCluster(t, 2+r.IntN(6), block)
		c.mesh(1 + r.IntN(3))
		for _, b := range c.books {
			var n host.Network
			for range r.IntN(12) { // up to a quarter of the block
				bits := block.Bits() + 4 + r.IntN(4)
				at := b.space[0].at(r.IntN(1<<(32-block.Bits())) &^ (1<<(32-bits) - 1))
				n.Routes = append(n.Routes, host.Route{Destination: netip.PrefixFrom(at, bits), Interface: "wg0", Table: 51820})
			}
			n.Routes = append(n.Routes, host.Route{Destination: netip.MustParsePrefix("0.0.0.0/0"), Interface: "eth0"},
				host.Route{Destination: netip.MustParsePrefix("0.0.0.0/1"), Interface: "tun0"})
			b.uses = occupied(n, func(netip.Prefix, string) bool { return false })
		}
		if err := c.settle(r); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func TestClashesOfAHealedPartitionAreResolvedByOneSideOnly(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 11))
		c := newCluster(t, 6, netip.MustParsePrefix("10.77.0.0/25")) // 24 subnets for 15 links
		c.mesh(1)
		for _, l := range c.links { // nobody has heard of anybody else's
			for _, id := range c.ids {
				c.books[id].claims = map[string][]claim{}
			}
			c.agree(l)
		}
		for _, id := range c.ids {
			c.books[id].chooseNode()
		}
		before := map[pairing]netip.Prefix{}
		for _, l := range c.links {
			before[l] = c.books[l.low].find(l.high, l.lowPort, l.highPort).Prefix
		}
		if err := c.settle(r); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		kept := map[netip.Prefix]bool{}
		for _, l := range c.links {
			if c.books[l.low].find(l.high, l.lowPort, l.highPort).Prefix == before[l] {
				kept[before[l]] = true
			}
		}
		for l, p := range before {
			if !kept[p] {
				t.Errorf("seed %d: nobody kept %s, which %v had", seed, p, l)
			}
		}
	}
}

func TestWhatIsInUseDoesNotMove(t *testing.T) {
	c := newCluster(t, 3, DefaultBlock)
	c.mesh(1)
	l := c.links[0]
	c.agree(l)
	b := c.books[l.low]
	a := b.find(l.high, l.lowPort, l.highPort)
	b.uses = []use{{prefix: a.Prefix, by: "a LAN"}}
	if v := b.standing(a); !v.move || v.clash != "a LAN" {
		t.Errorf("unused: %+v", v)
	}
	b.inUse = func(p netip.Prefix) bool { return p == b.own(a) }
	if v := b.standing(a); v.move || v.clash == "" {
		t.Errorf("used here: %+v", v)
	}
	b.inUse = func(netip.Prefix) bool { return false }
	b.claims[l.high] = parseClaims(l.high, []*peerv1.AddressClaim{{Prefix: a.Prefix.String(), Kind: kindLink, Key: l.highPort + "/" + l.low, InUse: true}})
	if v := b.standing(a); v.move || v.clash == "" {
		t.Errorf("used at the far end: %+v", v)
	}
}

func TestAClaimOutsideTheNodeRangeIsNoNodeAddress(t *testing.T) {
	s, err := newSpaces(DefaultBlock, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"8.8.8.8/32", "10.77.200.0/24", "10.77.1.1/32", "0.0.0.0/0"} {
		if s.isNode(netip.MustParsePrefix(p)) {
			t.Errorf("%s is taken for a node address", p)
		}
	}
}

func FuzzClaims(f *testing.F) {
	f.Add("10.77.3.1/30", "link", "0-1/beta")
	f.Add("10.77.200.7/32", "node", "")
	f.Add("fe80::1/64", "link", "/")
	f.Fuzz(func(t *testing.T, prefix, kind, key string) {
		for _, c := range parseClaims("n", []*peerv1.AddressClaim{{Prefix: prefix, Kind: kind, Key: key}}) {
			if !c.prefix.IsValid() || c.prefix != c.prefix.Masked() || c.kind == kindLink && c.peer == "" {
				t.Fatalf("%q %q %q gave %+v", prefix, kind, key, c)
			}
		}
	})
}

func TestABlockThatIsTakenAsAWholeIsLeftForTheNext(t *testing.T) {
	spares := []netip.Prefix{netip.MustParsePrefix("172.29.0.0/16"), netip.MustParsePrefix("10.77.4.0/24"), netip.MustParsePrefix("10.213.0.0/16")}
	s, err := newSpaces(DefaultBlock, spares)
	if err != nil || len(s) != 3 { // one of them is part of the block
		t.Fatalf("%v, %v", s, err)
	}
	wholly := func(blocks ...string) (out []use) {
		for _, b := range blocks {
			out = append(out, use{prefix: netip.MustParsePrefix(b), by: "a LAN"})
		}
		return out
	}
	for _, who := range []string{"low", "high", "both"} {
		low, high := newBook("node1", s, nil), newBook("node2", s, nil)
		if who != "high" {
			low.uses = wholly("10.77.0.0/16", "172.29.0.0/17", "172.29.128.0/17")
		}
		if who != "low" {
			high.uses = wholly("10.77.0.0/16", "172.16.0.0/12")
		}
		tries := 0
		var refused []netip.Prefix
		for {
			p, why := low.next("node2", "0-1", "0-1", refused)
			if !p.IsValid() {
				t.Fatalf("%s: nothing is free: %s", who, why)
			}
			low.settled(p)
			taken := high.accept("node1", "0-1", "0-1", p, 9000)
			if !taken.there() {
				if want := netip.MustParsePrefix("10.213.0.0/16"); !want.Contains(p.Addr()) {
					t.Errorf("%s: it is %s", who, p)
				}
				break
			}
			if tries++; tries > 4 {
				t.Fatalf("%s: still searching at %s, which is of %+v", who, p, taken)
			}
			refused = append(refused, p, taken.prefix)
		}
		for _, b := range []*book{low, high} {
			b.chooseNode()
			if by := overlapping(b.uses, b.node); !b.node.IsValid() || by.there() {
				t.Errorf("%s: node address %s, taken by %s", who, b.node, by.by)
			}
		}
	}
}

func TestBothEndsTakeTheSmallerMTUWhateverWasAgreed(t *testing.T) {
	s, err := newSpaces(DefaultBlock, nil)
	if err != nil {
		t.Fatal(err)
	}
	low, high := newBook("node1", s, nil), newBook("node2", s, nil)
	p := netip.MustParsePrefix("10.77.3.0/30")
	low.record("node2", "0-1", "1-3", p, 65520)
	high.record("node1", "1-3", "0-1", p, 65520)
	low.largest["0-1"], high.largest["1-3"] = 65520, 9000
	low.claims["node2"] = parseClaims("node2", high.ownClaims())
	high.claims["node1"] = parseClaims("node1", low.ownClaims())
	if !low.agreeMTUs() || !high.agreeMTUs() || low.agreements[0].MTU != 9000 || high.agreements[0].MTU != 9000 {
		t.Errorf("%d and %d", low.agreements[0].MTU, high.agreements[0].MTU)
	}
	if low.agreeMTUs() {
		t.Error("it changes again")
	}
	for _, nonsense := range []uint32{0, 1, 1279} { // unplugged, of an older version, hostile
		low.claims["node2"][0].maxMTU = nonsense
		if low.agreeMTUs() || low.agreements[0].MTU != 9000 {
			t.Errorf("a far end that says %d: %d", nonsense, low.agreements[0].MTU)
		}
	}
}
