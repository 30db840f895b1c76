package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/rig"
)

// Tests of the program on the real driver: it finds cables in the real sysfs,
// addresses real interfaces, and does as in the lab. Each boots what its
// subtests use one after the other; each of those finds all cables as the
// topology has them, all agents running, and nothing else.

// program builds the program as people get it.
func program(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tbcluster")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", file, "tbcluster/cmd/tbcluster")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the program: %v\n%s", err, out)
	}
	return file
}

const patience = 4 * time.Minute

// desk is what a test has before it.
type desk struct {
	*rig.Rig
	c *Cluster
}

// boot brings up hosts with the program, which does not run yet. They have an
// Ethernet, whose cable is out.
func boot(t *testing.T, topology rig.Topology) *desk {
	t.Helper()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	topology.LAN = true
	begun := time.Now()
	r := rig.StartWith(t, topology, rig.Options{Files: Files(program(t))})
	c := New(r)
	c.Report = func(line string) { t.Log(line) }
	t.Cleanup(func() {
		if t.Failed() {
			for _, h := range r.Hosts() {
				t.Logf("the end of the agent's log of host %s:\n%s", h.Name(), tail(t, c.Log(h)))
			}
		}
		c.Close()
	})
	d := &desk{r, c}
	d.lan(t, false)
	t.Logf("hosts run after %.1f s", time.Since(begun).Seconds())
	return d
}

func tail(t *testing.T, file string) string {
	out, err := exec.Command("tail", "-n", "60", file).CombinedOutput()
	if err != nil {
		t.Logf("%s: %v", file, err)
	}
	return string(out)
}

// step is a subtest.
type step struct {
	name string
	run  func(*testing.T, *desk)
	// long is one that only TBCLUSTER_LONG=1 runs: it takes a minute on a busy
	// machine.
	long bool
}

// steps runs subtests until one fails: what it left is not what the next expects.
func (d *desk) steps(t *testing.T, steps ...step) {
	for _, s := range steps {
		if s.long && os.Getenv("TBCLUSTER_LONG") == "" {
			continue
		}
		begun := time.Now()
		if !t.Run(s.name, func(t *testing.T) {
			s.run(t, d)
			if err := d.Verify(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		}) {
			return
		}
		t.Logf("%5.1f s  %s", time.Since(begun).Seconds(), s.name)
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// sh runs a script on a host and fails the test where that fails.
func sh(t *testing.T, h *rig.Host, script string) string {
	t.Helper()
	out, err := h.Sh(within(t), script)
	if err != nil {
		t.Fatalf("host %s: %v\n%s", h.Name(), err, out)
	}
	return strings.TrimSpace(out)
}

// lan puts the cable of the Ethernet into hosts, or pulls it; without hosts, of
// all.
func (d *desk) lan(t *testing.T, in bool, hosts ...*rig.Host) {
	t.Helper()
	if len(hosts) == 0 {
		hosts = d.Hosts()
	}
	for _, h := range hosts {
		script := "ip addr flush dev eth0; ip link set eth0 down"
		if in {
			script = fmt.Sprintf("ip link set eth0 up; ip addr replace %s/24 dev eth0", h.LANAddress())
		}
		sh(t, h, script)
	}
}

// until waits for a state of the cluster, as every host sees it that runs.
func (d *desk) until(t *testing.T, what string, fits func(Status) bool) {
	t.Helper()
	ctx := within(t)
	var all sync.WaitGroup
	for _, h := range d.Hosts() {
		if !h.On() {
			continue
		}
		all.Go(func() {
			if _, err := d.c.Wait(ctx, h, what, fits); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// proven waits until all hosts see all up, and so many cables proven of as many
// that they know of.
func (d *desk) proven(t *testing.T, cables int) {
	t.Helper()
	d.Settled(t)
	d.until(t, fmt.Sprintf("wait until %d cables are proven", cables), func(s Status) bool {
		return s.Up() == len(d.Hosts()) && s.Proven() == cables
	})
}

// status is the state as a host sees it.
func (d *desk) status(t *testing.T, h *rig.Host) Status {
	t.Helper()
	s, err := d.c.Status(within(t), h)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// end is the end of a cable at a host; it is empty if that is not known.
func (l Link) end(host string) LinkEnd {
	for _, e := range []*LinkEnd{l.A, l.B} {
		if e != nil && e.Node == host {
			return *e
		}
	}
	return LinkEnd{}
}

// ends compares the ends of all proven cables with what their hosts show.
func (d *desk) ends(t *testing.T, s Status) {
	t.Helper()
	for _, l := range s.Links {
		if l.State != "proven" {
			continue
		}
		if l.A == nil || l.B == nil {
			t.Fatalf("a proven cable has one end: %s", s)
		}
		for _, e := range []*LinkEnd{l.A, l.B} {
			h := d.Host(e.Node)
			n := h.State().Peer(e.Port).Interface()
			if n == nil || e.Interface != n.Name {
				t.Errorf("host %s: end %+v, and it shows\n%s", h.Name(), e, h.State())
				continue
			}
			if out := sh(t, h, "ip -o -4 addr show dev "+e.Interface); !strings.Contains(out, " "+e.Address+" ") {
				t.Errorf("host %s has not the address %s: %s", h.Name(), e.Address, out)
			}
		}
	}
}

// link is the one cable that is proven. Others that it lists were pulled.
func (s Status) link(t *testing.T) (found Link) {
	t.Helper()
	for _, l := range s.Links {
		if l.State == "proven" {
			found = l
		}
	}
	if s.Proven() != 1 || found.A == nil || found.B == nil {
		t.Fatalf("one cable is plugged; it says %s", s)
	}
	return found
}

// overCables waits until no host reaches another by anything but a cable.
func (d *desk) overCables(t *testing.T) {
	t.Helper()
	d.until(t, "wait until all reach each other over cables", func(s Status) bool {
		return !slices.ContainsFunc(s.Nodes, func(n Node) bool { return !n.Self && !strings.Contains(n.ControlPath, "thunderbolt") })
	})
}

// sent is what went over all cables, bytes.
func (d *desk) sent() (n uint64) {
	for _, c := range d.Cables() {
		x := c.Counters()
		n += x.AtoB.SentBytes + x.BtoA.SentBytes
	}
	return n
}

// copies sends a file from one host to another, and looks that it went over the
// cables. meanwhile, if not nil, is called when a part of it is there.
func (d *desk) copies(t *testing.T, from, to *rig.Host, size int, meanwhile func()) {
	t.Helper()
	ctx := within(t)
	before := d.sent()
	name := fmt.Sprintf("/tmp/from-%s-%d", from.Name(), size)
	want := sh(t, from, fmt.Sprintf("head -c %d /dev/urandom >%s; sha256sum <%s", size, name, name))
	done := make(chan error, 1)
	go func() {
		out, err := from.Run(ctx, Path, "cp", name, to.Name()+":"+name)
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
		done <- err
	}()
	if meanwhile != nil {
		if err := d.Await(ctx, "wait until bytes are on their way", func() string {
			if n := d.sent() - before; n < uint64(size)/8 {
				return fmt.Sprintf("%d bytes", n)
			}
			return ""
		}); err != nil {
			t.Fatal(err)
		}
		meanwhile()
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := sh(t, to, "sha256sum <"+name); got != want {
		t.Errorf("host %s has %s, host %s has sent %s", to.Name(), got, from.Name(), want)
	}
	if n := d.sent() - before; n < uint64(size) {
		t.Errorf("%d bytes went over the cables of %d that were copied", n, size)
	}
	sh(t, from, "rm "+name)
	sh(t, to, "rm "+name)
}

// stays watches the cluster, as a host sees it, and fails the test when it is
// not as it was to stay; it returns what ends the watch.
func (d *desk) stays(t *testing.T, h *rig.Host, what string, fits func(Status) bool) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(within(t))
	done := make(chan struct{})
	begun := make(chan struct{})
	var once sync.Once
	go func() {
		defer close(done)
		s, err := d.c.Wait(ctx, h, what, func(s Status) bool {
			once.Do(func() { close(begun) })
			return !fits(s)
		})
		switch {
		case err == nil:
			t.Errorf("host %s: %s, but it says %s", h.Name(), what, s)
		case ctx.Err() == nil:
			t.Error(err)
		}
		once.Do(func() { close(begun) })
	}()
	<-begun
	return func() {
		cancel()
		<-done
	}
}

// doctor is what `tbcluster doctor` finds, as a host says it, less what is so in
// every guest.
func (d *desk) doctor(t *testing.T, h *rig.Host) (found []Finding) {
	t.Helper()
	out, err := h.Run(within(t), Path, "doctor", "-o", "json")
	var said struct {
		Findings []Finding
		Failures []json.RawMessage
	}
	if jerr := json.Unmarshal([]byte(out), &said); jerr != nil {
		t.Fatalf("host %s: %v, %v\n%s", h.Name(), err, jerr, out)
	}
	if len(said.Failures) > 0 {
		t.Errorf("host %s: checks failed: %s", h.Name(), said.Failures)
	}
	for _, f := range said.Findings {
		if inGuests[f.Code] == "" {
			found = append(found, f)
		}
	}
	return found
}

// inGuests are findings that are right for every guest, with the reason.
var inGuests = map[string]string{
	"engine-missing": "no engine is installed in a guest",
}

// agent ends and starts the agents of all hosts, with what is done between.
func (d *desk) restart(t *testing.T, between func(h *rig.Host)) {
	t.Helper()
	for _, h := range d.Hosts() {
		if err := d.c.Stop(h); err != nil {
			t.Fatal(err)
		}
		between(h)
	}
	for _, h := range d.Hosts() {
		d.begin(t, h)
	}
}

// begin starts the agent of a host.
func (d *desk) begin(t *testing.T, h *rig.Host) {
	t.Helper()
	if err := d.c.Start(within(t), h); err != nil {
		t.Fatal(err)
	}
}

// up starts all agents, pairs, and waits until all plugged cables are proven.
func (d *desk) up(t *testing.T) {
	t.Helper()
	if err := d.c.Up(within(t)); err != nil {
		t.Fatal(err)
	}
}

// TestTwoHosts is two hosts with three ports each, of which two pairs have a
// cable; one of those is out. Host b has a disk.
func TestTwoHosts(t *testing.T) {
	d := boot(t, rig.Topology{
		Hosts: []rig.HostSpec{{Ports: 3}, {Ports: 3, Disk: 64}},
		Cables: []rig.CableSpec{
			{A: "a.0", B: "b.0"},
			{A: "a.1", B: "b.2", Options: unplugged},
		},
	})
	sh(t, d.Host("b"), "mkfs.ext4 -q /dev/vda")
	d.mount(t)
	d.steps(t,
		step{name: "no LAN at all", run: withoutLAN},
		step{name: "real sysfs", run: realSysfs},
		step{name: "no finding where all is well", run: healthy},
		step{name: "links bench", run: bench},
		step{name: "LAN comes and goes", run: lanComesAndGoes},
		step{name: "bytes over LAN and cable", run: bothWays},
		step{name: "to another port", run: moved},
		step{name: "two cables", run: twoCables},
		step{name: "driver reload", run: reload},
		step{name: "agent killed", run: killed},
		step{name: "power cut and return", run: cut, long: true},
		step{name: "multicast blocked", run: noMulticast, long: true},
	)
}

// stateDir is where the program keeps what it knows.
const stateDir = "/var/lib/tbcluster"

// mount puts the state of host b onto its disk.
func (d *desk) mount(t *testing.T) {
	t.Helper()
	sh(t, d.Host("b"), "mkdir -p "+stateDir+"; mount -t ext4 /dev/vda "+stateDir)
}

func withoutLAN(t *testing.T, d *desk) {
	d.up(t)
	d.proven(t, 1)
	d.overCables(t)
	for _, h := range d.Hosts() {
		s := d.status(t, h)
		d.ends(t, s)
		l := s.link(t)
		if l.Lanes != 2 || l.NegotiatedGbps != 40 || l.CapableGbps < 40 {
			t.Errorf("the cable has %d lanes, %g of %g Gb/s", l.Lanes, l.NegotiatedGbps, l.CapableGbps)
		}
		if out := sh(t, h, "ip -o addr show dev eth0"); out != "" {
			t.Errorf("host %s has a LAN: %s", h.Name(), out)
		}
	}
	d.copies(t, d.Host("a"), d.Host("b"), 1<<20, nil)
	d.copies(t, d.Host("b"), d.Host("a"), 1<<20, nil)
}

func healthy(t *testing.T, d *desk) {
	for _, h := range d.Hosts() {
		if found := d.doctor(t, h); len(found) > 0 {
			t.Errorf("host %s: all is well, and doctor finds %+v", h.Name(), found)
		}
	}
}

func bench(t *testing.T, d *desk) {
	a := d.Host("a")
	before := d.sent()
	out, err := a.Run(within(t), Path, "links", "bench", "a:b", "--seconds", "1", "-o", "json")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	over := d.sent() - before
	var said struct {
		Link   Link
		UsedBy []string `json:"used_by"`
	}
	if err := json.Unmarshal([]byte(out), &said); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	m := said.Link.Measurement
	if m == nil || m.AToB == 0 || m.BToA == 0 || m.RTTUs == 0 || m.Shared || len(said.UsedBy) != 0 {
		t.Fatalf("it says %s", out)
	}
	t.Logf("a bench of 1 s each way: %.1f and %.1f MB/s, %d µs", float64(m.AToB)/1e6, float64(m.BToA)/1e6, m.RTTUs)
	// What it says arrived has crossed the cable, and not much else.
	if said := uint64(float64(m.AToB+m.BToA) * m.Seconds); said > over || over > 3*said+8<<20 {
		t.Errorf("it says that %d bytes arrived, and %d went over the cable", said, over)
	}
	// The far end knows it too, and all is as before.
	d.until(t, "wait until both know what was measured", func(s Status) bool {
		return len(s.Links) == 1 && s.Links[0].Measurement != nil && s.Links[0].Measurement.AToB == m.AToB && s.Proven() == 1
	})
	healthy(t, d)
}

func lanComesAndGoes(t *testing.T, d *desk) {
	a, b := d.Host("a"), d.Host("b")
	fine := func(s Status) bool { return s.Up() == 2 && s.Proven() == 1 }
	for _, h := range d.Hosts() {
		defer d.stays(t, h, "the cable is proven all the time", fine)()
	}
	d.lan(t, true)
	if out := sh(t, a, "ping -q -c 1 -w 20 "+b.LANAddress()); !strings.Contains(out, " 0% packet loss") {
		t.Fatalf("there is no LAN: %s", out)
	}
	d.copies(t, a, b, 6<<20, func() { d.lan(t, false) })
	d.overCables(t)
	for _, h := range d.Hosts() {
		d.ends(t, d.status(t, h))
	}
	healthy(t, d)
}

// moved has the cable come back in other ports: those where it was vanish.
func moved(t *testing.T, d *desk) {
	a, b := d.Host("a"), d.Host("b")
	d.Cable("a.0").Unplug()
	// Without a LAN, each is alone.
	d.until(t, "wait until the other one is down", func(s Status) bool { return s.Proven() == 0 && s.Up() == 1 && len(s.Nodes) == 2 })
	d.Cable("a.1").Plug()
	d.until(t, "wait for the cable in its new ports, and nothing of the old", func(s Status) bool {
		if len(s.Links) != 1 || s.Proven() != 1 || s.Up() != 2 || s.Links[0].A == nil || s.Links[0].B == nil {
			return false
		}
		at := []string{s.Links[0].A.Node + " " + s.Links[0].A.Port, s.Links[0].B.Node + " " + s.Links[0].B.Port}
		return slices.Contains(at, "a "+a.Device(1)) && slices.Contains(at, "b "+b.Device(2))
	})
	d.Settled(t)
	d.ends(t, d.status(t, b))
	d.copies(t, b, a, 256<<10, nil)
}

func twoCables(t *testing.T, d *desk) {
	a, b := d.Host("a"), d.Host("b")
	d.Cable("a.0").Plug()
	d.proven(t, 2)
	s := d.status(t, a)
	d.ends(t, s)
	if s.Links[0].A.Address == s.Links[1].A.Address {
		t.Errorf("both cables have one address: %s", s)
	}
	healthy(t, d)
	// Suspect for a moment, at most: what went over the one that goes has to go
	// over one that is full.
	defer d.stays(t, b, "the other cable keeps host a there", func(s Status) bool {
		return !slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.State == "down" })
	})()
	sent := func(port string) uint64 { return d.Cable(port).Counters().AtoB.SentBytes }
	was := map[string]uint64{"a.0": sent("a.0"), "a.1": sent("a.1")}
	// A copy uses both, and goes on where one is pulled. It has eight chunks.
	d.copies(t, a, b, 32<<20, func() {
		if err := d.Await(within(t), "wait until both cables carry the copy", func() string {
			for port, n := range was {
				if sent(port) < n+1<<20 {
					return fmt.Sprintf("the one in %s has carried %d bytes", port, sent(port)-n)
				}
			}
			return ""
		}); err != nil {
			t.Fatal(err)
		}
		d.Cable("a.1").Unplug()
	})
	d.proven(t, 1)
	d.until(t, "wait until it is said that one cable was pulled", func(s Status) bool {
		return s.Proven() == 1 && slices.ContainsFunc(s.Links, func(l Link) bool {
			return l.State == "down" && strings.Contains(l.Reason, "unplugged") && l.end("a").Port == a.Device(1) && l.end("b").Port == b.Device(2)
		})
	})
}

func reload(t *testing.T, d *desk) {
	b := d.Host("b")
	if err := b.ReloadDriver(within(t)); err != nil {
		t.Fatal(err)
	}
	d.proven(t, 1)
	d.ends(t, d.status(t, b))
	d.copies(t, b, d.Host("a"), 256<<10, nil)
}

// killed kills the agent's two halves, one and then the other, and what is left
// ends by itself; the next agent goes on where they were.
func killed(t *testing.T, d *desk) {
	a, b := d.Host("a"), d.Host("b")
	before := d.status(t, a).link(t)
	// The pattern does not fit the shell that looks for it.
	for _, half := range []string{"tbcluster agen[t] --root$", "tbcluster agen[t] --root-half "} {
		sh(t, b, "pkill -9 -f '"+half+"'")
		if err := d.c.Stop(b); err != nil {
			t.Fatal(err)
		}
		if _, err := d.c.Wait(within(t), a, "wait until host b is down", func(s Status) bool { return s.Up() == 1 && s.Proven() == 0 }); err != nil {
			t.Fatal(err)
		}
		d.begin(t, b)
		d.proven(t, 1)
	}
	after := d.status(t, a).link(t)
	if before.A.Address != after.A.Address || before.B.Address != after.B.Address {
		t.Errorf("the cable had %s and %s, and has %s and %s", before.A.Address, before.B.Address, after.A.Address, after.B.Address)
	}
}

// node is the one node of that name that is up.
func (s Status) node(t *testing.T, name string) Node {
	t.Helper()
	for _, n := range s.Nodes {
		if n.Name == name && n.State == "up" {
			return n
		}
	}
	t.Fatalf("no %s is up: %s", name, s)
	return Node{}
}

func finds(s Status, code, node string) bool {
	return slices.ContainsFunc(s.Findings, func(f Finding) bool { return f.Code == code && f.Node == node })
}

// cut takes the power of host b. It comes back without its disk, as one that
// nobody knows, and then with it, as what it was.
func cut(t *testing.T, d *desk) {
	a, b := d.Host("a"), d.Host("b")
	before := d.status(t, a)
	if err := b.Cut(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.c.Wait(within(t), a, "wait until host b is down", func(s Status) bool { return s.Up() == 1 && s.Proven() == 0 }); err != nil {
		t.Fatal(err)
	}
	if err := b.Boot(within(t)); err != nil {
		t.Fatal(err)
	}
	d.lan(t, false, b)
	d.begin(t, b)
	// It says so itself; what host a sees at the end of the cable is the machine that
	// it knows, which is down.
	if _, err := d.c.Wait(within(t), b, "wait for the finding that nobody has paired", func(s Status) bool {
		return s.Up() == 1 && s.Proven() == 0 && finds(s, "not-paired", "b")
	}); err != nil {
		t.Fatal(err)
	}
	s := d.status(t, a)
	t.Logf("with a stranger at the other end host a says: %s", s)
	if s.Up() != 1 || s.Proven() != 0 {
		t.Errorf("host a takes the stranger for host b: %s", s)
	}
	if err := d.c.Stop(b); err != nil {
		t.Fatal(err)
	}
	d.mount(t)
	d.begin(t, b)
	d.proven(t, 1)
	after := d.status(t, a)
	x, y := before.node(t, "b"), after.node(t, "b")
	if x.ID != y.ID || x.BootID == y.BootID {
		t.Errorf("host b was %+v, and is %+v", x, y)
	}
	if x, y := before.link(t), after.link(t); x.A.Address != y.A.Address || x.B.Address != y.B.Address {
		t.Errorf("the cable had %s and %s, and has %s and %s", x.A.Address, x.B.Address, y.A.Address, y.B.Address)
	}
	d.copies(t, a, b, 256<<10, nil)
}

// noMulticast has two hosts that know nothing of each other, on a LAN and a cable
// that carry no multicast of mDNS: the list of peers is what is left.
func noMulticast(t *testing.T, d *desk) {
	a, b := d.Host("a"), d.Host("b")
	d.lan(t, true)
	d.restart(t, func(h *rig.Host) {
		peer := a
		if h == a {
			peer = b
		}
		sh(t, h, `nft add table inet blocked
nft add chain inet blocked in '{ type filter hook input priority -300; }'
nft add chain inet blocked out '{ type filter hook output priority -300; }'
nft add rule inet blocked in udp dport 5353 counter drop
nft add rule inet blocked out udp dport 5353 counter drop
mkdir -p /etc/tbcluster
echo 'peers = ["`+peer.LANAddress()+`"]' >/etc/tbcluster/config.toml
rm -rf `+stateDir+`/*`)
	})
	if err := d.c.PairPatiently(within(t), a, b, "--address", a.LANAddress()); err != nil {
		t.Fatal(err)
	}
	d.proven(t, 1)
	d.ends(t, d.status(t, a))
	d.until(t, "wait for the findings that multicast is blocked", func(s Status) bool {
		return finds(s, "multicast-blocked", "a") && finds(s, "multicast-blocked", "b")
	})
	// By now they know each other's addresses on the cable, which is enough.
	fine := func(s Status) bool { return s.Up() == 2 && s.Proven() == 1 }
	for _, h := range d.Hosts() {
		defer d.stays(t, h, "the cable is proven all the time", fine)()
	}
	d.lan(t, false)
	d.copies(t, b, a, 1<<20, nil)
	d.overCables(t)
}

// TestThreeHosts is a ring without any LAN.
func TestThreeHosts(t *testing.T) {
	d := boot(t, rig.Ring(3))
	d.steps(t,
		step{name: "no LAN at all", run: func(t *testing.T, d *desk) {
			d.up(t)
			d.proven(t, 3)
			d.overCables(t)
			for _, h := range d.Hosts() {
				d.ends(t, d.status(t, h))
			}
			d.copies(t, d.Host("c"), d.Host("b"), 1<<20, nil)
		}},
		step{name: "one cable goes and comes", run: func(t *testing.T, d *desk) {
			// Two nodes without a cable or a LAN between them do not hear of each
			// other: with a LAN all stay up.
			d.lan(t, true)
			d.Cable("a.0").Unplug()
			d.proven(t, 2)
			d.Cable("a.0").Plug()
			d.proven(t, 3)
			d.lan(t, false)
			d.proven(t, 3)
		}},
		step{name: "no finding where all is well", run: healthy},
		step{name: "a host goes and comes", run: func(t *testing.T, d *desk) {
			a, c := d.Host("a"), d.Host("c")
			if err := c.ReloadDriver(within(t)); err != nil {
				t.Fatal(err)
			}
			d.proven(t, 3)
			d.copies(t, c, a, 256<<10, nil)
		}, long: true},
	)
}
