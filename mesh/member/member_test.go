package member

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

type service struct {
	peerv1.UnimplementedPeerServiceServer
	m *Manager
}

func (s service) Sync(stream peerv1.PeerService_SyncServer) error { return s.m.HandleSync(stream) }

// node is a node without the rest of the agent: real key, trust store, TLS, gRPC.
type node struct {
	dir   string
	key   *identity.Key
	store *identity.Store
	o     Options

	*Manager
	channel *channel.Channel
	lan     netip.AddrPort // 127.0.0.1, on "lan0"
	cable   netip.AddrPort // ::1, on "thunderbolt0"
	stop    func()
}

func newNode(t testing.TB, name string) *node {
	t.Helper()
	n := &node{dir: t.TempDir()}
	var err error
	if n.key, _, err = identity.OpenKey(n.dir); err != nil {
		t.Fatal(err)
	}
	if n.store, err = identity.OpenStore(n.dir, n.key, identity.StoreOptions{Name: name}); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *node) id() identity.NodeID { return n.key.ID() }

func interfaces(local netip.Addr) (string, bool) {
	if local.Is6() {
		return "thunderbolt0", true
	}
	return "lan0", false
}

// start runs the node until stop or crash.
func (n *node) start(t testing.TB) {
	t.Helper()
	crash := n.run(t)
	t.Cleanup(crash)
}

// run is start for a test that crashes the node: nothing is said to anybody.
func (n *node) run(t testing.TB) (crash func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	n.channel = channel.New(n.key, n.store, channel.Options{InterfaceOf: interfaces})
	o := n.o
	o.Self, o.Store, o.Dir, o.Version = n.id(), n.store, n.dir, "test"
	ch := n.channel
	if o.Dial == nil {
		o.Dial = func(ctx context.Context, id identity.NodeID) (Session, error) { return ch.Session(ctx, id) }
	}
	o.Peer = func(ctx context.Context) (identity.NodeID, string, bool) {
		c, ok := channel.ConnFromContext(ctx)
		if !ok {
			return "", "", false
		}
		return c.Peer(), c.Via().String(), true
	}
	if testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("me", n.id().Short())
	}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	n.Manager = m
	srv := grpc.NewServer(channel.ServerOptions()...)
	peerv1.RegisterPeerServiceServer(srv, service{m: m})
	var wg sync.WaitGroup
	control := ch.Listener(channel.Control) // before anybody can connect
	wg.Go(func() {
		err := srv.Serve(control)
		if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error("gRPC:", err)
		}
	})
	listen := func(addr string, old netip.AddrPort) netip.AddrPort {
		if old.IsValid() {
			addr = old.String() // the same after a restart
		}
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			if err := ch.Serve(ctx, ln); err != nil {
				t.Error("Serve:", err)
			}
		})
		return ln.Addr().(*net.TCPAddr).AddrPort()
	}
	n.lan, n.cable = listen("127.0.0.1:0", n.lan), listen("[::1]:0", n.cable)
	run, endRun := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := m.Run(run); err != nil {
			t.Error("Run:", err)
		}
	}()
	var once sync.Once
	end := func(politely bool) {
		once.Do(func() {
			if politely {
				endRun()
				<-ended
			}
			cancel()
			if err := ch.Close(); err != nil {
				t.Error(err)
			}
			endRun()
			srv.Stop()
			<-ended
			wg.Wait()
		})
	}
	n.stop = func() { end(true) }
	return func() { end(false) }
}

func pairUp(t testing.TB, a, b *node) {
	t.Helper()
	if _, err := a.store.Introduce(b.key.Public(), b.store.Self().Name, identity.Admin); err != nil {
		t.Fatal(err)
	}
	records, err := identity.ParseRecords(a.store.Export())
	if err != nil {
		t.Fatal(err)
	}
	if err := b.store.Adopt(records, a.key.Public()); err != nil {
		t.Fatal(err)
	}
}

// meet tells all nodes each other's ways.
func meet(nodes ...*node) {
	for _, a := range nodes {
		for _, b := range nodes {
			if a != b {
				a.channel.SetWays(b.id(), []channel.Way{
					{Kind: channel.Cable, Addr: b.cable}, {Kind: channel.LAN, Addr: b.lan},
				})
				a.Kick(b.id())
			}
		}
	}
}

func ordered(a, b *node) (low, high *node) {
	if a.id() < b.id() {
		return a, b
	}
	return b, a
}

// until waits for what n sees of id to be so, and returns it.
func (n *node) until(t testing.TB, id identity.NodeID, what string, so func(NodeView) bool) NodeView {
	t.Helper()
	changed, cancel := n.Subscribe()
	defer cancel()
	late := time.After(time.Minute)
	for {
		v, ok := n.Node(id)
		if ok && so(v) {
			return v
		}
		select {
		case <-changed:
		case <-time.After(50 * time.Millisecond): // RTT and the like are not told
		case <-late:
			t.Fatalf("%s sees %s as %s (%s), not %s", n.id().Short(), id.Short(), v.State, v.Reason, what)
		}
	}
}

func is(s State) func(NodeView) bool { return func(v NodeView) bool { return v.State == s } }

// never fails the test when n sees id in state s before the returned function
// is called.
func (n *node) never(t testing.TB, id identity.NodeID, s State) (done func()) {
	changed, cancel := n.Subscribe()
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if v, ok := n.Node(id); ok && v.State == s {
				t.Errorf("%s saw %s as %s: %s", n.id().Short(), id.Short(), s, v.Reason)
				return
			}
			select {
			case <-changed:
			case <-stop:
				return
			}
		}
	}()
	return func() { close(stop); <-ended; cancel() }
}

func section(name, data string) func(NodeView) bool {
	return func(v NodeView) bool { return v.State == Up && string(v.Sections[name].Data) == data }
}

func TestSectionsTravelBothWays(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	a.start(t)
	b.start(t)
	if err := a.Publish("node", []byte("a1")); err != nil {
		t.Fatal(err)
	}
	meet(a, b)
	if err := b.Publish("links", bytes.Repeat([]byte("x"), MaxSection)); err != nil {
		t.Fatal(err)
	}
	b.until(t, a.id(), "a1", section("node", "a1"))
	a.until(t, b.id(), "4 MiB", func(v NodeView) bool { return len(v.Sections["links"].Data) == MaxSection })
	for i := range 50 {
		if err := a.Publish("node", fmt.Appendf(nil, "a-%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	v := b.until(t, a.id(), "the last", section("node", "a-49"))
	if v.Sections["node"].Version != 51 || v.Incarnation != a.Incarnation() || v.Version != "test" || v.Via == "" {
		t.Fatalf("view %+v", v)
	}
	b.until(t, a.id(), "measured", func(v NodeView) bool { return v.RTT > 0 && v.RTT < time.Second })
	if err := a.Publish("huge", make([]byte, MaxSection+1)); !fault.Is(err, fault.Internal) {
		t.Fatalf("a section too large: %v", err)
	}
	for i := range MaxSections + 1 {
		err := a.Publish(fmt.Sprint("s", i), nil)
		if room := i < MaxSections-2; (err == nil) != room { // beside node and trust
			t.Fatalf("section %d: %v", i, err)
		}
	}
}

func TestThirdNodeIsLearntFromAnyOther(t *testing.T) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	pairUp(t, a, b)
	for _, n := range []*node{a, b, c} {
		n.start(t)
	}
	meet(a, b, c)
	a.until(t, b.id(), "up", is(Up))
	pairUp(t, b, c) // while all run
	for _, n := range []*node{a, b} {
		n.until(t, c.id(), "up", is(Up))
	}
	c.until(t, a.id(), "up", is(Up))
	if _, _, err := b.store.Revoke(c.id(), false, false); err != nil {
		t.Fatal(err)
	}
	// It was not told, and hears it when it comes back.
	c.until(t, b.id(), "no trust", func(v NodeView) bool { return v.Untrusting && v.State != Up })
	changed, cancel := a.Subscribe()
	defer cancel()
	late := time.After(time.Minute)
	for {
		if _, ok := a.Node(c.id()); !ok {
			break
		}
		select {
		case <-changed:
		case <-late:
			t.Fatal("a still lists c")
		}
	}
	for began := time.Now(); len(a.channel.Peers()) != 1; time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatalf("connections of a: %v", a.channel.Peers())
		}
	}
}

func TestCutCableIsNoSuspicion(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	a.start(t)
	b.start(t)
	meet(a, b)
	low, high := ordered(a, b)
	byCable := func(v NodeView) bool { return v.State == Up && strings.Contains(v.Via, "thunderbolt0") }
	byLAN := func(v NodeView) bool { return v.State == Up && strings.Contains(v.Via, "lan0") }
	low.until(t, high.id(), "up by cable", byCable)
	high.until(t, low.id(), "up by cable", byCable)
	doneLow, doneHigh := low.never(t, high.id(), Suspect), high.never(t, low.id(), Suspect)
	// Both ends lose the interface, and with it the way; both see that before the
	// end of what went over it.
	low.channel.SetWays(high.id(), []channel.Way{{Kind: channel.LAN, Addr: high.lan}})
	high.channel.SetWays(low.id(), []channel.Way{{Kind: channel.LAN, Addr: low.lan}})
	for _, n := range []*node{low, high} {
		n.WayGone("thunderbolt0")
	}
	for _, n := range []*node{low, high} {
		n.channel.WayGone("thunderbolt0")
	}
	low.until(t, high.id(), "up by LAN", byLAN)
	high.until(t, low.id(), "up by LAN", byLAN)
	doneLow()
	doneHigh()
}

// cord is a TCP way that can go silent: connected, and nothing gets through.
type cord struct {
	ln   net.Listener
	to   string
	mu   sync.Mutex
	cond *sync.Cond
	cut  bool
}

func newCord(t testing.TB, to netip.AddrPort) *cord {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cord{ln: ln, to: to.String()}
	c.cond = sync.NewCond(&c.mu)
	go func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", c.to)
			if err != nil {
				_ = near.Close()
				continue
			}
			go c.carry(near, far)
			go c.carry(far, near)
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); c.set(false) })
	return c
}

func (c *cord) carry(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		c.mu.Lock()
		for c.cut {
			c.cond.Wait()
		}
		c.mu.Unlock()
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (c *cord) set(cut bool) {
	c.mu.Lock()
	c.cut = cut
	c.mu.Unlock()
	c.cond.Broadcast()
}

func (c *cord) addr() netip.AddrPort { return c.ln.Addr().(*net.TCPAddr).AddrPort() }

func TestSilentCableIsNoSuspicion(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	a.start(t)
	b.start(t)
	low, high := ordered(a, b)
	cable := newCord(t, high.lan)
	low.channel.SetWays(high.id(), []channel.Way{
		{Kind: channel.Cable, Addr: cable.addr()}, {Kind: channel.LAN, Addr: high.cable},
	})
	low.Kick(high.id())
	low.until(t, high.id(), "up", is(Up))
	high.until(t, low.id(), "up", is(Up))
	doneLow, doneHigh := low.never(t, high.id(), Suspect), high.never(t, low.id(), Suspect)
	cable.set(true)
	low.until(t, high.id(), "up by another way", func(v NodeView) bool {
		return v.State == Up && strings.Contains(v.Via, high.cable.String())
	})
	high.until(t, low.id(), "up by another way", func(v NodeView) bool {
		return v.State == Up && strings.Contains(v.Via, "thunderbolt0")
	})
	doneLow()
	doneHigh()
}

func TestCleanStopIsDownAtOnceAndComesBack(t *testing.T) {
	for _, which := range []string{"the one that dials", "the one that is dialled"} {
		t.Run(which, func(t *testing.T) {
			a, b := newNode(t, "a"), newNode(t, "b")
			pairUp(t, a, b)
			stays, goes := ordered(a, b)
			if which == "the one that dials" {
				stays, goes = goes, stays
			}
			stays.start(t)
			goes.start(t)
			if err := goes.Publish("node", []byte("x")); err != nil {
				t.Fatal(err)
			}
			if err := goes.Publish("instances", []byte("y")); err != nil {
				t.Fatal(err)
			}
			meet(a, b)
			stays.until(t, goes.id(), "up", func(v NodeView) bool { return section("node", "x")(v) && section("instances", "y")(v) })
			goes.stop()
			// By what it said, and not by its silence.
			if v := stays.until(t, goes.id(), "down", is(Down)); !strings.Contains(v.Reason, "stopped") {
				t.Fatalf("down: %s", v.Reason)
			}
			v, _ := stays.Node(goes.id())
			if string(v.Sections["node"].Data) != "x" {
				t.Fatal("what was known of it is lost")
			}
			if err := stays.Forget(goes.id()); err != nil {
				t.Fatal(err)
			}
			if len(stays.Snapshot()) != 0 {
				t.Fatal("forgotten and listed")
			}
			old := v.Incarnation
			goes.start(t)
			meet(stays, goes)
			v = stays.until(t, goes.id(), "up again", is(Up))
			if v.Incarnation <= old {
				t.Fatalf("back as %d, was %d", v.Incarnation, old)
			}
			if _, ok := v.Sections["instances"]; ok {
				t.Fatal("what the last process said is still believed")
			}
			if len(stays.Snapshot()) != 1 {
				t.Fatal("met again and not listed")
			}
			if err := stays.Forget(goes.id()); !fault.Is(err, fault.NodeInUse) {
				t.Fatalf("Forget of a node that is up: %v", err)
			}
		})
	}
}

func TestRestartRemembersWhoIsDown(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	a.start(t)
	b.start(t)
	if err := b.Publish("node", []byte("b's")); err != nil {
		t.Fatal(err)
	}
	meet(a, b)
	a.until(t, b.id(), "up", section("node", "b's"))
	b.stop()
	a.until(t, b.id(), "down", is(Down))
	a.stop()
	first := a.Incarnation()
	a.start(t)
	v, ok := a.Node(b.id())
	if !ok || v.State != Unknown || string(v.Sections["node"].Data) != "b's" || v.LastHeard.IsZero() {
		t.Fatalf("after a restart: %+v", v)
	}
	if a.Incarnation() <= first {
		t.Fatal("the incarnation did not grow")
	}
}

func TestStateOnDisk(t *testing.T) {
	a := newNode(t, "a")
	o := Options{Self: a.id(), Store: a.store, Dir: a.dir}
	for content, want := range map[string]fault.Reason{`{"schema":2}`: fault.StateTooNew, `garbage`: "", ``: ""} {
		if err := os.WriteFile(statePath(a.dir), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := New(o)
		if want == "" && err != nil || want != "" && !fault.Is(err, want) {
			t.Errorf("%q: %v", content, err)
		}
	}
}

func TestLostIncarnationIsRaised(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	a.start(t)
	b.start(t)
	meet(a, b)
	for _, of := range [][2]*node{{a, b}, {b, a}} {
		n, other := of[0], of[1]
		other.until(t, n.id(), "connected", func(v NodeView) bool { return v.Via != "" })
		// other remembers more than n can know.
		future := n.Incarnation() + 1000
		other.mu.Lock()
		p := other.peers[n.id()]
		p.incarnation = future
		if p.stream != nil {
			p.stream.end(errors.New("test"))
		}
		other.mu.Unlock()
		other.until(t, n.id(), "a higher incarnation", func(v NodeView) bool { return v.State == Up && v.Incarnation > future })
	}
}

// liar speaks Sync by hand, as a member that means ill.
func liar(t *testing.T, n *node, to *node) peerv1.PeerService_SyncClient {
	t.Helper()
	ch := channel.New(n.key, n.store, channel.Options{})
	t.Cleanup(func() { _ = ch.Close() })
	ch.SetWays(to.id(), []channel.Way{{Kind: channel.LAN, Addr: to.lan}})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	session, err := ch.Session(ctx, to.id())
	if err != nil {
		t.Fatal(err)
	}
	s, err := peerv1.NewPeerServiceClient(session).Sync(ctx, grpc.MaxCallSendMsgSize(64<<20))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// hello promises few heartbeats: by hand none is sent.
func hello(incarnation uint64) *peerv1.SyncMessage {
	return &peerv1.SyncMessage{Message: &peerv1.SyncMessage_Hello{Hello: &peerv1.SyncHello{
		Incarnation: incarnation, HeartbeatMs: 30_000, Version: strings.Repeat("v", 10_000),
	}}}
}

func update(sections ...*peerv1.SyncSection) *peerv1.SyncMessage {
	return &peerv1.SyncMessage{Message: &peerv1.SyncMessage_Update{Update: &peerv1.SyncUpdate{Sections: sections}}}
}

func TestBadPeersAreCutOff(t *testing.T) {
	many := make([]*peerv1.SyncSection, MaxSections+1)
	for i := range many {
		many[i] = &peerv1.SyncSection{Name: fmt.Sprint(i), Version: 1}
	}
	for name, messages := range map[string][]*peerv1.SyncMessage{
		"no hello":             {update()},
		"empty":                {{}},
		"hello twice":          {hello(5), hello(6)},
		"no incarnation":       {hello(0)},
		"absurd incarnation":   {hello(1 << 62)},
		"too many sections":    {hello(5), update(many...)},
		"section without name": {hello(5), update(&peerv1.SyncSection{Version: 1})},
		"section too large":    {hello(5), update(&peerv1.SyncSection{Name: "x", Version: 1, Data: make([]byte, MaxSection+1)})},
		"message too large":    {hello(5), update(&peerv1.SyncSection{Name: "x", Version: 1, Data: make([]byte, 32<<20)})},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newNode(t, "a"), newNode(t, "b")
			pairUp(t, a, b)
			a.start(t)
			s := liar(t, b, a)
			for _, msg := range messages {
				if err := s.Send(msg); err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
			}
			for {
				_, err := s.Recv()
				if err != nil {
					if status.Code(err) == codes.DeadlineExceeded {
						t.Fatal("it was not cut off")
					}
					break
				}
			}
			v, _ := a.Node(b.id())
			if len(v.Sections) > MaxSections || len(v.Version) > 64 {
				t.Fatalf("kept %d sections, version of %d bytes", len(v.Sections), len(v.Version))
			}
		})
	}
}

// The side that did not dial answers, and speaks by itself only when it is not
// asked.
func TestOneSideAsksTheOtherAnswers(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	a.o.Heartbeat = func(int) time.Duration { return 100 * time.Millisecond }
	pairUp(t, a, b)
	a.start(t)
	s := liar(t, b, a)
	if err := s.Send(hello(5)); err != nil {
		t.Fatal(err)
	}
	unasked, measures := 0, 0
	next := func() *peerv1.SyncHeartbeat {
		for {
			msg, err := s.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if h := msg.GetHeartbeat(); h != nil {
				if h.GetSequence()%measureEvery == 1 {
					measures++
				}
				return h
			}
		}
	}
	const asked = 50
	for seq := uint64(1); seq <= asked; seq++ {
		if err := s.Send(heartbeat(seq, 0, time.Now())); err != nil {
			t.Fatal(err)
		}
		for next().GetEcho() != seq {
			unasked++
		}
		time.Sleep(20 * time.Millisecond)
	}
	if unasked > asked/2 || measures < asked/measureEvery {
		t.Errorf("asked %d times, it spoke %d times unasked and measured %d times", asked, unasked, measures)
	}
	for range 3 {
		if h := next(); h.GetEcho() != 0 || h.GetSequence() == 0 {
			t.Errorf("not asked any more: %v", h)
		}
	}
}

func TestOldMessagesAreDropped(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	a.start(t)
	s := liar(t, b, a)
	for _, msg := range []*peerv1.SyncMessage{
		hello(7),
		update(&peerv1.SyncSection{Name: "x", Version: 5, Data: []byte("new")}),
		update(&peerv1.SyncSection{Name: "x", Version: 4, Data: []byte("old")}),
		update(&peerv1.SyncSection{Name: "y", Version: 1, Data: []byte("end")}),
	} {
		if err := s.Send(msg); err != nil {
			t.Fatal(err)
		}
	}
	v := a.until(t, b.id(), "all", section("y", "end"))
	if string(v.Sections["x"].Data) != "new" {
		t.Fatal("an older version replaced a newer one")
	}
	old := liar(t, b, a)
	if err := old.Send(hello(6)); err != nil {
		t.Fatal(err)
	}
	answer, err := old.Recv()
	if err != nil || answer.GetHello().GetHaveIncarnation() != 7 {
		t.Fatalf("answer to an old incarnation: %v, %v", answer, err)
	}
	if _, err := old.Recv(); err == nil {
		t.Fatal("an old incarnation goes on")
	}
	if v, _ := a.Node(b.id()); v.Incarnation != 7 || v.State != Up {
		t.Fatalf("view %+v", v)
	}
}

func TestManyNodes(t *testing.T) {
	nodes := []*node{newNode(t, "n")}
	for range 5 {
		n := newNode(t, "n")
		pairUp(t, nodes[0], n)
		nodes = append(nodes, n)
	}
	for _, n := range nodes {
		n.start(t)
	}
	meet(nodes...)
	for _, a := range nodes {
		for _, b := range nodes[1:] {
			if a != b {
				a.until(t, b.id(), "up", is(Up))
			}
		}
	}
	// One stream a pair, in the end.
	for _, n := range nodes {
		late := time.Now().Add(time.Minute)
		for {
			wrong := 0
			for _, count := range n.channel.Peers() {
				if count != 1 {
					wrong++
				}
			}
			if wrong == 0 && len(n.channel.Peers()) == len(nodes)-1 {
				break
			}
			if time.Now().After(late) {
				t.Fatalf("connections of %s: %v", n.id().Short(), n.channel.Peers())
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
}

// The rest is about a real process that is killed and stopped.

const processEnv = "MEMBER_TEST_NODE"

type processConfig struct {
	Dir  string
	Ways map[identity.NodeID][]channel.Way
}

func TestMain(m *testing.M) {
	if config := os.Getenv(processEnv); config != "" {
		os.Exit(processMain(config))
	}
	os.Exit(m.Run())
}

// processMain is a node in a process of its own: it prints its addresses and
// runs until it is killed.
func processMain(config string) int {
	var c processConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := 1
	testing.Main(func(_, _ string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "node", F: func(t *testing.T) {
		n := &node{dir: c.Dir}
		var err error
		if n.key, _, err = identity.OpenKey(n.dir); err != nil {
			t.Fatal(err)
		}
		if n.store, err = identity.OpenStore(n.dir, n.key, identity.StoreOptions{}); err != nil {
			t.Fatal(err)
		}
		n.start(t)
		for id, ways := range c.Ways {
			n.channel.SetWays(id, ways)
			n.Kick(id)
		}
		fmt.Printf("ADDR %s %s\n", n.lan, n.cable)
		select {}
	}}}, nil, nil)
	return code
}

// process starts n as a process that knows how to reach others.
func process(t *testing.T, n *node, others ...*node) *exec.Cmd {
	t.Helper()
	c := processConfig{Dir: n.dir, Ways: map[identity.NodeID][]channel.Way{}}
	for _, o := range others {
		c.Ways[o.id()] = []channel.Way{{Kind: channel.Cable, Addr: o.cable}, {Kind: channel.LAN, Addr: o.lan}}
	}
	config, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), processEnv+"="+string(config))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var lan, cable string
		if k, _ := fmt.Sscanf(lines.Text(), "ADDR %s %s", &lan, &cable); k == 2 {
			n.lan, n.cable = netip.MustParseAddrPort(lan), netip.MustParseAddrPort(cable)
			go func() { _, _ = io.Copy(io.Discard, out) }()
			return cmd
		}
	}
	t.Fatal("the process did not start")
	return nil
}

// withProcess has a node with the lower and one with the higher ID in this
// process, and the third one in its own.
func withProcess(t *testing.T) (here []*node, there *node, cmd *exec.Cmd) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	low, high := ordered(a, b)
	low, there = ordered(low, c)
	there, high = ordered(there, high)
	pairUp(t, low, high)
	pairUp(t, low, there)
	low.start(t)
	high.start(t)
	meet(low, high)
	cmd = process(t, there, low, high)
	for _, n := range []*node{low, high} {
		n.channel.SetWays(there.id(), []channel.Way{{Kind: channel.Cable, Addr: there.cable}, {Kind: channel.LAN, Addr: there.lan}})
		n.Kick(there.id())
		n.until(t, there.id(), "up", is(Up))
	}
	return []*node{low, high}, there, cmd
}

func TestKilledAgentIsSuspectAndThenDown(t *testing.T) {
	t.Parallel()
	here, there, cmd := withProcess(t)
	killed := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, n := range here {
		v := n.until(t, there.id(), "suspect", is(Suspect))
		// By its end, and not by its silence.
		if !strings.HasPrefix(v.Reason, "its connection broke") {
			t.Errorf("suspect: %s", v.Reason)
		}
	}
	for _, n := range here {
		v := n.until(t, there.id(), "down", is(Down))
		if took := v.Since.Sub(killed); took < 8*time.Second {
			t.Errorf("down after %v", took)
		}
	}
	old, _ := here[0].Node(there.id())
	process(t, there, here...)
	for _, n := range here {
		n.channel.SetWays(there.id(), []channel.Way{{Kind: channel.LAN, Addr: there.lan}})
		v := n.until(t, there.id(), "up again", is(Up))
		if v.Incarnation <= old.Incarnation {
			t.Errorf("incarnation %d after %d", v.Incarnation, old.Incarnation)
		}
	}
}

func TestStoppedAgentIsSuspectAndComesBack(t *testing.T) {
	t.Parallel()
	here, there, cmd := withProcess(t)
	stopped := time.Now()
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for _, n := range here {
		v := n.until(t, there.id(), "suspect", is(Suspect))
		if took := v.Since.Sub(stopped); took < 2*time.Second || !strings.Contains(v.Reason, "are missing") {
			t.Errorf("suspect after %v: %s", took, v.Reason)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for _, n := range here {
		n.until(t, there.id(), "up again", is(Up))
	}
}

func TestNewsOfAWayIsUsedBesideAnAttemptThatHangs(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	pairUp(t, a, b)
	low, high := ordered(a, b)
	hangs, release := make(chan struct{}), make(chan struct{})
	dial := func(n *node) func(context.Context, identity.NodeID) (Session, error) {
		var once sync.Once
		return func(ctx context.Context, id identity.NodeID) (Session, error) {
			first := false
			once.Do(func() { first = true })
			if n == low && first {
				close(hangs)
				<-release // whatever becomes of the context
				return nil, errors.New("it led nowhere")
			}
			return n.channel.Session(ctx, id)
		}
	}
	low.o.Dial, high.o.Dial = dial(low), func(context.Context, identity.NodeID) (Session, error) {
		return nil, errors.New("it knows no way")
	}
	low.start(t)
	high.start(t)
	defer close(release)
	<-hangs
	low.channel.SetWays(high.id(), []channel.Way{{Kind: channel.LAN, Addr: high.lan}})
	low.Kick(high.id())
	low.until(t, high.id(), "up", is(Up))
	high.until(t, low.id(), "up", is(Up))
}

// wrong is a clock that is off.
type wrong time.Duration

func (w wrong) Now() time.Time { return time.Now().Add(time.Duration(w)) }

const day = 24 * time.Hour

func TestClocksMayBeWrongByDays(t *testing.T) {
	names, skews := []string{"a", "b", "c"}, []time.Duration{0, 9 * day, -30 * 365 * day}
	var nodes []*node
	for i, name := range names {
		n := newNode(t, name)
		n.o.Clock = wrong(skews[i])
		nodes = append(nodes, n)
	}
	for _, n := range nodes[1:] {
		pairUp(t, nodes[0], n)
	}
	for _, n := range nodes {
		n.start(t)
	}
	meet(nodes...)
	for i, n := range nodes {
		if err := n.Publish("node", []byte(names[i])); err != nil {
			t.Fatal(err)
		}
	}
	for i, n := range nodes {
		for j, o := range nodes {
			if i == j {
				continue
			}
			n.until(t, o.id(), "what it said, and how far its clock is off", func(v NodeView) bool {
				off := v.ClockSkew - (skews[j] - skews[i])
				return section("node", names[j])(v) && v.ClockSkew != 0 && off < time.Minute && off > -time.Minute
			})
		}
	}
	// One that had the future in its memory is put right, and starts anew.
	late, first := nodes[1], nodes[0]
	was := late.Incarnation()
	late.stop()
	first.until(t, late.id(), "down", is(Down))
	late.o.Clock = wrong(-2 * 365 * day)
	late.start(t)
	meet(nodes...)
	if err := late.Publish("node", []byte("put right")); err != nil {
		t.Fatal(err)
	}
	first.until(t, late.id(), "up, with its news", section("node", "put right"))
	if got := late.Incarnation(); got <= was {
		t.Errorf("incarnation %d comes after %d", got, was)
	}
	for _, v := range late.Snapshot() {
		if v.LastHeard.After(time.Now()) || v.Since.After(time.Now().Add(time.Second)) {
			t.Errorf("%s was heard at %v, since %v: that is to come", v.ID.Short(), v.LastHeard, v.Since)
		}
	}
}
