package lab

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"tbcluster/rig/state"
)

// notInGuests are attributes that the lab has and the driver of the guests, of
// which the record is, has not; each with the reason.
var notInGuests = map[string]string{
	"domain/host/vendor":      "of a host router whose DROM names it (switch_attr_is_visible in drivers/thunderbolt/switch.c); the emulated one has no DROM",
	"domain/host/vendor_name": "the same",
	"domain/host/device":      "the same",
	"domain/host/device_name": "the same",
}

// TestTreeIsLikeThatOfTheDriver compares the tree with what the real driver has
// shown in a guest of the rig: everything here is there, and written alike.
func TestTreeIsLikeThatOfTheDriver(t *testing.T) {
	f, err := os.Open("../linux/testdata/driver.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	real, err := state.ParseAttributes(f)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := state.ReadAttributes(oneCable(t).root)
	if err != nil {
		t.Fatal(err)
	}
	has, shown := ours.Shapes(), real.Shapes()
	used := map[string]bool{}
	for _, place := range slices.Sorted(maps.Keys(has)) {
		if shown[place] == nil {
			if notInGuests[place] == "" {
				t.Errorf("%s: the driver has no such thing", place)
			}
			used[place] = true
			continue
		}
		for _, shape := range has[place] {
			switch {
			case slices.Contains(shown[place], shape):
			case shape == "->" && strings.HasPrefix(place, "domain/host/peer/service/net/interface/"):
				// The attribute of a real interface.
			default:
				t.Errorf("%s is written as %q, by the driver as %q", place, shape, shown[place])
			}
		}
	}
	for place := range notInGuests {
		if !used[place] {
			t.Errorf("%s is no exception any more", place)
		}
	}
	// What the driver has and the lab has not is said, not wrong: nobody reads it.
	var missing []string
	for place := range shown {
		if has[place] == nil {
			missing = append(missing, place)
		}
	}
	slices.Sort(missing)
	t.Log(fmt.Sprint("the lab is without ", missing))
}
