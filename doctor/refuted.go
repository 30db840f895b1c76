package doctor

import (
	"slices"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

// refutations tell by code when what a node found is over, or never was so, by
// what the node that shows it knows itself. A node looks for what is wrong with
// it only now and then, and what it found stands until then.
var refutations = map[string]func(s *tbclusterv1.ClusterState, f *tbclusterv1.Finding) bool{
	"node-down":            nodeStands,
	"node-renewed":         nodeStands,
	"node-blocked":         nodeConnected,
	"node-distrusts":       nodeConnected,
	"multicast-blocked":    nodeGone,
	"not-paired":           linkKnown,
	"link-silent":          linkCarries,
	"link-down":            linkCarries,
	"link-unplugged":       linkCarries,
	"link-not-proven":      linkCarries,
	"link-without-address": linkCarries,
	"firewall-in-the-way":  linkCarries,
}

// Standing returns those findings of all nodes that the cluster's state, as one
// node sees it, does not refute, each once. Their NodeId is who found them.
func Standing(s *tbclusterv1.ClusterState, found []*tbclusterv1.Finding) []*tbclusterv1.Finding {
	renewed := map[string]bool{} // by the ID of the node that is no more
	deaf := map[string]bool{}    // nodes that hear nobody
	for _, f := range found {
		if f.GetCode() == "multicast-blocked" && f.GetSubject() == "" {
			deaf[f.GetNodeId()] = true
		}
	}
	apart := map[[2]string]bool{} // nodes between which multicast is lost
	var out []*tbclusterv1.Finding
	for _, f := range found {
		if over := refutations[f.GetCode()]; over != nil && f.GetSubject() != "" && over(s, f) {
			continue
		}
		if f.GetCode() == "multicast-blocked" && f.GetSubject() != "" {
			a, b := f.GetNodeId(), f.GetSubject()
			if deaf[b] || apart[[2]string{b, a}] { // it is b's, or b has said it
				continue
			}
			apart[[2]string{a, b}] = true
		}
		if f.GetCode() == "node-renewed" {
			if renewed[f.GetSubject()] { // another node sees the same
				continue
			}
			renewed[f.GetSubject()] = true
		}
		out = append(out, f)
	}
	return slices.DeleteFunc(out, func(f *tbclusterv1.Finding) bool { return f.GetCode() == "node-down" && renewed[f.GetSubject()] })
}

func nodeOf(s *tbclusterv1.ClusterState, id string) *tbclusterv1.Node {
	i := slices.IndexFunc(s.GetNodes(), func(n *tbclusterv1.Node) bool { return n.GetId() == id })
	if i < 0 {
		return nil
	}
	return s.GetNodes()[i]
}

// nodeStands reports whether the node is up, or listed no more.
func nodeStands(s *tbclusterv1.ClusterState, f *tbclusterv1.Finding) bool {
	n := nodeOf(s, f.GetSubject())
	return n == nil || n.GetState() == tbclusterv1.NodeState_NODE_STATE_UP
}

// nodeGone reports whether the node is listed no more.
func nodeGone(s *tbclusterv1.ClusterState, f *tbclusterv1.Finding) bool {
	return nodeOf(s, f.GetSubject()) == nil
}

// nodeConnected reports whether who found it and the node are connected, as far
// as one of the two can tell; a third one's connections say nothing of theirs.
func nodeConnected(s *tbclusterv1.ClusterState, f *tbclusterv1.Finding) bool {
	n := nodeOf(s, f.GetSubject())
	return n == nil || n.GetSelf() || f.GetNodeId() == s.GetSelfNodeId() && n.GetState() == tbclusterv1.NodeState_NODE_STATE_UP
}

func linkOf(s *tbclusterv1.ClusterState, id string) *tbclusterv1.Link {
	i := slices.IndexFunc(s.GetLinks(), func(l *tbclusterv1.Link) bool { return l.GetId() == id })
	if i < 0 {
		return nil
	}
	return s.GetLinks()[i]
}

func linkCarries(s *tbclusterv1.ClusterState, f *tbclusterv1.Finding) bool {
	return linkOf(s, f.GetSubject()).GetState() == tbclusterv1.LinkState_LINK_STATE_PROVEN
}

// linkKnown reports whether a node of the cluster is at the far end by now, by
// which the cable has another ID, or the cable is gone.
func linkKnown(s *tbclusterv1.ClusterState, f *tbclusterv1.Finding) bool {
	l := linkOf(s, f.GetSubject())
	return l == nil || l.GetB().GetNodeId() != ""
}
