package tui

import (
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"

	pb "tbcluster/api/tbcluster/v1"
)

func TestACopyOverTheLANIsNoCable(t *testing.T) {
	way := func(link, iface, kind string, rate uint64) *pb.LinkProgress {
		return &pb.LinkProgress{LinkId: link, Interface: iface, Kind: kind, Transport: "tcp", BytesPerSecond: rate}
	}
	cable := func(rate uint64) *pb.LinkProgress { return way("l-1", "thunderbolt0", "cable", rate) }
	lan := func(rate uint64) *pb.LinkProgress { return way("", "eth0", "lan", rate) }
	for want, ways := range map[string][]*pb.LinkProgress{
		"":                             nil,
		"1 cable":                      {cable(5)},
		"2 cables: 1.5 + 1.0":          {cable(1.5e9), way("l-2", "thunderbolt1", "cable", 1e9)},
		"▲ LAN eth0, no cable":         {lan(5)},
		"▲ LAN, no cable":              {way("", "", "lan", 5)},
		"▲ partly LAN eth0: 2.0 + 0.1": {cable(2e9), lan(1e8)},
		"▲ partly LAN eth0: 0.0 + 0.0": {cable(0), lan(0)}, // nothing yet, and both stand open
	} {
		tr := &pb.Transfer{SourceNodeId: "n0", DestinationNodeId: "n1", Links: ways}
		if got := ansi.Strip(frame{}.overText(tr)); got != want {
			t.Errorf("%v: %q, want %q", ways, got, want)
		}
	}
	// Where the cable was cut, or came back, only what carries counts.
	for want, ways := range map[string][]*pb.LinkProgress{
		"▲ LAN eth0, no cable": {cable(0), lan(5)},
		"1 cable":              {lan(0), cable(5)},
	} {
		tr := &pb.Transfer{SourceNodeId: "n0", DestinationNodeId: "n1", Links: ways}
		if got := ansi.Strip(frame{}.overText(tr)); got != want {
			t.Errorf("%v: %q, want %q", ways, got, want)
		}
	}
	here := &pb.Transfer{SourceNodeId: "n0", DestinationNodeId: "n0", Links: []*pb.LinkProgress{way("", "", "loopback", 5)}}
	if got := (frame{}).overText(here); got != "" {
		t.Errorf("within one node: %q", got)
	}
}

func TestThePageOfACopyNamesTheLAN(t *testing.T) {
	s := load(t, "broken")
	for _, over := range []struct {
		link *pb.LinkProgress
		want string
	}{
		{&pb.LinkProgress{Interface: "eth0", Kind: "lan", Transport: "tcp", Bytes: 5}, "▲ LAN eth0, no cable"},
		{&pb.LinkProgress{Kind: "loopback", Transport: "tcp", Bytes: 5}, "within one node"},
	} {
		tr := &pb.Transfer{SourceNodeId: "n0", DestinationNodeId: "n1", Links: []*pb.LinkProgress{over.link}}
		p := &sheet{s: newSnapshot(s), w: 78}
		p.transfer(tr)
		if text := ansi.Strip(strings.Join(p.rows, "\n")); !strings.Contains(text, over.want) || !strings.Contains(text, "tcp") {
			t.Errorf("no %q in\n%s", over.want, text)
		}
	}
}
