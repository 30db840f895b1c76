package agent

import (
	"testing"

	v1 "tbcluster/api/tbcluster/v1"
)

func TestTheWayOfTheControlChannelIsMarked(t *testing.T) {
	for what, x := range map[string]struct {
		path string
		ways []*v1.PingWay
		used int // -1: none
	}{
		"by its address":       {"eth0 10.0.0.1:7", []*v1.PingWay{{Interface: "eth0"}, {Interface: "eth0", Used: true}}, 1},
		"by its interface":     {"eth0 10.0.0.1:7", []*v1.PingWay{{Interface: "thunderbolt0"}, {Interface: "eth0", Error: "no answer"}, {Interface: "eth0"}}, 2},
		"one that is not here": {"eth1 10.0.0.1:7", []*v1.PingWay{{Interface: "eth0"}}, -1},
		"none":                 {"", []*v1.PingWay{{Interface: ""}}, -1},
	} {
		markUsed(x.path, x.ways)
		for i, w := range x.ways {
			if w.Used != (i == x.used) {
				t.Errorf("%s: way %d: used is %v", what, i, w.Used)
			}
		}
	}
}
