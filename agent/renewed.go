package agent

import (
	"maps"
	"slices"
	"time"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/doctor"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
)

// machine is what shows whether two nodes are one machine, of which one was
// installed anew or lost its state.
type machine struct {
	// domains are its Thunderbolt domains' UUIDs, in one spelling.
	domains []string
	// heard is when it was last heard from, introduced when it was let in, both by
	// the own clock; zero where that is unknown.
	heard, introduced time.Time
	// answers is the node outside the cluster that was met at an address of it.
	answers identity.NodeID
}

// twoNodes are two nodes, the lower ID first.
type twoNodes [2]string

func together(a, b string) twoNodes { return twoNodes{min(a, b), max(a, b)} }

// replaced tells which nodes that are not up have become others.
func (a *Agent) replaced(s *v1.ClusterState) map[string]doctor.Renewed {
	known := a.known.Load()
	if known == nil {
		return nil
	}
	machines := map[string]machine{}
	skew := map[identity.NodeID]time.Duration{}
	for _, v := range a.member.Snapshot() {
		machines[string(v.ID)] = machine{heard: v.LastHeard}
		skew[v.ID] = v.ClockSkew
	}
	for _, n := range s.Nodes {
		m, id := machines[n.Id], identity.NodeID(n.Id)
		m.domains = domainsOf((*known)[n.Id])
		if member, ok := a.store.Member(id); ok && !member.IntroducedAt.IsZero() {
			m.introduced = member.IntroducedAt.Add(-skew[member.IntroducedBy])
		}
		if other, ok := a.channel.Other(id); ok {
			if _, member := a.store.Member(other); !member {
				m.answers = other
			}
		}
		machines[n.Id] = m
	}
	return renewedAmong(s.Nodes, machines, a.twins)
}

// domainsOf lists the domains that a node has or had. An older version tells
// only those with a cable.
func domainsOf(k nodeSections) []string {
	var out []string
	add := func(uuid string) {
		if u := link.CanonicalUUID(uuid); u != "" && !slices.Contains(out, u) {
			out = append(out, u)
		}
	}
	for _, u := range k.node.GetDomainUuids() {
		add(u)
	}
	for _, r := range k.links.GetLinks() {
		add(r.LocalUuid)
	}
	return out
}

// alike is how much the clocks by which times are compared may differ.
const alike = 5 * time.Second

// renewedAmong tells which of the nodes that are not up have become others. One
// that is up and has a Thunderbolt domain of theirs is the same machine, unless
// both were there at one time: some boards have the same UUIDs as others. Twins
// are the pairs that are known for that; those that are up now are added.
func renewedAmong(nodes []*v1.Node, machines map[string]machine, twins map[twoNodes]bool) map[string]doctor.Renewed {
	up := map[string][]*v1.Node{} // by domain
	for _, n := range nodes {
		if n.State != v1.NodeState_NODE_STATE_UP {
			continue
		}
		for _, u := range machines[n.Id].domains {
			for _, o := range up[u] {
				if o.Id != n.Id {
					twins[together(o.Id, n.Id)] = true
				}
			}
			up[u] = append(up[u], n)
		}
	}
	out := map[string]doctor.Renewed{}
	for _, n := range nodes {
		if n.Self || n.State == v1.NodeState_NODE_STATE_UP {
			continue
		}
		was := machines[n.Id]
		if was.answers != "" {
			out[n.Id] = doctor.Renewed{Node: "node " + was.answers.Short(),
				Where: "node " + was.answers.Short() + ", which is not in this cluster, answers at an address of " + n.Name}
		}
		if n.State == v1.NodeState_NODE_STATE_SUSPECT {
			continue // it may be there, and the other one its twin
		}
		for _, u := range was.domains {
			for _, o := range up[u] {
				is := machines[o.Id]
				if twins[together(n.Id, o.Id)] || !was.heard.IsZero() && was.heard.After(is.introduced.Add(alike)) {
					continue
				}
				out[n.Id] = doctor.Renewed{Node: o.Name, Member: true, Where: o.Name + " has the Thunderbolt controller that " + n.Name + " had"}
			}
		}
	}
	return out
}

// domainUUIDs lists this machine's Thunderbolt domains.
func (a *Agent) domainUUIDs() []string {
	all := map[string]bool{}
	for _, d := range a.facts.Load().tb.Domains {
		if d.UUID != "" {
			all[d.UUID] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}
