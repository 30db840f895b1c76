package rig

import (
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/image"
	"tbcluster/rig/state"
	"tbcluster/rig/usb4"
)

const whole = `# everything that there is
seed = 7

[rig]
hosts = 3
shape = "ring"
kernel = "stable"
memory = 384
version = 2
latency = "50us"

[[host]]
name = "b"
iommu = true
kernel = "debug"

[[cable]]
a = "a.0"
b = "b.0"
rate = "100mbit"
loss = { every = 100 }
corrupt_flagged = { probability = 0.01 }

[[step]]
do = "traffic"
cable = "a.0"
bytes = "4m"

[[step]]
after = "1.5s"
do = "flap"
cable = "b.1"
out = "300ms"
unsettled = true

[[step]]
at = "10s"
when = "peer a.0"
do = "wire"
cable = "a.0"
from = "a.0"
wire = { rate = "50mbit", trained_lanes = 1 }

[[step]]
do = "run"
host = "a"
run = ["uname", "-r"]
expect = "^6\\."

[[step]]
do = "crash"
host = "c"
`

func TestScenarioIsRead(t *testing.T) {
	s, err := ParseScenario("x.toml", []byte(whole))
	if err != nil {
		t.Fatal(err)
	}
	topology, err := s.Topology()
	if err != nil {
		t.Fatal(err)
	}
	if len(topology.Hosts) != 3 || len(topology.Cables) != 3 || topology.Kernel != image.Stable || topology.Seed != 7 {
		t.Errorf("topology %+v", topology)
	}
	if b := topology.Hosts[1]; !b.IOMMU || b.Kernel != image.Debug || b.Memory != 384 || b.Version != 2 {
		t.Errorf("host b %+v", b)
	}
	if o := topology.Cables[0].Options; o.Rate != 100_000_000 || o.Loss.Every != 100 || o.CorruptFlagged.Probability != 0.01 || o.Latency != 0 {
		t.Errorf("the cable with options of its own %+v", o)
	}
	if o := topology.Cables[1].Options; o.Latency != 50*time.Microsecond || o.Rate != 0 {
		t.Errorf("another cable %+v", o)
	}
	if s.Steps[0].bytes() != 4<<20 || s.Steps[1].out() != 300*time.Millisecond || s.Steps[2].Wire.options(false).Lanes != 1 {
		t.Errorf("steps %+v", s.Steps)
	}
}

// What the documentation shows is a scenario.
func TestTheScenarioOfTheDocumentationIsRead(t *testing.T) {
	b, err := os.ReadFile("../docs/rig.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(b), "\n## Scenarios\n")
	var file strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "## ") {
			break
		}
		if code, ok := strings.CutPrefix(line, "    "); ok {
			file.WriteString(code)
		}
	}
	s, err := ParseScenario("docs/rig.md", []byte(file.String()))
	if err != nil {
		t.Fatalf("%v\n%s", err, file.String())
	}
	if len(s.Steps) != 4 || s.Steps[1].When != "carrier a.0" || len(s.Hosts) != 1 {
		t.Errorf("it is read as %+v", s)
	}
}

// The test of the documentation is one that runs.
func TestTheTestOfTheDocumentationIsOurs(t *testing.T) {
	page, err := os.ReadFile("../docs/rig.md")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := os.ReadFile("example_linux_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(ours), "package rig_test\n")
	want := strings.ReplaceAll(strings.ReplaceAll(code, "\t", "    "), "\n", "\n    ")
	want = strings.TrimRight(strings.ReplaceAll(want, "\n    \n", "\n\n"), " ")
	if !strings.Contains(string(page), want) {
		t.Errorf("docs/rig.md shows another test than example_linux_test.go:\n%s", want)
	}
}

func TestAnInterfaceWithoutCarrierSaysWhy(t *testing.T) {
	for want, n := range map[string]state.Interface{"": {Up: true, Carrier: true}, "nobody has taken it up": {}, "the other end is not": {Up: true}} {
		if got := noCarrier(n); !strings.HasSuffix(got, want) || (got == "") != (want == "") {
			t.Errorf("%+v: %q, not %q", n, got, want)
		}
	}
}

func TestScenarioSurvivesBeingWritten(t *testing.T) {
	s, err := ParseScenario("x.toml", []byte(whole))
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseScenario("x.toml", b)
	if err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	if !reflect.DeepEqual(s, again) {
		t.Errorf("it was\n%+v\nand is\n%+v\nby\n%s", s, again, b)
	}
}

func TestScenarioErrorsNameTheirLine(t *testing.T) {
	for text, want := range map[string]string{
		"seed = 1\nsneed = 2\n":                                                  "x.toml:2): sneed does not exist",
		"[rig]\nhosts = \"two\"\n":                                               "x.toml:2)",
		"[rig]\n\nshape = \"star\"\n":                                            "x.toml:1): there is no shape \"star\"",
		"[rig]\nkernel = \"mine\"\n":                                             "x.toml:1): there is no kernel",
		"[[cable]]\na = \"a.0\"\nb = \"b.0\"\nrate = \"fast\"\n":                 "x.toml:4)",
		"[rig]\nlatency = \"-1s\"\n":                                             "x.toml:2)",
		"[[step]]\ndo = \"plug\"\ncable = \"a.0\"\n\n[[step]]\ndo = \"dance\"\n": "x.toml:5): there is no action \"dance\"; the actions are boot, crash,",
		"[[step]]\ndo = \"plug\"\ncable = \"a.0\"\nhost = \"a\"\n":               "x.toml:1): plug: takes no host",

		"[[step]]\ndo = \"plug\"\ncable = \"c.0\"\n":                               "x.toml:1): no cable ends in port",
		"[[step]]\ndo = \"plug\"\n":                                                "x.toml:1): plug: needs a cable",
		"[[step]]\ndo = \"crash\"\ncable = \"a.0\"\n":                              "x.toml:1): crash: needs a host",
		"[[step]]\ndo = \"crash\"\nhost = \"z\"\n":                                 "x.toml:1): there is no host",
		"[[step]]\ndo = \"run\"\nhost = \"a\"\n":                                   "x.toml:1): run: run and expect",
		"[[step]]\ndo = \"run\"\nhost = \"a\"\nrun = [\"x\"]\nexpect = \"(\"\n":    "x.toml:1): expect:",
		"[[step]]\ndo = \"flap\"\ncable = \"a.0\"\nbytes = \"1k\"\n":               "x.toml:1): flap: bytes belongs",
		"[[step]]\ndo = \"nothing\"\nwhen = \"soon\"\n":                            "x.toml:1): when:",
		"[[step]]\ndo = \"nothing\"\nwhen = \"carrier q.0\"\n":                     "x.toml:1): when: no cable",
		"# a [[step]] in a comment\ntext = \"\"\"\n[[step]]\n\"\"\"\n":             "x.toml:2)",
		"[rig]\nhosts = 99\n":                                                      "a rig cannot have 99 hosts",
		"[[host]]\nname = \"q\"\n":                                                 "x.toml:1): there is no host \"q\"; the hosts are a, b",
		"[[cable]]\na = \"a.0\"\nb = \"b.0\"\n[[cable]]\na = \"a.0\"\nb = \"b.1\"": "two cables end in port a.0",
	} {
		_, err := ParseScenario("x.toml", []byte(text))
		if !fault.Is(err, fault.ConfigInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, not %q", text, err, want)
		}
	}
}

func FuzzScenario(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte("[[cable]]\na='a.0'\nb='b.1'\nunplugged=true\n[[step]]\ndo='boot'\nhost='a'\n"))
	f.Add([]byte("rig={hosts=4,shape='mesh',cables=2}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseScenario("x", b)
		if err != nil {
			if fault.As(err) == nil {
				t.Fatalf("an error that is no Fault: %v", err)
			}
			return
		}
		out, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseScenario("x", out)
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v\n%s", err, out)
		}
		if twice, err := again.Encode(); err != nil || string(twice) != string(out) {
			t.Fatalf("%v\n%s\nand then\n%s", err, out, twice)
		}
	})
}

func TestWalkIsDecidedByItsSeed(t *testing.T) {
	steps := func(seed uint64) string {
		w, err := NewWalk(seed, Ring(3))
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for range 200 {
			b.WriteString(w.Next().String() + "\n")
		}
		return b.String()
	}
	first := steps(3)
	if again := steps(3); again != first {
		t.Error("the same seed gave other steps")
	}
	if first == steps(4) {
		t.Error("another seed gave the same steps")
	}
}

// What a walk does has to make sense in the order in which it is done: a model
// of its own follows the steps.
func TestWalkMakesSense(t *testing.T) {
	for seed := range uint64(50) {
		topology := Mesh(3)
		w, err := NewWalk(seed, topology)
		if err != nil {
			t.Fatal(err)
		}
		complete, err := topology.complete()
		if err != nil {
			t.Fatal(err)
		}
		off, out := map[string]bool{}, map[string]bool{}
		did := map[Action]int{}
		check := func(s Step) {
			t.Helper()
			if err := s.check(complete); err != nil {
				t.Fatalf("seed %d: %s: %v", seed, s, err)
			}
			did[s.Do]++
			var ends []string
			for _, c := range complete.Cables {
				if c.A == s.Cable {
					ends = []string{c.A[:1], c.B[:1]}
				}
			}
			wrong := false
			switch s.Do {
			case DoPlug:
				wrong, out[s.Cable] = !out[s.Cable], false
			case DoUnplug:
				wrong, out[s.Cable] = out[s.Cable], true
			case DoBoot:
				wrong, off[s.Host] = !off[s.Host], false
			case DoCrash:
				wrong, off[s.Host] = off[s.Host], true
			case DoReload:
				wrong = off[s.Host]
			case DoFlap, DoTraffic:
				wrong = out[s.Cable] || off[ends[0]] || off[ends[1]]
			}
			if wrong {
				t.Fatalf("seed %d: %s: off %v, out %v", seed, s, off, out)
			}
			if off["a"] && off["b"] && off["c"] {
				t.Fatalf("seed %d: nobody is on", seed)
			}
		}
		for range 200 {
			check(w.Next())
		}
		for _, x := range weights {
			if did[x.do] == 0 {
				t.Errorf("seed %d never does %s", seed, x.do)
			}
		}
		for _, s := range w.heal() {
			check(s)
		}
		for _, c := range complete.Cables {
			if out[c.A] || off[c.A[:1]] || off[c.B[:1]] {
				t.Errorf("seed %d: the cable %s is not up at the end", seed, c.A)
			}
		}
	}
}

func TestStepsAreSaidInALine(t *testing.T) {
	for want, s := range map[string]Step{
		"plug a.0":              {Do: DoPlug, Cable: "a.0"},
		"crash b":               {Do: DoCrash, Host: "b"},
		"flap a.0 200ms":        {Do: DoFlap, Cable: "a.0"},
		"traffic a.0 512 bytes": {Do: DoTraffic, Cable: "a.0", Bytes: 512},
		"run a uname -r":        {Do: DoRun, Host: "a", Run: []string{"uname", "-r"}},
		"wire a.0 perfect":      {Do: DoWire, Cable: "a.0", Wire: &CableOptions{}},
		"wire a.0 rate 50 Mb/s, loss every 7, lanes 1": {Do: DoWire, Cable: "a.0", Wire: &CableOptions{Rate: 50_000_000, Loss: Injection{Every: 7}, TrainedLanes: 1}},
	} {
		if got := s.String(); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

func TestWireStepsAreWhatTCPBears(t *testing.T) {
	w, err := NewWalk(1, Pair())
	if err != nil {
		t.Fatal(err)
	}
	for range 500 {
		s := w.Next()
		if s.Do != DoWire {
			continue
		}
		// Silent corruption would be seen as such by nobody below us.
		if o := s.Wire.options(false); o.Corrupt != (usb4.Injection{}) || o.Rate != 0 && o.Rate < 50_000_000 {
			t.Errorf("%s", s)
		}
	}
}
