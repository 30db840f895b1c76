package root

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"

	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/proc"
	"tbcluster/host/sock"
)

// TestMain is also the program that the tests start as worker and as rank.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "worker": // answers one byte with its identity, ends with its stream
			f := os.NewFile(3, "control")
			b := make([]byte, 1)
			if _, err := io.ReadFull(f, b); err != nil {
				os.Exit(1)
			}
			wd, _ := os.Getwd()
			if err := json.NewEncoder(f).Encode(map[string]any{"uid": os.Getuid(), "gid": os.Getgid(), "home": os.Getenv("HOME"), "wd": wd, "env": os.Environ()}); err != nil {
				os.Exit(1)
			}
			_, _ = io.Copy(io.Discard, f)
			os.Exit(0)
		case "journal":
			os.Exit(journalVictim(os.Args[2], os.Args[3]))
		case "rank": // as the real one, it begins once its input has ended
			if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
				os.Exit(1)
			}
			if err := os.WriteFile(filepath.Join(os.Args[2], "ran"), nil, 0o644); err != nil {
				os.Exit(1)
			}
			time.Sleep(time.Hour)
		}
	}
	os.Exit(m.Run())
}

// machine is a host whose network is data: what is tested here is what may be
// asked of it and what is remembered.
type machine struct {
	mu   sync.Mutex
	boot string
	net  host.Network
	done []string
	fail error
	// lacks is what is missing of the packet filter.
	lacks string
}

func newMachine() *machine {
	return &machine{boot: "boot-1", net: host.Network{Interfaces: []host.Interface{
		{Name: "lo", Loopback: true, Up: true, MTU: 65536}, {Name: "eth0", Up: true, MTU: 1500, Addresses: []netip.Prefix{netip.MustParsePrefix("10.77.9.5/24")}},
		{Name: "thunderbolt0", Cable: true, MTU: 1500}}}}
}

func (m *machine) Machine(context.Context) (host.Machine, error) {
	return host.Machine{BootID: m.boot}, nil
}
func (m *machine) Thunderbolt(context.Context) (host.Thunderbolt, error) {
	return host.Thunderbolt{}, nil
}
func (m *machine) Network(context.Context) (host.Network, error) { return m.net, nil }
func (m *machine) Diagnose(context.Context, host.Query) (host.Diagnosis, error) {
	return host.Diagnosis{}, nil
}
func (m *machine) Firewalls(context.Context) ([]host.Firewall, error) {
	return []host.Firewall{{Tool: "nft", Name: "chain input of table inet filter"}}, nil
}
func (m *machine) Watch(context.Context) <-chan struct{} { return nil }
func (m *machine) Commands(host.Change) []string         { return nil }
func (m *machine) Lacks(_ context.Context, c host.Change) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done = append(m.done, "look at "+c.String())
	return m.lacks, nil
}
func (m *machine) Apply(_ context.Context, c host.Change) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	m.done = append(m.done, "apply "+c.String())
	return nil
}
func (m *machine) Revert(_ context.Context, c host.Change) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done = append(m.done, "revert "+c.String())
	return nil
}

// users are known by tables.
type users map[uint32]User

func (u users) ByUID(_ context.Context, uid uint32) (User, error) {
	if x, ok := u[uid]; ok {
		return x, nil
	}
	return User{}, errors.New("no such user")
}

func (u users) ByName(_ context.Context, name string) (User, error) {
	for _, x := range u {
		if x.Name == name {
			return x, nil
		}
	}
	return User{}, errors.New("no such user")
}

func uid(f *os.File) (uint32, error) {
	c, err := sock.FileCred(f)
	return c.UID, err
}

type fixture struct {
	*Client
	machine *machine
	server  *Server
	dir     string
	users   users
}

// serve starts a server and connects to it over a real socketpair.
func serve(t *testing.T, dir string, m *machine) fixture {
	t.Helper()
	return serveIn(t, dir, "", m)
}

// serveIn is serve with the sockets in run.
func serveIn(t *testing.T, dir, run string, m *machine) fixture {
	t.Helper()
	self := uint32(os.Geteuid())
	us := users{
		self: {UID: self, GID: uint32(os.Getegid()), Name: "me", Home: t.TempDir()},
		1234: {UID: 1234, GID: 1234, Groups: []uint32{1234}, Name: "ada", Home: "/"},
		1235: {UID: 1235, GID: 1235, Groups: []uint32{1235}, Name: "bob", Home: "/"},
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewServer(t.Context(), Options{Host: m, StateDir: dir, RunDir: run, Program: exe, Resolve: us, PeerUID: uid, AgentGID: os.Getegid(), Blocks: []netip.Prefix{block},
		Engines: []string{filepath.Base(exe)}, EngineEnv: []string{"GGML_QUIET"}, RootWorks: true, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs, err := sock.Pair()
	if err != nil {
		t.Fatal(err)
	}
	agent, err := sock.FromFile(theirs)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := s.Serve(context.Background(), ours); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		if err := errors.Join(agent.Close()); err != nil {
			t.Error(err)
		}
		<-done
		_ = ours.Close()
	})
	return fixture{Connect(agent), m, s, dir, us}
}

// client is a Unix socket whose other end is this process.
func client(t *testing.T) *os.File {
	t.Helper()
	a, b, err := socketpair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	return a
}

var block = netip.MustParsePrefix("10.77.0.0/16")

var cableAddress = host.Change{Kind: host.ChangeAddress, Interface: "thunderbolt0", Prefix: netip.MustParsePrefix("10.77.0.1/30")}

func TestOnlyCablesAndPrivateAddressesAreChanged(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	p := netip.MustParsePrefix
	for _, c := range []host.Change{
		{Kind: host.ChangeAddress, Interface: "eth0", Prefix: p("10.77.0.1/30")},
		{Kind: host.ChangeAddress, Interface: "thunderbolt0", Prefix: p("8.8.8.8/30")},
		{Kind: host.ChangeAddress, Interface: "thunderbolt0", Prefix: p("10.0.0.1/8")},
		{Kind: host.ChangeAddress, Interface: "lo", Prefix: p("10.77.0.1/24")},
		{Kind: host.ChangeRoute, Interface: "thunderbolt0", Prefix: p("0.0.0.0/0")},
		{Kind: host.ChangeRoute, Interface: "eth0", Prefix: p("10.77.0.1/32")},
		{Kind: host.ChangeMTU, Interface: "eth0", MTU: 9000},
		{Kind: host.ChangeMTU, Interface: "thunderbolt0", MTU: 68},
		{Kind: host.ChangeLinkUp, Interface: "eth0"},
		{Kind: host.ChangeUnmanage, Interface: "eth0", Manager: "NetworkManager"},
		{Kind: host.ChangeFilter, Addresses: []netip.Addr{netip.MustParseAddr("8.8.8.8")}},
		{Kind: host.ChangeAddress, Interface: "thunderbolt0", Prefix: p("192.168.1.1/30")}, // not of the block
		{Kind: host.ChangeAddress, Interface: "thunderbolt0", Prefix: p("10.77.9.1/30")},   // draws what is the LAN's
		{Kind: host.ChangeAddress, Interface: "lo", Prefix: p("10.77.9.1/32")},
		{Kind: host.ChangeRoute, Interface: "thunderbolt0", Prefix: p("10.77.9.1/32")},
		{Kind: host.ChangeFilter, Addresses: []netip.Addr{netip.MustParseAddr("10.77.9.5")}}, // cuts the machine off
		{Kind: host.ChangeFilter, Addresses: []netip.Addr{netip.MustParseAddr("192.168.1.5")}},
		{Kind: host.ChangeFilter, Addresses: []netip.Addr{netip.MustParseAddr("10.77.0.1")}, Interfaces: []string{"eth0"}},
		{Kind: "shell", Interface: "thunderbolt0"},
	} {
		if err := f.Apply(t.Context(), c); !fault.Is(err, fault.Denied) {
			t.Errorf("%s: %v, want it denied", c, err)
		}
	}
	if err := f.Apply(t.Context(), host.Change{Kind: host.ChangeLinkUp, Interface: "thunderbolt9"}); !errors.Is(err, host.ErrNoInterface) {
		t.Errorf("no such interface: %v", err)
	}
	if len(f.machine.done) != 0 {
		t.Fatalf("done all the same: %v", f.machine.done)
	}
	if err := f.Apply(t.Context(), cableAddress); err != nil {
		t.Fatal(err)
	}
}

func TestTheRootHalfTellsOfFirewalls(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	walls, err := f.Firewalls(t.Context())
	if err != nil || len(walls) != 1 || walls[0].Name != "chain input of table inet filter" {
		t.Errorf("got %v, %v", walls, err)
	}
}

func TestChangesAreRememberedOverRestartAndForgottenByReboot(t *testing.T) {
	dir, m := t.TempDir(), newMachine()
	f := serve(t, dir, m)
	up := host.Change{Kind: host.ChangeLinkUp, Interface: "thunderbolt0"}
	for _, c := range []host.Change{up, cableAddress} {
		if err := f.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	m.net.Interfaces[2].Up = true
	if err := f.Apply(t.Context(), up); err != nil { // again, now that it is up
		t.Fatal(err)
	}
	again := serve(t, dir, m)
	got, err := again.Applied(t.Context())
	if err != nil || len(got) != 2 || got[0].WasUp {
		t.Fatalf("after a restart: %v, %v; what was down before us stays so", got, err)
	}
	if err := again.Revert(t.Context(), host.Change{Kind: host.ChangeAddress, Interface: "thunderbolt0", Prefix: netip.MustParsePrefix("10.99.0.1/30")}); err != nil {
		t.Fatal(err)
	}
	if err := again.Revert(t.Context(), cableAddress); err != nil {
		t.Fatal(err)
	}
	if n := len(m.done); m.done[n-1] != "revert "+cableAddress.String() || slices.ContainsFunc(m.done, func(s string) bool { return strings.Contains(s, "10.99") }) {
		t.Fatalf("%v: what we did not make is not ours to undo", m.done)
	}
	m.boot = "boot-2"
	if got, err := serve(t, dir, m).Applied(t.Context()); err != nil || len(got) != 0 {
		t.Fatalf("after a reboot: %v, %v", got, err)
	}
}

// The agent asks for the filter that it wants; what is looked at is the one that
// was set.
func TestTheFilterThatWasSetIsLookedAt(t *testing.T) {
	m := newMachine()
	f := serve(t, t.TempDir(), m)
	filter := host.Change{Kind: host.ChangeFilter, Addresses: []netip.Addr{cableAddress.Prefix.Addr()}, Interfaces: []string{"thunderbolt0"}}
	if lacks, err := f.Lacks(t.Context(), filter); err != nil || lacks == "" {
		t.Errorf("before it was set: %q, %v", lacks, err)
	}
	if err := f.Apply(t.Context(), filter); err != nil {
		t.Fatal(err)
	}
	if lacks, err := f.Lacks(t.Context(), host.Change{Kind: host.ChangeFilter}); err != nil || lacks != "" {
		t.Errorf("while it is there: %q, %v", lacks, err)
	}
	if got := m.done[len(m.done)-1]; got != "look at "+filter.String() {
		t.Errorf("it did %q", got)
	}
	m.lacks = "the table is not there"
	if lacks, err := f.Lacks(t.Context(), filter); err != nil || lacks != m.lacks {
		t.Errorf("once it is gone: %q, %v", lacks, err)
	}
	if got, err := f.Applied(t.Context()); err != nil || len(got) != 1 {
		t.Errorf("the journal still has it: %v, %v", got, err)
	}
}

// A root half of a version before knows nothing of looking and answers with its
// journal.
func TestAnOldRootHalfDoesNotLook(t *testing.T) {
	filter := host.Change{Kind: host.ChangeFilter, Addresses: []netip.Addr{cableAddress.Prefix.Addr()}}
	old := &Client{call: func(_ context.Context, q Request, _ *os.File) (Response, *os.File, error) {
		return Response{ID: q.ID, Changes: []host.Change{cableAddress, filter}}, nil, nil
	}}
	if lacks, err := old.Lacks(t.Context(), filter); err != nil || lacks != "" {
		t.Errorf("%q, %v", lacks, err)
	}
}

func TestAChangeThatFailsLeavesTheJournal(t *testing.T) {
	dir, m := t.TempDir(), newMachine()
	f := serve(t, dir, m)
	m.fail = host.ErrPermission
	if err := f.Apply(t.Context(), cableAddress); !errors.Is(err, host.ErrPermission) {
		t.Fatal(err)
	}
	if got, err := f.Applied(t.Context()); err != nil || len(got) != 0 {
		t.Fatal(got, err)
	}
}

func TestAWorkerIsTheUserOfTheSocket(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	conn, u, err := f.Worker(t.Context(), host.Asker{UID: 4242, Name: "liar", Socket: client(t)}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if u.Name != "me" {
		t.Errorf("user %s", u.Name)
	}
	if _, err := conn.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	var got struct {
		UID      int
		Home, WD string
		Env      []string
	}
	if err := json.NewDecoder(conn).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.UID != os.Getuid() || got.Home != u.Home || got.WD != u.Home {
		t.Errorf("%+v", got)
	}
}

func TestARemotePersonIsWhoTheMappingSays(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	bob := host.Asker{Node: "NODE", UID: 7, Name: "bob"}
	if _, _, err := f.Who(t.Context(), bob, true); !fault.Is(err, fault.UserUnmapped) {
		t.Fatalf("before any mapping: %v", err)
	}
	me := host.Asker{Socket: client(t)}
	if _, err := f.Map(t.Context(), bob, "NODE", "bob", "me"); !fault.Is(err, fault.UserUnmapped) && !fault.Is(err, fault.Denied) {
		t.Fatalf("a remote person mapped himself: %v", err)
	}
	if err := f.MapDefault(t.Context(), me, "me"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.Who(t.Context(), bob, false); !fault.Is(err, fault.UserUnmapped) {
		t.Fatalf("the default is for who paired there alone: %v", err)
	}
	if u, _, err := f.Who(t.Context(), bob, true); err != nil || u.Name != "me" {
		t.Fatal(u, err)
	}
	if _, err := f.Map(t.Context(), me, "NODE", "eve", "nobody-here"); !fault.Is(err, fault.Usage) {
		t.Fatalf("a user that does not exist: %v", err)
	}
	if list, err := f.Map(t.Context(), me, "NODE", "eve", "me"); err != nil || len(list) != 2 {
		t.Fatal(list, err)
	}
	if u, _, err := f.Who(t.Context(), host.Asker{Node: "NODE", Name: "eve"}, false); err != nil || u.Name != "me" {
		t.Fatal(u, err)
	}
	if _, _, err := f.Who(t.Context(), host.Asker{Node: "OTHER", Name: "eve"}, false); !fault.Is(err, fault.UserUnmapped) {
		t.Fatalf("another node's eve: %v", err)
	}
	if list, err := f.Map(t.Context(), me, "NODE", "eve", ""); err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
}

func program(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

func TestARankOutlivesTheServerAndIsEndedByTheNext(t *testing.T) {
	dir, m := t.TempDir(), newMachine()
	f := serve(t, dir, m)
	me := host.Asker{Socket: client(t)}
	proc1 := map[string]any{"program": program(t), "args": []string{}, "instance_id": "smol-1", "index": 0}
	d, err := f.StartRank(t.Context(), me, false, "smol-1", 0, proc1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(d, "rank.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := f.StartRank(t.Context(), me, false, "smol-1", 0, proc1); !fault.Is(err, fault.StillRunning) {
		t.Errorf("twice: %v", err)
	}
	again := serve(t, dir, m)
	list, err := again.Ranks(t.Context())
	if err != nil || len(list) != 1 || !list[0].Alive || list[0].User != "me" {
		t.Fatal(list, err)
	}
	id, err := proc.Of(list[0].PID)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.CleanRank(t.Context(), "smol-1", 0); !fault.Is(err, fault.StillRunning) {
		t.Errorf("cleaned while it runs: %v", err)
	}
	h, err := proc.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.EndRank(t.Context(), "smol-1", 0, true); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := again.CleanRank(t.Context(), "smol-1", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(d)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
	if err := again.EndRank(t.Context(), "smol-1", 0, true); err != nil {
		t.Errorf("ending what is gone: %v", err)
	}
}

func TestProgramsOfOthersAreNotRun(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	me := host.Asker{Socket: client(t)}
	open := filepath.Join(t.TempDir(), filepath.Base(program(t)))
	if err := os.WriteFile(open, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	bad := map[string]string{
		"relative":             `{"program": "engine"}`,
		"everybody can write":  `{"program": "` + open + `"}`,
		"a directory":          `{"program": "` + t.TempDir() + `"}`,
		"the loader's doing":   `{"program": "` + program(t) + `", "env": {"LD_PRELOAD": "/tmp/x.so"}}`,
		"the loader's path":    `{"program": "` + program(t) + `", "env": {"LD_LIBRARY_PATH": "/tmp"}}`,
		"the loader's, on mac": `{"program": "` + program(t) + `", "env": {"DYLD_INSERT_LIBRARIES": "x"}}`,
	}
	if f.server.people.canBeAny {
		link := filepath.Join(t.TempDir(), filepath.Base(program(t)))
		if err := os.Symlink("/bin/sh", link); err != nil {
			t.Fatal(err)
		}
		bad["no engine"] = `{"program": "/bin/sh"}`
		bad["no engine, by the name of one"] = `{"program": "` + link + `"}`
		bad["code of the engine's choice"] = `{"program": "` + program(t) + `", "env": {"GGML_BACKEND_PATH": "/tmp/x.so"}}`
		// What is checked is what the shim reads, however often it is said.
		bad["twice"] = `{"program": "` + program(t) + `", "program": "/bin/sh"}`
		bad["twice, written otherwise"] = `{"program": "` + program(t) + `", "PROGRAM": "/bin/sh"}`
		bad["an environment in two parts"] = `{"program": "` + program(t) + `", "env": {"LD_PRELOAD": "x"}, "env": {}}`
	}
	for why, p := range bad {
		if _, err := f.StartRank(t.Context(), me, false, "x", 0, json.RawMessage(p)); !fault.Is(err, fault.Denied) {
			t.Errorf("%s: %v", why, err)
		}
	}
	if _, err := f.StartRank(t.Context(), me, false, "x", 0, map[string]any{"program": "/no/such/engine"}); !fault.Is(err, fault.EngineMissing) {
		t.Error(err)
	}
	for _, id := range []string{"../x", "", "A", "x/y"} {
		if _, err := f.StartRank(t.Context(), me, false, id, 0, map[string]any{"program": program(t)}); !fault.Is(err, fault.Protocol) {
			t.Errorf("instance %q: %v", id, err)
		}
	}
}

// An agent cannot take all of the machine's processes.
func TestWorkersAreBounded(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	me := host.Asker{Socket: client(t)}
	f.server.workers.Store(maxWorkers - 1)
	c, _, err := f.Worker(t.Context(), me, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.Worker(t.Context(), me, false); !fault.Is(err, fault.Denied) {
		t.Errorf("one too many: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	for late := time.Now().Add(time.Minute); f.server.workers.Load() != maxWorkers-1; time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatal("a worker that has ended still counts")
		}
	}
	if c, _, err = f.Worker(t.Context(), me, false); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// What the shim reads is what was checked: one program, by its real path.
func TestARankIsWhatWasChecked(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "engine")
	if err := os.Symlink(program(t), link); err != nil {
		t.Fatal(err)
	}
	e := engines{names: []string{filepath.Base(program(t))}, env: []string{"A"}, strict: true}
	me := User{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	out, err := e.check(json.RawMessage(`{"program":"/x","Program":"`+link+`","args":["-x"],"ENV":{"A":"1"}}`), me)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"args":["-x"],"env":{"A":"1"},"program":"` + program(t) + `"}`; string(out) != want {
		t.Errorf("got %s, want %s", out, want)
	}
}

// Whoever holds root's connection gets no process of root's for it.
func TestNothingRunsAsRootUnlessRootSaysSo(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	if !f.server.people.canBeAny {
		t.Skip("this process can be nobody but itself")
	}
	f.server.opt.RootWorks = false
	me := host.Asker{Socket: client(t)}
	if _, _, err := f.Worker(t.Context(), me, false); !fault.Is(err, fault.Denied) || !strings.Contains(fault.As(err).Fix, "root_work") {
		t.Errorf("a worker: %v", err)
	}
	if _, err := f.StartRank(t.Context(), me, false, "x", 0, map[string]any{"program": program(t)}); !fault.Is(err, fault.Denied) {
		t.Errorf("a rank: %v", err)
	}
	if u, owner, err := f.Who(t.Context(), me, false); err != nil || u.UID != 0 || !owner {
		t.Errorf("root is %+v, %v, %v", u, owner, err)
	}
}

func TestNobodyIsRefused(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	if !f.server.people.canBeAny {
		t.Log("this process can be nobody else, so whoever asks it is itself")
		return
	}
	if _, _, err := f.Worker(t.Context(), host.Asker{UID: 0, Name: "root"}, false); !fault.Is(err, fault.Denied) {
		t.Fatal(err)
	}
}

func TestAnAgentThatIsGoneEndsServe(t *testing.T) {
	m := newMachine()
	f := serve(t, t.TempDir(), m)
	if err := f.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func FuzzRequests(f *testing.F) {
	dir := f.TempDir()
	s, err := NewServer(f.Context(), Options{Host: newMachine(), StateDir: dir, Program: "/nonexistent", Resolve: users{}, PeerUID: uid, Blocks: []netip.Prefix{block}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(`{"kind":"apply","change":{"kind":"address","interface":"thunderbolt0","prefix":"10.0.0.1/30"}}`))
	f.Add([]byte(`{"kind":"applied","change":{"kind":"filter"}}`))
	f.Add([]byte(`{"kind":"rank-start","again":true,"instance":"x","process":{}}`))
	f.Add([]byte(`{"kind":"map","default":true}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var q Request
		if json.Unmarshal(in, &q) != nil {
			return
		}
		_, fd := s.Handle(t.Context(), q, nil)
		if fd != nil {
			t.Fatal("a descriptor came of a request that names nobody")
		}
	})
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, '{', '}'})
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, in []byte) {
		ours, theirs, err := sock.Pair()
		if err != nil {
			t.Fatal(err)
		}
		other, err := sock.FromFile(theirs)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = other.Write(in)
			_ = other.Close()
		}()
		for {
			var q Request
			fd, err := receive(ours, &q)
			if fd != nil {
				t.Fatal("a descriptor came from nowhere")
			}
			if err != nil {
				break
			}
		}
		_ = ours.Close()
	})
}
