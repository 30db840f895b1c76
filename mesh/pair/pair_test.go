package pair

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

type node struct {
	*Pairer
	key   *identity.Key
	store *identity.Store
	ch    *channel.Channel
	addr  netip.AddrPort
}

func (n *node) id() identity.NodeID { return n.key.ID() }

func newNode(t testing.TB, name string) *node {
	t.Helper()
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return newNodeOf(t, name, key)
}

func newNodeOf(t testing.TB, name string, key *identity.Key) *node {
	t.Helper()
	store, err := identity.OpenStore(t.TempDir(), key, identity.StoreOptions{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	ch := channel.New(key, store, channel.Options{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- ch.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		if err := ch.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return &node{New(key, store, ch, Options{}), key, store, ch, ln.Addr().(*net.TCPAddr).AddrPort()}
}

func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func (n *node) at() []Candidate {
	return []Candidate{{Node: n.id(), Way: channel.Way{Kind: channel.LAN, Addr: n.addr}}}
}

func (n *node) open(t testing.TB, role identity.Role) *Invitation {
	t.Helper()
	inv, err := n.Open(ctx(t), role, 0)
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func (n *node) trusts(other *node) bool {
	_, ok := n.store.Trusted(other.key.Public())
	return ok
}

// last returns the last event and how many wrong tries came before it.
func last(t testing.TB, inv *Invitation) (e Event, wrong int) {
	t.Helper()
	late := time.After(time.Minute)
	for {
		select {
		case next, ok := <-inv.Events:
			if !ok {
				return e, wrong
			}
			if next.WrongTryFrom != "" {
				wrong++
			}
			e = next
		case <-late:
			t.Fatal("the code goes on")
		}
	}
}

// wrongCode is code with another secret.
func wrongCode(code string) string {
	c := "0"
	if strings.HasSuffix(code, c) {
		c = "1"
	}
	return code[:len(code)-1] + c
}

func TestTwoNodesPair(t *testing.T) {
	a, b := newNode(t, "alpha"), newNode(t, "beta")
	inv := a.open(t, identity.Operator)
	if a.OpenNumber() != inv.Number || time.Until(inv.Expires) > Lifetime {
		t.Fatalf("number %q, expires %v", a.OpenNumber(), inv.Expires)
	}
	member, err := b.Join(ctx(t), strings.ToLower(strings.ReplaceAll(inv.Code, "-", " ")), a.at())
	if err != nil || member.ID != a.id() || member.Name != "alpha" {
		t.Fatalf("Join: %+v, %v", member, err)
	}
	e, wrong := last(t, inv)
	if e.Joined == nil || e.Joined.ID != b.id() || e.Joined.Name != "beta" || e.Joined.Role != identity.Operator || wrong != 0 {
		t.Fatalf("event %+v", e)
	}
	if !a.trusts(b) || !b.trusts(a) || a.OpenNumber() != "" {
		t.Fatal("not paired")
	}
	if ac, _ := a.store.Cluster(); func() string { c, _ := b.store.Cluster(); return c }() != ac {
		t.Fatal("two clusters")
	}
	// An operator lets nobody in.
	if _, err := b.Open(ctx(t), 0, 0); !fault.Is(err, fault.Denied) {
		t.Fatalf("operator opens a code: %v", err)
	}
	// One use: for this node, and for another.
	if _, err := b.Join(ctx(t), inv.Code, a.at()); !fault.Is(err, fault.PairingFailed) || !strings.Contains(err.Error(), "used") {
		t.Fatalf("a second time: %v", err)
	}
	c := newNode(t, "c")
	if _, err := c.Join(ctx(t), inv.Code, a.at()); !fault.Is(err, fault.PairingFailed) || !strings.Contains(err.Error(), "used") || a.trusts(c) {
		t.Fatalf("another node: %v", err)
	}
	// Pairing again with a member changes nothing and works.
	again := a.open(t, 0)
	if _, err := b.Join(ctx(t), again.Code, a.at()); err != nil {
		t.Fatalf("pairing again: %v", err)
	}
}

func TestWrongCodeThreeTimes(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	inv := a.open(t, 0)
	wrong := wrongCode(inv.Code)
	for i := range MaxTries {
		_, err := b.Join(ctx(t), wrong, a.at())
		f := fault.As(err)
		if f == nil || f.Reason != fault.PairingFailed || f.Fix == "" {
			t.Fatalf("try %d: %v", i+1, err)
		}
		if !strings.Contains(f.Why, "wrong") {
			t.Fatalf("try %d: %v", i+1, err)
		}
		// Nobody is told to type a code again that is over.
		if over := i == MaxTries-1; over != strings.Contains(f.Fix, "new one") || over == strings.Contains(f.Fix, "type it again") {
			t.Fatalf("try %d: to do is %q", i+1, f.Fix)
		}
	}
	e, n := last(t, inv)
	if n != MaxTries || !fault.Is(e.Ended, fault.PairingFailed) {
		t.Fatalf("%d wrong tries, then %+v", n, e)
	}
	// The fourth guess is right, and too late.
	if _, err := b.Join(ctx(t), inv.Code, a.at()); !fault.Is(err, fault.PairingFailed) || a.trusts(b) || b.trusts(a) {
		t.Fatalf("fourth guess: %v", err)
	}
	// The joining side gives up on its code after three as well, without asking.
	if _, err := b.Join(ctx(t), wrong, nil); !fault.Is(err, fault.PairingFailed) || !strings.Contains(err.Error(), "three times") {
		t.Fatalf("fourth try of the joining side: %v", err)
	}
}

func TestWhoIsInAlreadyUsesNoCodeUp(t *testing.T) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	if _, err := b.Join(ctx(t), a.open(t, 0).Code, a.at()); err != nil {
		t.Fatal(err)
	}
	inv := a.open(t, 0)
	b.o.InTouch = func(id identity.NodeID) bool { return id == a.id() }
	for range 2 {
		_, err := b.Join(ctx(t), inv.Code, a.at())
		if f := fault.As(err); f == nil || f.Reason != fault.PairingFailed || !strings.Contains(f.Why, "a are in the same cluster already") {
			t.Fatalf("a member pairs again: %v", err)
		}
	}
	if _, err := c.Join(ctx(t), inv.Code, a.at()); err != nil {
		t.Fatalf("the one for whom the code is: %v", err)
	}
	if e, n := last(t, inv); e.Joined == nil || e.Joined.ID != c.id() || n != 0 {
		t.Fatalf("%d wrong tries, then %+v", n, e)
	}
}

func TestTwoWrongTriesThenTheRightOne(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	inv := a.open(t, 0)
	for range MaxTries - 1 {
		if _, err := b.Join(ctx(t), wrongCode(inv.Code), a.at()); err == nil {
			t.Fatal("a wrong code works")
		}
	}
	if _, err := b.Join(ctx(t), inv.Code, a.at()); err != nil {
		t.Fatal(err)
	}
	if e, n := last(t, inv); e.Joined == nil || n != MaxTries-1 {
		t.Fatalf("%d wrong tries, then %+v", n, e)
	}
}

func TestCodesEnd(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	expired, err := a.Open(ctx(t), 0, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if e, _ := last(t, expired); !fault.Is(e.Ended, fault.PairingFailed) || !strings.Contains(e.Ended.Error(), "expired") {
		t.Fatalf("event %+v", e)
	}
	if _, err := b.Join(ctx(t), expired.Code, a.at()); !fault.Is(err, fault.PairingFailed) || !strings.Contains(err.Error(), "expired") {
		t.Fatalf("an expired code: %v", err)
	}
	replaced := a.open(t, 0)
	stop, cancel := context.WithCancel(ctx(t))
	inv, err := a.Open(stop, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if e, _ := last(t, replaced); !fault.Is(e.Ended, fault.Interrupted) {
		t.Fatalf("event %+v", e)
	}
	cancel()
	if e, _ := last(t, inv); !fault.Is(e.Ended, fault.Interrupted) || a.OpenNumber() != "" {
		t.Fatalf("event %+v", e)
	}
	if a.trusts(b) {
		t.Fatal("paired")
	}
}

func TestWhoIsNotThere(t *testing.T) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	for Number(c.id()) == Number(a.id()) { // one in 9000 has the same, and may be asked
		c = newNode(t, "c")
	}
	inv := a.open(t, 0)
	// c claims to be a: its key says otherwise, and it gets no guess.
	guessed := make(chan struct{}, 1)
	c.ch.HandleUnpaired(channel.Pair, func(conn *channel.Conn) {
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			guessed <- struct{}{}
		}
	})
	forged := []Candidate{{Node: a.id(), Way: c.at()[0].Way}, {Way: c.at()[0].Way}}
	if _, err := b.Join(ctx(t), inv.Code, forged); !fault.Is(err, fault.PairingFailed) || !strings.Contains(err.Error(), "another node") {
		t.Fatalf("another node: %v", err)
	}
	select {
	case <-guessed:
		t.Fatal("the forger was told something")
	default:
	}
	if _, err := b.Join(ctx(t), inv.Code, c.at()); !fault.Is(err, fault.NodeDown) {
		t.Fatalf("no candidate of that number: %v", err)
	}
	gone := Candidate{Node: a.id(), Way: channel.Way{Addr: netip.MustParseAddrPort("127.0.0.1:1")}}
	if _, err := b.Join(ctx(t), inv.Code, []Candidate{gone}); !fault.Is(err, fault.NodeDown) {
		t.Fatalf("nobody there: %v", err)
	}
	if _, err := a.Join(ctx(t), inv.Code, a.at()); !fault.Is(err, fault.PairingFailed) {
		t.Fatalf("its own code: %v", err)
	}
	if _, err := b.Join(ctx(t), "alpha", a.at()); !fault.Is(err, fault.Usage) {
		t.Fatalf("no code: %v", err)
	}
	// With a dead, a forged and a right candidate the right one is found.
	if _, err := b.Join(ctx(t), inv.Code, append(append([]Candidate{gone}, forged...), Candidate{Way: a.at()[0].Way})); err != nil {
		t.Fatal(err)
	}
}

func TestNodeOfAnotherClusterIsRefused(t *testing.T) {
	a, b, c, d := newNode(t, "a"), newNode(t, "b"), newNode(t, "c"), newNode(t, "d")
	for _, two := range [][2]*node{{a, b}, {c, d}} {
		inv := two[0].open(t, 0)
		if _, err := two[1].Join(ctx(t), inv.Code, two[0].at()); err != nil {
			t.Fatal(err)
		}
	}
	inv := a.open(t, 0)
	_, err := d.Join(ctx(t), inv.Code, a.at())
	f := fault.As(err)
	if f == nil || f.Reason != fault.NodeInUse || !strings.Contains(f.Fix, "tbcluster pair") {
		t.Fatalf("Join: %v", err)
	}
	if e, _ := last(t, inv); !fault.Is(e.Ended, fault.PairingFailed) {
		t.Fatalf("event %+v", e)
	}
	if a.trusts(d) || d.trusts(a) || !d.trusts(c) {
		t.Fatal("clusters were mixed")
	}
}

func TestRevokedNodeDoesNotPairAgain(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	inv := a.open(t, 0)
	if _, err := b.Join(ctx(t), inv.Code, a.at()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := a.store.Revoke(b.id(), false, false); err != nil {
		t.Fatal(err)
	}
	if err := b.store.Leave(); err != nil {
		t.Fatal(err)
	}
	inv = a.open(t, 0)
	if _, err := b.Join(ctx(t), inv.Code, a.at()); !fault.Is(err, fault.PairingFailed) || !strings.Contains(fault.As(err).Fix, "--new-identity` here") {
		t.Fatalf("Join: %v", err)
	}
	if a.trusts(b) {
		t.Fatal("a revoked key is back")
	}
}

// TestRelayedPairingFails has somebody in between with a certificate of his own,
// ground so that even the number fits, who hands every byte on.
func TestRelayedPairingFails(t *testing.T) {
	a, b := newNode(t, "a"), newNode(t, "b")
	inv := a.open(t, 0)
	var key *identity.Key
	for {
		pub, private, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if Number(identity.IDOf(pub)) == inv.Number {
			key = keyOf(t, private)
			break
		}
	}
	m := newNodeOf(t, "m", key)
	m.ch.HandleUnpaired(channel.Pair, func(c *channel.Conn) {
		far, err := m.ch.DialUnpaired(ctx(t), channel.Pair, a.at()[0].Way)
		if err != nil {
			t.Error(err)
			return
		}
		go func() { _, _ = io.Copy(far, c) }()
		_, _ = io.Copy(c, far)
	})
	_, err := b.Join(ctx(t), inv.Code, m.at())
	if !fault.Is(err, fault.PairingFailed) {
		t.Fatalf("Join: %v", err)
	}
	for _, two := range [][2]*node{{a, m}, {m, a}, {b, m}, {m, b}, {a, b}, {b, a}} {
		if two[0].trusts(two[1]) {
			t.Fatal("somebody in between got in")
		}
	}
	// It cost a guess, and the right way still works.
	if _, err := b.Join(ctx(t), inv.Code, a.at()); err != nil {
		t.Fatal(err)
	}
	if e, n := last(t, inv); e.Joined == nil || n != 1 {
		t.Fatalf("%d wrong tries, then %+v", n, e)
	}
}

// keyOf puts a private key where OpenKey finds it.
func keyOf(t *testing.T, private ed25519.PrivateKey) *identity.Key {
	t.Helper()
	key, err := identity.KeyFrom(private)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestOneExchangeAtATime(t *testing.T) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	inv := a.open(t, 0)
	// Idle connections, more than may wait, keep nobody out.
	for range 3 * maxWaiting {
		conn, err := c.ch.DialUnpaired(ctx(t), channel.Pair, a.at()[0].Way)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	// One that holds the place is waited for.
	conn, err := c.ch.DialUnpaired(ctx(t), channel.Pair, a.at()[0].Way)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newExchange(wrongCode(inv.Code), joinerRole, c.key.Public(), a.key.Public(), conn.ConnectionState())
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{rw: conn}
	if err := w.write(frame{Number: e.number, Point: e.x}); err != nil {
		t.Fatal(err)
	}
	if f, err := w.next(); err != nil || f.Refuse != "" {
		t.Fatalf("hello: %+v, %v", f, err)
	}
	other, err := b.ch.DialUnpaired(ctx(t), channel.Pair, a.at()[0].Way)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.join(ctx(t), inv.Code, other); !errors.Is(err, errBusy) {
		t.Fatalf("beside another: %v", err)
	}
	joined := make(chan error, 1)
	go func() {
		_, err := b.Join(ctx(t), inv.Code, a.at())
		joined <- err
	}()
	if err := conn.Close(); err != nil { // it gives up: no guess was made
		t.Fatal(err)
	}
	if err := <-joined; err != nil {
		t.Fatal(err)
	}
	if ev, n := last(t, inv); ev.Joined == nil || n != 0 {
		t.Fatalf("%d wrong tries, then %+v", n, ev)
	}
}

func TestBadMessagesEndTheExchange(t *testing.T) {
	a, c := newNode(t, "a"), newNode(t, "c")
	inv := a.open(t, 0)
	good := func(conn *channel.Conn) *exchange {
		e, err := newExchange(inv.Code, joinerRole, c.key.Public(), a.key.Public(), conn.ConnectionState())
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	for name, raw := range map[string]func(*channel.Conn) []byte{
		"too large":           func(*channel.Conn) []byte { return append([]byte{0xff, 0xff}, make([]byte, 0xffff)...) },
		"null":                func(*channel.Conn) []byte { return framed(`null`) },
		"no JSON":             func(*channel.Conn) []byte { return framed(`{`) },
		"no point":            func(*channel.Conn) []byte { return framed(`{"number":"` + inv.Number + `"}`) },
		"point at infinity":   func(*channel.Conn) []byte { return framed(`{"number":"` + inv.Number + `","point":"AA=="}`) },
		"point off the curve": func(*channel.Conn) []byte { return hello(inv.Number, append([]byte{4}, make([]byte, 64)...)) },
		"a PAKE of the library": func(conn *channel.Conn) []byte {
			return framed(`{"Role":0,"Uᵤ":null,"Xᵤ":null,"number":"` + inv.Number + `"}`)
		},
		"another number": func(conn *channel.Conn) []byte { return hello("1", good(conn).x) },
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := c.ch.DialUnpaired(ctx(t), channel.Pair, a.at()[0].Way)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write(raw(conn)); err != nil {
				return // cut off before it was all said
			}
			if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			f, err := (&wire{rw: conn}).next()
			var ne net.Error
			if errors.As(err, &ne) && ne.Timeout() || err == nil && f.Refuse == "" {
				t.Fatalf("it goes on: %+v, %v", f, err)
			}
		})
	}
	b := newNode(t, "b")
	if _, err := b.Join(ctx(t), inv.Code, a.at()); err != nil {
		t.Fatalf("after all that: %v", err)
	}
	if e, n := last(t, inv); e.Joined == nil || n != 0 {
		t.Fatalf("%d wrong tries, then %+v", n, e)
	}
}

func framed(s string) []byte { return append([]byte{byte(len(s) >> 8), byte(len(s))}, s...) }

func hello(number string, point []byte) []byte {
	data, err := json.Marshal(frame{Number: number, Point: point})
	if err != nil {
		panic(err)
	}
	return framed(string(data))
}

func TestCodes(t *testing.T) {
	id := newNode(t, "a").id()
	seen := map[string]bool{}
	for range 1000 {
		code, err := newCode(id)
		if err != nil || seen[code] {
			t.Fatalf("code %q twice, or %v", code, err)
		}
		seen[code] = true
		number, canonical, err := ParseCode(code)
		if err != nil || canonical != code || number != Number(id) {
			t.Fatalf("ParseCode(%q) = %q, %q, %v", code, number, canonical, err)
		}
	}
	if _, c, err := ParseCode("4711 oil1-uuuu"); err != nil || c != "4711-0111-VVVV" {
		t.Errorf("look-alikes: %q, %v", c, err)
	}
	for _, s := range []string{"", "4711", "4711-AAAA-AAA", "4711-AAAA-AAAAA", "A711-AAAA-AAAA", "0711-AAAA-AAAA", "4711-AAA!-AAAA", strings.Repeat("-", 100)} {
		if _, _, err := ParseCode(s); !fault.Is(err, fault.Usage) {
			t.Errorf("ParseCode(%q): %v", s, err)
		}
	}
}

func FuzzParseCode(f *testing.F) {
	f.Add("4711-ABCD-EFGH")
	f.Add("ſ\xff")
	f.Fuzz(func(t *testing.T, s string) {
		number, code, err := ParseCode(s)
		if err != nil {
			return
		}
		n, again, err := ParseCode(code)
		if err != nil || n != number || again != code || len(code) != 14 {
			t.Fatalf("ParseCode(%q) = %q, which reads as %q, %v", s, code, again, err)
		}
	})
}

// pipe reads what it is given and forgets what is written.
type pipe struct {
	io.Reader
	io.Writer
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte{0, 4, 'n', 'u', 'l', 'l'}, false)
	f.Add([]byte{0, 2, '{', '}'}, false)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, true)
	f.Fuzz(func(t *testing.T, data []byte, confirmed bool) {
		w := &wire{rw: pipe{strings.NewReader(string(data)), io.Discard}, confirmed: confirmed}
		for range 10 {
			if _, err := w.next(); err != nil {
				return
			}
			if w.read > maxExchange {
				t.Fatalf("%d bytes were read", w.read)
			}
		}
	})
}

// FuzzPoint has both roles take points of others: no input may panic, and none
// may be confirmed.
// FuzzWire has whatever comes over a connection read as messages: no panic, and no
// more memory than the messages may have.
func FuzzWire(f *testing.F) {
	f.Add(hello("4711", make([]byte, 65)), false)
	f.Add([]byte{0, 0, 0, 2, '{', '}'}, true)
	f.Add([]byte{255, 255, 255, 255, '{'}, true)
	f.Fuzz(func(t *testing.T, in []byte, confirmed bool) {
		w := &wire{rw: struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(in), io.Discard}, confirmed: confirmed}
		taken := 0
		for {
			m, err := w.next()
			if err != nil {
				break
			}
			taken += len(m.Point) + len(m.MAC) + len(m.Text) + len(m.Name) + len(m.Records)
			if !confirmed {
				// As the inviting side does with what nobody has vouched for.
				if u, v, err := decodePoint(m.Point); err == nil && (u == nil || v == nil) {
					t.Fatal("half a point")
				}
				if len(clean(m.Text)) > 4*200 {
					t.Fatal("a text without end")
				}
			}
		}
		if !confirmed && (w.read > maxExchange || taken > maxExchange) {
			t.Fatalf("%d bytes were read and %d taken before anything was confirmed", w.read, taken)
		}
	})
}

func FuzzPoint(f *testing.F) {
	key, err := identity.NewKey()
	if err != nil {
		f.Fatal(err)
	}
	cs := handshake(f, key)
	good, err := newExchange("4711-ABCD-EFGH", joinerRole, key.Public(), key.Public(), cs)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good.x, []byte{})
	f.Add([]byte{0}, []byte{1})
	f.Add(append([]byte{4}, make([]byte, 64)...), make([]byte, 32))
	f.Fuzz(func(t *testing.T, point, mac []byte) {
		for _, role := range []int{joinerRole, inviterRole} {
			e, err := newExchange("4711-ABCD-EFGH", role, key.Public(), key.Public(), cs)
			if err != nil {
				t.Fatal(err)
			}
			if err := e.take(point); err != nil {
				continue
			}
			if ok, err := e.confirms(mac); err != nil || ok {
				t.Fatalf("confirmed: %v, %v", ok, err)
			}
		}
	})
}

// handshake makes a TLS connection for its exporter.
func handshake(t testing.TB, key *identity.Key) tls.ConnectionState {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	done := make(chan error, 1)
	go func() {
		done <- tls.Server(far, &tls.Config{Certificates: []tls.Certificate{key.Certificate()}}).Handshake()
	}()
	c := tls.Client(near, &tls.Config{InsecureSkipVerify: true})
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return c.ConnectionState()
}
