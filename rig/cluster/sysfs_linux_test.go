package cluster

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"testing"

	"tbcluster/rig/image"
	"tbcluster/rig/state"
)

// recorded is what the driver of a guest has shown: by it the lab's tree and our
// reader are tested, without guests.
const recorded = "../../linux/testdata/driver.txt"

// realSysfs compares what the driver shows now with what is recorded. With
// UPDATE_GOLDEN=1 it records.
func realSysfs(t *testing.T, d *desk) {
	a := d.Host("a")
	if a.Spec().Kernel != image.Backport {
		t.Fatalf("recorded was what %s shows", image.Backport)
	}
	// Besides, our reader looks at these.
	if got := sh(t, a, "cat /sys/module/thunderbolt/parameters/xdomain; basename $(readlink /sys/class/net/thunderbolt0/device/driver); ls -d /sys/module/thunderbolt_net"); got != "Y\nthunderbolt-net\n/sys/module/thunderbolt_net" {
		t.Errorf("the driver's parameter, the interface's driver and its module are %q", got)
	}
	out := sh(t, a, "rig-probe attributes")
	var now state.Attributes
	if err := json.Unmarshal([]byte(out), &now); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if os.Getenv("UPDATE_GOLDEN") != "" {
		var b bytes.Buffer
		b.WriteString("# What the driver of " + sh(t, a, "uname -r") + " shows in guest a of the rig, which a cable joins with\n" +
			"# guest b: attributes, links and directories of Thunderbolt. TestTwoHosts with\n# UPDATE_GOLDEN=1 writes it.\n")
		if err := now.Write(&b); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(recorded, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(recorded)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	then, err := state.ParseAttributes(f)
	if err != nil {
		t.Fatal(err)
	}
	has, had := now.Shapes(), then.Shapes()
	for place, shapes := range had {
		if has[place] == nil {
			t.Errorf("%s is no more", place)
			continue
		}
		for _, s := range shapes {
			if !slices.Contains(has[place], s) {
				t.Errorf("%s is written as %q, and was as %q", place, has[place], shapes)
				break
			}
		}
	}
	for place := range has {
		if had[place] == nil {
			t.Logf("%s is new", place)
		}
	}
}
