package agent

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/doctor"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/mesh/member"
)

// own is what this node says of itself, as last published.
type own struct {
	sections nodeSections
	linksAt  time.Time
}

// memoryStep is how finely the available memory is published: finer would be
// news every second.
const memoryStep = 64 << 20

// ownNode describes this node.
func (a *Agent) ownNode(ctx context.Context) *peerv1.NodeSection {
	f := a.facts.Load()
	m := f.machine
	self := a.store.Self()
	n := &v1.Node{
		Id: a.id(), Name: self.Name, State: v1.NodeState_NODE_STATE_UP, Os: m.OS, OsVersion: m.OSVersion, Arch: m.Arch,
		Version: a.opt.Version, CpuCount: uint32(m.CPUs), BootId: m.BootID, Privileged: a.opt.Privileged,
		Memory:      &v1.Memory{TotalBytes: m.Memory.Total, AvailableBytes: a.steadyBytes("memory", m.Memory.Available)},
		StartedAt:   timestamppb.New(a.started),
		Incarnation: a.member.Incarnation(),
		Engines:     a.models.engines(), DiskFreeBytes: a.steadyBytes("disk", a.models.diskFree()),
	}
	if g := a.gatewayAddr.Load(); g != nil {
		n.GatewayAddress = *g
	}
	if m := a.metricsAddr.Load(); m != nil {
		n.MetricsAddress = *m
	}
	if b, err := a.ranks.local.Budget(ctx); err != nil {
		a.log.Warn("tell what engines may take", "error", err)
	} else {
		n.Memory.BudgetBytes = a.steadyBytes("budget", b)
	}
	if na := a.address.NodeAddress(); na.IsValid() {
		n.NodeAddress = na.String()
	}
	s := &peerv1.NodeSection{Node: n, ControlPort: uint32(a.controlPort), DomainUuids: a.domainUUIDs()}
	s.LanAddresses, s.LanInterfaces = lanPlaces(f.net)
	if u := a.models.pairedUser(); u != nil {
		s.PairedUser = u
	}
	return s
}

// ownSections describes this node as it is now, in messages and encoded.
func (a *Agent) ownSections(ctx context.Context) (s nodeSections, encoded map[string][]byte) {
	s.node = a.ownNode(ctx)
	s.links = &peerv1.LinksSection{Links: a.settle(a.tracker.Reports()), Claims: a.address.Claims(), Forwards: a.address.Forwards()}
	s.models = &peerv1.ModelsSection{Models: a.models.own(), Specs: a.models.specs()}
	s.instances = &peerv1.InstancesSection{Instances: a.ranks.views()}
	s.transfers = &peerv1.TransfersSection{Transfers: a.moves.views()}
	s.findings = &peerv1.FindingsSection{Findings: a.models.findings()}
	encoded = map[string][]byte{}
	for name, m := range map[string]proto.Message{
		sectionNode: s.node, sectionLinks: s.links, sectionModels: s.models,
		sectionInstances: s.instances, sectionTransfers: s.transfers, sectionFindings: s.findings,
	} {
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			a.log.Error("publish own state", "section", name, "error", err)
			continue
		}
		encoded[name] = data
	}
	return s, encoded
}

// ownNews reports whether this node is other than it was published last.
func (a *Agent) ownNews(ctx context.Context) bool {
	_, encoded := a.ownSections(ctx)
	return !maps.EqualFunc(encoded, a.published, bytes.Equal)
}

// publish tells the other nodes what is new of this one, and puts it among
// what is known.
func (a *Agent) publish(ctx context.Context, known map[string]nodeSections) {
	s, encoded := a.ownSections(ctx)
	for name, data := range encoded {
		if err := a.member.Publish(name, data); err != nil {
			a.log.Error("publish own state", "section", name, "error", err)
		}
	}
	// What is not new stays the same message, which is how others know it.
	var before nodeSections
	if k := a.known.Load(); k != nil {
		before = (*k)[a.id()]
	}
	same := func(name string) bool { return bytes.Equal(encoded[name], a.published[name]) }
	if before.node != nil && same(sectionNode) {
		s.node = before.node
	}
	if before.links != nil && same(sectionLinks) {
		s.links = before.links
	}
	a.published = encoded
	known[a.id()] = s
	a.known.Store(&known)
}

// steady is a number of bytes that is published: a new one takes its place when
// it differs by a thirty-second part, or by a step after a while.
type steady struct {
	value uint64
	at    time.Time
}

// steadyFor is how long small changes of a number are no news at a node among n
// others.
func steadyFor(n int) time.Duration {
	return max(30*time.Second, time.Duration(n)*time.Second)
}

func (a *Agent) steadyBytes(what string, now uint64) uint64 {
	now = now / memoryStep * memoryStep
	was, ok := a.steadies[what]
	differs := max(now, was.value) - min(now, was.value)
	if ok && (differs == 0 || differs < max(was.value/32, memoryStep+1) && time.Since(was.at) < steadyFor(int(a.others.Load()))) {
		return was.value
	}
	a.steadies[what] = steady{now, time.Now()}
	return now
}

// settle keeps what changes all the time from being news all the time: round
// trips are told again when they changed by half, counters when they grew, and
// both no more often than tellEvery says; but counters that grew by a mebibyte
// are news.
func (a *Agent) settle(reports []*peerv1.LinkReport) []*peerv1.LinkReport {
	now := time.Now()
	late := now.Sub(a.lastOwn.linksAt) > tellEvery(int(a.others.Load()))
	old := map[string]*peerv1.LinkReport{}
	if l := a.lastOwn.sections.links; l != nil {
		for _, r := range l.Links {
			old[r.Port+r.RemoteUuid] = r
		}
	}
	out := make([]*peerv1.LinkReport, 0, len(reports))
	for _, r := range reports {
		was := old[r.Port+r.RemoteUuid]
		if was != nil && was.Interface == r.Interface && was.Proven == r.Proven {
			if near(was.RttUs, r.RttUs) || !late && was.RttUs != 0 && r.RttUs != 0 {
				r.RttUs = was.RttUs
			}
			if !late && r.TxBytes-was.TxBytes < 1<<20 && r.RxBytes-was.RxBytes < 1<<20 {
				r.TxBytes, r.RxBytes = was.TxBytes, was.RxBytes
			}
			// The first error is news at once; that there are more of them can wait.
			if !late && (was.Errors > 0) == (r.Errors > 0) {
				r.Errors, r.TxErrors, r.RxErrors, r.TxDropped, r.RxDropped = was.Errors, was.TxErrors, was.RxErrors, was.TxDropped, was.RxDropped
			}
		}
		out = append(out, r)
	}
	if late {
		a.lastOwn.linksAt = now
	}
	a.lastOwn.sections.links = &peerv1.LinksSection{Links: out}
	return out
}

// tellEvery is how often a node among n others tells its counters: each of them
// hears it.
func tellEvery(n int) time.Duration {
	return max(10*time.Second, time.Duration(n)*time.Second)
}

// near reports whether two round trips differ by less than half and a little.
func near(a, b uint64) bool {
	lo, hi := min(a, b), max(a, b)
	return a != 0 && b != 0 && hi-lo <= max(lo/2, 500)
}

var nodeStates = map[member.State]v1.NodeState{
	member.Up:      v1.NodeState_NODE_STATE_UP,
	member.Suspect: v1.NodeState_NODE_STATE_SUSPECT,
	member.Down:    v1.NodeState_NODE_STATE_DOWN,
	member.Unknown: v1.NodeState_NODE_STATE_UNKNOWN,
}

var roles = map[identity.Role]v1.Role{
	identity.Viewer:   v1.Role_ROLE_VIEWER,
	identity.Operator: v1.Role_ROLE_OPERATOR,
	identity.Admin:    v1.Role_ROLE_ADMIN,
}

// post makes the cluster's state out of what every node said.
func (a *Agent) post(views []member.NodeView, known map[string]nodeSections) {
	s := &v1.ClusterState{SelfNodeId: a.id()}
	_, s.ClusterName = a.store.Cluster()
	self := proto.CloneOf(known[a.id()].node.Node)
	self.Self, self.Role = true, roles[a.store.Self().Role]
	s.Nodes = append(s.Nodes, self)
	infos := []link.NodeInfo{{ID: a.id(), Name: self.Name, Up: true, Since: a.started}}
	lost := map[string]string{} // nodes that cannot be asked, and why
	for _, v := range views {
		m, ok := a.store.Member(v.ID)
		if !ok || m.Revoked || m.Forgotten {
			continue
		}
		rtt := a.steadyRTT(string(v.ID), uint64(v.RTT.Microseconds()))
		n := a.shown.node(m, v, known[string(v.ID)].node, rtt)
		s.Nodes = append(s.Nodes, n)
		up := v.State == member.Up || v.State == member.Suspect
		infos = append(infos, link.NodeInfo{ID: n.Id, Name: n.Name, Up: up, Since: v.Since})
		if !up {
			lost[n.Id] = fmt.Sprintf("%s is %s", n.Name, v.State)
		}
	}
	s.Links = a.shown.links(a.id(), infos, known)
	a.collect(s, known, lost)
	order(s)
	news := a.board.post(s)
	a.shown.posted(s)
	if news {
		a.metrics.Observe(s)
		a.ranks.stateChanged(s)
	}
}

// collect gathers models, transfers, instances and findings of all nodes.
func (a *Agent) collect(s *v1.ClusterState, known map[string]nodeSections, lost map[string]string) {
	names := map[string]string{}
	for _, n := range s.Nodes {
		names[n.Id] = n.Name
	}
	models := map[string]*v1.Model{}
	for _, id := range slices.Sorted(maps.Keys(known)) {
		name, listed := names[id]
		if !listed {
			continue
		}
		k, why := known[id], lost[id]
		for _, m := range k.models.GetModels() {
			have := models[sameModel(models, m)]
			if have == nil {
				have = proto.CloneOf(m)
				have.Copies = nil
				models[m.Id] = have
			} else if provisional(have.Id) && !provisional(m.Id) {
				delete(models, have.Id)
				have.Id = m.Id
				models[m.Id] = have
			}
			for _, c := range m.Copies {
				c = proto.CloneOf(c)
				c.NodeId, c.NodeName = id, name
				if why != "" {
					c.Complete, c.Reason = false, why
				}
				have.Copies = append(have.Copies, c)
			}
		}
		for _, t := range k.transfers.GetTransfers() {
			if why != "" && !ended(t.State) {
				t = proto.CloneOf(t)
				t.Phase, t.BytesPerSecond, t.Eta = "not known: "+why, 0, nil
			}
			s.Transfers = append(s.Transfers, t)
		}
		for _, i := range k.instances.GetInstances() {
			s.Instances = append(s.Instances, asSeen(i, names, lost))
		}
		if why == "" {
			for _, f := range k.findings.GetFindings() {
				f = proto.CloneOf(f)
				f.NodeId, f.NodeName = id, name
				s.Findings = append(s.Findings, f)
			}
		}
	}
	s.Findings = doctor.Standing(s, s.Findings)
	s.Models = slices.Collect(maps.Values(models))
}

// sameModel is the ID under which a model is listed already, or its own: while
// a digest is being computed, names and sizes have to do.
func sameModel(models map[string]*v1.Model, m *v1.Model) string {
	if models[m.Id] != nil {
		return m.Id
	}
	for id, have := range models {
		if have.Name == m.Name && have.SizeBytes == m.SizeBytes && provisional(have.Id) != provisional(m.Id) {
			return id
		}
	}
	return m.Id
}

// asSeen is an instance as this node can vouch for it: what its owner said, less
// what cannot be known while a node is gone.
func asSeen(i *v1.Instance, names, lost map[string]string) *v1.Instance {
	i = proto.CloneOf(i)
	over := i.State == v1.InstanceState_INSTANCE_STATE_STOPPED || i.State == v1.InstanceState_INSTANCE_STATE_FAILED
	for _, r := range i.Ranks {
		if n := names[r.NodeId]; n != "" {
			r.NodeName = n
		}
		if !over && lost[r.NodeId] != "" {
			r.State = v1.RankState_RANK_STATE_UNKNOWN
		}
	}
	if why := lost[i.OwnerNodeId]; why != "" && !over {
		i.State = v1.InstanceState_INSTANCE_STATE_DEGRADED
		i.Reason = why + ", so what became of it is not known"
		i.TokensPerSecond = 0
	}
	return i
}

// steadyRTT keeps the round trip to a node from being news at each heartbeat.
func (a *Agent) steadyRTT(id string, us uint64) uint64 {
	if was, ok := a.lastRTT[id]; ok && near(was, us) {
		return was
	}
	a.lastRTT[id] = us
	return us
}

// dialable returns the LAN addresses that a node said it has.
func dialable(n *peerv1.NodeSection) []netip.AddrPort {
	var out []netip.AddrPort
	for _, s := range n.GetLanAddresses() {
		if a, err := netip.ParseAddr(strings.TrimSpace(s)); err == nil && n.ControlPort > 0 && n.ControlPort < 65536 {
			out = append(out, netip.AddrPortFrom(a, uint16(n.ControlPort)))
		}
	}
	return out
}
