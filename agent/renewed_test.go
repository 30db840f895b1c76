package agent

import (
	"testing"
	"time"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
)

func TestAMachineThatLostItsStateIsKnownAgain(t *testing.T) {
	at := func(minute int) time.Time {
		return time.Date(2026, 5, 4, 12, minute, 0, 0, time.UTC)
	}
	const (
		up      = v1.NodeState_NODE_STATE_UP
		suspect = v1.NodeState_NODE_STATE_SUSPECT
		down    = v1.NodeState_NODE_STATE_DOWN
		unknown = v1.NodeState_NODE_STATE_UNKNOWN
	)
	for what, c := range map[string]struct {
		old, fresh v1.NodeState
		machines   map[string]machine
		renewed    bool
	}{
		"it was let in anew":                               {down, up, map[string]machine{"old": {heard: at(5)}, "new": {introduced: at(9)}}, true},
		"this agent is new as well":                        {unknown, up, map[string]machine{"old": {heard: at(5)}, "new": {introduced: at(9)}}, true},
		"when the old one was heard is not known":          {down, up, map[string]machine{"old": {}, "new": {introduced: at(9)}}, true},
		"the new one is down again":                        {down, down, map[string]machine{"old": {heard: at(5)}, "new": {introduced: at(9)}}, false},
		"the old one is up":                                {up, up, map[string]machine{"old": {heard: at(5)}, "new": {introduced: at(9)}}, false},
		"the old one is late":                              {suspect, up, map[string]machine{"old": {heard: at(5)}, "new": {introduced: at(9)}}, false},
		"the old one was heard after the other was let in": {down, up, map[string]machine{"old": {heard: at(30)}, "new": {introduced: at(9)}}, false},
		"the other founded the cluster":                    {down, up, map[string]machine{"old": {heard: at(5)}, "new": {}}, false},
	} {
		nodes := []*v1.Node{{Id: "me", Name: "alpha", Self: true, State: up}, {Id: "old", Name: "beta", State: c.old}, {Id: "new", Name: "beta-2", State: c.fresh}}
		for _, id := range []string{"old", "new"} {
			m := c.machines[id]
			m.domains = []string{"u-" + id, "u"}
			c.machines[id] = m
		}
		c.machines["me"] = machine{domains: []string{"u-me"}}
		got := renewedAmong(nodes, c.machines, map[twoNodes]bool{})
		r, ok := got["old"]
		if ok != c.renewed || len(got) > 1 || ok && (r.Node != "beta-2" || !r.Member) {
			t.Errorf("%s: %v", what, got)
		}
	}
}

// Some boards have the UUIDs of others. Whoever saw both up does not take one for
// the other when it goes, whatever the clocks say.
func TestMachinesWithEqualUUIDsAreNotTakenForOneAnother(t *testing.T) {
	machines := map[string]machine{
		"a": {domains: []string{"u"}, introduced: time.Unix(9000, 0), heard: time.Unix(100, 0)},
		"b": {domains: []string{"u"}, introduced: time.Unix(9000, 0), heard: time.Unix(100, 0)},
	}
	nodes := []*v1.Node{{Id: "a", State: v1.NodeState_NODE_STATE_UP}, {Id: "b", State: v1.NodeState_NODE_STATE_UP}}
	twins := map[twoNodes]bool{}
	if got := renewedAmong(nodes, machines, twins); len(got) != 0 {
		t.Errorf("both are up: %v", got)
	}
	for _, n := range nodes {
		n.State = v1.NodeState_NODE_STATE_DOWN
		if got := renewedAmong(nodes, machines, twins); len(got) != 0 {
			t.Errorf("%s is down: %v", n.Id, got)
		}
		if got := renewedAmong(nodes, machines, map[twoNodes]bool{}); len(got) != 1 {
			t.Errorf("%s is down, and nobody saw both: %v", n.Id, got)
		}
		n.State = v1.NodeState_NODE_STATE_UP
	}
}

func TestAStrangerAtTheAddressOfANodeThatIsUpIsNoNews(t *testing.T) {
	n := &v1.Node{Id: "a", Name: "beta", State: v1.NodeState_NODE_STATE_UP}
	machines := map[string]machine{"a": {answers: "7WCA2TZ"}}
	if got := renewedAmong([]*v1.Node{n}, machines, map[twoNodes]bool{}); len(got) != 0 {
		t.Errorf("up: %v", got)
	}
	for _, n.State = range []v1.NodeState{v1.NodeState_NODE_STATE_SUSPECT, v1.NodeState_NODE_STATE_DOWN, v1.NodeState_NODE_STATE_UNKNOWN} {
		if got := renewedAmong([]*v1.Node{n}, machines, map[twoNodes]bool{}); got["a"].Node != "node 7WCA2TZ" || got["a"].Member {
			t.Errorf("%v: %v", n.State, got)
		}
	}
}

func TestAMachineIsKnownByItsDomainsHoweverTheyAreWritten(t *testing.T) {
	k := nodeSections{node: &peerv1.NodeSection{DomainUuids: []string{"a0000000-0000-4000-0000-000a80000000"}},
		links: &peerv1.LinksSection{Links: []*peerv1.LinkReport{
			{LocalUuid: "000000A0-0040-0000-0a00-000000000080"}, {LocalUuid: "b0000000-0000-0000-0000-000000000000"}, {LocalUuid: ""}}}}
	if got := domainsOf(k); len(got) != 2 {
		t.Errorf("domains %v", got)
	}
	if got := domainsOf(nodeSections{}); got != nil {
		t.Errorf("of nothing: %v", got)
	}
}
