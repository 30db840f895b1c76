package address

import (
	"crypto/sha256"
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"tbcluster/api/fault"
)

// space is the block cut up: the first three quarters into /30s for links, the
// last quarter into /32s for nodes.
type space struct {
	block netip.Prefix
	links int // /30s
	nodes int // /32s
}

// spaces are the block and its spares, in the order in which they are used.
type spaces []space

// newSpaces cuts up a block and its spares. A spare that overlaps one before it
// is left out: it would give the same addresses twice.
func newSpaces(block netip.Prefix, spares []netip.Prefix) (spaces, error) {
	var out spaces
	for i, b := range append([]netip.Prefix{block}, spares...) {
		s, err := newSpace(b)
		if err != nil {
			return nil, err
		}
		if i > 0 && slices.ContainsFunc(out, func(o space) bool { return o.block.Overlaps(b) }) {
			continue
		}
		out = append(out, s)
	}
	return out, nil
}

// of returns the space that an address is in; nil if none.
func (l spaces) of(a netip.Addr) *space {
	for i := range l {
		if l[i].block.Contains(a) {
			return &l[i]
		}
	}
	return nil
}

func (l spaces) isLink(p netip.Prefix) bool {
	return slices.ContainsFunc(l, func(s space) bool { return s.isLink(p) })
}

func (l spaces) isNode(p netip.Prefix) bool {
	return slices.ContainsFunc(l, func(s space) bool { return s.isNode(p) })
}

// linkCandidates are those of the block, then those of each spare.
func (l spaces) linkCandidates(low, lowPort, high, highPort string) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for _, s := range l {
			for p := range s.linkCandidates(low, lowPort, high, highPort) {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// nodeCandidates are those of the block, then those of each spare.
func (l spaces) nodeCandidates(node string) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for _, s := range l {
			for p := range s.nodeCandidates(node) {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// String lists the blocks for people.
func (l spaces) String() string {
	var out []string
	for _, s := range l {
		out = append(out, s.block.String())
	}
	return strings.Join(out, ", ")
}

// homeRouters is where most home routers live; never ours.
var homeRouters = netip.MustParsePrefix("192.168.0.0/23")

func newSpace(block netip.Prefix) (space, error) {
	const fix = "write a private IPv4 range of /8 to /26 that is used nowhere else, such as block = \"10.77.0.0/16\""
	switch {
	case !block.IsValid() || !block.Addr().Is4() || block.Bits() < 8 || block.Bits() > 26:
		return space{}, fault.Newf(fault.ConfigInvalid, fix, "%s cannot be the block for addresses", block)
	case block != block.Masked():
		return space{}, fault.Newf(fault.ConfigInvalid, fix, "%s is not the beginning of a range", block)
	case block.Overlaps(homeRouters):
		return space{}, fault.Newf(fault.ConfigInvalid, fix, "%s holds addresses of most home routers", block)
	}
	size := 1 << (32 - block.Bits())
	return space{block: block, links: size / 4 * 3 / 4, nodes: size / 4}, nil
}

func (s space) at(offset int) netip.Addr {
	b := s.block.Addr().As4()
	n := binary.BigEndian.Uint32(b[:]) + uint32(offset)
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}

// link returns the i-th subnet for links.
func (s space) link(i int) netip.Prefix { return netip.PrefixFrom(s.at(4*i), 30) }

// node returns the i-th node address.
func (s space) node(i int) netip.Prefix { return netip.PrefixFrom(s.at(4*s.links+i), 32) }

// isLink reports whether p is one of the subnets for links.
func (s space) isLink(p netip.Prefix) bool {
	return p.IsValid() && p.Bits() == 30 && p == p.Masked() && s.block.Contains(p.Addr()) && p.Addr().Less(s.node(0).Addr())
}

// isNode reports whether p is one of the node addresses.
func (s space) isNode(p netip.Prefix) bool {
	return p.IsValid() && p.Bits() == 32 && s.block.Contains(p.Addr()) && !p.Addr().Less(s.node(0).Addr())
}

// linkCandidates are all subnets in the order in which a link tries them.
func (s space) linkCandidates(low, lowPort, high, highPort string) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for i := range order(s.links, "link", low, high, lowPort, highPort) {
			if !yield(s.link(i)) {
				return
			}
		}
	}
}

// nodeCandidates are all node addresses in the order in which a node tries
// them. Those that end in 0 or 255 are left out: some tools take them for more
// than one machine.
func (s space) nodeCandidates(node string) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for i := range order(s.nodes, "node", node) {
			p := s.node(i)
			if last := p.Addr().As4()[3]; last == 0 || last == 255 {
				continue
			}
			if !yield(p) {
				return
			}
		}
	}
}

// order runs over 0 … n-1 once, from a place and in steps that a hash of the
// words gives, so that those who collide at first part at once.
func order(n int, words ...string) iter.Seq[int] {
	return func(yield func(int) bool) {
		if n <= 0 {
			return
		}
		h := sha256.Sum256([]byte(strings.Join(words, "\x00")))
		at := int(binary.BigEndian.Uint32(h[0:4]) % uint32(n))
		step := int(binary.BigEndian.Uint32(h[4:8])%uint32(n)) | 1
		for gcd(step, n) != 1 {
			step += 2
		}
		for range n {
			if !yield(at) {
				return
			}
			at = (at + step) % n
		}
	}
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// precedence orders claimants of one address: the lower keeps it. It is the
// same whichever end of a link claims.
func precedence(words ...string) string {
	h := sha256.Sum256([]byte(strings.Join(words, "\x00")))
	return string(h[:])
}
