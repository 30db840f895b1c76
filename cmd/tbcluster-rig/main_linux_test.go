package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"tbcluster/api/fault"
	"tbcluster/rig"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// command runs one command line, with sockets of its own.
func command(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	var o, e bytes.Buffer
	code = run(t.Context(), &globals{in: null, out: &o, errOut: &e}, args)
	return code, o.String(), e.String()
}

func ownSockets(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "rig-test-") // a short name, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("XDG_RUNTIME_DIR", dir)
}

func TestErrorsSayWhatToDo(t *testing.T) {
	ownSockets(t)
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"status", fault.ExitNoAgent, "`tbcluster-rig up` makes one"},
		{"plug a.0", fault.ExitNoAgent, "find the rig default"},
		{"--name other plug a.0", fault.ExitNoAgent, "`tbcluster-rig --name other up` makes one"},
		{"--name / status", fault.ExitUsage, "cannot be called"},
		{"plug", fault.ExitUsage, "accepts 1 arg(s), received 0\n  write: tbcluster-rig plug PORT"},
		{"up --rate 5", fault.ExitUsage, "--rate 5 has no unit\n  write 5mbit or 5gbit, or none"},
		{"up --rate 1bit", fault.ExitUsage, "choose between 64kbit and 1tbit; none is no limit"},
		{"dance", fault.ExitUsage, "lists the commands"},
		{"up --shape star", fault.ExitUsage, "the shapes are"},
		{"up --kernel mine", fault.ExitUsage, "the kernels are"},
		{"up --hosts 99", fault.ExitUsage, "choose 1 to"},
		{"up --shape pair --hosts 3", fault.ExitUsage, "a pair has 2 hosts"},
		{"up --memory 1", fault.ExitUsage, "--memory cannot be 1\n  choose 256 to 65536 MiB"},
		{"up --memory -5", fault.ExitUsage, "--memory cannot be -5"},
		{"up --memory 99999999", fault.ExitUsage, "--memory cannot be 99999999"},
		{"up --cpus 0", fault.ExitUsage, "--cpus cannot be 0"},
		{"walk --cpus 100000", fault.ExitUsage, "--cpus cannot be 100000"},
		{"up --disk -1", fault.ExitUsage, "--disk cannot be -1"},
		{"up --ports -1", fault.ExitUsage, "--ports cannot be -1"},
		{"up --lanes 3", fault.ExitUsage, "--lanes cannot be 3\n  choose 1 to 2"},
		{"up --generation 4", fault.ExitUsage, "--usb4 2"},
		{"up --guest q", fault.ExitUnknown, "the hosts are a, b"},
		{"up --driver /nosuch.ko", fault.ExitPartial, "no such file"},
		{"up --loss NaN", fault.ExitUsage, "--loss cannot be NaN"},
		{"wire a.0 --loss NaN", fault.ExitUsage, "--loss cannot be NaN"},
		{"wire a.0 --overrun 1.5", fault.ExitUsage, "--overrun cannot be 1.5"},
		{"wire a.0 --latency 99999h", fault.ExitUsage, "choose 0s to 1m0s"},
		{"wire a.0 --latency -1s", fault.ExitUsage, "--latency cannot be -1s"},
		{"flap a.0 --out -3s", fault.ExitUsage, "--out cannot be -3s"},
		{"trace banana", fault.ExitUsage, "the words are control and registers"},
		{"up --rate fast", fault.ExitUsage, "no rate"},
		{"up --cluster /nowhere/tbcluster", fault.ExitPartial, "make build"},
		{"run /nowhere.toml", fault.ExitPartial, "read a scenario"},
		{"module /nowhere", fault.ExitPartial, "the directory with the Kbuild"},
		{"module --kernel mine .", fault.ExitUsage, "the kernels are"},
		{"build --kernel mine", fault.ExitUsage, "the kernels are"},
	} {
		code, _, errOut := command(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errOut, c.want) {
			t.Errorf("%s: exit code %d and %q, not %d and %q", c.args, code, errOut, c.code, c.want)
		}
	}
}

func TestScenarioWithAMistakeNamesItsLine(t *testing.T) {
	name := filepath.Join(t.TempDir(), "x.toml")
	if err := os.WriteFile(name, []byte("seed = 1\n[[step]]\ndo = \"dance\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	code, _, errOut := command(t, "run", name)
	if code != fault.ExitUsage || !strings.Contains(errOut, "x.toml:2") {
		t.Errorf("exit code %d: %s", code, errOut)
	}
}

func TestAScenarioWithoutStepsIsNotPlayed(t *testing.T) {
	code, out, errOut := command(t, "run", os.DevNull)
	if code != fault.ExitUsage || !strings.Contains(errOut, "(/dev/null): it has no steps") || strings.Contains(out+errOut, "boot") {
		t.Errorf("exit code %d: %s%s", code, out, errOut)
	}
}

func TestTwoRigsHaveTwoNames(t *testing.T) {
	ownSockets(t)
	listen := func(name string) (*server, []string) {
		t.Helper()
		s, killed, err := (&globals{name: name}).listen()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.listener.Close() })
		return s, killed
	}
	one, _ := listen("one")
	if _, _, err := (&globals{name: "one"}).listen(); !fault.Is(err, fault.NodeInUse) || fault.As(err).Fix != "`tbcluster-rig --name one down` ends it; --name makes another" {
		t.Errorf("a second rig of the same name: %v", err)
	}
	two, _ := listen("two")
	// One that is killed leaves its socket.
	two.listener.SetUnlinkOnClose(false)
	for _, x := range []*server{one, two} {
		if err := x.close(); err != nil {
			t.Error(err)
		}
	}
	if code, _, errOut := command(t, "--name", "two", "status"); code != fault.ExitNoAgent || errOut != "tbcluster-rig: the rig two was killed\n  `tbcluster-rig --name two up` makes it anew\n" {
		t.Errorf("exit code %d and %q of a rig that was killed", code, errOut)
	}
	if code, _, errOut := command(t, "--name", "one", "status"); code != fault.ExitNoAgent || strings.Contains(errOut, "killed") {
		t.Errorf("exit code %d and %q of a rig that was taken down", code, errOut)
	}
	three, killed := listen("three")
	if !slices.Equal(killed, []string{"two"}) {
		t.Errorf("the rigs %q were killed", killed)
	}
	left, err := os.ReadDir(filepath.Dir(three.path))
	if err != nil || len(left) != 1 {
		t.Errorf("the sockets %v are left: %v", left, err)
	}
}

func TestFlagsMakeTheTopology(t *testing.T) {
	var flags topologyFlags
	f := pflag.NewFlagSet("x", pflag.ContinueOnError)
	flags.add(f)
	if err := f.Parse(strings.Fields("--hosts 3 --shape ring --kernel stable --usb4 2 --generation 4 --iommu --rate 100mbit --latency 1ms --loss-every 7 --corrupt 0.5 --corrupt-silent 0.25 --overrun-every 9 --seed 5")); err != nil {
		t.Fatal(err)
	}
	topology, err := flags.topology()
	if err != nil {
		t.Fatal(err)
	}
	if len(topology.Hosts) != 3 || len(topology.Cables) != 3 || topology.Kernel != image.Stable || topology.Seed != 5 {
		t.Errorf("%+v", topology)
	}
	if h := topology.Hosts[2]; h.Version != 2 || h.Speed != usb4.Gen4 || !h.IOMMU {
		t.Errorf("%+v", h)
	}
	if o := topology.Cables[2].Options; o.Rate != 100_000_000 || o.Latency != time.Millisecond || o.Loss != (usb4.Injection{Every: 7}) || o.CorruptFlagged.Probability != 0.5 || o.Corrupt.Probability != 0.25 || o.Overrun.Every != 9 {
		t.Errorf("%+v", o)
	}
}

func TestTheNameOfARigIsNoChangeOfACable(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "--name other": false, "--rate none": true, "--latency 0s": true, "--loss-every 3": true, "--overrun 0 --name other": true,
	} {
		var flags wireFlags
		f := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.String("name", "", "")
		flags.add(f)
		if err := f.Parse(strings.Fields(text)); err != nil {
			t.Fatal(err)
		}
		if flags.given() != want {
			t.Errorf("%q changes a cable: %v", text, !want)
		}
	}
}

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"Verb":"guest","Args":["a","true"],"Terminal":true,"Columns":80,"Rows":24}`))
	f.Add([]byte(`{"Verb":"wire","Args":["a.0"],"Wire":{"Rate":1}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q request
		if json.Unmarshal(b, &q) != nil {
			return
		}
		v, ok := verbs[q.Verb]
		c := call{request: q, rig: &rig.Rig{}}
		if ok && len(q.Args) >= v.args && v.args > 0 {
			return // it would need a rig
		}
		if !ok && c.do(t.Context()) == nil {
			t.Errorf("%q was done", q.Verb)
		}
	})
}
