package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/schema"
)

// TrustFile is the name of the trust file in the agent's state directory.
const TrustFile = "trust.json"

// Role is what a node may do in the cluster. Each includes those below it.
type Role int

// The roles.
const (
	Viewer   Role = 1 // may read the state
	Operator Role = 2 // may also copy and place
	Admin    Role = 3 // may also introduce and revoke nodes
)

// Member is a node as trust sees it.
type Member struct {
	ID   NodeID
	Key  ed25519.PublicKey
	Name string // unique in the cluster
	Role Role
	// IntroducedBy is who let it in; "" for the founder.
	IntroducedBy NodeID
	// IntroducedAt is by the introducer's clock, for people.
	IntroducedAt time.Time
	// Revoked is set for a node that was put out for good.
	Revoked   bool
	RevokedBy NodeID
	RevokedAt time.Time
	// Forgotten is set for a node that somebody asked to list no more and that
	// this node has not met since. It is still trusted.
	Forgotten bool
	// Self is set for this node.
	Self bool
	// Client is set for what is no node: a program on another machine that one
	// node, IntroducedBy, serves. Its Key is the SHA-256 of its public key.
	Client bool
}

// SignedRecord is one record of trust with its signature. What it means is the
// matter of this package.
type SignedRecord struct {
	Payload   []byte `json:"payload"`
	Signer    []byte `json:"signer"`    // Ed25519 public key
	Signature []byte `json:"signature"` // over a domain string and Payload
}

// StoreOptions are the settings of a Store.
type StoreOptions struct {
	// Name is the name of this node where it founds a cluster; any host name
	// will do, see CleanName.
	Name string
	// ClusterName is the name of a cluster that it founds; "" makes one of Name.
	ClusterName string
	// Clock tells the times that people see; nil is the system's.
	Clock host.Clock
}

// trustSchema is the version of the trust file. One that holds no client can be
// read by programs that know none.
const (
	trustSchema = 2
	noClients   = 1
)

// trustFile is the content of the trust file.
type trustFile struct {
	Schema  int            `json:"schema"`
	Records []SignedRecord `json:"records"`
	// Seen has, for each node that was forgotten and met again, the sequence of
	// the newest forget record before that.
	Seen map[NodeID]uint64 `json:"seen,omitempty"`
}

// Store is the trust store of one node. Its methods may be called at once from
// several goroutines.
type Store struct {
	path string
	key  *Key
	o    StoreOptions

	mu        sync.Mutex // held while changing
	seen      map[NodeID]uint64
	callbacks map[int]func()
	nextCall  int

	current atomic.Pointer[view]
}

// OpenStore reads the trust file in dir, or founds a cluster of key alone.
// Faults: FILE_IO when it cannot be read or is corrupt (it is never replaced),
// STATE_TOO_NEW.
func OpenStore(dir string, key *Key, o StoreOptions) (*Store, error) {
	if o.Clock == nil {
		o.Clock = host.SystemClock{}
	}
	s := &Store{
		path: filepath.Join(dir, TrustFile), key: key, o: o,
		seen: map[NodeID]uint64{}, callbacks: map[int]func(){},
	}
	data, err := readSmall(s.path, 2*maxExport)
	if errors.Is(err, fs.ErrNotExist) {
		v, err := s.foundCluster()
		if err != nil {
			return nil, err
		}
		return s, s.commit(v, s.seen)
	}
	if err != nil {
		return nil, s.fileFault(err)
	}
	if err := s.load(data); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Store) load(data []byte) error {
	if err := schema.Check(data, trustSchema, s.path); err != nil {
		return err
	}
	var file trustFile
	if err := json.Unmarshal(data, &file); err != nil {
		return s.fileFault(err)
	}
	v, dropped, err := build(file.Records)
	if err != nil {
		return s.fileFault(err)
	}
	if len(dropped) > 0 {
		// We write nothing that does not hold: somebody else has been at it.
		return s.fileFault(errors.Join(dropped...))
	}
	if file.Seen != nil {
		s.seen = file.Seen
	}
	s.current.Store(v)
	return nil
}

// build checks a whole set, founding included.
func build(records []SignedRecord) (v *view, dropped []error, err error) {
	var found *record
	var rest []*record
	for _, sr := range records {
		r, err := checkRecord(sr)
		switch {
		case err != nil:
			dropped = append(dropped, err)
		case r.payload.Kind == kindFound && found != nil:
			return nil, nil, errors.New("it holds two foundings")
		case r.payload.Kind == kindFound:
			found = r
		default:
			rest = append(rest, r)
		}
	}
	if found == nil {
		return nil, nil, errors.New("it holds no founding of a cluster")
	}
	v, more := evaluate(found, rest)
	return v, append(dropped, more...), nil
}

func (s *Store) foundCluster() (*view, error) {
	nonce := make([]byte, 16)
	if _, err := rand.Read(nonce); err != nil {
		return nil, fmt.Errorf("found a cluster: %w", err)
	}
	name := CleanName(s.o.Name)
	cluster := s.o.ClusterName
	if cluster == "" {
		cluster = name
	}
	found, err := signRecord(s.key, payload{
		Kind: kindFound, Key: s.key.Public(), Name: name, Role: Admin, Sequence: 1,
		Time: s.o.Clock.Now().Unix(), ClusterName: cluster, Nonce: nonce,
	})
	if err != nil {
		return nil, fmt.Errorf("found a cluster: %w", err)
	}
	v, _ := evaluate(found, nil)
	return v, nil
}

// commit writes and then shows a new view. The caller holds mu or is alone.
func (s *Store) commit(v *view, seen map[NodeID]uint64) error {
	file := trustFile{Schema: trustSchema, Records: v.signed(), Seen: seen}
	if !slices.ContainsFunc(v.records, func(r *record) bool { return r.payload.Kind == kindClient }) {
		file.Schema = noClients
	}
	data, err := json.MarshalIndent(file, "", "  ")
	if err != nil {
		return s.fileFault(err)
	}
	if err := replaceFile(s.path, append(data, '\n')); err != nil {
		f := s.fileFault(err)
		f.What, f.Fix = "write the trust store", "make room or give the agent the right to write there"
		return f
	}
	s.seen = seen
	s.current.Store(v)
	return nil
}

func (v *view) signed() []SignedRecord {
	records := make([]SignedRecord, 0, len(v.records)+1)
	records = append(records, v.found.signed)
	for _, r := range v.records {
		records = append(records, r.signed)
	}
	return records
}

func (s *Store) fileFault(err error) *fault.Fault {
	return fault.New(fault.FileIO, "read the trust store", err,
		"restore the file from a backup; without one, move it away and pair this node again").At(s.path)
}

// Self returns this node. Its Role is 0 and Revoked set where it was put out.
func (s *Store) Self() Member {
	m, _ := s.Member(s.key.ID())
	return m
}

// Cluster returns ID and name of the cluster.
func (s *Store) Cluster() (id, name string) {
	v := s.current.Load()
	return v.cluster, v.name
}

// Members returns everybody ever let in, sorted by ID, revoked ones last.
func (s *Store) Members() []Member {
	v, seen := s.now()
	members := make([]Member, len(v.members))
	for i, m := range v.members {
		members[i] = s.dress(v, seen, m)
	}
	return members
}

// Member returns the member of that ID, revoked ones too.
func (s *Store) Member(id NodeID) (Member, bool) {
	v, seen := s.now()
	m, ok := v.byID[id]
	if !ok {
		return Member{}, false
	}
	return s.dress(v, seen, *m), true
}

func (s *Store) now() (*view, map[NodeID]uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current.Load(), s.seen // the map is replaced, never written to
}

// dress adds what this node alone knows.
func (s *Store) dress(v *view, seen map[NodeID]uint64, m Member) Member {
	m.Self = m.ID == s.key.ID()
	if f := v.forgets[m.ID]; f != nil && !m.Self {
		m.Forgotten = f.payload.Sequence > seen[m.ID]
	}
	return m
}

// Trusted returns the member with that key if it is in the cluster now.
func (s *Store) Trusted(pub ed25519.PublicKey) (Member, bool) {
	if len(pub) != ed25519.PublicKeySize {
		return Member{}, false
	}
	m, ok := s.current.Load().byID[IDOf(pub)]
	if !ok || m.Revoked || !m.Key.Equal(pub) {
		return Member{}, false
	}
	member := *m
	member.Self = member.ID == s.key.ID()
	return member, true
}

// Introduce lets a node in, as this node's word. A name that is taken gets a
// number. A node that is in already with that role or more stays as it is.
// Faults: DENIED when this node is no admin, role is above its own, or the key
// was revoked.
func (s *Store) Introduce(pub ed25519.PublicKey, name string, role Role) (Member, error) {
	what := "let a node into the cluster"
	if len(pub) != ed25519.PublicKeySize || role < Viewer || role > Admin {
		return Member{}, fault.Newf(fault.Usage, "", "%s is no key or has no role", what)
	}
	id := IDOf(pub)
	err := s.change(func(v *view) ([]payload, error) {
		if err := s.needRole(v, Admin, what); err != nil {
			return nil, err
		}
		for _, r := range v.records {
			if r.payload.Kind == kindRevoke && r.subject == id {
				return nil, denied(what, id.Short()+" was revoked, which is for good",
					"run `tbcluster pair --new-identity` on that machine and pair again")
			}
		}
		if m, ok := v.byID[id]; ok && m.Role >= role {
			return nil, nil
		}
		name := freeName(CleanName(name), func(n string) bool {
			return slices.ContainsFunc(append(slices.Clone(v.members), v.clients...), func(m Member) bool {
				return m.Name == n && m.ID != id && !m.Revoked
			})
		})
		return []payload{{Kind: kindIntroduce, Key: pub, Name: name, Role: role}}, nil
	})
	if err != nil {
		return Member{}, err
	}
	m, _ := s.Member(id)
	return m, nil
}

// Revoke puts a node out for good, and with it whom it introduced when
// withIntroduced is set. It returns who is out now, and whom it introduced and
// who stays. With dry set it only says so. Faults: NODE_UNKNOWN, DENIED.
func (s *Store) Revoke(id NodeID, withIntroduced, dry bool) (revoked, stay []Member, err error) {
	what := "revoke a node"
	err = s.change(func(v *view) ([]payload, error) {
		if err := s.needRole(v, Admin, what); err != nil {
			return nil, err
		}
		m, ok := Member{}, false
		if node := v.byID[id]; node != nil {
			m, ok = *node, true
		} else {
			m, ok = v.client(id)
		}
		if !ok {
			return nil, unknown(id)
		}
		if id == s.key.ID() {
			return nil, denied(what, "a node does not revoke itself", "run it on another node of the cluster")
		}
		out := map[NodeID]bool{id: true}
		if withIntroduced {
			v.addIntroduced(out, s.key.ID())
		}
		for _, other := range append(slices.Clone(v.members), v.clients...) {
			switch {
			case other.Revoked:
			case out[other.ID]:
				revoked = append(revoked, other)
			case other.IntroducedBy == id:
				stay = append(stay, other)
			}
		}
		if m.Revoked && len(revoked) == 0 || dry {
			return nil, nil
		}
		var payloads []payload
		for _, gone := range revoked {
			p := payload{Kind: kindRevoke, Key: gone.Key}
			for _, r := range v.records {
				// All that stands now goes on standing, the introductions of
				// those who go too: a tombstone outranks them, and people
				// still see who let them in.
				if r.signer == gone.ID && v.standing[r.hash] {
					p.Keep = append(p.Keep, r.hash[:])
				}
			}
			payloads = append(payloads, p)
		}
		return payloads, nil
	})
	if err != nil {
		return nil, nil, err
	}
	for i := range revoked {
		m, ok := s.Member(revoked[i].ID)
		if revoked[i].Client {
			m, ok = s.current.Load().client(revoked[i].ID)
		}
		if ok {
			m.Name = revoked[i].Name
			revoked[i] = m
		}
	}
	return revoked, stay, nil
}

// addIntroduced adds to out everybody who is in by the word of those in out
// alone, however many steps away, but never self.
func (v *view) addIntroduced(out map[NodeID]bool, self NodeID) {
	for again := true; again; {
		again = false
		for _, m := range v.members {
			if out[m.ID] || m.IntroducedBy == "" || m.ID == self {
				continue
			}
			only := true
			for _, r := range v.records {
				if r.payload.Kind == kindIntroduce && r.subject == m.ID && v.standing[r.hash] && !out[r.signer] {
					only = false
				}
			}
			if only {
				out[m.ID], again = true, true
			}
		}
	}
	for _, c := range v.clients {
		if out[c.IntroducedBy] {
			out[c.ID] = true
		}
	}
}

// ClientID returns the ID of a client by its public key (SubjectPublicKeyInfo,
// DER).
func ClientID(spki []byte) NodeID {
	sum := sha256.Sum256(spki)
	return IDOf(sum[:])
}

// AddClient lets a program in that this node is to serve, by its public key
// (SubjectPublicKeyInfo, DER). Faults: DENIED when this node is no admin,
// NODE_IN_USE where a node or client has the name, USAGE where it is none.
func (s *Store) AddClient(spki []byte, name string, role Role) (Member, error) {
	what := "let a client in"
	if !validName(name) || role < Viewer || role > Admin {
		return Member{}, fault.Newf(fault.Usage, "use 1 to 63 of a-z, 0-9 and \"-\"", "%q is no name of a client", name).With("field", "name")
	}
	sum := sha256.Sum256(spki)
	err := s.change(func(v *view) ([]payload, error) {
		if err := s.needRole(v, Admin, what); err != nil {
			return nil, err
		}
		for _, m := range append(slices.Clone(v.members), v.clients...) {
			if m.Name == name && !m.Revoked {
				return nil, fault.Newf(fault.NodeInUse, "choose another name; `tbcluster pair --list` shows those that are taken, `tbcluster pair --revoke` frees one", "%s is called %q already", m.ID.Short(), name)
			}
		}
		return []payload{{Kind: kindClient, Key: sum[:], Name: name, Role: role}}, nil
	})
	if err != nil {
		return Member{}, err
	}
	m, _ := s.current.Load().client(IDOf(sum[:]))
	return m, nil
}

// Clients returns all clients of all nodes, revoked ones last.
func (s *Store) Clients() []Member { return slices.Clone(s.current.Load().clients) }

// TrustedClient returns the client with that public key (SubjectPublicKeyInfo,
// DER) if this node serves it: it let it in, and nobody has put out either.
func (s *Store) TrustedClient(spki []byte) (Member, bool) {
	v := s.current.Load()
	self, ok := v.byID[s.key.ID()]
	c, known := v.client(ClientID(spki))
	if !ok || self.Revoked || !known || c.Revoked || c.IntroducedBy != s.key.ID() {
		return Member{}, false
	}
	return c, true
}

// Rename gives a node another name. Faults: USAGE, NODE_UNKNOWN, DENIED (only an
// admin renames others), NODE_IN_USE when the name is taken.
func (s *Store) Rename(id NodeID, name string) (Member, error) {
	if !validName(name) {
		return Member{}, fault.Newf(fault.Usage, "use 1 to 63 of a-z, 0-9 and \"-\"", "%q is no node name", name).With("field", "name")
	}
	err := s.change(func(v *view) ([]payload, error) {
		m, ok := v.byID[id]
		if !ok || m.Revoked {
			return nil, unknown(id)
		}
		need := Admin
		if id == s.key.ID() {
			need = Viewer
		}
		if err := s.needRole(v, need, "rename "+m.Name); err != nil {
			return nil, err
		}
		for _, other := range v.members {
			if other.Name == name && other.ID != id && !other.Revoked {
				f := fault.Newf(fault.NodeInUse, "choose another name", "rename %s to %s", m.Name, name)
				f.Why = "node " + other.ID.Short() + " has that name"
				return nil, f
			}
		}
		if m.Name == name {
			return nil, nil
		}
		return []payload{{Kind: kindName, Key: m.Key, Name: name}}, nil
	})
	if err != nil {
		return Member{}, err
	}
	m, _ := s.Member(id)
	return m, nil
}

// Forget asks all nodes to list a node no more until they meet it again.
// Faults: NODE_UNKNOWN, DENIED.
func (s *Store) Forget(id NodeID) error {
	return s.change(func(v *view) ([]payload, error) {
		m, ok := v.byID[id]
		if !ok {
			return nil, unknown(id)
		}
		if id == s.key.ID() {
			return nil, denied("forget "+m.Name, "a node does not forget itself", "run it on another node of the cluster")
		}
		if err := s.needRole(v, Operator, "forget "+m.Name); err != nil {
			return nil, err
		}
		return []payload{{Kind: kindForget, Key: m.Key}}, nil
	})
}

// Seen says that the node was met: if it was forgotten, it is listed again.
func (s *Store) Seen(id NodeID) error {
	s.mu.Lock()
	v := s.current.Load()
	f := v.forgets[id]
	if f == nil || s.seen[id] >= f.payload.Sequence {
		s.mu.Unlock()
		return nil
	}
	seen := maps.Clone(s.seen)
	seen[id] = f.payload.Sequence
	err := s.commit(v, seen)
	return s.unlock(err)
}

// Leave goes out of the cluster into a new one of this node alone. The others
// are not told: revoke it there.
func (s *Store) Leave() error {
	s.mu.Lock()
	v, err := s.foundCluster()
	if err == nil {
		err = s.commit(v, map[NodeID]uint64{})
	}
	return s.unlock(err)
}

// change signs what f decides on, as the next records of this node.
func (s *Store) change(f func(*view) ([]payload, error)) error {
	s.mu.Lock()
	v := s.current.Load()
	payloads, err := f(v)
	if err != nil || len(payloads) == 0 {
		s.mu.Unlock()
		return err
	}
	records := append([]*record(nil), v.records...)
	for i, p := range payloads {
		p.Cluster, p.Sequence, p.Time = v.cluster, v.top+1+uint64(i), s.o.Clock.Now().Unix()
		r, err := signRecord(s.key, p)
		if err != nil {
			s.mu.Unlock()
			return fault.New(fault.Internal, "sign a record of trust", err, "")
		}
		records = append(records, r)
	}
	next, dropped := evaluate(v.found, records)
	if err := errors.Join(dropped...); err != nil {
		s.mu.Unlock()
		return fault.New(fault.Internal, "change who is in the cluster", err, "")
	}
	if len(next.records) > maxRecords {
		s.mu.Unlock()
		return tooMany()
	}
	return s.unlock(s.commit(next, s.seen))
}

// unlock ends a change and tells who asked for it.
func (s *Store) unlock(err error) error {
	calls := make([]func(), 0, len(s.callbacks))
	if err == nil {
		for _, f := range s.callbacks {
			calls = append(calls, f)
		}
	}
	s.mu.Unlock()
	for _, f := range calls {
		f()
	}
	return err
}

// Export returns all records, as content of section "trust". The same set is
// always the same bytes.
func (s *Store) Export() []byte {
	data, err := json.Marshal(s.current.Load().signed())
	if err != nil {
		panic("identity: " + err.Error()) // byte slices always marshal
	}
	return data
}

// Merge adds records of others to the store. Every one is checked; those that
// do not hold are left out and named by rejected, without harm to the rest.
// changed names whose membership, name, role or mark changed.
func (s *Store) Merge(records []SignedRecord) (changed []NodeID, rejected, err error) {
	var bad []error
	var fresh []*record
	s.mu.Lock()
	v := s.current.Load()
	have := map[string]bool{string(v.found.signed.Payload): true}
	for _, r := range v.records {
		have[string(r.signed.Payload)+string(r.signed.Signer)] = true
	}
	for _, sr := range records {
		if have[string(sr.Payload)+string(sr.Signer)] {
			continue
		}
		r, err := checkRecord(sr)
		switch {
		case err != nil:
			bad = append(bad, err)
		case r.payload.Kind == kindFound && r.hash == v.found.hash:
		default:
			fresh = append(fresh, r)
		}
	}
	next, dropped := evaluate(v.found, append(append([]*record(nil), v.records...), fresh...))
	rejected = errors.Join(append(bad, dropped...)...)
	if len(next.records) > maxRecords {
		s.mu.Unlock()
		return nil, rejected, tooMany()
	}
	if next.same(v) {
		s.mu.Unlock()
		return nil, rejected, nil
	}
	changed = next.differences(v)
	err = s.unlock(s.commit(next, s.seen))
	return changed, rejected, err
}

func (v *view) same(old *view) bool {
	return slices.EqualFunc(v.records, old.records, func(a, b *record) bool { return a.hash == b.hash })
}

func (v *view) differences(old *view) []NodeID {
	var ids []NodeID
	for _, m := range v.members {
		o, ok := old.byID[m.ID]
		if !ok || o.Name != m.Name || o.Role != m.Role || o.Revoked != m.Revoked || old.forgets[m.ID] != v.forgets[m.ID] {
			ids = append(ids, m.ID)
		}
	}
	for _, m := range old.members {
		if _, ok := v.byID[m.ID]; !ok {
			ids = append(ids, m.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// Alone says whether nobody but this node is in its cluster.
func (s *Store) Alone() bool { return s.current.Load().alone(s.key.ID()) }

func (v *view) alone(self NodeID) bool {
	for _, m := range v.members {
		if m.ID != self && !m.Revoked {
			return false
		}
	}
	return true
}

// Adopt leaves the cluster of this node alone and enters the one of records,
// in which inviter must be an admin and this node a member. Faults: NODE_IN_USE
// where this node is in another cluster of more than itself, PAIRING_FAILED
// where the records do not hold.
func (s *Store) Adopt(records []SignedRecord, inviter ed25519.PublicKey) error {
	what := "enter the cluster of the other node"
	next, dropped, err := build(records)
	if err == nil && len(dropped) > 0 {
		err = errors.Join(dropped...)
	}
	if err != nil {
		return fault.New(fault.PairingFailed, what, err, "update tbcluster on both nodes and pair again")
	}
	id := IDOf(inviter)
	if m, ok := next.byID[id]; !ok || m.Revoked || m.Role < Admin || !m.Key.Equal(inviter) {
		return fault.New(fault.PairingFailed, what, errors.New("the inviting node is no admin of it"), "run `tbcluster pair` on a node that is")
	}
	if m, ok := next.byID[s.key.ID()]; !ok || m.Revoked {
		return fault.New(fault.PairingFailed, what, errors.New("this node was put out of it"), "run `tbcluster pair --new-identity` here and pair again")
	}
	s.mu.Lock()
	v := s.current.Load()
	if v.cluster == next.cluster {
		s.mu.Unlock()
		_, _, err := s.Merge(records)
		return err
	}
	if !v.alone(s.key.ID()) {
		s.mu.Unlock()
		return s.otherCluster(what)
	}
	return s.unlock(s.commit(next, map[NodeID]uint64{}))
}

func (s *Store) otherCluster(what string) *fault.Fault {
	f := fault.Newf(fault.NodeInUse,
		"run `tbcluster pair` here and type its code at the other node; to bring this node over instead, run `tbcluster pair --new-identity` here first",
		"%s", what)
	f.Why = fmt.Sprintf("this node is in cluster %s with %d others", s.current.Load().name, s.others())
	return f
}

func (s *Store) others() int {
	n := 0
	for _, m := range s.current.Load().members {
		if !m.Revoked && m.ID != s.key.ID() {
			n++
		}
	}
	return n
}

// OnChange calls f after every change, from no particular goroutine and with no
// lock held, until cancel is called.
func (s *Store) OnChange(f func()) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nextCall
	s.nextCall++
	s.callbacks[n] = f
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.callbacks, n)
	}
}

func (s *Store) needRole(v *view, need Role, what string) error {
	m, ok := v.byID[s.key.ID()]
	switch {
	case !ok || m.Revoked:
		return denied(what, "this node was put out of its cluster", "run `tbcluster pair --new-identity` here and pair again")
	case m.Role < need:
		return denied(what, fmt.Sprintf("this node is %s, and only %s may", m.Role, need), "run it on a node with that role")
	}
	return nil
}

func denied(what, why, fix string) *fault.Fault {
	f := fault.Newf(fault.Denied, fix, "%s", what)
	f.Why = why
	return f
}

func unknown(id NodeID) *fault.Fault {
	return fault.Newf(fault.NodeUnknown, "`tbcluster pair --list` shows who is", "node %s is not in the cluster", id.Short())
}

func tooMany() *fault.Fault {
	f := fault.Newf(fault.Denied, "found a new cluster", "add records of trust")
	f.Why = fmt.Sprintf("a cluster has room for %d", maxRecords)
	return f
}
