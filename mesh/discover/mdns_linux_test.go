package discover

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tbcluster/mesh/identity"
)

// The nodes of these tests are processes in network namespaces of their own,
// joined by veth pairs: nothing leaves them.

const (
	nodeEnv = "DISCOVER_TEST_NODE"
	// crowdEnv makes one other node a crowd, and is half the time between two looks
	// for who is in it.
	crowdEnv = "DISCOVER_TEST_CROWD"
)

func TestMain(m *testing.M) {
	if self := os.Getenv(nodeEnv); self != "" {
		if err := nodeMain(identity.NodeID(self)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// command is a line to a node, report one from it.
type command struct {
	Start, Rescan, Ask, Stop bool
	Report                   bool // at once
	Reach                    identity.NodeID
	Announce                 *Announcement
	Forge                    int // answers of nodes that do not exist
}

type report struct {
	Candidates []Candidate
	Troubles   []string
	Unheard    []identity.NodeID
	Stopped    bool
}

func nodeMain(self identity.NodeID) error {
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	dir, err := os.MkdirTemp("", "discover")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	f, err := New(Options{Self: self, Dir: dir})
	if err != nil {
		return err
	}
	if period := os.Getenv(crowdEnv); period != "" {
		f.table.crowd = 1
		if f.table.period, err = time.ParseDuration(period); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	changed, unsubscribe := f.Subscribe()
	defer unsubscribe()
	lines := make(chan string)
	go func() {
		defer close(lines)
		for in.Scan() {
			lines <- in.Text()
		}
	}()
	stopped := report{Stopped: true}
	report := func() error {
		r := report{Candidates: f.Candidates()}
		for _, t := range f.Troubles() {
			r.Troubles = append(r.Troubles, fmt.Sprintf("%s %s", t.Interface, t.Cause))
		}
		r.Unheard, _ = f.Unheard()
		return out.Encode(r)
	}
	for {
		select {
		case <-changed:
			if err := report(); err != nil {
				return err
			}
		case line, ok := <-lines:
			if !ok {
				return nil
			}
			var c command
			if err := json.Unmarshal([]byte(line), &c); err != nil {
				return err
			}
			switch {
			case c.Start:
				go func() { ended <- f.Run(ctx) }()
			case c.Announce != nil:
				f.Announce(*c.Announce)
			case c.Rescan:
				f.Rescan()
			case c.Ask:
				f.Ask()
			case c.Report:
				if err := report(); err != nil {
					return err
				}
			case c.Reach != "":
				f.Reached(c.Reach)
			case c.Forge > 0:
				if err := forge(c.Forge); err != nil {
					return err
				}
			case c.Stop:
				cancel()
				if err := <-ended; err != nil {
					return err
				}
				return out.Encode(stopped)
			}
		}
	}
}

// forgedID is the ID of a node that does not exist.
func forgedID() identity.NodeID {
	k, err := identity.NewKey()
	if err != nil {
		panic(err) // of a source of randomness that does not fail
	}
	return k.ID()
}

// forge answers n times on all interfaces, each time for another node that does
// not exist.
func forge(n int) error {
	list, err := systemInterfaces()
	if err != nil {
		return err
	}
	m := &mdns{log: slog.New(slog.DiscardHandler), addresses: map[string][]netip.Prefix{}}
	for _, i := range list {
		ni, err := net.InterfaceByIndex(i.Index)
		if err != nil {
			return err
		}
		m.interfaces = append(m.interfaces, *ni)
		m.addresses[i.Name] = i.Addresses
	}
	for range n {
		name, txt := m.instance("forged"), Announcement{Name: "forged", Port: 7871}.txt(forgedID(), turn{"forged", 1})
		m.say(name, txt, 7871, nil)
		time.Sleep(time.Millisecond) // a thousand a second at most
	}
	return nil
}

type node struct {
	t       *testing.T
	id      identity.NodeID
	cmd     *exec.Cmd
	in      io.WriteCloser
	reports chan report
	last    report
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, id: newID(t), reports: make(chan report, 1000)}
	n.cmd = exec.Command(os.Args[0])
	n.cmd.Env = append(os.Environ(), nodeEnv+"="+string(n.id), "TMPDIR="+t.TempDir()) // it is killed
	n.cmd.Stderr = os.Stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		n.cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		n.cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		n.cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	var err error
	if n.in, err = n.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := n.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.cmd.Start(); err != nil {
		t.Skip("no network namespaces here:", err)
	}
	go func() {
		defer close(n.reports)
		dec := json.NewDecoder(out)
		for {
			var r report
			if err := dec.Decode(&r); err != nil {
				return
			}
			n.reports <- r
		}
	}()
	t.Cleanup(func() {
		_ = n.in.Close()
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
	})
	n.ip("link", "set", "lo", "up")
	return n
}

func (n *node) pid() string { return strconv.Itoa(n.cmd.Process.Pid) }

// ip runs ip(8) in the node's network.
func (n *node) ip(args ...string) {
	n.t.Helper()
	n.run("ip", args...)
}

// run runs a program in the node's network and returns what it printed.
func (n *node) run(name string, args ...string) string {
	n.t.Helper()
	enter := []string{"-t", n.pid(), "-n"}
	if os.Getuid() != 0 {
		enter = append(enter, "-U", "--preserve-credentials")
	}
	out, err := exec.Command("nsenter", append(append(enter, name), args...)...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// cable joins two nodes by a veth pair that is down.
func cable(a *node, aName string, b *node, bName string) {
	a.t.Helper()
	a.ip("link", "add", aName, "type", "veth", "peer", "name", bName, "netns", b.pid())
}

func (n *node) up(name string, addresses ...string) {
	n.t.Helper()
	for _, a := range addresses {
		n.ip("address", "add", a, "dev", name)
	}
	n.ip("link", "set", name, "up")
}

// settled waits until the link-local address of an interface can be used.
func (n *node) settled(name string) {
	n.t.Helper()
	for late := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if n.run("ip", "-6", "-o", "address", "show", "dev", name, "scope", "link", "-tentative") != "" {
			return
		}
		if time.Now().After(late) {
			n.t.Fatalf("%s has no link-local address", name)
		}
	}
}

func (n *node) tell(c command) {
	n.t.Helper()
	line, err := json.Marshal(c)
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.in.Write(append(line, '\n')); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) start(a Announcement) {
	n.t.Helper()
	n.tell(command{Announce: &a})
	n.tell(command{Start: true})
}

// until waits for a report that is so, and says how long that took.
func (n *node) until(what string, so func(report) bool) time.Duration {
	n.t.Helper()
	start, late := time.Now(), time.After(time.Minute)
	if so(n.last) {
		return 0
	}
	for {
		select {
		case r, ok := <-n.reports:
			if !ok {
				n.t.Fatalf("the node ended, waiting for %s; last %+v", what, n.last)
			}
			if n.last = r; so(r) {
				return time.Since(start)
			}
		case <-late:
			n.t.Fatalf("no %s; last %+v", what, n.last)
		}
	}
}

// at says whether a candidate is at a place.
func at(id identity.NodeID, iface, addr string) func(report) bool {
	return func(r report) bool {
		for _, c := range r.Candidates {
			for _, a := range c.Addresses {
				if c.Node == id && a.Interface == iface && strings.HasPrefix(a.Addr.String(), addr) {
					return true
				}
			}
		}
		return false
	}
}

func not(f func(report) bool) func(report) bool { return func(r report) bool { return !f(r) } }

func TestNodesFindEachOtherOnTheLAN(t *testing.T) {
	a, b := newNode(t), newNode(t)
	cable(a, "lan0", b, "lan0")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.start(Announcement{Name: "alpha", OS: "linux", Port: 7871})
	b.start(Announcement{Name: "beta", OS: "linux", Port: 7872})
	took := a.until("beta", at(b.id, "lan0", "192.0.2.2:7872"))
	took = max(took, b.until("alpha", at(a.id, "lan0", "192.0.2.1:7871")))
	t.Logf("found after %v", took)
	if c := a.last.Candidates[0]; c.Name != "beta" || c.OS != "linux" || c.Proto != 1 || c.Seen.IsZero() {
		t.Errorf("beta is %+v", c)
	}

	pair := func(n string) func(report) bool {
		return func(r report) bool { return paired(r, b.id) == n }
	}
	b.tell(command{Announce: &Announcement{Name: "beta", OS: "linux", Port: 7872, Pair: "4711"}})
	t.Logf("the code was seen after %v", a.until("the open code", pair("4711")))
	b.tell(command{Announce: &Announcement{Name: "beta", OS: "linux", Port: 7872}})
	t.Logf("its end was seen after %v", a.until("the end of the code", pair("")))
	b.tell(command{Stop: true})
	t.Logf("the goodbye was heard after %v", a.until("the goodbye", not(at(b.id, "lan0", "192.0.2.2"))))
}

// TestTheLastWordCounts: for a moment a node answers under its old name and its
// new one, and who asks then may hear the old one last.
func TestTheLastWordCounts(t *testing.T) {
	a, b := newNode(t), newNode(t)
	cable(a, "lan0", b, "lan0")
	cable(a, "thunderbolt0", b, "thunderbolt0")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.up("thunderbolt0")
	b.up("thunderbolt0")
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.start(Announcement{Name: "beta", Port: 7871})
	a.until("beta", at(b.id, "lan0", "192.0.2.2:7871"))
	var worst time.Duration
	for i := range 16 {
		number := strconv.Itoa(1000 + i)
		b.tell(command{Announce: &Announcement{Name: "beta", Port: 7871, Pair: number}})
		time.Sleep(time.Duration(i%8) * 30 * time.Millisecond) // within and after the overlap
		a.tell(command{Ask: true})
		took := a.until("code "+number, func(r report) bool { return paired(r, b.id) == number })
		worst = max(worst, took)
		settle := time.After(2 * overlap)
		for settled := false; !settled; {
			select {
			case a.last = <-a.reports:
			case <-settle:
				settled = true
			}
		}
		if got := paired(a.last, b.id); got != number {
			t.Errorf("round %d: after code %s, %q was believed", i, number, got)
		}
	}
	t.Logf("seen after %v at most", worst)
}

// paired is the number of the code that a node shows.
func paired(r report, id identity.NodeID) string {
	for _, c := range r.Candidates {
		if c.Node == id {
			return c.Pair
		}
	}
	return ""
}

func TestCableAloneIsEnough(t *testing.T) {
	a, b := newNode(t), newNode(t)
	// No LAN, and no IPv4 anywhere.
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.start(Announcement{Name: "beta", Port: 7871})
	cable(a, "thunderbolt0", b, "thunderbolt3")
	a.up("thunderbolt0")
	b.up("thunderbolt3")
	// As the agent does when netlink tells it.
	a.tell(command{Rescan: true})
	b.tell(command{Rescan: true})
	onCable := func(id identity.NodeID, iface string) func(report) bool {
		return func(r report) bool {
			for _, c := range r.Candidates {
				for _, place := range c.Addresses {
					if c.Node == id && place.Interface == iface && place.Cable && place.Addr.Addr().Zone() == iface {
						return true
					}
				}
			}
			return false
		}
	}
	took := a.until("beta", onCable(b.id, "thunderbolt0"))
	took = max(took, b.until("alpha", onCable(a.id, "thunderbolt3")))
	t.Logf("found after %v", took)
	// The cable comes back under another name; nobody tells.
	a.ip("link", "delete", "thunderbolt0")
	a.until("no place for beta", not(onCable(b.id, "thunderbolt0")))
	cable(a, "thunderbolt1", b, "thunderbolt3")
	a.up("thunderbolt1")
	b.up("thunderbolt3")
	t.Logf("found again after %v", a.until("beta on the new cable", onCable(b.id, "thunderbolt1")))
}

// The many nodes of a LAN hear nothing of it when one of them has a cable pulled
// or addressed: the nodes at its ends do.
func TestACableIsNoNewsOnTheLAN(t *testing.T) {
	a, b, c := newNode(t), newNode(t), newNode(t)
	cable(a, "lan0", b, "lan0")
	cable(a, "thunderbolt0", c, "thunderbolt3")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.up("thunderbolt0")
	c.up("thunderbolt3")
	// An interface that comes is news on the LAN, and it comes with its address.
	a.settled("lan0")
	b.settled("lan0")
	a.settled("thunderbolt0")
	names := map[string]bool{} // of alpha's announcements, as beta heard them
	heard := func(so func(report) bool) func(report) bool {
		return func(r report) bool {
			for _, x := range r.Candidates {
				if x.Node == a.id {
					names[x.Instance] = true
				}
			}
			return so(r)
		}
	}
	b.start(Announcement{Name: "beta", Port: 7871})
	c.start(Announcement{Name: "gamma", Port: 7871})
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.until("alpha by IPv4", heard(at(a.id, "lan0", "192.0.2.1:")))
	b.until("alpha by IPv6", heard(at(a.id, "lan0", "[fe80")))
	c.until("alpha", at(a.id, "thunderbolt3", "[fe80"))
	b.tell(command{Forge: 2 * crowd})
	a.until("a crowd", func(r report) bool { return len(r.Candidates) >= crowd })
	before := maps.Clone(names)
	if len(before) != 1 {
		t.Errorf("alpha announced itself as %v when it started", before)
	}

	c.ip("address", "add", "198.51.100.2/30", "dev", "thunderbolt3")
	a.ip("address", "add", "198.51.100.1/30", "dev", "thunderbolt0")
	c.tell(command{Rescan: true})
	a.tell(command{Rescan: true})
	c.until("alpha's address on the cable", at(a.id, "thunderbolt3", "198.51.100.1:"))
	a.ip("link", "delete", "thunderbolt0")
	a.tell(command{Rescan: true})
	a.until("no gamma on the cable", not(at(c.id, "thunderbolt0", "")))
	// The cable that comes, under another name, leads to somebody who starts later
	// and is answered there.
	d := newNode(t)
	cable(a, "thunderbolt1", d, "thunderbolt2")
	a.up("thunderbolt1")
	d.up("thunderbolt2")
	a.settled("thunderbolt1")
	d.settled("thunderbolt2")
	a.tell(command{Rescan: true})
	d.start(Announcement{Name: "delta", Port: 7871})
	a.until("delta", at(d.id, "thunderbolt1", "[fe80"))
	d.tell(command{Ask: true}) // those who asked have had their answers
	d.until("alpha", at(a.id, "thunderbolt2", "[fe80"))
	// What changes on the LAN is heard there.
	a.ip("address", "add", "203.0.113.1/24", "dev", "lan0")
	a.tell(command{Rescan: true})
	b.until("alpha's other address", heard(at(a.id, "", "203.0.113.1:")))
	maps.DeleteFunc(names, func(name string, _ bool) bool { return before[name] })
	if len(names) != 1 {
		t.Errorf("%d new announcements of alpha were heard: %v", len(names), names)
	}
}

// crowded are two nodes on a LAN, of whom each takes one other for a crowd, and asks
// it after twice the period. Who is not heard for six periods is forgotten, and makes
// no crowd then.
func crowded(t *testing.T, period time.Duration) (a, b *node) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("no nft here:", err)
	}
	t.Setenv(crowdEnv, period.String())
	a, b = newNode(t), newNode(t)
	t.Setenv(crowdEnv, "")
	cable(a, "lan0", b, "lan0")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.settled("lan0")
	b.settled("lan0")
	for _, n := range []*node{a, b} {
		n.run("nft", "add table inet t")
		n.run("nft", "add chain inet t in { type filter hook input priority 0; }")
		n.run("nft", "add chain inet t out { type filter hook output priority 0; }")
	}
	return a, b
}

// polled asks for reports until one is so.
func (n *node) polled(what string, reach identity.NodeID, so func(report) bool) {
	n.t.Helper()
	n.last = report{}
	n.until(what, func(r report) bool {
		time.Sleep(10 * time.Millisecond)
		if reach != "" {
			n.tell(command{Reach: reach})
		}
		n.tell(command{Report: true})
		return so(r)
	})
}

// again waits until a node was heard that many times more.
func (n *node) again(id identity.NodeID, times int) {
	n.t.Helper()
	var last time.Time
	n.polled("the other anew", "", func(r report) bool {
		for _, c := range r.Candidates {
			if c.Node == id && c.Seen.After(last) {
				last = c.Seen
				times--
			}
		}
		return times < 0
	})
}

// Among a crowd each node asks for itself: nobody else hears what it is answered.
// Where no answer comes through, it hears what is said to all.
func TestACrowdAnswersTheOneWhoAsks(t *testing.T) {
	a, b := crowded(t, 200*time.Millisecond)
	b.run("nft", "add counter inet t everybody")
	b.run("nft", "add counter inet t asker")
	// The library speaks from there; what we say ourselves is few.
	b.run("nft", "add rule inet t out udp sport 5353 ip daddr 224.0.0.251 counter name everybody")
	b.run("nft", "add rule inet t out udp sport 5353 ip6 daddr ff02::fb counter name everybody")
	b.run("nft", "add rule inet t out udp sport 5353 ip daddr 192.0.2.1 counter name asker")
	count := func(name string) (packets int) {
		t.Helper()
		out := b.run("nft", "list counter inet t "+name)
		_, rest, _ := strings.Cut(out, "packets ")
		if _, err := fmt.Sscan(rest, &packets); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return packets
	}
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.start(Announcement{Name: "beta", Port: 7871})
	a.until("beta", at(b.id, "lan0", "192.0.2.2"))
	b.until("alpha", at(a.id, "lan0", "192.0.2.1"))
	// What a start says to all ends.
	for end := time.Now().Add(time.Minute); ; {
		all, one := count("everybody"), count("asker")
		a.again(b.id, 10)
		if count("everybody") == all && count("asker") > one {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("all hear what one of them asks: %d answers to all, %d to one", count("everybody"), count("asker"))
		}
	}
	a.run("nft", "add rule inet t in udp sport 5353 udp dport != 5353 drop")
	for end := time.Now().Add(time.Minute); ; {
		all := count("everybody")
		a.again(b.id, 10)
		if count("everybody") == all && at(b.id, "lan0", "192.0.2.2")(a.last) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("what each says by itself is not enough: %d answers to all; %+v", count("everybody"), a.last)
		}
	}
}

// That a node answers does not hide that what is said to all is lost on the way to
// this one.
func TestWhoAnswersAloneIsUnheardAllTheSame(t *testing.T) {
	a, b := crowded(t, 500*time.Millisecond)
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.start(Announcement{Name: "beta", Port: 7871})
	a.until("beta", at(b.id, "lan0", "192.0.2.2"))
	a.run("nft", "add rule inet t in iifname lan0 udp dport 5353 drop")
	lost := func(r report) bool { return slices.Contains(r.Unheard, b.id) && at(b.id, "lan0", "192.0.2.2")(r) }
	a.polled("that beta is not heard, though it answers", b.id, lost)
	a.run("nft", "flush chain inet t in")
	a.polled("that beta is heard", b.id, func(r report) bool { return len(r.Unheard) == 0 && at(b.id, "lan0", "192.0.2.2")(r) })
}

// Somebody waits for a code that was shown while nothing was heard here, and no
// answer to this node alone comes through.
func TestWhoWaitsAsksForAllToHear(t *testing.T) {
	a, b := crowded(t, 200*time.Millisecond) // b is the crowd, and stays
	t.Setenv(crowdEnv, "1h")
	c := newNode(t) // which says no more than it is asked
	cable(a, "lan1", c, "lan1")
	a.up("lan1", "198.51.100.1/24")
	c.up("lan1", "198.51.100.2/24")
	a.settled("lan1")
	c.settled("lan1")
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.start(Announcement{Name: "beta", Port: 7871})
	c.start(Announcement{Name: "gamma", Port: 7871})
	a.until("beta", at(b.id, "lan0", "192.0.2.2"))
	a.until("gamma", at(c.id, "lan1", "198.51.100.2"))
	a.run("nft", "add rule inet t in iifname lan1 udp sport 5353 udp dport != 5353 drop")
	a.run("nft", "add rule inet t in iifname lan1 udp dport 5353 drop")
	c.tell(command{Announce: &Announcement{Name: "gamma", Port: 7871, Pair: "4711"}})
	shown := func(r report) bool {
		return slices.ContainsFunc(r.Candidates, func(x Candidate) bool { return x.Node == c.id && x.Pair == "4711" })
	}
	// The library says it several times, and not again.
	c.run("nft", "add table inet t")
	c.run("nft", "add chain inet t out { type filter hook output priority 0; }")
	c.run("nft", "add counter inet t said")
	c.run("nft", "add rule inet t out udp sport 5353 ip daddr 224.0.0.251 counter name said")
	c.run("nft", "add rule inet t out udp sport 5353 ip6 daddr ff02::fb counter name said")
	for said, end := "", time.Now().Add(time.Minute); ; time.Sleep(3 * time.Second) {
		now := c.run("nft", "list counter inet t said")
		if now == said {
			break
		}
		if said = now; time.Now().After(end) {
			t.Fatalf("gamma does not fall silent: %s", said)
		}
	}
	a.run("nft", "flush chain inet t in")
	a.run("nft", "add rule inet t in iifname lan1 udp sport 5353 udp dport != 5353 drop")
	for range 2 {
		a.tell(command{Ask: true})
	}
	a.until("the code", shown)
}

func TestBlockedMulticastIsSaid(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("no nft here:", err)
	}
	a, b := newNode(t), newNode(t)
	cable(a, "lan0", b, "lan0")
	a.run("nft", "add table inet t")
	a.run("nft", "add chain inet t out { type filter hook output priority 0; }")
	a.run("nft", "add rule inet t out udp dport 5353 drop")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.start(Announcement{Name: "alpha", Port: 7871})
	a.until("the trouble", func(r report) bool {
		return len(r.Troubles) == 1 && r.Troubles[0] == "lan0 refused"
	})
	a.run("nft", "delete table inet t")
	a.tell(command{Rescan: true})
	a.up("lan0", "192.0.2.3/24") // a change, so that it asks again
	a.until("its end", func(r report) bool { return len(r.Troubles) == 0 })
}

// A flood of forged answers fills a browse in a second. It is begun
// anew soon, so that a node that comes then is found all the same, long before
// the browse would have ended by itself.
func TestAFloodHidesNobody(t *testing.T) {
	a, b := newNode(t), newNode(t)
	cable(a, "lan0", b, "lan0")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.start(Announcement{Name: "alpha", Port: 7871})
	full := func(r report) bool { return len(r.Candidates) >= maxNodes-maxNodes/8 }
	b.tell(command{Forge: 2 * maxEntries})
	a.until("the forged ones", full)
	b.start(Announcement{Name: "beta", Port: 7871})
	a.until("beta among them", at(b.id, "lan0", "192.0.2.2:7871"))
	if n := len(a.last.Candidates); n > maxNodes {
		t.Errorf("%d candidates", n)
	}
}

func TestNewPortTakesThePlaceOfTheOld(t *testing.T) {
	a, b := newNode(t), newNode(t)
	cable(a, "lan0", b, "lan0")
	a.up("lan0", "192.0.2.1/24")
	b.up("lan0", "192.0.2.2/24")
	a.start(Announcement{Name: "alpha", Port: 7871})
	b.start(Announcement{Name: "beta", Port: 7871})
	a.until("beta", at(b.id, "lan0", "192.0.2.2"))
	b.tell(command{Announce: &Announcement{Name: "beta", Port: 7999}})
	a.until("beta at its new port", func(r report) bool {
		return at(b.id, "lan0", "192.0.2.2:7999")(r) && !at(b.id, "lan0", "192.0.2.2:7871")(r)
	})
}
