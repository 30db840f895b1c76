package agent

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/mesh/member"
)

// TestCountersAreNoNews changes one thing after the other of what a node says.
func TestCountersAreNoNews(t *testing.T) {
	links := &peerv1.LinksSection{Links: []*peerv1.LinkReport{{Port: "0-1", Proven: true, RttUs: 100, TxBytes: 5}}}
	node := &peerv1.NodeSection{Node: &v1.Node{Name: "beta", DiskFreeBytes: 9, Memory: &v1.Memory{TotalBytes: 10, AvailableBytes: 7}}}
	view := member.NodeView{ID: "B", State: member.Up, Incarnation: 1, Since: time.Unix(1, 0), Via: "eth0 192.0.2.1:1"}
	version := uint64(0)
	say := func() []member.NodeView {
		version++
		view.Revision = version
		view.Sections = map[string]member.Section{"unheard-of": {Version: version, Data: []byte{1}}}
		for name, m := range map[string]proto.Message{sectionLinks: links, sectionNode: node} {
			data, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			view.Sections[name] = member.Section{Version: version, Data: data}
		}
		return []member.NodeView{view}
	}
	c := newSectionCache()
	if _, news := c.readNews(say()); !news {
		t.Error("a node is no news")
	}
	for _, x := range []struct {
		what   string
		change func()
		news   bool
	}{
		{"nothing", func() {}, false},
		{"bytes", func() { links.Links[0].TxBytes, links.Links[0].RxBytes = 7, 8 }, false},
		{"the round trip", func() { links.Links[0].RttUs = 900 }, false},
		{"free memory and disk", func() { node.Node.Memory.AvailableBytes, node.Node.DiskFreeBytes = 3, 2 }, false},
		{"the heartbeat", func() { view.LastHeard, view.RTT = time.Unix(9, 0), time.Second }, false},
		{"the first error", func() { links.Links[0].Errors, links.Links[0].RxErrors = 1, 1 }, true},
		{"another error", func() { links.Links[0].Errors, links.Links[0].RxErrors = 2, 2 }, false},
		{"a link that is proven no more", func() { links.Links[0].Proven = false }, true},
		{"a link that is gone", func() { links.Links = nil }, true},
		{"the name", func() { node.Node.Name = "delta" }, true},
		{"the state", func() { view.State = member.Suspect }, true},
		{"the way", func() { view.Via = "thunderbolt0 192.0.2.1:1" }, true},
	} {
		x.change()
		known, news := c.readNews(say())
		if news != x.news {
			t.Errorf("%s: news %v", x.what, news)
		}
		// Whether news or not, it is known.
		if k := known["B"]; !proto.Equal(k.links, links) || !proto.Equal(k.node, node) {
			t.Errorf("%s: known is %v, %v", x.what, k.links, k.node)
		}
	}
	if _, news := c.readNews([]member.NodeView{view}); news {
		t.Error("the same once more is news")
	}
	if _, news := c.readNews(nil); !news {
		t.Error("a node that is gone is no news")
	}
}
