package rig

import (
	"strings"
	"testing"

	"tbcluster/rig/state"
)

func peer(device, name, uuid string, inode uint64) state.Peer {
	return state.Peer{
		Device: device, Inode: inode, UUID: uuid, Name: name, RxLanes: 2, TxLanes: 2, RxGbps: 20, TxGbps: 20,
		Services: []state.Service{{Device: device + ".0", Key: "network", Driver: "thunderbolt-net", Interface: &state.Interface{Name: "thunderbolt0"}}},
	}
}

func shown(peers ...state.Peer) state.State {
	return state.State{Driver: true, Domains: []state.Domain{{UUID: "u-a", Peers: peers}}}
}

func TestDifferencesNameWhatIsNotAsItShouldBe(t *testing.T) {
	wants := []want{{device: "0-1", name: "b", uuid: "u-b", lanes: 2, gbps: 20, sure: true}}
	slow := peer("0-1", "b", "u-b", 7)
	slow.RxLanes = 1
	mute := peer("0-1", "b", "u-b", 7)
	mute.Services = nil
	unsure := wants[0]
	unsure.sure = false
	router := shown(peer("0-1", "b", "u-b", 7))
	router.Domains[0].Others = []string{"0-3"}
	for _, c := range []struct {
		name    string
		state   state.State
		driver  bool
		wants   []want
		stale   map[string]uint64
		differ  string // "" is nothing
		routers []string
	}{
		{"the truth", shown(peer("0-1", "b", "u-b", 7)), true, wants, nil, "", nil},
		{"upper-case UUID", shown(peer("0-1", "b", "U-B", 7)), true, wants, nil, "", nil},
		{"another one than before", shown(peer("0-1", "b", "u-b", 8)), true, wants, map[string]uint64{"0-1": 7}, "", nil},
		{"the one from before", shown(peer("0-1", "b", "u-b", 7)), true, wants, map[string]uint64{"0-1": 7}, "from before", nil},
		{"nobody", shown(), true, wants, nil, "0-1 (b) is missing", nil},
		{"somebody else", shown(peer("0-1", "c", "u-c", 7)), true, wants, nil, "0-1 is c u-c, not b u-b", nil},
		{"one too many", shown(peer("0-1", "b", "u-b", 7), peer("0-3", "c", "u-c", 8)), true, wants, nil, "0-3 (c) is there", nil},
		{"nothing plugged", shown(peer("0-1", "b", "u-b", 7)), true, nil, nil, "behind that port is no host that is on", nil},
		{"not bonded", shown(slow), true, wants, nil, "1 lanes of 20", nil},
		{"no interface", shown(mute), true, wants, nil, "no network interface", nil},
		{"a router", router, true, wants, nil, "0-3 is a router", nil},
		{"a hub", router, true, wants, nil, "", []string{"0-3"}},
		{"no hub", shown(peer("0-1", "b", "u-b", 7)), true, wants, nil, "the hub 0-3 is missing", []string{"0-3"}},
		{"the driver over there is not loaded", shown(), true, []want{unsure}, nil, "", nil},
		{"and it is still shown", shown(peer("0-1", "b", "u-b", 7)), true, []want{unsure}, nil, "", nil},
		{"no driver", state.State{}, false, wants, nil, "", nil},
		{"no driver, and there should be one", state.State{}, true, wants, nil, "the driver is loaded: false", nil},
		{"a driver, and there should be none", shown(), false, wants, nil, "the driver is loaded: true", nil},
		{"no domain", state.State{Driver: true}, true, wants, nil, "0 domains", nil},
	} {
		got := strings.Join(differences("a", c.state, c.driver, c.wants, c.routers, c.stale), "; ")
		if c.differ == "" && got != "" || !strings.Contains(got, c.differ) {
			t.Errorf("%s: %q, not %q", c.name, got, c.differ)
		}
	}
}
