package lab

import (
	"fmt"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

func TestTopologiesJoinTheRightNodes(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Nodes: 3}, "0:1 0:2 1:2"},
		{Options{Nodes: 4, Topology: Ring}, "0:1 1:2 2:3 0:3"},
		{Options{Nodes: 2, Topology: Ring}, "0:1"},
		{Options{Nodes: 3, Topology: Chain}, "0:1 1:2"},
		{Options{Topology: Pair, Cables: 2}, "0:1 0:1"},
		{Options{Nodes: 1}, ""},
	} {
		o, err := c.o.complete()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range plan(o) {
			got = append(got, fmt.Sprintf("%d:%d", p.node[0], p.node[1]))
		}
		if g := strings.Join(got, " "); g != c.want {
			t.Errorf("%+v: %s, want %s", c.o, g, c.want)
		}
	}
}

func TestNoPortHoldsTwoCables(t *testing.T) {
	o, err := Options{Nodes: MaxNodes, Cables: 2}.complete()
	if err != nil {
		t.Fatal(err)
	}
	cables := plan(o)
	if want := 2 * MaxNodes * (MaxNodes - 1) / 2; len(cables) != want {
		t.Errorf("%d cables, want %d", len(cables), want)
	}
	used := map[string]bool{}
	have := make([]int, MaxNodes)
	for n := range have {
		have[n] = domains(cables, n)
	}
	for _, c := range cables {
		for end := range c.node {
			key := fmt.Sprint(c.node[end], " ", c.port[end])
			if used[key] {
				t.Fatalf("twice: node and port %s", key)
			}
			used[key] = true
			if c.port[end].domain >= have[c.node[end]] {
				t.Fatalf("no domain for %s", key)
			}
		}
	}
}

func TestNodeNamesAreUniqueAndUsable(t *testing.T) {
	names := NodeNames(MaxNodes)
	seen := map[string]bool{LANHost: true}
	for _, n := range names {
		if seen[n] || !nodeNameRE.MatchString(n) || len("lan-"+n) > 15 {
			t.Errorf("%q cannot be used", n)
		}
		seen[n] = true
	}
	if len(names) != MaxNodes || names[0] != "alpha" || names[23] != "omega" || names[24] != "n25" {
		t.Errorf("names: %v", names)
	}
}

func TestOptionsThatCannotBeAreRefused(t *testing.T) {
	for _, o := range []Options{
		{Name: "a/b"}, {Name: ".."}, {Name: strings.Repeat("x", 25)}, {Nodes: -1}, {Nodes: 65},
		{Topology: "star"}, {Topology: Pair, Nodes: 3}, {Cables: 9}, {Rate: "fast"}, {Memory: 1}, {Disk: 1},
		{Binds: []Bind{{"relative", "/x"}}}, {Binds: []Bind{{"/x", "/"}}}, {Binds: []Bind{{"/x", "/y/../z"}}},
	} {
		if _, err := o.complete(); !fault.Is(err, fault.Usage) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestRatesAndSizesAreReadAsWritten(t *testing.T) {
	for s, want := range map[string]uint64{"4gbit": 4e9, "2.5gbit": 25e8, "500Mbit": 5e8, "1mbps": 8e6, "64kbit": 64e3, "1000000": 1e6, "1gibit": 1 << 30} {
		if got, err := ParseRate(s); err != nil || got != want {
			t.Errorf("%s is %d, %v; want %d", s, got, err, want)
		}
	}
	for s, want := range map[string]uint64{"8g": 8 << 30, "512M": 512 << 20, "64MiB": 64 << 20, "100": 100, "1tb": 1 << 40} {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("%s is %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "-1g", "g", "1 g", "1e9", "2000tbit", "1x", "999999999t"} {
		if _, err := ParseRate(s); !fault.Is(err, fault.Usage) {
			t.Errorf("the rate %q: %v", s, err)
		}
		if _, err := ParseSize(s); s != "1e9" && !fault.Is(err, fault.Usage) {
			t.Errorf("the size %q: %v", s, err)
		}
	}
}

func FuzzParseRate(f *testing.F) {
	for _, s := range []string{"4gbit", "2.5gibps", "", "1", "0.000001tbit", "999999999999tbit"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if bits, err := ParseRate(s); err == nil && (bits < 64e3 || bits > 1e12) {
			t.Errorf("%q is %d bit/s", s, bits)
		} else if err != nil && !fault.Is(err, fault.Usage) {
			t.Errorf("%q: %v", s, err)
		}
	})
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"8g", "512MiB", "", "999999999t", "1k"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := ParseSize(s); err == nil && n > 1<<50 {
			t.Errorf("%q is %d bytes", s, n)
		} else if err != nil && !fault.Is(err, fault.Usage) {
			t.Errorf("%q: %v", s, err)
		}
	})
}

func TestQuirksChangePortsAndDevices(t *testing.T) {
	ports := func(o Options) (string, []planned) {
		o, err := o.complete()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		cables := plan(o)
		for _, c := range cables {
			got = append(got, c.port[0].String()+":"+c.port[1].String())
		}
		return strings.Join(got, " "), cables
	}
	if got, _ := ports(Options{Nodes: 5, Quirks: []Quirk{Hub}}); !strings.HasPrefix(got, "0-301:0-1 0-501:0-1 0-701:0-1 0-303:0-1 0-3:0-3 ") {
		t.Errorf("behind hubs: %s", got)
	}
	if got, _ := ports(Options{Nodes: 2, Cables: 2, Quirks: []Quirk{Crossed}}); got != "0-1:0-3 0-3:0-1" {
		t.Errorf("crossed: %s", got)
	}
	o, _ := Options{Nodes: 3, Quirks: []Quirk{Hub, Devices}}.complete()
	cables := plan(o)
	for node, want := range [][]string{{"0-1", "1-1", "1-3", "1-0:1.1"}, {"1-1", "1-3", "1-0:1.1"}, {"1-1", "1-3", "1-0:1.1"}} {
		list, more := foreigners(o, cables, node)
		var got []string
		for _, f := range list {
			got = append(got, f.dir[strings.LastIndex(f.dir, "/")+1:])
		}
		if more != 1 || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("node %d: %v and %d domains, want %v", node, got, more, want)
		}
	}
	if _, err := (Options{Quirks: []Quirk{"haunted"}}).complete(); !fault.Is(err, fault.Usage) {
		t.Errorf("a quirk that is none: %v", err)
	}
	if got := swapWords("c0de0001-0203-8405-8607-08090a0b0c0d"); got != "0100DEC0-0584-0302-0908-07860D0C0B0A" {
		t.Errorf("swapped: %s", got)
	}
}

func TestAdviceNamesTheLab(t *testing.T) {
	for _, c := range []struct{ name, line, want string }{
		{"", "status", "`tbcluster lab status`"},
		{DefaultName, "start alpha", "`tbcluster lab start alpha`"},
		{"desk", "start alpha --agent", "`tbcluster lab start alpha --agent --name desk`"},
		{"desk", "exec lan -- COMMAND", "`tbcluster lab exec --name desk lan -- COMMAND`"},
	} {
		if got := Command(c.name, c.line); got != c.want {
			t.Errorf("%q of %q: %s, want %s", c.line, c.name, got, c.want)
		}
	}
}
