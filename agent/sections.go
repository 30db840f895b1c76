package agent

import (
	"maps"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/mesh/member"
)

// The sections of a node's own state.
const (
	sectionNode      = "node"
	sectionLinks     = "links"
	sectionModels    = "models"
	sectionInstances = "instances"
	sectionTransfers = "transfers"
	sectionFindings  = "findings"
)

// nodeSections is what a node last said of itself; nil where it never did. The
// messages are shared and not to be changed.
type nodeSections struct {
	node      *peerv1.NodeSection
	links     *peerv1.LinksSection
	models    *peerv1.ModelsSection
	instances *peerv1.InstancesSection
	transfers *peerv1.TransfersSection
	findings  *peerv1.FindingsSection
}

// sectionCache decodes each version of a section once.
type sectionCache struct {
	have map[string]*cached // by node
}

// cached is what is kept of a node.
type cached struct {
	revision uint64
	byName   map[string]decoded
	sections nodeSections
	view     nodeView
}

// nodeView is what is told of a node besides its sections, as far as a change of
// it has consequences.
type nodeView struct {
	state       member.State
	reason, via string
	incarnation uint64
	version     string
	since       time.Time
}

type decoded struct {
	incarnation, version uint64
	message              proto.Message // nil where it could not be decoded
}

func newSectionCache() *sectionCache {
	return &sectionCache{have: map[string]*cached{}}
}

// newSection returns an empty message for a section, or nil for one that is
// not ours to read.
func newSection(name string) proto.Message {
	switch name {
	case sectionNode:
		return &peerv1.NodeSection{}
	case sectionLinks:
		return &peerv1.LinksSection{}
	case sectionModels:
		return &peerv1.ModelsSection{}
	case sectionInstances:
		return &peerv1.InstancesSection{}
	case sectionTransfers:
		return &peerv1.TransfersSection{}
	case sectionFindings:
		return &peerv1.FindingsSection{}
	}
	return nil
}

// read returns what every node last said, by node ID. It is called from one
// goroutine.
func (c *sectionCache) read(views []member.NodeView) map[string]nodeSections {
	known, _ := c.readNews(views)
	return known
}

// readNews is read, and reports whether anything is new since it was called last
// but counters, round trips, and how much memory and disk are free.
func (c *sectionCache) readNews(views []member.NodeView) (known map[string]nodeSections, news bool) {
	known = make(map[string]nodeSections, len(views)+1)
	for _, v := range views {
		id := string(v.ID)
		of := c.have[id]
		if of == nil {
			of, news = &cached{}, true
			c.have[id] = of
		}
		if view := (nodeView{v.State, v.Reason, v.Via, v.Incarnation, v.Version, v.Since}); of.view != view {
			of.view, news = view, true
		}
		if of.byName == nil || of.revision != v.Revision {
			news = of.read(v) || news
		}
		known[id] = of.sections
	}
	if len(known) != len(c.have) {
		news = true
		maps.DeleteFunc(c.have, func(id string, _ *cached) bool { _, ok := known[id]; return !ok })
	}
	return known, news
}

// read takes what the node says now, and reports whether anything of it is new.
func (c *cached) read(v member.NodeView) (news bool) {
	byName := make(map[string]decoded, len(v.Sections))
	for name, s := range v.Sections {
		d := c.byName[name]
		if d.incarnation != v.Incarnation || d.version != s.Version || d.message == nil {
			m := newSection(name)
			if m == nil {
				continue
			}
			if err := proto.Unmarshal(s.Data, m); err != nil {
				m = nil
			}
			news = news || d.message == nil || m == nil || !proto.Equal(lasting(d.message), lasting(m))
			d = decoded{v.Incarnation, s.Version, m}
		}
		byName[name] = d
	}
	news = news || len(byName) != len(c.byName)
	c.revision, c.byName, c.sections = v.Revision, byName, sectionsOf(byName)
	return news
}

// lasting is a section without what changes all the time. It may be the section
// itself.
func lasting(m proto.Message) proto.Message {
	switch m := m.(type) {
	case *peerv1.LinksSection:
		m = proto.CloneOf(m)
		for _, r := range m.Links {
			r.RttUs, r.TxBytes, r.RxBytes = 0, 0, 0
			r.Errors = min(r.Errors, 1) // the first is news
			r.TxErrors, r.RxErrors, r.TxDropped, r.RxDropped = 0, 0, 0, 0
		}
		return m
	case *peerv1.NodeSection:
		if m.Node == nil {
			return m
		}
		m = proto.CloneOf(m)
		m.Node.DiskFreeBytes = 0
		if m.Node.Memory != nil {
			m.Node.Memory.AvailableBytes, m.Node.Memory.BudgetBytes = 0, 0
		}
		return m
	}
	return m
}

func sectionsOf(m map[string]decoded) nodeSections {
	var n nodeSections
	n.node, _ = m[sectionNode].message.(*peerv1.NodeSection)
	n.links, _ = m[sectionLinks].message.(*peerv1.LinksSection)
	n.models, _ = m[sectionModels].message.(*peerv1.ModelsSection)
	n.instances, _ = m[sectionInstances].message.(*peerv1.InstancesSection)
	n.transfers, _ = m[sectionTransfers].message.(*peerv1.TransfersSection)
	n.findings, _ = m[sectionFindings].message.(*peerv1.FindingsSection)
	return n
}
