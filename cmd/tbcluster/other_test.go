package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tbcluster/agent"
	"tbcluster/agent/config"
	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func TestPingShowsEachWay(t *testing.T) {
	d := startDouble(t, &agentDouble{ping: &tbv1.PingResponse{Ways: []*tbv1.PingWay{
		{Kind: "cable", Interface: "thunderbolt0", Address: "10.77.3.2", RttUs: 210, LinkId: "l-1"},
		{Kind: "lan", Interface: "eth0", Address: "192.0.2.7:7871", RttUs: 640, Used: true},
		{Kind: "cable", Interface: "thunderbolt1", Address: "10.77.3.6", Error: "no answer in 1 s", LinkId: "l-2"},
	}}})
	r := tb(t, d, "ping", "beta", "-c", "5")
	r.wantCode(t, 0)
	golden(t, "ping.txt", r.out)
	if got := request[*tbv1.PingRequest](t, d); got.GetNode() != "beta" || got.GetCount() != 5 {
		t.Errorf("asked for %v", got)
	}
	d.ping.Ways = d.ping.Ways[2:]
	r = tb(t, d, "ping", "beta")
	r.wantCode(t, fault.ExitNodeDown)
	if !strings.Contains(r.err, "cable thunderbolt1 10.77.3.6: no answer in 1 s") {
		t.Errorf("said\n%s", r.err)
	}
}

func TestDoctorEndsAsBadlyAsItsFindings(t *testing.T) {
	check := &tbv1.CheckResponse{}
	d := startDouble(t, &agentDouble{check: check})
	r := tb(t, d, "doctor")
	r.wantCode(t, 0)
	if r.out != "nothing to look at\n" {
		t.Errorf("printed %q", r.out)
	}
	check.Findings = deskState().Findings
	tb(t, d, "doctor").wantCode(t, 0)
	check.Findings[0].Severity = tbv1.Severity_SEVERITY_ERROR
	r = tb(t, d, "doctor", "alpha")
	r.wantCode(t, 6)
	if r.err != "" || !strings.HasPrefix(r.out, "ERROR    alpha–beta runs at 20 of 40 Gb/s (alpha) [link-below-capability]\n  means:") {
		t.Errorf("printed %q, said %q", r.out, r.err)
	}
	check.Findings[0].Fix = "Run as root:\nip link set a up\x1b[2J\nip link set b up"
	if r = tb(t, d, "doctor"); !strings.Contains(r.out, "  do:    Run as root:\n         ip link set a up\\x1b[2J\n         ip link set b up\n") {
		t.Errorf("printed %q", r.out)
	}
	check.Failures = []*tbv1.Failure{{Reason: "NODE_DOWN", What: "beta cannot be asked", ExitCode: 7}}
	tb(t, d, "doctor").wantCode(t, fault.ExitPartial)
}

func TestDownWaitsUntilTheAgentIsGone(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	r := tb(t, d, "down", "--leave")
	r.wantCode(t, 0)
	if r.out != "address 10.77.3.1/30 on thunderbolt0\nthe agent has ended\n" {
		t.Errorf("printed %q", r.out)
	}
	if got := request[*tbv1.ShutdownRequest](t, d).GetMode(); got != tbv1.ShutdownMode_SHUTDOWN_MODE_LEAVE {
		t.Errorf("asked for %v", got)
	}
	tb(t, d, "status").wantCode(t, fault.ExitNoAgent)
}

func TestDownWithoutAnAgentSaysWhatOneLeft(t *testing.T) {
	dir := shortDir(t)
	env := map[string]string{"TMPDIR": dir, "HOME": dir}
	g := &globals{in: eof{}, out: discard{}, errOut: discard{}, output: "text", run: dir, getenv: func(k string) string { return env[k] }}
	o := &downOptions{g: g, paths: agent.Paths{State: filepath.Join(dir, "state"), Config: filepath.Join(dir, "config.toml")}}
	says := func(what, why, fix string) {
		t.Helper()
		f := fault.As(runDown(t.Context(), o))
		if f == nil || f.Reason != fault.NoAgent || !strings.Contains(f.What, what) || !strings.Contains(f.Why, why) || !strings.Contains(f.Fix, fix) || strings.Contains(f.Fix, "tbcluster up") {
			t.Errorf("it ends with %+v", f)
		}
	}
	says("nothing to end", "", "")
	journal := filepath.Join(o.paths.State, "root", "changes.json")
	if err := errors.Join(os.MkdirAll(filepath.Dir(journal), 0o700), os.WriteFile(journal,
		[]byte(`{"schema":1,"boot_id":"another","changes":[{"kind":"link-up","interface":"thunderbolt0"},{"kind":"unmanage","interface":"thunderbolt1","manager":"NetworkManager"}]}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	// The other one ended with the machine.
	says("was killed has left", "thunderbolt1", "sudo tbcluster agent --root --undo")
	if os.Geteuid() != 0 {
		if err := os.Chmod(filepath.Dir(journal), 0); err != nil {
			t.Fatal(err)
		}
		says("none to end", "", "sudo tbcluster agent --root --undo")
	}
}

func TestDownThatIsRefusedNamesWhatRuns(t *testing.T) {
	d := startDouble(t, &agentDouble{fault: map[string]error{"Shutdown": fault.New(fault.StillRunning, "end the agent", errors.New("instance smol runs"), "say --stop or --leave")}})
	r := tb(t, d, "down")
	r.wantCode(t, fault.ExitPrecondition)
	if !strings.Contains(r.err, "instance smol runs") || request[*tbv1.ShutdownRequest](t, d).GetMode() != tbv1.ShutdownMode_SHUTDOWN_MODE_REFUSE {
		t.Errorf("said\n%s", r.err)
	}
	tb(t, d, "down", "--stop", "--leave").wantCode(t, fault.ExitUsage)
}

func TestModels(t *testing.T) {
	d := startDouble(t, &agentDouble{state: deskState()})
	r := tb(t, d, "models", "list", "--scan")
	r.wantCode(t, 0)
	if !strings.Contains(r.out, "smollm2  98.4 MB  gguf    Q4_1   alpha (beta)") {
		t.Errorf("printed\n%s", r.out)
	}
	request[*tbv1.ScanRequest](t, d)
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	tb(t, d, "models", "add", "sub/x.gguf").wantCode(t, 0)
	if got := request[*tbv1.AddRequest](t, d).GetPath(); got != filepath.Join(wd, "sub/x.gguf") {
		t.Errorf("added %s", got)
	}
	r = tb(t, d, "models", "rm", "smollm2")
	r.wantCode(t, fault.ExitUsage)
	if !request[*tbv1.RemoveRequest](t, d).GetValidateOnly() || !strings.Contains(r.err, "/home/ada/models/smol.gguf") {
		t.Errorf("nobody could answer, and: %s", r.err)
	}
	r = tb(t, d, "models", "rm", "smollm2", "--yes", "--node", "beta")
	r.wantCode(t, 0)
	if got := request[*tbv1.RemoveRequest](t, d); got.GetValidateOnly() || got.GetNode() != "beta" {
		t.Errorf("asked for %v", got)
	}
}

func TestLogs(t *testing.T) {
	d := startDouble(t, &agentDouble{lines: []*tbv1.LogLine{{Time: noon, Rank: 1, NodeName: "beta", Text: "load\x1b[0m done\n"}}})
	r := tb(t, d, "logs", "smol", "--rank", "1", "-f", "--since", "2026-05-04T11:00:00Z")
	r.wantCode(t, 0)
	if !strings.HasSuffix(r.out, ` 1@beta load\x1b[0m done`+"\n") {
		t.Errorf("printed %q", r.out)
	}
	got := request[*tbv1.InstanceLogsRequest](t, d)
	if got.GetInstance() != "smol" || got.GetRank() != 1 || got.Rank == nil || !got.GetFollow() || !got.GetSince().AsTime().Equal(noon.AsTime().Add(-time.Hour)) {
		t.Errorf("asked for %v", got)
	}
	tb(t, d, "logs", "--agent").wantCode(t, 0)
	if got := request[*tbv1.NodeServiceLogsRequest](t, d); got.GetFollow() || got.GetSince() != nil {
		t.Errorf("asked for %v", got)
	}
	for _, args := range [][]string{{"logs"}, {"logs", "smol", "--agent"}, {"logs", "--agent", "--rank", "0"}, {"logs", "smol", "--since", "yesterday"}} {
		tb(t, d, args...).wantCode(t, fault.ExitUsage)
	}
}

func TestSince(t *testing.T) {
	now := time.Date(2026, 5, 4, 12, 0, 0, 0, time.FixedZone("x", 3600))
	for s, want := range map[string]time.Time{
		"10m": now.Add(-10 * time.Minute), "-2h": now.Add(-2 * time.Hour), "2026-05-04T11:00:00Z": now,
		"2026-05-04 11:30:00": now.Add(-30 * time.Minute), "2026-05-04": now.Add(-12 * time.Hour),
	} {
		if got, err := parseSince(s, now); err != nil || !got.AsTime().Equal(want) {
			t.Errorf("%s is %v, %v; want %v", s, got, err, want)
		}
	}
}

func TestConfigShowIsAFileThatSaysTheSame(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(file, []byte("name = \"desk\"\nmtu = 9000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := tb(t, nil, "config", "show", "--file", file)
	r.wantCode(t, 0)
	shown, err := config.Parse("shown", []byte(r.out))
	if err != nil {
		t.Fatalf("what is shown is no configuration: %v\n%s", err, r.out)
	}
	if got := shown.Changed(); strings.Join(got, " ") != "mtu name" || shown.Name != "desk" || shown.MTU != 9000 {
		t.Errorf("shown are %v", got)
	}
	for _, k := range config.Keys {
		if !strings.Contains(r.out, k.Name+" = ") || !strings.Contains(strings.Join(strings.Fields(strings.ReplaceAll(r.out, "\n#", "")), " "), strings.Join(strings.Fields(k.Meaning), " ")) {
			t.Errorf("%s is not explained", k.Name)
		}
	}
	if err := os.WriteFile(file, []byte("name = \"desk\"\ncolour = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r = tb(t, nil, "config", "show", "--file", file)
	r.wantCode(t, fault.ExitUsage)
	if !strings.Contains(r.err, "config.toml line 2") || !strings.Contains(r.err, `"colour"`) {
		t.Errorf("said\n%s", r.err)
	}
	tb(t, nil, "config", "path", "-o", "json").wantCode(t, 0)
}

func TestTheConfigurationIsThatOfTheAgentThatIsUsed(t *testing.T) {
	run := t.TempDir()
	g := &globals{run: run, getenv: func(k string) string { return map[string]string{"HOME": "/home/ada"}[k] }}
	if got, want := configPath(g, ""), config.Path(os.Getuid(), g.getenv); got != want {
		t.Errorf("without an agent of the machine: %s, want %s", got, want)
	}
	if err := os.Mkdir(filepath.Join(run, "tbcluster"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(machineSocket(g), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := configPath(g, ""); got != "/etc/tbcluster/config.toml" {
		t.Errorf("with one that runs as root: %s", got)
	}
	for path, want := range map[string]string{
		"/home/ada/.config/tbcluster/config.toml": "~/.config/tbcluster/config.toml",
		"/home/adam/x": "/home/adam/x", "/etc/tbcluster/config.toml": "/etc/tbcluster/config.toml",
	} {
		if got := homeText(g, path); got != want {
			t.Errorf("%s is written %s, want %s", path, got, want)
		}
	}
	if got := config.Path(1000, func(string) string { return "" }); !filepath.IsAbs(got) {
		t.Errorf("without a home the path is %s", got)
	}
}

func TestEngineListSaysWhyOneIsMissing(t *testing.T) {
	s := deskState()
	s.Nodes[1].Engines = []*tbv1.Engine{{Name: "llamacpp", Reason: "not found; `tbcluster engine install llamacpp` installs it"}}
	d := startDouble(t, &agentDouble{state: s})
	r := tb(t, d, "engine")
	r.wantCode(t, 0)
	for _, w := range []string{"alpha  llamacpp  yes     b10068", "beta   llamacpp  no      -        -", "engine install llamacpp"} {
		if !strings.Contains(r.out, w) {
			t.Errorf("lacks %q:\n%s", w, r.out)
		}
	}
	tb(t, d, "engine", "install", "vllm").wantCode(t, fault.ExitUsage)
}

// unpack returns the files of a report by their base names.
func unpack(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for a := tar.NewReader(zip); ; {
		h, err := a.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(a)
		if err != nil {
			t.Fatal(err)
		}
		files[filepath.Base(h.Name)] = string(b)
	}
}

func TestBugreportHoldsNoSecrets(t *testing.T) {
	secret := []string{"ada", "MC4CAQAwBQYDK2VwBCIEIH", "Why do cats purr", "hf_abcdefghijklmnopqrst", "hunter22", "7-ABCD-EFGH"}
	s := deskState()
	s.Instances[0].Ranks[1].LastLines = []string{`request: {"messages":[{"role":"user","content":"Why do cats purr"}]}`}
	d := startDouble(t, &agentDouble{state: s, check: &tbv1.CheckResponse{Findings: s.Findings}, lines: []*tbv1.LogLine{
		{Time: noon, NodeName: "alpha", Text: "user ada (uid 1000) asked for /home/ada/models/x.gguf"},
		{Time: noon, NodeName: "alpha", Text: "-----BEGIN PRIVATE KEY----- MC4CAQAwBQYDK2VwBCIEIH -----END PRIVATE KEY-----"},
		{Time: noon, NodeName: "alpha", Text: `formatted prompt: <|im_start|>user Why do cats purr`},
		{Time: noon, NodeName: "alpha", Text: "token=hf_abcdefghijklmnopqrst password: hunter22 code 7-ABCD-EFGH"},
		{Time: noon, NodeName: "alpha", Text: "prompt eval time = 12 ms"},
	}})
	file := filepath.Join(t.TempDir(), "report.tar.gz")
	r := tb(t, d, "bugreport", "--file", file)
	r.wantCode(t, 0)
	files := unpack(t, file)
	listed := strings.Index(r.out, "written:")
	for _, want := range []string{"version.txt", "status.json", "doctor.json", "agent.log", "instance-smol.log", "changes.txt", "config.toml"} {
		if _, ok := files[want]; !ok {
			t.Errorf("%s is not in the archive, which holds %d files", want, len(files))
		}
		if at := strings.Index(r.out, want); at < 0 || at > listed {
			t.Errorf("%s was not listed before it was written:\n%s", want, r.out)
		}
	}
	for name, text := range files {
		for _, s := range secret {
			if strings.Contains(text, s) {
				t.Errorf("%s holds %q:\n%s", name, s, text)
			}
		}
	}
	if !strings.Contains(files["agent.log"], "prompt eval time = 12 ms") || !strings.Contains(files["agent.log"], "/home/USER") {
		t.Errorf("too much is gone from the log:\n%s", files["agent.log"])
	}
	var doc stateJSON
	if err := json.Unmarshal([]byte(files["status.json"]), &doc); err != nil || len(doc.Nodes) != 2 {
		t.Errorf("the state is no state any more: %v", err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the archive can be read by others: %v, %v", info, err)
	}
	tb(t, d, "bugreport", "--file", file).wantCode(t, fault.ExitFileIO) // it is never written over
}

func TestBugreportWithoutAnAgentSaysSo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "report.tar.gz")
	r := tb(t, nil, "bugreport", "--file", file, "--socket", "/nonexistent/agent.sock", "-o", "json")
	r.wantCode(t, 0)
	if files := unpack(t, file); !strings.Contains(files["problems.txt"], "no agent answers") {
		t.Errorf("problems.txt is %q", files["problems.txt"])
	}
	var doc bugreportJSON
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil || doc.File != file || len(doc.Parts) < 3 {
		t.Errorf("%v in %s", err, r.out)
	}
}

func TestTableAlignsNumbers(t *testing.T) {
	table := newTable("NAME", "SIZE>", "LAST")
	table.add("é", "1", "x")
	table.add("long", "1000", "")
	var b bytes.Buffer
	table.write(&b)
	if want := "NAME  SIZE  LAST\né        1  x\nlong  1000\n"; b.String() != want {
		t.Errorf("printed\n%q, want\n%q", b.String(), want)
	}
}

func TestNumbersForPeople(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 999: "999 B", 1000: "1.00 kB", 999_499: "999 kB", 999_500: "1.00 MB", 98_362_432: "98.4 MB", 1 << 63: "9.22 EB"} {
		if got := bytesText(n); got != want {
			t.Errorf("%d bytes are %q, want %q", n, got, want)
		}
	}
	for n, want := range map[uint64]string{8 << 30: "8.0 GiB", 128 << 30: "128 GiB", 512 << 20: "512 MiB"} {
		if got := memoryText(n); got != want {
			t.Errorf("%d bytes of memory are %q, want %q", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{41 * time.Second: "0:41", 61 * time.Minute: "1:01:00", 0: "0:00"} {
		if got := clockText(d); got != want {
			t.Errorf("%s is %q, want %q", d, got, want)
		}
	}
}

func TestEveryKeyIsInTheDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range config.Keys {
		if row := fmt.Sprintf("| `%s` | %s | `%s` | %s |\n", k.Name, k.Kind, k.Default, k.Meaning); !strings.Contains(string(doc), row) {
			t.Errorf("docs/config.md lacks the row\n%s", row)
		}
	}
}

func TestEveryExitCodeIsInTheDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/exit-codes.md")
	if err != nil {
		t.Fatal(err)
	}
	for reason, row := range fault.Table {
		if !strings.Contains(string(doc), fmt.Sprintf("\n| %d | ", row.Exit)) {
			t.Errorf("docs/exit-codes.md lacks %d (%s)", row.Exit, reason)
		}
	}
}
