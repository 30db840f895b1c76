package identity

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

type node struct {
	*Store
	key *Key
	dir string
}

func (n *node) id() NodeID { return n.key.ID() }

func newNode(t testing.TB, name string) *node {
	t.Helper()
	dir := t.TempDir()
	k := mustKey(t)
	s, err := OpenStore(dir, k, StoreOptions{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	return &node{s, k, dir}
}

// joins lets b into a's cluster, as pairing does.
func joins(t testing.TB, a, b *node, role Role) {
	t.Helper()
	if _, err := a.Introduce(b.key.Public(), b.Self().Name, role); err != nil {
		t.Fatal(err)
	}
	if err := b.Adopt(records(t, a), a.key.Public()); err != nil {
		t.Fatal(err)
	}
}

func records(t testing.TB, n *node) []SignedRecord {
	t.Helper()
	r, err := ParseRecords(n.Export())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// tells gives b what a knows and returns what b refused.
func tells(t testing.TB, a, b *node) error {
	t.Helper()
	_, rejected, err := b.Merge(records(t, a))
	if err != nil {
		t.Fatal(err)
	}
	return rejected
}

func trusts(n *node, others ...*node) bool {
	for _, o := range others {
		if _, ok := n.Trusted(o.key.Public()); !ok {
			return false
		}
	}
	return true
}

// forge signs a record as n, whatever n may.
func forge(t testing.TB, n *node, cluster string, p payload) SignedRecord {
	t.Helper()
	p.Cluster = cluster
	if p.Sequence == 0 {
		p.Sequence = 99
	}
	r, err := signRecord(n.key, p)
	if err != nil {
		t.Fatal(err)
	}
	return r.signed
}

func (n *node) cluster() string { id, _ := n.Cluster(); return id }

func TestThirdNodePairsOnce(t *testing.T) {
	a, b, c := newNode(t, "alpha"), newNode(t, "beta"), newNode(t, "gamma")
	joins(t, a, b, Admin)
	joins(t, b, c, Operator)
	if trusts(a, c) {
		t.Fatal("alpha trusts gamma before anybody said so")
	}
	if rejected := tells(t, b, a); rejected != nil {
		t.Fatal(rejected)
	}
	if !trusts(a, b, c) || !trusts(b, a, c) || !trusts(c, a, b) {
		t.Fatal("not everybody trusts everybody")
	}
	m, _ := a.Member(c.id())
	if m.IntroducedBy != b.id() || m.Role != Operator || m.Name != "gamma" {
		t.Fatalf("gamma is %+v", m)
	}
	if a.cluster() != c.cluster() {
		t.Fatal("two clusters")
	}
}

func TestStoreOutlivesARestart(t *testing.T) {
	a, b := newNode(t, "alpha"), newNode(t, "beta")
	joins(t, a, b, Admin)
	again, err := OpenStore(a.dir, a.key, StoreOptions{Name: "other"})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := again.Trusted(b.key.Public()); !ok || string(again.Export()) != string(a.Export()) {
		t.Fatal("what was written is not what is read")
	}
}

func TestSpoiltTrustFileIsAnErrorAndStays(t *testing.T) {
	a, b := newNode(t, "alpha"), newNode(t, "beta")
	joins(t, a, b, Admin)
	path := filepath.Join(a.dir, TrustFile)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var file trustFile
	if err := json.Unmarshal(good, &file); err != nil {
		t.Fatal(err)
	}
	swapped := file
	swapped.Records = append([]SignedRecord(nil), file.Records...)
	swapped.Records[1].Signature = file.Records[0].Signature
	forged, err := json.Marshal(swapped)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		data   string
		reason fault.Reason
	}{
		"empty":          {"", fault.FileIO},
		"half":           {string(good[:len(good)/2]), fault.FileIO},
		"no founding":    {`{"schema":1,"records":[]}`, fault.FileIO},
		"bad signature":  {string(forged), fault.FileIO},
		"newer":          {`{"schema":3}`, fault.StateTooNew},
		"another format": {`[]`, fault.FileIO},
	} {
		if err := os.WriteFile(path, []byte(c.data), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenStore(a.dir, a.key, StoreOptions{}); !fault.Is(err, c.reason) {
			t.Errorf("%s: %v, want %s", name, err, c.reason)
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != c.data {
			t.Errorf("%s: the file was changed (%v)", name, err)
		}
	}
}

func TestTombstoneOutranksIntroductions(t *testing.T) {
	a, b, c := newNode(t, "alpha"), newNode(t, "beta"), newNode(t, "gamma")
	joins(t, a, b, Admin)
	joins(t, a, c, Admin)
	tells(t, a, b)
	old := records(t, a) // has gamma's introduction
	revoked, stay, err := a.Revoke(c.id(), false, false)
	if err != nil || len(revoked) != 1 || len(stay) != 0 {
		t.Fatalf("Revoke: %v %v %v", revoked, stay, err)
	}
	tells(t, a, b)
	if trusts(a, c) || trusts(b, c) {
		t.Fatal("gamma is still trusted")
	}
	// Replayed, and said again by somebody else and by gamma itself.
	if _, _, err := b.Merge(old); err != nil || trusts(b, c) {
		t.Fatalf("a replayed introduction lets gamma in (%v)", err)
	}
	for _, by := range []*node{a, b, c} {
		r := forge(t, by, a.cluster(), payload{Kind: kindIntroduce, Key: c.key.Public(), Name: "gamma", Role: Admin})
		if _, _, err := b.Merge([]SignedRecord{r}); err != nil || trusts(b, c) {
			t.Fatalf("a new introduction lets gamma in (%v)", err)
		}
	}
	if _, err := a.Introduce(c.key.Public(), "gamma", Viewer); !fault.Is(err, fault.Denied) {
		t.Fatalf("Introduce of a revoked key: %v", err)
	}
	if rejected := tells(t, a, c); rejected != nil {
		t.Fatal(rejected)
	}
	if !c.Self().Revoked {
		t.Fatal("gamma does not know that it is out")
	}
	if _, err := c.Introduce(mustKey(t).Public(), "x", Viewer); !fault.Is(err, fault.Denied) {
		t.Fatalf("a revoked node introduces: %v", err)
	}
}

func TestRevokedAdminLetsNobodyIn(t *testing.T) {
	a, b, x, friend := newNode(t, "alpha"), newNode(t, "beta"), newNode(t, "xi"), newNode(t, "friend")
	joins(t, a, b, Admin)
	joins(t, a, x, Admin)
	joins(t, x, friend, Admin)
	tells(t, x, a)
	tells(t, a, b)
	tells(t, a, x)
	_, stay, err := a.Revoke(x.id(), false, false)
	if err != nil || len(stay) != 1 || stay[0].ID != friend.id() {
		t.Fatalf("stay %v, %v", stay, err)
	}
	tells(t, a, b)
	if !trusts(b, friend) {
		t.Fatal("whom xi had introduced before is out, unasked")
	}
	// xi signs on, and friend, still a member, spreads it.
	evil := mustKey(t)
	seq := uint64(1) // used before: the number helps nothing
	intro := forge(t, x, a.cluster(), payload{Kind: kindIntroduce, Key: evil.Public(), Name: "evil", Role: Admin, Sequence: seq})
	own := forge(t, x, a.cluster(), payload{Kind: kindRevoke, Key: x.key.Public(), Keep: [][]byte{hashOf(t, intro)}})
	if _, rejected, err := b.Merge([]SignedRecord{intro, own}); err != nil || rejected == nil {
		t.Fatalf("Merge: rejected %v, %v", rejected, err)
	}
	if _, ok := b.Trusted(evil.Public()); ok {
		t.Fatal("a revoked admin let somebody in")
	}
	// evil signs a tombstone that would make its own introduction stand.
	evilNode := &node{key: evil}
	keep := forge(t, evilNode, a.cluster(), payload{Kind: kindRevoke, Key: x.key.Public(), Keep: [][]byte{hashOf(t, intro)}})
	if _, _, err := b.Merge([]SignedRecord{keep, intro}); err != nil {
		t.Fatal(err)
	}
	if _, ok := b.Trusted(evil.Public()); ok {
		t.Fatal("somebody let himself in")
	}
	if !trusts(b, a, friend) {
		t.Fatal("the forgery put others out")
	}
}

func TestRevokeWithIntroducedTakesThoseBehindToo(t *testing.T) {
	a, x, y, z, other := newNode(t, "a"), newNode(t, "x"), newNode(t, "y"), newNode(t, "z"), newNode(t, "other")
	joins(t, a, x, Admin)
	joins(t, x, y, Admin)
	joins(t, y, z, Viewer)
	joins(t, x, other, Operator)
	for _, n := range []*node{x, y, z} {
		tells(t, n, a)
	}
	// other has a second word for it.
	if _, err := a.Introduce(other.key.Public(), "other", Admin); err != nil {
		t.Fatal(err)
	}
	would, _, err := a.Revoke(x.id(), true, true)
	if err != nil || len(would) != 3 || !trusts(a, x, y, z, other) {
		t.Fatalf("dry run: %v, %v", would, err)
	}
	revoked, stay, err := a.Revoke(x.id(), true, false)
	if err != nil || len(revoked) != 3 {
		t.Fatalf("Revoke: %v %v %v", revoked, stay, err)
	}
	if trusts(a, x) || trusts(a, y) || trusts(a, z) || !trusts(a, other) {
		t.Fatal("the wrong nodes are out")
	}
}

func TestAdminsWhoRevokeEachOtherAreBothOut(t *testing.T) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	joins(t, a, b, Admin)
	joins(t, a, c, Admin)
	tells(t, a, b)
	if _, _, err := b.Revoke(c.id(), false, false); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Revoke(b.id(), false, false); err != nil {
		t.Fatal(err)
	}
	tells(t, b, a)
	tells(t, c, a)
	if trusts(a, b) || trusts(a, c) {
		t.Fatal("one of them stayed")
	}
}

func TestWhoMaySayWhat(t *testing.T) {
	a, op, v, outsider := newNode(t, "a"), newNode(t, "op"), newNode(t, "v"), newNode(t, "out")
	joins(t, a, op, Operator)
	joins(t, a, v, Viewer)
	tells(t, a, op)
	stranger := mustKey(t).Public()
	otherCluster := outsider.cluster()
	for name, c := range map[string]struct {
		record SignedRecord
	}{
		"operator introduces":          {forge(t, op, a.cluster(), payload{Kind: kindIntroduce, Key: stranger, Name: "s", Role: Viewer})},
		"operator makes itself admin":  {forge(t, op, a.cluster(), payload{Kind: kindIntroduce, Key: op.key.Public(), Name: "op", Role: Admin})},
		"viewer revokes":               {forge(t, v, a.cluster(), payload{Kind: kindRevoke, Key: a.key.Public()})},
		"viewer renames another":       {forge(t, v, a.cluster(), payload{Kind: kindName, Key: a.key.Public(), Name: "mine"})},
		"viewer forgets":               {forge(t, v, a.cluster(), payload{Kind: kindForget, Key: op.key.Public()})},
		"outsider introduces":          {forge(t, outsider, a.cluster(), payload{Kind: kindIntroduce, Key: outsider.key.Public(), Name: "out", Role: Admin})},
		"introduction of another one":  {forge(t, a, otherCluster, payload{Kind: kindIntroduce, Key: stranger, Name: "s", Role: Viewer})},
		"another founding":             {records(t, outsider)[0]},
		"a signature for another text": {func() SignedRecord { r := records(t, a)[1]; r.Payload = append([]byte(" "), r.Payload...); return r }()},
	} {
		before := string(a.Export())
		changed, rejected, err := a.Merge([]SignedRecord{c.record})
		if err != nil || rejected == nil || len(changed) != 0 || string(a.Export()) != before {
			t.Errorf("%s: changed %v, rejected %v, %v", name, changed, rejected, err)
		}
	}
	if _, err := checkRecord(forgeUnchecked(t, a, payload{Kind: kindIntroduce, Cluster: a.cluster(), Key: stranger, Name: "s", Role: 4})); err == nil {
		t.Error("an introduction above every role holds")
	}
	if _, err := op.Introduce(stranger, "s", Viewer); !fault.Is(err, fault.Denied) {
		t.Errorf("operator introduces: %v", err)
	}
	if _, _, err := op.Revoke(v.id(), false, false); !fault.Is(err, fault.Denied) {
		t.Errorf("operator revokes: %v", err)
	}
	if _, err := v.Rename(a.id(), "mine"); !fault.Is(err, fault.Denied) {
		t.Errorf("viewer renames another: %v", err)
	}
}

func TestNames(t *testing.T) {
	a, b, c := newNode(t, "box.local"), newNode(t, "Box"), newNode(t, "gamma")
	if a.Self().Name != "box" {
		t.Fatalf("founder is called %q", a.Self().Name)
	}
	joins(t, a, b, Admin)
	if b.Self().Name != "box-2" {
		t.Fatalf("second box is called %q", b.Self().Name)
	}
	joins(t, a, c, Viewer)
	if _, err := c.Rename(c.id(), "box"); !fault.Is(err, fault.NodeInUse) {
		t.Fatalf("a taken name: %v", err)
	}
	if _, err := c.Rename(c.id(), "No Name"); !fault.Is(err, fault.Usage) {
		t.Fatalf("no name: %v", err)
	}
	if m, err := c.Rename(c.id(), "delta"); err != nil || m.Name != "delta" {
		t.Fatalf("Rename: %+v %v", m, err)
	}
	changed, rejected, err := a.Merge(records(t, c))
	if err != nil || rejected != nil || len(changed) != 1 || changed[0] != c.id() {
		t.Fatalf("Merge: %v %v %v", changed, rejected, err)
	}
	if m, err := a.Rename(c.id(), "epsilon"); err != nil || m.Name != "epsilon" {
		t.Fatalf("admin renames: %+v %v", m, err)
	}
	// The older name, replayed, changes nothing.
	tells(t, c, a)
	if m, _ := a.Member(c.id()); m.Name != "epsilon" {
		t.Fatalf("an old name came back: %q", m.Name)
	}
	// A member that signs itself the name of another gets a number, not the name.
	r := forge(t, c, a.cluster(), payload{Kind: kindName, Key: c.key.Public(), Name: "box"})
	if _, _, err := a.Merge([]SignedRecord{r}); err != nil {
		t.Fatal(err)
	}
	if m, _ := a.Member(c.id()); a.Self().Name != "box" || m.Name != "box-3" {
		t.Fatalf("names: %q and %q", a.Self().Name, m.Name)
	}
}

func TestForgottenUntilMet(t *testing.T) {
	a, b, c := newNode(t, "a"), newNode(t, "b"), newNode(t, "c")
	joins(t, a, b, Admin)
	joins(t, a, c, Admin)
	if err := a.Forget(c.id()); err != nil {
		t.Fatal(err)
	}
	tells(t, a, b)
	for _, n := range []*node{a, b} {
		if m, _ := n.Member(c.id()); !m.Forgotten || !trusts(n, c) {
			t.Fatalf("%s: %+v", n.Self().Name, m)
		}
	}
	if err := b.Seen(c.id()); err != nil {
		t.Fatal(err)
	}
	if m, _ := b.Member(c.id()); m.Forgotten {
		t.Fatal("met and still forgotten")
	}
	again, err := OpenStore(b.dir, b.key, StoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if m, _ := again.Member(c.id()); m.Forgotten {
		t.Fatal("forgotten again after a restart")
	}
	if err := a.Forget(c.id()); err != nil {
		t.Fatal(err)
	}
	tells(t, a, b)
	if m, _ := b.Member(c.id()); !m.Forgotten {
		t.Fatal("forgotten a second time, and listed")
	}
}

func TestAdoptRefusesWhatDoesNotHold(t *testing.T) {
	a, b, c, d := newNode(t, "a"), newNode(t, "b"), newNode(t, "c"), newNode(t, "d")
	joins(t, a, b, Operator)
	joins(t, c, d, Admin)
	if _, err := a.Introduce(d.key.Public(), "d", Admin); err != nil {
		t.Fatal(err)
	}
	if err := d.Adopt(records(t, a), a.key.Public()); !fault.Is(err, fault.NodeInUse) {
		t.Errorf("a node of another cluster: %v", err)
	}
	e := newNode(t, "e")
	if err := e.Adopt(records(t, a), a.key.Public()); !fault.Is(err, fault.PairingFailed) {
		t.Errorf("without an introduction: %v", err)
	}
	if _, err := a.Introduce(e.key.Public(), "e", Admin); err != nil {
		t.Fatal(err)
	}
	if err := e.Adopt(records(t, a), b.key.Public()); !fault.Is(err, fault.PairingFailed) {
		t.Errorf("the inviter is no admin: %v", err)
	}
	if err := e.Adopt(records(t, a)[1:], a.key.Public()); !fault.Is(err, fault.PairingFailed) {
		t.Errorf("no founding: %v", err)
	}
	if !e.Alone() || e.cluster() == a.cluster() {
		t.Error("a refused cluster was entered")
	}
}

// TestOrderDoesNotMatter gives the same records in many orders and portions to
// fresh stores: all must come to the same members.
func TestOrderDoesNotMatter(t *testing.T) {
	nodes := []*node{newNode(t, "n0")}
	for range 6 {
		n := newNode(t, "n")
		joins(t, nodes[rand.IntN(len(nodes))], n, Admin)
		nodes = append(nodes, n)
	}
	for i := range nodes {
		for _, n := range nodes {
			tells(t, nodes[i], n)
		}
	}
	for range 3 {
		by, of := nodes[rand.IntN(len(nodes))], nodes[1+rand.IntN(len(nodes)-1)]
		_, _, _ = by.Revoke(of.id(), rand.IntN(2) == 0, false) // some may not, which is fine
		_, _ = by.Rename(of.id(), "renamed")
		if c, err := by.AddClient([]byte{byte(rand.Uint32())}, fmt.Sprint("c", rand.IntN(5)), Viewer); err == nil && rand.IntN(2) == 0 {
			_, _, _ = of.Revoke(c.ID, false, false) // it may not know the client yet
		}
	}
	// What travels is always the whole of what a node holds.
	var told [][]SignedRecord
	for _, n := range nodes {
		told = append(told, records(t, n))
	}
	var want string
	for i := range 20 {
		v, _, err := build(told[0][:1])
		if err != nil {
			t.Fatal(err)
		}
		s := newNode(t, "reader")
		s.current.Store(v)
		// Told until nothing is new: what came too early has its chain the next
		// time.
		for range nodes {
			rand.Shuffle(len(told), func(i, j int) { told[i], told[j] = told[j], told[i] })
			for _, some := range told {
				some = slices.Clone(some)
				rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
				if _, _, err := s.Merge(some); err != nil {
					t.Fatal(err)
				}
			}
		}
		got := string(s.Export())
		if i == 0 {
			want = got
		} else if got != want {
			t.Fatalf("order %d gives another set (%d and %d bytes)", i, len(got), len(want))
		}
	}
}

func TestOnChangeTellsUntilCancelled(t *testing.T) {
	a := newNode(t, "a")
	calls := 0
	cancel := a.OnChange(func() { calls++; a.Members() }) // no lock is held
	if _, err := a.Introduce(mustKey(t).Public(), "b", Admin); err != nil || calls != 1 {
		t.Fatalf("%d calls, %v", calls, err)
	}
	tells(t, a, a)
	if calls != 1 {
		t.Fatal("nothing changed, and it was said")
	}
	cancel()
	if _, err := a.Introduce(mustKey(t).Public(), "c", Admin); err != nil || calls != 1 {
		t.Fatalf("%d calls after cancel, %v", calls, err)
	}
}

func TestLongNamesStayNames(t *testing.T) {
	for _, s := range []string{"", "...", "Ådas Mac", "-x-", strings.Repeat("a", 62) + "-b", strings.Repeat("é", 200), "a--b", "x.y.z"} {
		if n := CleanName(s); !validName(n) || len(n) > 63 {
			t.Errorf("CleanName(%q) = %q", s, n)
		}
	}
	long := strings.Repeat("a", 63)
	if n := freeName(long, func(s string) bool { return s == long }); !validName(n) {
		t.Errorf("freeName = %q", n)
	}
}

func FuzzParseRecords(f *testing.F) {
	a := newNode(f, "a")
	if _, err := a.Introduce(mustKey(f).Public(), "b", Admin); err != nil {
		f.Fatal(err)
	}
	f.Add(a.Export())
	f.Add([]byte(`[null]`))
	f.Add([]byte(`[{"payload":"bnVsbA==","signer":"","signature":""}]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		rs, err := ParseRecords(data)
		if err != nil {
			return
		}
		before := len(a.Members())
		if _, _, err := a.Merge(rs); err != nil {
			t.Fatal(err)
		}
		if len(a.Members()) != before {
			t.Fatal("unsigned records changed the members")
		}
		_, _, _ = build(rs)
	})
}

// FuzzCheckRecord signs what it is given, as an admin with bad intentions would.
func FuzzCheckRecord(f *testing.F) {
	a := newNode(f, "a")
	f.Add([]byte(`{"kind":"introduce","cluster":"c","key":"AAAA","name":"x","role":3}`))
	f.Add([]byte(`null`))
	f.Add(a.current.Load().found.signed.Payload)
	f.Fuzz(func(t *testing.T, data []byte) {
		sr := SignedRecord{Payload: data, Signer: a.key.Public(), Signature: a.key.sign(append([]byte(signDomain), data...))}
		r, err := checkRecord(sr)
		if err != nil {
			return
		}
		if len(r.payload.Key) != 32 || r.signer != a.id() {
			t.Fatalf("%+v", r)
		}
		evaluate(a.current.Load().found, []*record{r})
	})
}

func hashOf(t testing.TB, s SignedRecord) []byte {
	t.Helper()
	r, err := checkRecord(s)
	if err != nil {
		t.Fatal(err)
	}
	return r.hash[:]
}

func forgeUnchecked(t testing.TB, n *node, p payload) SignedRecord {
	t.Helper()
	data, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return SignedRecord{Payload: data, Signer: n.key.Public(), Signature: n.key.sign(append([]byte(signDomain), data...))}
}

// A client is served by the node that let it in, until an admin anywhere puts it
// out, for good.
func TestClients(t *testing.T) {
	a, b, op := newNode(t, "a"), newNode(t, "b"), newNode(t, "op")
	joins(t, a, b, Admin)
	joins(t, a, op, Operator)
	laptop, phone := []byte("a public key"), []byte("another one")
	c, err := a.AddClient(laptop, "laptop", Operator)
	if err != nil || !c.Client || c.Role != Operator || c.IntroducedBy != a.id() || c.ID != ClientID(laptop) {
		t.Fatalf("%+v, %v", c, err)
	}
	tells(t, a, b)
	if got, ok := a.TrustedClient(laptop); !ok || got.ID != c.ID {
		t.Errorf("%+v, %v", got, ok)
	}
	if _, ok := b.TrustedClient(laptop); ok {
		t.Error("another node serves it")
	}
	if l := b.Clients(); len(l) != 1 || l[0].Name != "laptop" {
		t.Errorf("the other node knows of %+v", l)
	}
	if _, ok := a.TrustedClient(phone); ok {
		t.Error("a stranger is served")
	}
	if _, ok := a.Trusted(c.Key); ok || len(a.Members()) != 3 {
		t.Error("a client is taken for a node")
	}
	for name, f := range map[string]func() error{
		"a name that is taken by a client": func() error { _, err := b.AddClient(phone, "laptop", Viewer); return err },
		"a name that is taken by a node":   func() error { _, err := b.AddClient(phone, "a", Viewer); return err },
	} {
		if err := f(); !fault.Is(err, fault.NodeInUse) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"", "\x1b[31m", "A", strings.Repeat("x", 64)} {
		if _, err := a.AddClient(phone, name, Viewer); !fault.Is(err, fault.Usage) {
			t.Errorf("the name %q: %v", name, err)
		}
	}
	tells(t, a, op)
	if _, err := op.AddClient(phone, "phone", Viewer); !fault.Is(err, fault.Denied) {
		t.Errorf("an operator: %v", err)
	}
	before := string(a.Export())
	if _, rejected, err := a.Merge([]SignedRecord{forge(t, op, a.cluster(), payload{Kind: kindClient, Key: c.Key, Name: "mine", Role: Admin})}); err != nil || rejected == nil || string(a.Export()) != before {
		t.Errorf("an operator's record: %v, %v", rejected, err)
	}
	// It stays over a restart, in a file that a program without clients refuses.
	again, err := OpenStore(a.dir, a.key, StoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := again.TrustedClient(laptop); !ok {
		t.Error("forgotten")
	}
	if data, err := os.ReadFile(filepath.Join(a.dir, TrustFile)); err != nil || !strings.Contains(string(data), `"schema": 2`) {
		t.Errorf("%v: %s", err, data[:40])
	}
	// Put out from another node; a copy of its introduction brings nothing back.
	old := records(t, a)
	revoked, stay, err := b.Revoke(c.ID, false, false)
	if err != nil || len(revoked) != 1 || !revoked[0].Revoked || !revoked[0].Client || len(stay) != 0 {
		t.Fatalf("%+v, %+v, %v", revoked, stay, err)
	}
	tells(t, b, a)
	if _, _, err := a.Merge(old); err != nil {
		t.Fatal(err)
	}
	if _, ok := a.TrustedClient(laptop); ok {
		t.Error("a revoked client is served")
	}
	if _, err := a.AddClient(laptop, "laptop", Admin); err != nil {
		t.Errorf("the name is not free: %v", err)
	}
	if _, ok := a.TrustedClient(laptop); ok {
		t.Error("a revoked key is back")
	}
	// Who goes takes the clients along, or they are listed.
	if _, err := b.AddClient(phone, "phone", Viewer); err != nil {
		t.Fatal(err)
	}
	tells(t, b, a)
	if _, stay, err := a.Revoke(b.id(), false, true); err != nil || len(stay) != 1 || stay[0].Name != "phone" {
		t.Errorf("%+v, %v", stay, err)
	}
	if revoked, _, err := a.Revoke(b.id(), true, false); err != nil || len(revoked) != 2 {
		t.Errorf("%+v, %v", revoked, err)
	}
	if l := a.Clients(); !slices.ContainsFunc(l, func(m Member) bool { return m.Name == "phone" && m.Revoked }) {
		t.Errorf("%+v", l)
	}
}
