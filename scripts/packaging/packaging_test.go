package packaging

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// tool returns a program, or "" with a word in the log.
func tool(t *testing.T, name string) string {
	t.Helper()
	p, err := exec.LookPath(name)
	if err != nil {
		t.Logf("%s is not here: what it says is not heard", name)
	}
	return p
}

// How much a unit leaves open, by systemd's own measure: 0 is nothing, 10 all.
func TestUnitsAreShut(t *testing.T) {
	analyze := tool(t, "systemd-analyze")
	if analyze == "" {
		return
	}
	for unit, most := range map[string]string{
		"tbcluster-agent@.service": "20", // tenths
		"tbcluster.service":        "63", // what is below it has to reach files, GPUs and networks
	} {
		path, err := filepath.Abs(filepath.Join("systemd", unit))
		if err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(analyze, "security", "--offline=yes", "--no-pager", "--threshold="+most, path).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", unit, err, out)
		}
		t.Logf("%s", out[strings.LastIndex(strings.TrimSpace(string(out)), "\n")+1:])
	}
}

// setting returns the value of a unit's setting.
func setting(unit, name string) string {
	m := regexp.MustCompile(`(?m)^` + name + `=(.*)$`).FindStringSubmatch(unit)
	if m == nil {
		return "(not set)"
	}
	return m[1]
}

func TestTheRootHalfHasTheCapabilitiesThatItExplains(t *testing.T) {
	unit := read(t, "systemd/tbcluster.service")
	given := strings.Fields(setting(unit, "CapabilityBoundingSet"))
	var explained []string
	for l := range strings.Lines(unit) {
		if strings.HasPrefix(l, "#   CAP_") {
			explained = append(explained, regexp.MustCompile(`CAP_[A-Z_]+`).FindAllString(l, -1)...)
		}
	}
	slices.Sort(given)
	slices.Sort(explained)
	if !slices.Equal(given, explained) || len(given) == 0 {
		t.Errorf("given are %v, explained %v", given, explained)
	}
	for _, never := range []string{"CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_BPF", "CAP_MKNOD", "CAP_SYS_CHROOT"} {
		if slices.Contains(given, never) {
			t.Errorf("%s is as good as everything", never)
		}
	}
}

func TestWhatAnUpgradeReliesOn(t *testing.T) {
	service, agent, socket := read(t, "systemd/tbcluster.service"), read(t, "systemd/tbcluster-agent@.service"), read(t, "systemd/tbcluster-agent.socket")
	for _, c := range []struct{ unit, name, want string }{
		{service, "KillMode", "process"}, // engines live on
		{service, "NoNewPrivileges", "yes"},
		{agent, "NoNewPrivileges", "yes"},
		{agent, "User", "tbcluster"},
		{agent, "CapabilityBoundingSet", ""},
		{agent, "ProtectSystem", "strict"},
		{agent, "ReadWritePaths", "/var/lib/tbcluster/agent"},
		{socket, "SocketMode", "0600"}, // whoever connects is the root half to the agent
		{socket, "Accept", "yes"},
		// Homes and what is mounted later have to be there for workers.
		{service, "ProtectHome", "(not set)"},
		{service, "ProtectSystem", "(not set)"},
		{service, "PrivateTmp", "(not set)"},
		{service, "PrivateDevices", "(not set)"},
	} {
		if got := setting(c.unit, c.name); got != c.want {
			t.Errorf("%s is %q, want %q", c.name, got, c.want)
		}
	}
	if got, want := setting(service, "ExecStart"), "--agent-socket "+setting(socket, "ListenStream"); !strings.Contains(got, want) {
		t.Errorf("%q does not go to the socket %q", got, want)
	}
}

// Every file of a unit is in the packages, and every page and completion.
func TestPackagesHoldAllOfIt(t *testing.T) {
	config := read(t, "nfpm.yaml")
	files, err := filepath.Glob("systemd/*")
	if err != nil || len(files) < 6 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range append(files, "man/*.gz", "completions/tbcluster", "completions/_tbcluster", "completions/tbcluster.fish", "grafana.json") {
		if !strings.Contains(config, `"${STAGE}/`+f+`"`) {
			t.Errorf("%s is in no package", f)
		}
	}
}

// The LaunchDaemon, as a parser of property lists reads it.
func TestLaunchDaemon(t *testing.T) {
	python := tool(t, "python3")
	if python == "" {
		return
	}
	out, err := exec.Command(python, "-c", "import json, plistlib, sys; json.dump(plistlib.load(open(sys.argv[1], 'rb')), sys.stdout)", "launchd/tbcluster.plist").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var d struct {
		Label                          string
		ProgramArguments               []string
		RunAtLoad, AbandonProcessGroup bool
		KeepAlive                      struct{ SuccessfulExit *bool }
		UserName                       *string
		ExitTimeOut                    int
	}
	if err := json.Unmarshal(out, &d); err != nil {
		t.Fatal(err)
	}
	if d.Label != "tbcluster" || !slices.Equal(d.ProgramArguments, []string{"/usr/local/bin/tbcluster", "agent", "--root"}) || !d.RunAtLoad || d.UserName != nil {
		t.Errorf("it does not run root's agent: %s", out)
	}
	// What ended by `tbcluster down` stays down; engines outlive an upgrade.
	if d.KeepAlive.SuccessfulExit == nil || *d.KeepAlive.SuccessfulExit || !d.AbandonProcessGroup || d.ExitTimeOut < 15 {
		t.Errorf("%s", out)
	}
}

func TestFormula(t *testing.T) {
	formula, script := read(t, "homebrew/tbcluster.rb.in"), read(t, "../packages")
	for _, place := range regexp.MustCompile(`@[A-Z0-9_]+@`).FindAllString(formula[strings.Index(formula, "\n"):], -1) {
		if !strings.Contains(script, "s|"+place+"|") {
			t.Errorf("nobody fills %s", place)
		}
	}
	if ruby := tool(t, "ruby"); ruby != "" {
		if out, err := exec.Command(ruby, "-c", "homebrew/tbcluster.rb.in").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

// The scripts of packages are read by sh, and ask nobody anything.
func TestMaintainerScripts(t *testing.T) {
	scripts, err := filepath.Glob("[dr][ep][bm]/*")
	if err != nil || len(scripts) != 6 {
		t.Fatalf("%v, %v", scripts, err)
	}
	asks := regexp.MustCompile(`(?m)^\s*(read|db_input|debconf|select)\b`)
	for _, s := range scripts {
		text := read(t, s)
		if strings.HasPrefix(s, "deb/") && !strings.HasPrefix(text, "#!/bin/sh\n") {
			t.Errorf("%s is no script of sh", s)
		}
		if q := asks.FindString(text); q != "" {
			t.Errorf("%s asks: %s", s, q)
		}
		for l := range strings.Lines(text) {
			// In a chroot there may be no systemd to talk to.
			if strings.Contains(l, "daemon-reload") && !strings.Contains(text, "[ -d /run/systemd/system ]") {
				t.Errorf("%s talks to systemd wherever it is: %s", s, l)
			}
		}
		if out, err := exec.Command("sh", "-n", s).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", s, err, out)
		}
	}
}
