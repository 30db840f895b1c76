package address

import (
	"fmt"
	"net/netip"
	"testing"

	"tbcluster/api/fault"
)

func TestEverySubnetIsTriedOnceAndWithinTheBlock(t *testing.T) {
	for _, block := range []string{"10.77.0.0/16", "10.0.0.0/12", "172.20.5.0/24", "10.1.2.64/26"} {
		s, err := newSpace(netip.MustParsePrefix(block))
		if err != nil {
			t.Fatal(err)
		}
		seen := map[netip.Prefix]bool{}
		for p := range s.linkCandidates("alpha", "0-1", "beta", "0-2") {
			if seen[p] || !s.isLink(p) || s.isNode(p) || !s.block.Contains(p.Addr()) {
				t.Fatalf("%s in %s: seen before %v", p, block, seen[p])
			}
			seen[p] = true
		}
		if len(seen) != s.links {
			t.Errorf("%s: %d of %d subnets", block, len(seen), s.links)
		}
		nodes := 0
		for p := range s.nodeCandidates("alpha") {
			if seen[p] || !s.isNode(p) || s.isLink(p) {
				t.Fatalf("%s as node address in %s", p, block)
			}
			seen[p] = true
			nodes++
		}
		if nodes < s.nodes*9/10 {
			t.Errorf("%s: %d of %d node addresses", block, nodes, s.nodes)
		}
	}
}

func TestThoseWhoCollidePartAtOnce(t *testing.T) {
	s, err := newSpace(DefaultBlock)
	if err != nil {
		t.Fatal(err)
	}
	firsts := map[netip.Prefix]int{}
	for i := range 500 {
		for p := range s.linkCandidates("alpha", "0-1", fmt.Sprint("node", i), "0-2") {
			firsts[p]++
			break
		}
	}
	if len(firsts) < 480 { // 500 of 12288: about ten birthdays
		t.Errorf("500 links begin at %d places", len(firsts))
	}
}

func TestABlockThatCannotServeIsRefusedWithItsFix(t *testing.T) {
	for _, block := range []string{"192.168.0.0/16", "192.168.1.0/24", "10.77.0.1/16", "10.0.0.0/7", "10.77.0.0/27", "fd00::/64"} {
		if _, err := newSpace(netip.MustParsePrefix(block)); !fault.Is(err, fault.ConfigInvalid) || fault.As(err).Fix == "" {
			t.Errorf("%s: %v", block, err)
		}
	}
}
